"""Sizes of images and patches: height and width."""

from __future__ import annotations

Size = tuple[int, int]
"""Height and width."""


def pair(size: int | Size) -> Size:
    """Height and width of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
