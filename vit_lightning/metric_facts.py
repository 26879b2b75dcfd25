"""The one table of metrics: how each is computed, in which stages it is logged, how it is compared and written.

``ViTClassifier``, the check of monitored metrics, ``results.json``, ablations and reports all read this table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

Stage = Literal["train", "val", "test"]
Goal = Literal["maximize", "minimize"]


class MeanLoss(Metric):
    """Mean over images of the losses of batches; unlike torchmetrics' MeanMetric it keeps a nan visible."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor, images: int) -> None:
        # in place: += would also set an attribute of the module, which takes longer than the addition
        self.total.add_(loss.detach(), alpha=images)
        self.count.add_(images)

    def compute(self) -> Tensor:
        return (self.total / self.count).to(torch.float32)


class Accuracy(Metric):
    """Accuracy over all images; torchmetrics' ``MulticlassAccuracy`` takes four times as many operations a batch."""

    full_state_update = False
    higher_is_better = True
    right: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        assert labels.ndim == 1, f"labels have shape {tuple(labels.shape)}, not (b,): accuracy is of one class an image"
        self.right.add_((probabilities.argmax(dim=1) == labels).sum())
        self.count.add_(len(labels))

    def compute(self) -> Tensor:
        return self.right / self.count


@dataclass(frozen=True)
class MetricFacts:
    """A row of the table.

    Args:
        make: returns the torchmetrics metric for a number of classes; its ``update`` takes probabilities
            (b, num_classes) and labels (b,).
        goal: whether higher or lower values are better; None if nothing tells, of a metric of the user's.
        label: name on the axis of a figure.
        percent: whether it is a fraction that is written in percent.
        counts_images: whether it is a fraction of the images.
        stages: stages that log it, as ``STAGE/NAME``.
        min_classes: fewest classes for which it is logged.
        in_bar: whether the progress bar shows it.
    """

    make: Callable[[int], Metric]
    goal: Goal | None
    label: str
    percent: bool = False
    counts_images: bool = False
    stages: tuple[Stage, ...] = ("train", "val", "test")
    min_classes: int = 2
    in_bar: bool = False


METRICS = {
    "loss": MetricFacts(lambda classes: MeanLoss(), "minimize", "loss"),  # the only one updated with the loss
    "acc": MetricFacts(
        lambda classes: Accuracy(), "maximize", "accuracy", percent=True, counts_images=True, in_bar=True
    ),
    "acc5": MetricFacts(
        lambda classes: MulticlassAccuracy(classes, top_k=5, average="micro", validate_args=False),
        "maximize",
        "top-5 accuracy",
        percent=True,
        counts_images=True,
        stages=("val", "test"),
        min_classes=6,
    ),
    "ece": MetricFacts(
        lambda classes: MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
        "minimize",
        "expected calibration error",
        percent=True,
        stages=("test",),
    ),
}
STEP_METRICS = ("train/loss_step", "lr")
"""Logged at single steps, not over an epoch."""


def with_own(metrics: Mapping[str, Metric], table: Mapping[str, MetricFacts] = METRICS) -> dict[str, MetricFacts]:
    """Returns the table with metrics of the user's own, which are logged in validation and test."""
    stages: tuple[Stage, ...] = ("val", "test")
    return dict(table) | {
        name: MetricFacts(
            lambda classes, metric=metric: metric.clone(),  # type: ignore[misc]
            goal_by(metric.higher_is_better),
            name.replace("_", " "),
            stages=stages,
        )
        for name, metric in metrics.items()
    }


def goal_by(higher_is_better: bool | None) -> Goal | None:
    """Returns the goal by what a torchmetrics class says, which is nothing for many a metric of the user's."""
    if higher_is_better is None:
        return None
    return "maximize" if higher_is_better else "minimize"


def facts_of(name: str) -> MetricFacts | None:
    """Returns the facts of a logged name such as ``val/acc``; None for a metric outside the table."""
    return METRICS.get(name.rpartition("/")[2])


def goal_of(name: str) -> Goal | None:
    """Returns whether higher or lower values of a logged metric are better; None if its name does not tell.

    Names of accuracies and losses that a module of the user's may log are known too, such as ``val_accuracy``, with
    what Lightning adds: ``test_loss_epoch``, ``test_loss/dataloader_idx_0``.
    """
    plain = re.sub(r"(_epoch|_step)?(/dataloader_idx_\d+)?$", "", name)
    plain = re.sub(r"^(train|val|test)[/_]([^/]+/)?", "", plain)  # also test/NAME/acc, of a further test set
    if plain in METRICS:
        return METRICS[plain].goal
    if plain.endswith(("acc", "accuracy")):
        return "maximize"
    return "minimize" if plain.endswith("loss") and "neg" not in plain else None


def metric_names(*stages: Stage, classes: int | None = None, table: Mapping[str, MetricFacts] = METRICS) -> list[str]:
    """Returns the names logged in the stages, such as ``val/acc``; without ``classes``, those of any number of them."""
    return [
        f"{stage}/{name}"
        for stage in stages
        for name, facts in table.items()
        if stage in facts.stages and (classes is None or classes >= facts.min_classes)
    ]


def make_metrics(stage: Stage, classes: int, table: Mapping[str, MetricFacts] = METRICS) -> nn.ModuleDict:
    """Returns the metrics of a stage by name; those of training are kept in checkpoints, to resume inside an epoch."""
    names = [name.partition("/")[2] for name in metric_names(stage, classes=classes, table=table)]
    metrics = {name: table[name].make(classes) for name in names}
    for metric in metrics.values():
        metric.persistent(stage == "train")
    return nn.ModuleDict(metrics)
