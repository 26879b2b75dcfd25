"""All that is drawn of some images in one forward pass, reduced layer by layer to what is kept."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit_lightning.inspect.maps import attention_distance, relevance, roll
from vit_lightning.inspect.tokens import colours, crate_measures, effective_rank, patch_filters, position_similarity
from vit_lightning.inspect.watch import (
    Attention,
    Grid,
    grid_of,
    names_before,
    reader,
    readout,
    watch,
    without_attention,
)

SAMPLES = 1024
"""Most tokens of all images whose layers are compared."""

ROWS = 256
"""Most rows of an image's attention that are there at once, where only what the head reads is drawn."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Maps and measures of a network for b images, on the CPU; all but ``logits`` in float32.

    Where attention or blocks are not known, l is 0.
    """

    grid: Grid
    reader: str
    """What the head reads, in words."""
    before: list[str]
    """Names of the tokens before the patches, p of them."""
    logits: Tensor
    """Output of the network."""
    attention: Tensor
    """Attention from what the head reads (``readout``) to each patch, by layer and head, (b, l, h, n)."""
    without_maps: str
    """Why attention, rollout, relevance and distance are left out; empty where they are not."""
    pool: Tensor | None
    """Attention of the learned query of an AttentionPool to each patch, (b, h, n)."""
    rollout: Tensor
    """Rollout from what the head reads to each patch, up to each layer, (b, l, n)."""
    relevance: Tensor | None
    """Relevance of each patch for the predicted class, (b, n); None without classes or attention."""
    distance: Tensor
    """Mean attention distance in pixels, (l, h)."""
    norms: Tensor
    """Norm of each token after each block, (b, l, p + n)."""
    colours: Tensor
    """Principal components of the patches after each block as colours from 0 to 1, (b, l, n, 3)."""
    rank: Tensor
    """Effective rank of the tokens after each block, a mean over the first four images, (l,)."""
    samples: list[Tensor]
    """The same patches of the images after each block, (N, e) with N of at most ``SAMPLES``."""
    positions: Tensor | None
    """Similarity of positions, (n, rows, columns)."""
    filters: Tensor | None
    """Principal components of the patch filters, (count, c, p1, p2)."""
    crate: tuple[Tensor, Tensor] | None
    """Coding rate and share of entries that are not 0, by layer, (l,) each."""


def survey(network: nn.Module, images: Tensor) -> Survey:
    """Returns maps and measures of images (b, c, H, W) as the network takes them; the network is not changed.

    Of each layer only what is kept outlives it, so that 8 images at 384 add less to a ViT-L/16 than its weights take.

    Raises:
        UserError: the arrangement of its tokens is not known.
    """
    seen = _Layers(network, images)
    with torch.no_grad(), watch(network, seen.see_attention, seen.see_block):
        logits = network(images)
    without_maps = seen.without_maps or ("" if seen.maps else str(without_attention(network)))
    has_classes = isinstance(logits, Tensor) and logits.ndim == 2 and getattr(network, "num_classes", None) != 0
    patches = slice(seen.grid.prefix, None)
    positions, filters, crate = position_similarity(network), patch_filters(network), crate_measures(network, images)
    of_class = None
    if has_classes and not without_maps:
        of_class = relevance(network, images, logits.argmax(dim=1))[:, patches].float().cpu()
    none = torch.empty(len(images), 0, len(seen.share))
    return Survey(
        grid=seen.grid,
        reader=reader(network),
        before=names_before(network),
        logits=logits.detach().cpu(),
        attention=(none[:, :, None] if without_maps else torch.stack(seen.maps, dim=1))[..., patches],
        without_maps=without_maps,
        pool=seen.pool,
        rollout=(none if without_maps else torch.stack(seen.rolled, dim=1))[..., patches],
        relevance=of_class,
        distance=torch.empty(0, 1) if without_maps else torch.stack(seen.distances),
        norms=torch.stack(seen.norms, dim=1) if seen.norms else none,
        colours=torch.stack(seen.colours, dim=1) if seen.colours else torch.empty(len(images), 0, 0, 3),
        rank=torch.stack(seen.ranks) if seen.ranks else torch.empty(0),
        samples=seen.samples,
        positions=None if positions is None else positions.float().cpu(),
        filters=None if filters is None else filters.float().cpu(),
        crate=None if crate is None else (crate[0].float().cpu(), crate[1].float().cpu()),
    )


@torch.no_grad()
def glance(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean attention of the heads to each patch, (b, l, n), and the effective rank of the tokens, (l,).

    They are what a training logs of a few images, as in ``Survey``.

    Raises:
        UserError: the network has no attention, or the arrangement of its tokens is not known.
    """
    share, maps, ranks = readout(network).to(images.device, torch.float32), list[Tensor](), list[Tensor]()

    def see_attention(found: Attention) -> None:
        if found.queries.shape[2] == len(share):
            maps.append(torch.stack([_read(found, share, number) for number in range(len(images))]))

    with watch(network, see_attention, lambda number, tokens: ranks.append(effective_rank(tokens).mean())):
        network(images)
    if not maps:
        raise without_attention(network)
    return torch.stack(maps, dim=1)[..., grid_of(network).prefix :].cpu(), torch.stack(ranks).float().cpu()


