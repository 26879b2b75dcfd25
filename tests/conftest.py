from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from wandb_stub import StubServer

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: the models are small
os.environ["WANDB_MODE"] = "disabled"  # but where W&B is what is tested

SMALL = (
    "--model.patch_size=4",
    "--model.emb_size=16",
    "--model.depth=1",
    "--model.num_heads=2",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
)
"""A run on digits that takes a second."""

Command = Callable[..., subprocess.CompletedProcess[str]]


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


def write_images(folder: Path, count: int, *, size: tuple[int, int] = (20, 14), seed: int = 0) -> None:
    """``count`` JPEG files of random pixels (width, height)."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for number in range(count):
        pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
