"""Operations on whole batches of images (b, c, H, W), with other numbers for each image: geometry and colour.

Resizing and blurring are exact to the bit whatever the batch: one matrix for the rows and one for the columns of each
image. The matrices hold whole 32768ths and pixels are rounded between the two steps, as in Pillow: all sums are whole
numbers that float32 holds exactly, so that the order of summation, which kernels choose by the batch size, changes no
pixel. Colours are torchvision's, which take one strength for a whole batch, for uint8 images of 1 or 3 channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.constants import constant

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


def taps(start: Tensor, length: Tensor, *, new: int) -> tuple[Tensor, Tensor]:
    """Returns where the weights of ``resize_weights`` are not 0 for lengths of at most ``new``, and their 32768ths.

    Both are (b, new, 2): when enlarging, a pixel of the result is made of two neighbours.
    """
    length = length.to(torch.float64)[:, None, None]
    centre = (torch.arange(new, dtype=torch.float64)[:, None] + 0.5) * (length / new)
    places = (centre - 0.5).floor() + torch.arange(2)
    weights = (1.0 - (places + 0.5 - centre).abs()).clamp(min=0.0)
    weights = _normalised(weights * ((places >= 0) & (places < length)))
    inside = torch.minimum(places.clamp(min=0.0), length - 1.0).long()
    return start[:, None, None] + inside, weights.mul(1 << _BITS).float()


def enlarge(images: Tensor, down: tuple[Tensor, Tensor], across: tuple[Tensor, Tensor]) -> Tensor:
    """Does on a CPU what ``resample`` does with the weights of ``taps``, image by image, in a fraction of the time."""
    result = torch.empty_like(images)
    channels, height, width = images.shape[1:]
    for number, image in enumerate(images):
        places, weights = down[0][number], across[1][number]
        first = int(places[0, 0])
        columns = image[:, first : int(places[-1, 1]) + 1].permute(2, 0, 1).flatten(1).float()
        lines = _mean_of_two(columns, across[0][number], weights).view(width, channels, -1).permute(2, 1, 0).flatten(1)
        lines = _mean_of_two(lines.contiguous(), places - first, down[1][number])
        result[number] = lines.view(height, channels, width).transpose(0, 1)
    return result


def _mean_of_two(lines: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Returns weighted means (new, n) of two lines each of (old, n), as whole numbers."""
    first, second = (lines[places[:, tap]].mul_(weights[:, tap, None]) for tap in (0, 1))
    return _round(first.add_(second))


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
    rows = blur_weights(sigma, size=height, radius=radius)
    return resample(images, rows, rows if width == height else blur_weights(sigma, size=width, radius=radius))


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
    parts = [torch.as_tensor(value, device=images.device).float().expand(len(images)) for value in matrix]
    height, width = images.shape[-2:]
    x, y = (constant(images.device, _centred, size) for size in (width, height))
    across, down = torch.stack(parts, dim=1).view(-1, 2, 3).unbind(1)
    a, b, c = torch.stack([across / (width / 2), down / (height / 2)], dim=1)[..., None, None].unbind(2)
    # by element and not as a product of matrices, whose rounding may change with the batch; in the order that rounds as
    # torchvision's product does (on Intel), which decides where a source coordinate is midway between two pixels
    source = torch.addcmul(a * x, b, y[:, None]) + c
    moved = F.grid_sample(images.float(), source.permute(0, 2, 3, 1), mode="nearest", align_corners=False)
    return moved.to(images.dtype)


def _centred(size: int) -> Tensor:
    return torch.arange(size) - (size - 1) / 2


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


def blended(pixels: Tensor, ratio: Tensor, by_gray: Tensor, by_mean: Tensor) -> Tensor:
    """Returns ratio times each pixel, plus a part of its gray (saturation) and of the image's mean gray (contrast).

    Args:
        pixels: (b, c, H, W), whole numbers as float32.
        ratio: (b, 1, 1, 1), as are the other two.
        by_gray: weight of the gray of the pixel.
        by_mean: weight of the mean gray.
    """
    gray = _gray(pixels)
    mean = gray.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).to(torch.float32)
    return torch.addcmul(torch.addcmul(pixels * ratio, gray, by_gray), mean, by_mean)


def equalize(images: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Gives each channel an even histogram, as Pillow does.

    Args:
        images: (b, c, H, W), uint8.
        chosen: images that are meant, bool (b, 1, 1); None for all.
    """
    flat = images.flatten(2).long()
    one = constant(images.device, torch.tensor, (1,))
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts = counts.scatter_add(2, flat, one.expand_as(flat))
    below = counts.cumsum(2) - counts
    step = below.gather(2, flat.amax(2, keepdim=True)).div(255, rounding_mode="floor")
    even = (below + step.div(2, rounding_mode="floor")).div(step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    changes = step > 0 if chosen is None else (step > 0) & chosen
    table = torch.where(changes, even, torch.arange(256, device=images.device)).to(torch.uint8)
    return table.gather(2, flat).view_as(images)


def apply_at_once(images: Tensor, sources: Tensor, parameters: Tensor) -> Tensor:
    """Applies to each image the operation that its parameters describe, by one calculation for all kinds.

    Args:
        images: (b, c, H, W), uint8.
        sources: (b, H * W), int64: the pixel that comes to each place, counted from 1; 0 is black.
        parameters: (b, 8), float32: the three of ``blended``; weight of what sharpening adds; 1 / 255 to stretch the
            contrast, else 0; the bits that are kept, as a number; the smallest value that is inverted; 1 to equalize.
    """
    moved = F.pad(images.flatten(2), [1, 0]).gather(2, sources[:, None].expand(-1, images.shape[1], -1))
    pixels = moved.view_as(images).float()
    ratio, by_gray, by_mean, by_edges, by_range, kept, inverted, even = parameters[..., None, None, None].unbind(1)
    changed = blended(pixels, ratio, by_gray, by_mean)
    if min(images.shape[-2:]) > 2:
        inner = pixels[..., 1:-1, 1:-1]
        blurred = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1).add(inner, alpha=4.0).div(13.0).round()
        changed = torch.addcmul(changed, F.pad(blurred - inner, [1] * 4), by_edges)
    low, high = (bound[..., None] for bound in pixels.flatten(2).aminmax(dim=2, keepdim=True))
    step = (high - low) * by_range
    same = step == 0.0
    changed = _bytes((changed - low.masked_fill(same, 0.0)) / step.masked_fill(same, 1.0)) & kept.to(torch.uint8)
    return equalize(torch.where(changed >= inverted, 255 - changed, changed), even[..., 0] > 0)
