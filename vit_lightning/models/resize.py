"""Tables of learned positions resized to another grid of patches, as timm does.

Shape letters: p tokens before the patches, n patches, e emb_size.
"""

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
    *aliased, kind = interpolation.split()
    images = rearrange(patches.to(exact), "1 (h w) e -> 1 e h w", h=old_grid[0])
    resized = F.interpolate(images, size=tuple(new_grid), mode=kind, antialias=not aliased)
    return torch.cat([prefix, rearrange(resized, "1 e h w -> 1 (h w) e").to(patches.dtype)], dim=1)
