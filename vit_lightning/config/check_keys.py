"""All that is wrong with a page at once: unknown keys, wrong types, classes that are not there.

jsonargparse stops at the first fault and speaks of its inner workings. This is asked when it has refused a page.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from vit_lightning.config.files import Page, full_name
from vit_lightning.config.trust import may_import

WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}


LIGHTNING_CLASSES = [f"lightning.pytorch.{kind}" for kind in ("callbacks", "loggers", "profilers", "strategies")]
"""Where classes are looked for that are named without a module."""


@dataclass(frozen=True)
class Key:
    """A key of a page: its type, and for a class the one that need not be named."""

    kind: Any
    default_class: type | None = None
    hidden: Collection[str] = ()
    """Arguments of the class that are not the user's to give."""
    supplied: Collection[str] = ()
    """Arguments that the program gives where the user does not."""
    needed: bool = False
    """Whether the user has to give a value."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value at a path of keys."""

    path: tuple[str, ...]
    text: str
    missing: bool = False


def find_problems(page: Page, keys: Mapping[str, Key]) -> list[Problem]:
    """What is wrong with the keys and types of a flat page."""
    problems: list[Problem] = []
    for name, value in page.items():
        if name not in keys:
            problems.append(_unknown((name,), value, keys))
        else:
            problems += _value_problems((name,), value, keys[name])
    return problems


def _value_problems(path: tuple[str, ...], value: Any, key: Key) -> list[Problem]:
    if isinstance(value, dict) and _takes_class(key):
        return _class_problems(path, value, key)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        item_key = Key(_item_kind(key.kind))
        return [
            Problem(path, problem.text)  # a list is taken or left as a whole
            for number, item in enumerate(value)
            for problem in _value_problems((*path, str(number)), item, item_key)
        ]
    return [] if _fits(value, key.kind) else [_wrong(path, value, key.kind)]


def _class_problems(path: tuple[str, ...], node: Page, key: Key) -> list[Problem]:
    """Unknown and wrong arguments of a class, and classes in its arguments."""
    given = {name: value for name, value in node.items() if name != "class_path"}
    found = find_class(node["class_path"]) if "class_path" in node else key.default_class
    if found is None:
        if str(node.get("class_path")).rpartition(".")[2] == "ShardedSet":  # until version 0.1
            way = "lightning shard writes Parquet now: use HuggingFaceSet with --data.path=FOLDER"
            return [Problem(path, f"{_dotted(path)}.class_path=ShardedSet: litdata's files are no longer read; {way}")]
        return [Problem(path, f"{_dotted(path)}.class_path={node.get('class_path')} is not there{_choices(key.kind)}")]
    parameters = _parameters(found, key)
    problems: list[Problem] = []
    for name, value in given.items():
        if name in parameters:
            problems += _value_problems((*path, name), value, parameters[name])
        elif not _takes_anything(found):
            problems.append(_unknown((*path, name), value, parameters))
    missing = [name for name, parameter in parameters.items() if parameter.needed and name not in given]
    return problems + [Problem((*path, name), f"{_dotted((*path, name))} is missing", missing=True) for name in missing]


def _parameters(found: Callable[..., Any], key: Key) -> dict[str, Key]:
    """Arguments that a page may give to a class or function."""
    function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a class of somebody else whose types cannot be looked up: its names are still known
        hints = {}
    names = list(inspect.signature(found).parameters.values())
    names = names[_given_by_caller(key.kind) :]
    return {
        parameter.name: Key(
            hints.get(parameter.name, Any),
            _default_class(parameter.default),
            needed=parameter.default is parameter.empty and parameter.name not in key.supplied,
        )
        for parameter in names
        if parameter.name not in key.hidden and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _default_class(default: Any) -> Any:
    return default if isinstance(default, type) and default is not inspect.Parameter.empty else None


def _given_by_caller(kind: Any) -> int:
    """Number of arguments that the program gives to a block, before those of the page."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is Callable or typing.get_origin(part) is typing.get_origin(Callable[[], None]):
            arguments = typing.get_args(part)
            return len(arguments[0]) if arguments and isinstance(arguments[0], list) else 0
    return 0


def _takes_anything(found: Callable[..., Any]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def _takes_class(key: Key) -> bool:
    parts = (key.kind, *typing.get_args(key.kind))
    known = (*WORDS, list, dict, tuple)
    return any(
        is_dataclass(part) or (isinstance(part, type) and part not in known) or _given_by_caller(part) for part in parts
    )


def _item_kind(kind: Any) -> Any:
    """Type of the items of a list type, wherever it stands in a union."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is list:
            return typing.get_args(part)[0]
    return Any


def find_class(class_path: Any) -> Any:
    """The class or function of a name, None if there is none."""
    if "." in str(full_name(class_path)) and not may_import(str(full_name(class_path))):
        return None
    module, _, name = str(full_name(class_path)).rpartition(".")
    for place in [module] if module else LIGHTNING_CLASSES:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError, ValueError):
            continue
    return None


