"""Signals that ask a process to end: SIGTERM, Ctrl-C, and SIGUSR1, which Slurm sends before a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
UNRESPONSIVE = 5.0
"""Seconds in which the main thread has to notice a signal: it may wait for another rank in a call of C++."""
LIMIT = 8.0
"""Seconds that the end of a process may take, such as an upload to W&B, once nothing more is to be saved."""
APART = 1.0
"""Seconds from which on a further signal asks a second time; ``timeout``, torchrun and Slurm send one twice at once."""

Tell = Callable[..., None]
"""Function that sends a message, given by keywords, to another process."""

_ending = threading.Event()
_ended_by = 0  # the signal
_lost = False  # whether Python has ignored the end that was raised
_noting = False  # while a training ends by itself after a signal, however long its step takes
_parent = os.getppid()  # as this process begins: later the parent may have ended


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


@contextlib.contextmanager
def ended_by_signals(accompany: Callable[[socket.socket], Tell] | None = None) -> Iterator[None]:
    """Lets signals end the process of a command, soon also where its main thread waits in a call of C++.

    Args:
        accompany: given if the process ends with the command; signals do nothing then, while Python ends within
            ``LIMIT`` seconds, and otherwise the earlier handlers are restored. It starts what ends the process where it
            holds Python's lock, by the signals that nobody has read from the socket, and gives a function to tell it
            those that have been.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _ended_by
    _ended_by = 0
    _ending.clear()
    reading, end = socket.socketpair()
    end.setblocking(False)
    writing = end.detach()  # signals come as long as the process lives
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # else a child's signals come here
    tell = accompany(reading) if accompany else _tell_nobody  # before there is another thread
    watching = threading.Thread(target=_watch, args=(reading, tell), daemon=True, name="signals")
    watching.start()
    with handled(exit_by_signal) as before, _raised_again():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)  # a further rank starts with them blocked
            yield
        except Exception:
            if _ended_by:  # it is what the interrupted code made of SystemExit, or of the end of another rank
                raise SystemExit(128 + _ended_by) from None
            raise
        finally:
            if accompany:
                _ending.set()
                before.clear()  # the handlers stay
            else:
                signal.set_wakeup_fd(earlier)
                os.close(writing)
                watching.join(1.0)  # else it might send a signal of the next ``ended_by_signals`` as its own


@contextlib.contextmanager
def _raised_again() -> Iterator[None]:
    """Raises the end of the process once more where Python ignores it: in a finalizer, or in what a fork calls."""
    global _lost
    earlier, pid = sys.unraisablehook, os.getpid()

    def receive(lost: Any) -> None:
        global _lost
        if lost.exc_type is not SystemExit or not _ended_by:
            earlier(lost)
        elif os.getpid() == pid:  # a worker is ended by its parent
            _lost = True  # _watch sends the signal again: what is raised here would be lost too

    sys.unraisablehook = receive
    try:
        yield
    finally:
        sys.unraisablehook = earlier
        _lost = False


@contextlib.contextmanager
def noted(note: Callable[[int], object]) -> Iterator[None]:
    """Lets signals be noted alone, by a training that ends after its step; a second Ctrl-C ends it at once.

    Any second signal ends the process of a command within ``UNRESPONSIVE`` seconds, whatever it waits for.
    """
    global _noting
    first = math.inf

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal first
        again = before[signal.SIGINT] or signal.default_int_handler
        if number == signal.SIGINT and time.monotonic() - first >= APART and callable(again):
            again(number, frame)
        first = min(first, time.monotonic())
        note(number)

    with handled(receive) as before:
        _noting = bool(before)
        try:
            yield
        finally:
            _noting = False


@dataclass
class Requests:
    """Signals that have asked a process to end, and the time by which it has to; in seconds of any clock."""

    number: int = 0
    """The first signal."""
    since: float = math.inf
    until: float = math.inf
    is_urgent: bool = False
    """Whether it has been asked twice."""
    is_ending: bool = False

    def add(self, number: int, now: float) -> None:
        if not self.number:
            self.number, self.since, self.until = number, now, now + UNRESPONSIVE
        elif now - self.since >= APART and not (self.is_urgent or self.is_ending):
            self.is_urgent, self.until = True, now + UNRESPONSIVE

    def are_due(self, now: float, *, noting: bool, ending: bool) -> bool:
        """Whether the time is up: none is set to the step of a training that notes signals, unless it was asked twice.

        Args:
            now: the time.
            noting: whether a training notes signals.
            ending: whether the process has begun to end.
        """
        if self.number and ending and not self.is_ending:
            self.is_ending, self.until = True, now + LIMIT
        elif self.number and noting and not (self.is_urgent or self.is_ending):
            self.until = now + UNRESPONSIVE
        return now >= self.until


