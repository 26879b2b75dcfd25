"""Random augmentations of training images, a whole batch at once and on its device.

The random numbers of an image are a function of its key, and its key of (seed, epoch, index): they do not depend on its
batch, workers, ranks or a resume. There is no random state.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.data import operations
from vit_lightning.data.operations import affine, resample, resize_weights, resized
from vit_lightning.errors import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, random_bytes, uniform


class Augmentation(ABC):
    """Augmentation of a batch of uint8 images (b, c, H, W) with random numbers from their keys (b,).

    A subclass draws with ``random_keys.uniform(keys, stream)``, one number for each image, and keeps shape and type.
    """

    @abstractmethod
    def __call__(self, images: Tensor, keys: Tensor) -> Tensor: ...


class RandomCrop(Augmentation):
    """Shift of each image by up to ``padding`` pixels in both directions, filled with black.

    Args:
        padding: largest shift in pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        refuse(at_least(0, padding=padding), prefix="augment.RandomCrop.")
        self.padding = padding

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        choices = 2 * self.padding + 1
        top, left = (uniform(keys, range(1, 3)) * choices).long()
        windows = F.pad(images, [self.padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
        windows = windows.permute(0, 2, 3, 1, 4, 5)  # (b, top, left, c, H, W): whole rows are copied, not pixels
        if operations.host_chooses(images):
            return torch.from_numpy(windows.numpy()[np.arange(len(images)), top.numpy(), left.numpy()])
        return windows[torch.arange(len(images), device=images.device), top, left]


class HorizontalFlip(Augmentation):
    """Mirror image, left to right.

    Args:
        p: probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        refuse(problems_of(("p", p, 0.0 <= p <= 1.0, "between 0 and 1")), prefix="augment.HorizontalFlip.")
        self.p = p

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        flip = uniform(keys, 3) < self.p
        if operations.host_chooses(images):
            return operations.change_each(images, flip, flip, {True: lambda images, _: images.flip(-1)})
        return torch.where(flip[:, None, None, None], images.flip(-1), images)


class RandomResizedCrop(Augmentation):
    """A random crop of each image, resized to the size of the whole (Szegedy et al. 2015), bilinear with antialiasing.

    Args:
        scale: smallest and largest crop, as fractions of the area.
        ratio: smallest and largest ratio of width to height.
    """

    def __init__(self, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> None:
        refuse(_box_problems(scale, ratio), prefix="augment.RandomResizedCrop.")
        self.scale, self.ratio = scale, ratio

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        top, left, rows, columns = self.boxes(keys, height, width)
        if operations.host_chooses(images):
            boxes = torch.stack([top, left, rows, columns], dim=1).tolist()
            return torch.stack([resized(image, box) for image, box in zip(images, boxes, strict=True)])
        return resample(images, resize_weights(top, rows, size=height), resize_weights(left, columns, size=width))

    def boxes(self, keys: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns top, left, height and width in pixels, (b,), of the first of ten draws that fits, else of all."""
        low, high = (math.log(bound) for bound in self.ratio)
        attempts = mix(keys, range(10))
        draws = uniform(attempts, range(1, 5)).double()  # (4, attempts, b)
        area = height * width * (self.scale[0] + draws[0] * (self.scale[1] - self.scale[0]))
        ratio = torch.exp(low + draws[1] * (high - low))
        w, h = torch.stack([area * ratio, area / ratio]).sqrt().round().long()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first, some = fits.to(torch.uint8).argmax(dim=0, keepdim=True), fits.any(dim=0)
        rows, columns = (size.gather(0, first)[0] for size in (h, w))
        rows, columns = torch.where(some, rows, height), torch.where(some, columns, width)
        # the draws are below 1: where none fits, this is 0
        top = (draws[2].gather(0, first)[0] * (height - rows + 1)).long()
        left = (draws[3].gather(0, first)[0] * (width - columns + 1)).long()
        return top, left, rows, columns


def _box_problems(scale: tuple[float, float], ratio: tuple[float, float]) -> list[str]:
    return problems_of(
        ("scale", list(scale), 0.0 < scale[0] <= scale[1] <= 1.0, "above 0 and at most 1, in order"),
        ("ratio", list(ratio), 0.0 < ratio[0] <= ratio[1], "above 0, the smaller first"),
    )


class RandomErasing(Augmentation):
    """A random box of an image is covered (Zhong et al. 2020), before normalisation.

    Args:
        p: probability.
        scale: smallest and largest box, as fractions of the area.
        ratio: smallest and largest ratio of width to height.
        fill: black, or uniform random bytes.
    """

    def __init__(
        self,
        p: float = 0.25,
        scale: tuple[float, float] = (0.02, 1 / 3),
        ratio: tuple[float, float] = (0.3, 1 / 0.3),
        fill: Literal["black", "noise"] = "noise",
    ) -> None:
        problems = problems_of(("p", p, 0.0 <= p <= 1.0, "between 0 and 1")) + _box_problems(scale, ratio)
        refuse(problems, prefix="augment.RandomErasing.")
        self.p, self.fill = p, fill
        self._boxes = RandomResizedCrop(scale, ratio)

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        top, left, rows, columns = (value[:, None] for value in self._boxes.boxes(keys, height, width))
        # a box that fits nowhere is none, not all of the image
        erased = (uniform(keys, 9) < self.p) & (rows * columns < height * width)[:, 0]
        if operations.host_chooses(images):
            return self._erased(images, keys, torch.cat([top, left, rows, columns], dim=1), erased)
        y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        inside = ((y >= top) & (y < top + rows))[:, :, None] & ((x >= left) & (x < left + columns))[:, None, :]
        cover = self._noise(images, keys) if self.fill == "noise" else torch.zeros_like(images)
        return torch.where((inside & erased[:, None, None])[:, None], cover, images)

    def _erased(self, images: Tensor, keys: Tensor, boxes: Tensor, erased: Tensor) -> Tensor:
        """Returns what the device's form does, but draws noise for the boxes alone."""
        changed, seeds = images.numpy().copy(), mix(keys, 10).numpy()
        places = np.arange(changed[0].size).reshape(changed[0].shape) if self.fill == "noise" else None
        for number in erased.nonzero()[:, 0].tolist():
            top, left, rows, columns = boxes[number].tolist()
            box = (slice(None), slice(top, top + rows), slice(left, left + columns))
            noise = 0 if places is None else random_bytes(torch.from_numpy(places[box] + seeds[number]))
            changed[number][box] = noise
        return torch.from_numpy(changed)

    def _noise(self, images: Tensor, keys: Tensor) -> Tensor:
        pixels = mix(keys, 10)[:, None] + torch.arange(images[0].numel(), device=images.device)
        return random_bytes(pixels).to(images.dtype).view_as(images)


class RandomAffine(Augmentation):
    """Rotation, scaling and shift of each image about its centre, bilinear, filled with black.

    Args:
        degrees: largest angle in either direction.
        scale: smallest and largest factor of size.
        translate: largest shift, as a fraction of height and width.
    """

    def __init__(self, degrees: float = 10.0, scale: tuple[float, float] = (0.9, 1.1), translate: float = 0.1) -> None:
        order = problems_of(("scale", list(scale), 0.0 < scale[0] <= scale[1], "above 0, the smaller factor first"))
        refuse(at_least(0, degrees=degrees, translate=translate), order, prefix="augment.RandomAffine.")
        self.degrees, self.scale, self.translate = degrees, scale, translate

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        turn, size, *places = uniform(keys, range(4, 8))
        angle = (2.0 * turn - 1.0) * math.radians(self.degrees)
        factor = self.scale[0] + size * (self.scale[1] - self.scale[0])
        # in the coordinates of grid_sample an image goes from -1 to 1
        right, down = (2.0 * self.translate * (2.0 * place - 1.0) for place in places)
        if operations.host_chooses(images):
            amounts, all_of_them = torch.stack([angle, factor, right, down], dim=1), torch.zeros(len(images))
            change = {0: lambda images, amounts: affine(images, *amounts.unbind(1))}
            return operations.change_each(images, all_of_them, amounts, change)
        return affine(images, angle, factor, right, down)
