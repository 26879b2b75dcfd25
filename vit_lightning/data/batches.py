"""Batches, and the loader that hands them from a dataset to the training step, with its workers."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_lightning.errors import UserError
from vit_lightning.signals import begin_worker, kill_workers, withheld

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""An image (H, W, c)."""


class DamagedImage(UserError):
    """Image that cannot be decoded."""


class Batch:
    """Images and labels of a batch: ``images, labels = batch`` as of any loader, and what is known of them beside.

    Not a tuple: PyTorch and Lightning take tuples apart, to pin them or to hand them to ``DistributedDataParallel``.

    Args:
        images: (b, c, H, W), uint8 from the loader, normalised float32 in the model's step.
        labels: (b,), int64.
        indices: (b,), index of each image in its split.
        keys: (b,), random key of each image in this epoch; None where nothing is random.
        targets: (b, classes), fraction of each class in a mixed image; None without mixing.
        augmented: number of augmentations that have been applied where the images are loaded.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        keys: Tensor | None,
        targets: Tensor | None = None,
        augmented: int = 0,
    ) -> None:
        self.images, self.labels, self.indices, self.keys = images, labels, indices, keys
        self.targets, self.augmented = targets, augmented

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, key: Any) -> Any:
        return (self.images, self.labels)[key]

    def replace(self, **changed: Any) -> "Batch":
        """Returns a batch with some of its parts changed."""
        return Batch(**(vars(self) | changed))

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on a device."""
        if self.images.device == self.labels.device == device:
            return self
        wait = device.type in ("cpu", "mps")
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=not wait))

    def pin_memory(self) -> "Batch":
        """Returns the batch in memory from which a GPU can copy by itself."""
        return self._with_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return self.replace(**{name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)})


PAIR_NAMES = ("pixel_values", "images", "image", "img"), ("labels", "label")
"""Keys of images and of labels in dicts, as Hugging Face has them."""
PAIR = "float images (b, c, H, W) and whole labels (b,), or probabilities of the classes (b, classes)"


def keys_of(batch: Any) -> tuple[Any, Any] | None:
    """Returns the keys of images and labels in a batch or an item: 0 and 1 of two, the names in a dict; else None."""
    if isinstance(batch, Mapping):
        images, labels = ([name for name in names if name in batch] for names in PAIR_NAMES)
        return (images[0], labels[0]) if len(images) == len(labels) == 1 else None
    return (0, 1) if isinstance(batch, tuple | list) and len(batch) == 2 else None


def as_batch(batch: Any) -> Batch | None:
    """Returns images and labels of a loader of others in the form of ours, ours as it is; None if it holds no such."""
    if isinstance(batch, Batch):
        return batch
    images, labels = (None, None) if (keys := keys_of(batch)) is None else (batch[key] for key in keys)
    unknown: Any = None
    if not (isinstance(images, Tensor) and isinstance(labels, Tensor) and images.is_floating_point()):
        return None
    if images.ndim == 4 and labels.ndim == 1 and not labels.is_floating_point():
        return Batch(images, labels.long(), unknown, None)
    targets = labels.float()
    if (images.ndim, targets.ndim) != (4, 2) or (targets < 0).any() or ((targets.sum(dim=1) - 1).abs() > 1e-3).any():
        return None  # several labels of an image
    return Batch(images, targets.argmax(dim=1), unknown, None, targets)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch of any form, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)
    elif hasattr(batch, "__dict__"):
        yield from tensors_in(vars(batch))


def in_words(batch: Any) -> str:
    """Returns what a batch holds, for an error."""
    if isinstance(batch, Tensor):
        return f"{batch.dtype} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key} ({in_words(part)})" for key, part in batch.items())
    return " and ".join(map(in_words, batch)) if isinstance(batch, tuple | list) else type(batch).__name__


class Request(NamedTuple):
    """Images that a loader asks its dataset for: ``dataset.__getitems__(request)`` returns them as a Batch.

    A training request has the random key of each image, a function of (seed, epoch, index), from which the dataset
    draws whatever is random; other requests have none.
    """

    indices: list[int]
    keys: list[int] | None


Read = Callable[[int, int | None], tuple[Pixels, int]]
"""Function of the index and the key of an image that returns its pixels (H, W, c) and its label."""


