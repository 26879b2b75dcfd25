"""Learning rate schedules as functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd", "constant"]


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
