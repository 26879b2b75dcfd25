"""Random numbers without state: hashes of (seed, epoch, index), so that order and augmentation resume anywhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vit_lightning.constants import constant

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shift_right(bits: Any, by: int) -> Any:
    """Logical right shift of int64, a tensor or an array: the sign must not be carried in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(bits: Tensor, stream: int | range = 0) -> Tensor:
    """SplitMix64 of int64 numbers (Steele et al. 2014): well-mixed 64 bits, different for each stream.

    A range of streams gives (streams, ...) in one calculation.
    """
    return _calculate(_mix, _begun(bits, stream))


def _begun(bits: Tensor, stream: int | range) -> Tensor:
    if isinstance(stream, int):
        return bits + _signed(_GOLDEN * (stream + 1))
    return bits + constant(bits.device, _steps, stream).view(-1, *[1] * bits.ndim)


def _steps(streams: range) -> Tensor:
    """Returns what begins each stream; compiled code cannot multiply a range by so large a number."""
    return torch.tensor([_signed(_GOLDEN * (stream + 1)) for stream in streams])


def _mix(bits: Any) -> Any:
    bits = _upper(bits)
    return bits ^ shift_right(bits, 31)


def _upper(bits: Any) -> Any:
    """Returns what has the upper 31 bits of ``_mix``."""
    bits = (bits ^ shift_right(bits, 30)) * _signed(_MIX1)
    return (bits ^ shift_right(bits, 27)) * _signed(_MIX2)


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


def uniform(keys: Tensor, stream: int | range) -> Tensor:
    """One float32 in [0, 1) for each key; another stream gives an independent number, a range (streams, ...)."""
    return _high_bits(keys, stream, 24) / (1 << 24)


def random_bytes(keys: Tensor) -> Tensor:
    """One whole number from 0 to 255 for each key, int64."""
    return _high_bits(keys, 0, 8)


def _high_bits(keys: Tensor, stream: int | range, count: int) -> Tensor:
    return _calculate(lambda numbers: shift_right(_upper(numbers), 64 - count), _begun(keys, stream))