def gather(request: Request, shape: tuple[int, ...], read: Read) -> Batch | UserError:
    """Returns the batch of single images; an error is returned, since raising it would bury it in a worker's traceback.

    Args:
        request: the images.
        shape: (c, H, W) of each image.
        read: reads an image.
    """
    images = torch.empty(len(request.indices), *shape, dtype=torch.uint8)
    rows, labels = images.numpy(), []
    for position, index in enumerate(request.indices):
        try:
            pixels, label = read(index, None if request.keys is None else request.keys[position])
        except UserError as error:
            return error
        rows[position] = pixels.transpose(2, 0, 1)
        labels.append(label)
    indices, keys = (None if part is None else torch.tensor(part, dtype=torch.int64) for part in request)
    assert indices is not None
    return Batch(images, torch.tensor(labels, dtype=torch.int64), indices, keys)


class _Requests:
    """Batch sampler of a DataLoader: ``requests``, which is called at the start of each epoch."""

    def __init__(self, requests: Callable[[], Iterator[Request]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self._requests()


class Loader:
    """Iterates over the batches of one split.

    Not a DataLoader, so that Lightning does not replace its sampler. ``__iter__`` is a generator, so that the order is
    computed at the first batch, when Lightning has restored its counters, and not when the iterator is made.

    Args:
        dataset: returns a batch, or an error, for a request.
        requests: called at the start of each epoch.
        length: number of batches.
        num_workers: processes that read a batch each; 0 for the process itself.
        pin_memory: whether batches lie in memory from which a GPU can copy by itself.
        finish: makes a batch in this process of what the dataset returns.
        relabel: returns other labels for those of the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        requests: Callable[[], Iterator[Request]],
        length: int,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        finish: Callable[[Any], Batch | UserError] | None = None,
        relabel: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.dataset = dataset
        self._relabel = relabel or _unchanged
        self._length = length
        self._requests = requests
        self._pin_memory, self._finish = pin_memory, finish or _unchanged
        self._loader: DataLoader[Any] | None = None
        if num_workers:
            loader: DataLoader[Any] = DataLoader(
                dataset,
                batch_sampler=_Requests(requests),  # type: ignore[arg-type]  # requests, not indices
                collate_fn=_unchanged,
                num_workers=num_workers,
                persistent_workers=True,
            )
            self._loader = shield_workers(loader)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches():
            if isinstance(batch, UserError):  # returned by a worker, where raising it would bury it in a traceback
                try:
                    raise batch
                finally:
                    del batch  # or error, traceback and this frame keep each other alive, and the workers with them
            yield batch.replace(labels=self._relabel(batch.labels))

    def _batches(self) -> Iterator[Batch | UserError]:
        read: Any = self.dataset
        given = map(read.__getitems__, self._requests()) if self._loader is None else self._loader
        batches = map(self._finish, given)
        return (batch.pin_memory() if self._pin_memory and isinstance(batch, Batch) else batch for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position in the epoch follows from Lightning's batch counter."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore, see ``state_dict``."""


PATIENCE = 3.0
"""Seconds that a worker has to finish what it reads when its iterator is deleted."""


def _unchanged(batch: Any) -> Any:
    return batch


def _start(loader: Any) -> Any:
    """Starts the workers of a DataLoader, which end as soon as their iterator is deleted."""
    iterator = loader.__class__._get_iterator(loader)
    if queues := getattr(iterator, "_index_queues", None):  # it has workers, and they are torch's
        parts = iterator._workers, queues, iterator._workers_done_event
        weakref.finalize(iterator, _release, os.getpid(), *parts).atexit = False
    return iterator


def _release(process: int, workers: Sequence[Any], queues: Sequence[Any], done: Any) -> None:
    """Ends workers whose iterator goes with its queues: torch's own way would come behind these, and wait in vain."""
    if os.getpid() == process:  # not in a worker of another loader, which has a copy
        done.set()
        for queue in queues:
            with contextlib.suppress(ValueError):  # torch has closed it
                queue.put(None)
        for worker in workers:
            worker.join(PATIENCE)


def shield_workers(loader: Any) -> Any:
    """Lets the workers of a DataLoader leave signals to the main process, and end with it; gives others as they are.

    A terminal, ``timeout`` and Slurm signal all processes of a group. PyTorch's workers would die of that, and
    with them the main process, before its checkpoint.
    """
    if isinstance(loader, DataLoader):
        loader.worker_init_fn = partial(begin_worker, loader.worker_init_fn)
        start = partial(_start, weakref.proxy(loader))  # else it would live until it is collected
        loader._get_iterator = withheld()(start)  # type: ignore[method-assign]  # until its workers ignore them
        Finalize(None, kill_workers, exitpriority=10)  # before multiprocessing waits for its children without any limit
    return loader
