"""Bases of the data modules whose splits are those of a source, and of those whose images lie encoded in it."""

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import Dataset

from vit_lightning.classes import SHOWN
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.decoding import Interpolation
from vit_lightning.data.images import DecodedImages, keep_if_small
from vit_lightning.data.per_image import PerImage
from vit_lightning.data.splits import SPLITS, Split, cut_missing, cut_problems
from vit_lightning.errors import UserError, problems_of
from vit_lightning.sizes import Resize, covers, pair

T = TypeVar("T")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Names of a split in folders, files and sets of the hub: in any case, with or without ``BESIDE`` and digits."""
BESIDE = {"", "seg", "data", "image", "images", "img", "imgs", "split"}
"""Words beside the name of a split, as in ``seg_train``, ``test-set`` or ``train_images``."""
LEFT_BEHIND = {
    *("__MACOSX", "@eaDir", "__pycache__", "lost+found", "#recycle", "$RECYCLE.BIN", "System Volume Information")
}
"""Folders that archives of macOS, file servers, Python and disks leave, in which nothing is meant."""


def split_of(name: str, *, whole: bool = True) -> Split | None:
    """Returns the split that a name means; None if it means none, or several.

    Args:
        name: of a folder, a file or a split.
        whole: whether other words than those of ``BESIDE`` make it another name, such as that of a class.
    """
    words = _words(name)
    found = {split: words & {*names} for split, names in SPLIT_NAMES.items()}
    meant = [split for split, there in found.items() if there]
    rest = words.difference(BESIDE, *found.values())
    return meant[0] if len(meant) == 1 and not (whole and rest) else None


def _words(name: str) -> set[str]:
    return {word.removesuffix("set") for word in re.findall("[a-z]+", name.lower())}


def tells_nothing(name: str) -> bool:
    """Whether the name of a folder, such as ``images``, means neither a split nor a class."""
    return bool(words := _words(name)) and words <= BESIDE


def by_split(names: Iterable[str]) -> tuple[dict[Split, str], list[str]]:
    """Returns which of some names mean a split, and what is wrong where two mean the same.

    Names such as ``signs_train`` and ``signs_test`` mean splits where all do, beside equal words, and one is training.
    Beside ``train``, one such as ``hard_test`` does if it is the only one of its split.
    """
    names = list(names)
    found, loosely = (
        {split: same for split in SPLITS if (same := [name for name in names if split_of(name, whole=whole) == split])}
        for whole in (True, False)
    )
    single = {split: same for split, same in loosely.items() if len(same) == 1}
    beside = {frozenset(_words(name).difference(BESIDE, *SPLIT_NAMES.values())) for name in names}
    if len(single) == len(names) and "train" in single and len(beside) == 1:
        found = single
    elif "train" in found:
        found = single | found
    twice = [f"{' and '.join(same)} both mean {split} (keep one)" for split, same in found.items() if len(same) > 1]
    return {split: same[0] for split, same in found.items()}, twice


def taken_by_a_part(named: Mapping[Split, str]) -> list[str]:
    """Returns what a run says of validation and test splits that a part of a name tells."""
    told = {split: name for split, name in named.items() if split != "train" and split_of(name) is None}
    return [f"{name} is taken as {split}" for split, name in told.items()]


def unseen(labels: Iterable[int], names: Sequence[str]) -> str:
    """Returns what a run says of classes that no training image has."""
    seen = {*labels}
    empty = [name for label, name in enumerate(names) if label not in seen]
    return f"no training image is of {', '.join(empty[:SHOWN])} ({len(empty)} of {len(names)} classes)" if empty else ""


def is_seen(name: str) -> bool:
    """Whether a file or folder is neither hidden nor one that programs leave in a folder."""
    return not name.startswith(".") and name not in LEFT_BEHIND


def files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and its subfolders that ``is_seen``; follows links, into each folder once."""
    seen = {str(parent) for parent in folder.resolve().parents}  # a link may lead back
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(filter(is_seen, folders))
        if real not in seen:
            yield from (Path(place, name) for name in files if is_seen(name))
        seen.add(real)


