"""Trained models by name: a run, a checkpoint or a file of weights becomes a network with its preprocessing."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentError
from torch import nn

from vit_lightning.config.experiment import make_data, make_network
from vit_lightning.config.files import flatten, unflatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.trust import KNOWN_PACKAGES, Imports, allowing, find_class, refuse_unknown, trusts
from vit_lightning.errors import UserError, first_line
from vit_lightning.limits import refuse
from vit_lightning.models.heads import find_head
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair
from vit_lightning.storage.checkpoint_files import load_network
from vit_lightning.training.lora import merged
from vit_lightning.weights.adapt import adapt
from vit_lightning.weights.as_config import model_config
from vit_lightning.weights.convert import from_reference
from vit_lightning.weights.files import WeightsFile, read_weights
from vit_lightning.weights.hubs import facts_of_preprocessing, timm_model, torchvision_model
from vit_lightning.weights.identify import OURS, identify

PREPROCESSING = ("mean", "std", "centre_share", "class_names")
"""Facts of a source that ``config`` may give whatever its family."""
_HALF, _IMAGENET = ([0.5] * 3, [0.5] * 3), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_USUAL = {"timm": _HALF, "hf": _HALF, "google": _HALF, "big_vision": _HALF}
_USUAL |= {"torchvision": _IMAGENET, "crate": _IMAGENET}
"""Mean and standard deviation by which most published weights of a family had their images normalised."""


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

    @property
    def vit(self) -> ViT | None:
        """The network if it is a ViT of ours."""
        return self.network if isinstance(self.network, ViT) else None


def open_source(
    place: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    heads: Mapping[str, Any] | None = None,
    usual: bool = True,
    ours: bool = True,
    imports: Imports | None = KNOWN_PACKAGES,
    key: str = "source",
) -> Source:
    """Returns a trained network with what is known about it; leaves the global random numbers as they were.

    Args:
        place: run folder (its best checkpoint), checkpoint, .safetensors, .pth, .pt, .bin, .pth.tar, .npz, folder of
            ``save_pretrained`` or of an export, hf-hub:owner/name, timm:NAME, torchvision:NAME, or
            https://...#sha256=CHECKSUM.
        image_size: height and width in pixels of its images, if not those of its training: positions are resized.
        num_classes: classes of a new head; 0 for features.
        config: what is not known or is to be replaced: ``PREPROCESSING`` and, for weights of others, arguments in the
            words of their family.
        heads: ``num_heads`` of the network of a config, which holds where the weights do not tell it.
        usual: whether a mean and std that are not known are those of most weights of the family.
        ours: whether a ViT of timm or torchvision is to be one of ours; else it is left as it is.
        imports: packages from which the config of a run may name classes; None for those that are allowed now.
        key: option that errors name.

    Raises:
        UserError: it is not there, damaged, or its architecture cannot be told.
    """
    sizes = image_size if isinstance(image_size, tuple | list) else [image_size] * (image_size is not None)
    if len(sizes) > 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise UserError(f"image_size={image_size} must be a number of pixels, or height and width")
    if num_classes is not None and (type(num_classes) is not int or num_classes < 0):
        raise UserError(f"num_classes={num_classes} must be a whole number, 0 for features")
    given = dict(config or {})
    facts = {name: given.pop(name) for name in PREPROCESSING if name in given}
    known = _Known(given, facts, heads, usual)
    place = str(place)
    try:
        with allowing(imports), torch.random.fork_rng(devices=[]):
            if place.startswith(tuple(f"{library}:" for library in _LIBRARIES)):
                found = _from_library(place, known, ours=ours)
            else:
                file = read_weights(place, key)
                found = _from_weights(file, known) if file.checkpoint is None else _from_run(file, known)
            if image_size is not None or num_classes is not None:
                found = _changed(found, image_size, num_classes)
    except UserError as error:
        raise UserError([_named(text, place, key) for text in error.problems]) from None
    found.network.eval()
    refuse(f"{key}={place}: config.{text}" for text in _wrong_facts(found, facts))
    return found


def _wrong_facts(source: Source, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with given facts of preprocessing."""
    channels, classes = source.view.get("in_channels", 3), getattr(source.network, "num_classes", None)
    for name, value in facts.items():
        items = list(value) if isinstance(value, list | tuple) else []
        numbers = [item for item in items if type(item) in (int, float) and math.isfinite(item)]
        if name == "class_names":
            if not items or not all(isinstance(item, str) for item in items) or len(items) != (classes or len(items)):
                yield f"{name}={value} must be a list of {classes or 'the'} names"
        elif name == "centre_share":
            if type(value) not in (int, float) or not 0.0 < value <= 1.0:
                yield f"{name}={value} must be above 0 and at most 1"
        elif len(numbers) != len(items) or len(items) != channels or (name == "std" and min(items) <= 0.0):
            yield f"{name}={value} must be {channels} numbers{' above 0' * (name == 'std')}"


