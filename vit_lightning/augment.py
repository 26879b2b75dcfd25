"""Random changes of training images, a whole batch at once and on its device.

The random numbers of an image are a pure function of its key, and its key of (seed, epoch, index): neither the batch it
is in, nor workers, ranks, or an interruption can change them. No random state exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vit_lightning.errors import UserError

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64: the sign must not be carried in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(bits: Tensor, stream: int = 0) -> Tensor:
    """SplitMix64 of int64 numbers (Steele et al. 2014): well-mixed 64 bits, different for each stream."""
    bits = bits + _signed(_GOLDEN * (stream + 1))
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX2)
    return bits ^ _shift(bits, 31)


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Key of each image, int64, from (seed, epoch, index)."""
    start = mix(mix(torch.tensor([seed], dtype=torch.int64)) + epoch)
    return mix(start + indices.to(torch.int64))


def uniform(keys: Tensor, stream: int) -> Tensor:
    """One float32 in [0, 1) for each key; another stream gives an independent number."""
    return _shift(mix(keys, stream), 40).to(torch.float32) / (1 << 24)


class Augmentation(ABC):
    """Changes a batch of images (b, c, H, W), of any type, with random numbers drawn from their keys (b,)."""

    @abstractmethod
    def __call__(self, images: Tensor, keys: Tensor) -> Tensor: ...


class RandomCrop(Augmentation):
    """Shifts each image by up to ``padding`` pixels in both directions; what comes in is black.

    Args:
        padding: largest shift in pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        if padding < 0:
            raise UserError(f"augment.RandomCrop.padding={padding} must be at least 0")
        self.padding = padding

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        choices = 2 * self.padding + 1
        top = (uniform(keys, 1) * choices).long()
        left = (uniform(keys, 2) * choices).long()
        padded = torch.nn.functional.pad(images, [self.padding] * 4)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        image = torch.arange(len(images), device=images.device)
        # indices around a slice put the channels last
        return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class HorizontalFlip(Augmentation):
    """Mirrors an image left to right.

    Args:
        p: probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0.0 <= p <= 1.0:
            raise UserError(f"augment.HorizontalFlip.p={p} must be between 0 and 1")
        self.p = p

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        flip = uniform(keys, 3) < self.p
        return torch.where(flip[:, None, None, None], images.flip(-1), images)
