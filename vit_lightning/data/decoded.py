"""Images that are decoded when they are needed, a part of each, for any source that can say where they are."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from vit_lightning.data.decoding import Box, Pixels, decode, decode_whole
from vit_lightning.data.sampling import Batch, Images, Request, all_damaged
from vit_lightning.errors import UserError
from vit_lightning.sizes import pair


def random_resized_box(width: int, height: int, *, min_area: float, key: int) -> Box:
    """A random part (Szegedy et al. 2015), ``min_area`` to all of the area and 3:4 to 4:3 wide, from the key alone."""
    if min_area == 1.0:  # else a little less, where width and height are nearly equal
        return 0, 0, width, height
    draw = random.Random(key)
    for _ in range(10):
        area = width * height * draw.uniform(min_area, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, upper, left + w, upper + h
    return 0, 0, width, height


def centre_box(width: int, height: int, *, target: tuple[int, int], share: float) -> Box:
    """The largest box in the middle with the target's ratio of height to width, shrunk to ``share`` of its sides."""
    scale = min(height / target[0], width / target[1]) * share
    h, w = target[0] * scale, target[1] * scale
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def view_problems(
    *, image_size: int | tuple[int, int], min_area: float, centre_share: float, in_memory: bool | None
) -> list[str]:
    """What is wrong with how images are cropped and kept."""
    shares = {"min_area": min_area, "centre_share": centre_share}
    problems = [
        f"{key}={share} must be above 0 and at most 1" for key, share in shares.items() if not 0.0 < share <= 1.0
    ]
    if in_memory and min_area < 1:
        problems.append(f"in_memory={in_memory} needs min_area=1 (augment may hold RandomResizedCrop)")
    if min(pair(image_size)) < 1:
        problems.append(f"image_size={image_size} must be at least 1")
    return problems


class DecodedImages(Dataset[Batch]):
    """Images that are opened one by one, cropped and resized to one size: uint8 (3, H, W).

    Args:
        source: the file of an index, or what is in it.
        labels: label of each image.
        image_size: height and width of what comes out.
        min_area: smallest part of the image that a random crop shows.
        centre_share: share of the sides that the fixed crop shows, where nothing is random.
        names: name of each image.
        skip: whether a batch leaves out what cannot be decoded, instead of being an error.
    """

    def __init__(
        self,
        source: Callable[[int], Path | bytes],
        labels: Sequence[int],
        *,
        image_size: tuple[int, int],
        min_area: float,
        centre_share: float,
        names: Sequence[str],
        skip: bool,
    ) -> None:
        self.names = names
        self.source, self.labels = source, torch.tensor(labels)
        self.image_size, self.min_area, self.centre_share = image_size, min_area, centre_share
        self.skip = skip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, request: Request) -> Batch | UserError:
        keys: Sequence[int | None] = [None] * len(request.indices) if request.keys is None else request.keys
        images = torch.empty(len(keys), 3, *self.image_size, dtype=torch.uint8)
        rows = images.numpy()
        good: list[int] = []
        skipped: list[str] = []
        for place, (index, key) in enumerate(zip(request.indices, keys, strict=True)):
            try:
                rows[len(good)] = self.pixels(index, key).transpose(2, 0, 1)
                good.append(place)
            except UserError as error:
                if not self.skip:
                    return error
                skipped += error.problems
        if not good:
            return all_damaged(skipped)
        indices = torch.tensor(request.indices)[good]
        kept = None if request.keys is None else torch.tensor(request.keys)[good]
        return Batch(images[: len(good)], self.labels[indices], indices, kept, skipped=tuple(skipped))

    def fingerprint(self) -> str:
        """Of names and labels; the files themselves are not opened."""
        rows = (f"{name}\0{label}\n" for name, label in zip(self.names, self.labels.tolist(), strict=True))
        return hashlib.sha256("".join(rows).encode(errors="surrogateescape")).hexdigest()

    def whole(self, index: int) -> Pixels:
        """The image as it lies in its file, uint8 (H, W, 3)."""
        source = self.source(index)
        return decode_whole(source, self._name(source, index))

    def name(self, index: int) -> str:
        """What errors call an image: its file, or its name in a source without files."""
        return self._name(self.source(index), index)

    def _name(self, source: Path | bytes, index: int) -> str:
        return str(source) if isinstance(source, Path) else self.names[index]

    def pixels(self, index: int, key: int | None) -> Pixels:
        """uint8 (H, W, 3): the part that a key draws, or without one the middle."""
        part = (
            partial(centre_box, target=self.image_size, share=self.centre_share)
            if key is None
            else partial(random_resized_box, min_area=self.min_area, key=key)
        )
        source = self.source(index)
        return decode(source, self._name(source, index), size=self.image_size, choose_box=part)


KEPT_BYTES = 2**30
"""Decoded images of a split that are kept in memory where it is not said whether they are."""


def keep_if_small(dataset: DecodedImages, split: str, in_memory: bool | None) -> DecodedImages | Images:
    """The dataset with its images decoded and kept; as it is, where that is not wanted or cannot be."""
    height, width = dataset.image_size
    if in_memory is None:
        in_memory = dataset.min_area == 1.0 and 3 * height * width * len(dataset) <= KEPT_BYTES
    return keep(dataset, f"{split} images", random_part=split == "train") if in_memory else dataset


def keep(dataset: DecodedImages, text: str, *, random_part: bool) -> Images:
    """All images of a dataset decoded now, as they would be at every use; with a bar.

    Args:
        text: what the bar says.
        random_part: whether images are decoded as for training, where ``min_area`` must be 1, or as for a test.

    Raises:
        UserError: an image is damaged and the dataset does not skip.
    """
    assert not random_part or dataset.min_area == 1.0
    height, width = dataset.image_size
    images = torch.zeros(len(dataset), height, width, 3, dtype=torch.uint8)
    rows, faults = images.numpy(), {}

    def read(index: int) -> UserError | None:
        try:
            rows[index] = dataset.pixels(index, 0 if random_part else None)
        except UserError as error:
            return error
        return None

    # threads, since Pillow decodes outside of Python's lock
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        bar = tqdm(range(len(dataset)), desc=text, unit=" images", disable=None, leave=False)
        for index, error in zip(bar, pool.map(read, range(len(dataset))), strict=True):
            if error is not None and not dataset.skip:
                pool.shutdown(cancel_futures=True)
                raise error
            if error is not None:
                faults[index] = str(error)
    return KeptImages(images.permute(0, 3, 1, 2).contiguous(), dataset, faults=faults)


class KeptImages(Images):
    """What ``keep`` has decoded; it is told from others as the images that lie on disk are."""

    def __init__(self, images: Tensor, dataset: DecodedImages, *, faults: Mapping[int, str]) -> None:
        super().__init__(images, dataset.labels, faults=faults)
        self._on_disk = dataset

    def name(self, index: int) -> str:
        return self._on_disk.name(index)

    def whole(self, index: int) -> Pixels:
        return self._on_disk.whole(index)

    def fingerprint(self) -> str:
        return self._on_disk.fingerprint()
