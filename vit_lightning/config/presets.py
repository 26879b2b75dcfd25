"""Presets as they were published: patch sizes, sources, parameters and multiply-adds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from vit_lightning.config.networks import empty_network
from vit_lightning.models.crate import ISTA, MSSA, CrateBlock
from vit_lightning.models.layers import LayerNorm
from vit_lightning.models.patches import LinearProjection
from vit_lightning.models.presets import PRESETS
from vit_lightning.models.vit import ViT
from vit_lightning.training.resources import forward_flops

USUAL = {
    "Ti": ((16,), "Touvron et al. 2021, DeiT (arXiv 2012.12877), table 1"),
    "S": ((16,), "Touvron et al. 2021, DeiT (arXiv 2012.12877), table 1"),
    "B": ((16, 32), "Dosovitskiy et al. 2021, ViT (arXiv 2010.11929), table 1"),
    "L": ((16, 32), "Dosovitskiy et al. 2021, ViT (arXiv 2010.11929), table 1"),
    "H": ((14,), "Dosovitskiy et al. 2021, ViT (arXiv 2010.11929), table 1"),
    "CRATE": ((16,), "Yu et al. 2023, CRATE (arXiv 2306.01129), table 1"),
}
"""Patch sizes of published models, and their sources."""

CRATE = partial(
    ViT,
    block=CrateBlock,
    attention=MSSA,
    feed_forward=ISTA,
    patch_projection=partial(LinearProjection, patch_norm=LayerNorm, norm=LayerNorm),
    final_norm="after_pool",
)
"""CRATE as its authors have it."""


class Published(NamedTuple):
    """One preset."""

    name: str
    emb_size: int
    depth: int
    num_heads: int
    parameters: int
    flops: int
    """Floating-point operations of a forward pass of one image; a multiply-add counts as two."""
    source: str


def published(image_size: int, num_classes: int) -> Iterator[Published]:
    """Yields the presets whose patches divide an image size."""
    for size, (width, depth, heads) in PRESETS.items():
        patches, source = USUAL[size.partition("-")[0]]
        for name in (f"{size}/{patch}" for patch in patches if image_size % patch == 0):
            make = partial(CRATE if size.startswith("CRATE") else ViT, name, image_size=image_size)
            whole = empty_network(partial(make, num_classes=num_classes))
            shallow = (empty_network(partial(make, num_classes=num_classes, depth=n)) for n in (1, 2))
            one, two = (forward_flops(network, (3, image_size, image_size)) or 0 for network in shallow)
            flops = one + (depth - 1) * (two - one)  # all blocks are alike
            parameters = sum(weight.numel() for weight in whole.parameters())
            yield Published(name, width, depth, heads, parameters, flops, source)
