"""A checked experiment from a merged config: types, then what the parts have to say about each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from torch import nn

from vit_lightning.config.check_network import (
    empty_network,
    leave_out_defaults_of_others,
    network_problems,
)
from vit_lightning.config.check_values import average_problems, compiler_problems, monitor_problems, trainer_problems
from vit_lightning.config.constructors import (
    arguments_of,
    constructor_problems,
    facts_for,
    without_weights,
)
from vit_lightning.config.experiment import Experiment, network_in_file
from vit_lightning.config.files import Config, as_list, unflatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.options import COMMAND_OPTIONS, COMPILES, ConfigOptions, RunOptions, Settings
from vit_lightning.config.own_metrics import choose_metrics
from vit_lightning.config.own_module import class_of, complete_module, filled_in, make_own, unused_problems
from vit_lightning.config.parser import DEFAULT_CLASSES, instantiate, parse, parse_part, to_plain
from vit_lightning.config.trust import KNOWN_PACKAGES, Imports, find_class
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import STEP_METRICS, metric_names, with_own
from vit_lightning.sizes import pair
from vit_lightning.storage.checkpoint_files import find_checkpoint, network_weights, read_checkpoint
from vit_lightning.training.fine_tuning import LoraConfig, add_lora, freeze_backbone, idle_adapters
from vit_lightning.training.losses import OwnLoss
from vit_lightning.training.optim import OptimizerConfig, group_problems
from vit_lightning.training.probes import Probe
from vit_lightning.weights.init_from import open_initial_weights, with_resized_positions


def build(merged: Config, command: str, given: Mapping[str, Any]) -> Experiment:
    """Makes and checks all parts of an experiment, each once."""
    data_config = _with_class(merged, "data")
    data: ImageData = instantiate(parse_part("data", unflatten(data_config)), "data")
    try:
        data.check()
        data_config |= data.pinned()
        facts = data_facts(data)
    except UserError as error:
        raise UserError([f"data.{problem}" for problem in error.problems]) from error
    try:
        data.check_augment()
    except UserError as error:
        raise Unfit([f"data.{problem}" for problem in error.problems]) from error
    model = _with_class(merged, "model")
    chosen, module_class = complete_module(merged), class_of(merged)
    with_facts = {**facts_for(facts, model), **model}
    metrics = choose_metrics(merged.get("metrics"), data.num_classes)
    complete = with_block({**merged, "module": None, "metrics": None, "data": data_config, "model": with_facts})
    config = parse(complete, command)
    for name, fact in facts.items():  # an argument that a function hands on shows only now
        if name in (config.model.get("init_args") or ()) and name not in model:
            config.model.init_args[name] = fact
    leave_out_defaults_of_others(config.model, {**with_facts, **facts})
    if config.experiment is None:
        config.experiment = "run"
    problems: list[str] = []
    kind = COMMAND_OPTIONS.get(command)
    options = None if kind is None else _made(kind, config, problems)
    _made(ConfigOptions, config, problems)
    run = _made(RunOptions, config, problems)
    named = arguments_of(config.model)
    for name, fact in facts.items():
        same = pair if name == "image_size" else int
        if name in named and same(named[name]) != same(fact):
            problems.append(f"model.{name}={named[name]} does not fit the data, which has {fact} (leave it out)")
    settings: dict[str, Any] = {}
    for key in Settings._fields:
        try:
            settings[key] = instantiate(config, key)
        except UserError as error:
            problems += error.problems
    if isinstance(settings.get("loss"), OwnLoss):
        found = settings["loss"].problems(data.num_classes, mixes=bool(getattr(data, "mixing", None)))
        problems += [f"loss.class_path={config.loss.class_path}: {text}" for text in found]
    problems += unused_problems(merged, module_class, settings)
    problems += _freeze_problems(config, settings.get("lora"), module_class)
    has_network = "network" in filled_in(module_class)
    if has_network and not any(problem.startswith("model.") for problem in problems):
        imports = given.get("imports", KNOWN_PACKAGES)
        problems += _model_problems(config, data, settings, imports)
        imports.allow()  # those of the source were others
    if metrics and "metrics" not in filled_in(module_class):
        problems.append(f"metrics: module.class_path={module_class.__name__} logs its own (leave them out)")
    if chosen is not None and not problems:
        problems += _module_problems(config, chosen, module_class, {**facts, **settings, "metrics": {}})
    problems += [*trainer_problems(config.trainer), *average_problems(config)]
    problems += compiler_problems() if config.compile and command in COMPILES else []
    own = {item.name: item.metric for item in metrics}
    table = with_own(own)
    monitored = [*metric_names("val", "train", classes=facts["num_classes"], table=table), *STEP_METRICS]
    for callback in as_list(config.trainer.callbacks):
        probe: Any = find_class(callback.class_path)
        monitored += probe.logs if isinstance(probe, type) and issubclass(probe, Probe) else ()
    if chosen is None:
        problems += monitor_problems(config, monitored)
    if problems:
        raise Unfit(problems)
    try:
        plain = {**to_plain(config), "module": chosen}
        if metrics:
            plain["metrics"] = [item.plain for item in metrics]
        if not has_network:
            plain["model"] = None
    except (TypeError, ValueError, yaml.YAMLError) as fault:  # of a default of some callback, such as an enum
        raise Unfit([f"the config cannot be written to config.yaml: {' '.join(str(fault).split())}"]) from fault
    return Experiment(
        config=plain, data=data, settings=Settings(**settings), options=options, metrics=own, **vars(run), **given
    )


def _with_class(merged: Config, key: str) -> Config:
    """Returns what a config says of ``model`` or ``data``, with its class."""
    given = merged.get(key) or {}
    if isinstance(given, str):
        return {"class_path": given}
    if not isinstance(given, dict):
        raise UserError(f"{key}={given} must be a class path or its arguments")
    return {"class_path": DEFAULT_CLASSES[key], **given}


class Unfit(UserError):
    """Values of the right types that do not fit, alone or together; nothing else is wrong."""


def _made(kind: type[Any], config: Namespace, problems: list[str]) -> Any:
    """Returns the options of a class, with their values in a parsed config."""
    try:
        return kind(**{field.name: config[field.name] for field in fields(kind)})
    except UserError as error:
        problems += error.problems
        return None


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    height, width = data.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, "in_channels": data.in_channels, "num_classes": data.num_classes}


def _module_problems(
    config: Namespace, chosen: dict[str, Any], kind: type[LightningModule], given: dict[str, Any]
) -> list[str]:
    """Returns why a module of the user's own cannot be made."""
    has_network = "network" in filled_in(kind)
    network = empty_network(lambda: _without_weights(config)) if has_network else None
    available = {**given, "network": network, "distillation": None}
    try:
        empty_network(lambda: make_own({"module": chosen}, available, kind), "module")
    except UserError as error:
        return error.problems
    return []


