"""Memory of training: its peak, and on the CPU freed memory that is kept for the next step."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # M_... of glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory; returns whether it does, which is false on systems without glibc.

    By default glibc maps each large block of memory and unmaps it when it is freed. Each step of training allocates the
    same blocks again, and the kernel has to clear each page of them at its first use.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _LARGEST), mallopt(_TOP_PAD, 64 * 2**20)])


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of tensors that operations make, and of their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(_storages((args, kwargs)))  # of the weights, whose views are no new memory
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return output

    def _add(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes that a call of ``step`` adds at its peak to what is allocated before it.

    On CUDA from the allocator, elsewhere by counting the tensors that operations return (in eager mode alone, and
    without memory inside an operation).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    allocated = _Allocated()
    with allocated:
        step()
    return allocated.peak
