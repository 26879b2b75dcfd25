"""The ``lightning`` command in processes of its own, forked from a server that has imported everything once.

Such a process has its own working folder, environment, output and exit code, and can be killed; it starts in
hundredths of a second, where the installed command imports for seconds. The few tests of the start itself run that one.
"""

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

PRELOADED = (
    *("uncollected", "docstring_parser", "matplotlib.backends.backend_agg", "matplotlib.pyplot"),
    *(f"vit_lightning.{name}" for name in ("ablation.ablate", "cli", "commands.trained", "commands.fit")),
    *("vit_lightning.report.page", "warm", "undrawn"),
)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(list(PRELOADED))


@cache
def _start_server() -> None:
    """Starts the server with this process's ``sys.path``, which Python 3.11 does not hand on."""
    staging = tempfile.TemporaryDirectory()
    atexit.register(staging.cleanup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", staging.name)  # where W&B stages what all of its runs send
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def installed_program(name: str = "lightning") -> str:
    return str(Path(sys.executable).parent / name)


def command(*arguments: str) -> None:
    """Runs the ``lightning`` command in this process, to its end."""
    from vit_lightning.cli import main

    sys.argv = [installed_program(), *arguments]  # by which further ranks are started
    sys.exit(main())


def _enter(
    function: Callable[..., None],
    arguments: tuple[object, ...],
    folder: Path,
    environment: dict[str, str],
    out: Path,
    err: Path,
) -> None:
    missing = [name for name in PRELOADED if name not in sys.modules]
    assert not missing, f"the server could not import {missing}"
    gc.freeze()  # else each collection walks, and so copies, all that was imported
    gc.enable()
    multiprocessing.set_start_method("fork", force=True)  # which the command's own workers start by, as for a user
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves these out


def start(
    function: Callable[..., None], *arguments: object, folder: Path, environment: dict[str, str], out: Path, err: Path
) -> BaseProcess:
    """Calls a function of a module in a process of its own, with this working folder and environment and no other.

    What it prints is appended to the files ``out`` and ``err``.
    """
    outputs = out.resolve(), err.resolve()
    _start_server()
    process = SERVER.Process(target=_enter, args=(function, arguments, folder, environment, *outputs))
    process.start()
    return process


class Running:
    """A process whose output is kept; arguments as of :func:`start`, the environment by default this process's own."""

    def __init__(
        self, function: Callable[..., None], *arguments: object, folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._outputs.name) / name for name in ("out", "err"))
        environment = dict(os.environ) if environment is None else environment
        self._process = start(
            function, *arguments, folder=folder, environment=environment, out=self._out, err=self._err
        )

    def kill(self) -> None:
        self._process.kill()

    def finish(self, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Waits for its end; kills it after ``timeout`` seconds."""
        self._process.join(timeout)
        hangs = self._process.exitcode is None
        if hangs:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        self._outputs.cleanup()
        assert not hangs, f"it hangs: {out + err}"
        return subprocess.CompletedProcess([], self._process.exitcode or 0, out, err)
