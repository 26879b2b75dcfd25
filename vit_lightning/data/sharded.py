"""Images from the shards that ``lightning shard`` writes, read through LitData."""

from __future__ import annotations

import json
import os
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.base import ImageData, OnBadImage
from vit_lightning.data.decoded import DecodedImages, keep_if_small, view_problems
from vit_lightning.data.mixing import Mixing
from vit_lightning.data.sampling import Batch
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.sizes import pair

CONTENTS = "shards.json"
"""File of a folder of shards that is there when all of them are."""


def need_litdata() -> None:
    """Raises a UserError with the way out where LitData is not installed."""
    try:
        import litdata  # noqa: F401
    except ImportError as fault:
        raise UserError("shards need the package litdata (pip install 'vit-lightning[shards]')") from fault


class Shards:
    """The images of a split by their index, with a reader for each thread and process.

    A reader of LitData remembers the shard that it is in: threads that share one get each other's images.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = threading.local()

    def __reduce__(self) -> tuple[type[Shards], tuple[Path]]:
        return Shards, (self.folder,)

    def __call__(self, index: int) -> bytes:
        if getattr(self._own, "process", None) != os.getpid():
            from litdata import StreamingDataset

            shards = len(json.loads((self.folder / "index.json").read_text(encoding="utf-8"))["chunks"])
            # one image at a time, all shards open: else each image in random order costs reading hundreds of others
            self._own.stream = StreamingDataset(
                str(self.folder), shuffle=False, batch_decode=0, max_pre_download=max(2, shards)
            )
            self._own.process = os.getpid()
        content: bytes = self._own.stream[index]
        return content


class ShardedSet(ImageData):
    """What ``lightning shard`` has written, with its splits, classes, mean and deviation.

    LitData finds and reads an image in a shard; which image comes when is ours, as for every source, so that a run that
    goes on is at the right image with any number of workers.

    Args:
        root: folder with the shards.
        image_size: height and width that the model gets, in pixels; images are cropped and resized to it.
        batch_size: images in a batch, on each device.
        num_workers: processes that decode images.
        augment: random changes of the training images after the random crop, in order.
        mixing: ways to mix the images of a training batch, of which each batch draws one.
        repetitions: how often an epoch shows each of its training images, which are then that many times fewer.
        fraction: share of the training images of each class that is used; a smaller share lies in every larger one.
        shots: training images of each class that are used, instead of a fraction.
        on_bad_image: whether an image that cannot be decoded ends the run, or is left out of its batch and listed.
        max_bad_share: share of a split's images from which on their leaving out is an error all the same.
        in_memory: whether images are decoded once and kept; see ImageFolder.
        min_area: smallest part of a training image that a random crop shows; 1 takes the whole image.
        centre_share: share of the sides of a validation or test image that the model sees.
    """

    def __init__(
        self,
        *,
        root: Path,
        image_size: int | tuple[int, int] = 224,
        batch_size: int = 64,
        num_workers: int = 2,
        augment: list[Augmentation] | None = None,
        mixing: list[Mixing] | None = None,
        repetitions: int = 1,
        fraction: float = 1.0,
        shots: int | None = None,
        on_bad_image: OnBadImage = "error",
        max_bad_share: float = 0.05,
        in_memory: bool | None = None,
        min_area: float = 0.08,
        centre_share: float = 0.875,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            num_workers=num_workers,
            split_seed=0,
            augment=augment,
            mixing=mixing,
            repetitions=repetitions,
            fraction=fraction,
            shots=shots,
            on_bad_image=on_bad_image,
            max_bad_share=max_bad_share,
        )
        problems = view_problems(
            image_size=image_size, min_area=min_area, centre_share=centre_share, in_memory=in_memory
        )
        if not (Path(root) / CONTENTS).is_file():
            problems.append(f"root={root} holds no {CONTENTS}: no shards, or not all of them (lightning shard goes on)")
        if problems:
            raise UserError(problems)
        self.root = Path(root)
        self._image_size = pair(image_size)
        self.min_area, self.centre_share, self.in_memory = min_area, centre_share, in_memory
        self.mean, self.std = tuple(self._contents["mean"]), tuple(self._contents["std"])

    @cached_property
    def _contents(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads((self.root / CONTENTS).read_text(encoding="utf-8"))
        return contents

    @property
    def image_size(self) -> tuple[int, int]:
        return self._image_size

    @property
    def class_names(self) -> list[str]:
        return list(self._contents["class_names"])

    def check(self) -> None:
        """LitData is there, and so are all shards, whole and holding nothing but bytes."""
        need_litdata()
        problems = []
        for folder in (self.root / split for split in self._contents["images"]):
            try:
                index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            except (OSError, ValueError) as fault:
                problems.append(f"root={self.root}: {folder / 'index.json'} cannot be read: {fault}")
                continue
            if index["config"]["data_format"] != ["bytes"]:  # LitData would unpickle others, which may run anything
                problems.append(f"root={self.root}: {folder} was not written by lightning shard")
            for shard in index["chunks"]:
                path = folder / shard["filename"]
                if not path.is_file() or path.stat().st_size != shard["chunk_bytes"]:
                    problems.append(f"root={self.root}: {path} is missing or cut short")
        if problems:
            raise UserError(problems)

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        self.check()
        folder = self.root / split
        records = sorted(folder.glob("shard-*.json"))
        labels = [label for record in records for label in json.loads(record.read_text(encoding="utf-8"))["labels"]]
        dataset = DecodedImages(
            Shards(folder),
            labels,
            image_size=self.image_size,
            min_area=self.min_area,
            centre_share=self.centre_share,
            names=[f"{folder}, image {index}" for index in range(len(labels))],
            skip=self.on_bad_image == "skip",
        )
        return keep_if_small(dataset, split, self.in_memory)
