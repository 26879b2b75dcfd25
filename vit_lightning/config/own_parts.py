"""Loss, optimizer and schedule given by ``class_path``: a class or function whose arguments stand beside our options.

    optimizer: {class_path: torch.optim.NAdam, momentum_decay: 0.004, lr: 0.001}

The class takes the place of ``name`` and of the options that belong to it; all others stay.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from torch.optim.lr_scheduler import LRScheduler

from vit_lightning.config.constructors import as_dict_kwargs
from vit_lightning.config.files import Config, full_name, unflatten, value_at
from vit_lightning.config.trust import UNTRUSTED, find_class, may_call
from vit_lightning.limits import refuse
from vit_lightning.training.losses import LossConfig, OwnLoss
from vit_lightning.training.optim import OptimizerConfig, OwnOptimizerConfig
from vit_lightning.training.schedules import OwnSchedule, factors_of_function, factors_of_scheduler

Own = tuple[tuple[str, str], ...]
"""Options that hold a class path, each with its class path."""


@dataclass(frozen=True)
class Place:
    """An option whose class a config may give.

    Args:
        home: module of classes that are named without one.
        of_class: leading arguments of a class that training gives.
        of_function: leading arguments of a function that training gives.
        given: arguments that come from our options.
        replaced: our options in whose place the class stands.
    """

    home: str
    of_class: int
    of_function: int
    given: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


class Dropped(NamedTuple):
    """A value of an earlier config that a later class or preset put out of use."""

    reason: str
    """The later option, such as model.preset=S/16."""
    group: str
    """Dotted key of the class that had the value as an argument."""
    name: str
    value: Any


PLACES = {
    "loss": Place("torch.nn", 0, 2, replaced=tuple(field.name for field in fields(LossConfig))),
    "optimizer": Place("torch.optim", 1, 1, ("lr", "weight_decay"), ("name", "betas", "eps", "momentum", "nesterov")),
    "optimizer.schedule": Place("torch.optim.lr_scheduler", 1, 2, ("last_epoch",), ("schedule", "decay_fraction")),
}
OWN_GROUPS: dict[str, type[LossConfig | OptimizerConfig]] = {"loss": LossConfig, "optimizer": OptimizerConfig}


def own_parts(config: Mapping[str, Any] | Namespace) -> Own:
    """Returns the class paths of a flat config."""
    return tuple((key, class_path) for key in PLACES if (class_path := class_at(config, key)))


def class_at(config: Any, key: str) -> str:
    """Returns the class path of an option of a flat config, empty without one."""
    found = value_at(config, f"{key}.class_path")
    return "" if found is None else str(found)


def with_full_part_names(config: Config) -> Config:
    """Returns a flat config whose losses, optimizers and schedules are ``{class_path: MODULE.NAME, ...}``."""
    complete = dict(config)
    for key, place in PLACES.items():
        *parents, last = key.split(".")
        node = complete
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                break
            node[parent] = node = dict(node[parent])
        else:
            given = node.get(last)
            if isinstance(given, str) and "." in given:
                given = {"class_path": given}
            if isinstance(given, dict) and isinstance(name := given.get("class_path"), str):
                full = full_name(name)
                node[last] = {**given, "class_path": full if "." in full else f"{place.home}.{name}"}
    return complete


def without_replaced(before: Config, after: Config, dropped: list[Dropped]) -> Config:
    """Returns an earlier flat config without the options that a class or a name of a later one replaces.

    Args:
        before: the earlier config.
        after: the later one.
        dropped: gets those options.
    """
    kept = dict(before)
    for key, settings in OWN_GROUPS.items():
        old, new = before.get(key), after.get(key)
        if not isinstance(old, dict) or not isinstance(new, dict):
            continue
        class_path = new.get("class_path")
        if class_path not in (None, old.get("class_path")) or ("class_path" in old and "name" in new):
            ours = {field.name for field in fields(settings)} - set(PLACES[key].replaced)
            kept[key] = {name: value for name, value in old.items() if name in ours}
            reason = f"{key}.name={new['name']}" if class_path is None else f"{key}.class_path={class_path}"
            dropped += [
                Dropped(reason, key, name, value) for name, value in old.items() if name not in {*ours, "class_path"}
            ]
            if class_path is not None:
                kept[key]["class_path"] = class_path
    return kept


def nested(config: Config) -> Config:
    """Returns a flat config as the parser takes it: losses and optimizers stay flat."""
    return {
        key: _nested_arguments(item)
        if key in OWN_GROUPS and isinstance(item, dict)
        else as_dict_kwargs(unflatten(item))
        for key, item in config.items()
    }


def _nested_arguments(group: Config) -> Config:
    return {
        key: _nested_arguments(item) if key == "schedule" and isinstance(item, dict) else unflatten(item)
        for key, item in group.items()
    }


def add_own_parts(parser: ArgumentParser, key: str, own: Own) -> None:
    """Adds the options of a group with the arguments of its classes.

    Raises:
        UserError: there is no such class or function.
    """
    classes = {name: class_path for name, class_path in own if name.split(".")[0] == key}
    refuse([problem for name, class_path in classes.items() for problem in class_problems(name, class_path)])
    replaced = {option for name in classes for option in PLACES[name].replaced}
    ours = {field.name for field in fields(OWN_GROUPS[key])} - replaced
    for name in classes:
        parser.add_argument(f"--{name}.class_path", type=str)
    parser.add_class_arguments(OWN_GROUPS[key], key, skip={*replaced}, as_group=False, instantiate=False)
    for name, class_path in classes.items():
        found, place = find_class(class_path), PLACES[name]
        skip: set[str | int] = {*place.given, *(ours if name == key else ())}
        if inspect.isclass(found):
            skip |= {place.of_class} if place.of_class else set()
            parser.add_class_arguments(found, name, skip=skip, as_group=False, fail_untyped=False, instantiate=False)
        else:
            skip.add(place.of_function)
            parser.add_function_arguments(found, name, skip=skip, as_group=False, fail_untyped=False)
        require_untyped(parser, found, name)


def require_untyped(parser: ArgumentParser, found: Any, key: str) -> None:
    """Requires the arguments without type and default of a class or function, which jsonargparse would set to None."""
    for name, parameter in inspect.signature(found).parameters.items():
        if parameter.annotation is parameter.default is parameter.empty and f"{key}.{name}" in parser.get_defaults():
            parser._extra_required_keys.add(f"{key}.{name}")


def class_problems(key: str, class_path: str) -> list[str]:
    """Returns why a class path cannot stand in its place."""
    found = find_class(class_path)
    if found is not None and not callable(found):
        return [f"{key}.class_path={class_path} must be a class or a function"]
    if found is not None and not may_call(found):
        return [f"{key}.class_path={class_path}{UNTRUSTED}"]
    if found is None:
        module, _, name = class_path.rpartition(".")
        names = [n for n in dir(sys.modules.get(module)) if not n.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {module}.{near[0]}?" if near else "give module.Class"
        return [f"{key}.class_path={class_path} is not there ({hint})"]
    if key == "optimizer.schedule" and inspect.isclass(found) and not issubclass(found, LRScheduler):
        return [f"{key}.class_path={class_path} must be a torch.optim.lr_scheduler class, or a function of two steps"]
    return []


def bind(key: str, values: Namespace, own: Own) -> OwnLoss | OwnOptimizerConfig:
    """Returns the settings of a group from its parsed values."""
    found = {name: find_class(class_path) for name, class_path in own}
    if key == "loss":
        return _loss(found[key], _arguments(values))
    names = {field.name for field in fields(OptimizerConfig)} - {"schedule"}
    if "optimizer" in found:
        names -= set(PLACES["optimizer"].replaced)
    given = {name: value for name, value in vars(values).items() if name in names}
    if "optimizer" in found:
        makes = found["optimizer"]
        taken = [name for name in PLACES["optimizer"].given if name in inspect.signature(makes).parameters]
        arguments = {name: value for name, value in _arguments(values).items() if name not in {*names, "schedule"}}
        given["name"] = dict(own)["optimizer"]
        given["make"] = partial(makes, **{name: given[name] for name in taken}, **arguments)
        given["own_arguments"] = (*taken, *arguments)
    if "optimizer.schedule" in found:
        given["schedule"] = dict(own)["optimizer.schedule"]
        given["factors"] = _factors(partial(found["optimizer.schedule"], **_arguments(values.schedule)))
    else:
        given["schedule"] = values.schedule
    return OwnOptimizerConfig(**given)


def _arguments(values: Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(values).items() if name != "class_path"}


def _loss(found: Any, arguments: dict[str, Any]) -> OwnLoss:
    made = partial(found, **arguments)
    return OwnLoss(made if inspect.isclass(found) else lambda: made, name=found.__name__)


def _factors(made: partial[Any]) -> OwnSchedule:
    if inspect.isclass(made.func):
        return lambda lr, steps: factors_of_scheduler(made, lr, steps)
    return lambda lr, steps: factors_of_function(made, steps)
