"""The command with W&B, as a process of its own, and what it has to have sent."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import Running, command
from runs import SMALL

from vit_lightning import signals
from vit_lightning.errors import Diverged
from vit_lightning.storage import wandb_logger
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.wandb_logger import STEP, RunLogger, WandbConfig

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "a-secret-that-is-nobody-s-business"


def patient_command(*arguments: str) -> None:
    """Runs the command, with seconds for the start of W&B and its last uploads, and after a signal, from TEST_..."""
    signals.LIMIT = float(os.environ.pop("TEST_LIMIT", signals.LIMIT))
    wandb_logger.START_SECONDS = float(os.environ.pop("TEST_START_SECONDS", wandb_logger.START_SECONDS))
    wandb_logger.FINISH_SECONDS = float(os.environ.pop("TEST_FINISH_SECONDS", wandb_logger.FINISH_SECONDS))
    command(*arguments)


def start(folder: Path, name: str, *arguments: str, **environment: str) -> Running:
    """Starts the command with an empty home and none of the user's W&B settings; nobody sits at the terminal."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    often = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}  # whole seconds between two uploads of rows, else 15
    environment = {**kept, "HOME": str(home), "MY_TOKEN": SECRET, **often, **environment}
    return Running(patient_command, name, *arguments, folder=folder, environment=environment)


def finished(process: Running) -> str:
    """Returns what a process printed that had to end well."""
    result = process.finish()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == "", result.stderr
    return result.stdout


def fit(folder: Path, *flags: str, **environment: str) -> str:
    return finished(start(folder, "fit", *SMALL, "--out=run", *flags, **environment))


def by_step(rows: Iterable[dict[str, Any]], key: str) -> dict[int, dict[str, Any]]:
    """Rows merged by their step, of which there may be several, and more after a resume."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if key in row:
            merged.setdefault(row[key], {}).update(row)
    return merged


def steps(folder: Path) -> dict[int, dict[str, float]]:
    """Rows of ``metrics.jsonl``, one a step, without step and time."""
    rows = by_step(read_metrics(folder), "step")
    return {step: {name: row[name] for name in row.keys() - {"step", "time"}} for step, row in rows.items()}


def assert_delivered(rows: Iterable[dict[str, Any]], folder: Path) -> None:
    """Each step is there with the numbers of ``metrics.jsonl``."""
    sent, wanted = by_step(rows, STEP), steps(folder)
    assert sent.keys() == wanted.keys()
    for step, row in wanted.items():
        for name, value in row.items():
            assert sent[step][name] == pytest.approx(float(value)), name


ENDS = {
    "bad": (Diverged("loss is nan"), False),
    "lost": (OSError("gone api_key=KEY"), False),
    "cut": (SystemExit(143), False),
    "queued": (SystemExit(138), False),
    "stopped": (SystemExit(143), True),
    "again": (SystemExit(138), True),
}
"""How runs end, and whether they are an agent's, which has stopped those with SIGTERM."""


def end_runs() -> None:
    for name, (fault, of_agent) in ENDS.items():
        with pytest.MonkeyPatch.context() as patch:
            if of_agent:
                for key, value in {"SWEEP_ID": "sweep1", "RUN_ID": name, "DATA_DIR": "given"}.items():
                    patch.setenv(f"WANDB_{key}", value)
            Path(name).mkdir()
            run = RunLogger(Path(name), name, WandbConfig(mode="offline"), {})
            run.start()
            staged = "given" if of_agent else str(Path(name).resolve() / "wandb")
            assert os.environ["WANDB_DATA_DIR"] == staged
            run.finish(1, fault)
            assert os.environ.get("WANDB_DATA_DIR") == ("given" if of_agent else None)
