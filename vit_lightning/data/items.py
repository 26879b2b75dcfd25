"""Datasets of single (image, label) items, read as batches."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from tqdm import tqdm

from vit_lightning.data.batches import Batch, Pixels, Request, gather, keys_of
from vit_lightning.data.decoding import to_rgb
from vit_lightning.data.images import centre_box
from vit_lightning.data.per_image import seeded
from vit_lightning.errors import UserError, named
from vit_lightning.random_keys import one_key

WANTED = "(image, label), the image a PIL image, a uint8 or float tensor (c, H, W) or a numpy array (H, W, c)"


def gives_items(dataset: Any) -> bool:
    """Whether a dataset gives single items; those of ours give a Batch for a Request."""
    return isinstance(dataset, Subset) or not hasattr(dataset, "__getitems__")


@dataclass(kw_only=True, eq=False, repr=False)
class Items(Dataset[Batch]):
    """Batches of a dataset of single items: uint8 images (c, H, W) of one size, with their labels.

    Before each item torch, ``random`` and numpy are seeded by its key, so that random transforms of the dataset itself
    depend on no batch, worker or resume. Images of another size are cropped at the centre and resized.

    Args:
        dataset: gives (image, label) for an index. An image is a PIL image; a tensor (c, H, W) or (H, W), or a numpy
            array (H, W, c) or (H, W), of uint8, or of floats between 0 and 1, which are rounded to 256 levels.
        title: name of the dataset in errors.
        image_size: height and width of the images.
        in_channels: channels of the images.
        places: label in batches for each label of the dataset.
        indices: items of the dataset that belong to the split.
    """

    dataset: Any
    title: str
    image_size: tuple[int, int]
    in_channels: int
    places: Sequence[int]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitems__(self, request: Request) -> Batch | UserError:
        with seeded() as seed:

            def read(index: int, key: int | None) -> tuple[Pixels, int]:
                seed(one_key(0, 0, index) if key is None else key)
                pixels, label = self._read(index)
                return self._resized(pixels), label

            return gather(request, (self.in_channels, *self.image_size), read)

    def _read(self, index: int) -> tuple[Pixels, int]:
        """Returns an image at its own size, uint8 (H, W, c), and its label."""
        image, label = read_item(self.dataset, self.indices[index], self.title)
        if not 0 <= label < len(self.places):
            text = f"{self.title}: item {self.indices[index]} has label {label}"
            raise UserError(f"{text}, not one of {len(self.places)} classes from 0 on (data.num_classes)")
        with named(f"{self.title}: item {self.indices[index]}: "):
            return to_pixels(image, self.in_channels), self.places[label]

    def _resized(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        if (height, width) == self.image_size:
            return pixels
        box = centre_box(width, height, target=self.image_size, fraction=1.0)
        size = self.image_size[1], self.image_size[0]
        channels = [Image.fromarray(np.ascontiguousarray(channel)) for channel in pixels.transpose(2, 0, 1)]
        resized = [np.asarray(channel.resize(size, Image.Resampling.BICUBIC, box=box)) for channel in channels]
        return np.stack(resized, axis=-1)

    @cached_property
    def labels(self) -> Tensor:
        """Label of each image, from the dataset's own list if it has one, else from its items."""
        of_all, places = labels_of(self.dataset, self.title), dict(enumerate(self.places))
        return torch.tensor([places.get(of_all[index], of_all[index]) for index in self.indices])

    def part(self, indices: Sequence[int]) -> "Items":
        """Returns some of the items, by their places among these."""
        return replace(self, indices=[self.indices[i] for i in indices])

    def name(self, index: int) -> str:
        """Returns the name of an image in lists: its index in the dataset."""
        return f"{type(self.dataset).__name__}[{self.indices[index]}]"

    def whole(self, index: int) -> Pixels:
        """Returns an image at its own size, uint8 (H, W, c)."""
        with seeded() as seed:
            seed(one_key(0, 0, index))
            return self._read(index)[0]

    def fingerprint(self) -> str:
        """Returns a hash of the number of images, which they are, and three of them with their labels."""
        digest = hashlib.sha256(np.asarray(self.indices, dtype=np.int64).tobytes())
        for index in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else []:
            batch = self.__getitems__(Request([index], None))
            if isinstance(batch, UserError):
                raise batch
            digest.update(batch.images.numpy().tobytes() + batch.labels.numpy().tobytes())
        return digest.hexdigest()


