"""Packages that a config, also one in a checkpoint, may import from.

Importing a module runs it. So a config is only data as long as it names classes of known packages; ``--trust-config``
allows all packages that it names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import jsonargparse
import yaml
from jsonargparse import _common
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from vit_lightning.config.files import Config, full_name
from vit_lightning.config.own_files import import_problem, is_searched, search, searched_folders
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse

PACKAGES = ["vit_lightning", "lightning", "timm", "torch.nn", "torch.optim", "torchmetrics", "torchvision"]
CALLABLE = ("torch.nn.functional.", "torchmetrics.functional.", "torchvision.ops.", "torchvision.transforms.")
"""Modules whose functions and classes compute on tensors and do nothing else; others may unpickle files."""

UNTRUSTED = ": only datasets, modules and functions of tensors are called without --trust-config"

_allowed: list[str] = list(PACKAGES)
_allowed_once: set[str] = set()
_trusts = False

CLASS_KEYS: tuple[str, ...] = ("model", "module", "data", "callbacks", "logger", "plugins", "profiler", "strategy")
CLASS_KEYS += ("dataset_class", "augment", "transform", "metrics")
"""Options whose value may be a class path itself."""

LIGHTNING_CLASSES = [f"lightning.pytorch.{kind}" for kind in ("callbacks", "loggers", "profilers", "strategies")]
"""Modules of classes that a config may name without a module."""

TRAINER_CLASSES = ("callbacks", "logger", "profiler", "strategy", "plugins")
"""Options of the Trainer whose value may be a class."""


@dataclass(frozen=True)
class Imports:
    """Packages that a config may import from, folders of the user's files, and whether any function is called."""

    packages: tuple[str, ...] = tuple(PACKAGES)
    folders: tuple[Path, ...] = ()
    trust: bool = False

    def allow(self) -> None:
        """Allows these alone, for the whole process: another config may have been checked meanwhile."""
        if not is_searched(self.folders):
            search(self.folders)
        global _trusts
        _trusts = self.trust
        # arguments of type Any may name a class or function, which jsonargparse would call
        jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=self.trust)
        _allowed[:] = self.packages
        denied = ["*", *_allowed_once.difference(self.packages)]  # jsonargparse only ever adds to its lists
        jsonargparse.set_parsing_settings(import_path_denylist=denied, import_path_allowlist=list(self.packages))
        _allowed_once.update(self.packages)


KNOWN_PACKAGES = Imports()


def restrict_imports(config: Config, *, trust: bool, folders: Iterable[Path] = ()) -> Imports:
    """Lets jsonargparse import from the known packages alone, or with ``trust`` also from those that the config names.

    Args:
        config: the merged config.
        trust: whether the config may name any package.
        folders: where modules of the user's own are searched, with trust.

    Raises:
        UserError: without trust, each class of another package, before anything of it is imported; with trust, each
            module whose import fails.
    """
    named = [(path, name) for path, name in _class_paths(config) if not may_import(name, PACKAGES)]
    searched = search(folders if trust else ())
    if trust:
        names = {name.split(".")[0] for _, name in named}
        packages = (*PACKAGES, *(name for name in names if name.isidentifier()))
        imports = Imports(packages, searched, trust)
        imports.allow()
        found = [(path, name, import_problem(name)) for path, name in named]
        refuse([f"{path}={name}: {problem}" for path, name, problem in found if problem])
        return imports
    KNOWN_PACKAGES.allow()
    refuse_unknown(config)
    return KNOWN_PACKAGES


def refuse_unknown(config: Config) -> None:
    """Refuses classes of other than the known packages, and functions that may not be called.

    Raises:
        UserError: all of either kind.
    """
    known = ", ".join(PACKAGES)
    refuse(
        f"{path}={name} is of none of the packages that a config may import from ({known}); "
        "if you wrote or read that code: --trust-config"
        for path, name in _class_paths(config)
        if not may_import(name, PACKAGES)
    )
    refuse(f"{path}={name}{UNTRUSTED}" for path, name in _strings(config) if not _may_name(name))


@contextlib.contextmanager
def allowing(imports: Imports | None) -> Iterator[None]:
    """Allows these imports alone for a while; the user's own program may use jsonargparse too. None changes nothing."""
    global _trusts
    if imports is None:
        yield
        return
    settings, before = dict(_common.parsing_settings), Imports(tuple(_allowed), searched_folders(), _trusts)
    (imports if imports.trust else replace(imports, folders=before.folders)).allow()
    try:
        yield
    finally:
        _allowed[:], _trusts = before.packages, before.trust
        _common.parsing_settings.update(settings)


