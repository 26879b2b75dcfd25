"""``experiments/benchmarks/gpu.py`` without a GPU: what it keeps, and that a call continues where one stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import gpu
import pytest
from runs import REPOSITORY

BENCHMARKS = REPOSITORY / "experiments" / "benchmarks"


@pytest.mark.full
def test_all_of_it_at_a_small_size(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--device=cpu",
        "--small",
        "--minutes=25",
        f"--runs={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in (tmp_path / "trial").glob("*.json")} == {item.file for item in gpu.ITEMS}
