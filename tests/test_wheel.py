"""The wheel, from the source archive: every file and config; used from an empty folder where nothing else is."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from runs import REPOSITORY

BUILD = """import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))"""


def build(kind: str, folder: Path, out: Path) -> Path:
    """Builds the source archive or the wheel of a folder, as pip does."""
    done = subprocess.run([sys.executable, "-c", BUILD, kind, out], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("vit_lightning", "experiments"):
        shutil.copytree(REPOSITORY / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "clone")
    with tarfile.open(build("sdist", folder / "clone", folder)) as archive:
        # Python before 3.11.4 has no filters; the archive is ours
        archive.extractall(folder / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (folder / "source").iterdir()
    with zipfile.ZipFile(build("wheel", source, folder)) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def lightning(installed: Path, folder: Path, *arguments: str) -> str:
    """Runs the command of the wheel and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "vit_lightning", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_and_config(installed, tmp_path):
    def files(folder: Path, pattern: str) -> set[str]:
        found = [path for path in folder.rglob(pattern) if path.is_file() and path.suffix != ".pyc"]
        return {path.relative_to(folder).as_posix() for path in found}

    names = {name for name in files(REPOSITORY / "experiments", "*.yaml") if "/runs/" not in name}
    parts = {path.name for path in (REPOSITORY / "experiments").glob("*.py")}  # beside the plans that name them
    expected = files(REPOSITORY / "vit_lightning", "*") | {f"configs/{name}" for name in names | parts}
    assert files(installed / "vit_lightning", "*") == expected
    listed = lightning(installed, tmp_path, "configs")
    assert [name for name in names if f"\n  {name.removesuffix('.yaml')} " not in listed] == []


@pytest.mark.full
def test_the_wheel_trains_in_an_empty_folder(installed, tmp_path):
    small = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]
    lightning(installed, tmp_path, "fit", "--config", "digits", *small, "--wandb.mode=disabled")
    (run,) = (tmp_path / "runs" / "digits").iterdir()
    assert (run / "results.json").is_file()
    forecast = lightning(installed, tmp_path, "ablate", "pooling", "--dry-run")
    assert "3 arms of experiments/digits_short.yaml" in forecast
