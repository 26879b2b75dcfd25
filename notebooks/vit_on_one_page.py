"""The whole ViT on one page: the default of ``vit_lightning.ViT``, in torch and einops alone (Dosovitskiy et al. 2021).

Weights have the same names, so that each takes those of the other; ``tests/models/test_one_page.py`` holds both equal.
Shapes: b images, c channels, h x w patches of p x p pixels, n = h w tokens, e emb_size.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from einops import pack, rearrange, repeat
from torch import Tensor, nn


def sequential(**layers: nn.Module) -> nn.Sequential:
    """Returns layers one after the other; their names are those of the weights."""
    return nn.Sequential(OrderedDict(layers))


class ResidualAdd(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.fn(tokens)


class Token(nn.Module):
    """Puts a learned token before the patches: (b, n, e) -> (b, 1 + n, e)."""

    def __init__(self, emb_size: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        token = repeat(self.token, "1 1 e -> b 1 e", b=len(tokens))
        return pack([token, tokens], "b * e")[0]


class Positions(nn.Module):
    """Adds a learned vector to each token: (b, n, e) -> (b, n, e)."""

    def __init__(self, count: int, emb_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(1, count, emb_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table


class Projection(nn.Module):
    """Makes a token of each patch: (b, c, h p, w p) -> (b, n, e)."""

    def __init__(self, patch_size: int, emb_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, emb_size, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.conv(images), "b e h w -> b (h w) e")


class Attention(nn.Module):
    """Lets each token take from all others what its query asks for: (b, n, e) -> (b, n, e)."""

    def __init__(self, emb_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.projection = nn.Linear(emb_size, 3 * emb_size), nn.Linear(emb_size, emb_size)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = rearrange(self.qkv(tokens), "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.num_heads)
        heads = F.scaled_dot_product_attention(query, key, value)  # softmax(query key^T / sqrt(d)) value
        return self.projection(rearrange(heads, "b h n d -> b n (h d)"))


def feed_forward(emb_size: int) -> nn.Sequential:
    return sequential(
        expand=nn.Linear(emb_size, 4 * emb_size), activation=nn.GELU(), contract=nn.Linear(4 * emb_size, emb_size)
    )


def block(emb_size: int, num_heads: int) -> nn.Sequential:
    """Returns x + attention(norm(x)), then x + feed_forward(norm(x))."""
    norms = [nn.LayerNorm(emb_size, eps=1e-6) for _ in range(2)]
    return sequential(
        attention=ResidualAdd(sequential(norm=norms[0], attention=Attention(emb_size, num_heads))),
        feed_forward=ResidualAdd(sequential(norm=norms[1], feed_forward=feed_forward(emb_size))),
    )


class ViT(nn.Module):
    """Classifies images: (b, 3, image_size, image_size) -> logits (b, num_classes)."""

    def __init__(
        self, image_size: int, patch_size: int, emb_size: int, depth: int, num_heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch_embedding = sequential(
            projection=Projection(patch_size, emb_size),
            class_token=Token(emb_size),
            positions=Positions(1 + (image_size // patch_size) ** 2, emb_size),
        )
        self.encoder = nn.Sequential(*(block(emb_size, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(emb_size, eps=1e-6)
        self.head = sequential(linear=nn.Linear(emb_size, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.encoder(self.patch_embedding(images)))
        return self.head(tokens[:, 0])  # of the class token
