"""Datasets of images: in memory, or encoded and decoded when they are needed, or decoded once and kept."""

import hashlib
import math
import os
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from vit_lightning.data.batches import Batch, Pixels, Request, gather
from vit_lightning.data.decoding import Box, Interpolation, Jpeg, WholeBox, decode, decode_on, decode_whole, plain_jpeg
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, first_line
from vit_lightning.sizes import Resize


class Images(Dataset[Batch]):
    """Images in memory.

    Args:
        images: (n, c, H, W), uint8.
        labels: (n,), int64.
        decoded: the dataset that they were decoded from, which has their names, originals and fingerprint.
    """

    def __init__(self, images: Tensor, labels: Tensor, decoded: "DecodedImages | None" = None) -> None:
        assert images.dtype == torch.uint8
        assert len(images) == len(labels)
        self.images, self.labels, self.decoded = images, labels, decoded
        self._on_device: tuple[Tensor, Tensor] | None = None  # a copy of images and labels

    def move_if_small(self, device: torch.device) -> None:
        """Copies the images to a GPU, from which batches then come, if they take at most a quarter of what is free.

        Training needs most of it. The loader must have no workers.
        """
        if not self.is_moved and self.images.nbytes <= torch.cuda.mem_get_info(device)[0] // 4:
            self._on_device = self.images.to(device), self.labels.to(device)

    @property
    def is_moved(self) -> bool:
        return self._on_device is not None

    def needs_workers(self, device: torch.device) -> bool:
        """Whether worker processes may make its batches: on a CPU to hand them over costs more than to make them."""
        return not self.is_moved and (self.decoded is None or device.type != "cpu")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, request: Request) -> Batch:
        indices = torch.tensor(request.indices, dtype=torch.int64)
        keys = None if request.keys is None else torch.tensor(request.keys)
        images, labels = (self.images, self.labels) if self._on_device is None else self._on_device
        if images.is_cuda:  # from pinned memory the device copies by itself, and nobody waits
            both = torch.stack([indices] if keys is None else [indices, keys]).pin_memory()
            indices, *others = both.to(images.device, non_blocking=True)
            keys = others[0] if others else None
        return Batch(images.index_select(0, indices), labels[indices], indices, keys)

    def name(self, index: int) -> str:
        """Returns the name of an image in errors and lists: its index where it comes from no file."""
        return str(index) if self.decoded is None else self.decoded.name(index)

    def whole(self, index: int) -> Pixels:
        """Returns an image, uint8 (H, W, c), at its original size."""
        return self.images[index].permute(1, 2, 0).numpy() if self.decoded is None else self.decoded.whole(index)

    def fingerprint(self) -> str:
        if self.decoded is not None:
            return self.decoded.fingerprint()
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        digest.update(self.images.contiguous().numpy().data)
        return digest.hexdigest()


def random_resized_box(width: int, height: int, *, min_area: float, key: int) -> Box:
    """Returns a random crop (Szegedy et al. 2015), ``min_area`` to 1 of the area, ratio 3:4 to 4:3, from the key."""
    if min_area == 1.0:  # the loop would give a little less for images that are nearly square
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


def centre_box(width: int, height: int, *, target: tuple[int, int], fraction: float) -> Box:
    """Returns the largest centred box of the target's aspect ratio, shrunk to ``fraction`` of its sides."""
    scale = min(height / target[0], width / target[1]) * fraction
    h, w = target[0] * scale, target[1] * scale
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


class Encoded(NamedTuple):
    """Encoded images of a split."""

    read: Callable[[Any], Path | bytes | Image.Image]
    """Returns the file of an image, its content, or the image itself."""
    images: Sequence[Any]
    """Arguments of ``read``."""
    labels: Sequence[int]
    names: Sequence[str]

    def part(self, indices: Sequence[int]) -> "Encoded":
        images, labels = [self.images[i] for i in indices], [self.labels[i] for i in indices]
        return Encoded(self.read, images, labels, [self.names[i] for i in indices])


