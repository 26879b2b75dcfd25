"""Augmentation policies that draw an operation for each image: RandAugment, TrivialAugment, 3-Augment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vit_lightning.data import operations
from vit_lightning.data.augment import Augmentation, ColorJitter
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, uniform

Operation = Callable[[Tensor, Tensor], Tensor]
"""Operation on uint8 images (b, c, H, W) with magnitudes (b,)."""


def _of_torchvision(name: str) -> Operation:
    """Returns an operation of torchvision without a magnitude."""

    def change(images: Tensor, _: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional

        changed: Tensor = getattr(functional, name)(images)
        return changed

    return change


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
    "AutoContrast": _of_torchvision("autocontrast"),
    "Equalize": _of_torchvision("equalize"),
}
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
"""Operations whose magnitude is negated for half of the images."""


def apply_operations(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Applies operation number ``operation[i]`` of ``OPERATIONS`` with ``magnitude[i]`` to image i; both (b,)."""
    images = images.clone()
    numbers = operation.cpu()  # the one place that waits for the device
    for number, change in enumerate(OPERATIONS.values()):
        chosen = (numbers == number).nonzero()[:, 0].to(images.device)
        if number and len(chosen):
            images[chosen] = change(images[chosen], magnitude[chosen])
    return images


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
    signed = torch.tensor([name in SIGNED for name in OPERATIONS], device=operation.device)[operation]
    return torch.where(signed & (draw < 0.5), -magnitude, magnitude)


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
        table = _scale(31, largest, posterized_bits=4)[:, self.magnitude].to(images.device)
        for number in range(self.num_ops):
            drawn = mix(keys, number)
            operation = (uniform(drawn, 1) * len(OPERATIONS)).long()
            images = apply_operations(images, operation, _with_sign(table[operation], operation, uniform(drawn, 2)))
        return images


class TrivialAugment(Augmentation):
    """One operation and its magnitude, drawn from 14 for each image (Müller and Hutter 2021; the "wide" space)."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        largest = {"ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
        largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.99)
        table = _scale(31, largest, posterized_bits=6).to(images.device)
        operation = (uniform(keys, 1) * len(OPERATIONS)).long()
        magnitude = table[operation, (uniform(keys, 3) * 31).long()]
        return apply_operations(images, operation, _with_sign(magnitude, operation, uniform(keys, 2)))


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
