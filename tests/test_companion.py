"""The process that ends another one which holds Python's lock: and its rules with a clock of the test's own."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
from processes import start

from vit_lightning import companion
from vit_lightning.companion import ASLEEP, HANGS, Companion, start_companion, tell
from vit_lightning.signals import STOP, ended_by_signals, noted, parent_of, process_stat


def hold(limit: float | None) -> None:
    """Holds Python's lock for ever, in a process that hangs after so many seconds."""
    with ended_by_signals(start_companion), tempfile.TemporaryFile() as stacks, noted(print):
        faulthandler.register(signal.SIGUSR2, stacks)
        report = {"path": str(Path("report.txt").absolute()), "rank": 0, "text": "rank 0 ", "hint": "to resume: ...\n"}
        tell(seconds=limit, **report, stacks=stacks.fileno())
        print("it holds the lock", flush=True)
        assert -1 in itertools.count()


def stop_for_a_while() -> None:
    with ended_by_signals(start_companion):
        tell(seconds=2.0)
        print("it stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        tell(seconds=None)
    sys.exit(0)


def signal_at_the_end() -> None:
    with ended_by_signals(start_companion):
        print("it ends", flush=True)
        time.sleep(0.5)
    gc.collect()
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(0)


def fork_a_watched_run() -> None:
    """As an ablation does; here the run is killed in the middle."""
    with ended_by_signals(start_companion):
        if os.fork() == 0:
            tell(seconds=0.5, path="", rank=0, text="", hint="", stacks=None)
            os.kill(os.getpid(), signal.SIGKILL)
        print("it goes on", flush=True)
        time.sleep(4.0)
    sys.exit(0)


class Held:
    """A process that does one of these, and its companion."""

    def __init__(self, folder: Path, function, *arguments) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.process = start(
            function, *arguments, folder=folder, environment=dict(os.environ), out=self.out, err=self.err
        )
        until = time.monotonic() + 60.0
        while not (self.out.exists() and "it " in self.out.read_text()):
            assert time.monotonic() < until, "it does not begin"
            time.sleep(0.05)
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        self.companion = min(pid for pid in pids if parent_of(pid) == self.process.pid)  # it is the first child

    def ends(self, seconds: float) -> int:
        """Returns the exit code of the process, and checks that nothing is left."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
            pytest.fail(f"it has not ended in {seconds} s: {self.err.read_text()}")
        until = time.monotonic() + 2.0
        while process_stat(self.companion)[:1] not in ([], ["Z"]) and time.monotonic() < until:
            time.sleep(0.02)
        assert process_stat(self.companion)[:1] in ([], ["Z"]), "its companion is left"
        return code


def test_a_process_that_holds_the_lock_is_ended_with_a_report(tmp_path):
    assert Held(tmp_path, hold, 1.0).ends(10.0) == HANGS
    report, said = (tmp_path / "report.txt").read_text(), (tmp_path / "err").read_text()
    assert report.startswith(f'rank 0 holds Python\'s lock: File "{__file__}", line ')
    assert report.splitlines()[0].endswith(" in hold")
    assert "Current thread" in report
    assert "lightning: hangs: rank 0 holds Python's lock" in said
    assert said.endswith("to resume: ...\n")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.full) for number in STOP[1:])]
)
def test_a_second_signal_ends_a_process_that_holds_the_lock(tmp_path, number):
    held = Held(tmp_path, hold, None)
    for _ in range(2):
        os.kill(held.process.pid, number)
        time.sleep(1.5)
    assert held.process.exitcode is None
    assert held.ends(10.0) == 128 + number
    assert f"stopped by {number.name}" in (tmp_path / "err").read_text()


def test_a_process_that_is_killed_leaves_no_companion(tmp_path):
    held = Held(tmp_path, hold, None)
    held.process.kill()
    assert held.ends(10.0) == -signal.SIGKILL


def test_a_process_that_was_stopped_is_not_ended(tmp_path):
    held = Held(tmp_path, stop_for_a_while)
    time.sleep(5.0)
    os.kill(held.process.pid, signal.SIGCONT)
    assert held.ends(10.0) == 0
    assert process_stat(held.companion) == [], "nobody has waited for its companion"


def test_a_companion_watches_no_process_that_its_own_has_forked(tmp_path):
    assert Held(tmp_path, fork_a_watched_run).ends(10.0) == 0


class Beside:
    """A companion of this process, with a time of the test's own."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.codes = time.monotonic(), list[int]()
        self.signals, theirs = socket.socketpair()
        self.messages, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        monkeypatch.setattr(companion, "_channel", channel)
        monkeypatch.setattr(Companion, "_end", lambda beside, code: self.codes.append(code))
        monkeypatch.setattr(Companion, "_show_hang", lambda beside: None)
        self.messages.setblocking(False)
        self.received, self.companion = theirs, Companion(os.getpid(), self.signals, self.messages, 0)

    def looks(self, seconds: float) -> list[int]:
        """Looks each second for so long; returns the exit codes with which the process would have been ended."""
        until = self.now + seconds
        while self.now < until and not self.codes:
            self.now += 1.0
            self.companion._look(self.now)
        return self.codes


@pytest.fixture
def beside(monkeypatch):
    found = Beside(monkeypatch)
    yield found
    for one in (found.signals, found.messages, found.received, companion._channel):
        with contextlib.suppress(OSError):
            one.close()


def test_a_process_hangs_if_it_tells_nothing_for_as_long_as_it_has_said(beside):
    assert beside.looks(10_000) == [], "it has not said that it is watched"
    for _ in range(3):
        tell(seconds=60.0)
        assert beside.looks(55) == []
    tell(seconds=None)
    assert beside.looks(10_000) == [], "it saves or compiles"
    tell(seconds=60.0)
    assert beside.looks(100) == [HANGS]


def test_a_machine_that_was_asleep_has_all_its_time_again(beside):
    tell(seconds=60.0)
    assert beside.looks(50) == []
    beside.now += 2.0 * ASLEEP
    assert beside.looks(55) == []
    assert beside.looks(10) == [HANGS]


def test_signals_are_taken_until_the_end_of_the_process(tmp_path):
    """Such as one that a further rank passes on while the first one ends."""
    ends = Held(tmp_path, signal_at_the_end)
    assert ends.ends(10.0) == 0
    assert (tmp_path / "err").read_text() == ""


def test_signals_that_a_thread_reads_are_left_to_it(beside):
    for _ in range(3):
        beside.received.send(bytes([signal.SIGTERM]))
        beside.companion._look(beside.now)
        tell(signals=[*beside.signals.recv(64)])
        assert beside.looks(20) == []
    beside.received.send(bytes([signal.SIGTERM]))
    assert beside.looks(10) == [143], "a further one that nobody reads"


def test_a_single_signal_waits_for_who_holds_the_lock(beside):
    beside.received.send(bytes([signal.SIGINT]))
    assert beside.looks(1000) == []
    beside.received.send(bytes([signal.SIGINT]))
    assert beside.looks(1000) == [130]
