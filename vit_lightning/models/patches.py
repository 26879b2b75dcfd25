"""From images to tokens: projections of patches, learned tokens before them, and the embedding put together.

Shape letters: b images, c channels, n patches, e emb_size, p1 and p2 height and width of a patch.
"""

from __future__ import annotations

import torch
from einops import repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.blocks import Block, NamedSequential
from vit_lightning.sizes import Size


class ConvProjection(NamedSequential):
    """Patches to tokens as a strided convolution: (b, c, H, W) -> (b, n, e).

    Args:
        bias: whether the convolution has a bias.
        norm: normalisation of the tokens; none when not given.
    """

    def __init__(
        self, in_channels: int, patch_size: Size, emb_size: int, *, bias: bool = True, norm: Block | None = None
    ) -> None:
        super().__init__(
            conv=nn.Conv2d(in_channels, emb_size, kernel_size=patch_size, stride=patch_size, bias=bias),
            tokens=Rearrange("b e h w -> b (h w) e"),
            norm=None if norm is None else norm(emb_size),
        )


class LinearProjection(NamedSequential):
    """Patches to tokens as one matrix: (b, c, H, W) -> (b, n, e).

    A patch is flattened as (c p1 p2), so the matrix is ConvProjection's kernel with its last three axes flattened.

    Args:
        bias: whether the linear layer has a bias.
        patch_norm: normalisation of the pixels of a patch before the linear layer; none when not given.
        norm: normalisation of the tokens; none when not given.
    """

    def __init__(
        self,
        in_channels: int,
        patch_size: Size,
        emb_size: int,
        *,
        bias: bool = True,
        patch_norm: Block | None = None,
        norm: Block | None = None,
    ) -> None:
        p1, p2 = patch_size
        pixels = in_channels * p1 * p2
        super().__init__(
            patches=Rearrange("b c (h p1) (w p2) -> b (h w) (c p1 p2)", p1=p1, p2=p2),
            patch_norm=None if patch_norm is None else patch_norm(pixels),
            linear=nn.Linear(pixels, emb_size, bias=bias),
            norm=None if norm is None else norm(emb_size),
        )


class LearnedTokens(nn.Module):
    """Puts ``count`` learned tokens before the others: (b, n, e) -> (b, count + n, e)."""

    def __init__(self, emb_size: int, count: int = 1) -> None:
        super().__init__()
        if count < 1:
            raise UserError(f"count={count} must be at least 1")
        self.token = nn.Parameter(torch.zeros(1, count, emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        learned = repeat(self.token, "1 count e -> b count e", b=len(tokens))
        return torch.cat([learned.to(tokens.dtype), tokens], dim=1)


class ClassToken(LearnedTokens):
    """The token that a classifier may read (Dosovitskiy et al. 2021, equation 1): (b, n, e) -> (b, 1 + n, e)."""


class DistillationToken(LearnedTokens):
    """A second such token, whose head learns from a teacher (Touvron et al. 2021, DeiT): (b, n, e) -> (b, 1 + n, e)."""


class RegisterTokens(LearnedTokens):
    """Tokens that nobody reads, room for the network itself (Darcet et al. 2024, "Vision transformers need registers").

    (b, n, e) -> (b, count + n, e).
    """


class PatchDropout(nn.Module):
    """In training, leaves out a share p of an image's patches, others for each image (Li et al. 2023, FLIP).

    The ``prefix_tokens`` before them stay: (b, p + n, e) -> (b, p + k, e) with k = max(1, floor(n (1 - p))).
    """

    def __init__(self, p: float, prefix_tokens: int) -> None:
        super().__init__()
        self.p, self.prefix_tokens = p, prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            return tokens
        prefix, patches = tokens.tensor_split([self.prefix_tokens], dim=1)
        count = patches.shape[1]
        kept = max(1, int(count * (1.0 - self.p)))
        order = torch.randn(len(patches), count, device=patches.device).argsort(dim=1)[:, :kept]
        index = repeat(order, "b k -> b k e", e=patches.shape[2])
        return torch.cat([prefix, patches.gather(1, index)], dim=1)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, prefix_tokens={self.prefix_tokens}"


class PatchEmbedding(NamedSequential):
    """Image to tokens: projection of patches, tokens before them, positions, dropouts, normalisation.

    (b, c, H, W) -> (b, p + n, e); the p tokens before the patches are class token, distillation token, registers.
    """

    def __init__(
        self,
        *,
        projection: nn.Module,
        class_token: nn.Module | None,
        positions: nn.Module | None,
        dropout: float = 0.0,
        distillation_token: nn.Module | None = None,
        register_tokens: nn.Module | None = None,
        patch_dropout: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(
            projection=projection,
            register_tokens=register_tokens,
            distillation_token=distillation_token,
            class_token=class_token,
            positions=positions,
            dropout=nn.Dropout(dropout),
            patch_dropout=patch_dropout,
            norm=norm,
        )
