"""Augmentation policies that draw an operation for each image: RandAugment, TrivialAugment, 3-Augment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vit_lightning.data import operations
from vit_lightning.data.augment import Augmentation, ColorJitter
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, streams, uniform

Operation = Callable[[Tensor, Tensor], Tensor]
"""Operation on uint8 images (b, c, H, W) with magnitudes (b,)."""


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    changed: Tensor = functional.equalize(images)
    return changed


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
    "Equalize": _equalize,
}
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
"""Operations whose magnitude is negated for half of the images."""


def apply_operations(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Applies operation number ``operation[i]`` of ``OPERATIONS`` with ``magnitude[i]`` to image i; both (b,)."""
    chosen = _apply_each if images.device.type == "cpu" else apply_at_once
    return chosen(images, operation, magnitude)


def _apply_each(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Applies each operation to its images alone: the least work, but a device would wait for each choice."""
    images = images.clone()
    for number, change in enumerate(OPERATIONS.values()):
        chosen = (operation == number).nonzero()[:, 0]
        if number and len(chosen):
            images[chosen] = change(images[chosen], magnitude[chosen])
    return images


def apply_at_once(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Does the same without a choice on the host: each kind of operation on all images, most with no effect."""
    height, width = images.shape[-2:]
    angle = magnitude.remainder(360.0).deg2rad()
    terms = torch.stack([torch.ones_like(magnitude), magnitude, magnitude.trunc(), angle.cos(), angle.sin()], dim=1)
    matrix = (operations.constant(_coefficients, height, width, images.device)[operation] * terms[:, None]).sum(dim=-1)
    images = operations.warp(images, matrix.float().unbind(1))
    here = {name: (operation == number)[:, None, None, None] for number, name in enumerate(OPERATIONS)}
    kinds = [here[name] for name in ("Brightness", "Color", "Contrast", "Sharpness")]
    images = operations.blend(images, kinds, magnitude)
    bits = torch.where(operation == list(OPERATIONS).index("Posterize"), magnitude, 8.0)
    images = operations.posterize(images, bits)
    for name in ("Solarize", "AutoContrast", "Equalize"):
        images = torch.where(here[name], OPERATIONS[name](images, magnitude), images)
    return images


def _coefficients(height: int, width: int, device: torch.device) -> Tensor:
    """Returns what 1, magnitude, its whole part, cosine and sine add to the matrix of ``warp``, (operations, 6, 5)."""
    table = torch.zeros(len(OPERATIONS), 6, 5, dtype=torch.float64)
    table[:, 0, 0] = table[:, 4, 0] = 1.0
    for name, place, term, value in (
        ("ShearX", 1, 1, 1.0),
        ("ShearX", 2, 1, height / 2),
        ("ShearY", 3, 1, 1.0),
        ("ShearY", 5, 1, width / 2),
        ("TranslateX", 2, 2, -1.0),
        ("TranslateY", 5, 2, -1.0),
        ("Rotate", 0, 3, 1.0),
        ("Rotate", 1, 4, -1.0),
        ("Rotate", 3, 4, 1.0),
        ("Rotate", 4, 3, 1.0),
    ):
        number = list(OPERATIONS).index(name)
        table[number, place, 0] = 0.0
        table[number, place, term] = value
    return table.to(device)


def _scale(bins: int, largest: Mapping[str, float], posterized_bits: int) -> Tensor:
    """Returns the magnitude of each operation in each bin, (operations, bins)."""
    table = torch.zeros(len(OPERATIONS), bins, dtype=torch.float64)
    for number, name in enumerate(OPERATIONS):
        if name in largest:
            table[number] = torch.linspace(0.0, largest[name], bins)
        elif name == "Posterize":
            table[number] = (8 - torch.arange(bins) / ((bins - 1) / posterized_bits)).round()
        elif name == "Solarize":
            table[number] = torch.linspace(1.0, 0.0, bins)
    return table


def _with_sign(magnitude: Tensor, operation: Tensor, draw: Tensor) -> Tensor:
    return torch.where(
        operations.constant(_is_signed, operation.device)[operation] & (draw < 0.5), -magnitude, magnitude
    )


def _is_signed(device: torch.device) -> Tensor:
    return torch.tensor([name in SIGNED for name in OPERATIONS], device=device)


def _of_randaugment(magnitude: int, height: int, width: int, device: torch.device) -> Tensor:
    """Returns the magnitude of each operation, (operations,)."""
    largest = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0}
    largest |= {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}
    largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
    return _scale(31, largest, posterized_bits=4)[:, magnitude].to(device)


def _of_trivialaugment(device: torch.device) -> Tensor:
    """Returns the magnitude of each operation in each bin, (operations, 31)."""
    largest = {"ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
    largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.99)
    return _scale(31, largest, posterized_bits=6).to(device)


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
        table = operations.constant(_of_randaugment, self.magnitude, *images.shape[-2:], images.device)
        layers = mix(streams(keys, range(self.num_ops)))
        for draw, sign in uniform(streams(layers, range(1, 3)), 0).transpose(0, 1):
            operation = (draw * len(OPERATIONS)).long()
            images = apply_operations(images, operation, _with_sign(table[operation], operation, sign))
        return images


class TrivialAugment(Augmentation):
    """One operation and its magnitude, drawn from 14 for each image (Müller and Hutter 2021; the "wide" space)."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        draw, sign, bin_ = uniform(streams(keys, range(1, 4)), 0)
        operation = (draw * len(OPERATIONS)).long()
        magnitude = operations.constant(_of_trivialaugment, images.device)[operation, (bin_ * 31).long()]
        return apply_operations(images, operation, _with_sign(magnitude, operation, sign))


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
        which = (uniform(keys, 1) * 3).long()[:, None, None, None]
        sigma = 0.1 + uniform(keys, 2) * (self.max_sigma - 0.1)
        threshold = torch.full_like(sigma, 128.0)
        changed = torch.where(which == 0, operations.grayscale(images), operations.solarize(images, threshold))
        changed = torch.where(which == 2, operations.gaussian_blur(images, sigma, self.max_sigma), changed)
        return self.jitter(changed, mix(keys, 1))
