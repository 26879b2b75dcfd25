from __future__ import annotations

import platform
import subprocess
import sys

import pytest

KEPT = """
import torch
from pathlib import Path
from vit_lightning.training.resources import keep_freed_memory
torch.set_num_threads(1)
def addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
def kept_bytes():
    torch.ones(10)
    before = addresses()
    torch.ones(10 * 2**20)
    return addresses() - before
print(kept_bytes(), keep_freed_memory(), kept_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems have other allocators")
def test_freed_memory_is_kept_and_by_default_it_is_not():
    as_it_is, done, kept = subprocess.check_output([sys.executable, "-c", KEPT], text=True).split()
    assert int(as_it_is) < 2**20
    assert done == "True"
    assert int(kept) >= 40 * 2**20
