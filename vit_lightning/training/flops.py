"""Floating-point operations of a network."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


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
