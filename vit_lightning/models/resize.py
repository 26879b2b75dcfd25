"""Tables of learned positions resized to another grid of patches, in the ways of the reference implementations.

Shape letters: p tokens before the patches, n patches, e emb_size.
"""

from __future__ import annotations

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
"""Interpolation with antialiasing, as in timm; enlarged with bilinear, as in the ViT paper's fine-tuning."""


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
    image = rearrange(patches, "1 (h w) e -> 1 e h w", h=old_grid[0])
    exact = image if image.dtype in (torch.float32, torch.float64) else image.float()
    resized = F.interpolate(exact, size=tuple(new_grid), **RESIZE_METHODS[method])  # type: ignore[arg-type]
    return torch.cat([prefix, rearrange(resized.to(table.dtype), "1 e h w -> 1 (h w) e")], dim=1)
