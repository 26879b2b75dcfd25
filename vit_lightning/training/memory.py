"""Memory of training on the CPU: kept for the next step instead of being returned to the system."""

from __future__ import annotations

import ctypes
import sys

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
