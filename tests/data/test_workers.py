from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import Running
from torch.utils.data import DataLoader, Dataset

from vit_lightning.data.batches import PATIENCE, with_our_workers


class OwnIterator(DataLoader):
    """As torchdata's, a loader with workers of its own."""

    def _get_iterator(self):
        return iter([7])


def test_a_loader_with_workers_of_its_own_keeps_them():
    assert list(with_our_workers(OwnIterator([1, 2], num_workers=2))) == [7]


def test_a_process_that_inherits_a_loader_leaves_its_workers_alone():
    numbers = iter(with_our_workers(DataLoader(range(8), batch_size=None, num_workers=1, timeout=20)))
    assert next(numbers) == 0
    child = os.fork()
    if child == 0:  # as a worker of another loader, in which the first is collected as garbage
        try:
            numbers._shutdown_workers()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [*numbers] == [*range(1, 8)]


def test_the_threads_of_a_loader_have_ended_when_it_has():
    before = {*threading.enumerate()}
    numbers = iter(with_our_workers(DataLoader(range(8), batch_size=None, num_workers=2, persistent_workers=True)))
    assert [*numbers] == [*range(8)]
    assert {*threading.enumerate()} > before
    numbers._shutdown_workers()
    assert {*threading.enumerate()} == before


class Slow(Dataset):
    """Numbers of the processes that read them; the third is never ready."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            time.sleep(1000)
        return os.getpid()


def read_and_end(how: str) -> None:
    """Reads two items by two workers, of which one is then stuck, and ends."""
    workers = iter(with_our_workers(DataLoader(Slow(), batch_size=None, num_workers=2)))
    pids = [next(workers) for _ in range(2)]
    Path("pids").write_text(" ".join(map(str, pids)))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, number)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "seconds"), [("ends", PATIENCE + 2), ("killed", 3.0)])
def test_workers_ignore_signals_and_end_with_their_process(tmp_path, how, seconds):
    running = Running(read_and_end, how, folder=tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < until:
        time.sleep(0.01)
    began = time.monotonic()
    result = running.finish()
    assert result.returncode == (0 if how == "ends" else -9), result.stderr
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert time.monotonic() - began < seconds
    assert result.stderr == ""
