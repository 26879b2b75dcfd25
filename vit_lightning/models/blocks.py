"""The encoder of a Vision Transformer, as in the einops tutorial: Sequentials whose named children are the figure.

Shape letters: b images, n tokens, e emb_size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_lightning.errors import UserError
from vit_lightning.limits import probabilities, refuse

Layer = Callable[[int], nn.Module]
"""Makes a norm or a feed-forward part from the width of the tokens."""


class NamedSequential(nn.Sequential):
    """``nn.Sequential`` with names; a child that is None is left out, so that absent parts renumber nothing."""

    def __init__(self, **children: nn.Module | None) -> None:
        super().__init__(OrderedDict((name, child) for name, child in children.items() if child is not None))

    def __getitem__(self, index: int | slice) -> nn.Module:  # type: ignore[override]
        """Returns a child, or for a slice a plain Sequential (torch would call our constructor, which differs)."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        child: nn.Module = super().__getitem__(index)
        return child


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimension with the epsilon of the public ViT weights."""

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square over the last dimension (Zhang and Sennrich 2019), without a bias."""

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch (Touvron et al. 2021, "Going deeper with image transformers")."""

    def __init__(self, emb_size: int, init: float = 1e-5) -> None:
        super().__init__()
        self.init = init
        self.scale = nn.Parameter(torch.full((emb_size,), init))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale.to(tokens.dtype)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, drops the whole branch of an image with probability p.

    The branches that stay are scaled by 1 / (1 - p), so that the expected output does not change.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        refuse(probabilities(p=p))
        self.p = p
        self.rate: Tensor | None = None
        """p as a tensor, with which compiled blocks of different p have the same code."""

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or (self.rate is None and self.p == 0.0):
            return branch
        p = self.p if self.rate is None else self.rate
        keep = torch.rand(len(branch), *[1] * (branch.ndim - 1), device=branch.device) >= p
        return branch * keep.to(branch.dtype) / (1.0 - p)

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


class Branch(NamedSequential):
    """The inside of a residual: norm, part, LayerScale, DropPath. (b, n, e) -> (b, n, e).

    Args:
        name: name of the part among the children, and so in checkpoints.
        part: attention or feed-forward part.
        emb_size: width of the tokens.
        norm: makes the norm before the part.
        layer_scale: initial value of LayerScale; none when not given.
        drop_path: probability of dropping the branch in training.
    """

    def __init__(
        self, name: str, part: nn.Module, *, emb_size: int, norm: Layer, layer_scale: float | None, drop_path: float
    ) -> None:
        super().__init__(
            norm=norm(emb_size),
            **{name: part},
            layer_scale=None if layer_scale is None else LayerScale(emb_size, layer_scale),
            drop_path=DropPath(drop_path) if drop_path > 0.0 else None,
        )


class TransformerEncoderBlock(NamedSequential):
    """Pre-norm block: (b, n, e) -> (b, n, e).

    x = x + attention(norm(x))
    x = x + feed_forward(norm(x))

    A block of your own has the same six arguments in the same order (``model.block.class_path`` in a config).

    Args:
        emb_size: width of the tokens.
        attention: the attention, (b, n, e) -> (b, n, e).
        feed_forward: the feed-forward part, (b, n, e) -> (b, n, e).
        norm: makes a norm from emb_size.
        layer_scale: initial value of LayerScale on both branches; none when not given.
        drop_path: probability of dropping a branch in training.

    Raises:
        UserError: the feed-forward part, such as ISTA, must have no residual and names the block that it needs.
    """

    def __init__(
        self,
        emb_size: int,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Layer = LayerNorm,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        if needed := getattr(feed_forward, "needs_block", None):
            raise UserError(f"feed_forward={type(feed_forward).__name__} needs block={needed}")
        branch = partial(Branch, emb_size=emb_size, norm=norm, layer_scale=layer_scale, drop_path=drop_path)
        super().__init__(
            attention=ResidualAdd(branch("attention", attention)),
            feed_forward=ResidualAdd(branch("feed_forward", feed_forward)),
        )


EncoderBlock = Callable[[int, nn.Module, nn.Module, Layer, float | None, float], nn.Module]
"""Makes a block from emb_size, attention, feed-forward part, norm, layer_scale and drop_path."""


class TransformerEncoder(nn.Sequential):
    """Blocks one after the other: (b, n, e) -> (b, n, e).

    With ``activation_checkpointing`` only the tokens between blocks are kept for the backward pass, and the inside of a
    block is computed a second time, with the same random numbers (Chen et al. 2016, "Training deep nets with sublinear
    memory cost").
    """

    activation_checkpointing = False

    def call(self, block: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Calls a block, where activation checkpointing is on so that its inside is computed a second time."""
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        out: Tensor = checkpoint(block, tokens, use_reentrant=False) if recompute else block(tokens)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self:
            tokens = self.call(block, tokens)
        return tokens


def drop_path_rates(last: float, depth: int, schedule: str = "linear") -> list[float]:
    """Returns each block's probability of dropping a branch: growing from 0 to ``last``, or constant."""
    first = 0.0 if schedule == "linear" else last
    rates: list[float] = torch.linspace(first, last, depth, device="cpu", dtype=torch.float32).tolist()
    return rates
