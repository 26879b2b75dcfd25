"""Image files of the user's own, as a trained model gets the images of its test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from vit_lightning.data.base import ImageData, OnBadImage, Statistics
from vit_lightning.data.decoded import DecodedImages
from vit_lightning.data.image_folder import SUFFIXES, images_in
from vit_lightning.data.sampling import Batch, Request
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.sizes import pair

DAMAGED = -1
"""Label of an image that could not be decoded."""


class ImageFiles(ImageData):
    """Image files without labels, looked at as the test images of a run are (``ImageData.test_view``).

    Args:
        class_names: name of each class.
        image_size: height and width that the model gets, in pixels.
        in_channels: 3, or 1 for images that are turned gray.
        centre_share: share of the sides of an image that the model sees.
        mean: mean of each channel, of pixels between 0 and 1.
        std: standard deviation of each channel.
        batch_size: images in a batch.
        num_workers: processes that decode images.
        on_bad_image: whether images that cannot be decoded make the command end with an error, after all others.
    """

    def __init__(
        self,
        *,
        class_names: list[str],
        image_size: tuple[int, int],
        in_channels: int,
        centre_share: float,
        mean: list[float],
        std: list[float],
        batch_size: int = 64,
        num_workers: int = 0,
        on_bad_image: OnBadImage = "error",
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            num_workers=num_workers,
            split_seed=0,
            augment=None,
            on_bad_image=on_bad_image,
            max_bad_share=1.0,
        )
        self.files: list[Path] = []
        self._class_names, self._image_size, self.in_channels = class_names, pair(image_size), in_channels
        self.centre_share = centre_share
        self.mean: Statistics = tuple(mean)
        self.std: Statistics = tuple(std)

    @property
    def image_size(self) -> tuple[int, int]:
        return self._image_size

    @property
    def class_names(self) -> list[str]:
        return self._class_names

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        return _Files(self.files, self.image_size, self.centre_share, gray=self.in_channels == 1)


class _Files(Dataset[Batch]):
    """Files of any kind of image; one that is damaged is white, has the label DAMAGED, and is told as skipped."""

    def __init__(self, files: Sequence[Path], image_size: tuple[int, int], centre_share: float, *, gray: bool) -> None:
        self.files, self.gray = files, gray
        self._decoded = DecodedImages(
            files.__getitem__,
            [0] * len(files),
            image_size=image_size,
            min_area=1.0,
            centre_share=centre_share,
            names=[str(file) for file in files],
            skip=False,
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, request: Request) -> Batch:
        height, width = self._decoded.image_size
        images = np.full((len(request.indices), height, width, 3), 255, dtype=np.uint8)
        labels = torch.zeros(len(request.indices), dtype=torch.long)
        problems: list[str] = []
        for place, index in enumerate(request.indices):
            try:
                images[place] = self._decoded.pixels(index, None)
            except UserError as error:
                problems += error.problems
                labels[place] = DAMAGED
        if self.gray:
            images = np.stack([np.asarray(Image.fromarray(image).convert("L"))[..., None] for image in images])
        tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        return Batch(tensor, labels, torch.tensor(request.indices), None, skipped=tuple(problems))


def data_of_files(ckpt: str, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The ``data`` of a page in which image files come in the place of the data that a checkpoint was trained on."""
    if not checkpoint.get("test_view"):
        raise UserError(f"ckpt={ckpt} does not say how its test images look: no images can be named beside it")
    return {**checkpoint["test_view"], "class_path": "vit_lightning.ImageFiles"}


def find_images(places: Sequence[Path]) -> list[Path]:
    """The named files, and in order those in named folders that are called as images are; none of them twice.

    Raises:
        UserError: all places that are not there, and folders without images.
    """
    found: list[Path] = []
    problems = []
    for place in places:
        if place.is_dir():
            inside = sorted(images_in(place))
            if not inside:
                problems.append(f"{place}: the folder holds no images ({', '.join(SUFFIXES)})")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            problems.append(f"{place}: there is no such file or folder")
    if problems:
        raise UserError(problems)
    return list(dict.fromkeys(found))
