"""The parts of a Vision Transformer, as in the einops tutorial: Sequentials whose named children are the figure.

Shape letters: b images, c channels, n tokens, e emb_size, h heads, d head dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError

Size = tuple[int, int]
"""Height and width."""

Block = Callable[[int], nn.Module]
"""Makes a block from emb_size."""


def pair(size: int | Size) -> Size:
    """Height and width of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


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


class ConvProjection(NamedSequential):
    """Patches to tokens as a strided convolution: (b, c, H, W) -> (b, n, e)."""

    def __init__(self, in_channels: int, patch_size: Size, emb_size: int) -> None:
        super().__init__(
            conv=nn.Conv2d(in_channels, emb_size, kernel_size=patch_size, stride=patch_size),
            tokens=Rearrange("b e h w -> b (h w) e"),
        )


class LinearProjection(NamedSequential):
    """Patches to tokens as one matrix: (b, c, H, W) -> (b, n, e).

    A patch is flattened as (c p1 p2), so the matrix is ConvProjection's kernel with its last three axes flattened.
    """

    def __init__(self, in_channels: int, patch_size: Size, emb_size: int) -> None:
        p1, p2 = patch_size
        super().__init__(
            patches=Rearrange("b c (h p1) (w p2) -> b (h w) (c p1 p2)", p1=p1, p2=p2),
            linear=nn.Linear(in_channels * p1 * p2, emb_size),
        )


class ClassToken(nn.Module):
    """Puts one learned token before the patches: (b, n, e) -> (b, 1 + n, e)."""

    def __init__(self, emb_size: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        token = repeat(self.token, "1 1 e -> b 1 e", b=len(tokens))
        return torch.cat([token.to(tokens.dtype), tokens], dim=1)


class PatchEmbedding(NamedSequential):
    """Image to tokens: projection of the patches, class token, positions, dropout. (b, c, H, W) -> (b, [1 +] n, e)."""

    def __init__(
        self, *, projection: nn.Module, class_token: nn.Module | None, positions: nn.Module | None, dropout: float = 0.0
    ) -> None:
        super().__init__(
            projection=projection, class_token=class_token, positions=positions, dropout=nn.Dropout(dropout)
        )


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
        dim_head = emb_size // num_heads if dim_head is None else dim_head
        self.num_heads = num_heads
        self.scale = dim_head**-0.5 if scale is None else scale
        self.dropout = dropout
        self.qkv = nn.Linear(emb_size, 3 * num_heads * dim_head, bias=qkv_bias)
        self.projection = nn.Linear(num_heads * dim_head, emb_size)
        self.projection_dropout = nn.Dropout(projection_dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask``: boolean, broadcast to (b, h, n, n), True where a query (row) may attend to a key (column)."""
        queries, keys, values = rearrange(self.qkv(tokens), "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.num_heads)
        dropout = self.dropout if self.training else 0.0
        out = attend(queries, keys, values, scale=self.scale, mask=mask, dropout=dropout)
        projected: Tensor = self.projection_dropout(self.projection(rearrange(out, "b h n d -> b n (h d)")))
        return projected


class FeedForwardBlock(NamedSequential):
    """The transformer's MLP, token by token: (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        expansion: width of the hidden layer over emb_size.
        dropout: share dropped in training after the activation and after the output.
    """

    def __init__(self, emb_size: int = 768, *, expansion: float = 4.0, dropout: float = 0.0) -> None:
        hidden = round(expansion * emb_size)
        problems = share_problems({"dropout": dropout})
        if hidden < 1:
            problems.append(f"expansion={expansion} leaves no hidden layer")
        if problems:
            raise UserError(problems)
        super().__init__(
            expand=nn.Linear(emb_size, hidden),
            activation=nn.GELU(),
            dropout=nn.Dropout(dropout),
            contract=nn.Linear(hidden, emb_size),
            output_dropout=nn.Dropout(dropout),
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
        def scale() -> nn.Module | None:
            return None if layer_scale is None else LayerScale(emb_size, layer_scale)

        def drop() -> nn.Module | None:
            return DropPath(drop_path) if drop_path > 0.0 else None

        super().__init__(
            attention=ResidualAdd(
                NamedSequential(norm=norm(emb_size), attention=attention, layer_scale=scale(), drop_path=drop())
            ),
            feed_forward=ResidualAdd(
                NamedSequential(norm=norm(emb_size), feed_forward=feed_forward, layer_scale=scale(), drop_path=drop())
            ),
        )


class TransformerEncoder(nn.Sequential):
    """Blocks one after the other: (b, n, e) -> (b, n, e)."""


class ClassTokenPool(nn.Module):
    """The class token, which is token 0: (b, 1 + n, e) -> (b, e)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]


class MeanPool(nn.Module):
    """Mean over the patches; ``prefix_tokens`` before them (a class token) do not count: (b, p + n, e) -> (b, e)."""

    def __init__(self, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.prefix_tokens :].mean(dim=1)

    def extra_repr(self) -> str:
        return f"prefix_tokens={self.prefix_tokens}"


class ClassificationHead(NamedSequential):
    """Tokens to logits: pool, an optional representation layer with tanh, a linear layer. (b, n, e) -> (b, classes).

    Args:
        pool: tokens to one vector, (b, n, e) -> (b, e).
        emb_size: width of the tokens.
        num_classes: number of classes; 0 leaves the linear layer out, so that features come out.
        representation_size: width of a layer with tanh before the classifier ("pre-logits"); none when not given.
    """

    def __init__(
        self, *, pool: nn.Module, emb_size: int, num_classes: int, representation_size: int | None = None
    ) -> None:
        representation = None
        if representation_size is not None:
            representation = NamedSequential(linear=nn.Linear(emb_size, representation_size), tanh=nn.Tanh())
        features = emb_size if representation_size is None else representation_size
        super().__init__(
            pool=pool,
            representation=representation,
            linear=nn.Linear(features, num_classes) if num_classes > 0 else None,
        )


Pool = Literal["cls", "mean"]
