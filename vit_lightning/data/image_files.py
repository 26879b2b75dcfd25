"""Image files: in one folder for each class, or without labels, prepared as the test images of a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vit_lightning.classes import in_order
from vit_lightning.data.bad_images import OnBadImage
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch, Pixels, Request, gather
from vit_lightning.data.decoding import Interpolation, damage_of
from vit_lightning.data.image_set import SPLIT_NAMES, ImageSet
from vit_lightning.data.images import DecodedImages, Encoded
from vit_lightning.data.splits import SPLITS, Split
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.sizes import pair

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
SEEN_FILES = 10_000
"""Most files of a folder whose ends are read before a training, in 0.2 s where they are in the disk's cache."""
DAMAGED = -1
"""Label of an image that could not be decoded."""


def _class_folders(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def images_in(folder: Path) -> Iterator[Path]:
    """Yields the images in a folder and its subfolders, without hidden files and folders."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden:
            yield path


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(ImageSet):
    """Images in one folder for each class: ROOT/train/CLASS/*.jpg, with ROOT/val and ROOT/test or without.

    A split without a folder is cut from the training images, stratified, by ``split_seed``. If ROOT holds the class
    folders itself, validation and test are both cut from it. ``val`` may also be named ``valid`` or ``validation``.

    Args:
        root: folder with the images.
    """

    root: Path

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        super().__post_init__()

    def problems(self) -> list[str]:
        problems = super().problems()
        return problems if self.root.is_dir() else [*problems, f"root={self.root} is not a folder"]

    @cached_property
    def _folders(self) -> dict[Split, Path]:
        """Folder of each split that has one."""
        found = {
            split: self.root / name
            for split, names in SPLIT_NAMES.items()
            for name in names
            if (self.root / name).is_dir()
        }
        return found if "train" in found else {"train": self.root}

    @cached_property
    def class_names(self) -> list[str]:
        folder = self._folders["train"]
        names = in_order(_class_folders(folder))
        if len(names) < 2:
            raise UserError(
                f"root={self.root}: {folder} must hold at least two folders, one for each class, found {len(names)}"
            )
        return names

    @property
    def notice(self) -> str:
        known = {name for names in SPLIT_NAMES.values() for name in names}
        beside = sorted(name for name in {*known} - {self.root.name} if (self.root.parent / name).is_dir())
        if self._folders["train"] != self.root or self.root.name not in known or not beside:
            return ""
        return (
            f"data.root={self.root}: validation and test images are cut from it; {', '.join(beside)} beside it "
            f"would be used with --data.root={self.root.parent}"
        )

    def check(self) -> None:
        """Checks that each class has training images, and that the other splits have no further classes."""
        names = self.class_names
        problems = self._folder_problems()
        problems += [
            f"root={self.root}: {folder / name} is a class that is not in training"
            for folder in self._folders.values()
            for name in sorted({*_class_folders(folder)} - {*names})
        ]
        problems += [
            f"root={self.root}: {folder / name} holds no images ({', '.join(SUFFIXES)})"
            for folder in self._folders.values()
            for name in names
            if (folder / name).is_dir() or folder == self._folders["train"]
            if not any(images_in(folder / name))
        ]
        refuse(problems)

    def _folder_problems(self) -> list[str]:
        """Returns folders whose split is ambiguous."""
        known = {name for folders in SPLIT_NAMES.values() for name in folders}
        problems = []
        if self._folders["train"] == self.root and (odd := {n for n in self.class_names if n.lower() in known}):
            problems.append(f"root={self.root}: {', '.join(sorted(odd))} beside no folder named train")
        for split, folders in SPLIT_NAMES.items():
            there = [name for name in folders if (self.root / name).is_dir()]
            if len(there) > 1:
                problems.append(f"root={self.root}: {' and '.join(there)} both exist for {split} (keep one)")
        paths = [folder.resolve() for folder in self._folders.values()]
        if len({*paths}) < len(paths):
            problems.append(
                f"root={self.root}: two of {', '.join(map(str, self._folders.values()))} are the same folder"
            )
        return problems

    def source_splits(self) -> dict[Split, Encoded]:
        self.check()
        return {split: self._files(folder) for split, folder in self._folders.items()}

    def damaged_files(self) -> list[str]:
        """Returns the damage that is seen where it is an error; nothing where damaged images are skipped."""
        return self.seen_damage() if self.on_bad_image == "error" else []

    def seen_damage(self) -> list[str]:
        """Returns what is wrong with files whose ends show it; nothing where they are very many."""
        files = [file for split in SPLITS for file in self._splits[split].images]
        return [text for file in files if (text := damage_of(file))] if len(files) <= SEEN_FILES else []

    def _files(self, folder: Path) -> Encoded:
        images = [sorted(images_in(folder / name)) for name in self.class_names]
        files = [file for of_class in images for file in of_class]
        labels = [label for label, of_class in enumerate(images) for _ in of_class]
        return Encoded(Path, files, labels, [file.relative_to(self.root).as_posix() for file in files])


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

    class_names: list[str] = []  # noqa: RUF012  # of each
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
        self.class_names, self.image_size, self.in_channels = class_names, pair(image_size), in_channels
        self.centre_share, self.mean, self.std = centre_share, tuple(mean), tuple(std)
        self.on_bad_image, self.max_bad_share = on_bad_image, 1.0
        self.interpolation: Interpolation = interpolation

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

    def __getitems__(self, request: Request) -> Batch | UserError:
        problems: list[str] = []

        def read(index: int, key: int | None) -> tuple[Pixels, int]:
            try:
                image = Image.fromarray(self.pixels(index, None))
            except UserError as error:
                problems.extend(error.problems)
                return np.full((*self.image_size, 1 if self.gray else 3), 255, dtype=np.uint8), DAMAGED
            return np.atleast_3d(np.asarray(image.convert("L") if self.gray else image)), 0

        batch = gather(request, (1 if self.gray else 3, *self.image_size), read)
        return batch.replace(skipped=tuple(problems)) if isinstance(batch, Batch) else batch


def _itself(image: Path | Image.Image) -> Path | Image.Image:
    return image


def data_of_files(ckpt: str, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``data`` of a config that reads image files in place of the data that a checkpoint was trained on."""
    if "mean" not in (checkpoint.get("test_view") or {}):
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
