"""Tensors that are made once and stay on a device: a copy of host data to a device would wait for it."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_MADE: dict[tuple[Hashable, ...], Tensor] = {}


def constant(device: torch.device, make: Callable[..., Tensor], *given: Hashable) -> Tensor:
    """Returns on a device what is made once for these arguments.

    Compiled code takes it from here too, if a call before made it.
    """
    key = (device, make, *given)
    if key not in _MADE:
        _MADE[key] = _made(device, make, *given)
    return _MADE[key]


@torch.inference_mode(False)  # made while validating, it could not be used in training
def _made(device: torch.device, make: Callable[..., Tensor], *given: Hashable) -> Tensor:
    return make(*given).to(device)
