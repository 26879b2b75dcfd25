"""Teachers for distillation: the network of a run, or one of torchvision or timm."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from jsonargparse import ArgumentError
from torch import nn

from vit_lightning.config.experiment import make_data, make_network
from vit_lightning.config.files import flatten, unflatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.trust import find_class
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import find_checkpoint, load_network, read_checkpoint
from vit_lightning.training.distillation import Statistics, Teacher

KEY = "distillation.teacher"


def load_teacher(place: str, data: ImageData) -> Teacher:
    """Returns the teacher for the student's data; leaves the global random numbers as they were.

    Raises:
        UserError: it is not there, takes other images, or has other classes.
    """
    source, _, name = place.partition(":")
    load = _SOURCES.get(source)
    with torch.random.fork_rng(devices=[]):
        network, statistics = _from_run(place) if load is None else load(name)
    _check(network, place, data)
    return Teacher(network, normalised=statistics, images=(data.mean, data.std))


def _from_run(place: str) -> tuple[nn.Module, Statistics]:
    path = find_checkpoint(place, KEY)
    checkpoint = read_checkpoint(path)
    if not isinstance(checkpoint.get("config"), dict):
        raise UserError(f"{KEY}={place} holds no config, so that its model is unknown")
    try:
        network, statistics = _make(checkpoint["config"], checkpoint.get("test_view"))
    except UserError as error:
        raise UserError([f"{KEY}={place}: {problem}" for problem in error.problems]) from error
    load_network(network, checkpoint, path)
    return network, statistics


def _make(config: dict[str, Any], view: dict[str, Any] | None) -> tuple[nn.Module, Statistics]:
    """Returns the network of a checkpoint's config, with random weights, and mean and std of its images.

    Args:
        config: the checkpoint's config.
        view: its description of the test images, so that its data need not be there; earlier checkpoints have none.
    """
    if config["model"] is None:
        raise UserError("its module takes no model, so that there is no network to learn from")
    path = str(config["model"]["class_path"])
    if find_class(path) is None:
        raise UserError(f"its model {path} is of a package that may not be imported, or is not there any more")
    try:
        source: Any = make_data(config) if view is None else SimpleNamespace(**view)
        network = make_network(unflatten(with_block(flatten(config))))
    except ArgumentError as fault:
        raise UserError(" ".join(str(fault).split())) from fault
    return network, (tuple(source.mean), tuple(source.std))


def _from_torchvision(name: str) -> tuple[nn.Module, Statistics]:
    from torchvision import models

    if name not in models.list_models(module=models):  # those of its submodules find boxes or masks
        raise UserError(f"{KEY}=torchvision:{name}: torchvision has no such classifier with weights")
    weights = models.get_model_weights(name).DEFAULT
    network = _fetched(lambda: models.get_model(name, weights=weights), f"torchvision:{name}")
    transforms = weights.transforms()
    return network, (transforms.mean, transforms.std)


def _from_timm(name: str) -> tuple[nn.Module, Statistics]:
    try:
        import timm
    except ImportError as fault:
        raise UserError(f"{KEY}=timm:{name} needs timm: pip install 'vit-lightning[timm]'") from fault
    if not timm.is_model(name) or not timm.is_model_pretrained(name):
        raise UserError(f"{KEY}=timm:{name}: timm has no such model with weights")
    network = _fetched(lambda: timm.create_model(name, pretrained=True), f"timm:{name}")
    facts: Any = network.pretrained_cfg
    return network, (facts["mean"], facts["std"])


_SOURCES: dict[str, Callable[[str], tuple[nn.Module, Statistics]]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
}


def _fetched(load: Callable[[], nn.Module], place: str) -> nn.Module:
    try:
        with _data_alone():
            return load()
    except Exception as fault:  # of urllib, of sockets, of the hub
        raise UserError(f"{KEY}={place}: its weights cannot be had: {' '.join(str(fault).split())[:200]}") from fault


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


def _check(network: nn.Module, place: str, data: ImageData) -> None:
    """Checks that the teacher gives logits for the student's images and classes."""
    shape = (data.in_channels, *data.image_size)
    text = "x".join(map(str, shape))
    try:
        with torch.no_grad():
            logits = copy.deepcopy(network).to("meta").eval()(torch.empty(2, *shape, device="meta"))
    except Exception as fault:  # whatever the layers of others raise
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"{KEY}={place} does not take the images of the data, {text}: {reason}") from fault
    if tuple(logits.shape) != (2, data.num_classes):
        raise UserError(f"{KEY}={place} knows {logits.shape[-1]} classes, the data has {data.num_classes}")
