"""Augmentation policies that draw an operation for each image: RandAugment, TrivialAugment, 3-Augment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vit_lightning.constants import constant
from vit_lightning.data import operations
from vit_lightning.data.augment import Augmentation, ColorJitter
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, uniform

OPERATIONS: dict[str, operations.Change] = {
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
MOVES = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
"""The first operations, which move pixels at most."""


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
    if operations.host_chooses(images):
        magnitudes = constant(images.device, Scale.table, scale)
        changes = dict(enumerate(OPERATIONS.values()))
        for row in rows:
            which, magnitude = row // magnitudes[0].numel(), magnitudes.flatten()[row]
            images = operations.change_each(images, which, magnitude, changes)
        return images
    channels, *size = images.shape[1:]
    table = constant(images.device, _sources, scale, *size)
    sources = table[rows.clamp(max=len(table) - 1)].long()
    parameters = constant(images.device, _parameters, scale, channels)[rows]
    for number in range(len(rows)):
        images = operations.apply_at_once(images, sources[number], parameters[number])
    return images


def _sources(scale: Scale, height: int, width: int) -> Tensor:
    """Returns what ``operations.apply_at_once`` takes for each row of a scale up to Rotate, and last for all others.

    Both forms thus take the same pixels, also where a place is midway between two. (rows + 1, H * W), int32: 3 MB for
    RandAugment at 224 pixels, 75 MB for TrivialAugment.
    """
    numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    moved = [
        change(numbers.expand(magnitudes.numel(), -1, -1, -1), magnitudes.flatten())
        for (name, change), magnitudes in zip(OPERATIONS.items(), scale.table(), strict=True)
        if name in MOVES
    ]
    return torch.cat([*moved, numbers]).flatten(1).int()


def _parameters(scale: Scale, channels: int) -> Tensor:
    """Returns the parameters of ``operations.apply_at_once`` for each row of a scale, (rows, 8)."""
    rows = []
    for name, of_name in zip(OPERATIONS, scale.table().flatten(1), strict=True):
        for m in of_name.tolist():
            row = [1.0, 0.0, 0.0, 0.0, 0.0, 255.0, 256.0, 0.0]
            if name == "Brightness" or (name == "Color" and channels == 3) or name == "Contrast":
                row[:3] = 1.0 + m, -m * (name == "Color"), -m * (name == "Contrast")
            elif name == "Sharpness":
                row[3] = -m
            elif name == "AutoContrast":
                row[4] = 1.0 / 255.0
            elif name == "Posterize":
                row[5] = 256 - 2 ** (8 - int(m))
            elif name == "Solarize":
                row[6] = 255.0 * m
            elif name == "Equalize":
                row[7] = 1.0
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).float()


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
        layers = mix(keys, range(self.num_ops))
        draw, sign = uniform(layers, range(1, 3))
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
        draw, sign, bin_ = uniform(keys, range(1, 4))
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
        kind, strength = uniform(keys, range(1, 3))
        which = (kind * 3).long()
        sigma = 0.1 + strength * (self.max_sigma - 0.1)
        changes: dict[int, operations.Change] = {
            0: lambda images, _: operations.grayscale(images),
            1: lambda images, sigma: operations.solarize(images, torch.full_like(sigma, 128.0)),
            2: lambda images, sigma: operations.gaussian_blur(images, sigma, self.max_sigma),
        }
        if operations.host_chooses(images):
            changed = operations.change_each(images, which, sigma, changes)
        else:
            gray, solarized, blurred = (change(images, sigma) for change in changes.values())
            which = which[:, None, None, None]
            changed = torch.where(which == 2, blurred, torch.where(which == 0, gray, solarized))
        return self.jitter(changed, mix(keys, 1))