def _watch(reading: socket.socket, tell: Tell) -> None:
    """Ends this process if it does not end by itself in time: after signals, or after the end of the first rank."""
    global _lost
    requests, launched = Requests(), is_launched()
    while True:
        pause = 0.1 if requests.number else 1.0 if launched else None
        if select.select([reading], [], [], pause)[0]:
            numbers = reading.recv(64)
            if not numbers:
                reading.close()
                return
            tell(signals=[*numbers])
            for number in set(numbers).intersection(STOP):
                requests.add(number, time.monotonic())
        if _lost and requests.number:
            _lost = False
            _ending.clear()
            os.kill(os.getpid(), requests.number)
        now = time.monotonic()
        if launched and not requests.is_urgent and os.getppid() != _parent:
            requests = Requests(signal.SIGKILL, now, now + UNRESPONSIVE + LIMIT, is_urgent=True)
        if requests.are_due(now, noting=_noting, ending=_ending.is_set()):
            if not requests.is_ending:
                print_from_first(stopped_by(requests.number))
            end_at_once(128 + requests.number)


def _tell_nobody(**message: object) -> None:
    pass


def end_at_once(code: int) -> NoReturn:
    """Ends this process whatever its main thread waits for, with further ranks and workers that it has started."""
    kill_children(os.getpid())
    end_further_rank(code)
    os._exit(code)


def kill_children(parent: int) -> None:
    """Kills further ranks and workers that a process has started, but not this process itself; on Linux only."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        child = int(path.parent.name)
        if child != os.getpid() and parent_of(child) == parent:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(child, signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """Returns the parent of a process; None if there is none, or not on Linux."""
    return int(stat[1]) if (stat := process_stat(pid)) else None


def process_stat(pid: int | None) -> list[str]:
    """Returns what Linux says of a process from its state on; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


def print_from_first(text: str) -> None:
    """Prints a line to stderr, unless this is another process than the first that Lightning launched."""
    if not is_launched():
        print(f"lightning: {text}", file=sys.stderr, flush=True)


def is_launched() -> bool:
    """Whether Lightning started this process as a further rank on this machine."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ


def end_further_rank(code: int) -> None:
    """Ends this process, if Lightning started it, as soon as the first rank has ended.

    Not later, since Python would take seconds for it.
    """
    if is_launched():
        await_first_rank(os.getpid(), code)
        os._exit(code)


def await_first_rank(pid: int, code: int) -> None:
    """Waits until the first rank has ended, since Lightning kills it a few seconds after it sees another rank end.

    Args:
        pid: the further rank that is to end, which Lightning started.
        code: its exit code; a signal that ends it ends the first one too.
    """
    if code - 128 in STOP and parent_of(pid) == _parent:
        os.kill(_parent, code - 128)
    until = time.monotonic() + UNRESPONSIVE + LIMIT
    while parent_of(pid) == _parent and time.monotonic() < until:
        time.sleep(0.02)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the process with 128 + the signal's number; Lightning alone would make that 0 or 1."""
    if not _ending.is_set():  # more than one may come: timeout sends SIGTERM to a process and to its group
        end_process(number)


def end_process(number: int) -> NoReturn:
    """Begins the end of this process with 128 + the signal's number; within ``LIMIT`` seconds it has ended."""
    global _ended_by
    _ended_by = number
    _ending.set()
    raise SystemExit(128 + number)


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Ends a process that has begun nothing but its imports, where an exception may be lost."""
    print_from_first(stopped_by(number))
    end_further_rank(128 + number)
    os._exit(128 + number)


def is_ended_by_signals() -> bool:
    """Whether this process is that of a command, before its training."""
    return signal.getsignal(signal.SIGTERM) is exit_by_signal


@contextlib.contextmanager
def withheld() -> Iterator[None]:
    """Blocks the signals; a process or a thread that starts meanwhile gets none, unless it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent() -> None:
    """Lets SIGTERM and SIGUSR1 end a forked process; leaves Ctrl-C and SIGUSR2 to its parent, which passes them on."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, exit_by_signal)
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def die_with(parent: int) -> None:
    """Lets this process die with its parent, which may be dead already; on Linux also if it is killed later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)
