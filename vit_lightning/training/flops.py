"""Floating-point operations of a network."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit_lightning.models.class_token import reads_class_token_alone


def forward_flops(network: nn.Module, shape: tuple[int, int, int]) -> int | None:
    """Returns the floating-point operations of a forward pass of one image (c, H, W); a multiply-add counts as two.

    torch counts them on the meta device. None for a network that cannot run there.
    """
    try:
        empty = copy.deepcopy(network).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            empty(torch.empty(1, *shape, device="meta"))
    except Exception:  # a network of the user may raise anything
        return None
    return int(counter.get_total_flops())


def left_out_flops(network: nn.Module, images: Tensor) -> int:
    """Returns those of ``forward_flops`` that a forward pass of such images (b, c, H, W) leaves out.

    They are those of the other tokens, where the last block makes the class token alone.
    """
    if not reads_class_token_alone(network, images):
        return 0
    empty: Any = copy.deepcopy(network).to("meta").eval()
    *blocks, last = empty.encoder
    with torch.no_grad():
        tokens = empty.patch_embedding(torch.empty(1, *images.shape[1:], device="meta"))
        for block in blocks:
            tokens = block(tokens)
        with FlopCounterMode(display=False) as all_tokens:
            last(tokens)
        with FlopCounterMode(display=False) as first:
            last.first_token(tokens)
    return int(all_tokens.get_total_flops() - first.get_total_flops())