def trusts() -> bool:
    """Whether any function may be called now."""
    return _trusts


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields all strings of a config, each with its option; also those in strings that are YAML themselves."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _strings(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, str):
        yield path, node
        with contextlib.suppress(yaml.YAMLError):
            if isinstance(inner := yaml.safe_load(node), dict | list):
                yield from _strings(inner, path)


def _may_name(name: str) -> bool:
    """Whether a value is none of the functions that jsonargparse would call, or give to a class as a callable."""
    if "." not in name or not may_import(name):
        return True
    try:
        found = pkgutil.resolve_name(name)  # also of a class, such as load_from_checkpoint
    except (ImportError, AttributeError):  # which other checks tell
        return True
    if inspect.isclass(found) or not callable(found) or may_call(found):
        return True
    try:
        returned = get_type_hints(found).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)  # of a network


def _class_paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields the class paths of a config, each with its option."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _class_paths(value, (*path, str(key)))
    elif isinstance(node, list):
        for item in node:
            yield from _class_paths(item, path)
    elif isinstance(node, str) and path and path[-1].rstrip("+") in ("class_path", *CLASS_KEYS):
        name = full_name(node)
        if "." in name:
            yield ".".join(path), name


def may_import(name: str, packages: Collection[str] | None = None) -> bool:
    """Whether a config may name this class, or whether it is in one of ``packages``."""
    known = _allowed if packages is None else packages
    parts = name.split(".")
    return all(part.isidentifier() for part in parts) and any(
        parts[: len(package)] == package for package in (package.split(".") for package in known)
    )


def with_full_trainer_names(config: Config) -> Config:
    """Returns a flat config whose callbacks, loggers, profilers and strategies are named in full.

    ``[EarlyStopping]`` becomes ``[{class_path: lightning.pytorch.callbacks.EarlyStopping}]``; words such as ``simple``
    or ``ddp`` stay.
    """
    trainer = config.get("trainer")
    if not isinstance(trainer, dict):
        return config
    named = {key: _with_full_name(trainer[key]) for key in TRAINER_CLASSES if key in trainer}
    return {**config, "trainer": {**trainer, **named}}


def _with_full_name(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_full_name(item) for item in value]
    given = {"class_path": value} if isinstance(value, str) and (value[:1].isupper() or "." in value) else value
    if not isinstance(given, dict) or not isinstance(given.get("class_path"), str):
        return value
    name = full_name(given["class_path"])
    return {**given, "class_path": lightning_classes().get(name, name)}


def lightning_classes() -> dict[str, str]:
    """Returns the full names of Lightning's callbacks, loggers, profilers and strategies by their short ones."""
    homes = {home: importlib.import_module(home) for home in LIGHTNING_CLASSES}
    return {name: f"{home}.{name}" for home, module in homes.items() for name in module.__all__}


def find_class(class_path: Any) -> Any:
    """Returns the class or function of a name that may be imported, None if there is none."""
    name = str(full_name(class_path))
    if "." in name and not may_import(name):
        return None
    module, _, attribute = name.rpartition(".")
    for home in [module] if module else LIGHTNING_CLASSES:
        try:
            return getattr(importlib.import_module(home), attribute)
        except (ImportError, AttributeError, ValueError):
            continue
    return None


def may_call(found: Any) -> bool:
    """Whether a config may have a class or function of a known package called; with trust, anything."""
    kinds = (nn.Module, Dataset, LightningDataModule, Optimizer, LRScheduler)
    if _trusts or (isinstance(found, type) and issubclass(found, kinds)):
        return True
    return f"{getattr(found, '__module__', '')}.".startswith(CALLABLE)


def refuse_calls(node: Any, path: str) -> None:
    """Refuses datasets, transforms and functions that read data, in a part of a parsed config, which may not be called.

    Raises:
        UserError: the first of them.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict | jsonargparse.Namespace):
        items = (node if isinstance(node, dict) else vars(node)).items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    for key, value in items:
        found = find_class(value) if isinstance(value, str) else value
        is_called = key in ("dataset_class", "transform") or (path.startswith("data") and inspect.isroutine(found))
        if is_called and callable(found) and not may_call(found):
            name = value if isinstance(value, str) else f"{found.__module__}.{found.__qualname__}"
            raise UserError(f"{path}.{key}={name}{UNTRUSTED}")
        refuse_calls(value, path if key == "init_args" else f"{path}.{key}")
