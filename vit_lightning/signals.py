"""Signals that ask a process to end: SIGTERM, Ctrl-C, and SIGUSR1, which Slurm sends before a time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], numbers: Sequence[int] = STOP) -> Iterator[Any]:
    """Installs a handler and gives the earlier ones by signal, which it restores at the end.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the process with 128 + the signal's number; Lightning alone would make that 0 or 1."""
    raise SystemExit(128 + number)


def obey_parent() -> None:
    """Lets SIGTERM and SIGUSR1 end a forked process; leaves Ctrl-C and SIGUSR2 to its parent, which passes them on."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, exit_by_signal)
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
