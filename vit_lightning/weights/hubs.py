"""Weights that other libraries fetch by name: timm's, torchvision's and those of the Hugging Face hub."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from vit_lightning.errors import UserError, first_line, meant
from vit_lightning.weights.descriptions import centre_cropped

T = TypeVar("T")


def timm_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model of timm with its trained weights, and its config as in a folder of timm."""
    try:
        import timm
    except ImportError as fault:
        raise UserError(f"timm:{name} needs timm: pip install 'vit-lightning[timm]'") from fault
    if not timm.is_model(name) or not timm.is_model_pretrained(name):
        raise UserError(
            f"timm:{name}: timm has no such model with weights{meant(name, timm.list_models(pretrained=True))}"
        )
    network: Any = _fetched(lambda: timm.create_model(name, pretrained=True), f"timm:{name}")
    facts = dict(network.pretrained_cfg)
    return network, {"architecture": facts.get("architecture", name), "pretrained_cfg": facts}


def cfg_of_timm(architecture: str) -> dict[str, Any] | None:
    """Returns ``pretrained_cfg`` of an architecture; None where timm is missing or does not have it."""
    try:
        from timm.models import get_pretrained_cfg, is_model
    except ImportError:
        return None
    found: Any = get_pretrained_cfg(architecture) if is_model(architecture) else None
    return None if found is None else dict(found.to_dict())


def torchvision_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a classifier of torchvision with its trained weights, its class_names and preprocessing."""
    from torchvision import models

    if name not in models.list_models(module=models):  # those of its submodules find boxes or masks
        known = meant(name, models.list_models(module=models))
        raise UserError(f"torchvision:{name}: torchvision has no such classifier with weights{known}")
    weights = models.get_model_weights(name).DEFAULT
    network: nn.Module = _fetched(lambda: models.get_model(name, weights=weights), f"torchvision:{name}")
    prepare = weights.transforms()
    facts = centre_cropped(prepare.resize_size[0], prepare.crop_size[0], prepare.interpolation.value)
    facts["preprocessing"] |= {"mean": list(prepare.mean), "std": list(prepare.std)}
    return network, {**facts, "class_names": list(weights.meta["categories"])}


LIBRARIES: dict[str, Callable[[str], tuple[nn.Module, dict[str, Any]]]] = {
    "timm": timm_model,
    "torchvision": torchvision_model,
}
"""Libraries that fetch a network by name, each with a description of the network."""


def model_of_library(place: str) -> dict[str, Any]:
    """Returns a network of ``LIBRARIES`` without weights, as the ``model`` of a config."""
    library, _, name = place.partition(":")
    if library == "timm":
        return {"class_path": "timm.create_model", "init_args": {"model_name": name}}
    return {"class_path": f"torchvision.models.{name}"}


def hub_folder(name: str) -> Path:
    """Returns the folder of the weights and the JSON files of a repository: owner/name, or owner/name@revision."""
    place = f"hf-hub:{name}"
    found = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", name)
    if found is None:
        raise UserError(f"{place} must be hf-hub:owner/name, with @revision behind it if need be")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as fault:
        raise UserError(f"{place} needs huggingface_hub: pip install 'vit-lightning[hub]'") from fault
    fetch = partial(snapshot_download, found[1], revision=found[2], ignore_patterns=["*/*"])
    for weights in ("*.safetensors", "*.bin"):
        folder = Path(_fetched(partial(fetch, allow_patterns=["*.json", weights]), place))
        if any(folder.glob(weights)):
            return folder
    raise UserError(f"{place} holds neither *.safetensors nor *.bin")


def _fetched(load: Callable[[], T], place: str) -> T:
    from unittest.mock import patch

    try:
        with patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):  # torchvision would run code in a file
            return load()
    except Exception as fault:  # of urllib, of sockets, of the hub
        reason = first_line(fault)
        if isinstance(fault, OSError) and fault.errno is None:  # not of the disk
            reason = f"offline, or there is no such model ({reason})"
        raise UserError(f"{place}: its weights cannot be had: {reason}") from fault
