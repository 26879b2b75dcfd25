"""All unknown options and wrong types of a config at once.

jsonargparse stops at the first problem. So it parses again and again: each time the option that its error names is
reported in plain words and left out. Configs are flat here (``files.flatten``).
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Trainer

import vit_lightning
from vit_lightning.config.files import Config, own_classes, unflatten
from vit_lightning.config.options import Settings
from vit_lightning.config.own_files import searched, searched_modules
from vit_lightning.config.own_parts import PLACES, class_at, class_problems, nested, own_parts
from vit_lightning.config.parser import DEFAULT_CLASSES, part_parser
from vit_lightning.config.trust import find_class, lightning_classes, may_import
from vit_lightning.data.base import ImageData
from vit_lightning.limits import refuse
from vit_lightning.models.vit import ViT

WORDS = {
    "<class 'int'>": "an int",
    "<class 'float'>": "a finite float",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "a string",
    "<class 'list'>": "a list",
    "<class 'collections.abc.Iterable'>": "a list",
    "<class 'NoneType'>": "null",
    "dot import path string": "a class path",
}
"""Types as jsonargparse's errors name them, and as ours do."""

FROM_DATA = {"image_size": 8, "in_channels": 3, "num_classes": 2}
"""Arguments of a network that follow from the data, with values of the right types."""

FIXED = ("image_size", "in_channels", "mean", "std")
"""Facts that some data sets have as options, and others as constants."""

USUAL_NAMES = {
    "epochs": "max_epochs",
    "steps": "max_steps",
    "gpus": "devices",
    "grad_clip": "gradient_clip_val",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "seed": "seed_everything",
    "bs": "batch_size",
    "workers": "num_workers",
    "dim": "emb_size",
    "embed_dim": "emb_size",
    "hidden_size": "emb_size",
    "layers": "depth",
    "num_layers": "depth",
    "heads": "num_heads",
}
"""Names of options in other programs, and ours."""

REMOVED = {
    "ShardedSet": ": litdata's files are no longer read; lightning shard writes Parquet now: use HuggingFaceSet with "
    "--data.path=FOLDER"
}
"""Classes of earlier versions, and what replaces them."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One wrong option of a config."""

    path: Path
    text: str
    missing: bool = False
    """Whether a required option was not given."""


def find_problems(config: Config, parser: ArgumentParser) -> tuple[list[Problem], Config]:
    """Returns all unknown options, wrong types and unknown classes of a config, and the config without them."""
    config, problems = copy.deepcopy(config), list[Problem]()
    for key in list(config):
        while key in config and (problem := _first_problem(key, config[key], parser)) is not None:
            if problem.path in {other.path for other in problems}:  # it is required, but was left out as wrong
                break
            problems.append(problem)
            if not remove(config, problem.path):
                break
    return problems, config


def parse_arguments(arguments: Config, key: str, parser: ArgumentParser) -> tuple[Namespace, Config]:
    """Returns the parsed arguments of a class, and as plain data with all defaults.

    Raises:
        UserError: all unknown options and wrong types.
    """
    found, _ = find_problems({key: arguments}, parser)
    refuse(problem.text for problem in found)
    parsed: Namespace = parser.parse_object(unflatten({key: arguments}))
    return parsed, (yaml.safe_load(parser.dump(parsed, skip_unset=False)) or {}).get(key, {})


def remove(config: Config, path: Path) -> bool:
    """Deletes an option, or an item of a list, from a config; returns whether it was there."""
    node, last = _get(config, path[:-1]), path[-1]
    there = last in node if isinstance(node, dict) else isinstance(node, list) and isinstance(last, int)
    if there:
        del node[last]
    return there


def _first_problem(key: str, value: Any, parser: ArgumentParser) -> Problem | None:
    given = value
    if isinstance(value, dict) and key in DEFAULT_CLASSES:
        given = {"class_path": DEFAULT_CLASSES[key], **value}
    if isinstance(given, dict) and key == "model" and (network := find_class(given["class_path"])) is not None:
        named = inspect.signature(network).parameters
        given = {**{name: fact for name, fact in FROM_DATA.items() if name in named}, **given}
    if key == "metrics" and not isinstance(given, dict):  # see own_metrics
        return None
    own = own_parts({key: given})
    for name, class_path in own:
        if problems := class_problems(name, class_path):
            return Problem(tuple(name.split(".")), problems[0])
    parser = part_parser(key, own) if own else parser
    try:
        parser.parse_object(nested({key: given}), defaults=False)
    except ArgumentError as fault:
        return _describe(fault, {key: value}, parser)
    return None


