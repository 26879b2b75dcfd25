"""The jsonargparse parser of the options, and objects made by it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.config.constructors import as_dict_kwargs
from vit_lightning.config.files import Config
from vit_lightning.config.options import COMMAND_OPTIONS, ConfigOptions, RunOptions, Settings
from vit_lightning.config.own_files import where
from vit_lightning.config.own_parts import Own, add_own_parts, bind, nested, own_parts
from vit_lightning.config.trust import refuse_calls
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError

OWN_TRAINER_ARGUMENTS: set[str | int] = {
    "default_root_dir",
    "use_distributed_sampler",
    "enable_checkpointing",
    "barebones",
}
"""Arguments of Lightning's Trainer that the user cannot set: run folder, checkpoints, sharing of images among ranks."""

Precision = _PRECISION_INPUT | Literal["auto"] | None
"""Precisions of Lightning, and the one that fits the hardware."""

DEFAULT_CLASSES = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}


def parse(config: Config, command: str = "fit", *, defaults: bool = True) -> Namespace:
    """Parses a flat config.

    Raises:
        ArgumentError: the first unknown option or wrong type.
        UserError: a class of a loss, an optimizer or a schedule is not there.
    """
    parsed: Namespace = make_parser(command, own_parts(config)).parse_object(nested(config), defaults=defaults)
    return parsed


def make_parser(command: str = "fit", own: Own = ()) -> ArgumentParser:
    """Returns the parser of a config merged with the flags of a command.

    Args:
        command: the command.
        own: class paths of the config's loss, optimizer and schedule, whose arguments are options then.
    """
    return _parser_with(command, own) if own else _usual_parser(command)


def _parser_with(command: str, own: Own) -> ArgumentParser:
    parser = ArgumentParser(prog=f"lightning {command}", exit_on_error=False, allow_abbrev=False)
    add_plain_options(parser, command)
    parser.add_argument("--module", type=Any, help="class_path and arguments of a LightningModule of one's own")
    for key in ("model", "data", *Settings._fields, "trainer"):
        _add_part(parser, key, own)
    return parser


@lru_cache
def _usual_parser(command: str) -> ArgumentParser:
    return _parser_with(command, ())


def part_parser(key: str, own: Own = ()) -> ArgumentParser:
    """Returns the parser of one part of a config: many times faster than that of all."""
    return _part_parser_with(key, own) if own else _usual_part_parser(key)


def _part_parser_with(key: str, own: Own) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    _add_part(parser, key, own)
    return parser


@lru_cache
def _usual_part_parser(key: str) -> ArgumentParser:
    return _part_parser_with(key, ())


def _add_part(parser: ArgumentParser, key: str, own: Own) -> None:
    if any(name.split(".")[0] == key for name, _ in own):
        add_own_parts(parser, key, own)
    elif key == "model":
        parser.add_argument("--model", type=nn.Module, default={"class_path": DEFAULT_CLASSES["model"]})
    elif key == "data":
        parser.add_argument("--data", type=ImageData)  # no default: another class would get its values of the same name
    elif key == "trainer":
        skipped = {*OWN_TRAINER_ARGUMENTS, "precision"}
        parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip=skipped)
        parser.add_argument("--trainer.precision", type=Precision, default=None)
        set_trainer_defaults(parser)
    else:
        settings = getattr(Settings(), key)
        parser.add_argument(f"--{key}", type=type(settings), default=settings)


def parse_part(key: str, value: Any) -> Namespace:
    """Returns one part of a config, which is given as plain data, with the defaults of its classes."""
    value = as_dict_kwargs(deepcopy(value))  # jsonargparse writes into nested lists
    parsed: Namespace = part_parser(key).parse_object({key: value})
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
    refuse_calls(config[key], key)
    try:
        own = own_parts({key: config[key]})
        made = part_parser(key, own).instantiate(Namespace({key: config[key]}))[key]
        return bind(key, made, own) if own else made
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
        for field in fields(options):  # type: ignore[arg-type]
            kept.pop(field.name, None)
    parser = make_parser(own=own_parts(kept))
    written = parser.dump(kept, skip_unset=False, skip_validation=True)  # it has been parsed, and so checked
    plain: dict[str, Any] = _plain(yaml.safe_load(written))
    model = plain["model"]
    if isinstance(model, dict) and "dict_kwargs" in model:
        model["init_args"] = {**model.get("init_args", {}), **model.pop("dict_kwargs")}
    return plain


def _plain(value: Any) -> Any:
    """Without the defaults of networks of others that cannot be written down, such as a function."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if not str(item).startswith("Unable to serialize")}
