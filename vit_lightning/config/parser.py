"""The jsonargparse parser of the options, and objects made by it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.config.options import COMMAND_OPTIONS, ConfigOptions, RunOptions, Settings
from vit_lightning.config.own_files import where
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError

OWN_TRAINER_ARGUMENTS: set[str | int] = {
    "default_root_dir",
    "use_distributed_sampler",
    "enable_checkpointing",
    "barebones",
}
"""Arguments of Lightning's Trainer that the user cannot set: run folder, checkpoints, sharing of images among ranks."""

DEFAULT_CLASSES = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}


@lru_cache
def make_parser(command: str = "fit") -> ArgumentParser:
    """Returns the parser of a config merged with the flags of a command."""
    parser = ArgumentParser(prog=f"lightning {command}", exit_on_error=False, allow_abbrev=False)
    add_plain_options(parser, command)
    parser.add_argument("--module", type=Any, help="class_path and arguments of a LightningModule of one's own")
    for key in ("model", "data", *Settings._fields, "trainer"):
        _add_part(parser, key)
    return parser


@lru_cache
def _part_parser(key: str) -> ArgumentParser:
    """Returns the parser of one part of a config: many times faster than that of all."""
    parser = ArgumentParser(exit_on_error=False)
    _add_part(parser, key)
    return parser


def _add_part(parser: ArgumentParser, key: str) -> None:
    if key == "model":
        parser.add_argument("--model", type=nn.Module, default={"class_path": DEFAULT_CLASSES["model"]})
    elif key == "data":
        parser.add_argument("--data", type=ImageData)  # no default: another class would get its values of the same name
    elif key == "trainer":
        parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip=OWN_TRAINER_ARGUMENTS)
        set_trainer_defaults(parser)
    else:
        settings = getattr(Settings(), key)
        parser.add_argument(f"--{key}", type=type(settings), default=settings)


def parse_part(key: str, value: Any) -> Namespace:
    """Returns one part of a config, which is given as plain data, with the defaults of its classes."""
    parsed: Namespace = _part_parser(key).parse_object({key: deepcopy(value)})  # jsonargparse writes into nested lists
    return parsed


def set_trainer_defaults(parser: ArgumentParser) -> None:
    """Sets the defaults that differ from those of Lightning's Trainer."""
    parser.set_defaults({"trainer.enable_model_summary": False})


def add_plain_options(parser: ArgumentParser, command: str) -> None:
    """Adds the options that belong to no group."""
    for options in (RunOptions, COMMAND_OPTIONS.get(command), ConfigOptions):
        if options is not None:
            parser.add_class_arguments(options, instantiate=False)


def instantiate(config: Namespace, key: str) -> Any:
    """Makes what a part of a parsed config describes.

    Raises:
        UserError: all problems that its class finds.
    """
    try:
        return _part_parser(key).instantiate(Namespace({key: config[key]}))[key]
    except NotImplementedError:  # of a network that cannot be built without memory
        raise
    except Exception as fault:
        place = where(fault)
        if place is not None and not isinstance(fault, UserError):
            raise UserError(f"{key}: {place}") from fault
        if not isinstance(fault, ValueError | TypeError | OSError | RuntimeError | MisconfigurationException):
            raise
        cause: BaseException | None = fault
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__context__  # jsonargparse raises its own error for classes in lists
        problems = [f": {' '.join(str(fault).split())}"] if cause is None else [f".{text}" for text in cause.problems]
        raise UserError([f"{key}{problem}" for problem in problems]) from fault


def to_plain(config: Namespace) -> dict[str, Any]:
    """Returns the config as plain data, without the options of one call of a command."""
    kept = config.clone()
    for options in (RunOptions, *COMMAND_OPTIONS.values()):
        for field in fields(options):
            kept.pop(field.name, None)
    plain: dict[str, Any] = _plain(yaml.safe_load(make_parser().dump(kept, skip_unset=False)))
    return plain


def _plain(value: Any) -> Any:
    """Without the defaults of networks of others that cannot be written down, such as a function."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if not str(item).startswith("Unable to serialize")}
