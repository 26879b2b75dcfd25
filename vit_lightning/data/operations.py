"""Operations on whole batches of images (b, c, H, W), with other numbers for each image: geometry and colour.

Resizing and blurring are exact to the bit whatever the batch: one matrix for the rows and one for the columns of each
image. The matrices hold whole 32768ths and pixels are rounded between the two steps, as in Pillow: all sums are whole
numbers that float32 holds exactly, so that the order of summation, which kernels choose by the batch size, changes no
pixel. Colours are torchvision's, which take one strength for a whole batch, for uint8 images of 1 or 3 channels.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.constants import constant

_ONE = 32768
"""Weights are whole parts of it."""
Change = Callable[[Tensor, Tensor], Tensor]
"""Change of uint8 images (b, c, H, W) by an amount for each, (b,) or (b, n)."""


def host_chooses(images: Tensor) -> bool:
    """Whether the host changes each image by what it draws; a device, which would have to wait, changes all at once."""
    return images.device.type == "cpu" and images.dtype == torch.uint8


def change_each(images: Tensor, which: Tensor, amounts: Tensor, changes: Mapping[int, Change]) -> Tensor:
    """Returns images of which image i is changed by ``changes[which[i]]`` with ``amounts[i]``."""
    if not host_chooses(images):
        for number, change in changes.items():
            images = torch.where((which == number)[:, None, None, None], change(images, amounts), images)
        return images
    # numpy copies images by index in a twentieth of torch's time
    changed, numbers, values = images.numpy().copy(), which.numpy(), amounts.numpy()
    size = max(1, 2**18 // changed[0].size)  # as float32 they fit in a core's cache
    for number in set(numbers.tolist()) & changes.keys():
        chosen = (numbers == number).nonzero()[0]
        for part in (chosen[start : start + size] for start in range(0, len(chosen), size)):
            given = torch.from_numpy(changed[part]), torch.from_numpy(values[part])
            changed[part] = changes[number](*given).numpy()
    return torch.from_numpy(changed)


def resized(image: Tensor, box: tuple[int, int, int, int]) -> Tensor:
    """Returns a box (top, left, height, width) of an image (c, H, W), uint8 on a CPU, enlarged to the whole's size."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    return F.interpolate(part, size=image.shape[1:], mode="bilinear", antialias=True)[0]


def resample(images: Tensor, rows: Tensor, columns: Tensor, *, reach: int | None = None) -> Tensor:
    """Applies 32768ths, rows (b, h, H) and columns (b, w, W), to uint8 images (b, c, H, W); returns uint8 (b, c, h, w).

    If ``reach`` is given, all weights that are further from the diagonal are 0.
    """
    batch, channels, height, width = images.shape
    by_columns = _halves(columns)
    by_rows = by_columns if rows is columns else _halves(rows)
    across = _round(_product(images.reshape(batch, channels * height, width), by_columns, reach))
    across = across.reshape(batch, channels, height, -1).permute(0, 1, 3, 2)
    both = _round(_product(across.reshape(batch, -1, height), by_rows, reach))
    return both.reshape(batch, channels, -1, rows.shape[1]).permute(0, 1, 3, 2).to(torch.uint8).contiguous()


def _halves(weights: Tensor) -> Tensor:
    """Returns the upper and the lower 8 bits of weights (b, m, k), (b, m, 2, k): TF32 holds 11 bits."""
    upper = weights.div(256.0, rounding_mode="floor") * 256.0
    return torch.stack([upper, weights - upper], dim=2).to(torch.float32)


def _product(pixels: Tensor, halves: Tensor, reach: int | None) -> Tensor:
    """Multiplies pixels (b, n, k) and the halves of weights (b, m, 2, k); exact in TF32 too."""
    pixels = pixels.to(torch.float32)

    def block(results: slice, near: slice) -> Tensor:
        return torch.cat([pixels[..., near]] * 2, dim=-1) @ halves[:, results, :, near].flatten(2).transpose(1, 2)

    if reach is None:
        return block(slice(None), slice(None))
    starts = range(0, halves.shape[1], 32)
    return torch.cat([block(slice(s, s + 32), slice(max(0, s - reach), s + 32 + reach)) for s in starts], dim=-1)


