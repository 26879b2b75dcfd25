"""Data modules: where images come from, how they are split, and what the model has to know of them."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.data.augment import Augmentation
from vit_lightning.data.mixing import Mixing
from vit_lightning.data.sampling import (
    Batch,
    Images,
    Loader,
    Request,
    dataset_fingerprint,
    evaluation_requests,
    nested_subset,
    train_batch_count,
    train_requests,
)
from vit_lightning.data.splits import Split, stratified_cut
from vit_lightning.errors import UserError
from vit_lightning.random_keys import mix, mix_one, one_key

OnBadImage = Literal["error", "skip"]
CACHED_BYTES = 2**20
"""8-bit images that are augmented and normalised at a time on a CPU: with what is made of them, a core's own cache."""
Statistics = tuple[float, ...]
"""One number for each channel, of pixels between 0 and 1."""

BAD_IMAGES = "bad_images.txt"
"""File of a run folder with what ``on_bad_image: skip`` left out, a line for each image."""


class ImageData(LightningDataModule):
    """What all data modules share: loaders with an exact order, augmentation and normalisation on the device.

    A subclass says what the model has to know (``image_size``, ``in_channels``, ``class_names``, ``mean``, ``std``)
    before anything is read, and makes the dataset of a split when it is needed.
    """

    in_channels: int = 3
    mean: Statistics
    std: Statistics
    centre_share: float = 1.0
    """Share of the sides of a validation or test image that the model sees."""
    in_memory: bool | None = None
    """Whether decoded images are kept; None leaves it to the source."""

    def __init__(
        self,
        *,
        batch_size: int,
        num_workers: int,
        split_seed: int,
        augment: Sequence[Augmentation] | None,
        mixing: Sequence[Mixing] | None = None,
        repetitions: int = 1,
        fraction: float = 1.0,
        shots: int | None = None,
        on_bad_image: OnBadImage = "error",
        max_bad_share: float = 0.05,
    ) -> None:
        super().__init__()
        limits = {"batch_size": (batch_size, 1), "num_workers": (num_workers, 0), "split_seed": (split_seed, 0)}
        limits |= {"repetitions": (repetitions, 1), "shots": (1 if shots is None else shots, 1)}
        problems = [
            f"{key}={value} must be at least {least}" for key, (value, least) in limits.items() if value < least
        ]
        if split_seed >= 2**32:
            problems.append(f"split_seed={split_seed} must be below 2**32")
        if not 0.0 < fraction <= 1.0:
            problems.append(f"fraction={fraction} must be above 0 and at most 1")
        if shots is not None and fraction != 1.0:
            problems.append(f"shots={shots} beside fraction={fraction}: give one of the two")
        if not 0.0 <= max_bad_share <= 1.0:
            problems.append(f"max_bad_share={max_bad_share} must be between 0 and 1")
        if problems:
            raise UserError(problems)
        self.batch_size, self.num_workers, self.split_seed = batch_size, num_workers, split_seed
        self.augment, self.mixing = list(augment or []), list(mixing or [])
        self.repetitions, self.fraction, self.shots = repetitions, fraction, shots
        self.on_bad_image, self.max_bad_share = on_bad_image, max_bad_share
        self.bad_images: dict[Split, set[str]] = {"train": set(), "val": set(), "test": set()}
        self._datasets: dict[Split, Dataset[Batch]] = {}
        self._loaders: dict[Split, Loader] = {}
        self._fingerprint: str | None = None

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of what the model gets."""

    @property
    @abstractmethod
    def class_names(self) -> list[str]:
        """Name of each class, in the order of the labels."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def check(self) -> None:
        """Looks, without reading images, whether the data can be had.

        Raises:
            UserError: names what is missing.
        """

    def test_view(self) -> dict[str, Any]:
        """What has to be known to show the model other images as those of the test, as plain data."""
        return {
            "class_names": list(self.class_names),
            "image_size": list(self.image_size),
            "in_channels": self.in_channels,
            "centre_share": self.centre_share,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    @abstractmethod
    def make_dataset(self, split: Split) -> Dataset[Batch]:
        """The images of a split; asked for once."""

    def dataset(self, split: Split) -> Dataset[Batch]:
        """The images of a split."""
        if split not in self._datasets:
            self._datasets[split] = self.make_dataset(split)
        return self._datasets[split]

    def setup(self, stage: str = "fit") -> None:
        splits: dict[str, list[Split]] = {"fit": ["train", "val"], "validate": ["val"]}
        for split in splits.get(stage, ["test"]):
            self.dataset(split)

    def fingerprint(self) -> str:
        """Tells these training and validation images from others, without decoding any."""
        if self._fingerprint is None:
            parts = [dataset_fingerprint(self.dataset(split)) for split in ("train", "val")]
            self._fingerprint = hashlib.sha256("".join(parts).encode()).hexdigest()
        return self._fingerprint

    @cached_property
    def train_subset(self) -> Tensor | None:
        """Indices of the training images that are used; None for all."""
        if self.fraction == 1.0 and self.shots is None:
            return None
        labels = getattr(self.dataset("train"), "labels", None)
        if labels is None:
            raise UserError(f"fraction={self.fraction}, shots={self.shots}: the labels are not known beforehand")
        labels, names = torch.as_tensor(labels), self.class_names
        counts = torch.bincount(labels, minlength=len(names)).tolist()
        short = [f"{name} {count}" for name, count in zip(names, counts, strict=True) if count < (self.shots or 0)]
        if short:
            raise UserError(f"shots={self.shots}: some classes have fewer training images ({', '.join(short)})")
        return nested_subset(labels, self.split_seed, fraction=self.fraction, shots=self.shots)

    @property
    def _train_size(self) -> int:
        return len(self.dataset("train") if self.train_subset is None else self.train_subset)  # type: ignore[arg-type]

    @property
    def train_batches_per_epoch(self) -> int:
        """Batches that each rank sees in an epoch, before Lightning's ``limit_train_batches``."""
        return train_batch_count(self._train_size, self.batch_size, self._ranks)

    def train_dataloader(self) -> Loader:
        return self._loader("train", self._train_requests, self.train_batches_per_epoch)

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augments (training only) and normalises, on the device."""
        if not isinstance(batch, Batch):
            return batch  # loaders of the user's own, given to Trainer.fit beside this module
        assert self.trainer is not None
        batch = self.as_the_model_gets_it(batch, self.trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        # what Lightning converted was uint8; precision bf16-true or 64-true wants the model's own type
        return batch._replace(images=batch.images.to(self.trainer.lightning_module.dtype))

    def as_the_model_gets_it(self, batch: Batch, completed: int) -> Batch:
        """The batch normalised, float32; if it is of training, augmented and mixed, after ``completed`` batches."""
        made = torch.empty(batch.images.shape, dtype=torch.float32, device=batch.images.device)
        # a CPU takes a few images at a time, since memory outside of its cache costs more than the arithmetic
        count = max(8, CACHED_BYTES // batch.images[0].numel()) if made.device.type == "cpu" else len(made)
        for part in (slice(start, start + count) for start in range(0, len(made), count)):
            images = batch.images[part]
            if batch.keys is not None:
                for number, augment in enumerate(self.augment):
                    images = augment(images, mix(batch.keys[part], number))
            self.normalise(images, made[part])
        batch = batch._replace(images=made)
        if batch.keys is None or not self.mixing:
            return batch
        return self._mixed(batch, mix_one(one_key(_seed(), completed, self._rank), 1))

    def _mixed(self, batch: Batch, key: int) -> Batch:
        """Mixed in one of the ways that the page lists; a label is then the class of which there is most."""
        mixing = self.mixing[(mix_one(key) & 0xFFFFFFFF) % len(self.mixing)]
        images, targets = mixing(
            batch.images, batch.labels, num_classes=self.num_classes, key=key, repetitions=self.repetitions
        )
        return batch._replace(images=images, targets=targets, labels=targets.argmax(dim=1))

    def normalise(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """uint8 images (b, c, H, W) to float32 with mean 0 and deviation 1 over the training images."""
        mean, scale = _normalisation(self.mean, self.std, images.device)
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
        return out.copy_(images).sub_(mean).mul_(scale)  # in place: large new memory costs more than the arithmetic

    def _train_requests(self) -> Iterator[Request]:
        if self.trainer is None:  # looked at without a trainer: the first epoch
            return self._requests_after(0, self.train_batches_per_epoch)
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        # overfit_batches shows the same batches again and again, those of epoch 0
        overfit = self.trainer.overfit_batches  # type: ignore[attr-defined]
        completed = progress.current.ready if overfit else progress.total.completed
        return self._requests_after(completed, int(self.trainer.num_training_batches))

    def _requests_after(self, completed: int, batches_per_epoch: int) -> Iterator[Request]:
        return train_requests(
            size=self._train_size,
            batch_size=self.batch_size,
            seed=_seed(),
            completed=completed,
            batches_per_epoch=batches_per_epoch,
            rank=self._rank,
            ranks=self._ranks,
            subset=self.train_subset,
            repetitions=self.repetitions,
        )

    def _evaluation_loader(self, split: Split) -> Loader:
        requests = evaluation_requests(
            size=len(self.dataset(split)),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            rank=self._rank,
            ranks=self._ranks,
        )
        return self._loader(split, partial(iter, requests), len(requests))

    def _loader(self, split: Split, requests: Callable[[], Iterator[Request]], length: int) -> Loader:
        if split not in self._loaders or len(self._loaders[split]) != length:
            dataset = self.dataset(split)
            if split == "train" and isinstance(dataset, Images) and self._device.type == "cuda":
                dataset.move_to(self._device)
            on_device = isinstance(dataset, Images) and dataset.is_moved
            self._loaders[split] = Loader(
                dataset,
                requests,
                length,
                num_workers=0 if on_device else self.num_workers,
                pin_memory=torch.cuda.is_available() and not on_device,
                on_skipped=partial(self._list_bad, split),
            )
        return self._loaders[split]

    def _list_bad(self, split: Split, problems: Sequence[str]) -> None:
        """Keeps a list of what was left out, in the run folder too, and ends when it is more than was allowed."""
        new = [problem for problem in problems if problem not in self.bad_images[split]]
        self.bad_images[split].update(new)
        if new and self.trainer is not None:
            path = Path(self.trainer.default_root_dir) / BAD_IMAGES
            # of before, of other ranks; names of files may be no UTF-8
            known = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.is_file() else []
            lines = [line for problem in new if (line := " ".join(problem.split())) not in known]
            with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write("".join(f"{line}\n" for line in lines))
        size = self._train_size if split == "train" else len(self.dataset(split))  # type: ignore[arg-type]
        bad = len(self.bad_images[split])
        if bad > self.max_bad_share * size:
            raise UserError(
                [
                    f"data.max_bad_share={self.max_bad_share}: {bad} of {size} {split} images are damaged, first:",
                    *sorted(self.bad_images[split])[:5],
                ]
            )

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
    """What Lightning's seed_everything was given."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


@lru_cache
def _normalisation(mean: Statistics, std: Statistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean of 8-bit pixels and the factor after it, (c, 1, 1); kept, since making them on a GPU waits for it."""
    with torch.inference_mode(False):  # made while validating, they could not be used in training
        centre = torch.tensor(mean, device=device).mul(255.0)[:, None, None]
        return centre, torch.tensor(std, device=device).mul(255.0).reciprocal()[:, None, None]


class Digits(ImageData):
    """scikit-learn's 1,797 scanned digits, 8x8 and gray (Alpaydin and Kaynak 1998): real images, nothing to download.

    Args:
        batch_size: images in a batch, on each device.
        num_workers: processes that load; the images are in memory, so none are needed.
        split_seed: draws the 360 test images, stratified, and the 143 validation images from the rest.
        augment: random changes of the training images, in order.
        mixing: ways to mix the images of a training batch, of which each batch draws one.
        repetitions: how often an epoch shows each of its training images, which are then that many times fewer.
        fraction: share of the training images of each class that is used; a smaller share lies in every larger one.
        shots: training images of each class that are used, instead of a fraction.
    """

    in_channels = 1
    # of the training images for split_seed 0
    mean = (0.3053,)
    std = (0.3761,)

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        split_seed: int = 0,
        augment: list[Augmentation] | None = None,
        mixing: list[Mixing] | None = None,
        repetitions: int = 1,
        fraction: float = 1.0,
        shots: int | None = None,
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
        )

    @property
    def image_size(self) -> tuple[int, int]:
        return 8, 8

    @property
    def class_names(self) -> list[str]:
        return [str(digit) for digit in range(10)]

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        rest, test = stratified_cut(digits.target, 360, self.split_seed, split="test")
        train, val = stratified_cut(digits.target[rest], 143, self.split_seed, split="val")
        indices = {"train": [rest[i] for i in train], "val": [rest[i] for i in val], "test": test}[split]
        # 0 to 16 becomes 0 to 255
        images = torch.from_numpy(digits.images[indices]).mul(255.0 / 16.0).round().to(torch.uint8)
        return Images(images[:, None], torch.from_numpy(digits.target[indices]).long())
