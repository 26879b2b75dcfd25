"""jsonargparse parsers and help of the options, and objects made by them."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.config.options import COMMAND_OPTIONS, ConfigOptions, RunOptions, Settings
from vit_lightning.data.base import ImageData
from vit_lightning.data.digits import Digits
from vit_lightning.errors import UserError
from vit_lightning.models.vit import ViT

OWN_TRAINER_ARGUMENTS: set[str | int] = {
    "default_root_dir",
    "use_distributed_sampler",
    "enable_checkpointing",
    "barebones",
}
"""Arguments of Lightning's Trainer that the user cannot set: run folder, checkpoints, sharing of images among ranks."""

DEFAULT_CLASSES = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}

HELP = """Options are written the same in a config and as flags. model.class_path and data.class_path choose other
classes (data: CIFAR10, CIFAR100, Digits, HuggingFaceSet, ImageFolder, TorchvisionSet), whose arguments
then replace those below; blocks such as model.attention have arguments too (--model.attention.dropout=0.1)."""


@lru_cache
def make_parser(command: str = "fit") -> ArgumentParser:
    """Returns the parser of a config merged with the flags of a command."""
    parser = ArgumentParser(prog=f"lightning {command}", exit_on_error=False, allow_abbrev=False)
    _add_plain_options(parser, command)
    for name, kind in (("model", nn.Module), ("data", ImageData)):
        parser.add_argument(f"--{name}", type=kind, default={"class_path": DEFAULT_CLASSES[name]})
    for name, settings in Settings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(settings), default=settings)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip=OWN_TRAINER_ARGUMENTS)
    parser.set_defaults({"trainer.enable_model_summary": False})
    return parser


def make_help(command: str, positional: str = "") -> ArgumentParser:
    """Returns a parser for ``--help``, which lists the arguments of the default classes too."""
    words = ("lightning", command, positional, "[--config CONFIG.yaml ...] [--OPTION=VALUE ...]")
    usage = " ".join(filter(None, words))
    parser = ArgumentParser(prog=f"lightning {command}", usage=usage, description=HELP)
    parser.add_argument("--config", type=str, help="config file; several are merged in order, and flags come last")
    if command == "fit":
        text = "option that may differ from that of the resumed run; may be given several times"
        parser.add_argument("--allow-config-change", type=str, metavar="OPTION", help=text)
    parser.add_argument("--trust-config", type=bool, default=False, help="configs may name classes of any package")
    _add_plain_options(parser, command)
    for name, default in (("model", ViT), ("data", Digits), *((n, type(s)) for n, s in Settings()._asdict().items())):
        parser.add_class_arguments(default, name)
    parser.add_class_arguments(Trainer, "trainer", skip=OWN_TRAINER_ARGUMENTS)
    return parser


def _add_plain_options(parser: ArgumentParser, command: str) -> None:
    for options in (RunOptions, COMMAND_OPTIONS.get(command), ConfigOptions):
        if options is not None:
            parser.add_class_arguments(options, instantiate=False)


def instantiate(config: Namespace, key: str) -> Any:
    """Makes what a part of a parsed config describes.

    Raises:
        UserError: all problems that its class finds.
    """
    try:
        return make_parser().instantiate(Namespace({key: config[key]}))[key]
    except NotImplementedError:  # of a network that cannot be built without memory
        raise
    except (ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as fault:
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