def _round(sums: Tensor) -> Tensor:
    return sums.div_(_ONE).add_(0.5).floor_().clamp_(0.0, 255.0)


def resize_weights(start: Tensor, length: Tensor, *, size: int) -> Tensor:
    """Returns weights (b, size, size) that enlarge pixels start to start + length, both (b,), bilinear.

    In 32768ths, whole or even ones, as ``resized`` has them: by torch's kernel for bytes, whose weights are int16.
    """
    start, length = (value.to(torch.float64)[:, None, None] for value in (start, length))
    centre = (torch.arange(size, device=start.device, dtype=torch.float64) + 0.5)[:, None] * (length / size)
    place = torch.arange(size, device=start.device, dtype=torch.float64) + 0.5 - start
    weights = (1.0 - (place - centre).abs()).clamp(min=0.0)
    weights = weights * ((place > 0) & (place < length))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    step = torch.where(weights.amax(dim=(1, 2), keepdim=True) * _ONE + 0.5 >= _ONE, 2.0, 1.0)
    return (weights * (_ONE / step)).add_(0.5).floor_().mul_(step)


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
    scaled = (weights / weights.sum(dim=-1, keepdim=True)).mul(_ONE).round()
    over = _ONE - scaled.sum(dim=-1, keepdim=True)
    return scaled.scatter_add(-1, scaled.argmax(dim=-1, keepdim=True), over)


def gaussian_blur(images: Tensor, sigma: Tensor, max_sigma: float) -> Tensor:
    """Blurs uint8 images with standard deviations ``sigma`` (b,) in pixels, cut off at three times ``max_sigma``."""
    height, width = images.shape[-2:]
    radius = min(round(3 * max_sigma), height - 1, width - 1)
    rows = blur_weights(sigma, size=height, radius=radius)
    columns = rows if width == height else blur_weights(sigma, size=width, radius=radius)
    return resample(images, rows, columns, reach=radius if host_chooses(images) else None)


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


def shear_bicubic(images: Tensor, magnitude: Tensor, *, down: bool, fill: int) -> Tensor:
    """Shears down or to the side as Pillow does, by bicubic means; a magnitude of 0 changes nothing."""
    if not down:
        return shear_bicubic(images.mT, magnitude, down=True, fill=fill).mT
    height, width = images.shape[-2:]
    x, y = (constant(images.device, _centred, size) + size / 2 for size in (width, height))
    place = y[:, None] + magnitude[:, None, None] * x
    row = (centred := place - 0.5).floor()
    rows = (row[:, None] + constant(images.device, torch.arange, -1, 3)[:, None, None]).clamp(0, height - 1).long()
    pixels = images.gather(2, rows.flatten(1, 2)[:, None].expand(-1, images.shape[1], -1, -1)).short()
    a, b, c, d = pixels.unflatten(2, (4, height)).unbind(2)
    way = (centred - row)[:, None]
    between = b + way * (c - a + way * (2 * (a - b) + c - d + way * (b - a - c + d)))
    inside = ((place >= 0.0) & (place < height))[:, None]
    return torch.where(inside, between.clamp(0.0, 255.0), fill).to(torch.uint8)


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
    """Returns float32 pixels as bytes; writes into them."""
    images.clamp_(0.0, 255.0)
    if images.device.type == "cpu":
        images = images.to(torch.int16)  # by vectorised code, as is the way on to bytes
    return images.to(torch.uint8)


