"""When a process has to end after signals: the rules, with a clock of the test's own."""

from __future__ import annotations

import signal
import time

import pytest

from vit_lightning import signals
from vit_lightning.signals import APART, LIMIT, UNRESPONSIVE, Requests, ended_by_signals, noted


def due(requests: Requests, *, noting: bool = False, ending: bool = False) -> float | None:
    """The second from which on the process is ended, of the first hundred."""
    return next((now for now in range(100) if requests.are_due(now, noting=noting, ending=ending)), None)


def test_a_process_that_does_not_answer_is_ended():
    requests = Requests()
    assert due(requests) is None
    requests.add(signal.SIGTERM, 1.0)
    assert due(requests) == 1.0 + UNRESPONSIVE
    assert requests.number == signal.SIGTERM


@pytest.mark.parametrize("number", signals.STOP)
def test_a_training_has_all_time_for_its_step(number):
    requests = Requests()
    requests.add(number, 1.0)
    requests.add(number, 1.0 + 0.5 * APART)  # of timeout, which sends it twice
    assert due(requests, noting=True) is None
    assert due(Requests(number, 1.0, 50.0), noting=False) == 50.0, "an error after the step has no time to be shown"


def test_a_second_signal_ends_a_training_that_hangs():
    requests = Requests()
    requests.add(signal.SIGTERM, 1.0)
    assert not requests.are_due(30.0, noting=True, ending=False)
    requests.add(signal.SIGINT, 40.0)
    requests.add(signal.SIGINT, 44.0)  # a third changes nothing
    assert due(requests, noting=True) == 40.0 + UNRESPONSIVE


def test_an_end_that_has_begun_has_its_time():
    requests = Requests()
    assert due(requests, ending=True) is None, "no signal has come"
    requests.add(signal.SIGTERM, 1.0)
    assert not requests.are_due(10.0, noting=True, ending=True)
    requests.add(signal.SIGTERM, 12.0)
    assert due(requests, ending=True) == 10.0 + LIMIT


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

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def wait(number: int) -> None:
    with ended_by_signals():
        Finalized(number)
        time.sleep(5)


@pytest.mark.parametrize("number", signals.STOP)
def test_a_signal_is_not_lost_where_python_ignores_exceptions(number, capfd):
    with pytest.raises(SystemExit) as ended:
        wait(number)
    assert ended.value.code == 128 + number
    assert not capfd.readouterr().err
