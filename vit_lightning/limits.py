"""Limits of the values of options: each function returns the problems that it finds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from vit_lightning.errors import UserError
from vit_lightning.spelling import meant

T = TypeVar("T")

Limit = tuple[str, object, bool, str]
"""An option, its value, whether the value is allowed, and what it must be."""


def refuse(*problems: Iterable[str], prefix: str = "") -> None:
    """Raises all problems as one error, if there are any."""
    if found := [f"{prefix}{problem}" for group in problems for problem in group]:
        raise UserError(found)


def problems_of(*limits: Limit) -> list[str]:
    """Returns a problem for each value that is not allowed."""
    return [f"{key}={value} must be {rule}" for key, value, allowed, rule in limits if not allowed]


def at_least(least: float, **values: float | None) -> list[str]:
    """Returns a problem for each value below the least that is allowed; None stands for no value."""
    low = {name: value for name, value in values.items() if value is not None and not value >= least}  # nan too
    return [f"{name}={value} must be at least {least}" for name, value in low.items()]


def probabilities(**values: float | None) -> list[str]:
    """Returns a problem for each value outside [0, 1); None stands for no value."""
    odd = {name: value for name, value in values.items() if value is not None and not 0.0 <= value < 1.0}
    return [f"{name}={value} must be at least 0 and below 1" for name, value in odd.items()]


def choice(name: str, value: object, choices: Collection[str]) -> list[str]:
    """Returns a problem for text that is none of the choices; any other value is a part of the user's own."""
    known = not isinstance(value, str) or value in choices
    return [] if known else [f"{name}={value} must be one of {', '.join(choices)}{meant(str(value), choices)}"]


def is_plain_name(name: str) -> bool:
    """Whether a text can name a file in a folder."""
    return Path(name).name == name and name not in ("", "..")


def chosen(value: str | T, choices: Mapping[str, T]) -> T:
    """Returns what a name stands for; for an unknown name, which ``choice`` reports, the first."""
    return choices.get(value, next(iter(choices.values()))) if isinstance(value, str) else value
