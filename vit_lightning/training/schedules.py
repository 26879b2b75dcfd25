"""Learning rate schedules as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from vit_lightning.errors import UserError, with_place

Schedule = Literal["cosine", "linear", "wsd", "constant"]

Interval = Literal["step", "epoch"]


class OwnSchedule(NamedTuple):
    """A schedule of the user's.

    Args:
        name: its class or function.
        factors: returns factors of lr after the warm-up, from lr and their number.
        interval: whether there is one for each step, or for each epoch.
    """

    name: str
    factors: Callable[[float, int], Sequence[float]]
    interval: Interval = "step"


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    schedule: str,
    min_factor: float,
    warmup_factor: float = 0.0,
    decay_steps: int = 0,
) -> float:
    """Returns the learning rate of the step after ``step`` completed ones, as a fraction of lr.

    The warm-up grows linearly from ``warmup_factor`` before its first step to 1 in its last. Each decay reaches
    ``min_factor`` in the last step of training.

    Args:
        step: completed optimizer steps.
        total_steps: steps of the whole training.
        warmup_steps: steps of the warm-up.
        schedule: cosine, linear, wsd (warm-up, stable, decay) or constant.
        min_factor: learning rate of the last step, as a fraction of lr.
        warmup_factor: learning rate before the first step, as a fraction of lr.
        decay_steps: steps at the end in which wsd decays; at most those after the warm-up.
    """
    if step < warmup_steps:
        return warmup_factor + (1.0 - warmup_factor) * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        warmup_steps = max(warmup_steps, total_steps - decay_steps)
        if step < warmup_steps:
            return 1.0
    progress = min(1.0, (step - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_factor + (1.0 - min_factor) * (1.0 - progress)


def factors_of_function(function: Callable[[int, int], float], steps: int) -> list[float]:
    """Returns the factors of ``steps`` steps, from a function of the completed steps and of their whole number.

    Raises:
        UserError: it fails, or a factor is no number of at least 0.
    """
    factors: list[float] = []
    for step in range(steps):
        try:
            factors.append(float(function(step, steps)))
        except Exception as fault:  # whatever the user's code raises
            raise UserError(f"step {step} of {steps}: {with_place(fault)}") from fault
        if not 0.0 <= factors[-1] < math.inf:
            raise UserError(f"step {step} of {steps}: the factor {factors[-1]} must be a finite number, at least 0")
    return factors


def factors_of_scheduler(make: Callable[[torch.optim.Optimizer], LRScheduler], lr: float, steps: int) -> list[float]:
    """Returns the learning rates of a torch scheduler that is stepped after each of some steps, relative to ``lr``.

    Raises:
        UserError: it fails, such as one that needs a metric.
    """
    optimizer = _Idle(lr)
    rates: list[float] = []
    try:
        scheduler = make(optimizer)
        for _ in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    except Exception as fault:  # whatever a class of others raises
        # at its end OneCycleLR refuses a step that sets the rate of none
        if len(rates) < steps:
            raise UserError(f"step {len(rates)} of {steps}: {with_place(fault)}") from fault
    return factors_of_function(lambda step, _: rates[step] / lr, steps)


class _Idle(torch.optim.Optimizer):
    """An optimizer of no weights, with a learning rate for a scheduler to change."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.zeros(1)], {"lr": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass
