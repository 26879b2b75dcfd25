"""Signals that ask a process to end: SIGTERM, Ctrl-C, and SIGUSR1, which Slurm sends before a time limit."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from vit_lightning.errors import UserError

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LIMIT = 10.0
"""Seconds in which a process ends that was asked to, with an upload to W&B; a step of training has all its time."""
APART = 1.0
"""Seconds from which on a further signal asks a second time; ``timeout``, torchrun and Slurm send one twice at once."""

_received = 0  # the first signal
_noting = False  # while a training ends by itself after a signal, however long its step takes
_parent = os.getppid()  # as this process begins: later the parent may have ended


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[Any]:
    """Installs a handler and gives the earlier ones by signal, which it restores at the end.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in STOP}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextlib.contextmanager
def ended_by_signals(*, for_good: bool = False) -> Iterator[None]:
    """Lets signals end the process of a command, a second one also where its main thread waits in a call of C++.

    Args:
        for_good: whether the process ends with the command; signals do nothing then, while Python ends within ``LIMIT``
            seconds, and otherwise the earlier handlers are restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _received
    _received = 0
    reading, end = socket.socketpair()
    end.setblocking(False)
    writing = end.detach()  # signals come as long as the process lives
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # else a child's signals come here
    watching = threading.Thread(target=_watch, args=(reading,), daemon=True, name="signals")
    watching.start()
    with _handled(exit_by_signal) as before:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)  # a further rank starts with them blocked
            yield
        except Exception as fault:
            if not _received or (isinstance(fault, UserError) and not _comes_of_exit(fault)):
                raise
            # it is what the interrupted code made of SystemExit, or of the end of another process
            raise SystemExit(128 + _received) from None
        finally:
            if for_good:
                _received = _received or -1
                before.clear()  # the handlers stay
            else:
                signal.set_wakeup_fd(earlier)
                os.close(writing)
                watching.join(1.0)  # else it might take a signal of the next ``ended_by_signals`` for a second one


def _comes_of_exit(fault: BaseException | None) -> bool:
    while fault is not None and not isinstance(fault, SystemExit):
        fault = fault.__cause__ or fault.__context__
    return fault is not None


def _watch(reading: socket.socket) -> None:
    """Ends this process at a second signal, or if it does not end in time after a first one or after its first rank."""
    first, since, left, launched = 0, 0.0, LIMIT, is_launched()
    while True:
        pause = 0.1 if first else 1.0 if launched else None
        if select.select([reading], [], [], pause)[0]:
            if not (numbers := reading.recv(64)):
                reading.close()
                return
            for number in set(numbers).intersection(STOP):
                if first and time.monotonic() - since >= APART:
                    end_at_once(first)
                first, since = first or number, since or time.monotonic()
        is_alone = launched and os.getppid() != _parent
        left = left - (pause or 0.0) if is_alone or (first and not _noting) else LIMIT
        if left < 0.0:
            end_at_once(first or signal.SIGKILL)


@contextlib.contextmanager
def noted(note: Callable[[int], object]) -> Iterator[None]:
    """Lets signals be noted alone, by a training that ends after its step; a second Ctrl-C ends it at once.

    Any second signal ends the process of a command at once.
    """
    global _noting
    first = math.inf

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal first
        global _received
        again = before[signal.SIGINT] or signal.default_int_handler
        if number == signal.SIGINT and time.monotonic() - first >= APART and callable(again):
            again(number, frame)
        first = min(first, time.monotonic())
        _received = _received or number
        note(number)

    with _handled(receive) as before:
        if _received and before.get(signal.SIGTERM) is exit_by_signal:  # its exit was lost, as in a finalizer
            raise SystemExit(128 + _received)
        _noting = bool(before)
        try:
            yield
        finally:
            _noting = False


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the process with 128 + the signal's number; Lightning alone would make that 0 or 1."""
    if not _received:  # more than one may come: timeout sends SIGTERM to a process and to its group
        if is_launched():
            os.kill(_parent, number)  # the first rank, which may wait for this one
        end_process(number)


def end_process(number: int) -> NoReturn:
    """Begins the end of this process with 128 + the signal's number; within ``LIMIT`` seconds it has ended."""
    global _received
    _received = number
    raise SystemExit(128 + number)


def end_at_once(number: int) -> NoReturn:
    """Ends this process by a signal, whatever its main thread waits for; it may hold the lock of stderr."""
    kill_workers()
    with contextlib.suppress(OSError):
        if not is_launched() and select.select([], [2], [], 1.0)[1]:  # else a full pipe that nobody reads
            os.write(2, f"{_stopped_by(number)}\n".encode())
    os._exit(128 + number)


def kill_workers() -> None:
    """Kills the data-loading workers of this process: they ignore signals, and a stuck one would be waited for."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Leaves signals, which come to the whole group, to the parent of this data-loading worker, and dies with it."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    begun_by, parent = multiprocessing.parent_process(), os.getppid()  # they differ behind a server of forks
    if begun_by is not None and parent != begun_by.pid and (parent == 1 or not begun_by.is_alive()):
        os._exit(137)
    if threading.current_thread().name == "MainThread":  # Linux ends a child with the thread that has forked it
        die_with(parent)
    show = sys.excepthook  # by which a thread shows that the parent has ended while it took a tensor
    sys.excepthook = lambda kind, *more: None if issubclass(kind, ConnectionError | EOFError) else show(kind, *more)
    if then is not None:
        then(worker)


def say_stopped(number: int) -> None:
    """Says on stderr which signal ends this process, unless Lightning started it as a further rank."""
    if not is_launched():
        print(_stopped_by(number), file=sys.stderr, flush=True)


def _stopped_by(number: int) -> str:
    return f"lightning: stopped by {signal.Signals(number).name}"


def is_launched() -> bool:
    """Whether Lightning started this process as a further rank on this machine."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ


def end_further_rank() -> None:
    """Ends this process with code 0 if Lightning started it, which kills the first one if it sees another code."""
    if is_launched():
        os._exit(0)


def is_ended_by_signals() -> bool:
    """Whether this process is that of a command, before its training."""
    return signal.getsignal(signal.SIGTERM) is exit_by_signal


@contextlib.contextmanager
def withheld() -> Iterator[None]:
    """Blocks the signals; a process that starts meanwhile gets none, unless it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent() -> None:
    """Lets SIGTERM and SIGUSR1 end a forked process; leaves Ctrl-C to its parent, which passes it on."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, exit_by_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with(parent: int) -> None:
    """Lets this process die with its parent, which may be dead already; on Linux also if it is killed later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)
