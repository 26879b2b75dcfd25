"""Layers of a Vision Transformer around its attention and feed-forward parts: norms, LayerScale, DropPath, residual.

Shape letters: b images, n tokens, e emb_size.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from vit_lightning.errors import probabilities, refuse

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
    """Layer normalisation over the last dimension with the epsilon of the public ViT weights.

    Args:
        emb_size: width of the tokens.
        eps: added to the variance.
    """

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square over the last dimension (Zhang and Sennrich 2019), without a bias.

    Args:
        emb_size: width of the tokens.
        eps: added to the mean square.
    """

    def __init__(self, emb_size: int, *, eps: float = 1e-6) -> None:
        super().__init__(emb_size, eps=eps)


class BatchNorm(NamedSequential):
    """Batch normalisation of each channel over the images and tokens of a batch (Ioffe and Szegedy 2015).

    In evaluation it normalises by running means, (b, n, e) -> (b, n, e). Here to compare: what a token becomes depends
    on the other images of its batch.

    Args:
        emb_size: width of the tokens.
        eps: added to the variance.
        momentum: weight of a batch in the running means.
    """

    def __init__(self, emb_size: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(
            to_channels=Rearrange("b ... e -> b e ..."),
            channels=nn.BatchNorm1d(emb_size, eps=eps, momentum=momentum),
            to_tokens=Rearrange("b e ... -> b ... e"),
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
