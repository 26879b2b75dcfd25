"""The user's own image files, or images in memory, prepared as the test images of a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from vit_lightning.data.bad_images import OnBadImage
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch, Request
from vit_lightning.data.decoded import DecodedImages, Encoded
from vit_lightning.data.decoding import Interpolation
from vit_lightning.data.image_folder import SUFFIXES, images_in
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.sizes import pair

DAMAGED = -1
"""Label of an image that could not be decoded."""


class ImageFiles(ImageData):
    """Image files without labels, prepared as the test images of a run (``ImageData.test_view``).

    Args:
        class_names: name of each class.
        image_size: height and width in pixels of the model's input.
        in_channels: 3, or 1 for images that are converted to gray.
        centre_share: fraction of the sides of an image that the centre crop shows.
        mean: mean of each channel, of pixels between 0 and 1.
        std: standard deviation of each channel.
        batch_size: images in a batch.
        num_workers: processes that decode images.
        on_bad_image: whether the command fails, after all others, for images that cannot be decoded.
        interpolation: how images are resized.
    """

    image_size: int | tuple[int, int]  # type: ignore[assignment]  # a pair once it is made

    def __init__(
        self,
        *,
        class_names: list[str],
        image_size: int | tuple[int, int],
        in_channels: int,
        centre_share: float,
        mean: list[float],
        std: list[float],
        batch_size: int = 64,
        num_workers: int = 0,
        on_bad_image: OnBadImage = "error",
        interpolation: Interpolation = "bicubic",
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.files: Sequence[Path | Image.Image] = []
        self._class_names, self.image_size, self.in_channels = class_names, pair(image_size), in_channels
        self.centre_share, self.mean, self.std = centre_share, tuple(mean), tuple(std)
        self.on_bad_image, self.max_bad_share = on_bad_image, 1.0
        self.interpolation: Interpolation = interpolation

    @property
    def class_names(self) -> list[str]:
        return self._class_names

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        names = [str(file) if isinstance(file, Path) else f"image {number}" for number, file in enumerate(self.files)]
        return _Files(
            encoded=Encoded(_itself, self.files, [0] * len(self.files), names),
            image_size=pair(self.image_size),
            min_area=1.0,
            centre_share=self.centre_share,
            skip=False,
            interpolation=self.interpolation,
            gray=self.in_channels == 1,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class _Files(DecodedImages):
    """Images without labels; a damaged one is white, has the label DAMAGED, and is listed as skipped."""

    gray: bool

    def __getitems__(self, request: Request) -> Batch:
        images = torch.full((len(request.indices), 1 if self.gray else 3, *self.image_size), 255, dtype=torch.uint8)
        labels = torch.zeros(len(request.indices), dtype=torch.long)
        problems: list[str] = []
        for position, index in enumerate(request.indices):
            try:
                image = Image.fromarray(self.pixels(index, None))
            except UserError as error:
                problems += error.problems
                labels[position] = DAMAGED
            else:
                pixels = np.atleast_3d(np.asarray(image.convert("L") if self.gray else image))
                images.numpy()[position] = pixels.transpose(2, 0, 1)
        return Batch(images, labels, torch.tensor(request.indices), None, skipped=tuple(problems))


def _itself(image: Path | Image.Image) -> Path | Image.Image:
    return image


def data_of_files(ckpt: str, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``data`` of a config that reads image files in place of the data that a checkpoint was trained on."""
    if not checkpoint.get("test_view"):
        raise UserError(f"ckpt={ckpt} has no description of its test images: no image files can be given")
    return {**checkpoint["test_view"], "class_path": "vit_lightning.ImageFiles"}


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Returns the given files, and the images in given folders, each once.

    Raises:
        UserError: names all paths that do not exist, and folders without images.
    """
    found: list[Path] = []
    problems = []
    for path in paths:
        if path.is_dir():
            inside = sorted(images_in(path))
            if not inside:
                problems.append(f"{path}: the folder holds no images ({', '.join(SUFFIXES)})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            problems.append(f"{path}: there is no such file or folder")
    refuse(problems)
    return list(dict.fromkeys(found))
