"""Positions of patches: tables added to the tokens, and rotations of queries and keys.

Shape letters: b images, p tokens before the patches, n patches, e emb_size, h heads, d head dimension.
"""

import math
from collections.abc import Callable
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import at_least, choice, problems_of, refuse

Grid = tuple[int, int]
"""Rows and columns of patches."""


class LearnedPositions(nn.Module):
    """A learned vector for each token, those before the patches included (Dosovitskiy et al. 2021, equation 1).

    Args:
        grid: rows and columns of patches.
        emb_size: width of the tokens.
        prefix_tokens: number of tokens before the patches.
        std: standard deviation of the first vectors, normal; that of ViT's initialisation when not given.
    """

    def __init__(self, grid: Grid, emb_size: int, prefix_tokens: int = 0, *, std: float | None = None) -> None:
        super().__init__()
        refuse(at_least(0, std=std))
        self.std = std
        self.table = nn.Parameter(torch.zeros(1, prefix_tokens + grid[0] * grid[1], emb_size))
        self.grid = grid

    def forward(self, tokens: Tensor) -> Tensor:
        # cast: a float32 table would turn the whole residual stream into float32, also under autocast
        return tokens + self.table.to(tokens.dtype)


class LearnedPatchPositions(LearnedPositions):
    """A learned vector for each patch, none for the tokens before them (big_vision; DeiT III)."""

    def __init__(self, grid: Grid, emb_size: int, prefix_tokens: int = 0, *, std: float | None = None) -> None:
        super().__init__(grid, emb_size, std=std)
        self.prefix_tokens = prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + F.pad(self.table.to(tokens.dtype), (0, 0, self.prefix_tokens, 0))


SinCosForm = Literal["big_vision", "simple_vit", "mae"]


def sincos2d(grid: Grid, emb_size: int, temperature: float = 10_000.0, *, form: SinCosForm = "big_vision") -> Tensor:
    """Returns the fixed 2-D sine and cosine table, (rows * columns, e) in float64.

    Args:
        grid: rows and columns of patches.
        emb_size: width of the table, a multiple of 4.
        temperature: ratio of the longest to the shortest wavelength.
        form: order of the four quarters of a row. big_vision: sin x, cos x, sin y, cos y (its ``models/vit.py:
            posemb_sincos_2d``; Beyer et al. 2022). simple_vit: the same in float32 arithmetic, as in vit-pytorch's
            SimpleViT. mae: the same with the last wavelength one step short of the temperature (He et al. 2022).
    """
    quarter = emb_size // 4
    dtype = torch.float32 if form == "simple_vit" else torch.float64
    steps = torch.arange(quarter, dtype=dtype, device="cpu")
    steps = steps / (quarter if form == "mae" else max(quarter - 1, 1))
    frequencies = 1.0 / temperature**steps
    y, x = torch.meshgrid(*(torch.arange(size, dtype=dtype, device="cpu") for size in grid), indexing="ij")
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).double()


