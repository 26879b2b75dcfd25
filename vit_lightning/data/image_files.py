"""Image files: in one folder for each class, or without labels, prepared as the test images of a trained model."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from vit_lightning.classes import SHOWN, in_order, listed, one_form
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.decoding import Interpolation, is_image, suffixes
from vit_lightning.data.image_set import (
    LEFT_BEHIND,
    ImageSet,
    by_split,
    files_in,
    is_seen,
    split_of,
    taken_by_a_part,
    tells_nothing,
)
from vit_lightning.data.images import DecodedImages, Encoded
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, refuse
from vit_lightning.sizes import Resize, pair

NO_FOLDERS = {
    r"cifar-100?-.*|(data|test)_batch.*|meta": "data.class_path=CIFAR10 or CIFAR100, data.root the folder around it",
    r".*[-.]idx\d-ubyte(\.gz)?": "data.class_path=TorchvisionSet with data.name=MNIST reads data.root/MNIST/raw",
    r".*\.tar": "unpack first, or data.class_path=HuggingFaceSet reads shards of WebDataset",
    r".*\.(zip|tgz|gz|bz2|xz|7z|rar)": "unpack first",
    r".*\.(np[yz]|h5|hdf5|mat|csv|pkl|pt|mdb|rec|tfrecords?)": "a Dataset of your own gives such images",
}
"""Names of files that hold images as no class folders do, and the way out."""
OTHER_FILES = "a Dataset of your own reads them, or torchvision.datasets.DatasetFolder with loader and extensions"


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    """Returns the folders in a folder by their names, of which several may be equal in another form (``one_form``)."""
    found: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and is_seen(entry.name):
            found.setdefault(one_form(entry.name), []).append(entry)
    return found


def _inside(folder: Path, split: Split) -> Path:
    """Returns the folder that holds a split alone in others of its name, or in ``images``, as archives have it."""
    while len(inner := [*_class_folders(folder)]) == 1 and (
        split_of(inner[0]) == split or inner[0] == folder.name or tells_nothing(inner[0])
    ):
        folder /= inner[0]
    return folder


def _packed(entries: Iterable[Path]) -> str:
    """Returns a hint on files that hold images themselves; empty where there are none."""
    names = sorted(entry.name for entry in entries)
    for kind, way_out in NO_FOLDERS.items():
        if found := [name for name in names if re.fullmatch(kind, name.lower())]:
            return f" ({', '.join(found[:SHOWN])}: {way_out})"
    return ""


def images_in(folder: Path, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """Yields the images in a folder and its subfolders (``files_in``); counts the other files by suffix."""
    for path in files_in(folder):
        if is_image(path):
            yield path
        elif left_out is not None:
            left_out[path.suffix.lower() or "without a suffix"] += 1


def in_words(left_out: Counter[str]) -> str:
    """Returns which files are left out; empty where none are."""
    counts = sorted((-count, kind) for kind, count in left_out.items())
    return "left out " + ", ".join(f"{-count} {kind}" for count, kind in counts) if counts else ""


TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet", "dataset_dict.json", "state.json")
"""Files that tell labels where folders do not."""


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(ImageSet):
    """Images in one folder for each class: ROOT/train/CLASS/*.jpg, with ROOT/val and ROOT/test or without.

    A split without class folders is cut from the training images, stratified, by ``split_seed``. If ROOT holds the
    class folders itself, validation and test are cut from it. Other spellings, as ``Training``, ``valid``, ``dev``,
    ``test_set``, ``seg_train``, or ``signs_train`` beside ``signs_test``, are known. Links are followed.

    Args:
        root: folder with the images.
    """

    root: Path

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        super().__post_init__()

    @cached_property
    def _there(self) -> dict[Split, Path]:
        """Folder of each split that has one.

        Raises:
            UserError: names folders whose split is ambiguous, or a root that is no folder.
        """
        if not self.root.is_dir():
            raise UserError(f"root={self.root} is not a folder{_packed([self.root])}")
        inside = _class_folders(self.root)
        named, problems = by_split(inside)
        folders = {split: _inside(inside[name][0], split) for split, name in named.items()}
        val = folders.get("val")
        if val and self.wanted in (None, "val") and not _class_folders(val) and any(images_in(val)):
            way_out = f"move each image to {val}/CLASS, or {named['val']} elsewhere (then it is cut from training)"
            problems.append(f"{val} has no class folders: {way_out}")
        folders = {split: folder for split, folder in folders.items() if split == "train" or _class_folders(folder)}
        if len({folder.resolve() for folder in folders.values()}) < len(folders):
            problems.append(f"two of {', '.join(map(str, folders.values()))} are the same folder")
        refuse(problems, prefix=f"root={self.root}: ")
        return folders

    @cached_property
    def _folders(self) -> dict[Split, Path]:
        """Folder of each split that is needed."""
        if self._there:
            link = self.root / (self.wanted or "train")
            return self.needed(self._there, f" (ln -s FOLDER {link}, where it has another name)")
        return {self.wanted if self.wanted and self._are_others() else "train": self.root}

    def _are_others(self) -> bool:
        """Whether the images lie elsewhere than those that the model learned from, and are no exact copy of them."""
        try:
            return self.learned is not None and self.learned != replace(self, in_memory=False).fingerprint()
        except UserError:  # too few to be cut
            return True

    @cached_property
    def class_names(self) -> list[str]:
        folder, *_ = self._folders.values()
        if _class_folders(train := self._there.get("train", folder)):  # also where a test needs no training images
            folder = train
        names, least = in_order(_class_folders(folder)), 1 if self.wanted else 2
        if len(names) < least:
            text = f"must hold at least two folders, one for each class, found {len(names)}{self._meant(folder, names)}"
            places = (self.root, folder, folder.parent)
            tables = [name for name in TABLES if any((place / name).exists() for place in places)]
            if tables or (not names and any(images_in(folder))):
                table = tables[0] if tables else f"labels in a table {folder / TABLES[0]}, columns file_name and label"
                text += f" ({table}: data.class_path=HuggingFaceSet with data.path={self.root} reads it)"
            else:
                text += _packed(folder.iterdir()) or _packed(self.root.iterdir())
            raise UserError(f"root={self.root}: {folder} {text}")
        return names

    def _meant(self, folder: Path, names: Iterable[str]) -> str:
        """Returns a hint on folders with class folders in them, of some in the root; empty where there are none."""
        inside = [folder / name for name in names if folder == self.root and _class_folders(folder / name)]
        return "".join(f" (is data.root={place} meant?)" for place in inside)

    @property
    def notice(self) -> str:
        used = {split: folder for split, folder in self._folders.items() if folder != self.root}
        said = taken_by_a_part({split: folder.relative_to(self.root).parts[0] for split, folder in used.items()})
        notes = [f"{self.root}: {text}" for text in (*said, self._nested, in_words(self._images[1])) if text]
        root = self.root.absolute()
        named = by_split(_class_folders(root.parent))[0].values()
        split = next((split for split, folder in self._folders.items() if folder == self.root), None)
        if split == "train" and root.name in named and len(named) > 1:
            beside = [name for name in named if name != root.name]
            notes.append(
                f"data.root={self.root}: validation and test images are cut from it; {', '.join(beside)} beside it "
                f"would be used with --data.root={self.root.parent}"
            )
        elif split not in (None, "train"):
            whole = f"data.root={self.root} has no folders of splits: all of its images are taken as {split}"
            notes.append(f"{whole} (if it holds images of the training, the accuracy is too high)")
        return "; ".join(notes)

    @property
    def _nested(self) -> str:
        """Returns what a run says where class folders seem to be folds, domains, splits or parts of a set."""
        classes = _class_folders(next(iter(self._folders.values())))
        folders = [_inside(places[0], "train") for places in classes.values()]
        inside = Counter(name for folder in folders for name in _class_folders(folder))
        alike = ", ".join(in_order(name for name, count in inside.items() if count > 1))
        sets = [folder for folder in folders if len(by_split(_class_folders(folder))[0]) > 1]
        if "," in alike or len(sets) == 1:
            place = (sets or folders)[0]
            return f"the classes are {', '.join(classes)}, not {alike or 'those'} in them (data.root={place} has those)"
        tables = sorted(path.name for path in self.root.iterdir() if path.suffix.lower() in (".csv", ".tsv", ".xlsx"))
        if tables and (TABLES[0] in tables or len({re.sub(r"\d+", "", name) or name for name in classes}) == 1):
            return f"the classes are {', '.join(classes)}, and not the labels in {', '.join(tables[:SHOWN])}"
        return ""

    def check(self) -> None:
        """Checks that each class has training images, and that the other splits have no further classes."""
        names, problems, empty, left_out, meant = self.class_names, [], list[Path](), Counter[str](), ""
        for folder in self._folders.values():
            for name, places in _class_folders(folder).items():
                if name not in names:
                    way_out = f"move it away; images without labels: lightning predict --ckpt RUN {folder}"
                    problems.append(f"root={self.root}: {places[0]} is a class that is not in training ({way_out})")
                elif not any(image for place in places for image in images_in(place)):
                    empty.append(places[0])
                    next(images_in(places[0], left_out), None)
                    meant = self._meant(folder, filter(tells_nothing, names))
        if empty:
            other = f" ({in_words(left_out)}: {OTHER_FILES})" if left_out else ""
            way_out = f"remove such folders, or put images there ({', '.join(sorted(suffixes()))}){meant}"
            problems.append(f"root={self.root}: no images in {listed([*map(str, empty)])}{other}: {way_out}")
        refuse(problems)

    @cached_property
    def _images(self) -> tuple[dict[Split, list[list[Path]]], Counter[str]]:
        """Images of each class of each split, and what is left out."""
        left_out: Counter[str] = Counter()
        images = {}
        for split, folder in self._folders.items():
            classes = _class_folders(folder)
            places = [classes.get(name, []) for name in self.class_names]
            images[split] = [sorted(path for one in of for path in images_in(one, left_out)) for of in places]
            loose = [path for path in folder.iterdir() if not path.is_dir() and is_seen(path.name)]
            left_out.update(f"{path.suffix.lower() or 'file'} beside the class folders" for path in loose)
        for folder in {self.root, *self._folders.values()}:
            left_out.update(f"folder {path.name}" for path in folder.iterdir() if path.name in LEFT_BEHIND)
        if self.root not in self._folders.values():
            loose = [path for path in self.root.iterdir() if path.is_file() and is_image(path)]
            left_out.update(f"{path.suffix.lower() or 'file'} beside the folders of the splits" for path in loose)
            named = by_split(inside := _class_folders(self.root))[0].values()
            for name, (folder, *_) in inside.items():
                told = split_of(name, whole=False)
                is_bare = told is not None and not _class_folders(_inside(folder, told))
                if is_bare or name not in named:
                    left_out[f"folder {name}{' without class folders' * is_bare}"] += 1
        return images, left_out

    def source_splits(self) -> dict[Split, Encoded]:
        self.check()
        return {split: self._files(images) for split, images in self._images[0].items()}

    def _files(self, images: list[list[Path]]) -> Encoded:
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
        interpolation: how images are resized.
        resize: size to which the whole image is resized, in place of a crop, see ``decode``.
        multi_label: whether each class has a probability of its own.
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
        interpolation: Interpolation = "bicubic",
        resize: Resize | None = None,
        multi_label: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.files: Sequence[Path | Image.Image] = []
        self.class_names, self.image_size, self.in_channels = class_names, pair(image_size), in_channels
        self.centre_share, self.mean, self.std = centre_share, tuple(mean), tuple(std)
        self.interpolation, self.resize, self.multi_label = interpolation, resize, multi_label

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        names = [str(file) if isinstance(file, Path) else f"image {number}" for number, file in enumerate(self.files)]
        return DecodedImages(
            encoded=Encoded(_itself, self.files, [0] * len(self.files), names),
            image_size=pair(self.image_size),
            min_area=1.0,
            centre_share=self.centre_share,
            interpolation=self.interpolation,
            resize=self.resize,
            gray=self.in_channels == 1,
        )


def _itself(image: Path | Image.Image) -> Path | Image.Image:
    return image


def data_of_files(ckpt: str, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``data`` of a config that reads image files in place of the data that a checkpoint was trained on."""
    view = checkpoint.get("test_view") or {}
    if "mean" not in view:
        own = "without any, those of predict_dataloader or else of the test are predicted"
        way_out = "--config='{mean: ..., std: ...}' gives it" if "centre_share" in view else own  # weights of others
        raise UserError(f"ckpt={ckpt} has no description of its test images: no image files can be given ({way_out})")
    return {**view, "class_path": "vit_lightning.ImageFiles"}


def find_images(paths: Sequence[Path], left_out: Counter[str] | None = None) -> list[Path]:
    """Returns the given files, and the images in given folders, each once; counts other files there by suffix.

    Raises:
        UserError: names all paths that do not exist, and folders without images.
    """
    found: list[Path] = []
    problems = []
    for path in paths:
        if path.is_dir():
            if not (inside := sorted(images_in(path, left_out))):
                problems.append(f"{path}: the folder holds no images ({', '.join(sorted(suffixes()))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            problems.append(f"{path}: there is no such file or folder")
    refuse(problems)
    return list(dict.fromkeys(found))
