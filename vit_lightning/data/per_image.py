"""Augmentations of single images, such as torchvision's v2 transforms; random numbers of others from a key."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.batches import Batch, Request, in_words
from vit_lightning.errors import UserError, named
from vit_lightning.random_keys import mix

Own = type[Any] | Callable[..., Any]
"""A class or function of others; a config names it by its path."""


class PerImage(Augmentation):
    """Random change of one image at a time, by one of torchvision's v2 transforms or any other callable.

    It gets a uint8 tensor (c, H, W) and returns one of the same shape. Before each image torch, ``random`` and numpy
    are seeded by its key, so that the result depends on no batch, worker or resume. It runs on the CPU: in the loader's
    workers if it comes before all augmentations of whole batches.

    Args:
        transform: class of the transform, or a function of one image.
        arguments: arguments of the class, or further ones of the function.
    """

    def __init__(self, transform: Own, arguments: dict[str, Any] | None = None) -> None:
        self.name = name_of(transform).rpartition(".")[2]
        if isinstance(transform, type):
            with named(f"augment.{self.name}: ", others=True):
                transform = transform(**(arguments or {}))
        elif arguments:
            transform = partial(transform, **arguments)
        self.transform = transform

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        before = images.to("cpu", torch.uint8)
        after = torch.empty_like(before)
        with seeded() as seed:
            for number, key in enumerate(keys.tolist()):
                seed(key)
                after[number] = self._changed(before[number])
        return after.to(images)

    def _changed(self, image: Tensor) -> Tensor:
        with named(f"augment.{self.name} gets a uint8 tensor (c, H, W), normalised after it: ", others=True):
            changed = self.transform(image)
        if not isinstance(changed, Tensor) or (changed.dtype, changed.shape) != (image.dtype, image.shape):
            both = f"augment.{self.name} gives {in_words(changed)} for {in_words(image)}"
            raise UserError(f"{both}: it must keep size and type (data.mean and data.std normalise after it)")
        return changed


class PerImageFirst(Dataset[Batch]):
    """Dataset whose training images are changed one by one where they are loaded.

    Args:
        dataset: returns a batch for a request.
        changes: the first augmentations of the training images.
    """

    def __init__(self, dataset: Any, changes: Sequence[Augmentation]) -> None:
        self.dataset, self.changes = dataset, changes

    def __getitems__(self, request: Request) -> Batch | UserError:
        batch: Batch | UserError = self.dataset.__getitems__(request)
        if isinstance(batch, UserError) or batch.keys is None:
            return batch
        images = batch.images
        try:
            with named("data."):
                for number, change in enumerate(self.changes):
                    images = change(images, mix(batch.keys, number))
        except UserError as error:
            return error
        return batch.replace(images=images, augmented=len(self.changes))


def name_of(own: Any) -> str:
    """Returns the module and name of a class, a function, or the class of an object."""
    named = own if hasattr(own, "__qualname__") else type(own)
    return f"{named.__module__}.{named.__qualname__}"


@contextmanager
def seeded() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds torch (on the CPU), ``random`` and numpy with a key; restores their states after."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield _seed
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
