"""Base of all data modules: splits, loaders with an exact order, and the description that checkpoints keep."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.classes import match_classes
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.batch_transform import BatchTransform, Mixing, Statistics
from vit_lightning.data.batches import Batch, Loader, Request
from vit_lightning.data.images import DecodedImages, DecodedOnDevice, Images
from vit_lightning.data.items import Items, gives_items
from vit_lightning.data.per_image import PerImage, PerImageFirst
from vit_lightning.data.sampling import (
    evaluation_requests,
    nested_subset,
    step_weight,
    train_batch_count,
    train_requests,
)
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, at_least, gathered, problems_of, refuse
from vit_lightning.random_keys import mix_one, one_key
from vit_lightning.sizes import pair


@dataclass(kw_only=True, eq=False, repr=False)
class ImageData(LightningDataModule):
    """Base of the data modules: loaders with an exact order, augmentation and normalisation on the device.

    A subclass gives ``image_size``, ``class_names``, ``mean`` and ``std`` (``in_channels`` if it is not 3) and
    ``make_dataset``. Its own arguments are dataclass fields; those of this class come with it.

    Args:
        batch_size: images in a batch, on each device.
        num_workers: processes that load images, each a part of a batch.
        split_seed: seed that draws the images of the splits that the source does not have.
        augment: random changes of the training images, in order.
        mixing: MixUp or CutMix or both; one of them, or by their p none, is drawn for each training batch.
        mixing_off_epoch: first epoch without mixing, from 0; None for none.
        repetitions: repeated augmentation: each image comes this many times in an epoch, which keeps its length and so
            uses 1 / repetitions of the images.
        fraction: fraction of the training images of each class that is used; a larger one contains every smaller one.
        shots: training images of each class that are used, instead of a fraction.
        also_test: further test sets by name: a folder of images, or options that differ from those here, as
            {shifted: {root: FOLDER}}. fit and test measure them as test/NAME/acc; they may lack classes.
    """

    batch_size: int = 64
    num_workers: int = 0
    split_seed: int = 0
    augment: list[Augmentation] | None = None
    mixing: list[Mixing] | None = None
    mixing_off_epoch: int | None = None
    repetitions: int = 1
    fraction: float = 1.0
    shots: int | None = None
    also_test: dict[str, Any] | None = None

    image_size: tuple[int, int] = field(init=False)
    """Height and width in pixels of the model's input."""
    in_channels: int = field(default=3, init=False)
    mean: Statistics = field(init=False)
    std: Statistics = field(init=False)
    centre_share: float = field(default=1.0, init=False)
    in_memory: bool | None = field(default=None, init=False)
    wanted: Split | None = field(default=None, init=False)
    """The split that a command measures; None for one that trains."""
    learned: str | None = field(default=None, init=False)
    """Fingerprint of the images that the model learned from, where these lay elsewhere."""
    further: dict[str, "ImageData"] = field(default_factory=dict, init=False)
    """Data of ``also_test``, for commands that test."""

    def __post_init__(self) -> None:
        super().__init__()
        self.for_trainer: LightningDataModule = self
        """What a Trainer gets as its datamodule."""
        if self.augment is not None:
            self.augment = [change if isinstance(change, Augmentation) else PerImage(change) for change in self.augment]
        refuse(self.problems())
        self._of_model: tuple[list[str], Tensor] | None = None  # names of its classes, and its label for each of ours
        self._datasets: dict[Split, Dataset[Batch]] = {}
        self._loaders: dict[Split, Loader] = {}

    def problems(self) -> list[str]:
        """Returns what is wrong with the values of the arguments."""
        problems = at_least(1, batch_size=self.batch_size, repetitions=self.repetitions, shots=self.shots)
        problems += at_least(0, num_workers=self.num_workers, split_seed=self.split_seed)
        problems += at_least(0, mixing_off_epoch=self.mixing_off_epoch)
        mixed = sum(way.p or 0.0 for way in self.mixing or [])
        problems += problems_of(
            ("split_seed", self.split_seed, self.split_seed < 2**32, "below 2**32"),
            ("fraction", self.fraction, 0.0 < self.fraction <= 1.0, "above 0 and at most 1"),
            ("mixing: sum of p", round(mixed, 9), mixed < 1.0 + 1e-9, "at most 1"),
        )
        if self.shots is not None and self.fraction != 1.0:
            problems.append(f"shots={self.shots} beside fraction={self.fraction}: give one of the two")
        return problems

    def pinned(self) -> dict[str, Any]:
        """Returns arguments with which the source gives the same images again, as it was found by ``check``."""
        return {}

    @property
    @abstractmethod
    def class_names(self) -> list[str]:
        """Name of each class, in the order of the labels."""

    @abstractmethod
    def make_dataset(self, split: Split) -> Any:
        """Makes the dataset of a split; called once for each.

        It gives a ``Batch`` for a ``Request``, as ``Images`` does, or it is any map-style dataset of (image, label)
        items (``Items``).
        """

    own_loaders: ClassVar[bool] = True
    """Whether the loaders are ours: order, single images and batch size."""

    @property
    def title(self) -> str:
        """Class of the data, as in errors."""
        return f"class_path={type(self).__module__}.{type(self).__qualname__}"

    @property
    def notice(self) -> str:
        """Limits of this data that a run says at its start."""
        return ""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def label_names(self) -> list[str]:
        """Name of each label in batches: ``class_names``, or those of the trained model that the images are for."""
        return self.class_names if self._of_model is None else self._of_model[0]

    @property
    def place(self) -> str:
        """Source of the images, as in errors."""
        named = [f"data.{key}={value}" for key in ("root", "path", "name") if (value := getattr(self, key, None))]
        return named[0] if named else f"data.{self.title}"

    def take_classes(self, names: Sequence[str] | None, whose: str) -> str:
        """Gives batches the labels of a trained model from now on; returns what is taken on trust.

        Args:
            names: of the model's classes; None if they are not known.
            whose: the model in an error.

        Raises:
            UserError: the model lacks classes of the data, or names cannot tell which is which.
        """
        count = len(names or self.class_names)
        try:
            match = match_classes(names, self.class_names, whose=whose, ours=self.place, classes=count)
        except UserError as error:
            raise UserError(f"{error} (give the classes of the data the names that the model has)") from error
        is_other = names is not None and match.labels != [*range(len(names))]
        self._of_model = (list(names or ()), torch.tensor(match.labels)) if is_other else None
        return match.note

    def of_model(self, labels: Tensor) -> Tensor:
        """Returns the labels of a trained model for labels of the data; those of no class, such as -100, stay."""
        if self._of_model is None:
            return labels
        places = self._of_model[1].to(labels.device)
        known = (labels >= 0) & (labels < len(places))
        return places[labels.where(known, 0)].where(known, labels)

    @property
    def changes_labels(self) -> bool:
        """Whether a trained model has other labels for its classes than the data."""
        labels = [] if self._of_model is None else self._of_model[1].tolist()
        return labels != [*range(len(labels))]

    def check(self) -> None:
        """Checks, without reading images, that the data is there.

        Raises:
            UserError: names what is missing.
        """

    def test_view(self) -> dict[str, Any]:
        """Returns the preprocessing of test images and the class names; checkpoints keep it for ``predict``."""
        return {
            "class_names": list(self.class_names),
            "image_size": list(self.image_size),
            "in_channels": self.in_channels,
            "centre_share": self.centre_share,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def check_augment(self) -> None:
        """Tries each change of single images on a black one.

        Raises:
            UserError: one fails, or changes size or type.
        """
        images = torch.zeros(1, self.in_channels, *self.image_size, dtype=torch.uint8)
        problems: list[str] = []
        for change in self.augment or []:
            with gathered(problems):
                if isinstance(change, PerImage):
                    change(images, torch.zeros(1, dtype=torch.int64))
        refuse(problems)

    def dataset(self, split: Split) -> Dataset[Batch]:
        if split not in self._datasets:
            made = self.make_dataset(split)
            self._datasets[split] = self.batches_of(made, range(len(made))) if gives_items(made) else made
        return self._datasets[split]

    def batches_of(self, dataset: Any, indices: Sequence[int], places: Sequence[int] | None = None) -> Items:
        """Returns some items of a dataset of single (image, label) items as a dataset of batches."""
        return Items(
            dataset=dataset,
            title=f"data.{self.title}",
            image_size=pair(self.image_size),
            in_channels=self.in_channels,
            places=places or range(len(self.class_names)),
            indices=indices,
        )

    def setup(self, stage: str = "fit") -> None:
        """Makes the datasets of a stage; images in memory go to the GPU where they fit."""
        splits: dict[str, list[Split]] = {"fit": ["train", "val"], "validate": ["val"]}
        for split in splits.get(stage, ["test"]):
            dataset = self.dataset(split)
            if isinstance(dataset, Images) and self._device.type == "cuda" and not self._first_changes(split):
                dataset.move_if_small(self._device)

    @cached_property
    def _fingerprint(self) -> str:
        datasets: list[Any] = [self.dataset("train"), self.dataset("val")]
        parts = [str(one.fingerprint() if hasattr(one, "fingerprint") else len(one)) for one in datasets]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def fingerprint(self) -> str:
        """Returns a hash that identifies the training and validation images, by few that are decoded."""
        return self._fingerprint

    @cached_property
    def train_subset(self) -> Tensor | None:
        """Indices of the training images that are used; None for all."""
        if self.fraction == 1.0 and self.shots is None:
            return None
        train: Any = self.dataset("train")
        labels, names = torch.as_tensor(train.labels), self.class_names
        counts = torch.bincount(labels, minlength=len(names)).tolist()
        short = [f"{name} {count}" for name, count in zip(names, counts, strict=True) if count < (self.shots or 0)]
        if short:
            raise UserError(f"shots={self.shots}: some classes have fewer training images ({', '.join(short)})")
        return nested_subset(labels, self.split_seed, fraction=self.fraction, shots=self.shots)

    @property
    def cut_splits(self) -> tuple[Split, ...]:
        """Splits that the source lacks: they are cut from its training images by ``split_seed``."""
        return ()

    def image_count(self, split: Split) -> int:
        """Returns the number of images of a split that are used."""
        subset = self.train_subset if split == "train" else None
        return len(self.dataset(split) if subset is None else subset)  # type: ignore[arg-type]

    @property
    def train_batches_per_epoch(self) -> int:
        """Batches that each rank sees in an epoch, before Lightning's ``limit_train_batches``."""
        return train_batch_count(self.image_count("train"), self.batch_size, self._ranks)

    def step_weight(self, number: int) -> float:
        """Returns the factor on the loss of a training batch of an epoch, see ``sampling.step_weight``."""
        assert self.trainer is not None
        return step_weight(
            number,
            size=self.image_count("train"),
            batch_size=self.batch_size,
            rank=self._rank,
            ranks=self._ranks,
            batches=int(self.trainer.num_training_batches),
            group=self.trainer.accumulate_grad_batches,
        )

    def train_dataloader(self) -> Loader:
        return self._loader("train", self._train_requests, self.train_batches_per_epoch)

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    @cached_property
    def transform(self) -> BatchTransform:
        return BatchTransform(
            augment=self.augment or [],
            mixing=self.mixing or [],
            mean=self.mean,
            std=self.std,
            repetitions=self.repetitions,
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Applies ``transform`` on the device."""
        if not isinstance(batch, Batch):
            return batch  # from the user's own loaders, given to Trainer.fit beside this module
        assert self.trainer is not None
        batch = self.model_input(batch, self.trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        # Lightning converted uint8; precision bf16-true or 64-true needs the model's own type
        return batch.replace(images=batch.images.to(self.trainer.lightning_module.dtype))

    def model_input(self, batch: Batch, completed: int) -> Batch:
        """Returns the batch normalised, float32; a training batch also augmented and mixed, after ``completed``."""
        key = mix_one(one_key(_seed(), completed, self._rank), 1)
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        mixes = self.mixing_off_epoch is None or epoch < self.mixing_off_epoch
        return self.transform(batch, num_classes=self.num_classes if self.mixing else 0, key=key, mixes=mixes)

    def _train_requests(self) -> Iterator[Request]:
        completed, batches_per_epoch = 0, self.train_batches_per_epoch  # outside of a trainer: the first epoch
        if self.trainer is not None:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            # overfit_batches shows the same batches in every epoch, those of epoch 0
            overfit = self.trainer.overfit_batches  # type: ignore[attr-defined]
            completed = progress.current.ready if overfit else progress.total.completed
            batches_per_epoch = int(self.trainer.num_training_batches)
        return train_requests(
            size=self.image_count("train"),
            batch_size=self.batch_size,
            seed=_seed(),
            completed=completed,
            batches_per_epoch=batches_per_epoch,
            rank=self._rank,
            ranks=self._ranks,
            subset=self.train_subset,
            repetitions=self.repetitions,
        )

    def plain_batches(self, split: Split, indices: Tensor) -> Loader:
        """Returns a loader of images of a split, each once over all ranks, without augmentation and in this order.

        Random transforms that a training set of the user's own has inside stay.
        """
        requests = [Request(indices[request.indices].tolist(), None) for request in self._each_once(len(indices))]
        return self._make_loader(split, partial(iter, requests), len(requests))

    def _each_once(self, size: int) -> list[Request]:
        return evaluation_requests(size=size, batch_size=self.batch_size, rank=self._rank, ranks=self._ranks)

    def _evaluation_loader(self, split: Split) -> Loader:
        requests = self._each_once(self.image_count(split))
        return self._loader(split, partial(iter, requests), len(requests))

    def _loader(self, split: Split, requests: Callable[[], Iterator[Request]], length: int) -> Loader:
        """Returns the loader of a split, whose workers go on from epoch to epoch."""
        if split not in self._loaders or len(self._loaders[split]) != length:
            self._loaders[split] = self._make_loader(split, requests, length)
        return self._loaders[split]

    def _make_loader(self, split: Split, requests: Callable[[], Iterator[Request]], length: int) -> Loader:
        dataset: Any = self.dataset(split)
        is_moved = isinstance(dataset, Images) and dataset.is_moved
        finish = None
        if first := self._first_changes(split):
            dataset = PerImageFirst(dataset, first)
        elif isinstance(dataset, DecodedImages) and dataset.interpolation.startswith("device_"):
            dataset = DecodedOnDevice(dataset, self._device)
            finish = dataset.finish
        return Loader(
            dataset,
            requests,
            length,
            num_workers=self._workers(split),
            pin_memory=torch.cuda.is_available() and not is_moved,
            finish=finish,
            relabel=self.of_model,
        )

    def _first_changes(self, split: Split) -> list[Augmentation]:
        """Returns the changes of single training images that come before all augmentations of whole batches."""
        return [*takewhile(lambda change: isinstance(change, PerImage), self.augment or [])] if split == "train" else []

    def _workers(self, split: Split) -> int:
        """Returns how many processes read a split; 0 where this one makes its batches."""
        dataset: Any = self.dataset(split)
        in_memory = isinstance(dataset, Images) and not self._first_changes(split)
        return 0 if in_memory and not dataset.needs_workers(self._device) else self.num_workers

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _ranks(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size


def _seed() -> int:
    """Returns the seed that was given to Lightning's seed_everything."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
