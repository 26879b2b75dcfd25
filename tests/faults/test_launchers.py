"""Row 10 of the fault plan: launchers that start a run again, by the scripts of the documentation."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
from harness import begin, ended, setting
from runs import REPOSITORY

from vit_lightning.commands.resume import RESUMED
from vit_lightning.storage.metrics import read_results

FLAGS = [flag for flag in (*harness.FLAGS, *setting(workers=0, ranks=2)) if flag != "--data.batch_size=162"]


GIVEN = "--config exp.yaml --trainer.devices=2 --out=runs/exp"
"""What the scripts of the documentation train."""


def script_of(name: str) -> str:
    """Returns a script of the documentation, which trains our run."""
    page = (REPOSITORY / "notebooks" / "runs.md").read_text(encoding="utf-8")
    script = re.search(rf"<!-- {name} -->\n```bash\n(.*?)```", page, re.DOTALL)[1]
    assert GIVEN in script
    return script.replace(GIVEN, shlex.join(FLAGS))


def environment(fault: str) -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(harness.HERE), *sys.path]),
        "VITL_FAULT": fault,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, object]:
    """What the run leads to when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("whole")
    assert ended(begin(folder, "fit", *FLAGS), 120) == 0, harness.log(folder)
    return harness.outcome(folder)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["1:13:batch_start:KILL", "0:20:after_backward:EXC", "0:16:val:KILL"])
def test_row_10_torchrun_starts_ranks_again(tmp_path, whole, fault):
    with (tmp_path / "log.txt").open("w") as log:
        done = subprocess.run(
            ["bash", "-c", script_of("torchrun")],
            cwd=tmp_path,
            env=environment(fault),
            stdout=log,
            stderr=log,
            timeout=300,
        )
    assert done.returncode == 0, harness.log(tmp_path)[-3000:]
    assert "resumes after" in harness.log(tmp_path)
    assert not harness.differences(whole, harness.outcome(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("fault", ["1:13:batch_start:USR1", "0:13:batch_start:TERM"])
def test_row_10_slurm_queues_a_run_again(tmp_path, whole, fault):
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        pytest.skip("no SLURM here")
    (tmp_path / "train.sh").write_text(script_of("slurm"))
    command = ["sbatch", "--parsable", "--output=log.txt", "train.sh"]
    job = subprocess.run(command, cwd=tmp_path, env=environment(fault), capture_output=True, text=True, check=True)
    until, number = time.monotonic() + 400, job.stdout.strip()
    try:
        while not read_results(tmp_path / "run"):
            assert time.monotonic() < until, harness.log(tmp_path)[-3000:]
            time.sleep(5.0)
            if (
                "PD"
                in subprocess.run(["squeue", "-h", "-j", number, "-o", "%t"], capture_output=True, text=True).stdout
            ):
                time.sleep(5.0)  # until SLURM has done with what ran before; then it would wait two minutes
                subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], capture_output=True)
    finally:
        subprocess.run(["scancel", number])
    assert "resumes after" in harness.log(tmp_path)
    assert not harness.differences(whole, harness.outcome(tmp_path))


@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_ranks_that_a_launcher_starts_need_the_folder(tmp_path, launcher, monkeypatch):
    monkeypatch.delenv(RESUMED, raising=False)  # of a command that another test has run in this process
    flags = [flag for flag in harness.FLAGS if not flag.startswith("--out")]
    assert harness.command(tmp_path, "fit", *flags, "--resume=auto", **{launcher: "2"}) == 2
    assert "resume=auto: give --out=FOLDER too" in harness.log(tmp_path)
