"""Random numbers for code that draws from the global generators, as functions of a key."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds torch (on the CPU), ``random`` and numpy with a key; restores their states after."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield _seed
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
