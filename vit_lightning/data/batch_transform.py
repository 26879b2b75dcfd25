"""From uint8 batches to the model's input: augmentation, normalisation and mixing, on the device of the batch.

Mixing draws its random numbers from a key of (seed, step, rank).
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.constants import constant
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.batches import Batch
from vit_lightning.data.per_image import PerImage
from vit_lightning.errors import problems_of, refuse
from vit_lightning.random_keys import mix, mix_one

CACHED_BYTES = 2**20
"""uint8 images that a CPU augments and normalises at a time, so that they and their intermediates fit in its cache."""
Statistics = tuple[float, ...]
"""One number for each channel, of pixels between 0 and 1."""


def images_at_a_time(images: Tensor) -> int:
    """Returns how many images a CPU changes at a time; draws for fewer than 16 would cost more than the cache saves."""
    return max(16, CACHED_BYTES // images.shape[1:].numel())


class Mixing(ABC):
    """Mixing of each image of a batch with the one before it.

    Args:
        alpha: both parameters of the Beta distribution of the fraction; 1 is uniform.
        p: probability that a batch is mixed in this way; None for an equal part of what the others leave.
    """

    def __init__(self, alpha: float = 1.0, p: float | None = None) -> None:
        problems = problems_of(
            ("alpha", alpha, alpha > 0.0 and math.isfinite(alpha), "above 0"),
            ("p", p, p is None or 0.0 <= p <= 1.0, "between 0 and 1"),
        )
        refuse(problems, prefix=f"mixing.{type(self).__name__}.")
        self.alpha, self.p = alpha, p

    def __call__(self, images: Tensor, targets: Tensor, *, key: int, repetitions: int = 1) -> tuple[Tensor, Tensor]:
        """Returns mixed images (b, c, H, W) and class fractions (b, classes), float32, of those of single images.

        If each image comes ``repetitions`` times in a row, it is mixed with the one that many positions before (with
        a copy only in a last batch of fewer than twice as many images).
        """
        draw = random.Random(key)
        share = draw.betavariate(self.alpha, self.alpha)
        mixed, share = self.mix_images(images, images.roll(repetitions, 0), share, draw)
        return mixed, targets * share + targets.roll(repetitions, 0) * (1.0 - share)

    @abstractmethod
    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        """Returns images mixed with the others, and the fraction of each that is its own."""


class MixUp(Mixing):
    """Weighted mean of two images and of their labels (Zhang et al. 2018).

    Args:
        alpha: both parameters of the Beta distribution of the weight.
        p: probability for each batch; None for an equal part of what the others leave.
    """

    def __init__(self, alpha: float = 0.8, p: float | None = None) -> None:
        super().__init__(alpha, p)

    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        return images * share + others * (1.0 - share), share


class CutMix(Mixing):
    """A box of one image pasted into another, labels mixed by area (Yun et al. 2019).

    Args:
        alpha: both parameters of the Beta distribution of the fraction that is kept.
        p: probability for each batch; None for an equal part of what the others leave.
    """

    def mix_images(self, images: Tensor, others: Tensor, share: float, draw: random.Random) -> tuple[Tensor, float]:
        height, width = images.shape[-2:]
        x, y = draw.randrange(width), draw.randrange(height)
        half = 0.5 * math.sqrt(1.0 - share)
        left, right = max(0, x - int(half * width)), min(width, x + int(half * width))
        upper, lower = max(0, y - int(half * height)), min(height, y + int(half * height))
        mixed = images.clone()
        mixed[..., upper:lower, left:right] = others[..., upper:lower, left:right]
        return mixed, 1.0 - (right - left) * (lower - upper) / (width * height)


def shares(mixing: Sequence[Mixing]) -> list[float]:
    """Returns the probability of each way to mix a batch, and last that of none."""
    rest = max(0.0, 1.0 - sum(way.p or 0.0 for way in mixing))
    equal = rest / max(1, sum(way.p is None for way in mixing))
    given = [equal if way.p is None else way.p for way in mixing]
    return [*given, rest if all(way.p is not None for way in mixing) else 0.0]


class BatchTransform:
    """Augments (training only), normalises and mixes batches.

    Args:
        augment: augmentations of training images, in order.
        mixing: ways to mix a training batch, of which each batch draws one or none.
        mean: of the training images.
        std: of the training images.
        repetitions: how often each training image comes in a row; mixing skips its copies.
    """

    def __init__(
        self,
        *,
        augment: Sequence[Augmentation],
        mixing: Sequence[Mixing],
        mean: Statistics,
        std: Statistics,
        repetitions: int,
    ) -> None:
        self.augment, self.mixing, self.repetitions = augment, mixing, repetitions
        self._shares = shares(mixing)
        self.mean, self.std = tuple(mean), tuple(std)
        self._on_device: Callable[[Tensor, Tensor | None, int], Tensor] = self._augmented

    def compile(self, *, backend: str = "inductor") -> None:
        """Compiles what a device that is no CPU does with training images: one graph for each size of an image.

        Images are the same, bilinear rotations aside: places of pixels come from tables, and on a GPU Inductor rounds
        sums of products as single operators do (on a CPU it does not, by a level or two of 255 in up to one value of
        10,000). A smaller batch, the last of an epoch or one without damaged images, is filled up to the largest.
        Mixing is not in it: what the host draws for a batch would be another graph for each.
        """
        if any(isinstance(augment, PerImage) for augment in self.augment):
            return  # which are changed on the CPU
        from torch._inductor import config as inductor  # imported only by runs that compile

        # products are not added in one rounding, and quotients rounded as those of single operators are
        exact = ("emulate_precision_casts", "eager_numerics.division_rounding", "emulate_divison_rounding")
        options: dict[str, Any] | None = None
        if backend == "inductor":
            options = {name: True for name in exact if name in inductor.get_config_copy()}
        run = torch.compile(self._augmented, backend=backend, fullgraph=True, dynamic=False, options=options)
        largest: dict[torch.Size, int] = {}

        def run_compiled(images: Tensor, keys: Tensor | None, augmented: int) -> Tensor:
            if keys is None:
                return self.normalise(images)
            count, shape = len(images), images.shape[1:]
            if shape not in largest:
                self._augmented(images[:1], keys[:1], augmented)  # makes constants, which the code then takes
            largest[shape] = max(count, largest.get(shape, 0))
            if missing := largest[shape] - count:
                images, keys = F.pad(images, [*[0] * 7, missing]), F.pad(keys, [0, missing])
            return run(images, keys, augmented)[:count]

        self._on_device = run_compiled

    def __call__(self, batch: Batch, *, num_classes: int, key: int, mixes: bool = True) -> Batch:
        """Returns the batch with float32 images; ``key`` draws the mixing of a training batch.

        One that is not mixed has targets too, so that all steps of a training compute the same.
        """
        batch = batch.replace(images=self._float(batch))
        if batch.keys is None or not self.mixing:
            return batch
        # one_hot would look at the labels on the CPU
        images, targets = batch.images, torch.zeros(len(batch.labels), num_classes, device=batch.labels.device)
        targets.scatter_(1, batch.labels[:, None], 1.0)
        way = random.Random(mix_one(key)).choices([*self.mixing, None], self._shares)[0]
        if mixes and way is not None:
            images, targets = way(images, targets, key=key, repetitions=self.repetitions)
        return batch.replace(images=images, targets=targets, labels=targets.argmax(dim=1))

    def _float(self, batch: Batch) -> Tensor:
        if batch.images.device.type != "cpu":
            return self._on_device(batch.images, batch.keys, batch.augmented)
        # a few images at a time: memory outside of the cache costs more than the arithmetic
        count = images_at_a_time(batch.images)
        images = torch.empty(batch.images.shape, dtype=torch.float32)
        for part in (slice(start, start + count) for start in range(0, len(images), count)):
            keys = None if batch.keys is None else batch.keys[part]
            self._augmented(batch.images[part], keys, batch.augmented, images[part])
        return images

    def _augmented(self, images: Tensor, keys: Tensor | None, augmented: int, out: Tensor | None = None) -> Tensor:
        if keys is not None:
            for number, augment in enumerate(self.augment[augmented:], augmented):
                images = augment(images, mix(keys, number))
        return self.normalise(images, out)

    def normalise(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns uint8 images (b, c, H, W) as float32, with mean 0 and standard deviation 1 over training images."""
        mean, scale = constant(images.device, _normalisation, self.mean, self.std)
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
        return out.copy_(images).sub_(mean).mul_(scale)  # in place: large new memory costs more than the arithmetic


def _normalisation(mean: Statistics, std: Statistics) -> Tensor:
    """Returns mean of uint8 pixels and factor after it, (2, c, 1, 1)."""
    both = torch.tensor([mean, std]).mul(255.0)
    return torch.stack([both[0], both[1].reciprocal()])[..., None, None]
