from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Command
from wandb_stub import StubServer

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: the models are small
os.environ["WANDB_MODE"] = "disabled"  # but where W&B is what is tested


@pytest.fixture
def server() -> Iterator[StubServer]:
    """A server of W&B that keeps what it is sent."""
    server = StubServer()
    yield server
    server.die()


@pytest.fixture
def lightning(tmp_path: Path) -> Command:
    """The installed command, in a process and a working folder of its own."""

    def run(*arguments: str, program: str = "lightning", timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        command = (
            [str(Path(sys.executable).parent / program)]
            if program != "python"
            else [sys.executable, "-m", "vit_lightning"]
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout
        )

    return run


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
