"""Tables of learned positions resized to another grid of patches, as timm does.

Shape letters: p tokens before the patches, n patches, e emb_size.
"""

from __future__ import annotations

import contextlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vit_lightning.errors import UserError
from vit_lightning.sizes import Size

Interpolation = Literal["bicubic", "bilinear", "aliased bicubic"]
"""Interpolation with antialiasing, as in timm; aliased as in transformers."""

ResizePositions = Literal["bicubic", "bilinear", "reset"]
"""How learned positions get another grid: by an interpolation, or re-initialised."""


def resize(table: Tensor, old_grid: Size, new_grid: Size, prefix_tokens: int, interpolation: Interpolation) -> Tensor:
    """Resizes a table of positions (1, p + n, e) to another grid; the rows of tokens before the patches do not change.

    Args:
        table: positions, row by row of the grid.
        old_grid: rows and columns of the table's grid.
        new_grid: rows and columns of the result's grid.
        prefix_tokens: number of rows of the table before those of the grid.
        interpolation: how it is resized.

    Raises:
        UserError: the table does not fit the old grid.
    """
    rows = prefix_tokens + old_grid[0] * old_grid[1]
    if table.ndim != 3 or table.shape[:2] != (1, rows):
        raise UserError(f"table has shape {tuple(table.shape)} and not (1, {rows}, e), as old_grid={old_grid} requires")
    prefix, patches = table[:, :prefix_tokens], table[:, prefix_tokens:]
    if tuple(old_grid) == tuple(new_grid):
        return torch.cat([prefix, patches], dim=1)
    exact = patches.dtype if patches.dtype in (torch.float32, torch.float64) else torch.float32
    matrix = resize_matrix(old_grid, new_grid, interpolation).to(patches.device, exact)
    return torch.cat([prefix, interpolated(patches, matrix)], dim=1)


def resize_matrix(old_grid: Size, new_grid: Size, interpolation: Interpolation) -> Tensor:
    """Returns the matrix (n of the new grid, n of the old one) by which a table is resized, in float64 on the CPU.

    A product adds in a fixed order on every device, which ``F.interpolate`` does not in its backward pass on CUDA.

    Args:
        old_grid: rows and columns of the table's grid.
        new_grid: rows and columns of the result's grid.
        interpolation: how it is resized.
    """
    images = torch.eye(math.prod(old_grid), dtype=torch.float64, device="cpu").reshape(-1, 1, *old_grid)
    *aliased, kind = interpolation.split()
    resized = F.interpolate(images, size=tuple(new_grid), mode=kind, antialias=not aliased)
    return rearrange(resized, "n 1 h w -> (h w) n").contiguous()


def interpolated(patches: Tensor, matrix: Tensor) -> Tensor:
    """Returns positions of patches (1, n, e) on the grid of a ``resize_matrix``, computed in the type of the matrix."""
    no_cast = contextlib.nullcontext() if patches.is_meta else torch.autocast(patches.device.type, enabled=False)
    with no_cast:
        return (matrix @ patches.to(matrix.dtype)).to(patches.dtype)
