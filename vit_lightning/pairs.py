"""Images and labels in the batches of any loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

NAMES = ("pixel_values", "images", "image", "img"), ("labels", "label")
"""Keys of images and of labels in dicts, as Hugging Face has them."""
WANTED = "float images (b, c, H, W) and whole labels (b,), or probabilities of the classes (b, classes)"


class Pair(NamedTuple):
    """Images (b, c, H, W) and labels (b,) of a batch, and class probabilities (b, classes) where it has them."""

    images: Tensor
    labels: Tensor
    targets: Tensor | None


def keys_of(batch: Any) -> tuple[Any, Any] | None:
    """Returns the keys of images and labels in a batch or an item: 0 and 1 of two, the names in a dict; else None."""
    if isinstance(batch, Mapping):
        images, labels = ([name for name in names if name in batch] for names in NAMES)
        return (images[0], labels[0]) if len(images) == len(labels) == 1 else None
    return (0, 1) if isinstance(batch, tuple | list) and len(batch) == 2 else None


def pair_of(batch: Any) -> Any:
    """Returns a batch with ``images``, ``labels`` and ``targets``: a Pair, or ours as it is; None if it holds none."""
    if hasattr(batch, "labels") and hasattr(batch, "targets"):
        return batch
    if (keys := keys_of(batch)) is None:
        return None
    images, labels = batch[keys[0]], batch[keys[1]]
    if not (isinstance(images, Tensor) and isinstance(labels, Tensor)):
        return None
    if not images.is_floating_point() or images.ndim != 4:
        return None
    if labels.ndim == 1 and not labels.is_floating_point():
        return Pair(images, labels.long(), None)
    targets = labels.float()
    if targets.ndim != 2 or targets.min() < 0 or ((targets.sum(dim=1) - 1).abs() > 1e-3).any():
        return None  # several labels of an image
    return Pair(images, targets.argmax(dim=1), targets)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch of any form, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Iterable | Mapping) and not isinstance(batch, str | bytes):
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
