"""The LightningModule of a config: ViTClassifier, or the class of ``module.class_path`` with its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from vit_lightning.config.check_options import parse_arguments
from vit_lightning.config.files import Config
from vit_lightning.config.options import Settings
from vit_lightning.config.own_files import searched
from vit_lightning.config.own_parts import require_untyped
from vit_lightning.config.trust import find_class
from vit_lightning.errors import UserError
from vit_lightning.training.classifier import ViTClassifier

FILLED_IN = ("network", "num_classes", "image_size", "in_channels")
"""Arguments that any LightningModule may have: the configured model, and facts of the data."""
CONFIGURED = tuple(name for name in inspect.signature(ViTClassifier).parameters if name not in FILLED_IN)
"""Arguments of ViTClassifier that options of the same name configure."""


def class_of(config: Mapping[str, Any]) -> type[LightningModule]:
    """Returns the class of the module of a config.

    Raises:
        UserError: there is no such LightningModule.
    """
    chosen = config.get("module") or {"class_path": "vit_lightning.ViTClassifier"}
    name = chosen if isinstance(chosen, str) else chosen.get("class_path")
    if name is None:
        raise UserError("module.class_path is missing: its other options are the arguments of a LightningModule")
    found = find_class(name)
    if found is None:
        folders = f"; searched: installed packages, {searched()}" if searched() else ""
        raise UserError(f"module.class_path={name} is not there (give module.Class{folders})")
    if not (isinstance(found, type) and issubclass(found, LightningModule)):
        raise UserError(f"module.class_path={name} must be a LightningModule, such as a subclass of ViTClassifier")
    return found


def filled_in(kind: type[LightningModule]) -> list[str]:
    """Returns the arguments of a class that are filled in, and so are no options under ``module``."""
    known = ArgumentParser().add_class_arguments(kind, fail_untyped=False)
    names = (*FILLED_IN, *CONFIGURED, "metrics") if issubclass(kind, ViTClassifier) else FILLED_IN
    return [name for name in names if name in known]


def complete_module(config: Config) -> dict[str, Any] | None:
    """Returns the ``module`` of a merged config with all defaults, as plain data; None for ViTClassifier itself.

    Raises:
        UserError: there is no such class, or it has no such options.
    """
    given, kind = config.get("module"), class_of(config)
    if given is None or kind is ViTClassifier:
        return None
    arguments = {} if isinstance(given, str) else dict(given)
    name = given if isinstance(given, str) else arguments.pop("class_path")
    return {"class_path": name, "init_args": parse_arguments(arguments, "module", _parser(kind))[1]}


def unused_problems(config: Config, kind: type[LightningModule], settings: Mapping[str, Any]) -> list[str]:
    """Returns the options that are given, but that a module does not take."""
    taken, defaults = filled_in(kind), Settings()._asdict()
    keys = [key for key in CONFIGURED if key not in taken and settings.get(key, defaults.get(key)) != defaults.get(key)]
    keys += ["model"] if "network" not in taken and config.get("model") else []
    given = [f"{key}.{name}={value}" for key in keys for name, value in dict(config.get(key) or {}).items()]
    why = f"module.class_path={kind.__module__}.{kind.__qualname__} takes no"
    words = " or ".join("network" if key == "model" else key for key in keys)
    return [f"{', '.join(given)}: {why} {words} (leave it out, or give the class that argument)"] if keys else []


def make_own(config: Mapping[str, Any], available: Mapping[str, Any], kind: type[LightningModule]) -> LightningModule:
    """Returns the module of a complete config.

    Args:
        config: the complete config, as plain data.
        available: values of all arguments that are filled in.
        kind: its class, or one derived from it.
    """
    chosen = class_of(config)
    given = {name: available[name] for name in filled_in(chosen)}
    if arguments := deepcopy((config.get("module") or {}).get("init_args", {})):
        parser = _parser(chosen)
        given |= vars(parser.instantiate(parser.parse_object({"module": arguments}))["module"])
    return kind(**given)


def _parser(kind: type[LightningModule]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "module", skip={*filled_in(kind)}, fail_untyped=False, instantiate=False)
    require_untyped(parser, kind, "module")
    return parser