def _without_weights(config: Namespace) -> nn.Module:
    """Returns the network of a parsed config; weights that it names are read when a run begins."""
    network: nn.Module = instantiate(Namespace(model=without_weights(config.model)), "model")
    return network


def _freeze_problems(config: Namespace, lora: LoraConfig | None, kind: type[LightningModule]) -> list[str]:
    """Returns why nothing can be frozen."""
    given = [f"freeze={config.freeze}"] if config.freeze else []
    given += [f"lora.rank={lora.rank}"] if lora and lora.rank else []
    if given and "network" not in filled_in(kind):
        return [f"{', '.join(given)}: module.class_path={kind.__module__}.{kind.__qualname__} takes no network"]
    if len(given) > 1:
        return [f"{' beside '.join(given)}: adapters freeze the backbone already (leave freeze out)"]
    return []


def _model_problems(config: Namespace, data: ImageData, settings: Mapping[str, Any], imports: Imports) -> list[str]:
    """Returns what does not fit: network and its arguments, data, optimizer, and the weights it is to start from."""
    facts = data_facts(data)
    if problems := constructor_problems(config.model, lambda: _without_weights(config), config.init_from):
        return problems
    try:
        network = empty_network(lambda: _without_weights(config))
    except UserError as error:
        return error.problems
    shape = facts["in_channels"], *pair(facts["image_size"])
    problems = network_problems(network, shape, facts["num_classes"])
    try:
        with torch.device("meta"):
            add_lora(network, lora := settings.get("lora", LoraConfig()))
        if lora.rank and (idle := idle_adapters(network, shape)):
            reads = f"{type(network).__name__} reads the weights of {', '.join(idle)} itself, not through an adapter"
            problems.append(f"lora.targets: {reads} (leave them out)")
        if config.freeze:
            freeze_backbone(network)
    except UserError as error:
        return problems + error.problems
    optimizer: OptimizerConfig | None = settings.get("optimizer")
    if optimizer is not None:
        with contextlib.suppress(UserError):  # its own problems are told elsewhere
            problems += [f"optimizer.{text}" for text in group_problems(network, optimizer)]
    try:
        if config.get("ckpt") is not None:
            path = find_checkpoint(config.ckpt)
            given = read_checkpoint(path), network, data.image_size, config.resize_positions
            checkpoint, _ = with_resized_positions(*given)
            network_weights(network, checkpoint, path)
        elif config.init_from is not None:
            make = partial(network_in_file, imports=imports)
            initial = open_initial_weights(config.init_from, make, trust=imports.trust)
            initial.fitted(network, config.resize_positions)
        teacher = config.distillation.teacher
        if teacher and not teacher.startswith(("torchvision:", "timm:", "hf-hub:")) and not Path(teacher).exists():
            find_checkpoint(teacher, "distillation.teacher")
    except UserError as error:
        problems += error.problems
    return problems
