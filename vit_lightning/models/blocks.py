"""The encoder of a Vision Transformer, as in the einops tutorial: Sequentials whose named children are the figure.

Shape letters: b images, c channels, n tokens, e emb_size, h heads, d head dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_lightning.errors import UserError

Block = Callable[[int], nn.Module]
"""Makes a block from emb_size."""


def share_problems(shares: dict[str, float]) -> list[str]:
    """What is wrong with shares that are dropped."""
    return [f"{name}={share} must be at least 0 and below 1" for name, share in shares.items() if not 0.0 <= share < 1]


class NamedSequential(nn.Sequential):
    """``nn.Sequential`` with names; a child that is None is left out, so that absent parts renumber nothing."""

    def __init__(self, **children: nn.Module | None) -> None:
        super().__init__(OrderedDict((name, child) for name, child in children.items() if child is not None))

    def __getitem__(self, place: int | slice) -> nn.Module:  # type: ignore[override]
        """A child, or for a slice a plain Sequential of several (torch would call our constructor, which differs)."""
        if isinstance(place, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[place]))
        child: nn.Module = super().__getitem__(place)
        return child


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimension with the epsilon of the public ViT weights."""

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square over the last dimension (Zhang and Sennrich 2019); it has no bias."""

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


def attention_weights(queries: Tensor, keys: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T) of (b, h, n, d) queries and keys: (b, h, n, n), rows sum to 1.

    ``mask`` is boolean, True where a query may attend to a key; a query that may attend to nothing gets zeros.
    """
    energy = torch.einsum("bhqd,bhkd->bhqk", queries, keys) * scale
    if mask is None:
        return energy.softmax(dim=-1)
    weights = energy.masked_fill(~mask, torch.finfo(energy.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, mask: Tensor | None, dropout: float
) -> Tensor:
    """Weighted sum of the values, (b, h, n, d); the same numbers as ``attention_weights`` gives, in the fastest way."""
    if queries.device.type == "cpu" and queries.dtype is torch.bfloat16:
        # torch's fused attention is 5-15 times slower than the plain products in the bfloat16 backward pass on CPU
        weights = F.dropout(attention_weights(queries, keys, scale=scale, mask=mask), dropout)
        return torch.einsum("bhqk,bhkd->bhqd", weights, values)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)


