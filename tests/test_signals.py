"""How a process ends after signals: of a command, and in the middle of what cannot be interrupted."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Running

from vit_lightning import signals
from vit_lightning.config.own_files import OwnFault
from vit_lightning.errors import Diverged
from vit_lightning.signals import APART, ended_by_signals, noted


def wait_for_another_rank() -> None:
    """Waits in C++, as in a collective, where no handler of Python's runs."""
    signals.LIMIT = 1.0
    with ended_by_signals(for_good=True):
        Path("began").touch()
        torch.distributed.TCPStore("127.0.0.1", 0, world_size=2, is_master=True)


def test_a_first_signal_ends_any_other_command_that_waits(tmp_path):
    waiting = begin(tmp_path, wait_for_another_rank)
    os.kill(waiting._process.pid, signal.SIGTERM)
    result = waiting.finish(10.0)
    assert (result.returncode, result.stderr) == (143, "lightning: stopped by SIGTERM\n")


def print_to_nobody() -> None:
    """Prints as a progress bar does whose reader has stopped, such as ``less``."""
    _, writing = os.pipe()
    os.dup2(writing, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # with a lock, as without PYTHONUNBUFFERED
    with ended_by_signals(for_good=True), noted(lambda number: None):
        Path("began").touch()
        while True:
            print("x" * 7, file=sys.stderr)


def test_a_second_signal_ends_a_training_that_holds_the_lock_of_stderr(tmp_path):
    printing = begin(tmp_path, print_to_nobody)
    for pause in (2.0 * APART, 0.0):
        assert printing._process.exitcode is None
        os.kill(printing._process.pid, signal.SIGTERM)
        time.sleep(pause)
    assert printing.finish(10.0).returncode == 143


def begin(folder: Path, function: Callable[..., None], *arguments: object) -> Running:
    running = Running(function, *arguments, folder=folder)
    until = time.monotonic() + 60.0
    while not (folder / "began").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.2)
    return running


def test_a_second_ctrl_c_interrupts_the_step(monkeypatch):
    received: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests leave it as a command does
    monkeypatch.setattr(signals.time, "monotonic", lambda: 0.0)
    with noted(received.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGTERM, signal.SIGINT]
        monkeypatch.undo()
        monkeypatch.setattr(signals, "APART", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Finalized:
    """What is interrupted by a signal where Python ignores exceptions, as it does between a fork and its return."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def begin_late() -> None:
    with ended_by_signals():
        Finalized()
        with noted(print):
            pytest.fail("it begins")


def lose_a_worker() -> None:
    with ended_by_signals(), noted(print):
        signal.raise_signal(signal.SIGUSR1)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated")


def read_image() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except:  # noqa: E722
        raise ValueError("cannot read it")  # noqa: B904


def fail_in_code_of_the_user() -> None:
    with ended_by_signals():
        try:
            read_image()
        except ValueError as fault:
            raise OwnFault("ValueError: cannot read it") from fault


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("ends", "code"), [(begin_late, 143), (lose_a_worker, 138), (fail_in_code_of_the_user, 143)])
def test_whatever_python_workers_or_code_of_the_user_make_of_a_signal_is_that_signal(ends, code):
    with pytest.raises(SystemExit) as ended:
        ends()
    assert ended.value.code == code


def fail_after_a_signal(fault: Exception) -> None:
    with ended_by_signals(), noted(print):
        signal.raise_signal(signal.SIGTERM)
        raise fault


@pytest.mark.parametrize("fault", [Diverged("training diverged in step 7"), OwnFault("ZeroDivisionError: 1 / 0")])
def test_a_fault_of_the_step_after_a_signal_is_that_fault(fault):
    with pytest.raises(type(fault), match=str(fault)):
        fail_after_a_signal(fault)
