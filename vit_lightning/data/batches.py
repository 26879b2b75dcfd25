"""Batches and what a loader hands from a dataset to the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.data.workers import WorkerLoader
from vit_lightning.errors import UserError


class Batch(NamedTuple):
    """Images of a split, as a loader yields them."""

    images: Tensor
    """(b, c, H, W), uint8 from the loader, normalised float32 in the model's step."""
    labels: Tensor
    """(b,), int64."""
    indices: Tensor
    """(b,), index of each image in its split."""
    keys: Tensor | None
    """(b,), random key of each image in this epoch; None where nothing is random."""
    targets: Tensor | None = None
    """(b, classes), fraction of each class in a mixed image; None without mixing."""
    skipped: tuple[str, ...] = ()
    """Errors of images that the dataset left out; empty once the loader has reported them."""
    augmented: int = 0
    """Number of augmentations that have been applied where the images are loaded."""

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device; Lightning calls it, or would look for tensors in all of the parts."""
        if self.images.device == device:
            return self
        wait = device.type in ("cpu", "mps")
        moved = (part.to(device, non_blocking=not wait) if isinstance(part, Tensor) else part for part in self)
        return Batch(*moved)  # type: ignore[arg-type]


class Request(NamedTuple):
    """Images that a loader asks its dataset for: ``dataset.__getitems__(request)`` returns them as a Batch.

    A training request has the random key of each image, a function of (seed, epoch, index), from which the dataset
    draws whatever is random; other requests have none.
    """

    indices: list[int]
    keys: list[int] | None


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
                batch = batch._replace(skipped=())
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
