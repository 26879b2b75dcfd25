"""The network of a config beside data, settings and weights: what does not fit is found on the meta device."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from vit_lightning.config.networks import data_facts, empty_network, module_from, names_of_timm, needs_numbers
from vit_lightning.config.own_files import empty_caches, where
from vit_lightning.config.signatures import Part, signature_of
from vit_lightning.config.together import Groups, Merged
from vit_lightning.config.typed import Reader
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError, near
from vit_lightning.models.heads import heads_of
from vit_lightning.storage.checkpoint_files import network_weights
from vit_lightning.training.classifier import ConfiguredOptimizer
from vit_lightning.training.fine_tuning import LoraConfig, add_lora, freeze_backbone, idle_adapters
from vit_lightning.training.optim import OptimizerConfig, group_problems
from vit_lightning.weights.init_from import FirstWeights, with_resized_positions


class Tried(NamedTuple):
    """A network that was tried.

    Args:
        part: it, without arguments that it does not take.
        empty: it on the meta device; None if it could not be made.
        initial: the initial weights, fitted to it.
    """

    part: Part | None
    empty: nn.Module | None = None
    initial: FirstWeights | None = None


def check_network(reader: Reader, groups: Groups, part: Part | None, merged: Merged) -> Tried:
    """Tries a network on the meta device, with data, settings and weights."""
    data, empty, initial = groups.data, None, None
    if part is None or data is None or not merged.names_network:
        return Tried(part)
    before, shape = len(reader.problems), (data.in_channels, *data.image_size)
    with reader.trying():
        part, empty = _make_empty(part, reader.problems)
        if len(reader.problems) == before:
            reader.problems += network_problems(empty, shape, len(data.label_names))
            reader.problems += _fine_tune(empty, groups.settings["lora"], groups.general.get("freeze"), shape)
            reader.problems += optimizer_problems(empty, groups.settings["optimizer"])
            initial = _weights(empty, data, groups.general, merged)
    return Tried(part, empty, initial)


def _make_empty(part: Part, problems: list[str]) -> tuple[Part, nn.Module]:
    """Returns a network without arguments that it hands on to a class which refuses them, and it on the meta device.

    Raises:
        UserError: it cannot be made.
    """
    while True:
        try:
            return part, empty_network(part.make)
        except UserError as error:
            found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
            signature = signature_of(part.target)
            if found is None or found[2] not in part.arguments or not signature.others:
                raise
            known = {*signature.options, *names_of_timm(part.target, part.arguments)}
            likely = near(found[2], known)
            hint = f"did you mean model.{likely[0]}?" if likely else f"choose {', '.join(sorted(known))}"
            value = part.arguments[found[2]]
            problems.append(f"model.{found[2]}={value}: {found[1]} takes no such argument ({hint})")
            part = replace(part, arguments={key: part.arguments[key] for key in part.arguments if key != found[2]})


def _fine_tune(network: nn.Module, lora: LoraConfig | None, freeze: str | None, shape: tuple[int, ...]) -> list[str]:
    """Adds adapters to a network and freezes it, as the options say; returns what does not fit."""
    problems = []
    if lora is not None:
        with torch.device("meta"):
            add_lora(network, lora)
        if lora.rank and freeze:
            text = "adapters freeze the backbone already (leave freeze out)"
            problems.append(f"freeze={freeze} beside lora.rank={lora.rank}: {text}")
        if lora.rank and (idle := idle_adapters(network, shape)):
            reads = f"{type(network).__name__} reads the weights of {', '.join(idle)} itself, not through an adapter"
            problems.append(f"lora.targets: {reads} (leave them out)")
    if freeze:
        freeze_backbone(network)
    return problems


def optimizer_problems(network: nn.Module, optimizer: OptimizerConfig | None) -> list[str]:
    """Returns why the parameters of a network cannot be grouped."""
    return [] if optimizer is None else [f"optimizer.{text}" for text in group_problems(network, optimizer)]


def _weights(network: nn.Module, data: ImageData, general: Mapping[str, Any], merged: Merged) -> FirstWeights | None:
    """Returns the weights of ``init_from``, fitted to a network.

    Raises:
        UserError: they do not fit, or those of ``ckpt`` do not.
    """
    method = general.get("resize_positions", "bicubic")
    if merged.trained is not None:
        checkpoint, _ = with_resized_positions(merged.trained.checkpoint, network, data.image_size, method)
        network_weights(network, checkpoint, merged.trained.path)
    if merged.initial is None:
        return None
    facts = {name: getattr(data, name, None) for name in ("mean", "std", "class_names")}
    return merged.initial.fitted(network, method, **facts, reset_head=general.get("reset_head", False))


def network_problems(network: nn.Module, shape: tuple[int, ...], classes: int) -> list[str]:
    """Returns why a network on the meta device cannot give logits (b, classes) for images (b, c, H, W) of a shape."""
    text = "x".join(map(str, shape))
    if not list(network.parameters()):
        return [f"model: {type(network).__name__} has no parameters to train"]
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            given = [network.train(training)(torch.empty(2, *shape)) for training in (False, True)]
    except Exception as fault:  # whatever the layers of others raise
        if needs_numbers(fault):  # only training shows whether it works
            return []
        if place := where(fault):
            return [f"model: {place}"]
        reason = " ".join(str(fault).split())[:300]
        first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
        if first is not None and first.in_channels != shape[0]:
            reason = f"it takes images of {first.in_channels} channels"
        return [f"model: {type(network).__name__} does not take the images of the data, {text}: {reason}"]
    finally:
        empty_caches()
    try:
        shapes = [tuple(logits.shape) for one in given for logits in heads_of(network, one)]
    except UserError as error:
        return [f"model: {error}"]
    wrong = [shape for shape in shapes if shape != (2, classes)]
    if wrong:
        return [f"model: {type(network).__name__} gives {wrong[0]} for 2 images of {classes} classes (num_classes?)"]
    return []


def try_module(reader: Reader, groups: Groups, network: nn.Module | None) -> None:
    """Makes a LightningModule of the user's around the network on the meta device, if nothing is wrong so far."""
    module, settings = groups.module, groups.settings
    if groups.data is not None and module is not None and module.name and not reader.problems:
        filled = {**data_facts(groups.data), **settings, "network": network, "metrics": {}, "distillation": None}
        with reader.trying():
            made: Any = empty_network(lambda: module_from(module, filled), "module")
            if type(made).configure_optimizers is ConfiguredOptimizer.configure_optimizers:
                reader.problems += optimizer_problems(made.optimized(), settings["optimizer"])
