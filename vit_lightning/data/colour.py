"""Colour operations on uint8 images (b, c, H, W) with a strength for each image; 1 or 3 channels.

The same as torchvision's, which take one strength for a whole batch. Names follow torchvision: ``saturation`` is
RandAugment's Color.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.data.augment import Augmentation
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.random_keys import uniform


def _each(values: Tensor) -> Tensor:
    return values.to(torch.float32)[:, None, None, None]


def _bytes(images: Tensor) -> Tensor:
    return images.clamp(0.0, 255.0).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Returns ``other`` for factor 0, the image for 1, and extrapolates above 1."""
    ratio = factor.to(torch.float64)[:, None, None, None]
    return _bytes(torch.addcmul(images * ratio.float(), other, (1.0 - ratio).float()))


def _gray(images: Tensor) -> Tensor:
    """Returns luma (b, 1, H, W) by ITU-R 601, whole numbers as float32."""
    if images.shape[1] == 1:
        return images.to(torch.float32)
    red, green, blue = images.to(torch.float32).unbind(dim=1)
    return (red * 0.2989).add(green, alpha=0.587).add(blue, alpha=0.114).floor()[:, None]


def grayscale(images: Tensor) -> Tensor:
    return _gray(images).to(torch.uint8).expand_as(images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _bytes(images * _each(factor))


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _gray(images), factor) if images.shape[1] == 3 else images


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    # whole numbers: their sum in float64 is exact in whatever order
    mean = _gray(images).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).to(torch.float32)
    return _blend(images, mean, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Sharpens (factor above 1) or blurs with a 3x3 mean whose centre has weight 5; the border stays."""
    height, width = images.shape[-2:]
    if height <= 2 or width <= 2:
        return images
    pixels = images.to(torch.float32)
    inner = pixels[..., 1:-1, 1:-1]
    total = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1) + 4.0 * inner  # whole numbers
    blurred = total.div(13.0).round()
    weight = (1.0 - factor.to(torch.float64)[:, None, None, None]).float()
    changed = pixels.clone()
    changed[..., 1:-1, 1:-1] = torch.addcmul(inner, blurred - inner, weight)
    return _bytes(changed)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Shifts hues by a fraction of the colour circle, -0.5 to 0.5."""
    if images.shape[1] == 1:
        return images
    pixels = images.to(torch.float32) / 255.0
    low, high = pixels.aminmax(dim=1)
    spread = high - low
    red, green, blue = ((high[:, None] - pixels) / torch.where(spread > 0, spread, 1.0)[:, None]).unbind(1)
    sector = torch.where(
        pixels[:, 0] == high, blue - green, torch.where(pixels[:, 1] == high, 2 + red - blue, 4 + green - red)
    )
    shifted = (sector / 6 + shift.to(torch.float32)[:, None, None]).remainder(1.0) * 6
    distance = (shifted[:, None] + torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]).remainder(6.0)
    share = torch.minimum(distance, 4.0 - distance).clamp(0.0, 1.0)
    # 255.999 gives each of the 256 values the same part of the range, as torchvision converts
    return _bytes((high[:, None] - spread[:, None] * share) * 255.999)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper ``bits`` bits."""
    lost = (8 - bits.to(torch.uint8))[:, None, None, None]
    return (images >> lost) << lost


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverts pixels of at least ``threshold`` (0 to 255)."""
    return torch.where(images >= _each(threshold), 255 - images, images)


class ColorJitter(Augmentation):
    """Random brightness, contrast, saturation and hue of each image, in an order drawn for each.

    Args:
        brightness: factors lie between 1 - brightness, at least 0, and 1 + brightness.
        contrast: the same for contrast.
        saturation: the same for saturation.
        hue: largest shift in either direction, as a fraction of the colour circle, at most 0.5.
    """

    def __init__(
        self, brightness: float = 0.3, contrast: float = 0.3, saturation: float = 0.3, hue: float = 0.0
    ) -> None:
        problems = at_least(0, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
        refuse(problems, problems_of(("hue", hue, not hue > 0.5, "at most 0.5")), prefix="augment.ColorJitter.")
        self.strengths = (brightness, contrast, saturation, hue)

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        # the change with the smallest of four random numbers comes first
        order = torch.stack([uniform(keys, 10 + number) for number in range(4)], dim=1).argsort(dim=1, stable=True)
        drawn = [self._strength(number, uniform(keys, 20 + number)) for number in range(4)]
        functions = (brightness, contrast, saturation, hue)
        for place in range(4):
            here, before = order[:, place], images
            for number, change in enumerate(functions):
                if self.strengths[number] > 0.0:
                    chosen = (here == number)[:, None, None, None]
                    images = torch.where(chosen, change(before, drawn[number]), images)
        return images

    def _strength(self, number: int, draw: Tensor) -> Tensor:
        strength = self.strengths[number]
        if number == 3:
            return strength * (2.0 * draw - 1.0)
        low = max(0.0, 1.0 - strength)
        return low + draw * (1.0 + strength - low)
