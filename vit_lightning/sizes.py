"""Sizes of images and patches: height and width."""

from __future__ import annotations

Size = tuple[int, int]
"""Height and width."""


def pair(size: int | Size) -> Size:
    """Height and width of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def side(size: Size) -> int | list[int]:
    """One number for a square, else height and width, as a config has them."""
    return size[0] if size[0] == size[1] else list(size)
