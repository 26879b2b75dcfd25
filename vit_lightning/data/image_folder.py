"""Images in class folders, decoded when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from torch.utils.data import Dataset

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.base import ImageData, OnBadImage, Statistics
from vit_lightning.data.decoded import DecodedImages, keep_if_small, view_problems
from vit_lightning.data.mixing import Mixing
from vit_lightning.data.sampling import Batch
from vit_lightning.data.splits import Split, cut_problems, stratified_cut
from vit_lightning.errors import UserError
from vit_lightning.sizes import pair

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _file(files: Sequence[Path], index: int) -> Path:
    return files[index]


def _class_folders(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def images_in(folder: Path) -> Iterator[Path]:
    images = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return (path for path in images if not _hidden(path.relative_to(folder)))


class ImageFolder(ImageData):
    """Images in one folder for each class: ROOT/train/CLASS/*.jpg, with ROOT/val and ROOT/test or without.

    What has no folder is cut from the training images, stratified, by ``split_seed``. If ROOT holds the class folders
    itself, validation and test are both cut from it. ``val`` may also be named ``valid`` or ``validation``.

    Args:
        root: folder with the images.
        image_size: height and width that the model gets, in pixels; images are cropped and resized to it.
        batch_size: images in a batch, on each device.
        num_workers: processes that decode images.
        split_seed: draws the images of the splits that have no folder.
        augment: random changes of the training images after the random crop, in order.
        mixing: ways to mix the images of a training batch, of which each batch draws one.
        repetitions: how often an epoch shows each of its training images, which are then that many times fewer.
        fraction: share of the training images of each class that is used; a smaller share lies in every larger one.
        shots: training images of each class that are used, instead of a fraction.
        on_bad_image: whether an image that cannot be decoded ends the run, or is left out of its batch and listed.
        max_bad_share: share of a split's images from which on their leaving out is an error all the same.
        in_memory: whether images are decoded once and kept, on the GPU if there is one; for ``min_area`` 1 alone, as a
            random part is decoded anew (RandomResizedCrop in ``augment`` draws one of what is kept). By default where
            that is so and the split takes at most a gigabyte.
        val_share: share of the training images that validation gets if it has no folder.
        test_share: share of the training images that the test gets if it has no folder.
        min_area: smallest part of a training image that a random crop shows; 1 takes the whole image.
        centre_share: share of the sides of a validation or test image that the model sees.
        mean: mean of each channel, of pixels between 0 and 1; ImageNet's by default.
        std: standard deviation of each channel.
    """

    def __init__(
        self,
        *,
        root: Path,
        image_size: int | tuple[int, int] = 224,
        batch_size: int = 64,
        num_workers: int = 2,
        split_seed: int = 0,
        augment: list[Augmentation] | None = None,
        mixing: list[Mixing] | None = None,
        repetitions: int = 1,
        fraction: float = 1.0,
        shots: int | None = None,
        on_bad_image: OnBadImage = "error",
        max_bad_share: float = 0.05,
        in_memory: bool | None = None,
        val_share: float = 0.1,
        test_share: float = 0.2,
        min_area: float = 0.08,
        centre_share: float = 0.875,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            num_workers=num_workers,
            split_seed=split_seed,
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
        problems += cut_problems(val_share=val_share, test_share=test_share)
        if not Path(root).is_dir():
            problems.append(f"root={root} is not a folder")
        if problems:
            raise UserError(problems)
        self.root = Path(root)
        self.val_share, self.test_share = val_share, test_share
        self.min_area, self.centre_share = min_area, centre_share
        self.mean: Statistics = tuple(mean)
        self.std: Statistics = tuple(std)
        self.in_memory = in_memory
        self._image_size = pair(image_size)

    @property
    def image_size(self) -> tuple[int, int]:
        return self._image_size

    @property
    def class_names(self) -> list[str]:
        return self._class_names

    @cached_property
    def _folders(self) -> dict[Split, Path]:
        """Folder of each split that has one."""
        found = {
            split: self.root / name
            for split, names in SPLIT_FOLDERS.items()
            for name in names
            if (self.root / name).is_dir()
        }
        return found if "train" in found else {"train": self.root}

    @cached_property
    def _class_names(self) -> list[str]:
        folder = self._folders["train"]
        names = sorted(_class_folders(folder))
        if len(names) < 2:
            raise UserError(
                f"root={self.root}: {folder} must hold at least two folders, one for each class, found {len(names)}"
            )
        return names

    def check(self) -> None:
        """Each class folder of training holds an image, and the other splits hold no class that training lacks."""
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
        if problems:
            raise UserError(problems)

    def _folder_problems(self) -> list[str]:
        """Folders that could be taken for a split, or for two."""
        known = {name for folders in SPLIT_FOLDERS.values() for name in folders}
        problems = []
        if self._folders["train"] == self.root and (odd := {n for n in self.class_names if n.lower() in known}):
            problems.append(f"root={self.root}: {', '.join(sorted(odd))} beside no folder named train")
        for split, folders in SPLIT_FOLDERS.items():
            there = [name for name in folders if (self.root / name).is_dir()]
            if len(there) > 1:
                problems.append(f"root={self.root}: {' and '.join(there)} are both there for {split} (keep one)")
        places = [folder.resolve() for folder in self._folders.values()]
        if len({*places}) < len(places):
            problems.append(
                f"root={self.root}: two of {', '.join(map(str, self._folders.values()))} are the same folder"
            )
        return problems

    @cached_property
    def _splits(self) -> dict[Split, tuple[list[Path], list[int]]]:
        """Files and labels of each split."""
        self.check()
        splits = {split: self._files(folder) for split, folder in self._folders.items()}
        missing: dict[Split, float] = {"test": self.test_share, "val": self.val_share}
        for split, share in missing.items():
            if split not in splits:
                files, labels = splits["train"]
                rest, cut = stratified_cut(labels, share, self.split_seed, split=split)
                splits[split] = [files[i] for i in cut], [labels[i] for i in cut]
                splits["train"] = [files[i] for i in rest], [labels[i] for i in rest]
        return splits

    def _files(self, folder: Path) -> tuple[list[Path], list[int]]:
        files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(self.class_names):
            images = sorted(images_in(folder / name))
            files += images
            labels += [label] * len(images)
        return files, labels

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        files, labels = self._splits[split]
        dataset = DecodedImages(
            partial(_file, files),
            labels,
            image_size=self.image_size,
            min_area=self.min_area,
            centre_share=self.centre_share,
            names=[file.relative_to(self.root).as_posix() for file in files],
            skip=self.on_bad_image == "skip",
        )
        return keep_if_small(dataset, split, self.in_memory)
