"""Memory of a training on CPU: kept for the next step, instead of given back to the system and asked for anew."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # M_... of glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed; gives whether it does, which it does not on other systems.

    By default glibc asks the system for each large piece of memory and gives it back when it is freed. Each step of a
    training takes the same pieces again, and the system has to clear each page of them at its first use.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _LARGEST), mallopt(_TOP_PAD, 64 * 2**20)])