def _read(found: Attention, share: Tensor, image: int) -> Tensor:
    """Returns the mean attention of the heads from what the head reads, (k,): only of these rows, a few at a time."""
    parts = torch.split(share.nonzero()[:, 0], ROWS)
    return torch.stack([share[rows] @ found.weights(image, rows).float().mean(dim=0) for rows in parts]).sum(dim=0)


class _Layers:
    """Notes of a forward pass, one for each layer in each list."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self.grid, self.without_maps = grid_of(network), ""
        self.share = readout(network).to(images.device, torch.float32)
        self.patch_size = images.shape[2] / self.grid.rows, images.shape[3] / self.grid.columns
        self.through = torch.eye(len(self.share), device=images.device).repeat(len(images), 1, 1)
        self.maps: list[Tensor] = []
        self.rolled: list[Tensor] = []
        self.distances: list[Tensor] = []
        self.pool: Tensor | None = None
        self.norms: list[Tensor] = []
        self.colours: list[Tensor] = []
        self.ranks: list[Tensor] = []
        self.samples: list[Tensor] = []

    def see_attention(self, found: Attention) -> None:
        """Notes the maps of a layer, or those of a pool."""
        if found.queries.shape[2] == 1 < found.keys.shape[2]:
            self.pool = found.weights()[:, :, 0, -self.grid.rows * self.grid.columns :].float().cpu()
            return
        if found.keys.shape[2] != len(self.share):
            self.without_maps = f"its layers attend to {found.keys.shape[2]} of {len(self.share)} tokens"
            return
        maps, distances = [], []
        for number, before in enumerate(self.through):  # one image at a time: all heads at 384 have 20 MB
            weights = found.weights(number).float()
            maps.append(torch.einsum("q,hqk->hk", self.share, weights))
            distances.append(attention_distance(weights, self.grid, self.patch_size))
            self.through[number] = roll(weights[None], before[None])[0]
        self.maps.append(torch.stack(maps).cpu())
        self.distances.append(torch.stack(distances).mean(dim=0).cpu())
        self.rolled.append((self.share @ self.through).cpu())

    def see_block(self, number: int, tokens: Tensor) -> None:
        """Notes measures of the tokens (b, p + n, e) after a block."""
        tokens = tokens.float()
        patches = tokens[:, self.grid.prefix :]
        every = -(-patches.shape[0] * patches.shape[1] // SAMPLES)
        self.norms.append(tokens.norm(dim=-1).cpu())
        self.colours.append(colours(patches).cpu())
        self.ranks.append(effective_rank(tokens[:4]).mean().float().cpu())
        self.samples.append(patches.flatten(end_dim=1)[::every].cpu())
