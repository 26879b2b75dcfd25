"""How much a network computes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(network: nn.Module, shape: tuple[int, int, int]) -> int | None:
    """Floating-point operations for one image of a shape (c, H, W), forward; a multiply and an add are two.

    Counted by torch without computing anything. None for a network that cannot be run without data.
    """
    try:
        empty = copy.deepcopy(network).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            empty(torch.empty(1, *shape, device="meta"))
    except Exception:  # a network of somebody else
        return None
    return int(counter.get_total_flops())
