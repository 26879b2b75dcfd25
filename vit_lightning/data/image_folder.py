"""Images in class folders, decoded when they are needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vit_lightning.data.decoded import Encoded
from vit_lightning.data.image_set import SPLIT_NAMES, ImageSet
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


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
        names = sorted(_class_folders(folder))
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

    def _files(self, folder: Path) -> Encoded:
        images = [sorted(images_in(folder / name)) for name in self.class_names]
        files = [file for of_class in images for file in of_class]
        labels = [label for label, of_class in enumerate(images) for _ in of_class]
        return Encoded(Path, files, labels, [file.relative_to(self.root).as_posix() for file in files])
