"""A small process beside that of a command, which ends it where it holds Python's lock: none of its threads can."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from vit_lightning.signals import (
    STOP,
    Requests,
    Tell,
    await_first_rank,
    die_with,
    is_launched,
    kill_children,
    print_from_first,
    process_stat,
    stopped_by,
)

HANGS = 75
"""Exit code of a process that hangs; the system's own for a failure that may pass, ``EX_TEMPFAIL``."""
PAUSE = 1.0
"""Seconds between two looks at a process that is watched."""
ASLEEP = 10.0
"""Seconds by which a look is late only if who looks was stopped, or the machine asleep."""
UNREAD = 1.0
"""Seconds in which a thread reads a signal, if it can run."""
DUMP = 0.5
"""Seconds in which the stacks of all threads are written, by a handler that needs no lock."""
SIGEV_THREAD = 2

_channel: socket.socket | None = None
_request: Any = None  # of _exit_when_told, in memory as long as this process lives


def start_companion(signals: socket.socket) -> Tell:
    """Starts the companion of this process, on Linux; it dies with it.

    Args:
        signals: what this process has received, a byte each, until a thread reads it.

    Returns:
        a function that sends the companion a message, as :func:`tell` does.
    """
    global _channel
    if sys.platform != "linux":
        return tell
    _channel, messages = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in (_channel, messages):
        end.setblocking(False)
    process, (reading, codes) = os.getpid(), os.pipe()
    with contextlib.suppress(OSError):  # no more processes are allowed
        companion = os.fork()
        if companion == 0:
            try:
                Companion(process, signals, messages, codes).run()
            finally:
                os._exit(1)
        atexit.register(_stop, process, companion)
        os.register_at_fork(after_in_child=_forget)  # a run of an ablation is watched by the ablation
    messages.close()
    _exit_when_told(reading)
    return tell


def _forget() -> None:
    global _channel
    _channel = None


def _stop(process: int, companion: int) -> None:
    """Ends the companion at the end of its process, and waits for it: it stays as a zombie where nobody does."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            os.kill(companion, signal.SIGKILL)
            os.waitpid(companion, 0)


def tell(**message: object) -> None:
    """Sends the companion of this process a message, if there is one.

    Args:
        message: ``signals`` that a thread has read; or ``seconds`` after which the process hangs unless another message
            comes before, None for never, with what its report has (``path``, ``rank``, ``text``, ``hint``, and
            ``stacks``, the file that SIGUSR2 has the stacks of all threads written to).
    """
    if _channel is not None:
        with contextlib.suppress(OSError):  # it has ended, or is stopped
            _channel.send(json.dumps(message).encode())


def _exit_when_told(reading: int) -> None:
    """Ends this process at once with an exit code, an int of C, when one can be read from a pipe.

    No thread of Python takes part, since none runs while another one holds the lock: a thread of the C library reads
    the number to where the argument of its callback lies, and calls ``_exit`` with it.
    """
    global _request
    libc, head = ctypes.CDLL(None), "@iiiPN"  # struct aiocb: the file, two options, where to, how many bytes
    if not hasattr(libc, "aio_read"):  # an older C library; the companion kills this process then
        return
    _request = ctypes.create_string_buffer(256)
    argument = ctypes.addressof(_request) + struct.calcsize(head)
    call = ctypes.cast(libc._exit, ctypes.c_void_p).value
    struct.pack_into(f"{head}qiiPP", _request, 0, reading, 0, 0, argument, 4, 0, 0, SIGEV_THREAD, call, 0)
    libc.aio_read(_request)


class Companion:
    """The process beside another one: it looks, reports, and ends the other.

    Args:
        process: the other one, its parent.
        signals: those that a thread of the other has not read yet.
        messages: those of :func:`tell`.
        codes: the pipe of exit codes.
    """

    def __init__(self, process: int, signals: socket.socket, messages: socket.socket, codes: int) -> None:
        self.process, self.signals, self.messages, self.codes = process, signals, messages, codes
        self._requests, self._unread, self._unread_since = Requests(), b"", math.inf
        self._limit, self._report = math.inf, dict[str, Any]()
        self._since = self._looked = time.monotonic()

    def run(self) -> NoReturn:
        for number in (*STOP, signal.SIGUSR2):  # they come to the whole group
            signal.signal(number, signal.SIG_IGN)
        die_with(self.process)
        os.chdir("/")
        kept = {2, self.signals.fileno(), self.messages.fileno(), self.codes}
        for file in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # the folder that was listed
                os.close(file)  # else who reads a pipe of the process waits for this one too
        while True:
            if self._unread:
                select.select([self.messages], [], [], 0.1)
            else:
                left = self._limit - (time.monotonic() - self._since)
                pause = None if left == math.inf else min(PAUSE, max(left, 0.05))
                select.select([self.messages, self.signals], [], [], pause)
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        has_slept, self._looked = now - self._looked > PAUSE + ASLEEP, now
        self._read_messages(now)
        before, self._unread = self._unread, _peek(self.signals)
        self._unread_since = min(self._unread_since, now) if self._unread else math.inf
        for number in self._unread[len(before) :]:
            self._requests.add(number, now)
        if now - self._unread_since >= UNREAD and self._requests.are_due(now, noting=True, ending=False):
            print_from_first(stopped_by(self._requests.number))
            self._end(128 + self._requests.number)
        if has_slept or activity(self.process) == "frozen":
            self._since = now
        if now - self._since > self._limit:
            self._show_hang()
            self._end(HANGS)

    def _read_messages(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message = json.loads(self.messages.recv(1 << 16))
                for number in message.get("signals", ()):
                    self._requests.add(number, now)
                if "seconds" in message:
                    self._limit = math.inf if message["seconds"] is None else message["seconds"]
                    self._report, self._since = message, now

    def _show_hang(self) -> None:
        """Writes the report of a hang to its file and to stderr."""
        stacks, file = "", self._report["stacks"]
        with contextlib.suppress(OSError):
            if file is not None:  # else SIGUSR2 is the user's
                os.kill(self.process, signal.SIGUSR2)
                time.sleep(DUMP)
                stacks = Path(f"/proc/{self.process}/fd/{file}").read_text(errors="replace")
        _, _, main = stacks.partition("Current thread ")  # which gets the signals
        place = (*main.splitlines(), "", "")[1].strip()
        text = f"{self._report['text']}holds Python's lock: {place}\n"
        with contextlib.suppress(OSError):
            Path(self._report["path"]).write_text(f"{text}\n{stacks}", encoding="utf-8")
        hint = f"lightning: hangs: {text}{self._report['hint']}" if self._report["hint"] else ""
        said = f"stacks of rank {self._report['rank']}:\n{stacks}{hint}"
        with contextlib.suppress(OSError):
            print(said, end="", file=sys.stderr, flush=True)

    def _end(self, code: int) -> NoReturn:
        kill_children(self.process)
        if is_launched():
            await_first_rank(self.process, code)
        os.write(self.codes, struct.pack("i", code))
        time.sleep(2.0)  # this process has ended too by then
        os.kill(self.process, signal.SIGKILL)
        os._exit(1)


def activity(pid: int | None) -> str:
    """Returns whether a process is running, frozen or ended."""
    state = process_stat(pid)[:1]
    return "frozen" if state in (["T"], ["t"]) else "running" if state else "ended"


def _peek(signals: socket.socket) -> bytes:
    """Returns what nobody has read yet, without reading it."""
    try:
        return signals.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""
