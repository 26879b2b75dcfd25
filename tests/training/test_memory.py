from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from vit_lightning.training.memory import peak_memory

KEPT = """
import sys, torch
from pathlib import Path
from vit_lightning.training.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
torch.ones(10)
before = addresses()
torch.ones(10 * 2**20)
print(addresses() - before)
"""


def kept_bytes(mode: str) -> int:
    """Memory that a process still has after 40 MiB of it were freed."""
    return int(subprocess.check_output([sys.executable, "-c", KEPT, mode], text=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems have other allocators")
def test_freed_memory_is_kept_and_by_default_it_is_not():
    assert kept_bytes("kept") >= 40 * 2**20
    assert kept_bytes("as it is") < 2**20


def test_the_peak_counts_what_lives_at_once_and_no_views():
    weight = torch.ones(1000, requires_grad=True)

    def step():
        first = weight * 2.0  # 4 kB, kept by the product
        (first * first).sum().backward()
        weight.grad = None

    views = peak_memory(lambda: weight[:10].view(2, 5), torch.device("cpu"))
    one, apart = (
        peak_memory(call, torch.device("cpu")) for call in (lambda: weight * 2, lambda: (weight * 2, None)[1])
    )
    assert (views, one, apart) == (0, 4000, 4000)
    assert 12000 <= peak_memory(step, torch.device("cpu")) <= 20008
