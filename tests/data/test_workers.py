import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Running
from runs import REPOSITORY
from torch.utils.data import DataLoader, Dataset

from vit_lightning import Digits
from vit_lightning.data.batches import shield_workers
from vit_lightning.data.images import Images


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
    workers = iter(shield_workers(DataLoader(Slow(), batch_size=None, num_workers=2)))
    pids = [next(workers) for _ in range(2)]
    Path("pids").write_text(" ".join(map(str, pids)))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, number)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_workers_that_were_asked_for_nothing_end_with_the_interpreter():
    """Not in a fork, which ends otherwise: from Python 3.12 on an interpreter that ends starts no threads."""
    script = "import torch, vit_lightning.data.batches as ours\n"
    script += "workers = iter(ours.shield_workers(torch.utils.data.DataLoader([7], num_workers=2)))\nnext(workers)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("how", "seconds"), [pytest.param("ends", 12.0, marks=pytest.mark.full), ("killed", 3.0)])
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


def signal_beginning_workers() -> None:
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert [*shield_workers(DataLoader([7], batch_size=None, num_workers=1))] == [7]


def begin_workers_in_a_thread() -> None:
    workers: list[Any] = []

    def begin() -> None:
        workers.append(iter(shield_workers(DataLoader([7] * 9, batch_size=None, num_workers=1))))
        next(workers[0])  # the worker has begun

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert [*workers[0]] == [7] * 8


@pytest.mark.parametrize("function", [signal_beginning_workers, begin_workers_in_a_thread])
def test_workers_outlive_a_signal_at_their_begin_and_the_thread_that_began_them(tmp_path, function):
    result = Running(function, folder=tmp_path).finish()
    assert (result.returncode, result.stderr) == (0, "")


def end_before_a_worker_begins() -> None:
    os.register_at_fork(after_in_child=lambda: (Path("pids").write_text(str(os.getpid())), time.sleep(1.0)))
    workers = iter(shield_workers(DataLoader([7], num_workers=1)))  # noqa: F841
    while not Path("pids").exists() or not Path("pids").read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_process_has_ended_already_ends(tmp_path):
    assert Running(end_before_a_worker_begins, folder=tmp_path).finish().returncode == -9
    until = time.monotonic() + 4.0
    while Path("/proc", (tmp_path / "pids").read_text()).exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_images_go_to_a_gpu_where_they_take_at_most_a_quarter_of_what_is_free(monkeypatch):
    for free in (2**22, 2**22 - 4):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, 2 * free))
        dataset = Images(torch.zeros(2**10, 1, 32, 32, dtype=torch.uint8), torch.zeros(2**10, dtype=torch.int64))
        dataset.move_if_small(torch.device("cpu"))
        assert dataset.is_moved == (free == 2**22)


def test_workers_of_a_loader_that_is_collected_with_its_data_end_at_once():
    """Its queues go first then, and torch would wait five seconds for each worker, and leave it."""
    before = {*multiprocessing.active_children()}

    def epoch() -> None:
        data = Digits(num_workers=2, batch_size=64)
        data.setup("fit")
        assert sum(len(batch.labels) for batch in data.val_dataloader()) == data.image_count("val")

    epoch()
    gc.collect()
    assert {*multiprocessing.active_children()} <= before
