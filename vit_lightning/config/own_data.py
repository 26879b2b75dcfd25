"""Datasets, data modules and transforms of others: where a config names one, ours is put around it."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from lightning.pytorch import LightningDataModule

from vit_lightning.config.files import Config, flatten, full_name, own_classes, unflatten
from vit_lightning.config.parser import DEFAULT_CLASSES
from vit_lightning.config.trust import UNTRUSTED, find_class, may_call
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.base import ImageData
from vit_lightning.data.own_code import argument_names, make, plain_arguments
from vit_lightning.data.per_image import PerImage
from vit_lightning.data.wrapped import WrappedDataModule, WrappedDataset
from vit_lightning.errors import UserError

TRANSFORMS = "torchvision.transforms.v2"
"""Module of transforms that ``data.augment`` may name without a module."""


def with_own_data(config: Config) -> tuple[Config, list[str]]:
    """Returns a flat config with ours around what is not ours in ``data``, and the problems of its options."""
    data = config.get("data")
    data = {"class_path": data} if isinstance(data, str) else data
    if not isinstance(data, dict):
        return config, []
    problems: list[str] = []
    if isinstance(data.get("augment"), list):
        data = {**data, "augment": _augmentations(data["augment"], problems)}
    return {**config, "data": _wrapped(data, problems)}, problems


def _wrapped(data: Config, problems: list[str]) -> Config:
    """Returns ``data`` with a dataset or data module of others as an argument of ours; its arguments go with it."""
    found = find_class(data.get("class_path", DEFAULT_CLASSES["data"]))
    rest = {key: value for key, value in data.items() if key != "class_path"}
    if found is WrappedDataset and "dataset_class" in data:
        return _dataset(rest.pop("dataset_class"), rest, rest.pop("arguments", None) or {}, problems)
    if found is WrappedDataModule and isinstance(module := rest.pop("module", None), dict):
        return _module(module, rest, problems)
    if found is None or not callable(found) or (isinstance(found, type) and issubclass(found, ImageData)):
        return data
    if isinstance(found, type) and issubclass(found, LightningDataModule):
        return _module({"class_path": data["class_path"]}, rest, problems)
    return _dataset(data["class_path"], rest, {}, problems, new=True)


def _dataset(name: str, rest: Config, given: Config, problems: list[str], *, new: bool = False) -> Config:
    own = find_class(name)
    if own is None:
        problems.append(f"data.dataset_class={name} is not there")
        return {}
    theirs, ours = argument_names(own), _names(WrappedDataset, "dataset_class", "arguments")
    ours_given, theirs_given = _sorted(rest, ours, theirs, name, problems, new=new)
    arguments = _typed(own, {**given, **theirs_given}, "data", problems)
    return {"class_path": full_name("WrappedDataset"), "dataset_class": name, "arguments": arguments, **ours_given}


def _module(module: Config, rest: Config, problems: list[str]) -> Config:
    own = find_class(module["class_path"])
    theirs = [] if own is None else argument_names(own)
    new = len(module) == 1
    ours_given, theirs_given = _sorted(
        rest, _names(WrappedDataModule, "module"), theirs, module["class_path"], problems, new=new
    )
    return {"class_path": full_name("WrappedDataModule"), "module": {**module, **theirs_given}, **ours_given}


def _names(kind: type, *without: str) -> list[str]:
    return [name for name in argument_names(kind) if name not in without]


def _sorted(
    given: Config, ours: list[str], theirs: list[str], name: str, problems: list[str], *, new: bool
) -> tuple[Config, Config]:
    """Returns our options and theirs; a name of both is theirs if ``new``, else ours."""
    for key in given:
        if key not in (*ours, *theirs):
            near = difflib.get_close_matches(key, [*theirs, *ours], n=1, cutoff=0.6)
            choices = f"those of {name}: {', '.join(theirs) or 'none'}; ours: {', '.join(ours)}"
            hint = f"did you mean data.{near[0]}?" if near else f"choose among {choices}"
            problems.append(f"data.{key}={given[key]}: there is no such option ({hint})")
    for_them = {key: value for key, value in given.items() if key in theirs and (new or key not in ours)}
    for_us = {
        key: value for key, value in given.items() if key in ours and (key not in for_them or key == "num_classes")
    }
    return for_us, for_them


def _typed(own: Any, arguments: Config, key: str, problems: list[str]) -> Config:
    try:
        typed: Config = flatten(plain_arguments(own, unflatten(arguments)))
        return typed
    except UserError as error:
        problems += [f"{key}.{problem}" for problem in error.problems]
        return {}


def _augmentations(entries: list[Any], problems: list[str]) -> list[Any]:
    found = (_augmentation(entry, f"data.augment.{number}", problems) for number, entry in enumerate(entries))
    return [entry for entry in found if entry is not None]


def _augmentation(entry: Any, key: str, problems: list[str]) -> Any:
    """Returns an entry of ``data.augment``; a transform of single images as an argument of ``PerImage``."""
    given = {"class_path": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or "class_path" not in given:
        return entry
    name, arguments = str(full_name(given["class_path"])), {k: v for k, v in given.items() if k != "class_path"}
    module = importlib.import_module(TRANSFORMS) if "." not in name else None
    if hasattr(module, name):
        name = f"{TRANSFORMS}.{name}"
    found = find_class(name) if "." in name else None
    if found is None or not callable(found):
        ours = own_classes(Augmentation)
        near = difflib.get_close_matches(name.rpartition(".")[2], [*ours, *dir(module)] if module else ours, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(ours)}, one of {TRANSFORMS}, or module.Class"
        problems.append(f"{key}={name}: there is no such augmentation ({hint})")
        return None
    if isinstance(found, type) and issubclass(found, Augmentation):
        return {**given, "class_path": name}
    if not may_call(found):
        problems.append(f"{key}={name}{UNTRUSTED}")
        return None
    unknown = [option for option in arguments if option not in (names := argument_names(found))]
    if unknown:
        for option in unknown:
            near = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(names) or 'none'}"
            problems.append(f"{key}.{option}={arguments[option]}: {name} has no such option ({hint})")
        return None
    before = len(problems)
    arguments = _typed(found, arguments, key, problems)
    if isinstance(found, type) and len(problems) == before:
        try:
            make(found, unflatten(arguments))
        except UserError as error:
            problems.append(f"{key}={name}: {error}")
    wrapped = {"class_path": full_name(PerImage.__name__), "transform": name, "arguments": arguments or None}
    return wrapped if len(problems) == before else None