def _named(text: str, place: str, key: str) -> str:
    """Returns a problem that begins with the option and the source."""
    if text.startswith(f"{key}={place}"):
        return text
    return f"{key}={text}" if text.startswith(place) else f"{key}={place}: {text}"


class _Known(NamedTuple):
    """Facts about a model that its place need not tell: arguments of ``open_source``."""

    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    heads: Mapping[str, Any] | None
    usual: bool


def _from_run(file: WeightsFile, known: _Known) -> Source:
    assert file.checkpoint is not None
    assert file.path is not None
    config = file.checkpoint["config"]
    refuse(f"config.{name}={value}: the config of its run tells this" for name, value in known.config.items())
    network = _network(config)
    view = {**(file.checkpoint.get("test_view") or _view_of_data(config)), **known.facts}
    load_network(network, file.checkpoint, file.path)
    network = merged(network)  # adapters belong to a training
    names = view.pop("class_names", None)
    return Source(place=file.place, network=network, view=view, class_names=names, config=config, path=file.path)


def _from_weights(file: WeightsFile, known: _Known) -> Source:
    """Returns the source of weights that are of no run."""
    found = identify(file, known.config, known.heads)
    if found.family == OURS:
        refuse_unknown({"model": found.config})  # who trusts a config does not trust what lies beside weights
        network = _network({"model": found.config})
        whole = {name: value for name, value in network.state_dict().items() if not value.is_floating_point()}
        load_network(network, {"state_dict": {**whole, **file.tensors}}, Path(file.place), prefix="")
    else:
        network = from_reference(file.tensors, family=found.family, config=found.config)
    if next(network.parameters()).dtype in (torch.float16, torch.bfloat16):
        network.float()
    notes = [*file.notes, *found.notes]
    view: dict[str, Any] = {"centre_share": 1.0, **(file.view or {})}
    view |= {"class_names": _class_names(file.config or {}, getattr(network, "num_classes", None)), **known.facts}
    if isinstance(network, ViT):
        view |= {"image_size": network.image_size, "in_channels": network.in_channels}
    if known.usual and "mean" not in view and found.family in _USUAL and view.get("in_channels") == 3:
        is_deit = "patch_embedding.distillation_token.token" in network.state_dict()
        mean, std = _IMAGENET if is_deit else _USUAL[found.family]
        view |= {"mean": mean, "std": std}
        text = f"mean {mean} and std {std} of its images are those of most weights of {found.family}"
        notes.append(f"{text}; nothing beside the file tells (config={{'mean': ..., 'std': ...}} gives others)")
    names = view.pop("class_names")
    return Source(place=file.place, network=network, view=view, class_names=names, notes=tuple(notes), path=file.path)


def _from_library(place: str, known: _Known, *, ours: bool) -> Source:
    """Returns the source of a model that torchvision or timm fetches; their own network if it is no ViT of ours."""
    library, _, name = place.partition(":")
    network, stated = _LIBRARIES[library](name)
    config = (
        {"architecture": stated.get("architecture", name), "pretrained_cfg": stated} if library == "timm" else stated
    )
    file = WeightsFile(place, None, network.state_dict(), config, view=facts_of_preprocessing(stated))
    try:
        if ours or known.config:  # what was given is to hold
            return _from_weights(file, known)
    except UserError:
        if known.config:
            raise
    names = _class_names(config, getattr(network, "num_classes", len(stated.get("class_names", ()))))
    view = {"in_channels": 3, "centre_share": 1.0, **(file.view or {}), "class_names": names, **known.facts}
    return Source(place=place, network=network, class_names=view.pop("class_names"), view=view)


