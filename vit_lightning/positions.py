"""Where a patch is: tables that are added to the tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError

Positions = Callable[[tuple[int, int], int, int], nn.Module]
"""Makes positions from the grid of patches (rows, columns), emb_size and the number of tokens before the patches."""


class LearnedPositions(nn.Module):
    """A learned vector for each token, the ones before the patches included (Dosovitskiy et al. 2021, equation 1)."""

    def __init__(self, grid: tuple[int, int], emb_size: int, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, prefix_tokens + grid[0] * grid[1], emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        # cast: a float32 table would turn the whole residual stream of a bfloat16 model into float32
        return tokens + self.table.to(tokens.dtype)


def sincos2d(grid: tuple[int, int], emb_size: int, temperature: float = 10_000.0) -> Tensor:
    """Fixed 2-D sine and cosine table, (rows * columns, e) in float64: sin x, cos x, sin y, cos y, a quarter each.

    Source: big_vision, ``models/vit.py: posemb_sincos_2d`` (Beyer et al. 2022, "Better plain ViT baselines").
    """
    quarter = emb_size // 4
    steps = torch.arange(quarter, dtype=torch.float64, device="cpu") / max(quarter - 1, 1)
    frequencies = temperature**-steps
    y, x = torch.meshgrid(*(torch.arange(size, dtype=torch.float64, device="cpu") for size in grid), indexing="ij")
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class SinCos2dPositions(nn.Module):
    """The fixed table of ``sincos2d``; tokens before the patches get none.

    Args:
        grid: rows and columns of patches.
        emb_size: width of the tokens, a multiple of 4.
        prefix_tokens: number of tokens before the patches.
        temperature: ratio of the longest to the shortest wavelength.
    """

    table: Tensor

    def __init__(
        self, grid: tuple[int, int], emb_size: int, prefix_tokens: int = 0, *, temperature: float = 10_000.0
    ) -> None:
        super().__init__()
        if emb_size % 4:
            raise UserError(f"emb_size={emb_size} must be a multiple of 4 for 2-D sine and cosine positions")
        self.grid, self.emb_size, self.prefix_tokens, self.temperature = grid, emb_size, prefix_tokens, temperature
        self.register_buffer(
            "table", self._exact_table().to(torch.get_default_device(), torch.get_default_dtype()), persistent=False
        )

    def _exact_table(self) -> Tensor:
        prefix = torch.zeros(self.prefix_tokens, self.emb_size, dtype=torch.float64, device="cpu")
        return torch.cat([prefix, sincos2d(self.grid, self.emb_size, self.temperature)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SinCos2dPositions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # made anew, so that a model turned to float64 has a float64 table and not a rounded one
        self.table = self._exact_table().to(self.table)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table.to(tokens.dtype)
