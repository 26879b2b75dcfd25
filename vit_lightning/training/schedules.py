"""The learning rate of each step, from the step's number alone."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd", "constant"]


def rate_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    schedule: str,
    min_factor: float,
    warmup_factor: float = 0.0,
    decay_steps: int = 0,
) -> float:
    """Rate of the step after ``step`` completed ones, as a share of lr.

    The warm-up grows linearly from ``warmup_factor``, which no step has, to 1 in its last step. The last step of a
    cosine, of a line and of the fall of wsd has ``min_factor``.

    Args:
        step: optimizer steps that are completed.
        total_steps: steps of the whole training.
        warmup_steps: steps of the warm-up.
        schedule: cosine, linear, wsd (warm-up, stable, decay) or constant.
        min_factor: rate of the last step, as a share of lr.
        warmup_factor: rate before the first step, as a share of lr.
        decay_steps: steps at the end in which wsd falls; what the warm-up leaves at most.
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
