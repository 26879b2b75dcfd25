"""Trust in a config that a file of weights carries: it is data, names classes of known packages alone, and is bounded.

Importing a module runs it, and a class may do anything when it is made. What the user writes may name any class; what
comes with somebody's weights names those below, unless the user trusts the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import vit_lightning
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.storage.parsing import parse_yaml

PACKAGES = ("vit_lightning", "lightning", "timm", "torch.nn", "torch.optim", "torchmetrics", "torchvision")
"""Packages whose classes a config in a file of weights may name."""
OF_TENSORS = ("torch.nn.functional.", "torchmetrics.functional.", "torchvision.ops.", "torchvision.transforms.")
"""Modules whose functions and classes compute on tensors and do nothing else; others may unpickle files."""
CLASS_KEYS = {"class_path", "model", "module", "data", "metrics", "augment", "transform", "dataset_class"}
CLASS_KEYS |= {"callbacks", "logger", "plugins", "profiler", "strategy"}
"""Options whose value, if it is text, may be the path of a class."""
TEXTS = ("experiment", "wandb", "init_from")
"""Parts of a config in which no text is a class."""
FILES = (".csv", ".json", ".parquet", ".txt", ".yaml", ".zip", ".bin", ".ckpt", ".npz", ".pt", ".pth", ".safetensors")
"""Suffixes of files whose names look like paths of classes."""
READ_FROM = ("hf-hub:", "hf_hub:", "local-dir:", "http://", "https://", "file:")
"""Beginnings of names of models that are fetched, or read from another place, when they are made."""
PARAMETERS = 10_000
"""Parameters of a network at most, far above those of any that is known."""
HINT = "if you wrote or read that code: --trust on the command line, trust=True in Python"


def refuse_untrusted(config: Mapping[str, Any]) -> None:
    """Refuses what a config from a file of weights must not name; imports nothing but known packages.

    Raises:
        UserError: names all classes and functions of other packages, and those of known ones that are neither modules,
            datasets, optimizers, parts of a Trainer nor functions of tensors.
    """
    known, named = ", ".join(PACKAGES), list(_names(config))
    refuse(
        f"{option}={name} is of none of the packages that a file of weights may name ({known}); {HINT}"
        for option, name, names_class in named
        if not _is_known(name) and (names_class or _could_be_imported(name))
    )
    refuse(
        f"{option}={name}: a file of weights may name modules, datasets and functions of tensors alone; {HINT}"
        for option, name, _ in named
        if _is_known(name) and not _is_harmless(name)
    )
    refuse(
        f"{option}={name}: a file of weights may name no other place to read a model from; {HINT}"
        for option, name, _ in named
        if option.startswith("model") and name.startswith(READ_FROM)
    )


def _names(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, bool]]:
    """Yields each text that could be the path of a class or function, its option, and whether classes stand there."""
    if isinstance(node, Mapping | list | tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            if path or key not in TEXTS:
                yield from _names(value, (*path, str(key)))
    elif isinstance(node, str):
        with contextlib.suppress(UserError):  # a value may be YAML itself
            if isinstance(inner := parse_yaml(node, ""), dict | list):
                yield from _names(inner, path)
        name = f"vit_lightning.{node}" if node in vit_lightning.__all__ else node
        words = [key for key in path if not key.isdecimal()]
        if "." in name or ":" in name:
            yield ".".join(path), name, bool(words) and words[-1].rstrip("+") in CLASS_KEYS


def _is_known(name: str) -> bool:
    return name.startswith(tuple(f"{package}." for package in PACKAGES)) and all(map(str.isidentifier, name.split(".")))


def _could_be_imported(name: str) -> bool:
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)) or name.endswith(FILES):
        return False
    return importlib.util.find_spec(parts[0]) is not None  # of a package at the top, which this does not import


def _is_harmless(name: str) -> bool:
    """Whether a name of a known package is nothing that does more, when it is called, than make a part or compute."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):  # nothing that could be called
        return True
    if not callable(found) or f"{getattr(found, '__module__', '')}.".startswith(OF_TENSORS):
        return True
    if inspect.isclass(found):
        return found.__module__.startswith("vit_lightning.") or issubclass(found, _parts())
    try:
        made = get_type_hints(found).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(made) and issubclass(made, nn.Module)


def _parts() -> tuple[type, ...]:
    """Returns the bases of the parts that a config is made of."""
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import LayerSync, Precision
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

    of_torch = (nn.Module, Dataset, Optimizer, LRScheduler)
    of_trainer = (Callback, Logger, Profiler, Strategy, CheckpointIO, ClusterEnvironment, LayerSync, Precision)
    return (*of_torch, LightningDataModule, *of_trainer)


class _TooLarge(Exception):
    """A network that asks for more than it may."""


@contextlib.contextmanager
def bounded(weights: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Ends the making of a network that is far too large, as one of a million blocks, while it is being made.

    Args:
        weights: the tensors that it is made for, of which it may have a few times the numbers; none when not given.

    Raises:
        UserError: it has more parameters than any network, or more numbers than the weights allow.
    """
    tensors = [value for value in (weights or {}).values() if isinstance(value, Tensor) and value.device.type == "cpu"]
    stored = sum(min(value.numel(), value.untyped_storage().nbytes()) for value in tensors)
    most = math.inf if weights is None else 4 * stored + 10**7  # of a layer that is replaced, both are made
    parameters = numbers = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal parameters, numbers
        parameters, numbers = parameters + 1, numbers + (0 if is_lazy(parameter) else parameter.numel())
        if parameters > PARAMETERS or numbers > most:
            than = "" if weights is None else f", where the file has {stored:,}"
            raise _TooLarge(f"a network of more than {parameters - 1:,} parameters with {numbers:,} numbers{than}")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except _TooLarge as fault:
        raise UserError(f"{fault} (is its depth or one of its sizes too large?)") from fault
    finally:
        hook.remove()
