"""Measures of tokens, positions and patch filters."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.inspect.watch import find_blocks, grid_of, watch
from vit_lightning.models.crate import ISTA, MSSA, coding_rate
from vit_lightning.models.vit import ViT

OUTLIER = 3.0
"""Norm of an outlier over the median of the patches of its image."""


def colours(tokens: Tensor) -> Tensor:
    """Returns the first three principal components of tokens (..., e) as colours from 0 to 1, (..., 3).

    They are of all tokens together, so that colours are the same in all images; 1 % at each end of a component is cut
    (Oquab et al. 2023, DINOv2, figure 1).
    """
    rows = tokens.flatten(end_dim=-2).float().cpu()  # whose random numbers are seeded below
    rows = rows - rows.mean(dim=0)
    with torch.random.fork_rng(devices=[]):  # a whole decomposition takes longer than the forward pass
        torch.default_generator.manual_seed(0)
        found = rows @ torch.svd_lowrank(rows, q=min(8, *rows.shape), niter=10)[2][:, :3]
    found = F.pad(found, (0, 3 - found.shape[1]))
    low, high = (found.kthvalue(max(1, round(share * len(found))), dim=0).values for share in (0.01, 0.99))
    shares: Tensor = ((found - low) / (high - low).clamp(min=1e-9)).clamp(0.0, 1.0)
    return shares.reshape(*tokens.shape[:-1], 3)


def outliers(norms: Tensor, prefix: int = 0) -> Tensor:
    """Returns which tokens have a norm of more than ``OUTLIER`` medians of the patches (Darcet et al. 2024).

    Args:
        norms: norms (..., p + n).
        prefix: number p of tokens before the patches.
    """
    return norms > OUTLIER * norms[..., prefix:].median(dim=-1, keepdim=True).values


def effective_rank(tokens: Tensor) -> Tensor:
    """Returns exp of the entropy of the singular values of tokens (..., n, e), as shares of their sum: (...,).

    It lies between 1, when all tokens are multiples of one, and min(n, e) (Roy and Vetterli 2007); nan where tokens are
    not finite.
    """
    tokens = tokens.to("cpu" if tokens.device.type == "mps" else tokens.device).double()  # MPS has no float64
    gram = tokens @ tokens.mT if tokens.shape[-2] < tokens.shape[-1] else tokens.mT @ tokens
    values = torch.linalg.eigvalsh(gram.nan_to_num(0.0, 0.0, 0.0)).clamp(min=0.0).sqrt()
    shares = values / values.sum(dim=-1, keepdim=True)
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy.exp().where(gram.isfinite().flatten(-2).all(dim=-1), torch.nan)


def cka(features: Sequence[Tensor]) -> Tensor:
    """Returns the similarity of layers by linear centred kernel alignment, (l, l), from 0 to 1 (Kornblith et al. 2019).

    Args:
        features: features (N, e) of the same N tokens in each of l layers; e may differ.
    """
    centred = (rows - rows.mean(dim=0) for rows in features)
    grams = torch.stack([F.normalize((rows @ rows.T).flatten(), dim=0) for rows in centred])
    return grams @ grams.T


def position_similarity(network: Any) -> Tensor | None:
    """Returns the cosine of each patch's position with all others, (n, rows, columns); None without added positions.

    As Dosovitskiy et al. 2021, figure 7.
    """
    grid = grid_of(network)
    positions = getattr(network.patch_embedding, "positions", None) if isinstance(network, ViT) else None
    table = getattr(network, "pos_embed", None) if positions is None else positions.table
    if not isinstance(table, Tensor):
        return None
    patches = F.normalize(table.detach().flatten(end_dim=-2)[-grid.rows * grid.columns :], dim=-1)
    cosines: Tensor = patches @ patches.T
    return cosines.reshape(-1, *grid[1:])


def patch_filters(network: nn.Module, count: int = 28) -> Tensor | None:
    """Returns the first principal components of the filters of the patch embedding, (count, c, p1, p2) of length 1.

    None where it is neither a convolution nor a linear layer (Dosovitskiy et al. 2021, figure 7).
    """
    shape: tuple[int, ...]
    parent = network.patch_embedding if isinstance(network, ViT) else network
    name = "projection" if isinstance(network, ViT) else "patch_embed"
    for layer in dict(parent.named_children()).get(name, nn.Identity()).modules():
        if isinstance(layer, nn.Conv2d):
            shape = tuple(layer.weight.shape[1:])
        elif isinstance(layer, nn.Linear) and isinstance(network, ViT):
            shape = (network.in_channels, *network.patch_size)
        else:
            continue
        filters = layer.weight.detach().flatten(start_dim=1)
        found: Tensor = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:count]
        return found.reshape(-1, *shape)
    return None


@torch.no_grad()
def crate_measures(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns coding rate after MSSA and share of entries that are not 0 after ISTA, (l,) each; None but for CRATE.

    They are means over images (b, c, H, W) (Yu et al. 2023, section 3.1).
    """
    blocks: list[Any] = [block for block in find_blocks(network) if is_crate(block)]
    if not blocks:
        return None
    rates: list[Tensor] = []
    shares: list[Tensor] = []
    handles = []
    for block in blocks:
        rate = partial(_subspace_rate, block.attention.fn.attention)
        handles.append(block.attention.register_forward_hook(lambda half, _, out, rate=rate: rates.append(rate(out))))
        handles.append(block.register_forward_hook(lambda block, _, out: shares.append((out != 0).float().mean())))
    try:
        with watch(network):
            network(images)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rates), torch.stack(shares)


def _subspace_rate(attention: MSSA, tokens: Tensor) -> Tensor:
    """Returns the coding rate of tokens (b, n, e) in the subspaces of an MSSA, a mean over the images."""
    matrix = rearrange(attention.subspaces.weight, "(h d) e -> h d e", h=attention.num_heads)
    dtype = torch.promote_types(tokens.dtype, torch.float32)  # bfloat16 is too coarse for a determinant
    return coding_rate(tokens.to(dtype), matrix.to(dtype)).mean()


def is_crate(block: nn.Module) -> bool:
    """Returns whether a block is attention by MSSA and a feed-forward part by ISTA."""
    parts = [child for half in block.children() for child in half.modules()]
    kinds = {type(part) for part in parts}
    return {"attention", "feed_forward"} == {name for name, _ in block.named_children()} and kinds >= {MSSA, ISTA}
