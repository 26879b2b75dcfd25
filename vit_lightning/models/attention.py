"""Other attentions in the place of ``MultiHeadAttention``: chosen in the page as ``model.attention``."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.blocks import Block, MultiHeadAttention, attention_weights
from vit_lightning.models.positions import RotaryPositions


class SeparateAttention(MultiHeadAttention):
    """MultiHeadAttention with a layer each for queries, keys and values, as in the tutorial's first form and in JAX."""

    def make_projections(self, emb_size: int, inner: int, bias: bool) -> None:
        self.queries = nn.Linear(emb_size, inner, bias=bias)
        self.keys = nn.Linear(emb_size, inner, bias=bias)
        self.values = nn.Linear(emb_size, inner, bias=bias)

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = (
            rearrange(layer(tokens), "b n (h d) -> b h n d", h=self.num_heads)
            for layer in (self.queries, self.keys, self.values)
        )
        return queries, keys, values


class DividedAfterSoftmaxAttention(MultiHeadAttention):
    """The einops tutorial's attention as written, a fault that is kept to be measured: softmax(q k^T) v / sqrt(e).

    The scores are not scaled, and the rows of weights sum to 1 / sqrt(emb_size) in place of 1.
    """

    def __init__(
        self,
        emb_size: int = 768,
        num_heads: int = 12,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            emb_size,
            num_heads,
            qkv_bias=qkv_bias,
            scale=1.0,
            dropout=dropout,
            projection_dropout=projection_dropout,
        )
        self.divisor = emb_size**0.5

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        weights = attention_weights(queries, keys, scale=self.scale, mask=mask) / self.divisor
        return F.dropout(weights, self.dropout, training=self.training) @ values


class RotaryAttention(MultiHeadAttention):
    """MultiHeadAttention whose queries and keys are turned by their place (Su et al. 2021; axial, as in EVA-02).

    ViT tells it the grid; tokens before the patches are not turned. The arguments are those of ``RotaryPositions`` and
    the usual ones.
    """

    def __init__(
        self,
        emb_size: int = 768,
        num_heads: int = 12,
        *,
        temperature: float = 10_000.0,
        max_resolution: float | None = None,
        reference_grid: tuple[int, int] | None = None,
        qkv_bias: bool = True,
        qk_norm: Block | None = None,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            emb_size,
            num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            dropout=dropout,
            projection_dropout=projection_dropout,
        )
        if self.dim_head % 4:
            raise UserError(
                f"num_heads={num_heads}: heads of {self.dim_head} channels, which has to be a multiple of 4"
            )
        self.temperature, self.max_resolution, self.reference_grid = temperature, max_resolution, reference_grid
        self.positions: RotaryPositions | None = None

    def place(self, grid: tuple[int, int], prefix_tokens: int) -> None:
        """Says where the tokens are: rows and columns of patches, and the number of tokens before them."""
        self.positions = RotaryPositions(
            grid,
            self.dim_head,
            prefix_tokens,
            temperature=self.temperature,
            max_resolution=self.max_resolution,
            reference_grid=self.reference_grid,
        )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        assert self.positions is not None, "place() comes first; ViT calls it"
        return super().attend(self.positions(queries), self.positions(keys), values, mask)