class ExactTable(nn.Module):
    """A constant table in the model's type and device, always cast from float64 and no part of checkpoints.

    Args:
        exact: the table in float64.
        at_least: type of the table in models of a narrower one; none when not given.
    """

    table: Tensor

    def __init__(self, exact: Tensor, at_least: torch.dtype | None = None) -> None:
        super().__init__()
        self.exact, self.at_least = exact, at_least
        table = self._cast(torch.get_default_device(), torch.get_default_dtype())
        self.register_buffer("table", table, persistent=False)

    def _cast(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.exact.to(device, torch.promote_types(dtype, self.at_least or dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # cast again: after .float().double() the table would be a rounded one
        self.table = self._cast(self.table.device, self.table.dtype)
        return self


class SinCos2dPositions(ExactTable):
    """The fixed table of ``sincos2d``, added to the patches and not to the tokens before them.

    Args:
        grid: rows and columns of patches.
        emb_size: width of the tokens, a multiple of 4.
        prefix_tokens: number of tokens before the patches.
        temperature: ratio of the longest to the shortest wavelength.
        form: order of sines and cosines, as in ``sincos2d``.
    """

    def __init__(
        self,
        grid: Grid,
        emb_size: int,
        prefix_tokens: int = 0,
        *,
        temperature: float = 10_000.0,
        form: SinCosForm = "big_vision",
    ) -> None:
        must_be = f"emb_size={emb_size} must be a multiple of 4 for 2-D sine and cosine positions"
        refuse([must_be] if emb_size % 4 else [], choice("form", form, get_args(SinCosForm)))
        super().__init__(F.pad(sincos2d(grid, emb_size, temperature, form=form), (0, 0, prefix_tokens, 0)))
        self.form, self.temperature = form, temperature

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table.to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"form={self.form}, temperature={self.temperature:g}"


Positions = Callable[[Grid, int, int], nn.Module]
"""Makes positions from the grid of patches, emb_size and the number of tokens before the patches."""

POSITIONS: dict[str, Callable[[Grid, int, int], nn.Module | None]] = {
    "learned": LearnedPositions,
    "sincos2d": SinCos2dPositions,
    "none": lambda grid, emb_size, prefix_tokens: None,
}


class RotaryPositions(ExactTable):
    """Rotation of pairs of channels of queries or keys by the position of their patch: (b, h, p + n, d), same shape.

    Axial rotary positions (Su et al. 2021 in two dimensions, as EVA-02); tokens before the patches are not rotated.
    The table holds sine and cosine of the angles, (2, rows * columns, dim_head / 2): the first half of the pairs is
    rotated by the row, the second by the column, with dim_head / 4 frequencies each, temperature **
    -(i / (dim_head / 4)), or with ``max_resolution`` from pi to pi * max_resolution / 2 on coordinates from -1 to 1.
    Source: the two modes of timm's ``RotaryEmbeddingCat``.

    Args:
        grid: rows and columns of patches.
        dim_head: width of a head, a multiple of 4.
        prefix_tokens: number of tokens before the patches.
        temperature: base of the frequencies, above 0.
        max_resolution: frequencies of pixels instead of a temperature; none when not given.
        reference_grid: grid of pre-training, to which this one is rescaled; none when not given.
        centred: whether coordinates are the centres of patches from -1 to 1, and frequencies 2 pi times those of a
            temperature (DINOv3); without max_resolution.
        registers: number of registers, the last of the tokens before the patches, that are rotated as a square of
            their own; a square number.
        register_temperature: base of their frequencies.
    """

    def __init__(
        self,
        grid: Grid,
        dim_head: int,
        prefix_tokens: int = 0,
        *,
        temperature: float = 10_000.0,
        max_resolution: float | None = None,
        reference_grid: Grid | None = None,
        centred: bool = False,
        registers: int = 0,
        register_temperature: float = 100.0,
    ) -> None:
        problems = problems_of(
            ("temperature", temperature, temperature > 0.0, "above 0"),
            ("max_resolution", max_resolution, max_resolution is None or not centred, "left out with centred=true"),
            ("register_tokens", registers, math.isqrt(registers) ** 2 == registers, "a square number to be rotated"),
        )
        refuse(problems)
        count = dim_head // 4
        steps = torch.arange(count, dtype=torch.float64, device="cpu")
        if centred:
            axes = [(2.0 * torch.arange(size, dtype=torch.float64, device="cpu") + 1.0) / size - 1.0 for size in grid]
            frequencies = 2.0 * math.pi * temperature ** -(steps / count)
        elif max_resolution is None:
            axes = [torch.arange(size, dtype=torch.float64, device="cpu") for size in grid]
            frequencies = temperature ** -(steps / count)
        else:
            axes = [torch.linspace(-1.0, 1.0, size, dtype=torch.float64, device="cpu") for size in grid]
            frequencies = math.pi * 2.0 ** (steps / max(1, count - 1) * (math.log2(max_resolution) - 1.0))
        if reference_grid is not None:  # another resolution is rescaled to the grid of pre-training
            axes = [axis / size * old for axis, size, old in zip(axes, grid, reference_grid, strict=True)]
        square = [torch.arange(math.isqrt(registers), dtype=torch.float64, device="cpu")] * 2
        angles = [self.angles(square, register_temperature ** -(steps / count)), self.angles(axes, frequencies)]
        super().__init__(torch.cat(angles), at_least=torch.float32)  # sine and cosine of bfloat16 would be far off
        self.prefix_tokens = prefix_tokens - registers

    @staticmethod
    def angles(axes: list[Tensor], frequencies: Tensor) -> Tensor:
        """Returns the angles of a grid of rows and columns, (rows * columns, dim_head / 2)."""
        y, x = torch.meshgrid(*axes, indexing="ij")
        return torch.cat([y.reshape(-1, 1) * frequencies, x.reshape(-1, 1) * frequencies], dim=1)

    def _cast(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        angles = super()._cast(self.exact.device, dtype)
        return torch.stack([angles.sin(), angles.cos()]).to(device)

    def forward(self, heads: Tensor) -> Tensor:
        sine, cosine = self.table.to(heads.dtype)
        first, second = rearrange(heads[:, :, self.prefix_tokens :], "b h n (pairs two) -> two b h n pairs", two=2)
        rotated = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        rotated = rearrange(rotated, "b h n d two -> b h n (d two)")
        return torch.cat([heads[:, :, : self.prefix_tokens], rotated], dim=2)
