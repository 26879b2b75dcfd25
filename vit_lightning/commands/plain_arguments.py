"""Arguments of commands without a config: words and flags to the fields of a dataclass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from vit_lightning.config.check_options import find_problems
from vit_lightning.config.files import parse_yaml, split_words
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse

T = TypeVar("T")


def read_plain(kind: type[T], arguments: Sequence[str], positional: str = "") -> T:
    """Returns the options of a command line as a dataclass, whose own checks raise UserError as well.

    Args:
        kind: dataclass with a field for each flag (``--image_size`` or ``--image-size``) and each positional argument.
        arguments: the command line, without the command.
        positional: the positional arguments as the usage line shows them; ``[IMAGES ...]`` is a list in ``images``,
            and ``--out=DIR`` is none.

    Raises:
        UserError: all unknown, missing, repeated and wrong arguments.
    """
    flags, words = split_words(arguments)
    given: dict[str, Any] = {}
    problems = []
    kinds = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in flags:
        name = key.replace("-", "_")
        group, _, inside = name.partition(".")
        if inside and kinds.get(group, "").startswith("dict"):
            if not isinstance(given.setdefault(group, {}), dict) or inside in given[group]:
                problems.append(f"{key} is given twice")
                continue
            given[group][inside] = parse_yaml(value, f"{key}={value}")
            continue
        if name == "config" and value[:1] != "{":
            takes = "takes no config file, but {key: value}" if name in kinds else "takes no config"
            problems.append(f"config={value}: this command {takes}")
            continue
        if name in given:
            problems.append(f"{key} is given twice ({given[name]} and {value})")
        given[name] = parse_yaml(value, f"{key}={value}") if value[:1] in ("[", "{") else value
    places = re.findall(r"(?<![=A-Z_])([A-Z_]+)( \.\.\.)?", positional)
    for name, several in places:
        taken, words = (words, []) if several else (words[:1], words[1:])
        if taken:
            given[name.lower()] = taken if several else taken[0]
    problems += [f"{word}: unexpected argument (options are given as --key=value)" for word in words]
    required = [field.name for field in fields(kind) if (field.default, field.default_factory) == (MISSING, MISSING)]  # type: ignore[arg-type]
    for name in required:
        if name not in given:
            is_word = name.upper() in dict(places)
            problems.append(f"{name.upper() if is_word else '--' + name.replace('_', '-')} is missing")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, instantiate=False)
    found, _ = find_problems(given, parser)
    refuse(problems, (problem.text for problem in found if not problem.missing))
    try:
        return kind(**vars(parser.parse_object(given)))
    except UserError as error:
        raise UserError(error.problems) from error
