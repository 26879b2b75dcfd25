"""Weights that other libraries fetch by name: timm's, torchvision's and those of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from vit_lightning.errors import UserError, first_line

T = TypeVar("T")


def timm_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model of timm with its trained weights, and timm's facts on them (``pretrained_cfg``)."""
    try:
        import timm
    except ImportError as fault:
        raise UserError(f"timm:{name} needs timm: pip install 'vit-lightning[timm]'") from fault
    if not timm.is_model(name) or not timm.is_model_pretrained(name):
        raise UserError(f"timm:{name}: timm has no such model with weights")
    network: Any = _fetched(lambda: timm.create_model(name, pretrained=True), f"timm:{name}")
    return network, dict(network.pretrained_cfg)


def torchvision_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a classifier of torchvision with its trained weights, and their mean, std, image_size and class_names."""
    from torchvision import models

    if name not in models.list_models(module=models):  # those of its submodules find boxes or masks
        raise UserError(f"torchvision:{name}: torchvision has no such classifier with weights")
    weights = models.get_model_weights(name).DEFAULT
    network: nn.Module = _fetched(lambda: models.get_model(name, weights=weights), f"torchvision:{name}")
    prepare = weights.transforms()
    facts = {"mean": list(prepare.mean), "std": list(prepare.std), "image_size": [prepare.crop_size[0]] * 2}
    return network, {**facts, "class_names": list(weights.meta["categories"])}


def hub_folder(name: str) -> Path:
    """Returns the folder of the weights and the JSON files of a repository: owner/name, or owner/name@revision."""
    place = f"hf-hub:{name}"
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise UserError(f"{place} must be hf-hub:owner/name, with @revision behind it if need be")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as fault:
        raise UserError(f"{place} needs huggingface_hub: pip install 'vit-lightning[hub]'") from fault
    for weights in ("*.safetensors", "*.bin"):
        patterns = ["*.json", weights]
        folder = Path(
            _fetched(
                lambda patterns=patterns: snapshot_download(  # type: ignore[misc]
                    found[1], revision=found[2], allow_patterns=patterns, ignore_patterns=["*/*"]
                ),
                place,
            )
        )
        if any(folder.glob(weights)):
            return folder
    raise UserError(f"{place} holds neither *.safetensors nor *.bin")


def _fetched(load: Callable[[], T], place: str) -> T:
    try:
        with _data_alone():
            return load()
    except Exception as fault:  # of urllib, of sockets, of the hub
        reason = " ".join(str(fault).split())[:200] or first_line(fault)
        raise UserError(f"{place}: its weights cannot be had: {reason}") from fault


@contextlib.contextmanager
def _data_alone() -> Iterator[None]:
    """Lets ``torch.load`` read tensors and plain data alone: torchvision would run code in a file of weights."""
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        os.environ.pop(switch)
        if before is not None:
            os.environ[switch] = before


def facts_of_preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mean, std, image_size, crop_pct and interpolation as far as a file's description gives them.

    Args:
        config: ``pretrained_cfg`` of timm, ``preprocessor_config.json`` of transformers, or names as here.
    """
    facts: dict[str, Any] = {}
    for ours, theirs in {"mean": "image_mean", "std": "image_std"}.items():
        value = config.get(ours, config.get(theirs))
        if isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value):
            facts[ours] = [float(item) for item in value]
    if config.get("do_normalize") is False:
        facts |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    size = config.get("image_size", config.get("input_size", config.get("crop_size", config.get("size"))))
    if isinstance(size, Mapping):
        shortest = size.get("shortest_edge")
        size = [size.get("height", shortest), size.get("width", shortest)]
    sides = [size, size] if isinstance(size, int) else list(size or ())[-2:] if isinstance(size, list | tuple) else []
    if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        facts["image_size"] = sides
    if isinstance(config.get("crop_pct"), int | float):
        facts["crop_pct"] = float(config["crop_pct"])
    if isinstance(config.get("interpolation"), str):
        facts["interpolation"] = config["interpolation"]
    elif config.get("resample") in _RESAMPLE:
        facts["interpolation"] = _RESAMPLE[config["resample"]]
    return facts


_RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic", 1: "lanczos"}
"""Names of Pillow's filters."""
