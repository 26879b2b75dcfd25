"""Augmentation policies that draw an operation for each image: RandAugment, TrivialAugment, 3-Augment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vit_lightning.data import operations
from vit_lightning.data.augment import Augmentation, ColorJitter
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, streams, uniform

Operation = Callable[[Tensor, Tensor], Tensor]
"""Operation on uint8 images (b, c, H, W) with magnitudes (b,)."""


OPERATIONS: dict[str, Operation] = {
    "Identity": lambda images, _: images,
    "ShearX": operations.shear_x,
    "ShearY": operations.shear_y,
    "TranslateX": operations.translate_x,
    "TranslateY": operations.translate_y,
    "Rotate": operations.rotate,
    "Brightness": lambda images, magnitude: operations.brightness(images, 1.0 + magnitude),
    "Color": lambda images, magnitude: operations.saturation(images, 1.0 + magnitude),
    "Contrast": lambda images, magnitude: operations.contrast(images, 1.0 + magnitude),
    "Sharpness": lambda images, magnitude: operations.sharpness(images, 1.0 + magnitude),
    "Posterize": operations.posterize,
    "Solarize": lambda images, magnitude: operations.solarize(images, 255.0 * magnitude),
    "AutoContrast": lambda images, _: operations.autocontrast(images),
    "Equalize": lambda images, _: operations.equalize(images),
}
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
"""Operations whose magnitude is negated for half of the images."""


class Scale(NamedTuple):
    """Magnitudes of the operations, in a number of bins."""

    largest: tuple[tuple[str, float], ...]
    """Largest magnitude of an operation."""
    posterized_bits: int
    bin: int | None = None
    """The only one of 31 that is used."""

    def table(self) -> Tensor:
        """Returns (operations, bins, 2) magnitudes, float64: as they are, and negated where an operation has a sign."""
        table = torch.zeros(len(OPERATIONS), 31, dtype=torch.float64)
        for name, largest in self.largest:
            table[list(OPERATIONS).index(name)] = torch.linspace(0.0, largest, 31)
        table[list(OPERATIONS).index("Posterize")] = (8 - torch.arange(31) / (30 / self.posterized_bits)).round()
        table[list(OPERATIONS).index("Solarize")] = torch.linspace(1.0, 0.0, 31)
        sign = torch.tensor([-1.0 if name in SIGNED else 1.0 for name in OPERATIONS])
        both = torch.stack([table, table * sign[:, None]], dim=-1)
        return both if self.bin is None else both[:, self.bin : self.bin + 1]


def apply_operations(images: Tensor, rows: Tensor, scale: Scale) -> Tensor:
    """Applies operations, one after the other; ``rows`` (operations, b) numbers those of ``scale.table``, flattened."""
    if host_chooses(images):
        magnitudes = operations.constant(images.device, Scale.table, scale)
        for row in rows:
            images = apply_each(images, row // magnitudes[0].numel(), magnitudes.flatten()[row])
        return images
    for parameters in operations.constant(images.device, _parameters, scale, *images.shape[1:])[rows]:
        images = operations.apply_at_once(images, parameters)
    return images


def host_chooses(images: Tensor) -> bool:
    """Whether the operations of each image are chosen on the host, which a device would have to wait for."""
    return images.device.type == "cpu"


def apply_each(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Applies operation number ``operation[i]`` of ``OPERATIONS`` with ``magnitude[i]`` to image i; both (b,)."""
    images = images.clone()
    for number, change in enumerate(OPERATIONS.values()):
        chosen = (operation == number).nonzero()[:, 0]
        if number and len(chosen):
            images[chosen] = change(images[chosen], magnitude[chosen])
    return images