def _describe(fault: ArgumentError, config: Config, parser: ArgumentParser) -> Problem | None:
    """Returns the problem of an error of jsonargparse: each error of its chain names one more key of the path."""
    keys: list[str] = []
    text, class_path, is_block = "", "", False
    for message in _messages(fault):
        if "Unable to load config" in message:
            key, value = next(iter(config.items()))
            meant = f"; did you mean {key}.name={value}?" if value in _choices_of_name(key) else ""
            return Problem((key,), f"{key}={value}: give its options ({', '.join(_names(parser, key))}){meant}")
        if found := re.match(r'Parser key "(.+?)":\s*(.*)', message, re.DOTALL):
            keys += found[1].split(".")
            text = found[2]
        elif found := re.match(r"Group '(.+?)' does not accept option '(.+?)'", message):
            return _unknown(
                _locate(config, [*found[1].split("."), found[2]], message), config, _names(parser, found[1])
            )
        elif found := re.match(r"Option '(.+?)' is not accepted", message):
            keys += found[1].split(".")
            if keys[0] not in vars(parser.get_defaults()):  # a misspelt group
                return _unknown((keys[0],), config, _names(parser))
            group = ".".join(keys[:-1])
            names = _arguments(class_path, keyword_only=is_block) if class_path else _names(parser, group)
            return _unknown(_locate(config, keys, message), config, names, class_path or class_at(config, group))
        elif found := re.match(r"the following arguments are required: (\S+?)(,|$)", message):
            path = _locate(config, [*keys, *found[1].split(".")], message)
            if path[-1] != found[1].rpartition(".")[2]:  # of an item of a list
                return Problem(path, f"{_dotted(path)}: {found[1]} of {class_path} is missing", missing=True)
            group = _dotted(path[:-1])
            of = f" (an argument of {class_at(config, group)})" if group in PLACES and class_at(config, group) else ""
            return Problem(path, f"{_dotted(path)} is missing{of}", missing=True) if len(path) > 1 else None
        elif found := re.match(r"Subclasses are disabled for (\w+), thus '(.+?)' is not accepted", message):
            return _no_class(next(iter(config)), found[2], parser)
        elif found := re.search(r"Parameter '(.+?)' from '(.+?)' does not specify a type", message):
            path, (name, own) = tuple(keys) or (next(iter(config)),), found.groups()
            text = f"argument {name} of {own.removesuffix('.__init__')} has no type: annotate it (such as {name}: int)"
            return Problem(path, f"{_dotted(path)}: {text}")
        elif "Errors:" not in text:  # those of all types of a union say more than the first of them
            text = message
        if found := re.match(r"Problem with given class_path '(.+?)'", message):
            class_path, is_block = found[1], False
        elif message.startswith("Type collections.abc.Callable") and (found := re.search(r"path='(.+?)'", message)):
            class_path, is_block = found[1], True
    return _wrong_value(_locate(config, keys, text), config, text)


def _messages(fault: BaseException) -> Iterator[str]:
    """Yields the messages of an error and its causes, from the outermost inwards, each once."""
    before = None
    error: BaseException | None = fault
    while error is not None:
        if str(error) != before:
            yield (before := str(error))
        error = error.__cause__ or error.__context__


def _locate(config: Config, keys: list[str], text: str) -> Path:
    """Returns the path of keys with the index in each list: of the first item that has the key and the named value."""
    path: list[str | int] = []
    node: Any = config
    for key in keys:
        if isinstance(node, list):
            having = [(n, item) for n, item in enumerate(node) if isinstance(item, dict) and key in item]
            named = [n for n, item in having if f"value: {item[key]}" in text] or [n for n, _ in having]
            if not named:
                return tuple(path)
            path.append(named[0])
            node = node[named[0]]
        path.append(key)
        node = node.get(key) if isinstance(node, dict) else None
    return tuple(path)


