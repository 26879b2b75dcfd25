"""Augmentation policies that draw an operation for each image: RandAugment, TrivialAugment, 3-Augment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.data import colour
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.colour import ColorJitter
from vit_lightning.data.resampling import blur_weights, resample
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import mix, uniform

Operation = Callable[[Tensor, Tensor], Tensor]
"""Operation on uint8 images (b, c, H, W) with magnitudes (b,)."""


def warp(images: Tensor, matrix: Sequence[Tensor | float]) -> Tensor:
    """Samples each pixel from the nearest of the source coordinates; black outside.

    Args:
        images: (b, c, H, W).
        matrix: a, b, c, d, e, f, each a number or (b,): pixel (x, y) of the result, counted from the centre, comes
            from (a x + b y + c, d x + e y + f).
    """
    height, width = images.shape[-2:]
    device = images.device
    x = torch.arange(width, device=device) - (width - 1) / 2
    y = (torch.arange(height, device=device) - (height - 1) / 2)[:, None].expand(len(images), -1, width)
    parts = [torch.as_tensor(value, device=device).float().expand(len(images))[:, None, None] for value in matrix]
    a, b, c = (part / (width / 2) for part in parts[:3])
    d, e, f = (part / (height / 2) for part in parts[3:])
    # by element and not as a product of matrices, whose rounding may change with the batch; in the order that rounds as
    # torchvision's product does (on Intel), which decides where a source coordinate is midway between two pixels
    source = torch.stack([torch.addcmul(a * x, b, y) + c, torch.addcmul(d * x, e, y) + f], dim=-1)
    moved = F.grid_sample(images.float(), source, mode="nearest", align_corners=False)
    return moved.round().to(images.dtype)


def shear_x(images: Tensor, magnitude: Tensor) -> Tensor:
    return warp(images, (1.0, magnitude, magnitude * images.shape[-2] / 2, 0.0, 1.0, 0.0))


def shear_y(images: Tensor, magnitude: Tensor) -> Tensor:
    return warp(images, (1.0, 0.0, 0.0, magnitude, 1.0, magnitude * images.shape[-1] / 2))


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    return warp(images, (1.0, 0.0, -pixels.trunc(), 0.0, 1.0, 0.0))


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    return warp(images, (1.0, 0.0, 0.0, 0.0, 1.0, -pixels.trunc()))


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotates counter-clockwise about the centre."""
    angle = degrees.double().remainder(360.0).deg2rad()  # as torchvision, for the sign of zero in a quarter turn
    return warp(images, (angle.cos(), -angle.sin(), 0.0, angle.sin(), angle.cos(), 0.0))


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    changed: Tensor = functional.autocontrast(images)
    return changed


def equalize(images: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    changed: Tensor = functional.equalize(images)
    return changed


OPERATIONS: dict[str, Operation] = {
    "Identity": lambda images, _: images,
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Rotate": rotate,
    "Brightness": lambda images, magnitude: colour.brightness(images, 1.0 + magnitude),
    "Color": lambda images, magnitude: colour.saturation(images, 1.0 + magnitude),
    "Contrast": lambda images, magnitude: colour.contrast(images, 1.0 + magnitude),
    "Sharpness": lambda images, magnitude: colour.sharpness(images, 1.0 + magnitude),
    "Posterize": colour.posterize,
    "Solarize": lambda images, magnitude: colour.solarize(images, 255.0 * magnitude),
    "AutoContrast": autocontrast,
    "Equalize": equalize,
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
        changed = torch.where(which == 0, colour.grayscale(images), colour.solarize(images, threshold))
        changed = torch.where(which == 2, gaussian_blur(images, sigma, self.max_sigma), changed)
        return self.jitter(changed, mix(keys, 1))


def gaussian_blur(images: Tensor, sigma: Tensor, max_sigma: float) -> Tensor:
    """Blurs uint8 images with standard deviations ``sigma`` (b,) in pixels, cut off at three times ``max_sigma``."""
    height, width = images.shape[-2:]
    radius = min(round(3 * max_sigma), height - 1, width - 1)
    weights = [blur_weights(sigma, size=size, radius=radius) for size in (height, width)]
    return resample(images, weights[0], weights[1])
