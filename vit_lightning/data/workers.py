"""Data-loading workers that leave signals to the main process, and end with it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from vit_lightning.signals import die_with, withheld

PATIENCE = 3.0
"""Seconds that workers have to finish what they read when the loader ends; then they are killed."""


class WorkerLoader(DataLoader[Any]):
    """DataLoader whose workers leave SIGTERM, Ctrl-C and SIGUSR1 to the main process, and end with it.

    A terminal, ``timeout`` and Slurm signal all processes of a group. PyTorch's workers would die of that, and
    with them the main process, before its checkpoint.
    """

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        own, parent = self.worker_init_fn, os.getpid()
        if threading.current_thread() is threading.main_thread():  # Linux ends a child with the thread that started it
            self.worker_init_fn = partial(_begin, parent, own)
        try:
            with withheld():
                return _Workers(self)
        finally:
            self.worker_init_fn = own


def with_our_workers(loader: Any) -> Any:
    """Returns a loader of the user; if it is a DataLoader, its workers are those of ``WorkerLoader`` from now on."""
    # one with workers of its own, such as torchdata's, keeps them
    if isinstance(loader, DataLoader) and type(loader)._get_iterator is DataLoader._get_iterator:
        loader.__class__ = type(type(loader).__name__, (WorkerLoader, type(loader)), {})
    return loader


def _begin(parent: int, then: Callable[[int], None] | None, worker: int) -> None:
    die_with(parent)
    if then is not None:
        then(worker)


class _Workers(_MultiProcessingDataLoaderIter):
    """The workers of one loader; PyTorch waits ten seconds for each that is stuck, and then sends it SIGTERM."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._has_ended = False
        super().__init__(loader)
        # at exit, before multiprocessing waits for its children without any limit
        Finalize(self, _end, args=(weakref.ref(self),), exitpriority=10)

    def _shutdown_workers(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end_workers()
        super()._shutdown_workers()

    def _end_workers(self) -> None:
        if self._worker_pids_set:  # else PyTorch's handler of SIGCHLD raises for a worker that is killed
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        if hasattr(self, "_pin_memory_thread"):  # first, since it reads what workers may leave half written
            self._pin_memory_thread_done_event.set()
            self._worker_result_queue.put((None, None))
            self._pin_memory_thread.join(PATIENCE)
        self._workers_done_event.set()
        for queue in self._index_queues:
            queue.put(None)
        until = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


def _end(workers: weakref.ref[_Workers]) -> None:
    if (living := workers()) is not None:
        living._shutdown_workers()