def _fits(value: Any, kind: Any) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
    except ValueError:  # a type that jsonargparse does not know: left to the class itself
        return True
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def _wrong(path: tuple[str, ...], value: Any, kind: Any) -> Problem:
    return Problem(path, f"{_dotted(path)}={value} must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in WORDS:
        return WORDS[kind]
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(part) for part in arguments))
    if origin is tuple:
        return f"a list of {len(arguments)} values, each {_describe(arguments[0])}"
    if origin is list:
        return f"a list, each {_describe(arguments[0])}"
    if _given_by_caller(kind):
        return "a class path"
    return f"a {getattr(kind, '__name__', kind)}"


def _unknown(path: tuple[str, ...], value: Any, known: Collection[str]) -> Problem:
    near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    parent = path[:-1]
    hint = f"did you mean {_dotted((*parent, near[0]))}?" if near else f"choose {', '.join(known)}"
    shown = "" if isinstance(value, dict | list) else f"={value}"
    return Problem(path, f"{_dotted(path)}{shown}: there is no such key ({hint})")


def _choices(kind: Any) -> str:
    """Our own classes of a kind, which can be named in short."""
    import vit_lightning

    if not isinstance(kind, type):
        return " (give module.Class)"
    names = [name for name in vit_lightning.__all__ if _is_choice(getattr(vit_lightning, name), kind)]
    return f" (choose {', '.join(names)} or give module.Class)" if names else " (give module.Class)"


def _is_choice(candidate: Any, kind: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, kind) and not inspect.isabstract(candidate)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PGPASS|PASS|PAT|CREDENTIALS?)(_|$)", re.IGNORECASE
)


def secret_problems(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Values that hold a secret of the environment: they would end up in the run's files."""
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in secret_problems(item, (*path, str(name)))]
    if isinstance(value, list):
        return [text for number, item in enumerate(value) for text in secret_problems(item, (*path, str(number)))]
    secrets = {
        name: text
        for name, text in os.environ.items()
        if _SECRET.search(name) and len(text) >= 8 and not text.startswith(("/", "~", "."))  # these are places of keys
    }
    return [
        f"{_dotted(path)} holds the value of {name}: a key does not belong in a page, W&B reads it from the environment"
        for name, text in secrets.items()
        if text in str(value)
    ]


_AT_LEAST: dict[str, float] = {
    "max_epochs": 1,
    "max_steps": 1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_nodes": 1,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "gradient_clip_val": 0,
    "limit_train_batches": 1e-9,
}


def trainer_problems(trainer: Namespace) -> list[str]:
    """Numbers of the Trainer that cannot be."""
    endless = {"max_epochs": "-1 for no end", "max_steps": "-1 for no end"}
    problems = []
    if trainer.get("devices") in (0, "0") or trainer.get("devices") == []:
        problems.append(f"trainer.devices={trainer.devices} must be at least 1 (or auto, or -1 for all)")
    for name, least in _AT_LEAST.items():
        value = trainer.get(name)
        if value is None or (name in endless and value == -1):
            continue
        if not math.isfinite(value) or value < least:
            problems.append(" ".join([f"trainer.{name}={value} must be {_least(least)}", *_or(endless.get(name))]))
    algorithm = trainer.get("gradient_clip_algorithm")
    if algorithm not in (None, "norm", "value"):
        problems.append(f"trainer.gradient_clip_algorithm={algorithm} must be one of norm, value")
    return problems


def average_problems(config: Namespace) -> list[str]:
    """Two averages of the weights at once."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    names = [callback.class_path.rpartition(".")[2] for callback in callbacks]
    return [
        f"ema.decay={config.ema.decay} beside trainer.callbacks.{name}: give one of the two"
        for name in names
        if config.ema.decay is not None and name.endswith("WeightAveraging")
    ]


def _least(value: float) -> str:
    return f"at least {value}" if value == int(value) else "above 0"


def _or(text: str | None) -> list[str]:
    return [] if text is None else [f"(or {text})"]


def monitor_problems(config: Namespace, known: Sequence[str]) -> list[str]:
    """Monitored metrics that nobody logs; what callbacks of the user's own log cannot be known."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if not all(callback.class_path.startswith(("lightning.", "vit_lightning.")) for callback in callbacks):
        return []
    monitors = [("checkpoint.monitor", config.checkpoint.monitor)]
    for callback in callbacks:
        name = callback.class_path.rpartition(".")[2]
        monitors.append((f"trainer.callbacks.{name}.monitor", callback.get("init_args.monitor")))
    return [
        f"{key}={metric} is logged by nobody (choose {', '.join(known)})"
        for key, metric in monitors
        if metric is not None and metric not in known
    ]
