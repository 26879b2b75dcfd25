"""An ablation on a real SLURM, where there is one (``sbatch`` and a node that is up)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import harness
from test_ablation_faults import ARMS, assert_same, command, complete, write_plan


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def wait_for(what: str, happened, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm() -> None:
    if shutil.which("sbatch") is None or not ask("sinfo", "-h", "-o", "%t").split():
        pytest.skip("no SLURM here")
    pytest.importorskip("submitit")


def test_an_array_of_jobs_of_which_some_are_killed(slurm, tmp_path):
    """One is asked to end and queued again, one is killed and queued again: the same results, bit for bit."""
    write_plan(tmp_path, {name: {**arm, "trainer.max_epochs": 4} for name, arm in ARMS.items()}, 3)
    complete(tmp_path, "whole", "--workers=1")
    options = json.dumps({"timeout_min": 20, "cpus_per_task": 1})
    out = tmp_path / "slurm"
    path = os.pathsep.join(filter(None, [str(harness.HERE), os.environ.get("PYTHONPATH")]))
    watcher = harness.start(tmp_path, *command("slurm", "--launcher=slurm", f"--slurm={options}"), PYTHONPATH=path)

    def running() -> list[str]:
        lines = ask("squeue", "-h", "-r", "-t", "R", "-n", "p", "-o", "%i").split()
        return sorted(lines)

    wait_for("nothing was claimed", lambda: any(out.glob("ledger/*/0001.log")) or watcher.exitcode is not None)
    first = running()[0]
    ask("scancel", "--signal=USR2", first)  # what SLURM sends before it takes a job's place away
    wait_for("nothing was queued again", lambda: "Requeued" in "".join(p.read_text() for p in out.glob("slurm/*.err")))
    wait_for("nothing runs", lambda: bool(running()) or watcher.exitcode is not None)
    killed = [job for job in running() if job != first] or running()
    if killed:
        ask("scancel", "--full", "--signal=KILL", killed[0])
        ask("scontrol", "requeue", killed[0])
    watcher.join(500)
    assert watcher.exitcode == 0, harness.log(tmp_path)[-3000:]
    assert_same(out, tmp_path / "whole")
