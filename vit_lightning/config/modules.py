"""The LightningModule of a config: ViTClassifier, or the class of ``module.class_path`` with its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from vit_lightning.config.files import Config
from vit_lightning.config.networks import FACTS
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import WRONG, Part, Reader
from vit_lightning.training.classifier import ConfiguredOptimizer, ViTClassifier

FILLED_IN = ("network", *FACTS)
"""Arguments that any LightningModule may have: the configured model, and facts of the data."""
CONFIGURED = tuple(name for name in inspect.signature(ViTClassifier).parameters if name not in FILLED_IN)
"""Arguments of ViTClassifier that options of the same name configure."""


def filled_in(kind: type[LightningModule]) -> list[str]:
    """Returns the arguments of a class that are filled in, and so are no options under ``module``."""
    names = (*FILLED_IN, *CONFIGURED) if issubclass(kind, ViTClassifier) else FILLED_IN
    return [name for name in names if name in signature_of(kind).options]


def read_module(reader: Reader, config: Config) -> Any:
    """Returns the module of a merged config; ``WRONG`` if it cannot be made."""
    if config.get("module") is None:
        return Part(ViTClassifier, {})
    if (found := reader.find(LightningModule, config["module"], "module")) is None:
        return WRONG
    name, kind, arguments = found
    if not (inspect.isclass(kind) and issubclass(kind, LightningModule)):
        text = "must be a LightningModule, such as a subclass of ViTClassifier"
        reader.problems.append(f"module.class_path={name} {text}")
        return WRONG
    signature, filled = signature_of(kind), filled_in(kind)
    options = {key: option for key, option in signature.options.items() if key not in filled}
    return reader.made_of(signature._replace(options=options), kind, name, arguments, "module")


def takes(part: Part, key: str) -> bool:
    """Whether the module takes what a group of options configures."""
    if key == "optimizer" and part.target.configure_optimizers is LightningModule.configure_optimizers:
        return True  # as Lightning's command line, ours gives it one
    return ("network" if key == "model" else key) in filled_in(part.target)


def unused_problems(part: Part, config: Config) -> list[str]:
    """Returns the options that are given, but that the module does not take."""
    keys = [key for key in (*CONFIGURED, "model") if config.get(key) is not None and not takes(part, key)]
    given = [f"{key}.{name}={value}" for key in keys for name, value in _items(config[key])]
    words = " or ".join("network" if key == "model" else key for key in keys)
    why = f"module.class_path={part.name} takes no {words} (leave it out, or give the class that argument)"
    return [f"{', '.join(given)}: {why}"] if given else []


def _items(given: Any) -> list[tuple[str, Any]]:
    return list(given.items()) if isinstance(given, Mapping) else [("class_path", given)]


def make_module(part: Part, available: Mapping[str, Any]) -> LightningModule:
    """Returns the module of a config.

    Args:
        part: the module.
        available: values of all arguments that are filled in.
    """
    given, kind = {name: available[name] for name in filled_in(part.target)}, part.target
    lacks_optimizer = kind.configure_optimizers is LightningModule.configure_optimizers
    if lacks_optimizer:
        kind = type(kind.__name__, (ConfiguredOptimizer, kind), {"__module__": kind.__module__})
    module: LightningModule = replace(part, target=kind).make(**given)
    if lacks_optimizer:
        module.optimizer_config = available["optimizer"]
    return module
