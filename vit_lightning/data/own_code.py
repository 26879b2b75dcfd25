"""Classes and functions of others: arguments from plain values, errors in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from vit_lightning.errors import UserError, with_place
from vit_lightning.limits import refuse


def argument_names(own: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments of a class or function."""
    return _add(ArgumentParser(), own, set())


def make(own: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a class or function with plain arguments, of which those with a ``class_path`` are made first.

    Raises:
        UserError: it raises an error, whose file and line are named.
    """
    try:
        if not arguments:
            return own()
        parser = _parser(own, arguments)
        return own(**vars(parser.instantiate(parser.parse_object({"own": dict(arguments)}))["own"]))
    except UserError:
        raise
    except Exception as fault:
        raise UserError(with_place(fault)) from fault


def plain_arguments(own: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with values of the types that a class or function declares, as plain data.

    Raises:
        UserError: all wrong values.
    """
    plain: dict[str, Any] = {}
    problems = []
    for key, value in arguments.items():
        try:
            parser = _parser(own, {key: value})
            plain |= yaml.safe_load(parser.dump(parser.parse_object({"own": {key: value}})))["own"]
        except ArgumentError as fault:
            kinds = dict.fromkeys(re.findall(r"Expected an? (?:<class ')?([\w.]+)", str(fault)))
            problems.append(f"{key}={value} must be of type {' or '.join(kinds) or 'that it declares'}")
    refuse(problems)
    return plain


def _parser(own: Callable[..., Any], arguments: Mapping[str, Any]) -> ArgumentParser:
    """Returns a parser of the given arguments alone."""
    parser = ArgumentParser(exit_on_error=False)
    _add(parser, own, {*argument_names(own)} - {*arguments})
    return parser


def _add(parser: ArgumentParser, own: Callable[..., Any], without: set[str]) -> list[str]:
    skip: set[str | int] = {*without}
    if isinstance(own, type):
        names = parser.add_class_arguments(own, "own", fail_untyped=False, instantiate=False, skip=skip)
    else:
        names = parser.add_function_arguments(own, "own", fail_untyped=False, skip=skip)
    return [str(name).removeprefix("own.") for name in names]
