"""Limits of the values of options: each function returns the problems that it finds; and what a wrong name meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from vit_lightning.errors import UserError

T = TypeVar("T")

Limit = tuple[str, object, bool, str]
"""An option, its value, whether the value is allowed, and what it must be."""

USUAL_NAMES = {
    "epochs": "max_epochs",
    "steps": "max_steps",
    "gpus": "devices",
    "grad_clip": "gradient_clip_val",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "seed": "seed_everything",
    "bs": "batch_size",
    "workers": "num_workers",
    "heads": "num_heads",
    **dict.fromkeys(("layers", "num_layers"), "depth"),
    **dict.fromkeys(("dim", "embed_dim", "hidden_size"), "emb_size"),
}
"""Names of options in other programs, and ours."""


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


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns the known names that a wrong one may have meant, the most likely first."""
    lower = {item.lower(): item for item in known}
    usual = USUAL_NAMES.get(name)
    word = usual if usual in lower else name.lower()
    swapped = [item for item in lower if sorted(item) == sorted(word)]
    found = swapped or difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)
    return [lower[item] for item in found]


def meant(name: str, known: Iterable[str]) -> str:
    """Returns a hint in brackets on the known name that a wrong one may have meant; empty where there is none."""
    return "".join(f" (did you mean {item}?)" for item in near(name, known)[:1])


def chosen(value: str | T, choices: Mapping[str, T]) -> T:
    """Returns what a name stands for; for an unknown name, which ``choice`` reports, the first."""
    return choices.get(value, next(iter(choices.values()))) if isinstance(value, str) else value
