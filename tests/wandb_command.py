"""The command with W&B, as a process of its own, and what it has to have sent."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import Running, command
from runs import SMALL

from vit_lightning.errors import Diverged
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.wandb_internals import import_wandb
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror, merged_by_step

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "a-secret-that-is-nobody-s-business"


def command_and_a_late_warning(*arguments: str) -> None:
    """Runs the command, after which W&B's own threads may still log something, as on a slow machine."""
    try:
        command(*arguments)
    finally:
        if "wandb" in sys.modules:
            logging.getLogger("wandb").warning("late")


def start(folder: Path, name: str, *arguments: str, **environment: str) -> Running:
    """Starts the command with an empty home and none of the user's W&B settings; nobody sits at the terminal."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {**kept, "HOME": str(home), "MY_TOKEN": SECRET, **environment}
    return Running(command_and_a_late_warning, name, *arguments, folder=folder, environment=environment)


def finished(process: Running) -> str:
    """Returns what a process printed that had to end well."""
    result = process.finish()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == "", result.stderr
    return result.stdout


def fit(folder: Path, *flags: str, **environment: str) -> str:
    return finished(start(folder, "fit", *SMALL, "--out=run", *flags, **environment))


def steps(folder: Path) -> dict[int, dict[str, float]]:
    return dict(merged_by_step(read_metrics(folder)))


def assert_delivered(rows: list[dict], folder: Path) -> None:
    """Each step is there once, with the numbers of ``metrics.jsonl``."""
    wanted = steps(folder)
    assert sorted({row["_step"] for row in rows}) == sorted(wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        for name, value in wanted[row["_step"]].items():
            assert row[name] == pytest.approx(value), name


def end_runs() -> None:
    """Ends runs in four ways, and as an agent's those that a cluster or the agent has stopped."""
    for name, fault in (("bad", Diverged("loss is nan")), ("lost", OSError("gone"))):
        end_run(name, fault)
    for name, code in (("cut", 143), ("queued", 138)):
        end_run(name, SystemExit(code))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SWEEP_ID", "sweep1")
        for name, code in (("stopped", 143), ("again", 138)):  # the first one by the agent
            patch.setenv("WANDB_RUN_ID", name)
            end_run(name, SystemExit(code))


def end_run(name: str, fault: BaseException) -> None:
    mirror = WandbMirror(Path(name), name, WandbConfig(mode="offline"), {})
    mirror.start()
    mirror.finish(1, fault)


def log_report_twice() -> None:
    """Logs the report of a made-up ablation to a run of W&B, and once more."""
    from fake_study import make_study

    from vit_lightning.report.report import make_report
    from vit_lightning.report.wandb_report import log_report

    import_wandb(Path("scratch"))  # as for the runs of an ablation
    shutil.rmtree("scratch")
    study = make_study(Path("pooling"), images=60)
    print(log_report(make_report(study)))
    print(log_report(make_report(study)) or "nothing new")