class MultiHeadAttention(nn.Module):
    """Self-attention (Dosovitskiy et al. 2021, appendix A): (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        num_heads: number of heads.
        dim_head: width of one head; emb_size / num_heads when not given.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        scale: factor on the scores before the softmax; dim_head ** -0.5 when not given.
        qk_norm: normalisation of each head's queries and keys (Dehghani et al. 2023); none when not given.
        norm: normalisation of the heads' outputs before the projection; none when not given.
        projection: whether the heads' outputs are projected; without, they have to be emb_size wide together.
        projection_bias: whether that projection has a bias.
        dropout: share of attention weights dropped in training.
        projection_dropout: share of outputs dropped in training.
    """

    def __init__(
        self,
        emb_size: int = 768,
        num_heads: int = 12,
        *,
        dim_head: int | None = None,
        qkv_bias: bool = True,
        scale: float | None = None,
        qk_norm: Block | None = None,
        norm: Block | None = None,
        projection: bool = True,
        projection_bias: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        problems = share_problems({"dropout": dropout, "projection_dropout": projection_dropout})
        if num_heads < 1 or (dim_head is not None and dim_head < 1):
            problems.append(f"num_heads={num_heads} and dim_head={dim_head} must be at least 1")
        elif dim_head is None and emb_size % num_heads:
            divisors = [n for n in range(1, emb_size + 1) if emb_size % n == 0]
            problems.append(
                f"num_heads={num_heads} does not divide emb_size={emb_size} "
                f"(choose one of {', '.join(map(str, divisors))}, or give attention.dim_head)"
            )
        if problems:
            raise UserError(problems)
        self.num_heads = num_heads
        self.dim_head = emb_size // num_heads if dim_head is None else dim_head
        inner = num_heads * self.dim_head
        if not projection and inner != emb_size:
            raise UserError(f"projection=False: the heads are {inner} wide together, and not emb_size={emb_size}")
        self.scale = self.dim_head**-0.5 if scale is None else scale
        self.dropout = dropout
        self.make_projections(emb_size, inner, qkv_bias)
        self.query_norm = None if qk_norm is None else qk_norm(self.dim_head)
        self.key_norm = None if qk_norm is None else qk_norm(self.dim_head)
        self.norm = None if norm is None else norm(inner)
        self.projection = nn.Linear(inner, emb_size, bias=projection_bias) if projection else None
        self.projection_dropout = nn.Dropout(projection_dropout)

    def make_projections(self, emb_size: int, inner: int, bias: bool) -> None:
        """Makes what leads from tokens to queries, keys and values."""
        self.qkv = nn.Linear(emb_size, 3 * inner, bias=bias)

    def heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, (b, h, n, d)."""
        queries, keys, values = rearrange(self.qkv(tokens), "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.num_heads)
        return queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The values of each head as its queries weigh them, (b, h, n, d)."""
        dropout = self.dropout if self.training else 0.0
        return attend(queries, keys, values, scale=self.scale, mask=mask, dropout=dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask``: boolean, broadcast to (b, h, n, n), True where a query (row) may attend to a key (column)."""
        queries, keys, values = self.heads(tokens)
        queries = queries if self.query_norm is None else self.query_norm(queries)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        out = rearrange(self.attend(queries, keys, values, mask), "b h n d -> b n (h d)")
        out = out if self.norm is None else self.norm(out)
        if self.projection is None:
            return out
        projected: Tensor = self.projection_dropout(self.projection(out))
        return projected

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dim_head={self.dim_head}, scale={self.scale:g}, dropout={self.dropout:g}"


Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


def hidden_problems(hidden: int, expansion: float, activation: str) -> list[str]:
    """What is wrong with the hidden layer of a feed-forward part."""
    problems = [] if hidden > 0 else [f"expansion={expansion} leaves no hidden layer"]
    if activation not in ACTIVATIONS:
        problems.append(f"activation={activation} must be one of {', '.join(ACTIVATIONS)}")
    return problems


class FeedForwardBlock(NamedSequential):
    """The transformer's MLP, token by token: (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        expansion: width of the hidden layer over emb_size.
        activation: gelu is exact, gelu_tanh its approximation by tanh, which is the default in JAX.
        bias: whether both layers have a bias.
        norm: normalisation of the hidden layer after its activation; none when not given.
        dropout: share dropped in training after the activation and after the output.
        output_dropout: share dropped after the output, where it is another one.
    """

    def __init__(
        self,
        emb_size: int = 768,
        *,
        expansion: float = 4.0,
        activation: Activation = "gelu",
        bias: bool = True,
        norm: Block | None = None,
        dropout: float = 0.0,
        output_dropout: float | None = None,
    ) -> None:
        hidden = round(expansion * emb_size)
        problems = [*share_problems({"dropout": dropout}), *hidden_problems(hidden, expansion, activation)]
        problems += [] if output_dropout is None else share_problems({"output_dropout": output_dropout})
        if problems:
            raise UserError(problems)
        super().__init__(
            expand=nn.Linear(emb_size, hidden, bias=bias),
            activation=ACTIVATIONS[activation](),
            dropout=nn.Dropout(dropout),
            norm=None if norm is None else norm(hidden),
            contract=nn.Linear(hidden, emb_size, bias=bias),
            output_dropout=nn.Dropout(dropout if output_dropout is None else output_dropout),
        )


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch (Touvron et al. 2021, "Going deeper with image transformers")."""

    def __init__(self, emb_size: int, init: float = 1e-5) -> None:
        super().__init__()
        self.init = init
        self.scale = nn.Parameter(torch.full((emb_size,), init))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale.to(tokens.dtype)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, leaves out the whole branch of an image with probability p.

    The branches that stay are scaled by 1 / (1 - p), so that the expected output does not change.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        problems = share_problems({"p": p})
        if problems:
            raise UserError(problems)
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return branch
        keep = torch.rand(len(branch), *[1] * (branch.ndim - 1), device=branch.device) >= self.p
        return branch * keep.to(branch.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:.3g}"


class ResidualAdd(nn.Module):
    """x + fn(x)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = tokens + self.fn(tokens)
        return out


class TransformerEncoderBlock(NamedSequential):
    """Pre-norm block: attention, then feed-forward, each as a residual. (b, n, e) -> (b, n, e).

    A part that says ``residual = False``, as CRATE's ISTA does, gives the new tokens themselves: nothing is added to
    what it gives, and none of it is scaled or left out.

    Args:
        emb_size: width of the tokens.
        attention: the attention, (b, n, e) -> (b, n, e).
        feed_forward: the feed-forward part, (b, n, e) -> (b, n, e).
        norm: makes a normalisation from emb_size.
        layer_scale: initial value of LayerScale on both branches; none when not given.
        drop_path: probability of leaving out a branch in training.
    """

    def __init__(
        self,
        emb_size: int = 768,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Block = LayerNorm,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        def half(name: str, part: nn.Module) -> nn.Module:
            if not getattr(part, "residual", True):
                return NamedSequential(norm=norm(emb_size), **{name: part})
            return ResidualAdd(
                NamedSequential(
                    norm=norm(emb_size),
                    **{name: part},
                    layer_scale=None if layer_scale is None else LayerScale(emb_size, layer_scale),
                    drop_path=DropPath(drop_path) if drop_path > 0.0 else None,
                )
            )

        super().__init__(
            attention=half("attention", attention),
            feed_forward=half("feed_forward", feed_forward),
        )


class TransformerEncoder(nn.Sequential):
    """Blocks one after the other: (b, n, e) -> (b, n, e).

    With ``activation_checkpointing`` only the tokens between blocks are kept for the backward pass, and the inside of a
    block is computed a second time, with the same random numbers (Chen et al. 2016, "Training deep nets with sublinear
    memory cost").
    """

    activation_checkpointing = False

    def forward(self, tokens: Tensor) -> Tensor:
        if not (self.activation_checkpointing and self.training and torch.is_grad_enabled()):
            return super().forward(tokens)  # type: ignore[no-any-return, no-untyped-call]
        for block in self:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return tokens
