"""The installed command with W&B, as a process of its own, and what it has to have sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL

from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.wandb_mirror import merged_by_step

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "a-secret-that-is-nobody-s-business"


def start(folder: Path, verb: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The installed command with an empty home and none of the user's W&B settings; nobody sits at the terminal."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "MY_TOKEN": SECRET, **environment}
    command = [str(Path(sys.executable).parent / "lightning"), verb, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert err == ""
    return out


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
