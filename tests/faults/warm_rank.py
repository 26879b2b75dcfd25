"""A second rank that is forked before the command begins, so that its start does not import for seconds.

What differs from the one that Lightning starts: nothing is imported anew. The tests of a start begin a real one.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any

import processes
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning import signals


class Warm(subprocess.Popen[bytes]):
    """The process, from when Lightning starts it; before, it waits in ``prepare``."""

    prepared: tuple[int, int]
    """Its id and the pipe through which it gets its environment."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | None) -> None:
        self.args, self.returncode, self._child_created = command, None, True
        self._waitpid_lock = threading.Lock()
        self.stdin = self.stdout = self.stderr = None
        self.pid, pipe = self.prepared
        mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        with os.fdopen(pipe, "w") as file:
            json.dump({"environment": env, "mask": mask}, file)


def prepare(*arguments: str) -> None:
    """Forks the process that becomes the second rank, and lets Lightning start it; one that never is started ends."""
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP)
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        _wait_and_run(reading, arguments)
    os.close(reading)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    Warm.prepared = pid, writing
    subprocess_script.subprocess = type("subprocess", (), {**vars(subprocess), "Popen": Warm})


def _wait_and_run(reading: int, arguments: tuple[str, ...]) -> None:
    with os.fdopen(reading) as file:
        text = file.read()
    if not text:  # the first rank has ended
        os._exit(0)
    given: dict[str, Any] = json.loads(text)
    for number in signals.STOP:
        signal.signal(number, signal.SIG_IGN)  # discards those that came before it was started
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, given["mask"])
    os.environ.clear()
    os.environ.update(given["environment"])
    signals._parent, rank_zero_only.rank = os.getppid(), int(os.environ["LOCAL_RANK"])
    code: object = 1
    try:
        processes.command(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