def _parameters(scale: Scale, channels: int, height: int, width: int) -> Tensor:
    """Returns the parameters of ``operations.apply_at_once`` for each row of a scale, (rows, 14)."""
    magnitudes = scale.table()
    rows = []
    for name, of_name in zip(OPERATIONS, magnitudes.flatten(1), strict=True):
        for m in of_name.tolist():
            matrix, rest = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 255.0, 256.0, 0.0]
            if name == "ShearX":
                matrix[1:3] = m, m * height / 2
            elif name == "ShearY":
                matrix[3], matrix[5] = m, m * width / 2
            elif name == "TranslateX":
                matrix[2] = -math.trunc(m)
            elif name == "TranslateY":
                matrix[5] = -math.trunc(m)
            elif name == "Rotate":
                cos, sin = math.cos(math.radians(m % 360.0)), math.sin(math.radians(m % 360.0))
                matrix[:2], matrix[3:5] = (cos, -sin), (sin, cos)
            elif name == "Brightness" or (name == "Color" and channels == 3) or name == "Contrast":
                rest[0] = 1.0 + m
                rest[1:3] = -m * (name == "Color"), -m * (name == "Contrast")
            elif name == "Sharpness":
                rest[3] = -m
            elif name == "AutoContrast":
                rest[4] = 1.0 / 255.0
            elif name == "Posterize":
                rest[5] = 256 - 2 ** (8 - int(m))
            elif name == "Solarize":
                rest[6] = 255.0 * m
            elif name == "Equalize":
                rest[7] = 1.0
            rows.append([*matrix, *rest])
    table = torch.tensor(rows, dtype=torch.float64).float()
    return torch.cat([operations.in_halves(table[:, :6], height, width).flatten(1), table[:, 6:]], dim=1)


class RandAugment(Augmentation):
    """A number of operations of one magnitude, drawn from 14 for each image (Cubuk et al. 2020, section 3).

    Args:
        num_ops: operations on each image, one after the other.
        magnitude: their strength, 0 to 30.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9) -> None:
        within = problems_of(("magnitude", magnitude, 0 <= magnitude <= 30, "between 0 and 30"))
        refuse(at_least(1, num_ops=num_ops), within, prefix="augment.RandAugment.")
        self.num_ops, self.magnitude = num_ops, magnitude

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        largest = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0}
        largest |= {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}
        largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
        layers = mix(streams(keys, range(self.num_ops)))
        draw, sign = uniform(streams(layers, range(1, 3)), 0)
        rows = torch.add(sign < 0.5, (draw * len(OPERATIONS)).long(), alpha=2)
        return apply_operations(images, rows, Scale(tuple(largest.items()), 4, self.magnitude))


class TrivialAugment(Augmentation):
    """One operation and its magnitude, drawn from 14 for each image (Müller and Hutter 2021; the "wide" space)."""

    scale = Scale(
        tuple(
            {
                **dict.fromkeys(("ShearX", "ShearY", "Brightness", "Color", "Contrast", "Sharpness"), 0.99),
                **dict.fromkeys(("TranslateX", "TranslateY"), 32.0),
                "Rotate": 135.0,
            }.items()
        ),
        posterized_bits=6,
    )

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        draw, sign, bin_ = uniform(streams(keys, range(1, 4)), 0)
        place = torch.add((bin_ * 31).long(), (draw * len(OPERATIONS)).long(), alpha=31)
        return apply_operations(images, torch.add(sign < 0.5, place, alpha=2)[None], self.scale)


class ThreeAugment(Augmentation):
    """Gray, solarized or blurred, each for a third of the images, then colour jitter (DeiT III: Touvron et al. 2022).

    Args:
        jitter: strength of the jitter of brightness, contrast and saturation.
        max_sigma: largest standard deviation of the blur, in pixels; the smallest is 0.1.
    """

    def __init__(self, jitter: float = 0.3, max_sigma: float = 2.0) -> None:
        refuse(at_least(0.1, max_sigma=max_sigma), at_least(0, jitter=jitter), prefix="augment.ThreeAugment.")
        self.max_sigma = max_sigma
        self.jitter = ColorJitter(jitter, jitter, jitter)

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        which = (uniform(keys, 1) * 3).long()
        sigma = 0.1 + uniform(keys, 2) * (self.max_sigma - 0.1)
        if host_chooses(images):
            changed = images.clone()
            for number in range(3):
                if (chosen := which == number).any():
                    changed[chosen] = self._change(number, images[chosen], sigma[chosen])
        else:
            gray, solarized, blurred = (self._change(number, images, sigma) for number in range(3))
            which = which[:, None, None, None]
            changed = torch.where(which == 2, blurred, torch.where(which == 0, gray, solarized))
        return self.jitter(changed, mix(keys, 1))

    def _change(self, number: int, images: Tensor, sigma: Tensor) -> Tensor:
        if number == 0:
            return operations.grayscale(images)
        if number == 1:
            return operations.solarize(images, torch.full_like(sigma, 128.0))
        return operations.gaussian_blur(images, sigma, self.max_sigma)
