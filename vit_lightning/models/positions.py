"""Where a patch is: tables that are added to the tokens, angles that turn queries and keys, and resizing of tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError

if TYPE_CHECKING:
    import numpy as np

Grid = tuple[int, int]
"""Rows and columns of patches."""

Positions = Callable[[Grid, int, int], nn.Module]
"""Makes positions from the grid of patches, emb_size and the number of tokens before the patches."""


class LearnedPositions(nn.Module):
    """A learned vector for each token, the ones before the patches included (Dosovitskiy et al. 2021, equation 1)."""

    def __init__(self, grid: Grid, emb_size: int, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, prefix_tokens + grid[0] * grid[1], emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        # cast: a float32 table would turn the whole residual stream of a bfloat16 model into float32
        return tokens + self.table.to(tokens.dtype)


class LearnedPatchPositions(nn.Module):
    """A learned vector for each patch, none for the tokens before them (big_vision; DeiT III)."""

    def __init__(self, grid: Grid, emb_size: int, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.table = nn.Parameter(torch.zeros(1, grid[0] * grid[1], emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + F.pad(self.table.to(tokens.dtype), (0, 0, self.prefix_tokens, 0))


SinCosForm = Literal["big_vision", "simple_vit", "timm", "timm_interleaved"]
_FORMS = ("big_vision", "simple_vit", "timm", "timm_interleaved")


def sincos2d(grid: Grid, emb_size: int, temperature: float = 10_000.0, *, form: SinCosForm = "big_vision") -> Tensor:
    """Fixed 2-D sine and cosine table, (rows * columns, e) in float64.

    Args:
        grid: rows and columns of patches.
        emb_size: width of the table, a multiple of 4.
        temperature: ratio of the longest to the shortest wavelength.
        form: what the quarters of a row hold. big_vision: sin x, cos x, sin y, cos y (its ``models/vit.py:
            posemb_sincos_2d``; Beyer et al. 2022). simple_vit: the same in float32 arithmetic, as vit-pytorch's
            SimpleViT has it. timm: sin y, sin x, cos y, cos x (its ``build_sincos2d_pos_embed``), timm_interleaved
            sin y, cos y, sin x, cos x; the last wavelength of both is one step short of the temperature.
    """
    quarter = emb_size // 4
    dtype = torch.float32 if form == "simple_vit" else torch.float64
    steps = torch.arange(quarter, dtype=dtype, device="cpu")
    steps = steps / (quarter if form.startswith("timm") else max(quarter - 1, 1))
    frequencies = 1.0 / temperature**steps
    y, x = torch.meshgrid(*(torch.arange(size, dtype=dtype, device="cpu") for size in grid), indexing="ij")
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    quarters = {
        "timm": (y.sin(), x.sin(), y.cos(), x.cos()),
        "timm_interleaved": (y.sin(), y.cos(), x.sin(), x.cos()),
    }
    return torch.cat(quarters.get(form, (x.sin(), x.cos(), y.sin(), y.cos())), dim=1).double()


class SinCos2dPositions(nn.Module):
    """The fixed table of ``sincos2d``; tokens before the patches get none.

    Args:
        grid: rows and columns of patches.
        emb_size: width of the tokens, a multiple of 4.
        prefix_tokens: number of tokens before the patches.
        temperature: ratio of the longest to the shortest wavelength.
        form: order of sines and cosines, as in ``sincos2d``.
    """

    table: Tensor

    def __init__(
        self,
        grid: Grid,
        emb_size: int,
        prefix_tokens: int = 0,
        *,
        temperature: float = 10_000.0,
        form: SinCosForm = "big_vision",
    ) -> None:
        super().__init__()
        problems = []
        if emb_size % 4:
            problems.append(f"emb_size={emb_size} must be a multiple of 4 for 2-D sine and cosine positions")
        if form not in _FORMS:
            problems.append(f"form={form} must be one of {', '.join(_FORMS)}")
        if problems:
            raise UserError(problems)
        self.grid, self.emb_size, self.prefix_tokens, self.temperature = grid, emb_size, prefix_tokens, temperature
        self.form: SinCosForm = form
        self.register_buffer(
            "table", self._exact_table().to(torch.get_default_device(), torch.get_default_dtype()), persistent=False
        )

    def _exact_table(self) -> Tensor:
        prefix = torch.zeros(self.prefix_tokens, self.emb_size, dtype=torch.float64, device="cpu")
        return torch.cat([prefix, sincos2d(self.grid, self.emb_size, self.temperature, form=self.form)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SinCos2dPositions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # made anew, so that a model turned to float64 has a float64 table and not a rounded one
        self.table = self._exact_table().to(self.table)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table.to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"form={self.form}, temperature={self.temperature:g}"


def rotary_angles(
    grid: Grid,
    dim_head: int,
    *,
    temperature: float = 10_000.0,
    max_resolution: float | None = None,
    reference_grid: Grid | None = None,
) -> Tensor:
    """Angles by which pairs of channels are turned, (rows * columns, dim_head / 2) in float64.

    The first half of the pairs is turned by the row, the second by the column, with dim_head / 4 frequencies each:
    temperature ** -(i / (dim_head / 4)), or with ``max_resolution`` from pi to pi * max_resolution / 2 on coordinates
    from -1 to 1. Source: timm, ``RotaryEmbeddingCat``, whose two modes these are.
    """
    count = dim_head // 4
    steps = torch.arange(count, dtype=torch.float64, device="cpu")
    if max_resolution is None:
        axes = [torch.arange(size, dtype=torch.float64, device="cpu") for size in grid]
        frequencies = temperature ** -(steps / count)
    else:
        axes = [torch.linspace(-1.0, 1.0, size, dtype=torch.float64, device="cpu") for size in grid]
        frequencies = math.pi * 2.0 ** (steps / max(1, count - 1) * (math.log2(max_resolution) - 1.0))
    if reference_grid is not None:  # another resolution is laid over the grid of pre-training
        axes = [axis / size * old for axis, size, old in zip(axes, grid, reference_grid, strict=True)]
    y, x = torch.meshgrid(*axes, indexing="ij")
    return torch.cat([y.reshape(-1, 1) * frequencies, x.reshape(-1, 1) * frequencies], dim=1)


class RotaryPositions(nn.Module):
    """Turns pairs of channels of queries or keys by the place of their patch: (b, h, p + n, d), same shape.

    Axial rotary positions (Su et al. 2021 in two dimensions, as EVA-02); tokens before the patches are not turned.

    Args:
        grid: rows and columns of patches.
        dim_head: width of a head, a multiple of 4.
        prefix_tokens: number of tokens before the patches.
        temperature: ratio of the longest to the shortest wavelength.
        max_resolution: frequencies of pixels in place of a temperature; none when not given.
        reference_grid: grid of pre-training, over which this one is laid; none when not given.
    """

    angles: Tensor

    def __init__(
        self,
        grid: Grid,
        dim_head: int,
        prefix_tokens: int = 0,
        *,
        temperature: float = 10_000.0,
        max_resolution: float | None = None,
        reference_grid: Grid | None = None,
    ) -> None:
        super().__init__()
        if dim_head % 4:
            raise UserError(f"dim_head={dim_head} must be a multiple of 4 for rotary positions in two dimensions")
        self.prefix_tokens = prefix_tokens
        self._exact = rotary_angles(
            grid, dim_head, temperature=temperature, max_resolution=max_resolution, reference_grid=reference_grid
        )
        self.register_buffer(
            "angles", self._exact.to(torch.get_default_device(), torch.get_default_dtype()), persistent=False
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.angles = self._exact.to(self.angles)
        return self

    def forward(self, heads: Tensor) -> Tensor:
        # sine and cosine of angles in bfloat16 would be far off
        angles = self.angles if self.angles.dtype.itemsize >= 4 else self._exact.to(self.angles.device, torch.float32)
        sine, cosine = angles.sin().to(heads.dtype), angles.cos().to(heads.dtype)
        first, second = rearrange(heads[:, :, self.prefix_tokens :], "b h n (pairs two) -> two b h n pairs", two=2)
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return torch.cat([heads[:, :, : self.prefix_tokens], rearrange(turned, "b h n d two -> b h n (d two)")], dim=2)


RESIZE_METHODS: dict[str, dict[str, object]] = {
    "timm_bicubic_antialias": {"mode": "bicubic", "antialias": True},
    "timm_bicubic_noantialias": {"mode": "bicubic", "antialias": False},
    "timm_bilinear_antialias": {"mode": "bilinear", "antialias": True},
    "timm_bilinear_noantialias": {"mode": "bilinear", "antialias": False},
    "torchvision_bicubic": {"mode": "bicubic", "align_corners": True},
    "hf_bicubic": {"mode": "bicubic", "antialias": False},
    "bilinear_align_corners": {"mode": "bilinear", "align_corners": True},
    # scipy.ndimage.zoom with order=1 lays corner on corner, as this does
    "big_vision_zoom_grid": {"mode": "bilinear", "align_corners": True},
    "vit_jax_zoom": {"mode": "bilinear", "align_corners": True},
}
"""How each reference resizes its table, by names that say which; the numbers differ."""


def resize(
    table: Tensor | np.ndarray[Any, Any], old_grid: Grid, new_grid: Grid, prefix_tokens: int, method: str
) -> Tensor:
    """A table of positions (1, p + n, e) for another grid; the rows of tokens before the patches stay as they are.

    ``big_vision_zoom_grid`` gives the rows of the grid alone, since big_vision has no others.

    Args:
        table: positions, row by row of the grid.
        old_grid: its rows and columns.
        new_grid: rows and columns to come.
        prefix_tokens: number of rows before those of the grid.
        method: one of ``RESIZE_METHODS``.

    Raises:
        UserError: for an unknown method, and a table that is not of the old grid.
    """
    table = torch.as_tensor(table)
    problems = []
    if method not in RESIZE_METHODS:
        problems.append(f"method={method} must be one of {', '.join(RESIZE_METHODS)}")
    rows = prefix_tokens + old_grid[0] * old_grid[1]
    if table.ndim != 3 or table.shape[:2] != (1, rows):
        problems.append(f"table has shape {tuple(table.shape)} and not (1, {rows}, e), as old_grid={old_grid} asks")
    if min(new_grid) < 1:
        problems.append(f"new_grid={new_grid} must be at least 1")
    if problems:
        raise UserError(problems)
    prefix, patches = table[:, :prefix_tokens], table[:, prefix_tokens:]
    if method == "big_vision_zoom_grid":
        prefix = prefix[:, :0]
    if tuple(old_grid) == tuple(new_grid):
        return torch.cat([prefix, patches], dim=1)
    image = rearrange(patches, "1 (h w) e -> 1 e h w", h=old_grid[0])
    exact = image if image.dtype in (torch.float32, torch.float64) else image.float()
    resized = F.interpolate(exact, size=tuple(new_grid), **RESIZE_METHODS[method])  # type: ignore[arg-type]
    return torch.cat([prefix, rearrange(resized.to(table.dtype), "1 e h w -> 1 (h w) e")], dim=1)
