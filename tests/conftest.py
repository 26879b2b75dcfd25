import atexit
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Running, command, installed_program
from runs import SMALL, Command
from wandb_stub import StubServer

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: the models are small
os.environ["WANDB_MODE"] = "disabled"  # but where W&B is what is tested
gc.disable()  # else imports are a tenth slower
logging.getLogger().addHandler(logging.NullHandler())  # what libraries log is printed by none, with pytest's plugin out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts those tests first that fork trainings from this process, which fail once torch has threads in it."""
    items.sort(key=lambda item: item.path.name != "test_ablation_faults.py")


def pytest_collection_finish() -> None:
    """Leaves all that was imported out of each garbage collection, and so out of what forked workers copy."""
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries in C++ complain at the end of what is left


OF_ALL_TESTS: dict[str, object] = {}
"""Modules that are no test's own; to look at all of the seven thousand again took a minute of the suite."""


@pytest.fixture(autouse=True)
def own_files_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets tests have files of their own by the same names: a process has one version of a file."""
    yield
    if own_files := sys.modules.get("vit_lightning.config.own_files"):
        if own_files.folders_in_use():
            own_files.use_files()
        folder = str(tmp_path_factory.getbasetemp())
        for name, module in [item for item in sys.modules.items() if OF_ALL_TESTS.get(item[0]) is not item[1]]:
            space = getattr(module, "__dict__", {})
            if folder in f"{space.get('__file__')} {space.get('__path__')!r}":
                del sys.modules[name]
                own_files._imported.pop(name, None)
            else:
                OF_ALL_TESTS[name] = module


@pytest.fixture(scope="session", autouse=True)
def figures_are_left_out() -> None:
    if "vit_lightning.commands.fit" in sys.modules:  # else it would be imported for this alone
        import undrawn  # noqa: F401


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the figures of runs."""
    monkeypatch.setenv("FIGURES", "1")


@pytest.fixture
def server() -> Iterator[StubServer]:
    """A server of W&B that keeps what it is sent."""
    server = StubServer()
    yield server
    server.die()


@pytest.fixture
def lightning(tmp_path: Path) -> Command:
    """Runs the command in a process and a working folder of its own, and returns what came of it."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return Running(command, *arguments, folder=tmp_path).finish()

    return run


@pytest.fixture
def installed(tmp_path: Path) -> Command:
    """Runs the installed command, whose start is tested too; ``python`` is ``python -m vit_lightning``."""

    def run(*arguments: str, program: str = "lightning") -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "vit_lightning"] if program == "python" else [installed_program(program)]
        return subprocess.run([*words, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240)

    return run


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The smallest run, as a folder to be copied, and its results."""
    from vit_lightning.commands.fit import fit
    from vit_lightning.config.resolve import resolve

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / "out", fit(resolve([*SMALL, "--out=out"]))


@pytest.fixture
def results(trained: tuple[Path, dict[str, Any]], in_folder: Path) -> dict[str, Any]:
    """Results of a finished run, which lies in ``out``."""
    shutil.copytree(trained[0], in_folder / "out")
    return trained[1]
