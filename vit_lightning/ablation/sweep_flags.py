"""The flags that W&B's agent gives a run of an ablation, as keys of a config."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from vit_lightning.ablation.plan import grid_name, wandb_words
from vit_lightning.config.files import parse_yaml, read_flags, word
from vit_lightning.errors import UserError


def plain_flags(flags: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns the flags that W&B's agent gives a run into keys of a config: those of its arm, and its place in W&B.

    Raises:
        UserError: they name an arm but no ablation.
    """
    given = dict(flags)
    rest = [(key, _plain_word(value)) for key, value in flags if key not in ("ablation", "arm")]
    if "ablation" not in given:
        if "arm" in given:
            raise UserError(f"arm={given['arm']} is for a run of an ablation: --ablation is missing")
        return list(flags)
    rules, arm = _mapping(given, "ablation"), _mapping(given, "arm")
    if arm:
        name = str(arm.pop("name", "arm"))
    else:
        keys = rules.get("baseline")
        words = dict(rest)
        levels = {key: parse_yaml(words.get(key, ""), key) for key in keys} if isinstance(keys, dict) else {}
        name = grid_name(levels) or "arm"
    shown = wandb_words(str(rules.get("name")), name, given.get("seed_everything", "0"))
    return [*rest, *((key, word(value)) for key, value in arm.items()), *read_flags(shown)]


def _plain_word(text: str) -> str:
    """Turns a value that W&B's agent wrote as Python into the text of a flag."""
    if text not in ("True", "False", "None") and not text.startswith(("[", "{")):
        return text
    try:
        return word(ast.literal_eval(text))
    except (ValueError, SyntaxError):  # not Python
        return text


def _mapping(given: Mapping[str, str], key: str) -> dict[str, Any]:
    text = given.get(key, "{}")
    try:
        value = ast.literal_eval(text)  # the agent writes values as Python does
    except (ValueError, SyntaxError):
        value = parse_yaml(text, f"{key}={text}")
    if not isinstance(value, dict):
        raise UserError(f"{key}={value} must be a mapping, as a sweep file has it")
    return value