def _wrong_value(path: Path, config: Config, text: str) -> Problem:
    value = _get(config, path)
    for inner, class_path in _class_paths(value, path):
        if find_class(class_path) is None:
            reason = REMOVED.get(str(class_path).rpartition(".")[2], f" is not there{choices(inner, str(class_path))}")
            return Problem(inner, f"{_dotted(inner)}.class_path={class_path}{reason}")
    if path[-1] in LISTS and "dot import path string" in text:
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and find_class(name) is None:
                return Problem(path, f"{_dotted(path)}: there is no class {name}{choices(path, name)}")
    kinds = re.findall(r"^(?: *- )?Expected an? (.+?)(?:\. Got value.*|: .*|)$", text, re.MULTILINE)
    if not kinds or "is abstract" in text:
        reason = "a class_path is missing" if "is abstract" in text else " ".join(text.split())
        return Problem(path, f"{_dotted(path)}: {reason}")
    if isinstance(value, str) and kinds == ["dot import path string"] and find_class(value) is None:
        return Problem(path, f"{_dotted(path)}={value} is not there{choices(path, value)}")
    words = [_pair(text) if "tuple" in kind else _word(kind) for kind in kinds]
    return Problem(path, f"{_dotted(path)}={value} must be {' or '.join(dict.fromkeys(words))}")


def _pair(text: str) -> str:
    """Returns the words for the tuple among the types of a union, such as tuple[float, float]."""
    found = re.search(r"tuple\[([^\[\]]+)\]", text)
    return f"a list of {len(found[1].split(','))} values" if found else "a list"


def _word(kind: str) -> str:
    if found := re.match(r"typing.Literal\[(.*)\]", kind):
        return f"one of {found[1].replace(chr(39), '')}"
    return WORDS.get(kind, f"a {kind}")


def _unknown(path: Path, config: Config, known: Collection[str], class_path: str = "") -> Problem:
    value, (*parent, name) = _get(config, path), path
    shown = "" if isinstance(value, dict | list) else f"={value}"
    place = PLACES.get(_dotted(tuple(parent)))
    if place is not None and class_path and name in place.replaced:
        if name == "name":
            return Problem(
                path, f"{_dotted(path)}={value} beside {_dotted((*parent, 'class_path'))}: give one of the two"
            )
        return Problem(path, f"{_dotted(path)}={value}: {class_path} takes no {name} (choose {', '.join(known)})")
    if ":" in str(name):
        return Problem(
            path, f"{_dotted(path)}: written {{key: value}} in a config, with a space, and --key=value as a flag"
        )
    fixed = getattr(find_class(class_path), str(name), None) if parent == ["data"] and class_path else None
    if name in FIXED and isinstance(fixed, int | tuple):
        return Problem(path, f"{_dotted(path)}{shown}: the {name} of {class_path} is fixed, {fixed}")
    elsewhere = {} if parent or isinstance(value, dict) or "data" not in known else _by_last_name(config.get("data"))
    usual = USUAL_NAMES.get(str(name), "")
    near = [usual] if usual in known else [one for one in known if sorted(one) == sorted(str(name))]  # swapped letters
    near = near or difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if elsewhere and not (near and difflib.SequenceMatcher(None, str(name), near[0]).ratio() > 0.8):
        last = str(name).rpartition("-")[2]
        found = [usual] if usual in elsewhere else difflib.get_close_matches(last, elsewhere, n=1, cutoff=0.7)
        near = [elsewhere[found[0]]] if found else near
    hint = f"did you mean {_dotted((*parent, near[0]))}?" if near else f"choose {', '.join(known)}"
    if not near and class_path and _hides_arguments(find_class(class_path), known):
        hint += "; its **kwargs cannot be given: name the network's own class, such as timm.models.VisionTransformer"
    return Problem(path, f"{_dotted(path)}{shown}: there is no such option ({hint})")


def _by_last_name(data: Any) -> dict[str, str]:
    """Returns the options of all groups by the last part of their names, for an option given without its group."""
    named = data.get("class_path") if isinstance(data, dict) else None
    found = find_class(named or DEFAULT_CLASSES["data"])
    groups: dict[str, Any] = {
        "model": inspect.signature(ViT).parameters,
        "data": inspect.signature(found).parameters if found is not None else (),
        "trainer": inspect.signature(Trainer).parameters,
    }
    groups |= {name: [field.name for field in fields(settings)] for name, settings in Settings()._asdict().items()}
    return {name: f"{group}.{name}" for group, names in reversed(groups.items()) for name in names}


