"""Image sets in the layout of Hugging Face ``datasets``: from the hub, or Parquet files on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.base import ImageData, OnBadImage, Statistics
from vit_lightning.data.decoded import DecodedImages, keep_if_small, view_problems
from vit_lightning.data.image_folder import IMAGENET_MEAN, IMAGENET_STD, SPLIT_FOLDERS
from vit_lightning.data.mixing import Mixing
from vit_lightning.data.sampling import Batch
from vit_lightning.data.splits import Split, cut_problems, stratified_cut
from vit_lightning.errors import UserError
from vit_lightning.sizes import pair

Rows = tuple[Split, Sequence[int]]
"""A split of the source, and the rows of it."""


def _content(table: Any, column: str, rows: Sequence[int], index: int) -> Path | bytes:
    """What is in the image of an index, or the file that it is in."""
    image = table[int(rows[index])][column] or {"bytes": b"", "path": None}  # null: as damaged as an empty file
    return Path(image["path"]) if image["bytes"] is None and image["path"] else bytes(image["bytes"] or b"")


class HuggingFaceSet(ImageData):
    """A set with an image column and a label column, through the library ``datasets`` (an extra of this package).

    What has no split, or none with labels (-1), is cut from the training images, stratified, by ``split_seed``.

    Args:
        path: folder with Parquet files that have train, val or test in their names, or the name of a set on the hub.
        image_size: height and width that the model gets, in pixels; images are cropped and resized to it.
        batch_size: images in a batch, on each device.
        num_workers: processes that decode images.
        split_seed: draws the images of the splits that the source lacks.
        augment: random changes of the training images after the random crop, in order.
        mixing: ways to mix the images of a training batch, of which each batch draws one.
        repetitions: how often an epoch shows each of its training images, which are then that many times fewer.
        fraction: share of the training images of each class that is used; a smaller share lies in every larger one.
        shots: training images of each class that are used, instead of a fraction.
        on_bad_image: whether an image that cannot be decoded ends the run, or is left out of its batch and listed.
        max_bad_share: share of a split's images from which on their leaving out is an error all the same.
        in_memory: whether images are decoded once and kept; see ImageFolder.
        val_share: share of the training images that validation gets if the source has none.
        test_share: share of the training images that the test gets if the source has none.
        min_area: smallest part of a training image that a random crop shows; 1 takes the whole image.
        centre_share: share of the sides of a validation or test image that the model sees.
        mean: mean of each channel, of pixels between 0 and 1; ImageNet's by default.
        std: standard deviation of each channel.
        image_column: column with the images.
        label_column: column with the labels.
        cache: folder for what is downloaded and unpacked.
    """

    def __init__(
        self,
        *,
        path: str,
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
        image_column: str = "image",
        label_column: str = "label",
        cache: Path = Path("data/huggingface"),
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
        if problems:
            raise UserError(problems)
        self.path, self.cache = path, cache
        self.image_column, self.label_column = image_column, label_column
        self.shares: dict[Split, float] = {"test": test_share, "val": val_share}
        self.min_area, self.centre_share, self.in_memory = min_area, centre_share, in_memory
        self.mean: Statistics = tuple(mean)
        self.std: Statistics = tuple(std)
        self._image_size = pair(image_size)

    @property
    def image_size(self) -> tuple[int, int]:
        return self._image_size

    @property
    def class_names(self) -> list[str]:
        self.check()
        names = getattr(self._tables["train"].features[self.label_column], "names", None)
        return list(names) if names else [str(label) for label in range(1 + max(self._labels["train"]))]

    def check(self) -> None:
        """The source can be had and has the columns."""
        for split, table in self._tables.items():
            missing = [name for name in (self.image_column, self.label_column) if name not in table.column_names]
            if missing:
                there = ", ".join(table.column_names)
                raise UserError(f"path={self.path}: {split} has no column {' or '.join(missing)} (choose {there})")

    @cached_property
    def _tables(self) -> dict[Split, Any]:
        """The splits that the source has."""
        try:
            import datasets
        except ImportError as fault:
            raise UserError(
                "class_path=HuggingFaceSet needs datasets (pip install 'vit-lightning[datasets]')"
            ) from fault
        try:
            if Path(self.path).is_dir():
                loaded = datasets.load_dataset("parquet", data_files=self._files(), cache_dir=str(self.cache))
            else:
                loaded = datasets.load_dataset(self.path, cache_dir=str(self.cache))
        except (OSError, ValueError, RuntimeError) as fault:
            raise UserError(f"path={self.path} cannot be had: {' '.join(str(fault).split())[:300]}") from fault
        columns = [self.image_column, self.label_column]  # others would be decoded with each row
        tables = {
            split: loaded[name].select_columns(columns).cast_column(self.image_column, datasets.Image(decode=False))
            if {*columns} <= {*loaded[name].column_names}
            else loaded[name]
            for split, names in SPLIT_FOLDERS.items()
            for name in names
            if name in loaded
        }
        if "train" not in tables:
            raise UserError(f"path={self.path} has no split named train (it has {', '.join(loaded)})")
        return tables

    def _files(self) -> dict[str, list[str]]:
        """Parquet files of each split."""
        files = sorted(Path(self.path).glob("**/*.parquet"))
        if not files:
            raise UserError(f"path={self.path} holds no Parquet files")
        found: dict[str, list[str]] = {}
        for file in files:
            names = [split for split, words in SPLIT_FOLDERS.items() if any(word in file.stem for word in words)]
            if len(names) != 1:
                raise UserError(f"path={self.path}: the name of {file.name} must hold one of train, val and test")
            found.setdefault(names[0], []).append(str(file))
        return found

    @cached_property
    def _labels(self) -> dict[Split, list[int]]:
        self.check()
        labels = {split: list(table[self.label_column]) for split, table in self._tables.items()}
        # -1 is the hub's way to say that the labels of a test are secret: as if the split were not there
        labels = {split: values for split, values in labels.items() if split == "train" or {*values} != {-1}}
        names = getattr(self._tables["train"].features[self.label_column], "names", None)
        known = {*range(len(names))} if names else {label for label in labels["train"] if isinstance(label, int)}
        odd = {split: {*values} - {label for label in known if label >= 0} for split, values in labels.items()}
        problems = [
            f"path={self.path}: label_column={self.label_column} of {split} holds "
            f"{', '.join(sorted(map(str, some))[:5])} (labels are whole numbers from 0 on, and those of training)"
            for split, some in odd.items()
            if some
        ]
        if problems:
            raise UserError(problems)
        return labels

    @cached_property
    def _splits(self) -> dict[Split, Rows]:
        self.check()
        splits: dict[Split, Rows] = {split: (split, range(len(labels))) for split, labels in self._labels.items()}
        for split, share in self.shares.items():
            if split not in splits:
                rows = splits["train"][1]
                labels = [self._labels["train"][row] for row in rows]
                rest, cut = stratified_cut(labels, share, self.split_seed, split=split)
                splits[split] = "train", [rows[i] for i in cut]
                splits["train"] = "train", [rows[i] for i in rest]
        return splits

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        source, rows = self._splits[split]
        dataset = DecodedImages(
            partial(_content, self._tables[source], self.image_column, rows),
            [self._labels[source][row] for row in rows],
            image_size=self.image_size,
            min_area=self.min_area,
            centre_share=self.centre_share,
            names=[f"{self.path}, {source}, row {row}" for row in rows],
            skip=self.on_bad_image == "skip",
        )
        return keep_if_small(dataset, split, self.in_memory)
