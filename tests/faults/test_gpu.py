"""Row 27 of the fault plan: on a GPU too a run that is killed or told to end comes out as if it had not been.

``VITL_ACCELERATOR=cpu`` shows the same on a CPU; ``experiments/benchmarks/gpu.py`` runs this file.
"""

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import harness
import pytest
import torch

ACCELERATOR = os.environ.get("VITL_ACCELERATOR") or ("gpu" if torch.cuda.is_available() else "")
pytestmark = [pytest.mark.full, pytest.mark.skipif(not ACCELERATOR, reason="needs a GPU")]

EXACT = ("--trainer.deterministic=true",)
FAST = ("--trainer.precision=bf16-mixed",)
VARIANTS = {"float32": (), "bf16-mixed": FAST, "compiled": (*FAST, "--compile=true")}
POINTS = ("batch_start", "after_backward", "after_opt_step")
TEN = [f"0:{step}:{POINTS[step // 3 % 3]}:{'TERM' if step % 4 == 2 else 'KILL'}" for step in range(2, 32, 3)]


def run(folder: Path, *flags: str, faults: Sequence[str] = ()):
    """The outcome of a run that ends by each fault in turn and is resumed."""
    flags = (f"--trainer.accelerator={ACCELERATOR}", *flags)
    for number, fault in enumerate((*faults, "")):
        code = harness.resume(folder, fault=fault) if number else harness.fit(folder, *flags, fault=fault)
        assert code == (0 if not fault else 143 if fault.endswith("TERM") else -9), harness.log(folder)
    return harness.outcome(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_27_ended_many_times_with_deterministic_kernels(tmp_path, variant):
    flags = (*EXACT, *VARIANTS[variant])
    killed = run(tmp_path / "killed", *flags, faults=TEN[::3] if variant == "compiled" else TEN)
    assert not harness.differences(run(tmp_path / "whole", *flags), killed)


def test_row_27_without_deterministic_kernels_the_loss_is_within_the_noise_of_repeated_runs(tmp_path):
    runs = [run(tmp_path / str(number), *FAST) for number in range(3)]
    killed = run(tmp_path / "killed", *FAST, faults=("0:11:batch_start:KILL", "0:20:after_backward:TERM"))
    assert [outcome["batches"] for outcome in runs] == [killed["batches"]] * 3

    def apart(first, second) -> float:
        a, b = ([row["train/loss"] for row in outcome["rows"] if "train/loss" in row] for outcome in (first, second))
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    noise = max(apart(*pair) for pair in combinations(runs, 2))
    assert min(apart(killed, outcome) for outcome in runs) <= 2 * noise
