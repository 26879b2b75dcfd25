"""Classes and functions of others: arguments from plain values, random numbers from a key, errors in one line."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from vit_lightning.errors import UserError, with_place
from vit_lightning.limits import refuse

Own = type[Any] | Callable[..., Any]
"""A class or function of others; a config names it by its path."""


def name_of(own: Any) -> str:
    """Returns the module and name of a class, a function, or the class of an object."""
    named = own if hasattr(own, "__qualname__") else type(own)
    return f"{named.__module__}.{named.__qualname__}"


def argument_names(own: Own) -> list[str]:
    """Returns the names of the arguments of a class or function."""
    return _add(ArgumentParser(), own, set())


def make(own: Own, arguments: Mapping[str, Any]) -> Any:
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


def plain_arguments(own: Own, arguments: Mapping[str, Any]) -> dict[str, Any]:
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


def _parser(own: Own, arguments: Mapping[str, Any]) -> ArgumentParser:
    """Returns a parser of the given arguments alone."""
    parser = ArgumentParser(exit_on_error=False)
    _add(parser, own, {*argument_names(own)} - {*arguments})
    return parser


def _add(parser: ArgumentParser, own: Own, without: set[str]) -> list[str]:
    skip: set[str | int] = {*without}
    if isinstance(own, type):
        names = parser.add_class_arguments(own, "own", fail_untyped=False, instantiate=False, skip=skip)
    else:
        names = parser.add_function_arguments(own, "own", fail_untyped=False, skip=skip)
    return [str(name).removeprefix("own.") for name in names]


@contextmanager
def seeded() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds torch (on the CPU), ``random`` and numpy with a key; restores their states after."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield _seed
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
