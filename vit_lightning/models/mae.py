"""Masks, decoder and loss of a masked autoencoder, whose encoder is a ViT (He et al. 2022, arXiv 2111.06377).

Shape letters: b images, c channels, p tokens before the patches, n patches, k of them kept, e emb_size, d width of the
decoder, p1 and p2 height and width of a patch.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from vit_lightning.models.attention import MultiHeadAttention
from vit_lightning.models.blocks import TransformerEncoder, TransformerEncoderBlock
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.initialisation import INITIALISATIONS
from vit_lightning.models.layers import LayerNorm, NamedSequential
from vit_lightning.models.patches import LearnedTokens
from vit_lightning.models.positions import Grid, SinCos2dPositions
from vit_lightning.models.vit import ViT
from vit_lightning.random_keys import mix, uniform
from vit_lightning.sizes import Size

MASK_STREAM = 1_000
"""Stream of a key's numbers that masks are drawn from; augmentations use small ones."""


def draw_kept(keys: Tensor, patches: int, ratio: float) -> Tensor:
    """Returns the numbers of the patches of each image that are not masked, (b, k), drawn from its key (b,)."""
    order = uniform(mix(keys, MASK_STREAM), range(patches)).T.argsort(dim=1, stable=True)
    return order[:, : max(1, int(patches * (1.0 - ratio)))]


class MaskToken(LearnedTokens):
    """Kept patches at their places, a learned token at all others: (b, p + k, d), (b, k) -> (b, p + n, d)."""

    def __init__(self, emb_size: int, patches: int, prefix_tokens: int) -> None:
        super().__init__(emb_size)
        self.patches, self.prefix_tokens = patches, prefix_tokens

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        prefix, patches = tokens.tensor_split([self.prefix_tokens], dim=1)
        masked = repeat(self.token.to(tokens.dtype), "1 1 d -> b n d", b=tokens.shape[0], n=self.patches)
        index = repeat(kept, "b k -> b k d", d=tokens.shape[2])
        return torch.cat([prefix, masked.scatter(1, index, patches)], dim=1)


class MAEDecoder(NamedSequential):
    """Decoder of a masked autoencoder: an encoder's tokens (b, p + k, e) and kept (b, k) -> pixels (b, n, p1 p2 c).

    Args:
        vit: the encoder.
        emb_size: width of its tokens.
        depth: number of its blocks.
        num_heads: number of heads in each.

    Raises:
        UserError: they do not fit.
    """

    embedding: nn.Linear
    mask: MaskToken
    pixels: nn.Linear

    def __init__(self, vit: ViT, *, emb_size: int, depth: int, num_heads: int) -> None:
        (height, width), (p1, p2), prefix = vit.image_size, vit.patch_size, vit.prefix_tokens
        grid = (height // p1, width // p2)
        super().__init__(
            embedding=nn.Linear(vit.emb_size, emb_size),
            mask=MaskToken(emb_size, grid[0] * grid[1], prefix),
            positions=SinCos2dPositions(grid, emb_size, prefix, form="mae"),
            encoder=TransformerEncoder(
                *(
                    TransformerEncoderBlock(
                        emb_size, MultiHeadAttention(emb_size, num_heads), FeedForwardBlock(emb_size)
                    )
                    for _ in range(depth)
                )
            ),
            norm=LayerNorm(emb_size),
            pixels=nn.Linear(emb_size, p1 * p2 * vit.in_channels),
        )
        INITIALISATIONS["google"](self)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        decoded: Tensor = self[2:](self.mask(self.embedding(tokens), kept))
        return decoded[:, self.mask.prefix_tokens :]


def patch_pixels(images: Tensor, patch_size: Size) -> Tensor:
    """Returns the pixels of each patch, (b, c, H, W) -> (b, n, p1 p2 c)."""
    p1, p2 = patch_size
    return rearrange(images, "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=p1, p2=p2)


def image_of(pixels: Tensor, grid: Grid, patch_size: Size) -> Tensor:
    """Returns the images of the pixels of patches, (b, n, p1 p2 c) -> (b, c, H, W)."""
    (h, w), (p1, p2) = grid, patch_size
    return rearrange(pixels, "b (h w) (p1 p2 c) -> b c (h p1) (w p2)", h=h, w=w, p1=p1, p2=p2)


def moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each patch, (b, n, 1)."""
    variance, mean = torch.var_mean(pixels, dim=2, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def masked_error(predicted: Tensor, pixels: Tensor, kept: Tensor) -> Tensor:
    """Returns the mean squared error over the patches that are not kept, of predictions and pixels (b, n, p1 p2 c)."""
    errors = (predicted - pixels).square().mean(dim=2)
    return errors.scatter(1, kept, 0.0).sum() / (errors.numel() - kept.numel())
