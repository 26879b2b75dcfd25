"""Random numbers without state: hashes of (seed, epoch, index), so that order and augmentation resume anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shift_right(bits: Any, by: int) -> Any:
    """Logical right shift of int64, a tensor or an array: the sign must not be carried in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(bits: Tensor, stream: int = 0) -> Tensor:
    """SplitMix64 of int64 numbers (Steele et al. 2014): well-mixed 64 bits, different for each stream."""
    return _calculate(lambda numbers: _mix(numbers, stream), bits)


def _mix(bits: Any, stream: int) -> Any:
    bits = bits + _signed(_GOLDEN * (stream + 1))
    bits = (bits ^ shift_right(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ shift_right(bits, 27)) * _signed(_MIX2)
    return bits ^ shift_right(bits, 31)


def streams(bits: Tensor, numbers: range) -> Tensor:
    """Returns (len(numbers), ...) int64 from which ``mix`` and ``uniform`` of stream 0 give those of these streams."""
    steps = torch.arange(numbers.start, numbers.stop, device=bits.device) * _signed(_GOLDEN)
    return bits + steps.view(-1, *[1] * bits.ndim)


def _calculate(function: Callable[[Any], Any], bits: Tensor) -> Tensor:
    """Returns what a function makes of the numbers; on a CPU by numpy, which takes a fifth of torch's time for few."""
    if bits.device.type == "cpu" and bits.ndim:
        return torch.from_numpy(function(bits.numpy()))
    result: Tensor = function(bits)
    return result


def mix_one(bits: int, stream: int = 0) -> int:
    """``mix`` of a single number, in a fiftieth of the time."""
    full = (1 << 64) - 1
    bits = (bits + _GOLDEN * (stream + 1)) & full
    bits = ((bits ^ (bits >> 30)) * _MIX1) & full
    bits = ((bits ^ (bits >> 27)) * _MIX2) & full
    return _signed(bits ^ (bits >> 31))


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Key of each image, int64, from (seed, epoch, index)."""
    return mix(indices.to(torch.int64) + mix_one(mix_one(seed) + epoch))


def repeated_keys(keys: Tensor, repetitions: Tensor) -> Tensor:
    """Keys of an image that an epoch shows several times: the first as always, each further one a key of its own."""
    return torch.where(repetitions > 0, mix(keys + repetitions), keys)


def one_key(seed: int, epoch: int, index: int) -> int:
    """``sample_keys`` of a single image."""
    return mix_one(mix_one(mix_one(seed) + epoch) + index)


def uniform(keys: Tensor, stream: int) -> Tensor:
    """One float32 in [0, 1) for each key; another stream gives an independent number."""
    return _calculate(lambda numbers: shift_right(_mix(numbers, stream), 40), keys).to(torch.float32) / (1 << 24)
