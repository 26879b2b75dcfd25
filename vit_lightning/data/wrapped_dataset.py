"""Any map-style dataset of single items as a data module, with exact order and resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.image_set import IMAGENET_MEAN, IMAGENET_STD, SPLIT_NAMES
from vit_lightning.data.items import labels_of, read_item, to_pixels
from vit_lightning.data.own_code import Own, argument_names, make, name_of, seeded
from vit_lightning.data.splits import Split, cut_missing, cut_problems
from vit_lightning.errors import UserError
from vit_lightning.limits import problems_of, refuse
from vit_lightning.sizes import pair


@dataclass(kw_only=True, eq=False, repr=False)
class WrappedDataset(ImageData):
    """Any map-style ``Dataset`` of (image, label) items: order, resume, augmentation and normalisation are ours.

    In a config ``data.class_path`` names the dataset itself, with its arguments beside those of this class. If it takes
    ``train`` or ``split``, it is made once for each split; a split that it lacks is cut from the training images,
    stratified, by ``split_seed``. See ``Items`` for the kinds of images.

    Args:
        dataset_class: the class, or a function that returns a dataset.
        arguments: its arguments.
        num_workers: processes that load images.
        image_size: height and width in pixels of the model's input, by default those of the images; others are cropped
            at the centre and resized.
        in_channels: 1 or 3 channels of PIL images; by default those of the first.
        num_classes: number of classes; by default that of the dataset's ``classes``, else of its labels.
        class_names: name of each class; by default the dataset's ``classes``, else numbers.
        val_share: fraction of the training images that is cut off for validation if the dataset has no such split.
        test_share: fraction of the training images that is cut off for the test if the dataset has no such split.
        mean: mean of each channel, of pixels between 0 and 1; by default ImageNet's, 0.5 for other than 3 channels.
        std: standard deviation of each channel; by default ImageNet's, 0.25 for other than 3 channels.
    """

    dataset_class: Own
    arguments: dict[str, Any] | None = None
    num_workers: int = 2
    image_size: int | tuple[int, int] | None = None  # type: ignore[assignment]  # a pair once __post_init__ is done
    in_channels: int | None = None  # type: ignore[assignment]
    num_classes: int | None = None  # type: ignore[assignment]
    class_names: list[str] | None = None  # type: ignore[assignment]
    val_share: float = 0.1
    test_share: float = 0.2
    mean: tuple[float, ...] | None = None  # type: ignore[assignment]
    std: tuple[float, ...] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts = self._make_splits()
        train = self._parts["train"][0]
        with seeded():
            first, *others = [read_item(train, index, self.title)[0] for index in (0, len(train) // 2, len(train) - 1)]
        self._take_images(first, others)
        self._take_classes(train)
        self._cut_missing()

    def problems(self) -> list[str]:
        problems = super().problems() + cut_problems(val_share=self.val_share, test_share=self.test_share)
        if self.image_size is not None:
            problems += problems_of(("image_size", self.image_size, min(pair(self.image_size)) >= 1, "at least 1"))
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values is not None and self.in_channels is not None and len(values) != self.in_channels:
                problems.append(f"{key}={list(values)} must have {self.in_channels} values, one for each channel")
        return problems

    @property
    def title(self) -> str:
        """Name of the dataset, as in errors."""
        return f"class_path={name_of(self.dataset_class)}"

    def _make(self, **which: Any) -> Any:
        try:
            with seeded() as seed:  # it may draw a split, or the images: the same for each split, rank and resumed run
                seed(self.split_seed)
                return make(self.dataset_class, {**(self.arguments or {}), **which})
        except UserError as error:
            raise UserError([f"{self.title}: {problem}" for problem in error.problems]) from error.__cause__

    def _make_splits(self) -> dict[Split, tuple[Any, Sequence[int]]]:
        """Makes the dataset of each split that it has; returns it with the indices of its images."""
        given, takes = self.arguments or {}, argument_names(self.dataset_class)
        if "train" in given:
            raise UserError(f"train={given['train']}: it is set for each split (leave it out)")
        key = next((key for key in ("train", "split") if key in takes and key not in given), None)
        made: dict[Split, Any] = {}
        if key is None:
            made["train"] = self._make()
        elif key == "train":
            made = {"train": self._make(train=True)}
            made["test"] = self._make(train=False)
        else:
            for split, names in SPLIT_NAMES.items():
                names = (*names, "trainval") if split == "train" else names
                if (found := self._first_that_works(names)) is not None:
                    made[split] = found
        for split, dataset in made.items():
            there = all(hasattr(dataset, name) for name in ("__getitem__", "__len__"))
            if not there or isinstance(dataset, IterableDataset):
                text = f"gives a {type(dataset).__name__} without __getitem__ and __len__"
                raise UserError(f"{self.title} {text} (a LightningDataModule takes any loader)")
            if not len(dataset):
                raise UserError(f"{self.title}: its {split} images are none")
        return {split: (dataset, range(len(dataset))) for split, dataset in made.items()}

    def _first_that_works(self, names: Sequence[str]) -> Any:
        """Returns the dataset of the first name of a split that it accepts; None if validation or test has none."""
        faults = []
        for name in names:
            try:
                dataset = self._make(split=name)
            except UserError as error:
                cause = error.__cause__
                if not isinstance(cause, ValueError | KeyError | FileNotFoundError | AssertionError):
                    raise
                faults.append(error)
                continue
            if not hasattr(dataset, "__len__") or len(dataset):
                return dataset
        if "train" in names:
            raise faults[0] if faults else UserError(f"{self.title}: split=train has no images")
        return None

    def _take_images(self, first: Any, others: Sequence[Any]) -> None:
        """Takes size and channels from the first image, and default statistics from its channels."""
        try:
            pixels = to_pixels(first, self.in_channels)
            self.in_channels = pixels.shape[2]
            shapes = [pixels.shape[:2], *(to_pixels(other, self.in_channels).shape[:2] for other in others)]
        except UserError as error:
            raise UserError(f"{self.title}: {error}") from error
        if self.image_size is None and len({*shapes}) > 1:
            sizes = ", ".join(dict.fromkeys(f"{height}x{width}" for height, width in shapes))
            raise UserError(f"image_size is missing: the images have several sizes ({sizes})")
        self.image_size = pair(self.image_size or shapes[0])
        colour = self.in_channels == 3
        self.mean = self.mean or (IMAGENET_MEAN if colour else (0.5,) * self.in_channels)
        self.std = self.std or (IMAGENET_STD if colour else (0.25,) * self.in_channels)
        refuse(self.problems())

    def _take_classes(self, train: Any) -> None:
        """Takes the names of the classes from the dataset, else their number from the labels."""
        names = self.class_names or getattr(train, "classes", None) or getattr(train, "class_names", None)
        if names is None:
            count = self.num_classes or 1 + max(labels_of(train, self.title))
            names = [str(label) for label in range(count)]
        self.class_names = [str(name) for name in names]
        if self.num_classes not in (None, len(self.class_names)):
            raise UserError(f"num_classes={self.num_classes}: {self.title} names {len(self.class_names)} classes")
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"num_classes={self.num_classes} must be at least 2 to classify")

    def _cut_missing(self) -> None:
        train = self._parts["train"][0]
        shares: dict[Split, float] = {"test": self.test_share, "val": self.val_share}
        if missing := {split: share for split, share in shares.items() if split not in self._parts}:
            parts = cut_missing(labels_of(train, self.title), missing, self.split_seed)
            self._parts |= {split: (train, indices) for split, indices in parts.items()}

    @property
    def cut_splits(self) -> tuple[Split, ...]:
        train = self._parts["train"][0]
        return tuple(split for split, (dataset, _) in self._parts.items() if split != "train" and dataset is train)

    @property
    def notice(self) -> str:
        dataset, indices = self._parts["train"]
        if not (self.cut_splits and _draws_at_random(dataset, indices[0], self.title)):
            return ""
        return (
            f"{self.title} changes its images at random, also those cut off for {' and '.join(self.cut_splits)} "
            "(leave these transforms to data.augment, or give the dataset an argument train or split)"
        )

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        dataset, indices = self._parts[split]
        return self.batches_of(dataset, indices)


def _draws_at_random(dataset: Any, index: int, title: str) -> bool:
    """Whether eight readings of an item differ."""
    images = []
    with seeded() as seed:
        for key in range(8):
            seed(key)
            images.append(to_pixels(read_item(dataset, index, title)[0]))
    return any(image.shape != images[0].shape or (image != images[0]).any() for image in images)
