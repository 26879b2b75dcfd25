"""Configs and checkpoints of earlier versions: completed so that they build the network that they built then."""

from __future__ import annotations

from typing import Any

from vit_lightning.config.trust import find_class
from vit_lightning.models.crate import ISTA
from vit_lightning.models.vit import ViT


def with_block(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose ViT has ``block``: before it was an option, ``feed_forward: ISTA`` implied CRATE's block.

    Args:
        config: with the arguments of each class beside its name, as ``files.flatten`` leaves them; not changed.
    """
    model = config.get("model")
    if not isinstance(model, dict) or "block" in model or find_class(model.get("class_path")) is not ViT:
        return config
    feed_forward = model.get("feed_forward")
    class_path = feed_forward.get("class_path") if isinstance(feed_forward, dict) else feed_forward
    block = "CrateBlock" if find_class(class_path) is ISTA else "TransformerEncoderBlock"
    return {**config, "model": {**model, "block": {"class_path": f"vit_lightning.{block}"}}}
