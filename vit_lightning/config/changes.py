"""Differences between two configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_lightning.config.files import flatten

ALWAYS = ("data.num_workers", "pictures_every_n_epochs")
"""Options that may change within a run: its weights and metrics do not depend on them."""


PER_RUN = ("seed_everything", "experiment", "wandb")
"""Keys that identify a run and change nothing else."""


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the options whose values differ between two configs, with both values."""
    old, new = options_of(before), options_of(after)
    found = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1] and key not in ALWAYS}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config by their dotted keys."""
    return _by_key(flatten(dict(config)))


def _by_key(node: Any, path: str = "") -> dict[str, Any]:
    """Returns the values of a flat config by their dotted keys; lists as a whole."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    return {
        dotted: value
        for key, item in node.items()
        for dotted, value in _by_key(item, f"{path}.{key}" if path else str(key)).items()
    }