def _hides_arguments(found: Any, known: Collection[str]) -> bool:
    """Whether a function passes on keyword arguments that jsonargparse cannot name."""
    parameters = inspect.signature(found).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds and set(known) <= set(parameters)


def _no_class(key: str, class_path: str, parser: ArgumentParser) -> Problem:
    """Returns the problem of a group of settings that was given a class."""
    names = _choices_of_name(key)
    choose = f"choose {key}.name among {', '.join(names)}" if names else f"choose {', '.join(_names(parser, key))}"
    return Problem((key, "class_path"), f"{key}.class_path={class_path}: {key} takes no class ({choose})")


def _choices_of_name(key: str) -> tuple[str, ...]:
    """Returns the choices of the option ``name`` of a group of settings, if it has one."""
    settings = Settings()._asdict().get(key)
    return get_args(get_type_hints(type(settings)).get("name")) if settings is not None else ()


def _names(parser: ArgumentParser, group: str = "") -> list[str]:
    """Returns the options of a parser, or of one of its groups."""
    defaults = parser.get_defaults()
    return [name for name in vars(defaults[group] if group else defaults) if name != "class_path"]


def _arguments(class_path: str, *, keyword_only: bool) -> list[str]:
    """Returns the arguments of a class; of a block only those with a keyword, because the network gives the others."""
    found, parser = find_class(class_path), ArgumentParser()
    if keyword_only:
        parameters = inspect.signature(found).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    add = parser.add_class_arguments if isinstance(found, type) else parser.add_function_arguments
    return [str(name) for name in add(found, fail_untyped=False)]


def _class_paths(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _class_paths(item, (*path, number))
    elif isinstance(value, dict):
        if "class_path" in value:
            yield path, value["class_path"]
        for key, item in value.items():
            yield from _class_paths(item, (*path, key))


LISTS = {
    "augment": "torchvision.transforms.v2",
    "mixing": "",
    "callbacks": "lightning.pytorch.callbacks",
    "logger": "lightning.pytorch.loggers",
    "plugins": "lightning.pytorch.plugins",
    "metrics": "torchmetrics.classification",
}
"""Options that take several classes, each by its short name, and the modules of those names."""


def choices(path: Path, class_path: str) -> str:
    """Returns a hint: the class of the most similar name, or else our own for ``model`` and ``data``."""
    folders = f"; searched: installed packages, {searched()}" if "." in class_path and searched() else ""
    kind = {"model": ViT, "data": ImageData}.get(_dotted(path))
    module, _, name = class_path.rpartition(".")
    known = [] if module else own_classes(kind) if kind else [*vit_lightning.__all__, *lightning_classes()]
    if (home := module or LISTS.get(str(path[-1]), "")) and may_import(home):
        with contextlib.suppress(Exception):  # whatever a file of the user raises is told elsewhere
            known = [*(known if not module else []), *_names_of(home)]
    elif kind is ViT and find_class(f"torchvision.models.{name}") is not None:
        return f" (did you mean torchvision.models.{name}?)"
    if not known and (near := difflib.get_close_matches(module, searched_modules(), n=1)):
        return f" (did you mean {near[0]}.{name}?{folders})"
    lower = {item.lower(): item for item in known}
    within = [item for item in lower if name.lower() in item]
    if near := difflib.get_close_matches(name.lower(), lower, n=1) or sorted(within, key=len)[:1]:
        return f" (did you mean {module}{'.' if module else ''}{lower[near[0]]}?{folders})"
    choose = f"choose {', '.join(known)} or " if kind and not module else ""
    return f" ({choose}give module.Class{folders})"


def _names_of(module: str) -> list[str]:
    """Returns the public classes and functions of a module."""
    return [name for name, item in vars(importlib.import_module(module)).items() if callable(item) and name[0] != "_"]


def _get(config: Any, path: Path) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else config[int(key)] if isinstance(config, list) else None
    return config


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
