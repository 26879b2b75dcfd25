"""Differences between two configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_lightning.config.files import flatten
from vit_lightning.config.old_configs import with_block

ALWAYS = ("data.num_workers",)
"""Keys that may change by themselves: order and augmentation do not depend on them."""


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ between two pages, (before, after), but for those that may."""
    old, new = (_by_key(with_block(flatten(dict(config)))) for config in (before, after))
    found = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1] and key not in ALWAYS}


def _by_key(node: Any, path: str = "") -> dict[str, Any]:
    """The values of a flat page by their dotted keys; lists as a whole."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    return {
        dotted: value
        for key, item in node.items()
        for dotted, value in _by_key(item, f"{path}.{key}" if path else str(key)).items()
    }
