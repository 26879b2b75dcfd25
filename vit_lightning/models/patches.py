"""From images to tokens: projections of patches, learned tokens before them, and the whole embedding.

Shape letters: b images, c channels, n patches, e emb_size, p1 and p2 height and width of a patch.
"""

from collections.abc import Callable

import torch
from einops import repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.layers import Layer, NamedSequential
from vit_lightning.sizes import Size


class ConvProjection(NamedSequential):
    """Patches to tokens by a strided convolution: (b, c, H, W) -> (b, n, e).

    Args:
        bias: whether the convolution has a bias.
        norm: norm of the tokens; none when not given.
    """

    def __init__(
        self, in_channels: int, patch_size: Size, emb_size: int, *, bias: bool = True, norm: Layer | None = None
    ) -> None:
        super().__init__(
            conv=nn.Conv2d(in_channels, emb_size, kernel_size=patch_size, stride=patch_size, bias=bias),
            tokens=Rearrange("b e h w -> b (h w) e"),
            norm=None if norm is None else norm(emb_size),
        )


class LinearProjection(NamedSequential):
    """Patches to tokens by a linear layer: (b, c, H, W) -> (b, n, e).

    A patch is flattened as (c p1 p2), so the weight is ConvProjection's kernel with its last three axes flattened.

    Args:
        bias: whether the linear layer has a bias.
        patch_norm: norm of the pixels of a patch before the linear layer; none when not given.
        norm: norm of the tokens; none when not given.
    """

    def __init__(
        self,
        in_channels: int,
        patch_size: Size,
        emb_size: int,
        *,
        bias: bool = True,
        patch_norm: Layer | None = None,
        norm: Layer | None = None,
    ) -> None:
        p1, p2 = patch_size
        pixels = in_channels * p1 * p2
        super().__init__(
            patches=Rearrange("b c (h p1) (w p2) -> b (h w) (c p1 p2)", p1=p1, p2=p2),
            patch_norm=None if patch_norm is None else patch_norm(pixels),
            linear=nn.Linear(pixels, emb_size, bias=bias),
            norm=None if norm is None else norm(emb_size),
        )


class ConvTokenizer(NamedSequential):
    """Patches to tokens by 3 x 3 convolutions, each with ReLU and max pooling (Hassani et al. 2021, CCT, section 3.3).

    (b, c, H, W) -> (b, n, e). A layer halves the image: patch_size, the distance between two tokens, is 2 for one layer
    and 4 for two.

    Args:
        hidden: channels between two layers.
    """

    def __init__(self, in_channels: int, patch_size: Size, emb_size: int, *, hidden: int = 64) -> None:
        layers = patch_size[0].bit_length() - 1
        if layers < 1 or patch_size != (2**layers, 2**layers):
            raise UserError(f"patch_size={patch_size[0]}x{patch_size[1]}: ConvTokenizer needs 2, 4, 8 or so, squares")
        channels = [in_channels, *[hidden] * (layers - 1), emb_size]
        super().__init__(
            layers=nn.Sequential(*map(self.layer, channels, channels[1:])), tokens=Rearrange("b e h w -> b (h w) e")
        )

    @staticmethod
    def layer(channels: int, width: int) -> NamedSequential:
        """Makes a layer, (b, channels, H, W) -> (b, width, H / 2, W / 2)."""
        return NamedSequential(
            conv=nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False),
            activation=nn.ReLU(),
            pool=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )


PatchProjection = Callable[[int, Size, int], nn.Module]
"""Makes a projection from in_channels, patch_size and emb_size."""

PROJECTIONS: dict[str, PatchProjection] = {"conv": ConvProjection, "linear": LinearProjection}


class LearnedTokens(nn.Module):
    """Learned tokens put before the others: (b, n, e) -> (b, count + n, e)."""

    def __init__(self, emb_size: int, count: int = 1) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, count, emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        learned = repeat(self.token, "1 count e -> b count e", b=tokens.shape[0])
        return torch.cat([learned.to(tokens.dtype), tokens], dim=1)


class ClassToken(LearnedTokens):
    """The class token (Dosovitskiy et al. 2021, equation 1): (b, n, e) -> (b, 1 + n, e)."""


class DistillationToken(LearnedTokens):
    """A token whose head learns from a teacher (Touvron et al. 2021, DeiT): (b, n, e) -> (b, 1 + n, e)."""


class RegisterTokens(LearnedTokens):
    """Tokens to compute with (Darcet et al. 2024, "Vision transformers need registers"): -> (b, count + n, e)."""


def keep_patches(tokens: Tensor, kept: Tensor, prefix_tokens: int) -> Tensor:
    """Returns the tokens before the patches and behind them the patches of numbers kept (b, k), (b, p + k, e)."""
    prefix, patches = tokens.tensor_split([prefix_tokens], dim=1)
    return torch.cat([prefix, patches.gather(1, repeat(kept, "b k -> b k e", e=patches.shape[2]))], dim=1)


class PatchDropout(nn.Module):
    """Drops a fraction p of the patches in training, drawn for each image (Li et al. 2023, FLIP).

    The tokens before the patches stay: (b, prefix_tokens + n, e) -> (b, prefix_tokens + max(1, floor(n (1 - p))), e),
    in floating point: of 10 patches p=0.8 keeps 1, as in timm.
    """

    def __init__(self, p: float, prefix_tokens: int) -> None:
        super().__init__()
        self.p, self.prefix_tokens = p, prefix_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training:
            return tokens
        count = tokens.shape[1] - self.prefix_tokens
        order = torch.randn(tokens.shape[0], count, device=tokens.device).argsort(dim=1)
        return keep_patches(tokens, order[:, : max(1, int(count * (1.0 - self.p)))], self.prefix_tokens)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, prefix_tokens={self.prefix_tokens}"


class PatchEmbedding(NamedSequential):
    """Image to tokens: projection of patches, tokens before them, positions, dropouts, norm.

    (b, c, H, W) -> (b, p + n, e); the p tokens before the patches are class token, distillation token, registers.
    """

    image_size: Size | None = None
    """Height and width of the images; None where any is taken."""
    float32_residual = False

    def forward(self, images: Tensor) -> Tensor:
        """Raises UserError for images of another size than that of the positions."""
        if self.image_size is not None and tuple(images.shape[2:]) != self.image_size:
            given, fitting = ("x".join(map(str, size)) for size in (images.shape[2:], self.image_size))
            way_out = "resize them, or make the network for them (load has image_size)"
            raise UserError(f"images of {given} pixels, but the positions are those of {fitting}: {way_out}")
        tokens: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        if self.float32_residual and not tokens.is_meta and torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return tokens
