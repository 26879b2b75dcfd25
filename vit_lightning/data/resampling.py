"""Resizing and blurring of whole batches with other numbers for each image, exact to the bit whatever the batch.

Both are one matrix for the rows and one for the columns of each image. The matrices hold whole 32768ths and pixels are
rounded between the two steps, as in Pillow: all sums are whole numbers that float32 holds exactly, so that the order of
summation, which kernels choose by the batch size, changes no pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 15


def resample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Applies rows (b, h, H) and columns (b, w, W) to uint8 images (b, c, H, W); returns uint8 (b, c, h, w)."""
    batch, channels, height, width = images.shape
    across = _round(_product(images.reshape(batch, channels * height, width), columns))
    across = across.reshape(batch, channels, height, -1).permute(0, 1, 3, 2)
    both = _round(_product(across.reshape(batch, -1, height), rows))
    return both.reshape(batch, channels, -1, rows.shape[1]).permute(0, 1, 3, 2).to(torch.uint8).contiguous()


def _product(pixels: Tensor, weights: Tensor) -> Tensor:
    """Multiplies pixels (b, n, k) and weights (b, m, k), in 32768ths; exact in TF32 too, which holds 11 bits."""
    pixels = pixels.to(torch.float32)
    scaled = weights.mul(1 << _BITS).round()
    upper = scaled.div(256.0, rounding_mode="floor") * 256.0
    halves = torch.cat([upper, scaled - upper], dim=-1).to(torch.float32)
    return torch.cat([pixels, pixels], dim=-1) @ halves.transpose(1, 2)


def _round(sums: Tensor) -> Tensor:
    return sums.div(1 << _BITS).add(0.5).floor().clamp(0.0, 255.0)


def resize_weights(start: Tensor, length: Tensor, *, old: int, new: int) -> Tensor:
    """Returns weights (b, new, old) that resize pixels start to start + length, both (b,): bilinear, antialiased."""
    start, length = (value.to(torch.float64)[:, None, None] for value in (start, length))
    scale = length / new
    support = scale.clamp(min=1.0)  # when shrinking, the triangle spans all source pixels of one result pixel
    device = start.device
    centre = (torch.arange(new, device=device, dtype=torch.float64)[:, None] + 0.5) * scale
    place = torch.arange(old, device=device, dtype=torch.float64) + 0.5 - start
    weights = (1.0 - ((place - centre) / support).abs()).clamp(min=0.0)
    weights = weights * ((place > 0) & (place < length))
    return _normalised(weights)


def blur_weights(sigma: Tensor, *, size: int, radius: int) -> Tensor:
    """Returns weights (b, size, size) of a Gaussian of standard deviation ``sigma`` pixels (b,), with reflection."""
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offsets / sigma.to(torch.float64)[:, None]) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)
    place = (torch.arange(size, device=sigma.device)[:, None] + offsets).abs()
    place = torch.where(place >= size, 2 * (size - 1) - place, place)  # (size, 2 radius + 1)
    weights = torch.zeros(len(sigma), size, size, device=sigma.device, dtype=torch.float64)
    return _normalised(weights.scatter_add_(2, place.expand(len(sigma), -1, -1), kernel[:, None].expand(-1, size, -1)))


def _normalised(weights: Tensor) -> Tensor:
    """Rounds to 32768ths that sum to one, so that an even area keeps its value; the largest takes the remainder."""
    scaled = (weights / weights.sum(dim=-1, keepdim=True)).mul(1 << _BITS).round()
    over = (1 << _BITS) - scaled.sum(dim=-1, keepdim=True)
    return scaled.scatter_add(-1, scaled.argmax(dim=-1, keepdim=True), over).div(1 << _BITS)
