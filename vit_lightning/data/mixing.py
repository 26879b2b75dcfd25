"""Mixing the images of a batch and their labels; random numbers from a key of (seed, step, rank)."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vit_lightning.limits import problems_of, refuse


class Mixing(ABC):
    """Mixing of each image of a batch with the one before it.

    Args:
        alpha: both parameters of the Beta distribution of the fraction; 1 is uniform.
    """

    def __init__(self, alpha: float) -> None:
        problems = problems_of(("alpha", alpha, alpha > 0.0 and math.isfinite(alpha), "above 0"))
        refuse(problems, prefix=f"mixing.{type(self).__name__}.")
        self.alpha = alpha

    def __call__(
        self, images: Tensor, labels: Tensor, *, num_classes: int, key: int, repetitions: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns mixed images (b, c, H, W) and class fractions (b, num_classes), float32, of images and labels (b,).

        If each image comes ``repetitions`` times in a row, it is mixed with the one that many positions before.
        """
        draw = random.Random(key)
        share = draw.betavariate(self.alpha, self.alpha)
        mixed, share = self.mix_images(images, images.roll(repetitions, 0), share, draw)
        # one_hot would look at the labels on the CPU
        targets = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
        return mixed, targets * share + targets.roll(repetitions, 0) * (1.0 - share)

    @abstractmethod
    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        """Returns images mixed with the others, and the fraction of each that is its own."""


class MixUp(Mixing):
    """Weighted mean of two images and of their labels (Zhang et al. 2018).

    Args:
        alpha: both parameters of the Beta distribution of the weight.
    """

    def __init__(self, alpha: float = 0.8) -> None:
        super().__init__(alpha)

    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        return images * share + others * (1.0 - share), share


class CutMix(Mixing):
    """A box of one image pasted into another, labels mixed by area (Yun et al. 2019).

    Args:
        alpha: both parameters of the Beta distribution of the fraction that is kept.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(alpha)

    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        height, width = images.shape[-2:]
        x, y = draw.randrange(width), draw.randrange(height)
        half = 0.5 * math.sqrt(1.0 - share)
        left, right = max(0, x - int(half * width)), min(width, x + int(half * width))
        upper, lower = max(0, y - int(half * height)), min(height, y + int(half * height))
        mixed = images.clone()
        mixed[..., upper:lower, left:right] = others[..., upper:lower, left:right]
        return mixed, 1.0 - (right - left) * (lower - upper) / (width * height)
