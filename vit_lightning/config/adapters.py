"""Classes of others in the place of ours: the options of both stand beside each other in a config.

optimizer: {class_path: torch.optim.NAdam, momentum_decay: 0.004, lr: 0.001}
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torchmetrics.classification
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from vit_lightning.classes import listed
from vit_lightning.config.files import as_list, as_map
from vit_lightning.config.names import HOMES
from vit_lightning.config.options import BESIDE_OTHER_CLASS
from vit_lightning.config.own_files import where
from vit_lightning.config.signatures import Option, Part, Signature, signature_of
from vit_lightning.config.typed import Adapter, Found, Reader
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.base import ImageData
from vit_lightning.data.per_image import PerImage, seeded
from vit_lightning.data.wrapped import WrappedDataModule, WrappedDataset
from vit_lightning.errors import UserError, first_line
from vit_lightning.metric_facts import METRICS, Goal, goal_by, goal_of
from vit_lightning.training.losses import LossConfig, OwnLoss, TensorLoss
from vit_lightning.training.optim import OptimizerConfig, OwnOptimizerConfig
from vit_lightning.training.optimizers import Interval, OwnSchedule, Schedule, factors_of_function, factors_of_scheduler


class OtherSchedule(LRScheduler):
    """Place of a schedule of others, from which none derives: ``_schedule`` reads them all."""


SCHEDULE = Option("schedule", Schedule | Callable[[Optimizer], OtherSchedule], "cosine")
INTERVAL = Option("interval", Interval, "step")

Options = dict[str, Option]


Join = Callable[[Any, dict[str, Any], dict[str, Any]], Any]
"""Returns ours from a class of others, its arguments, and our options beside them."""


def _joined(
    reader: Reader, found: Found, theirs: Options, ours: Options, path: str, join: Join, both: Collection[str] = ()
) -> Part | None:
    """Returns a class of others, with its arguments and our options, in the place of one of ours; theirs come first."""

    def call(target: Any, /, **given: Any) -> Any:
        arguments = {key: value for key, value in given.items() if key in theirs or key not in ours}
        options = {key: value for key, value in given.items() if key in ours and (key not in theirs or key in both)}
        return join(target, arguments, options)

    options = theirs | {key: option for key, option in ours.items() if key not in theirs}
    return reader.made_of(found, Signature(options, signature_of(found.target).others), path, call)


def given_alone(options: Options) -> Options:
    """Returns options whose defaults are left to their class."""
    return {name: option if option.required else option._replace(passed_on=True) for name, option in options.items()}


def _data(reader: Reader, found: Found, path: str) -> Part | None:
    """Returns a dataset or a data module of others as our data."""

    def join(target: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> ImageData:
        if is_module:
            with seeded() as seed:
                seed(0)  # it may draw a split: the same in each process
                return WrappedDataModule(module=target(**theirs), **ours)
        return WrappedDataset(dataset_class=target, arguments=theirs, **ours)

    is_class, theirs = inspect.isclass(found.target), signature_of(found.target).options
    has_loaders = is_class and issubclass(found.target, LightningModule)
    is_module = has_loaders or (is_class and issubclass(found.target, LightningDataModule))
    options = signature_of(WrappedDataModule if is_module else WrappedDataset).options
    ours = {key: option for key, option in options.items() if key not in ("module", "dataset_class", "arguments")}
    if has_loaders and "network" in theirs:
        text = f"{found.name} has loaders of its own, and takes a network, which follows from the data"
        instead = "give data.class_path, a LightningDataModule with these loaders"
        return reader.refused(f"data is missing: {text} ({instead})")
    theirs = theirs if has_loaders else given_alone(theirs)  # as under module
    for key in () if is_module else {"train", "split"} & theirs.keys():  # it is made once for each split
        theirs[key] = theirs[key]._replace(passed_on=True)
    return _joined(reader, found, theirs, ours, path, join, ("num_classes",))


def _augmentation(reader: Reader, found: Found, path: str) -> Part | None:
    """Returns a transform of single images as an augmentation of ours."""
    theirs = given_alone(signature_of(found.target, 0 if inspect.isclass(found.target) else 1).options)
    return _joined(reader, found, theirs, {}, path, lambda target, theirs, _: PerImage(target, theirs or None))


def _schedule(reader: Reader, found: Found, path: str) -> Part | None:
    """Returns a scheduler of torch, or a function of done and of all steps, as a schedule."""
    is_class, rule = inspect.isclass(found.target), ""
    if is_class and not issubclass(found.target, LRScheduler):
        rule = "must be a torch.optim.lr_scheduler class, or a function of two steps"
    elif is_class and issubclass(found.target, ReduceLROnPlateau):
        rule = "follows a metric, but learning rates are known before the training here (choose cosine, linear or wsd)"
    if rule:
        return reader.refused(f"{path}.class_path={found.name} {rule}")
    theirs = signature_of(found.target, 1 if is_class else 2).options
    return _joined(reader, found, theirs, {"interval": INTERVAL}, path, _own_schedule)


def _own_schedule(target: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> OwnSchedule:
    bound, is_class = partial(target, **theirs), inspect.isclass(target)
    return OwnSchedule(
        target.__name__,
        lambda at, steps: factors_of_scheduler(bound, at, steps) if is_class else factors_of_function(bound, steps),
        ours.get("interval", "step"),
    )


def _loss(reader: Reader, found: Found, path: str) -> Part | None:
    """Returns the loss of a config: our options, or a class or function of logits and targets."""
    name, target, arguments = found
    ours = signature_of(LossConfig)
    if not name:
        of_torch = signature_of(nn.CrossEntropyLoss).options
        place = "in place of loss.name" if "name" in arguments else "beside it"
        for key in [key for key in arguments if key in of_torch and key not in ours.options]:
            reader.problems.append(f"loss.{key}={arguments.pop(key)}: give loss.class_path=CrossEntropyLoss {place}")
        return reader.made_of(found, ours, path)
    theirs = signature_of(target, 0 if inspect.isclass(target) else 2).options
    _refuse_ours(reader, found, path, theirs, ours.options)
    return _joined(reader, found, theirs, {}, path, _own_loss)


def with_class_weights(reader: Reader, given: Any, data: ImageData | None) -> Any:
    """Returns the loss of a config with a ``weight`` by the names of classes as a list in the order of the labels."""
    weight = given.get("weight") if isinstance(given, Mapping) else None
    if not isinstance(weight, Mapping) or "class_path" in weight:
        return given
    weights = {str(name): value for name, value in weight.items()}
    names = [*weights] if data is None else data.label_names
    if {*weights} != {*names}:
        odd = [f"there is no class {listed(more)}"] if (more := [name for name in weights if name not in names]) else []
        odd += [f"{listed(less)} has no weight"] if (less := [name for name in names if name not in weights]) else []
        reader.problems.append(f"loss.weight={weights}: {'; '.join(odd)} (the classes are {listed(names)})")
    return {**given, "weight": [weights.get(name, 1.0) for name in names]}


def _own_loss(target: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> OwnLoss:
    tensors = {name: value for name, value in theirs.items() if isinstance(value, Tensor)}
    if tensors:
        others = {name: value for name, value in theirs.items() if name not in tensors}
        return OwnLoss(partial(TensorLoss, target, others, tensors), name=target.__name__)
    bound = partial(target, **theirs)
    return OwnLoss(bound if inspect.isclass(target) else lambda: bound, name=target.__name__)


def _optimizer(reader: Reader, found: Found, path: str) -> Part | None:
    """Returns the optimizer of a config: our options, in the place of some of which a class of others may stand."""
    ours = signature_of(OptimizerConfig).options | {"schedule": SCHEDULE}
    if not found.name:
        return _joined(reader, found, {}, ours, path, partial(_own_optimizer, ""))
    kept = {key: ours[key] for key in BESIDE_OTHER_CLASS["optimizer"]}
    taken = signature_of(found.target, 1)
    for key in ("lr", "weight_decay"):
        default = taken.options[key].default if key in taken.options else None
        if isinstance(default, int | float):
            kept[key] = kept[key]._replace(default=float(default))
    if "weight_decay" not in taken.options and not taken.others:
        kept["weight_decay"] = kept["weight_decay"]._replace(default=0.0)
    theirs = {key: option for key, option in taken.options.items() if key not in kept}
    _refuse_ours(reader, found, path, {**kept, **theirs}, ours)
    return _joined(reader, found, theirs, kept, path, partial(_own_optimizer, found.name))


def _own_optimizer(name: str, target: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> OptimizerConfig:
    given: dict[str, Any] = {}
    if name:
        taken = [key for key in ("lr", "weight_decay") if key in signature_of(target, 1).options]
        make = partial(target, **{key: ours[key] for key in taken if key in ours}, **theirs)
        given = {"name": name, "make": make, "own_arguments": (*taken, *theirs)}
    if isinstance(schedule := ours.get("schedule"), OwnSchedule):
        given |= {"own_schedule": schedule}
        ours["schedule"] = schedule.name
    return OwnOptimizerConfig(**ours, **given) if given else OptimizerConfig(**ours)


def _refuse_ours(reader: Reader, found: Found, key: str, taken: Collection[str], ours: Collection[str]) -> None:
    """Refuses, and removes, options of ours that do nothing beside a class of others."""
    for option in [option for option in found.arguments if option in ours and option not in taken]:
        text = f"{key}.{option}={found.arguments.pop(option)}"
        why = f": {found.name} takes no {option} (choose {', '.join(taken)})"
        reader.problems.append(text + (f" beside {key}.class_path: give one of the two" if option == "name" else why))


ADAPTERS: dict[Any, Adapter] = {
    ImageData: _data,
    Augmentation: _augmentation,
    OtherSchedule: _schedule,
    LossConfig: _loss,
    OptimizerConfig: _optimizer,
}
"""What makes a part of a class of others, by the class of ours, or of torch, in whose place it stands."""


class Chosen(NamedTuple):
    """A metric of a config.

    Args:
        name: logged as val/NAME and test/NAME.
        metric: a new one.
        plain: class, arguments, name and goal as plain data.
    """

    name: str
    metric: Metric
    plain: dict[str, Any]


def chosen_metrics(reader: Reader, given: Any, classes: int) -> list[Chosen]:
    """Returns the metrics of a flat config, each of which is tried."""
    chosen: dict[str, Chosen] = {}
    for one in filter(None, (_read_metric(reader, item, classes) for item in as_list(given))):
        if chosen.setdefault(one.name, one) is not one:
            reader.problems.append(f"metrics.name={one.name}: two metrics have this name (give one of them another)")
    return [*chosen.values()]


def _read_metric(reader: Reader, item: Any, classes: int) -> Chosen | None:
    item = {**as_map(item)}
    short = str(item.get("class_path")).removeprefix("torchmetrics.").removeprefix("classification.")
    if hasattr(torchmetrics.classification, f"Multiclass{short}"):  # its default is that of the class for any task
        average = inspect.signature(getattr(torchmetrics.classification, short).__new__).parameters.get("average")
        if (task := item.pop("task", "multiclass")) not in ("multiclass", "binary" if classes == 2 else ""):
            return reader.refused(f"metrics.task={task}: an image has one of {classes} classes (leave it out)")
        more = {} if average is None or task == "binary" else {"average": average.default}
        item = {**more, **item, "class_path": f"{HOMES['Metric']}.{task.title()}{short}"}
    if (found := reader.find(Metric, item, "metrics")) is None:
        return None
    class_path, target, arguments = found
    if not (inspect.isclass(target) and issubclass(target, Metric)):
        return reader.refused(f"metrics.class_path={class_path} is no metric")
    short = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target.__name__.removeprefix("Multiclass")).lower()
    goal = goal_by(target.higher_is_better)
    theirs = signature_of(target).options
    if "num_classes" in theirs:
        arguments.setdefault("num_classes", classes)
    ours = {"name": Option("name", str, short), "goal": Option("goal", Goal | None, goal)}
    part = _joined(reader, found, theirs, ours, "metrics", lambda kind, given, _: _of_all_classes(kind)(**given))
    if part is None:
        return None
    name = part.arguments.get("name", short)
    if name in METRICS or not name.isidentifier() or hasattr(nn.ModuleDict, name):
        text = f"{class_path} needs another name, that is not {', '.join(METRICS)}"
        reader.problems.append(f"metrics.name={name}: {text}")
    try:
        metric: Metric = part.make()
        _try(metric.clone(), classes)
    except Exception as fault:  # whatever the class raises
        reason = first_line(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {first_line(fault)}"
        return reader.refused(f"metrics.class_path={class_path}: {where(fault) or reason}")
    return Chosen(name, metric, part.plain())


def _of_all_classes(kind: Any) -> Any:
    """Returns a metric; one of torchmetrics for two classes takes the probabilities of both, for the second."""

    def update(self: Any, probabilities: Tensor, labels: Tensor) -> None:
        kind.update(self, probabilities[:, 1], labels)

    is_binary = kind.__module__.startswith("torchmetrics.") and kind.__name__.startswith("Binary")
    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__}) if is_binary else kind


def _try(metric: Metric, classes: int) -> None:
    """Updates a metric with a few images; it must come to one number."""
    labels = torch.arange(8) % classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes without an image
        metric.update(one_hot(labels, classes).float().softmax(dim=1), labels)
        value = metric.compute()
    if not isinstance(value, Tensor) or value.shape != ():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        way_out = " (average: macro gives their mean; classes.csv of a run has the accuracy, which is recall, of each)"
        raise UserError(f"it gives {shape} where one number is expected{way_out * (shape in ((classes,), 'dict'))}")


def recorded_goal(name: str, configs: Sequence[Mapping[str, Any]]) -> Goal | None:
    """Returns the goal of a logged metric, as these configs list it or by its name; None if nothing tells."""
    listed = [item["init_args"] for config in configs for item in config.get("metrics") or []]
    return next((item["goal"] for item in listed if item["name"] == name.rpartition("/")[2]), None) or goal_of(name)
