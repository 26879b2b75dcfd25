"""Configs as LightningCLI writes them, in our spelling."""

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from vit_lightning.config.files import Config, as_list, as_map, value_at, without_nulls
from vit_lightning.config.names import HOMES, can_be_class, class_of
from vit_lightning.config.signatures import signature_of
from vit_lightning.data.base import ImageData
from vit_lightning.training.classifier import ViTClassifier

SET_BY_RUN = {
    "default_root_dir": "results are written to runs/ (leave it out, or give --out NEW_FOLDER)",
    "enable_checkpointing": "a run keeps checkpoints, from which it is resumed (leave it out)",
    "use_distributed_sampler": "the data shares out the images itself (leave it out)",
    "barebones": "a run keeps its metrics and checkpoints (leave it out)",
}
"""Arguments of Lightning's Trainer that a run sets itself."""


def as_ours(config: Config, problems: list[str]) -> Config:
    """Returns a flat config without what LightningCLI writes into each, and with its other keys under our names.

    Args:
        config: the config.
        problems: gets what would switch off a promise of ours.
    """
    config = without_nulls(config, "ckpt_path", "weights_only")
    if isinstance(config.get("seed_everything"), bool):  # Lightning too takes 0
        config["seed_everything"] = 0
    if "ckpt_path" in config:
        config["ckpt"] = config.pop("ckpt_path")
    if "lr_scheduler" in config:
        schedule = config.pop("lr_scheduler") or "constant"
        if isinstance(schedule, dict) or can_be_class(str(schedule)):
            schedule = {"interval": "epoch", **as_map(schedule)}
        optimizer = as_map(config.get("optimizer"))
        if "schedule" in optimizer:
            problems.append("lr_scheduler and optimizer.schedule are the same option (leave one of them out)")
        config["optimizer"] = {"schedule": schedule, **optimizer}
    if isinstance(trainer := config.get("trainer"), dict):
        config["trainer"] = _without_what_a_run_sets(trainer, problems)
    model = config.get("model") if "module" not in config else None
    if isinstance(model, dict) and issubclass(class_of(model.get("class_path")), LightningModule):
        config["module"] = config.pop("model")
    module = config.get("module")
    if isinstance(module, dict) and "network" in module and config.get("model") is None:
        config["module"] = {name: value for name, value in module.items() if name != "network"}
        config["model"] = module["network"]
    return config


def _without_what_a_run_sets(trainer: Config, problems: list[str]) -> Config:
    """Returns arguments of the Trainer without those of ``SET_BY_RUN``; any but their usual values are problems."""
    for name in [name for name in trainer if name in SET_BY_RUN]:
        value, default = trainer[name], inspect.signature(Trainer).parameters[name].default
        usual = (None, default, str(default).lower(), *(("true", True) if "checkpoint" in name else ()))
        if value not in usual:
            shown = str(value).lower() if isinstance(value, bool) else value
            problems.append(f"trainer.{name}={shown}: {SET_BY_RUN[name]}")
    return {name: value for name, value in trainer.items() if name not in SET_BY_RUN}


def of_the_module(config: Config, earlier: Config) -> Config:
    """Returns a config with what it gives ``model`` under ``module``, where its module, or else that of earlier ones,
    takes no network.

    So that ``--model.width=64`` is an option of the LightningModule that LightningCLI's config has under ``model``.
    """
    given, model = config.get("module"), config.get("model")
    if isinstance(model, dict) and "class_path" not in model and takes_no_network([earlier, config]):
        config = {name: value for name, value in config.items() if name != "model"}
        config["module"] = {**model, **as_map(given)}
    return config


def module_of(configs: Sequence[Config]) -> Any:
    """Returns the LightningModule that the last of configs names, or else ours."""
    names = (as_map(config.get("module")).get("class_path") for config in reversed(configs))
    kind = class_of(next(filter(None, names), None))
    return kind if issubclass(kind, LightningModule) else ViTClassifier


def takes_no_network(configs: Sequence[Config]) -> bool:
    """Whether the LightningModule of configs has its network itself."""
    return "network" not in signature_of(module_of(configs)).options


def as_lightning_trains(config: Config) -> Config:
    """Returns a merged config with what LightningCLI takes where nothing is given, or from another place.

    A learning rate without a schedule is constant, the data are the loaders that a module has where none are given, a
    LightningDataModule whose ``num_classes`` has no default has the classes of the module, and the best checkpoint is
    that of the first ``ModelCheckpoint``.
    """
    more: Config = {}
    optimizer, given, data = (as_map(config.get(key)) for key in ("optimizer", "module", "data"))
    module = module_of([config])
    if lacks_optimizer(module) and can_be_class(str(optimizer.get("class_path") or "")):
        more["optimizer"] = {"schedule": "constant", **optimizer}
    named = data.get("class_path")
    has_loaders = module.train_dataloader is not LightningModule.train_dataloader
    if has_loaders and (named is None or class_of(named) is module):
        more["data"] = {**data, **given}
    elif "num_classes" in given:
        kind = class_of(data.get("class_path"))
        own = signature_of(kind).options.get("num_classes")
        is_told = own is not None and not own.required and own.default is not None
        if issubclass(kind, LightningDataModule) and not issubclass(kind, ImageData) and not is_told:
            more["data"] = {"num_classes": given["num_classes"], **data}
    checkpoint = config.get("checkpoint") or {}
    if isinstance(checkpoint, dict) and "monitor" not in checkpoint:
        more["checkpoint"] = {**_monitored(config.get("trainer")), **checkpoint}
    return {**config, **more}


def _monitored(trainer: Any) -> Config:
    """Returns monitor and mode of the first ``ModelCheckpoint`` that has a monitor; nothing without one."""
    for given in map(as_map, as_list(value_at(trainer, "callbacks"))):
        if issubclass(kind := class_of(given.get("class_path"), HOMES["Callback"]), ModelCheckpoint):
            known = {name: option.default for name, option in signature_of(kind).options.items()} | given
            if isinstance(known.get("monitor"), str):
                return {"monitor": known["monitor"], "mode": known.get("mode", "min")}
    return {}


def lacks_optimizer(module: Any) -> bool:
    """Whether a LightningModule has no configure_optimizers; as Lightning's command line, ours gives it one."""
    return bool(module.configure_optimizers is LightningModule.configure_optimizers)
