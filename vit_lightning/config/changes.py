"""Differences between two configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError

from vit_lightning.config.files import flatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.parser import parse, to_plain

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
    return _by_key(with_block(flatten(dict(config))))


def changes_since(began: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns ``changes`` since a run began; an option that its version did not have yet had its default.

    Args:
        began: the config in the run folder or checkpoint; nothing that it names is imported.
        now: a resolved config.
    """
    found = _as_written(_changes_since(began, now))
    return {
        key: pair for key, pair in found.items() if key != "data.revision" or pair[0] is not None
    }  # not pinned then


def _as_written(found: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Names the options of datasets and data modules of others as a config has them."""
    own = {re.sub(r"^data\.(arguments|module)\.", "data.", key): pair for key, pair in found.items()}
    for key in ("data.dataset_class", "data.module.class_path"):
        if key in found:
            ours = found.get("data.class_path", (None, None))
            own["data.class_path"] = (found[key][0] or ours[0], found[key][1] or ours[1])
    own.pop("data.dataset_class", None)
    return own


def _changes_since(began: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found, known = changes(began, now), options_of(began)
    replaced = tuple(key.removesuffix("class_path") for key in found if key.endswith(".class_path"))
    lacking = [key for key in found if key not in known and not key.startswith(replaced)]
    if not lacking:
        return found
    older = with_block(flatten({key: value for key, value in now.items() if key != "model" or value is not None}))
    for key in lacking:
        _remove(older, key.split("."))
    try:
        defaults = _by_key(flatten(to_plain(parse(older))))
    except (ArgumentError, TypeError, ValueError):  # an option without a default
        return found
    found |= {key: (defaults.get(key), found[key][1]) for key in lacking}
    return {key: (before, after) for key, (before, after) in found.items() if before != after}


def _remove(node: Any, path: list[str]) -> None:
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]


def _by_key(node: Any, path: str = "") -> dict[str, Any]:
    """Returns the values of a flat config by their dotted keys; lists as a whole."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    return {
        dotted: value
        for key, item in node.items()
        for dotted, value in _by_key(item, f"{path}.{key}" if path else str(key)).items()
    }