@dataclass(kw_only=True, eq=False, repr=False)
class SplitData(ImageData):
    """Base of data with the splits of a source; one that it lacks is cut from training, stratified, by ``split_seed``.

    Args:
        val_share: fraction of the training images, without those that are cut off for the test, that is cut off for
            validation if the source has no such split.
        test_share: fraction of the training images that is cut off for the test if the source has no such split.
    """

    val_share: float = 0.1
    test_share: float = 0.2

    def problems(self) -> list[str]:
        return super().problems() + cut_problems(val_share=self.val_share, test_share=self.test_share)

    @abstractmethod
    def source_splits(self) -> dict[Split, Any]:
        """Returns the splits of the source that are ``needed``: each has ``labels`` and ``part``."""

    def needed(self, found: dict[Split, T], way_out: str = "") -> dict[Split, T]:
        """Returns what a source has for the splits that a command needs, in order: a test reads no training images.

        Validation may be compared with training, and keeps it where it is there.

        Raises:
            UserError: neither the one split that is needed is there nor training, from which it would be cut.
        """
        wanted, found = self.wanted, {split: found[split] for split in SPLITS if split in found}
        if wanted in found and (wanted == "test" or "train" not in found):
            return {wanted: found[wanted]}
        if "train" not in found:
            lacking = " or ".join(dict.fromkeys(filter(None, (wanted, "train"))))
            named = self.place.removeprefix("data.")
            raise UserError(f"{named} has images of {' and '.join(found)}, none of {lacking}{way_out}")
        return found

    @cached_property
    def _source(self) -> dict[Split, Any]:
        return self.source_splits()

    @cached_property
    def _splits(self) -> dict[Split, Any]:
        shares: dict[Split, float] = {"test": self.test_share, "val": self.val_share}
        missing = {split: share for split, share in shares.items() if split not in self._source}
        if self.wanted == "test":
            missing.pop("val", None)
        if not missing or "train" not in self._source:
            return self._source
        train = self._source["train"]
        try:
            parts = cut_missing([int(label) for label in train.labels], missing, self.split_seed)
        except UserError:
            if self.wanted not in self._source:
                raise
            return {self.wanted: self._source[self.wanted]}
        return self._source | {split: train.part(indices) for split, indices in parts.items()}

    @property
    def cut_splits(self) -> tuple[Split, ...]:
        return tuple(split for split in SPLITS if split not in self._source)


@dataclass(kw_only=True, eq=False, repr=False)
class ImageSet(SplitData):
    """Base of ``ImageFolder`` and ``HuggingFaceSet``: a subclass gives ``class_names`` and ``source_splits``.

    Args:
        image_size: height and width in pixels of the model's input; images are cropped and resized to it.
        num_workers: processes that decode images.
        augment: random changes of the training images after the random crop, in order.
        in_memory: whether decoded images are kept, on a GPU where they take at most a quarter of its free memory. Needs
            ``min_area`` 1, since random crops are decoded from the file (RandomResizedCrop in ``augment`` crops kept
            images). By default for splits that take at most a gigabyte, if ``min_area`` is 1.
        min_area: smallest fraction of a training image's area that a random crop shows; 1 takes the whole image.
        centre_share: fraction of the sides of a validation or test image that the centre crop shows.
        resize: in place of ``centre_share``, the whole validation or test image is resized, its shorter side to one
            number or to height and width whatever its shape, and ``image_size`` is cut out of its middle, as by
            torchvision's Resize and CenterCrop; cover: to ``image_size`` / ``centre_share``, as timm's rectangles.
        mean: mean of each channel, of pixels between 0 and 1; ImageNet's by default.
        std: standard deviation of each channel.
        interpolation: how crops are resized. The fast ones take less time (with ``pip install simplejpeg`` less still);
            their pixels differ from the others' by 1 of 255 here and there, more at the edges of a crop. With those of
            the device, a GPU decodes, crops and resizes JPEG files (torchvision with nvJPEG): its pixels differ more.
    """

    image_size: int | tuple[int, int] = 224  # type: ignore[assignment]  # a pair once __post_init__ is done
    num_workers: int = 2
    in_memory: bool | None = None
    min_area: float = 0.08
    centre_share: float = 0.875
    resize: Resize | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.image_size = pair(self.image_size)

    def problems(self) -> list[str]:
        problems = super().problems() + problems_of(
            ("min_area", self.min_area, 0.0 < self.min_area <= 1.0, "above 0 and at most 1"),
            ("centre_share", self.centre_share, 0.0 < self.centre_share <= 1.0, "above 0 and at most 1"),
            ("resize", self.resize, covers(self.resize, self.image_size), f"at least image_size={self.image_size}"),
        )
        if self.interpolation.startswith("device_") and any(isinstance(a, PerImage) for a in self.augment or []):
            problems.append(f"interpolation={self.interpolation} and augment with changes of single images, on the CPU")
        if self.in_memory and self.min_area < 1:
            problems.append(f"in_memory={self.in_memory} needs min_area=1 (augment may hold RandomResizedCrop)")
        return problems

    def image_count(self, split: Split) -> int:
        """Returns the number of images of a split that are used; decodes none."""
        return super().image_count(split) if split == "train" else len(self._splits[split].labels)

    def test_view(self) -> dict[str, Any]:
        by_the_cpu = self.interpolation.replace("device", "fast")
        other: dict[str, Any] = {} if by_the_cpu == "bicubic" else {"interpolation": by_the_cpu}
        return {**super().test_view(), **other, **({} if self.resize is None else {"resize": self.resize})}

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        if split not in self._splits:  # as a probe may ask for
            raise UserError(f"{self.place} has no images of {split}")
        dataset = DecodedImages(
            encoded=self._splits[split],
            image_size=pair(self.image_size),
            min_area=self.min_area,
            centre_share=self.centre_share,
            resize=self.resize,
            interpolation=self.interpolation,
        )
        return keep_if_small(dataset, split, self.in_memory)
