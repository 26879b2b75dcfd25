"""Batches, and the loader that hands them from a dataset to the training step, with its workers."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from vit_lightning.data.bad_images import all_damaged
from vit_lightning.errors import UserError
from vit_lightning.signals import die_with, withheld

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""An image (H, W, c)."""


class Batch:
    """Images and labels of a batch: ``images, labels = batch`` as of any loader, and what is known of them beside.

    Not a tuple: PyTorch and Lightning take tuples apart, to pin them or to hand them to ``DistributedDataParallel``.

    Args:
        images: (b, c, H, W), uint8 from the loader, normalised float32 in the model's step.
        labels: (b,), int64.
        indices: (b,), index of each image in its split.
        keys: (b,), random key of each image in this epoch; None where nothing is random.
        targets: (b, classes), fraction of each class in a mixed image; None without mixing.
        skipped: errors of images that the dataset left out; empty once the loader has reported them.
        augmented: number of augmentations that have been applied where the images are loaded.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        keys: Tensor | None,
        targets: Tensor | None = None,
        skipped: tuple[str, ...] = (),
        augmented: int = 0,
    ) -> None:
        self.images, self.labels, self.indices, self.keys = images, labels, indices, keys
        self.targets, self.skipped, self.augmented = targets, skipped, augmented

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, key: Any) -> Any:
        return (self.images, self.labels)[key]

    def replace(self, **changed: Any) -> Batch:
        """Returns a batch with some of its parts changed."""
        return Batch(**(vars(self) | changed))

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        if self.images.device == device:
            return self
        wait = device.type in ("cpu", "mps")
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=not wait))

    def pin_memory(self) -> Batch:
        """Returns the batch in memory from which a GPU can copy by itself."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return self.replace(**{name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)})


class Request(NamedTuple):
    """Images that a loader asks its dataset for: ``dataset.__getitems__(request)`` returns them as a Batch.

    A training request has the random key of each image, a function of (seed, epoch, index), from which the dataset
    draws whatever is random; other requests have none.
    """

    indices: list[int]
    keys: list[int] | None


Read = Callable[[int, int | None], tuple[Pixels, int]]
"""Function of the index and the key of an image that returns its pixels (H, W, c) and its label."""


def gather(request: Request, shape: tuple[int, ...], read: Read, *, skip: bool = False) -> Batch | UserError:
    """Returns the batch of single images; an error is returned, since raising it would bury it in a worker's traceback.

    Args:
        request: the images.
        shape: (c, H, W) of each image.
        read: reads an image.
        skip: whether images that cannot be read are left out; otherwise they are the error.
    """
    images = torch.empty(len(request.indices), *shape, dtype=torch.uint8)
    rows, labels, good, skipped = images.numpy(), list[int](), list[int](), list[str]()
    for position, index in enumerate(request.indices):
        try:
            pixels, label = read(index, None if request.keys is None else request.keys[position])
        except UserError as error:
            if not skip:
                return error
            skipped += error.problems
            continue
        rows[len(good)] = pixels.transpose(2, 0, 1)
        labels.append(label)
        good.append(position)
    if not good:
        return all_damaged(skipped)
    indices, keys = (None if part is None else torch.tensor(part)[good] for part in request)
    assert indices is not None
    return Batch(images[: len(good)], torch.tensor(labels), indices, keys, skipped=tuple(skipped))


class _Requests:
    """Batch sampler of a DataLoader; calls ``requests`` at the start of each epoch."""

    def __init__(self, requests: Callable[[], Iterator[Request]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self._requests()


class Loader:
    """Iterates over the batches of one split.

    Not a DataLoader, so that Lightning does not replace its sampler. ``__iter__`` is a generator, so that the order is
    computed at the first batch, when Lightning has restored its counters, and not when the iterator is made.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        requests: Callable[[], Iterator[Request]],
        length: int,
        *,
        num_workers: int,
        pin_memory: bool,
        on_skipped: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._on_skipped = on_skipped
        self._length = length
        self._requests = requests
        self._loader: WorkerLoader | None = None
        if num_workers == 0 and not pin_memory:
            return  # a DataLoader would add nothing but its time
        self._loader = WorkerLoader(
            dataset,
            batch_sampler=_Requests(requests),  # type: ignore[arg-type]  # a request, not a list of indices
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches():
            if isinstance(batch, UserError):  # returned by a worker, where raising it would bury it in a traceback
                try:
                    raise batch
                finally:
                    del batch  # or error, traceback and this frame keep each other alive, and the workers with them
            skipped = getattr(batch, "skipped", ())
            if skipped and self._on_skipped is not None:
                self._on_skipped(skipped)
                batch = batch.replace(skipped=())
            yield batch

    def _batches(self) -> Iterable[Any]:
        if self._loader is None:
            return map(self.dataset.__getitems__, self._requests())  # type: ignore[attr-defined]
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position in the epoch follows from Lightning's batch counter."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore, see ``state_dict``."""


def _unchanged(batch: Any) -> Any:
    return batch


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
        self._has_ended, self._process = False, os.getpid()
        super().__init__(loader)
        # at exit, before multiprocessing waits for its children without any limit
        Finalize(self, _end, args=(weakref.ref(self),), exitpriority=10)

    def _shutdown_workers(self) -> None:
        if os.getpid() != self._process:  # inherited by a worker of another loader, which must not end these
            return
        if not self._has_ended:
            self._has_ended = True
            self._end_workers()
        super()._shutdown_workers()
        # a thread that is still to end would close files by numbers that are those of others by then
        queues: list[Any] = self._index_queues
        for queue in queues:
            if queue._closed and queue._thread:  # closed, and was in use: its thread ends
                queue._thread.join(PATIENCE)

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
