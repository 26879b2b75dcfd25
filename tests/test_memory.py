from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS_OF_TEN = """
import resource, sys, torch
from vit_lightning.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def use():
    torch.ones(10 * 2**20)
for _ in range(5):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", FAULTS_OF_TEN, mode], text=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems have other allocators")
def test_memory_that_is_used_again_is_not_asked_for_again():
    assert 4 * page_faults("kept") < page_faults("as it is")
