"""Proof that a model in another form is the same function: logits for batches of several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError

BATCHES = (1, 2, 5)
"""Numbers of images in a batch; graphs are traced with another, ``TRACED``."""
TRACED = 3
TOLERANCE = 1e-4
"""Largest difference of two logits in float32 that counts as the same."""


def random_images(count: int, shape: tuple[int, ...]) -> Tensor:
    """Returns images (count, c, H, W) as a model gets them, always the same; draws no global random numbers."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def largest_difference(network: nn.Module, other: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> float:
    """Returns the largest difference of the logits of a network and of its other form, for batches of 1, 2 and 5.

    Raises:
        UserError: it is above ``TOLERANCE``.
    """
    worst = 0.0
    for count in BATCHES:
        images = random_images(count, shape)
        ours, theirs = network(images), other(images)
        if theirs.shape != ours.shape:
            raise UserError(f"the logits have shape {tuple(theirs.shape)} and not {tuple(ours.shape)}: nothing is kept")
        difference = float((theirs - ours).abs().max())
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    if worst > TOLERANCE:
        raise UserError(f"the logits differ by up to {worst:.3g} from the source's: nothing is kept")
    return worst
