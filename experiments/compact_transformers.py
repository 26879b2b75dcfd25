"""The learning rate of Compact Transformers' quick training script, ``examples/main.py: adjust_learning_rate``."""

from __future__ import annotations

import math


def learning_rate(epoch: int, epochs: int, warmup: int = 5) -> float:
    """Returns the factor of lr in an epoch: 1/5, 1/4, 1/3, 1/2, 1 in the warm-up, then half a cosine.

    The first epoch after the warm-up has a factor of 1 too; the last one of 200 has 0.000065.

    Args:
        epoch: epochs that are completed.
        epochs: epochs of the training.
        warmup: epochs of the warm-up.
    """
    if epoch < warmup:
        return 1.0 / (warmup - epoch)
    return 0.5 * (1.0 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))
