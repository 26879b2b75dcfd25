"""Trust in a config that a file of weights carries: it is data, and names classes of known packages alone.

Importing a module runs it, and a class may do anything when it is made. What the user writes may name any class; what
comes with somebody's weights names those below, unless the user trusts the file.
"""

import contextlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import vit_lightning
from vit_lightning.errors import UserError, refuse
from vit_lightning.storage.parsing import parse_yaml

PACKAGES = ("vit_lightning", "lightning", "timm", "torch.nn", "torch.optim", "torchmetrics", "torchvision")
"""Packages whose classes a config in a file of weights may name."""
OF_TENSORS = ("torch.nn.functional.", "torchmetrics.functional.", "torchvision.ops.", "torchvision.transforms.")
"""Modules whose functions and classes compute on tensors and do nothing else; others may unpickle files."""
UNPICKLES = ("torchvision.datasets.lsun",)
"""Modules whose datasets unpickle a file in the working folder, which anybody may have put there."""
CLASS_KEYS = {"class_path", "model", "module", "data", "metrics", "augment", "transform", "dataset_class"}
CLASS_KEYS |= {"callbacks", "logger", "plugins", "profiler", "strategy"}
"""Options whose value, if it is text, may be the path of a class."""
TEXTS = ("experiment", "wandb", "init_from")
"""Parts of a config in which no text is a class."""
FILES = (".csv", ".json", ".parquet", ".txt", ".yaml", ".zip", ".bin", ".ckpt", ".npz", ".pt", ".pth", ".safetensors")
"""Suffixes of files whose names look like paths of classes."""
HINT = "if you wrote or read that code: --trust on the command line, trust=True in Python"
HINT_IN_PYTHON = "if you wrote or read that code: trust=True"


def refuse_untrusted(config: Mapping[str, Any]) -> None:
    """Refuses what a config from a file of weights must not name; imports nothing but known packages.

    Raises:
        UserError: names all classes and functions of other packages, and those of known ones that are neither modules,
            datasets, optimizers, parts of a Trainer nor functions of tensors.
    """
    refused = [
        f"{option}={name}"
        for option, name, names_class in _names(config)
        if (not _is_harmless(name) if _is_known(name) else names_class or _could_be_imported(name))
    ]
    text = f"may name modules, datasets and functions of tensors alone, of {', '.join(PACKAGES)}; {HINT}"
    refuse([f"{', '.join(refused)}: a file of weights {text}"] if refused else [])


def _of_yaml(text: str) -> Any:
    """Returns the mapping or list that a text is as YAML; None if it is neither."""
    with contextlib.suppress(UserError):
        return found if isinstance(found := parse_yaml(text, ""), dict | list) else None
    return None


def _names(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, bool]]:
    """Yields each text that could be the path of a class or function, its option, and whether classes stand there."""
    if isinstance(node, Mapping | list | tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            if path or key not in TEXTS:
                yield from _names(value, (*path, str(key)))
    elif isinstance(node, str):
        yield from _names(_of_yaml(node), path)
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
    except (ImportError, AttributeError, ValueError):
        return True  # nothing that could be called
    if getattr(found, "__module__", "") in UNPICKLES:
        return False
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
