"""Decodes image files of any format to 8-bit RGB; damaged and oversized ones are errors."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from vit_lightning.data.batches import DamagedImage, Pixels
from vit_lightning.errors import UserError
from vit_lightning.sizes import Resize, Size

try:
    import simplejpeg
except ImportError:
    simplejpeg = None  # Pillow decodes to the same pixels, more slowly

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge of a crop, in pixels."""
WholeBox = tuple[int, int, int, int]
_ByPillow = Literal["bicubic", "bilinear", "lanczos", "nearest"]
_Fast = Literal["fast_bicubic", "fast_bilinear", "fast_lanczos", "fast_nearest"]
Interpolation = Literal[_ByPillow, _Fast, "device_bicubic", "device_bilinear"]
"""How images are resized, antialiased: by Pillow, by torch's vectorised kernels for 8 bits (fast), or where they are
trained on (device)."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "JPEG2000", "AVIF")
"""Formats that are tried, whatever the suffix; others are rare or could start other programs (EPS)."""
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")


@cache
def suffixes() -> frozenset[str]:
    """Returns the suffixes of the formats, as Pillow knows them."""
    return frozenset(name for name, kind in Image.registered_extensions().items() if kind in (*FORMATS, "MPO"))


def is_image(path: Path) -> bool:
    """Whether a file is an image, by its suffix, and by its content where it has none."""
    if path.suffix:
        return path.suffix.lower() in suffixes()
    with suppress(Exception), Image.open(path, formats=FORMATS):  # of the many types that Pillow raises
        return True
    return False


def decode(
    source: Path | bytes | Image.Image,
    name: str,
    *,
    size: tuple[int, int],
    choose_box: Callable[[int, int], Box],
    interpolation: Interpolation = "bicubic",
    resize: Resize | None = None,
    share: float = 1.0,
) -> Pixels:
    """Returns a crop of an image, resized and antialiased: uint8 (height, width, 3).

    A JPEG is decoded at the smallest of 1/1, 1/2, 1/4 and 1/8 of its size that has enough pixels, and only the crop is
    converted. 16 bits are rounded to 8, transparency is left out, an EXIF rotation is applied, and an animation
    gives its first image.

    Args:
        source: the file, its content, or an image in memory.
        name: name in errors.
        size: height and width of the result.
        choose_box: returns the crop for a width and height, after EXIF rotation.
        interpolation: all but Pillow's round the crop to whole pixels and see nothing outside of it, as torchvision.
            Here device is as fast; see ``decode_on``.
        resize: in place of a crop, the whole image at its full size is resized so (its shorter side, or height and
            width whatever its shape), and ``size`` is cut out of the middle: torchvision's Resize and CenterCrop; by
            the fast ones, those of transformers, which round the edge of the middle down. "cover" is timm's
            ResizeKeepRatio to ``size`` divided by ``share``.
        share: fraction of the sides that the middle has, for "cover".

    Raises:
        UserError: damaged, not representable in 8 bits, or larger than Pillow takes.
    """
    with _opened(source, name) as image:
        if resize is not None:
            return _middle(image, size, resize, share, interpolation)
        return _decode(image, size, choose_box, interpolation)


def _middle(image: Image.Image, size: Size, resize: Resize, share: float, interpolation: Interpolation) -> Pixels:
    image = to_rgb(ImageOps.exif_transpose(image))
    sides = (image.height, image.width)
    if resize == "cover":
        ratio = min(side / math.floor(least / share) for side, least in zip(sides, size, strict=True))
        edges = (round(sides[0] / ratio), round(sides[1] / ratio))
    elif isinstance(resize, int):
        edges = tuple(resize if side == min(sides) else int(resize * side / min(sides)) for side in sides)  # type: ignore[assignment]
    else:
        edges = resize
    by, _, mode = interpolation.rpartition("_")
    whole = _torch_resized(np.array(image), edges, mode) if by else _by_pillow(image, edges, mode)
    upper, left = (int(gap / 2) if by else round(gap / 2) for gap in (edges[0] - size[0], edges[1] - size[1]))
    return whole[upper : upper + size[0], left : left + size[1]]


def _by_pillow(image: Image.Image, size: tuple[int, int], mode: str) -> Pixels:
    return np.asarray(image.resize(size[::-1], Image.Resampling[mode.upper()]))


def decode_whole(source: Path | bytes | Image.Image, name: str) -> Pixels:
    """Returns the whole image, uint8 (height, width, 3); see ``decode``."""
    with _opened(source, name) as image:
        return np.asarray(to_rgb(ImageOps.exif_transpose(image)))


@contextmanager
def _opened(source: Path | bytes | Image.Image, name: str) -> Iterator[Image.Image]:
    """Opens an image; errors inside, of any of the many types that Pillow raises, become a UserError with its name."""
    try:
        if isinstance(source, Image.Image):
            yield source.copy()  # to decode a JPEG at a part of its size would change the user's object
            return
        with Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS) as image:
            yield image
    except UserError as fault:
        raise UserError(f"{name}: {fault}") from fault
    except UnidentifiedImageError as fault:  # whose text has the address of what was read, another one each time
        others = "others, such as TIFF of five bands, by a Dataset of your own"
        raise DamagedImage(f"{name}: damaged image, or none of {', '.join(FORMATS)} ({others})") from fault
    except Exception as fault:
        what = "cannot be read" if isinstance(fault, OSError) and fault.strerror else "damaged image"
        raise DamagedImage(f"{name}: {what} ({' '.join((str(fault) or type(fault).__name__).split())})") from fault


def _decode(
    image: Image.Image, size: tuple[int, int], choose_box: Callable[[int, int], Box], interpolation: Interpolation
) -> Pixels:
    rotated = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    if rotated:
        image = ImageOps.exif_transpose(image)
    left, upper, right, lower = _inside(choose_box(*image.size), image.size)
    before = image.size
    if not rotated:
        least = min((right - left) / size[1], (lower - upper) / size[0])
        reduce = 2 ** min(3, max(0, math.floor(math.log2(least)))) if least > 0 else 1
        image.draft(None, (max(1, before[0] // reduce), max(1, before[1] // reduce)))
        x, y = image.size[0] / before[0], image.size[1] / before[1]
        left, upper, right, lower = _inside((left * x, upper * y, right * x, lower * y), image.size)
    by, _, mode = interpolation.rpartition("_")
    if by:
        unchanged = not rotated and image.size == before  # else the pixels are not the file's
        whole = _rounded((left, upper, right, lower), image.size)
        return _torch_resized(_cropped(image, whole, in_file=unchanged), size, mode)
    part = (math.floor(left), math.floor(upper), math.ceil(right), math.ceil(lower))
    inside = to_rgb(image.crop(part)) if image.mode != "RGB" else image
    if inside.size != image.size:
        left, upper, right, lower = left - part[0], upper - part[1], right - part[0], lower - part[1]
    # Pillow copies where the box is the image and has its size
    return np.asarray(inside.resize(size[::-1], Image.Resampling[interpolation.upper()], (left, upper, right, lower)))


def _cropped(image: Image.Image, box: WholeBox, *, in_file: bool) -> Pixels:
    """Returns a part of an image, from simplejpeg where that is sure to give the pixels that Pillow gives."""
    plain = simplejpeg is not None and in_file and image.format == "JPEG" and image.mode == "RGB"
    if plain and isinstance(image, ImageFile.ImageFile) and image.fp is not None:
        image.fp.seek(0)
        try:
            # a file may go on after its image; twice as many bytes as the pixels have is more than any JPEG takes
            pixels: Pixels = simplejpeg.decode_jpeg(image.fp.read(6 * image.width * image.height + 2**20), "RGB")
        except ValueError:
            pass  # damaged, or a warning: Pillow says what is wrong, or shows what is there
        else:
            if pixels.shape[1::-1] == image.size:
                left, upper, right, lower = box
                return pixels[upper:lower, left:right]
    return np.array(to_rgb(image.crop(box)))


def _rounded(box: Box, size: tuple[int, int]) -> WholeBox:
    """Rounds a box inside an image to whole pixels, of which it keeps at least one."""
    left, upper = min(round(box[0]), size[0] - 1), min(round(box[1]), size[1] - 1)
    return left, upper, max(left + 1, round(box[2])), max(upper + 1, round(box[3]))


class Jpeg(NamedTuple):
    """JPEG file that a device can decode, and the part of it that is shown."""

    content: bytes
    box: WholeBox


def plain_jpeg(source: Path | bytes | Image.Image, choose_box: Callable[[int, int], Box]) -> Jpeg | None:
    """Returns the file if its image needs decoding alone; None for what ``decode`` must turn, convert or refuse."""
    if isinstance(source, Image.Image):
        return None
    with suppress(UserError), _opened(source, "") as image:  # ``decode`` says what is wrong
        if image.format != "JPEG" or image.mode not in ("RGB", "L"):
            return None
        if image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9):
            return None
        content = source.read_bytes() if isinstance(source, Path) else source
        return Jpeg(content, _rounded(_inside(choose_box(*image.size), image.size), image.size))
    return None


def decode_on(
    device: torch.device, files: list[Tensor], boxes: Sequence[WholeBox], size: tuple[int, int], interpolation: str
) -> Tensor:
    """Returns crops of JPEG files, decoded by torchvision and resized on a device: uint8 (n, 3, height, width).

    A GPU's pixels (nvJPEG) differ a little from those of all other decoders, and its checks are not theirs: it may show
    what it can of a damaged file.

    Raises:
        RuntimeError: a file is damaged.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    mode = interpolation.rpartition("_")[2]
    images = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    crops = (
        image.to(device)[None, :, upper:lower, left:right].float()  # a GPU resizes no integers
        for image, (left, upper, right, lower) in zip(images, boxes, strict=True)
    )
    resized = torch.cat([interpolate(crop, size, mode=mode, antialias=True) for crop in crops])
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _torch_resized(pixels: Pixels, size: tuple[int, int], mode: str) -> Pixels:
    """Resizes (H, W, 3) with sums of whole numbers: the same bits for any number of threads and on any processor."""
    image, nearest = torch.from_numpy(pixels).permute(2, 0, 1)[None], mode == "nearest"
    kernel = "nearest-exact" if nearest else mode  # of two pixels that are as near it takes another than Pillow
    with suppress(NotImplementedError):  # of lanczos in an earlier torch
        return np.asarray(interpolate(image, size, mode=kernel, antialias=not nearest)[0].permute(1, 2, 0))
    return _by_pillow(Image.fromarray(pixels), size, mode)


def _inside(box: Box, size: tuple[int, int]) -> Box:
    """Clips a box to the image: rounding may exceed it, which Pillow refuses or fills with black."""
    return max(0.0, box[0]), max(0.0, box[1]), min(float(size[0]), box[2]), min(float(size[1]), box[3])


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to 8-bit RGB."""
    if image.mode in _SIXTEEN_BIT or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    return image.convert("RGB")  # without its transparency, as torchvision, timm and transformers do


def _eight_bits(values: np.ndarray[Any, Any]) -> Pixels:
    """Scales integers of 0 to 65535, or floats of 0 to 1, to 0 to 255, rounded."""
    largest = 1.0 if values.dtype.kind == "f" else 65535.0
    low, high = float(values.min()), float(values.max())
    if not 0.0 <= low <= high <= largest:
        raise UserError(f"values from {low:g} to {high:g}, not 0 to {largest:g}, cannot be converted to 8 bits")
    return np.round(values.astype(np.float32) * (255.0 / largest)).astype(np.uint8)
