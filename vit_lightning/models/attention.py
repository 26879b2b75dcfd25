"""Multi-head self-attention and its variants, chosen in a config by ``model.attention.class_path``.

Shape letters: b images, n tokens, e emb_size, h heads, d head dimension; q queries, k keys.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError, choice, probabilities, refuse
from vit_lightning.models.layers import Layer
from vit_lightning.models.positions import RotaryPositions

Attention = Callable[[int, int], nn.Module]
"""Makes an attention block from emb_size and num_heads."""

Gate = Literal["elements", "heads"]


def attention_weights(queries: Tensor, keys: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """Returns softmax(scale q k^T) of (b, h, n, d) queries and keys: (b, h, n, n), rows sum to 1.

    ``mask`` is boolean, True where a query may attend to a key; a query that may attend to no key gets zeros.
    """
    energy = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * scale
    if mask is None:
        return energy.softmax(dim=-1)
    weights = energy.masked_fill(~mask, torch.finfo(energy.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


class DotProductAttention(nn.Module):
    """``attention_weights`` times the values: queries, keys and values (b, h, n, d) -> (b, h, n, d).

    Args:
        scale: factor on the scores before the softmax.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


def _heads_problems(emb_size: int, num_heads: int, dim_head: int | None) -> list[str]:
    """Returns a problem if heads do not share the width of the tokens."""
    if num_heads < 1 or (dim_head is not None and dim_head < 1):
        return [f"num_heads={num_heads} and dim_head={dim_head} must be at least 1"]
    if dim_head is not None or emb_size % num_heads == 0:
        return []
    divisors = ", ".join(str(n) for n in range(1, emb_size + 1) if emb_size % n == 0)
    way_out = f"choose one of {divisors}, or give attention.dim_head"
    return [f"num_heads={num_heads} does not divide emb_size={emb_size} ({way_out})"]