def read_item(dataset: Any, index: int, title: str) -> tuple[Any, int]:
    """Returns image and label of an item.

    Raises:
        UserError: the dataset raises an error, or gives something else.
    """
    with named(f"{title}: item {index}: ", others=True):
        item = dataset[index]
    if (keys := keys_of(item)) is None:
        found = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise UserError(f"{title}: item {index} is a {found}, not {WANTED} (a LightningDataModule takes any loader)")
    image, label = item[keys[0]], item[keys[1]]
    array = np.asarray(label) if isinstance(label, int | np.integer | np.ndarray | Tensor) else None
    if array is None or array.size != 1 or array.dtype.kind not in "iu":
        shown = " ".join(str(label).split())[:60]
        raise UserError(f"{title}: item {index} has label {shown} ({type(label).__name__}), not a whole number")
    return image, int(array.item())


def to_pixels(image: Any, channels: int | None = None) -> Pixels:
    """Returns an image of a dataset as uint8 (H, W, c), of PIL with ``channels``, by default 1 in modes L and 1."""
    if isinstance(image, Image.Image):
        gray = channels == 1 or (channels is None and image.mode in ("L", "1"))
        rgb = to_rgb(image) if image.mode not in ("L", "1") or not gray else image
        return np.atleast_3d(np.asarray(rgb.convert("L") if gray else rgb))
    if not isinstance(image, Tensor | np.ndarray):
        raise UserError(f"the image is a {type(image).__name__}: an item must be {WANTED}")
    array = np.asarray(image)
    if isinstance(image, Tensor) and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if isinstance(image, np.ndarray) and array.ndim == 3 and array.shape[0] <= 4 < array.shape[2]:
        raise UserError(f"a numpy array must be (H, W, c), this one has shape {array.shape} (a tensor is (c, H, W))")
    if array.ndim not in (2, 3) or 0 in array.shape or not (array.dtype == np.uint8 or array.dtype.kind == "f"):
        raise UserError(f"the image has shape {tuple(image.shape)} and type {image.dtype}: an item must be {WANTED}")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not 0.0 <= low <= high <= 1.0:
            text = f"values from {low:.3g} to {high:.3g}: floats must lie between 0 and 1"
            raise UserError(f"{text} (leave out its normalisation and give data.mean and data.std)")
        array = np.round(array * 255.0).astype(np.uint8)
    array = np.atleast_3d(array)
    if channels is not None and array.shape[2] != channels:
        way_out = "image.convert('RGB') makes all alike"
        raise UserError(f"the image has {array.shape[2]} channels, the first one has {channels} ({way_out})")
    return array


def labels_of(dataset: Any, title: str) -> list[int]:
    """Returns the label of each item: of an attribute if it agrees with the first and last item, else of all items."""
    for name in ("labels", "targets", "y", "_labels"):
        found = getattr(dataset, name, None)
        try:
            labels = [int(label) for label in found] if found is not None else []
        except (TypeError, ValueError):
            continue
        ends = (0, len(labels) - 1)
        with seeded():
            if len(labels) == len(dataset) and all(read_item(dataset, i, title)[1] == labels[i] for i in ends):
                return labels
    bar = tqdm(range(len(dataset)), desc=f"labels of {title}", unit=" items", disable=not sys.stderr.isatty())
    with seeded():
        return [read_item(dataset, index, title)[1] for index in bar]
