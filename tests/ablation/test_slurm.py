"""An ablation on a real SLURM, where there is one (``sbatch`` and a node that is up)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import harness
import pytest
from test_ablation_faults import ARMS, assert_same, command, complete, write_plan

from vit_lightning.ablation.ledger import read_study


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


@pytest.mark.full
def test_an_array_of_jobs_of_which_some_are_killed(slurm, tmp_path):
    """One is asked to end and queued again, one is killed and queued again: the same results, bit for bit."""
    write_plan(tmp_path, ARMS, fixed={"trainer.max_epochs": 48})
    complete(tmp_path, "whole", workers=1)
    options = json.dumps({"timeout_min": 20, "cpus_per_task": 1})
    out = tmp_path / "slurm"
    path = os.pathsep.join(filter(None, [str(harness.HERE), os.environ.get("PYTHONPATH")]))
    watcher = harness.start(tmp_path, *command("slurm", "--launcher=slurm", f"--slurm={options}"), PYTHONPATH=path)

    def queued(state: str) -> list[str]:
        return sorted(ask("squeue", "-h", "-r", "-t", state, "-n", "p", "-o", "%i").split())

    def running() -> list[str]:
        return queued("R")

    wait_for("nothing was claimed", lambda: any(out.glob("ledger/*/0001.log")) or watcher.exitcode is not None)
    wait_for("two jobs do not run", lambda: len(running()) == 2)
    first, second = running()
    done = len([*out.glob("runs/*/results.json")])
    ask("scancel", "--signal=TERM", first)  # what SLURM sends at once when it takes a job's place away
    wait_for("nothing was done any more", lambda: len([*out.glob("runs/*/results.json")]) > done)
    assert {first, second} == {*running()}, "a job ended before it was asked to be queued again"
    ask("scancel", "--signal=USR2", first)  # what it sends later
    wait_for("the first was not queued again", lambda: first in queued("PD"))
    assert second in running(), "the second ended too early for this test"
    ask("scancel", "--full", "--signal=KILL", second)
    wait_for("the second still runs", lambda: second not in running())
    ask("scontrol", "requeue", second)
    wait_for("the second was not queued again", lambda: second in queued("PD"))
    states = [run.state for run in read_study(out).runs]
    assert "missing" in states, "there was nothing left to go on with"
    time.sleep(5.0)  # until SLURM has done with what ran before
    for job in (first, second):  # else it waits two minutes
        ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    watcher.join(900)
    assert watcher.exitcode == 0, harness.log(tmp_path)[-3000:]
    assert_same(out, tmp_path / "whole")