class MultiHeadAttention(nn.Module):
    """Self-attention (Dosovitskiy et al. 2021, appendix A): (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        num_heads: number of heads.
        dim_head: width of one head; emb_size / num_heads when not given.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        scale: factor on the scores before the softmax; dim_head ** -0.5 when not given.
        qk_norm: norm of each head's queries and keys (Dehghani et al. 2023); none when not given.
        norm: norm of the heads' outputs before the projection; none when not given.
        gate: sigmoids of a linear layer of the tokens by which the heads' outputs are multiplied before the projection,
            one for each of the elements or of the heads (Qiu et al. 2025, arXiv 2505.06708; in ViTs with registers,
            arXiv 2606.08105); none when not given.
        projection: whether the heads' outputs are projected; if not, all heads together must be emb_size wide.
        projection_bias: whether that projection has a bias.
        dropout: probability of dropping an attention weight in training.
        projection_dropout: probability of dropping an output of the projection in training.
    """

    def __init__(
        self,
        emb_size: int = 768,
        num_heads: int = 12,
        *,
        dim_head: int | None = None,
        qkv_bias: bool = True,
        scale: float | None = None,
        qk_norm: Layer | None = None,
        norm: Layer | None = None,
        gate: Gate | None = None,
        projection: bool = True,
        projection_bias: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        refuse(
            probabilities(dropout=dropout, projection_dropout=projection_dropout),
            _heads_problems(emb_size, num_heads, dim_head),
            choice("gate", gate, get_args(Gate)),
        )
        self.num_heads = num_heads
        self.dim_head = emb_size // num_heads if dim_head is None else dim_head
        inner = num_heads * self.dim_head
        if not projection and inner != emb_size:
            raise UserError(f"projection=False: the heads are {inner} wide together, and not emb_size={emb_size}")
        self.make_projections(emb_size, inner, qkv_bias)
        self.query_norm = None if qk_norm is None else qk_norm(self.dim_head)
        self.key_norm = None if qk_norm is None else qk_norm(self.dim_head)
        self.attend = DotProductAttention(self.dim_head**-0.5 if scale is None else scale, dropout)
        self.norm = None if norm is None else norm(inner)
        gates = {"elements": inner, "heads": num_heads}
        self.gate = None if gate is None else nn.Linear(emb_size, gates[gate], bias=qkv_bias)
        self.projection = nn.Linear(inner, emb_size, bias=projection_bias) if projection else None
        self.projection_dropout = nn.Dropout(projection_dropout)

    def make_projections(self, emb_size: int, inner: int, bias: bool) -> None:
        """Makes the layers that give queries, keys and values; a variant overrides it together with ``project``."""
        self.qkv = nn.Linear(emb_size, 3 * inner, bias=bias)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects tokens to queries, keys and values of each head, (b, h, n, d)."""
        parts = rearrange(self.qkv(tokens), "b n (qkv h d) -> b n qkv h d", qkv=3, h=self.num_heads)
        # split along qkv, so that the gradient is put together at once in the order of the projection
        queries, keys, values = parts.unbind(dim=2)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as they are multiplied, (b, h, n, d)."""
        queries, keys, values = self.project(tokens)
        queries = queries if self.query_norm is None else self.query_norm(queries)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return queries, keys, values

    def join(self, heads: Tensor, tokens: Tensor) -> Tensor:
        """Joins the heads' outputs (b, h, n, d), gates them by the tokens, and projects them to (b, n, e)."""
        out = rearrange(heads, "b h n d -> b n (h d)")
        out = out if self.norm is None else self.norm(out)
        if self.gate is not None:
            by_head = (self.num_heads, -1)
            out = (out.unflatten(-1, by_head) * self.gate(tokens).sigmoid().unflatten(-1, by_head)).flatten(-2)
        if self.projection is None:
            return out
        projected: Tensor = self.projection_dropout(self.projection(out))
        return projected

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends where ``mask``, boolean and broadcast to (b, h, n, n), is True for query (row) and key (column)."""
        return self.join(self.attend(*self.heads(tokens), mask), tokens)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dim_head={self.dim_head}"


class SeparateAttention(MultiHeadAttention):
    """MultiHeadAttention with three layers for queries, keys, values, as in JAX and the tutorial's first form."""

    def make_projections(self, emb_size: int, inner: int, bias: bool) -> None:
        self.queries = nn.Linear(emb_size, inner, bias=bias)
        self.keys = nn.Linear(emb_size, inner, bias=bias)
        self.values = nn.Linear(emb_size, inner, bias=bias)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = (
            rearrange(layer(tokens), "b n (h d) -> b h n d", h=self.num_heads)
            for layer in (self.queries, self.keys, self.values)
        )
        return queries, keys, values


class DividedAfterSoftmax(DotProductAttention):
    """softmax(q k^T) v over a divisor: the scores are not scaled, and the rows of weights sum to 1 / divisor."""

    def __init__(self, divisor: float, dropout: float = 0.0) -> None:
        super().__init__(1.0, dropout)
        self.divisor = divisor

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = attention_weights(queries, keys, scale=self.scale, mask=mask) / self.divisor
        return F.dropout(weights, self.dropout, training=self.training) @ values


class DividedAfterSoftmaxAttention(MultiHeadAttention):
    """The einops tutorial's attention as written, a bug kept for comparison: softmax(q k^T) v / sqrt(e).

    The scores are not scaled, and the rows of weights sum to 1 / sqrt(emb_size) instead of 1.
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
        super().__init__(emb_size, num_heads, qkv_bias=qkv_bias, dropout=dropout, projection_dropout=projection_dropout)
        self.attend = DividedAfterSoftmax(emb_size**0.5, dropout)


class RotaryAttention(MultiHeadAttention):
    """MultiHeadAttention with rotary positions (Su et al. 2021; axial, as in EVA-02).

    ViT sets the grid; tokens before the patches are not rotated. More on the positions: ``RotaryPositions``.

    Args:
        temperature: base of the frequencies.
        max_resolution: frequencies of pixels instead of a temperature; none when not given.
        reference_grid: grid of pre-training, to which another one is rescaled; none when not given.
        centred: whether coordinates are the centres of patches from -1 to 1 (DINOv3).
        register_temperature: base of the frequencies of registers, which stand in a square of their own (ViT-5); they
            are not rotated when not given.
    """

    def __init__(
        self,
        emb_size: int = 768,
        num_heads: int = 12,
        *,
        temperature: float = 10_000.0,
        max_resolution: float | None = None,
        reference_grid: tuple[int, int] | None = None,
        centred: bool = False,
        register_temperature: float | None = None,
        qkv_bias: bool = True,
        qk_norm: Layer | None = None,
        gate: Gate | None = None,
        projection_bias: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            emb_size,
            num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            gate=gate,
            projection_bias=projection_bias,
            dropout=dropout,
            projection_dropout=projection_dropout,
        )
        if self.dim_head % 4:
            raise UserError(
                f"num_heads={num_heads}: heads of {self.dim_head} channels, which has to be a multiple of 4"
            )
        self.temperature, self.max_resolution, self.reference_grid = temperature, max_resolution, reference_grid
        self.centred, self.register_temperature = centred, register_temperature
        self.positions: RotaryPositions | None = None

    def set_grid(self, grid: tuple[int, int], prefix_tokens: int, registers: int = 0) -> None:
        """Sets the positions: rows and columns of patches, and how many tokens, of these registers, are before them."""
        self.positions = RotaryPositions(
            grid,
            self.dim_head,
            prefix_tokens,
            temperature=self.temperature,
            max_resolution=self.max_resolution,
            reference_grid=self.reference_grid,
            centred=self.centred,
            registers=registers if self.register_temperature is not None else 0,
            register_temperature=self.register_temperature or 1.0,
        )

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.positions is not None, "ViT calls set_grid() first"
        queries, keys, values = super().heads(tokens)
        return self.positions(queries), self.positions(keys), values
