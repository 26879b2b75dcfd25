"""Operations on whole batches of images (b, c, H, W), with other numbers for each image: geometry and colour.

Resizing and blurring are exact to the bit whatever the batch: one matrix for the rows and one for the columns of each
image. The matrices hold whole 32768ths and pixels are rounded between the two steps, as in Pillow: all sums are whole
numbers that float32 holds exactly, so that the order of summation, which kernels choose by the batch size, changes no
pixel. Colours are torchvision's, which take one strength for a whole batch, for uint8 images of 1 or 3 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = 15


_MADE: dict[tuple[Hashable, ...], Tensor] = {}


def constant(make: Callable[..., Tensor], *given: Hashable) -> Tensor:
    """Returns a tensor that is made once for these arguments: a copy of host data to a device waits for it.

    Compiled code takes it from here too, if a call before made it.
    """
    key = (make, *given)
    if key not in _MADE:
        with torch.inference_mode(False):  # made while validating, it could not be used in training
            _MADE[key] = make(*given)
    return _MADE[key]


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


def gaussian_blur(images: Tensor, sigma: Tensor, max_sigma: float) -> Tensor:
    """Blurs uint8 images with standard deviations ``sigma`` (b,) in pixels, cut off at three times ``max_sigma``."""
    height, width = images.shape[-2:]
    radius = min(round(3 * max_sigma), height - 1, width - 1)
    weights = [blur_weights(sigma, size=size, radius=radius) for size in (height, width)]
    return resample(images, weights[0], weights[1])


def affine(images: Tensor, angle: Tensor, factor: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Returns images rotated clockwise by ``angle`` radians, scaled, and shifted in halves of their size; all (b,)."""
    height, width = images.shape[-2:]
    cos, sin = angle.cos() / factor, angle.sin() / factor
    # from each pixel of the result to where it comes from, in units of half an image, hence the ratio of the sides
    ratio = height / width
    inverse = torch.stack([cos, sin * ratio, -cos * right - sin * ratio * down], dim=1)
    inverse = torch.stack([inverse, torch.stack([-sin / ratio, cos, sin / ratio * right - cos * down], dim=1)], dim=1)
    grid = F.affine_grid(inverse, list(images.shape), align_corners=False)
    moved = F.grid_sample(images.to(torch.float32), grid, align_corners=False)
    return moved.to(images.dtype) if images.is_floating_point() else moved.round().to(images.dtype)


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
    offsets = torch.arange(5.0, 0.0, -2.0, device=images.device)[:, None, None]
    distance = (shifted[:, None] + offsets).remainder(6.0)
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


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel to all 256 values."""
    pixels = images.to(torch.float32)
    low, high = pixels.amin(dim=(-2, -1), keepdim=True), pixels.amax(dim=(-2, -1), keepdim=True)
    even = low == high
    step = torch.where(even, 1.0, (high - low) * (1.0 / 255.0))
    return _bytes((pixels - torch.where(even, 0.0, low)) / step)


def blend(images: Tensor, kind: Sequence[Tensor], magnitude: Tensor) -> Tensor:
    """Applies one of brightness, saturation, contrast and sharpness, or none, to each image, all in one product.

    Args:
        images: (b, c, H, W).
        kind: whether each of the four is meant, (b, 1, 1, 1) each; an image has at most one.
        magnitude: factor less 1, (b,), float64.
    """
    _, saturated, contrasted, sharpened = kind
    if images.shape[1] == 1:
        kind = [kind[0], torch.zeros_like(saturated), contrasted, sharpened]
    pixels, gray = images.to(torch.float32), _gray(images)
    mean = gray.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).to(torch.float32)
    other = torch.where(saturated, gray, torch.where(contrasted, mean, 0.0))
    factor = 1.0 + magnitude[:, None, None, None]
    changed = torch.where(kind[0] | kind[1] | contrasted, factor, 1.0)
    weight = 1.0 - changed
    if min(images.shape[-2:]) > 2:
        inner = pixels[..., 1:-1, 1:-1]
        blurred = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1).add(inner, alpha=4.0).div(13.0).round()
        other = torch.where(sharpened, F.pad(blurred - inner, [1] * 4), other)
        weight = torch.where(sharpened, 1.0 - factor, weight)
    return _bytes(torch.addcmul(pixels * changed.float(), other, weight.float()))
