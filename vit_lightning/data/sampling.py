"""Which images make up which batch: a pure function of the seed and of how many batches are done.

No order is stored anywhere. A run that goes on after an interruption asks how many batches it has completed and finds
itself where it was, with any number of workers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_lightning.errors import UserError
from vit_lightning.random_keys import one_key, repeated_keys, sample_keys


class Batch(NamedTuple):
    """What a loader yields."""

    images: Tensor
    """(b, c, H, W), uint8 from the loader, normalised float32 in the model's step."""
    labels: Tensor
    """(b,), int64."""
    indices: Tensor
    """(b,), place of each image in its split."""
    keys: Tensor | None
    """(b,), random key of each image in this epoch; None where nothing is random."""
    targets: Tensor | None = None
    """(b, classes), share of each class in an image that is mixed of several; None where each has its label alone."""
    skipped: tuple[str, ...] = ()
    """What the dataset says of images that it could not decode and left out; empty once the loader has passed it on."""


class Request(NamedTuple):
    """What a loader asks its dataset for; becomes a Batch."""

    indices: list[int]
    keys: list[int] | None


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """Order of ``size`` images in an epoch."""
    key = one_key(seed, epoch, -1)
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(key)).tolist()
    return order


def train_batch_count(size: int, batch_size: int, ranks: int) -> int:
    """Batches of an epoch; the last holds what is left, and a few more if a rank would else get none."""
    return max(1, math.ceil((size - ranks + 1) / (batch_size * ranks)))


def train_requests(
    *,
    size: int,
    batch_size: int,
    seed: int,
    completed: int,
    batches_per_epoch: int,
    rank: int,
    ranks: int,
    subset: Tensor | None = None,
    repetitions: int = 1,
) -> Iterator[Request]:
    """The rest of the epoch in which ``completed`` batches of the whole run are done.

    Each of ``size`` images comes once. With repetitions, an epoch shows as many images, but a part of them, and these
    that often each, next to one another and augmented anew (Hoffer et al. 2020). ``subset`` holds their indices where
    they are a part of a dataset.
    """
    epoch, done = divmod(completed, batches_per_epoch)
    order = torch.tensor(epoch_order(seed, epoch, size)).repeat_interleave(repetitions)[:size]
    repetition = torch.arange(size) % repetitions
    indices = order if subset is None else subset[order]
    keys = repeated_keys(sample_keys(seed, epoch, indices), repetition)
    step = batch_size * ranks
    count = train_batch_count(size, batch_size, ranks)
    for number in range(done, count):
        together = torch.arange(number * step, (number + 1) * step if number < count - 1 else size)
        mine = torch.tensor_split(together, ranks)[rank]
        yield Request(indices[mine].tolist(), keys[mine].tolist())


def nested_subset(labels: Tensor, seed: int, *, fraction: float = 1.0, shots: int | None = None) -> Tensor:
    """Indices, in order, of a share or of ``shots`` images of each class; a smaller choice lies in every larger one."""
    rank = sample_keys(seed, -1, torch.arange(len(labels))).argsort(stable=True)
    chosen = []
    for label in torch.unique(labels):
        images = rank[labels[rank] == label]
        count = max(1, round(fraction * len(images))) if shots is None else shots
        chosen.append(images[:count])
    return torch.cat(chosen).sort().values


def evaluation_requests(*, size: int, batch_size: int, rank: int, ranks: int) -> list[Request]:
    """Each image once over all ranks, and the same number of batches on every rank (or ranks would wait for ever)."""
    mine = torch.arange(rank, size, ranks)
    count = max(1, min(math.ceil(math.ceil(size / ranks) / batch_size), size // ranks))
    return [Request(part.tolist(), None) for part in torch.tensor_split(mine, count) if len(part)]


class _Requests:
    """The batch sampler of a DataLoader; asked anew at the start of each epoch."""

    def __init__(self, requests: Callable[[], Iterator[Request]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self._requests()


class Loader:
    """Iterates over the batches of one split.

    Not a DataLoader itself, so that Lightning does not put a sampler of its own into it; a generator, so that the order
    is asked for at the first batch, when Lightning has restored its counters, and not when the iterator is made.
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
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            batch_sampler=_Requests(requests),  # type: ignore[arg-type]  # a request, not a list of indices
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if isinstance(batch, UserError):  # from a worker, where raising it would bury it in a traceback
                try:
                    raise batch
                finally:
                    del batch  # or error, traceback and this frame keep each other alive, and the workers with them
            skipped = getattr(batch, "skipped", ())
            if skipped and self._on_skipped is not None:
                self._on_skipped(skipped)
                batch = batch._replace(skipped=())
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the place in the order follows from Lightning's batch counter."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore, see ``state_dict``."""


def _as_it_is(batch: Any) -> Any:
    return batch


class Images(Dataset[Batch]):
    """Images in memory: uint8 (n, c, H, W) and their labels (n,).

    Args:
        faults: what is wrong with images that could not be had, by index; batches leave them out.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        faults: Mapping[int, str] | None = None,
    ) -> None:
        assert images.dtype == torch.uint8
        assert len(images) == len(labels)
        self.images, self.labels = images, labels
        self.faults = dict(faults or {})
        self._there: tuple[Tensor, Tensor] | None = None  # images and labels once more, on a GPU

    def move_to(self, device: torch.device) -> None:
        """Batches come from a copy on this device from now on; a loader must then have no workers."""
        self._there = self.images.to(device), self.labels.to(device)

    @property
    def is_moved(self) -> bool:
        return self._there is not None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, request: Request) -> Batch | UserError:
        indices = torch.tensor(request.indices)
        keys = None if request.keys is None else torch.tensor(request.keys)
        skipped: tuple[str, ...] = ()
        if self.faults:
            good = torch.tensor([index not in self.faults for index in request.indices])
            skipped = tuple(self.faults[index] for index in request.indices if index in self.faults)
            if not good.any():
                return all_damaged(skipped)
            indices, keys = indices[good], None if keys is None else keys[good]
        images, labels = (self.images, self.labels) if self._there is None else self._there
        indices = indices.to(images.device)
        keys = None if keys is None else keys.to(images.device)
        return Batch(images.index_select(0, indices), labels[indices], indices, keys, skipped=skipped)

    def name(self, index: int) -> str:
        """What errors and lists call an image: here its index."""
        return str(index)

    def whole(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 (H, W, c)."""
        return self.images[index].permute(1, 2, 0).numpy()

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        digest.update(self.images.contiguous().numpy().data)
        return digest.hexdigest()


def all_damaged(problems: Sequence[str]) -> UserError:
    """What a dataset answers where it has to leave out a whole batch."""
    return UserError([*problems, f"all {len(problems)} images of a batch are damaged: there is none to go on with"])


def dataset_fingerprint(dataset: Dataset[Any]) -> str:
    """What the dataset says of itself, or at least how many images it has."""
    own = getattr(dataset, "fingerprint", None)
    return str(own()) if callable(own) else str(len(dataset))  # type: ignore[arg-type]
