"""Tables of learned positions resized to another grid of patches, in the ways of the reference implementations.

Shape letters: p tokens before the patches, n patches, e emb_size.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vit_lightning.limits import choice, refuse
from vit_lightning.sizes import Size

RESIZE_METHODS: dict[str, dict[str, object]] = {
    "timm_bicubic_antialias": {"mode": "bicubic", "antialias": True},
    "timm_bicubic_noantialias": {"mode": "bicubic", "antialias": False},
    "timm_bilinear_antialias": {"mode": "bilinear", "antialias": True},
    "timm_bilinear_noantialias": {"mode": "bilinear", "antialias": False},
    "torchvision_bicubic": {"mode": "bicubic", "align_corners": True},
    "hf_bicubic": {"mode": "bicubic", "antialias": False},
    "bilinear_align_corners": {"mode": "bilinear", "align_corners": True},
    # scipy.ndimage.zoom with order=1 aligns the corners too
    "big_vision_zoom_grid": {"mode": "bilinear", "align_corners": True},
    "vit_jax_zoom": {"mode": "bilinear", "align_corners": True},
}
"""Arguments of ``F.interpolate`` with which each reference resizes its table; the results differ."""

Interpolation = Literal["bicubic", "bilinear"]
"""Interpolation with antialiasing, as in timm; that of the ViT paper's code is ``vit_jax_zoom``."""

ResizePositions = Literal["bicubic", "bilinear", "reset"]
"""How learned positions get another grid: by an interpolation, or re-initialised."""


def resize(
    table: Tensor | np.ndarray[Any, Any], old_grid: Size, new_grid: Size, prefix_tokens: int, method: str
) -> Tensor:
    """Resizes a table of positions (1, p + n, e) to another grid; the rows of tokens before the patches do not change.

    ``big_vision_zoom_grid`` returns the rows of the grid alone, since big_vision has no others.

    Args:
        table: positions, row by row of the grid.
        old_grid: rows and columns of the table's grid.
        new_grid: rows and columns of the result's grid.
        prefix_tokens: number of rows of the table before those of the grid.
        method: one of ``RESIZE_METHODS``.

    Raises:
        UserError: the method is unknown, or the table does not fit the old grid.
    """
    table = torch.as_tensor(table)
    problems = choice("method", method, RESIZE_METHODS)
    rows = prefix_tokens + old_grid[0] * old_grid[1]
    if table.ndim != 3 or table.shape[:2] != (1, rows):
        problems.append(f"table has shape {tuple(table.shape)} and not (1, {rows}, e), as old_grid={old_grid} requires")
    if min(new_grid) < 1:
        problems.append(f"new_grid={new_grid} must be at least 1")
    refuse(problems)
    prefix, patches = table[:, :prefix_tokens], table[:, prefix_tokens:]
    if method == "big_vision_zoom_grid":
        prefix = prefix[:, :0]
    if tuple(old_grid) == tuple(new_grid):
        return torch.cat([prefix, patches], dim=1)
    exact = patches.dtype if patches.dtype in (torch.float32, torch.float64) else torch.float32
    matrix = resize_matrix(old_grid, new_grid, method).to(patches.device, exact)
    return torch.cat([prefix, interpolated(patches, matrix)], dim=1)


def resize_matrix(old_grid: Size, new_grid: Size, method: str) -> Tensor:
    """Returns the matrix (n of the new grid, n of the old one) by which a table is resized, in float64 on the CPU.

    A product adds in a fixed order on every device, which ``F.interpolate`` does not in its backward pass on CUDA.

    Args:
        old_grid: rows and columns of the table's grid.
        new_grid: rows and columns of the result's grid.
        method: one of ``RESIZE_METHODS``.
    """
    identity = torch.eye(math.prod(old_grid), dtype=torch.float64, device="cpu")
    images = rearrange(identity, "n (h w) -> n 1 h w", h=old_grid[0])
    resized = F.interpolate(images, size=tuple(new_grid), **RESIZE_METHODS[method])  # type: ignore[arg-type]
    return rearrange(resized, "n 1 h w -> (h w) n").contiguous()


def interpolated(patches: Tensor, matrix: Tensor) -> Tensor:
    """Returns positions of patches (1, n, e) on the grid of a ``resize_matrix``, computed in the type of the matrix."""
    no_cast = contextlib.nullcontext() if patches.is_meta else torch.autocast(patches.device.type, enabled=False)
    with no_cast:
        return (matrix @ patches.to(matrix.dtype)).to(patches.dtype)
