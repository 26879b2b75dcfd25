"""``experiments/benchmarks/gpu.py`` without a GPU: what it keeps, and that a call continues where one stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import gpu
import pytest
from runs import REPOSITORY

BENCHMARKS = REPOSITORY / "experiments" / "benchmarks"


@pytest.mark.parametrize("devices", [None, ["0"], ["0", "1"]])
def test_workers_by_default_are_as_many_as_are_fastest_on_a_gpu(devices, monkeypatch):
    from vit_lightning.ablation import workers

    monkeypatch.setattr(workers, "RUNS_PER_GPU", 4)
    assert workers.workers_of("auto", devices, 10**6) == (1 if devices is None else 4 * len(devices))
    assert workers.workers_of(3, devices, 1) == 3


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
