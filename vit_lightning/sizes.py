"""Sizes of images and patches: height and width."""

from typing import Literal

Size = tuple[int, int]
"""Height and width."""
Resize = int | Size | Literal["cover"]
"""What a whole image is resized to: its shorter side, height and width, or so that it covers those of a part."""


def pair(size: int | Size) -> Size:
    """Height and width of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def side(size: Size) -> int | list[int]:
    """One number for a square, else height and width, as a config has them."""
    return size[0] if size[0] == size[1] else list(size)


def covers(resize: Resize | None, size: int | Size) -> bool:
    """Whether images that are resized so, their shorter side to one number, are no smaller than a size."""
    if resize is None or resize == "cover":
        return True
    return all(edge >= least for edge, least in zip(pair(resize), pair(size), strict=True))