_LIBRARIES: dict[str, Callable[[str], tuple[nn.Module, dict[str, Any]]]] = {
    "torchvision": torchvision_model,
    "timm": timm_model,
}


def _class_names(config: Mapping[str, Any], classes: int | None) -> list[str] | None:
    """Returns the names of classes in the description of a model; None unless there is one for each."""
    stated = config.get("pretrained_cfg")
    of_labels: Any = config.get("id2label")
    names: Any = config.get("class_names", config.get("label_names"))
    if names is None and isinstance(stated, Mapping):
        names = stated.get("label_names")
    if names is None and isinstance(of_labels, Mapping):
        with contextlib.suppress(ValueError, TypeError):
            names = [of_labels[number] for number in sorted(of_labels, key=int)]
    if not isinstance(names, list | tuple) or len(names) != classes or not all(isinstance(name, str) for name in names):
        return None
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else list(names)


def _changed(source: Source, size: int | tuple[int, int] | None, classes: int | None) -> Source:
    """Returns a source with a new head, or for images of another size."""
    sides = None if size is None else pair(size)
    view = source.view if sides is None else {**source.view, "image_size": sides}
    names = source.class_names if classes is None else None
    if isinstance(source.network, ViT):
        changes = {"image_size": None if sides is None else list(sides), "num_classes": classes}
        return replace(source, network=_rebuilt(source, changes), class_names=names, view=view)
    network = source.network
    for name, head in find_head(network).items() if classes is not None else ():
        if not isinstance(head, nn.Linear):
            raise UserError(f"num_classes={classes}: {name} of {type(network).__name__} is no linear layer")
        network.set_submodule(name, nn.Linear(head.in_features, classes) if classes else nn.Identity())
        network.num_classes = classes  # type: ignore[assignment]
    try:
        with torch.no_grad():
            images = torch.empty(1, view.get("in_channels", 3), *pair(view["image_size"]), device="meta")
            copy.deepcopy(network).to("meta").eval()(images)
    except Exception as fault:  # whatever the layers of others raise
        text = f"{type(network).__name__} does not take it: {first_line(fault)}"
        raise UserError(f"image_size={view.get('image_size')}: {text}") from fault
    return replace(source, class_names=names, view=view)


def _rebuilt(source: Source, changes: Mapping[str, Any]) -> ViT:
    """Returns a ViT with the weights of another and some other arguments; positions are resized, a head is new."""
    assert isinstance(source.network, ViT)
    model: Any = model_config(source.network) if source.config is None else source.config["model"]
    given = {name: value for name, value in changes.items() if value is not None}
    network = _network({"model": {**model, "init_args": {**model.get("init_args", {}), **given}}})
    assert isinstance(network, ViT)
    network.to(next(source.network.parameters()).dtype)
    adapt(network, source.network).load(network)
    return network


def _network(config: Mapping[str, Any]) -> nn.Module:
    """Returns the network of a config, with random weights."""
    if config["model"] is None:
        raise UserError("its module takes no model, so that there is no network to load")
    path = str(config["model"]["class_path"])
    if find_class(path) is None:
        raise UserError(
            f"its model {path} is not there any more, or is code of your own, which only commands with "
            "--trust-config run (validate, test, predict)"
        )
    if not trusts():
        refuse_unknown({"model": config["model"]})
    try:
        return make_network(unflatten(with_block(flatten(config))))
    except ArgumentError as fault:
        raise UserError(" ".join(str(fault).split())) from fault


def _view_of_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preprocessing of a config's data: earlier checkpoints have no description of it."""
    data = make_data(config)
    return {name: getattr(data, name) for name in ("image_size", "in_channels", "centre_share", "mean", "std")}
