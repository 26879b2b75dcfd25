"""Trained models by name: a run, a checkpoint or a file of weights becomes a network with its preprocessing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError
from torch import nn

from vit_lightning.config.experiment import make_data, make_network
from vit_lightning.config.files import flatten, unflatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.trust import KNOWN_PACKAGES, Imports, find_class, restrict_imports
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import find_checkpoint, load_network, read_checkpoint
from vit_lightning.training.lora import merged


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained network and what is known about it."""

    place: str
    """The name by which it was asked for."""
    network: nn.Module
    """In evaluation mode; a ViT wherever the weights are those of one."""
    view: dict[str, Any]
    """Preprocessing of images: image_size, in_channels, centre_share, mean, std; each only where it is known."""
    class_names: list[str] | None = None
    notes: tuple[str, ...] = ()
    """Sentences on what the weights do not tell, and what was taken in its place."""
    config: Mapping[str, Any] | None = None
    """Config of the run that trained it."""
    path: Path | None = None
    """File of the weights."""


def open_source(
    place: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    imports: Imports | None = KNOWN_PACKAGES,
    key: str = "source",
) -> Source:
    """Returns a trained network with what is known about it; leaves the global random numbers as they were.

    Args:
        place: run folder (its best checkpoint), checkpoint, torchvision:NAME, timm:NAME, or
            https://...#sha256=CHECKSUM.
        image_size: height and width in pixels of the images that it will get, if they are not those of its training.
        num_classes: classes of a new head; 0 for features.
        config: what is to hold in place of what the file says.
        imports: packages from which the config of a run may name classes; None for those that are allowed now.
        key: option that errors name.

    Raises:
        UserError: it is not there, damaged, or its architecture cannot be told.
    """
    library, _, name = str(place).partition(":")
    with torch.random.fork_rng(devices=[]):
        if library in _LIBRARIES:
            return _LIBRARIES[library](name, key)
        return _from_run(str(place), imports, key)


def _from_run(place: str, imports: Imports | None, key: str) -> Source:
    path = find_checkpoint(place, key)
    checkpoint = read_checkpoint(path)
    config = checkpoint.get("config")
    if not isinstance(config, dict):
        raise UserError(f"{key}={place} holds no config, so that its model is unknown")
    try:
        network = _network(config, imports)
        view = dict(checkpoint.get("test_view") or _view_of_data(config))
    except UserError as error:
        raise UserError([f"{key}={place}: {problem}" for problem in error.problems]) from error
    load_network(network, checkpoint, path)
    network = merged(network)  # adapters belong to a training
    names = view.pop("class_names", None)
    return Source(place=place, network=network.eval(), view=view, class_names=names, config=config, path=path)


def _network(config: dict[str, Any], imports: Imports | None) -> nn.Module:
    """Returns the network of a checkpoint's config, with random weights."""
    if config["model"] is None:
        raise UserError("its module takes no model, so that there is no network to load")
    if imports is not None:
        imports.allow()
    path = str(config["model"]["class_path"])
    if find_class(path) is None:
        raise UserError(f"its model {path} is of a package that may not be imported, or is not there any more")
    if imports is not None:
        restrict_imports({"model": config["model"]}, trust=imports.trust, folders=imports.folders)
    try:
        return make_network(unflatten(with_block(flatten(config))))
    except ArgumentError as fault:
        raise UserError(" ".join(str(fault).split())) from fault


def _view_of_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preprocessing of a config's data: earlier checkpoints have no description of it."""
    data = make_data(config)
    return {name: getattr(data, name) for name in ("image_size", "in_channels", "centre_share", "mean", "std")}


def _from_torchvision(name: str, key: str) -> Source:
    from torchvision import models

    place = f"torchvision:{name}"
    if name not in models.list_models(module=models):  # those of its submodules find boxes or masks
        raise UserError(f"{key}={place}: torchvision has no such classifier with weights")
    weights = models.get_model_weights(name).DEFAULT
    network = _fetched(lambda: models.get_model(name, weights=weights), place, key)
    transforms = weights.transforms()
    size, resized = transforms.crop_size[0], transforms.resize_size[0]
    view = {"image_size": (size, size), "in_channels": 3, "centre_share": min(1.0, size / resized)}
    view |= {"mean": list(transforms.mean), "std": list(transforms.std)}
    return Source(place=place, network=network.eval(), view=view, class_names=list(weights.meta["categories"]))


def _from_timm(name: str, key: str) -> Source:
    place = f"timm:{name}"
    try:
        import timm
    except ImportError as fault:
        raise UserError(f"{key}={place} needs timm: pip install 'vit-lightning[timm]'") from fault
    if not timm.is_model(name) or not timm.is_model_pretrained(name):
        raise UserError(f"{key}={place}: timm has no such model with weights")
    network = _fetched(lambda: timm.create_model(name, pretrained=True), place, key)
    facts: Any = network.pretrained_cfg
    channels, *size = facts["input_size"]
    view = {"image_size": tuple(size), "in_channels": channels, "centre_share": facts["crop_pct"]}
    view |= {"mean": list(facts["mean"]), "std": list(facts["std"])}
    return Source(place=place, network=network.eval(), view=view)


_LIBRARIES: dict[str, Callable[[str, str], Source]] = {"torchvision": _from_torchvision, "timm": _from_timm}


def _fetched(load: Callable[[], nn.Module], place: str, key: str) -> nn.Module:
    try:
        with _data_alone():
            return load()
    except Exception as fault:  # of urllib, of sockets, of the hub
        raise UserError(f"{key}={place}: its weights cannot be had: {' '.join(str(fault).split())[:200]}") from fault


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