def _blend(pixels: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Returns ``other`` for factor 0, the pixels for 1, and extrapolates above 1; writes into the pixels."""
    ratio = factor.to(torch.float64)[:, None, None, None]
    return _bytes(pixels.mul_(ratio.float()).addcmul_(other, (1.0 - ratio).float()))


def _gray(images: Tensor) -> Tensor:
    """Returns luma (b, 1, H, W) by ITU-R 601, whole numbers as float32."""
    if images.shape[1] == 1:
        return images.to(torch.float32)
    red, green, blue = images.to(torch.float32).unbind(dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()[:, None]


def grayscale(images: Tensor) -> Tensor:
    return _gray(images).to(torch.uint8).expand_as(images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _bytes(images.float().mul_(_each(factor)))


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    pixels = images.float()
    return _blend(pixels, _gray(pixels), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    # whole numbers: their sum in float64 is exact in whatever order
    pixels = images.float()
    gray = _gray(pixels)
    mean = gray.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64)
    return _blend(pixels, torch.empty_like(gray).copy_(mean), factor)  # vectorised, as a sum with one number is not


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Sharpens (factor above 1) or blurs with a 3x3 mean whose centre has weight 5; the border stays."""
    height, width = images.shape[-2:]
    if height <= 2 or width <= 2:
        return images
    pixels = images.to(torch.float32)
    inner = pixels[..., 1:-1, 1:-1]
    rows = (pixels[..., :-2, :] + pixels[..., 1:-1, :]).add_(pixels[..., 2:, :])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(inner, alpha=4.0)  # whole numbers
    blurred = total.div_(13.0).round_()
    weight = (1.0 - factor.to(torch.float64)[:, None, None, None]).float()
    inner.addcmul_(blurred.sub_(inner), weight)
    return _bytes(pixels)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper ``bits`` bits."""
    lost = (8 - bits.to(torch.uint8))[:, None, None, None]
    return (images >> lost) << lost


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverts pixels of at least ``threshold`` (0 to 256)."""
    inverted = images >= _each(threshold).ceil().to(torch.int16)
    return images ^ inverted.view(torch.uint8).neg()


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Makes pixels below 128 lighter by ``amount``, at most 128."""
    return images + (images < 128) * amount.to(torch.uint8)[:, None, None, None]


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel to all 256 values."""
    pixels = images.to(torch.float32)
    low, high = pixels.amin(dim=(-2, -1), keepdim=True), pixels.amax(dim=(-2, -1), keepdim=True)
    even = low == high
    step = torch.where(even, 1.0, (high - low) * (1.0 / 255.0))
    return _bytes(pixels.sub_(torch.where(even, 0.0, low)).div_(step))


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


def apply_at_once(images: Tensor, sources: Tensor, parameters: Tensor, fill: int = 0) -> Tensor:
    """Applies to each image the operation that its parameters describe, by one calculation for all kinds.

    Args:
        images: (b, c, H, W), uint8.
        sources: (b, H * W), int64: the pixel that comes to each place, counted from 1; 0 is ``fill``.
        parameters: (b, 8 or 9), float32: the three of ``blended``; weight of what sharpening adds; 1 / 255 to stretch
            the contrast, else 0; the bits that are kept, as a number; the smallest value that is inverted; 1 to
            equalize; what is added to values below 128.
    """
    moved = F.pad(images.flatten(2), [1, 0], value=fill).gather(2, sources[:, None].expand(-1, images.shape[1], -1))
    pixels = moved.view_as(images).float()
    ratio, by_gray, by_mean, by_edges, by_range, kept, inverted, even, *added = parameters[
        ..., None, None, None
    ].unbind(1)
    changed = blended(pixels, ratio, by_gray, by_mean)
    if min(images.shape[-2:]) > 2:
        inner = pixels[..., 1:-1, 1:-1]
        blurred = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1).add(inner, alpha=4.0).div(13.0).round()
        changed = torch.addcmul(changed, F.pad(blurred - inner, [1] * 4), by_edges)
    low, high = (bound[..., None] for bound in pixels.flatten(2).aminmax(dim=2, keepdim=True))
    step = (high - low) * by_range
    same = step == 0.0
    changed = _bytes((changed - low.masked_fill(same, 0.0)) / step.masked_fill(same, 1.0)) & kept.to(torch.uint8)
    changed = torch.where(changed >= inverted, 255 - changed, changed)
    if added:
        changed = solarize_add(changed, added[0][:, 0, 0, 0])
    return equalize(changed, even[..., 0] > 0)
