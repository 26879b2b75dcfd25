"""Metrics of torchmetrics, or of the user's own, that a config lists.

metrics: [F1Score, {class_path: CohenKappa, weights: quadratic, name: kappa}]
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torchmetrics
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchmetrics import Metric

from vit_lightning.config.check_options import choices, parse_arguments
from vit_lightning.config.files import Config, as_list
from vit_lightning.config.own_files import where
from vit_lightning.config.trust import find_class
from vit_lightning.errors import UserError, first_line
from vit_lightning.limits import refuse
from vit_lightning.metric_facts import METRICS, Goal


class Chosen(NamedTuple):
    """A metric of a config.

    Args:
        name: logged as val/NAME and test/NAME.
        metric: a new one.
        plain: class, arguments, name and goal as plain data.
    """

    name: str
    metric: Metric
    plain: Config


def choose_metrics(given: Any, classes: int) -> list[Chosen]:
    """Makes and tries the metrics of a flat config.

    Raises:
        UserError: all their problems.
    """
    chosen: list[Chosen] = []
    problems: list[str] = []
    for item in as_list(given):
        try:
            one = _choose({"class_path": item} if isinstance(item, str) else item, classes)
            if one.name in {other.name for other in chosen}:
                raise UserError(f"metrics.name={one.name}: two metrics have this name (give one of them another)")
            chosen.append(one)
        except UserError as error:
            problems += error.problems
    refuse(problems)
    return chosen


def _choose(item: Any, classes: int) -> Chosen:
    if not isinstance(item, dict) or "class_path" not in item:
        raise UserError(f"metrics={item} must be a class, or class_path and its arguments")
    arguments = dict(item)
    class_path = _full_name(str(arguments.pop("class_path")))
    kind = find_class(class_path)
    if not (inspect.isclass(kind) and issubclass(kind, Metric)):
        raise UserError(f"metrics.class_path={class_path} is no metric{choices(('metrics',), class_path)}")
    name, goal = arguments.pop("name", _short(kind.__name__)), arguments.pop("goal", _goal(kind))
    if name in METRICS or not str(name).isidentifier() or hasattr(nn.ModuleDict, name):
        raise UserError(f"metrics.name={name}: {class_path} needs another name, that is not {', '.join(METRICS)}")
    if goal not in ("maximize", "minimize"):
        raise UserError(f"metrics.goal={goal} must be one of maximize, minimize")
    if "num_classes" in inspect.signature(kind).parameters:
        arguments.setdefault("num_classes", classes)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "metrics", fail_untyped=False, instantiate=False)
    parsed, plain = parse_arguments(arguments, "metrics", parser)
    try:
        metric: Metric = kind(**vars(parser.instantiate(parsed).get("metrics", {})))
        _try(metric.clone(), classes)
    except Exception as fault:  # whatever the class raises
        reason = first_line(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {first_line(fault)}"
        raise UserError(f"metrics.class_path={class_path}: {where(fault) or reason}") from fault
    return Chosen(name, metric, {"class_path": class_path, "init_args": plain, "name": name, "goal": goal})


def _full_name(name: str) -> str:
    """Returns the class path of a metric that may be named without its module and without Multiclass."""
    if "." in name:
        return name
    home = "torchmetrics.classification"
    names = [each for each in (f"Multiclass{name}", name) if hasattr(torchmetrics.classification, each)]
    return f"{home}.{names[0]}" if names else name


def _short(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("Multiclass")).lower()


def _goal(kind: type[Metric]) -> Goal:
    return "minimize" if kind.higher_is_better is False else "maximize"


def _try(metric: Metric, classes: int) -> None:
    """Updates a metric with a few images; it must come to one number."""
    labels = torch.arange(8) % classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes without an image
        metric.update(one_hot(labels, classes).float().softmax(dim=1), labels)
        value = metric.compute()
    if not isinstance(value, Tensor) or value.shape != ():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"it gives {shape} where one number is expected")


def recorded_goal(name: str, configs: Sequence[Mapping[str, Any]]) -> Goal | None:
    """Returns the goal of a logged metric that one of these configs lists."""
    listed = [item for config in configs for item in config.get("metrics") or []]
    return next((item["goal"] for item in listed if item["name"] == name.rpartition("/")[2]), None)
