"""Configs as LightningCLI writes them, in our spelling."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from vit_lightning.config.files import Config
from vit_lightning.config.names import can_be_class, find_class, full_name
from vit_lightning.errors import UserError

OURS = {
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
    config = dict(config)
    if isinstance(config.get("seed_everything"), bool):  # Lightning too takes 0
        config["seed_everything"] = 0
    for key in ("ckpt_path", "weights_only"):
        if config.get(key, "") in (None, "null"):
            del config[key]
    if "ckpt_path" in config:
        config["ckpt"] = config.pop("ckpt_path")
    schedule = config.pop("lr_scheduler", None)
    if isinstance(schedule, str) and can_be_class(schedule):
        schedule = {"class_path": schedule}
    if isinstance(schedule, dict):
        schedule = {"interval": "epoch", **schedule}
    if schedule is not None:
        config["optimizer"] = {**(config.get("optimizer") or {}), "schedule": schedule}
    if isinstance(trainer := config.get("trainer"), dict):
        defaults = {name: inspect.signature(Trainer).parameters[name].default for name in OURS}
        given = {name: value for name, value in trainer.items() if name in OURS}
        config["trainer"] = {name: value for name, value in trainer.items() if name not in OURS}
        for name, value in given.items():
            usual = (defaults[name], str(defaults[name]).lower(), *(("true", True) if "checkpoint" in name else ()))
            if value not in (None, "null", *usual):
                shown = str(value).lower() if isinstance(value, bool) else value
                problems.append(f"trainer.{name}={shown}: {OURS[name]}")
    model = config.get("model")
    if isinstance(model, dict) and "module" not in config and _is_module(model.get("class_path")):
        config["module"] = config.pop("model")
    return config


def as_lightning_trains(config: Config, module: Any) -> Config:
    """Returns a merged config whose learning rate is constant where no schedule is given, as that of LightningCLI.

    Args:
        config: the config.
        module: the class of a LightningModule that leaves its optimizer to the config.
    """
    given = config.get("optimizer")
    given = {"class_path": given} if isinstance(given, str) and can_be_class(given) else given
    if lacks_optimizer(module) and isinstance(given, dict) and given.get("class_path") is not None:
        return {**config, "optimizer": {"schedule": "constant", **given}}
    return config


def lacks_optimizer(module: Any) -> bool:
    """Whether a LightningModule has no configure_optimizers; as Lightning's command line, ours gives it one."""
    return bool(module.configure_optimizers is LightningModule.configure_optimizers)


def _is_module(name: Any) -> bool:
    try:
        found = find_class(full_name(name)) if isinstance(name, str) else None
    except UserError:  # which is named when the config is read
        return False
    return inspect.isclass(found) and issubclass(found, LightningModule)
