"""A frozen backbone, of which only the head is trained."""

from __future__ import annotations

import warnings
from functools import partial

from torch import Tensor, nn

from vit_lightning.models.heads import find_head


def freeze_backbone(network: nn.Module) -> None:
    """Freezes all but the head for good: no gradients, and evaluation mode, so neither dropout nor new statistics.

    No graph is kept of what comes before the head, since nothing there needs a gradient.

    Raises:
        UserError: the network has no head.
    """
    heads = find_head(network)
    network.requires_grad_(False)
    for head in heads.values():
        head.requires_grad_(True)
    for name, module in network.named_modules():
        if not any(_contains(name, head) or _contains(head, name) for head in heads):
            module.eval()
            module.train = partial(_stay, module)
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # Lightning's, at each start


def head_state(network: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of the weights of the head, by their names in the network."""
    return {
        f"{name}.{key}": value.clone()
        for name, head in find_head(network).items()
        for key, value in head.state_dict().items()
    }


def _contains(outer: str, inner: str) -> bool:
    return not outer or f"{inner}.".startswith(f"{outer}.")


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces ``train`` of a frozen module, which stays in evaluation mode."""
    return module
