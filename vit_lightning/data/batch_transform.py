"""From uint8 batches to the model's input: augmentation, normalisation and mixing, on the device of the batch.

Mixing draws its random numbers from a key of (seed, step, rank).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.batches import Batch
from vit_lightning.limits import problems_of, refuse
from vit_lightning.random_keys import mix, mix_one

CACHED_BYTES = 2**20
"""uint8 images that a CPU augments and normalises at a time, so that they and their intermediates fit in its cache."""
Statistics = tuple[float, ...]
"""One number for each channel, of pixels between 0 and 1."""


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


@dataclass(kw_only=True, frozen=True)
class BatchTransform:
    """Augments (training only), normalises and mixes batches.

    Args:
        augment: augmentations of training images, in order.
        mixing: ways to mix a training batch, of which each batch draws one.
        mean: of the training images.
        std: of the training images.
        repetitions: how often each training image comes in a row; mixing skips its copies.
    """

    augment: Sequence[Augmentation]
    mixing: Sequence[Mixing]
    mean: Statistics
    std: Statistics
    repetitions: int

    def __call__(self, batch: Batch, *, num_classes: int, key: int) -> Batch:
        """Returns the batch with float32 images; ``key`` draws the mixing of a training batch."""
        images = torch.empty(batch.images.shape, dtype=torch.float32, device=batch.images.device)
        # on a CPU a few images at a time: memory outside of its cache costs more than the arithmetic
        count = max(8, CACHED_BYTES // batch.images[0].numel()) if images.device.type == "cpu" else len(images)
        for part in (slice(start, start + count) for start in range(0, len(images), count)):
            pixels = batch.images[part]
            if batch.keys is not None:
                for number, augment in enumerate(self.augment[batch.augmented :], batch.augmented):
                    pixels = augment(pixels, mix(batch.keys[part], number))
            self.normalise(pixels, images[part])
        batch = batch.replace(images=images)
        if batch.keys is None or not self.mixing:
            return batch
        mixing = self.mixing[(mix_one(key) & 0xFFFFFFFF) % len(self.mixing)]
        images, targets = mixing(
            batch.images, batch.labels, num_classes=num_classes, key=key, repetitions=self.repetitions
        )
        return batch.replace(images=images, targets=targets, labels=targets.argmax(dim=1))

    def normalise(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns uint8 images (b, c, H, W) as float32, with mean 0 and standard deviation 1 over training images."""
        mean, scale = _normalisation(tuple(self.mean), tuple(self.std), images.device)
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
        return out.copy_(images).sub_(mean).mul_(scale)  # in place: large new memory costs more than the arithmetic


@lru_cache
def _normalisation(mean: Statistics, std: Statistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns mean of uint8 pixels and factor after it, (c, 1, 1); cached, since making them on a GPU waits for it."""
    with torch.inference_mode(False):  # made while validating, they could not be used in training
        centre = torch.tensor(mean, device=device).mul(255.0)[:, None, None]
        return centre, torch.tensor(std, device=device).mul(255.0).reciprocal()[:, None, None]