@dataclass(kw_only=True, eq=False, repr=False)
class DecodedImages(Dataset[Batch]):
    """Images that are decoded one by one, cropped and resized to one size: uint8 (3, H, W).

    Args:
        encoded: the images, their labels and names.
        image_size: height and width of the result.
        min_area: smallest fraction of the area that a random crop shows.
        centre_share: fraction of the sides that the centre crop shows, used without a random key.
        interpolation: how crops are resized.
        resize: size to which the whole image is resized in place of the centre crop, see ``decode``.
        gray: whether they are converted to gray, (1, H, W).
    """

    encoded: Encoded
    image_size: tuple[int, int]
    min_area: float
    centre_share: float
    interpolation: Interpolation
    resize: Resize | None = None
    gray: bool = False

    def __post_init__(self) -> None:
        self.labels = torch.tensor(self.encoded.labels)
        with suppress(UserError):  # said where the image is used
            if max((self.whole(index).max() for index in range(0, len(self), len(self) // 3 + 1)), default=255) <= 16:
                warnings.warn(f"images such as {self.name(0)} are nearly black (scale 16 bits to 65535)", stacklevel=2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, request: Request) -> Batch | UserError:
        return gather(request, (1 if self.gray else 3, *self.image_size), self._read)

    def _read(self, index: int, key: int | None) -> tuple[Pixels, int]:
        pixels = self.pixels(index, key)
        if self.gray:
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
        return pixels, self.encoded.labels[index]

    def source(self, index: int) -> Path | bytes | Image.Image:
        """Returns the file of an image, its content, or the image itself."""
        return self.encoded.read(self.encoded.images[index])

    def fingerprint(self) -> str:
        """Returns a hash of names and labels; the files themselves are not opened."""
        rows = (f"{name}\0{label}\n" for name, label in zip(self.encoded.names, self.labels.tolist(), strict=True))
        return hashlib.sha256("".join(rows).encode(errors="surrogateescape")).hexdigest()

    def whole(self, index: int) -> Pixels:
        """Returns the whole image at its own size, uint8 (H, W, 3)."""
        source = self.source(index)
        return decode_whole(source, self._name(source, index))

    def name(self, index: int) -> str:
        """Returns the name of an image in errors: its file, or its name in a source without files."""
        return self._name(self.source(index), index)

    def _name(self, source: Path | bytes | Image.Image, index: int) -> str:
        return str(source) if isinstance(source, Path) else self.encoded.names[index]

    def pixels(self, index: int, key: int | None) -> Pixels:
        """Returns the crop that a key draws, or without one the centre crop; uint8 (H, W, 3)."""
        source, part = self.source(index), self.part(key)
        name = self._name(source, index)
        resize = self.resize if key is None else None
        kernel, share = self.interpolation, self.centre_share
        return decode(
            source, name, size=self.image_size, choose_box=part, interpolation=kernel, resize=resize, share=share
        )

    def part(self, key: int | None) -> Callable[[int, int], Box]:
        """Returns a function of width and height that gives the crop."""
        if key is None:
            return partial(centre_box, target=self.image_size, fraction=self.centre_share)
        return partial(random_resized_box, min_area=self.min_area, key=key)


class Undecoded(NamedTuple):
    """A batch, some of whose images are still JPEG files."""

    request: Request
    batch: Batch
    """With the pixels of the other images alone."""
    rows: list[int]
    """Rows of the batch, first of the files, then of the others."""
    content: Tensor
    """Bytes of all files, uint8 (bytes,): one tensor, since each takes a file of shared memory."""
    sizes: list[int]
    boxes: list[WholeBox]


class DecodedOnDevice(Dataset[Any]):
    """Images whose JPEG files are handed on as they are, and decoded on a device by ``finish``.

    Args:
        dataset: decodes what is no plain JPEG, or is damaged.
        device: the device.
    """

    def __init__(self, dataset: DecodedImages, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        file = BytesIO()
        Image.new("RGB", (16, 16)).save(file, "JPEG")
        try:
            self._decode([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], [(0, 0, 16, 16)])
        except (ImportError, RuntimeError, TypeError) as fault:
            choice = f"interpolation={dataset.interpolation}"
            raise UserError(f"{choice}: torchvision decodes no JPEG on {device} ({first_line(fault)})") from fault

    def _decode(self, files: list[Tensor], boxes: list[WholeBox]) -> Tensor:
        return decode_on(self.device, files, boxes, self.dataset.image_size, self.dataset.interpolation)

    def __getitems__(self, request: Request) -> Undecoded | UserError:
        data, found = self.dataset, list[Jpeg | None]()
        blank = np.broadcast_to(np.uint8(0), (*data.image_size, 3))

        def read(index: int, key: int | None) -> tuple[Pixels, int]:
            whole = key is None and data.resize is not None
            jpeg = None if whole else plain_jpeg(data.source(index), data.part(key))
            pixels = data.pixels(index, key) if jpeg is None else blank
            found.append(jpeg)
            return pixels, data.encoded.labels[index]

        batch = gather(request, (3, *data.image_size), read)
        if isinstance(batch, UserError):
            return batch
        files = [(row, jpeg) for row, jpeg in enumerate(found) if jpeg]
        others = [row for row, jpeg in enumerate(found) if jpeg is None]
        content = bytearray(b"".join(jpeg.content for _, jpeg in files))
        return Undecoded(
            request=request,
            batch=batch.replace(images=batch.images[others]),
            rows=[*(row for row, _ in files), *others],
            content=torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8),
            sizes=[len(jpeg.content) for _, jpeg in files],
            boxes=[jpeg.box for _, jpeg in files],
        )

    def finish(self, part: Undecoded | UserError) -> Batch | UserError:
        """Returns the batch with all images on the device; where a file is damaged, all as the dataset decodes them."""
        if isinstance(part, UserError):
            return part
        images = part.batch.images.to(self.device)
        if not part.sizes:
            return part.batch.replace(images=images)
        try:
            decoded = self._decode([*torch.split(part.content, part.sizes)], part.boxes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            batch = self.dataset.__getitems__(part.request)
            return batch if isinstance(batch, UserError) else batch.replace(images=batch.images.to(self.device))
        if len(images):
            decoded = torch.cat([decoded, images])[torch.tensor(part.rows).argsort().to(self.device)]
        return part.batch.replace(images=decoded)


KEPT_BYTES = 2**30
"""Decoded images of a split that are kept in memory by default."""


def keep_if_small(dataset: DecodedImages, split: Split, in_memory: bool | None) -> DecodedImages | Images:
    """Returns the dataset decoded if ``in_memory``; by default if its crops are not random and it is small.

    Raises:
        UserError: an image is damaged.
    """
    height, width = dataset.image_size
    if in_memory is None:
        in_memory = dataset.min_area == 1.0 and 3 * height * width * len(dataset) <= KEPT_BYTES
    if not in_memory:
        return dataset
    images = torch.zeros(len(dataset), height, width, 3, dtype=torch.uint8)
    rows = images.numpy()

    def read(index: int) -> None:
        rows[index] = dataset.pixels(index, 0 if split == "train" else None)

    # threads, since Pillow decodes outside of Python's lock
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        bar = partial(tqdm, desc=f"{split} images", unit=" images", disable=None, leave=False)
        for _ in bar(pool.map(read, range(len(dataset))), total=len(dataset)):
            pass
    return Images(images.permute(0, 3, 1, 2).contiguous(), dataset.labels, dataset)
