"""Sets that fit in memory: the digits, which come with the package, and torchvision's."""

import gzip
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.data.base import ImageData
from vit_lightning.data.batch_transform import Statistics
from vit_lightning.data.batches import Batch
from vit_lightning.data.images import Images
from vit_lightning.data.splits import Split, cut_missing, cut_problems
from vit_lightning.errors import UserError


@dataclass(kw_only=True, eq=False, repr=False)
class Digits(ImageData):
    """scikit-learn's 1,797 scanned digits, 8x8 and gray (Alpaydin and Kaynak 1998): real images, nothing to download.

    Args:
        num_workers: processes that load; the images are in memory, so none are needed.
        split_seed: seed that draws the 360 test images, stratified, and the 143 validation images from the rest.
    """

    image_size = (8, 8)
    class_names = [str(digit) for digit in range(10)]  # noqa: RUF012
    in_channels = 1
    # near those of all images, 0.3053 and 0.3760
    mean = (0.3053,)
    std = (0.3761,)
    cut_splits = ("val", "test")

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        table = _table()
        indices = cut_missing(table[:, -1].astype(int).tolist(), {"test": 360, "val": 143}, self.split_seed)[split]
        rows = torch.from_numpy(table[indices])
        images = rows[:, :-1].reshape(-1, 1, 8, 8).mul(255.0 / 16.0).round().to(torch.uint8)  # 0 to 16 becomes 0 to 255
        return Images(images, rows[:, -1].long())


@cache
def _table() -> NDArray[np.float64]:
    """Returns one row for each image: 64 pixels and the label; ``digits.txt`` says where the file is from."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz")) as file:
        return np.loadtxt(file, delimiter=",")


SetName = Literal["CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "SVHN", "STL10", "USPS"]


@dataclass(frozen=True)
class _Facts:
    """Facts of a set that are known before it is downloaded; mean and std of the training images."""

    num_classes: int
    image_size: tuple[int, int]
    mean: Statistics
    std: Statistics
    has_split: bool = False
    """Whether torchvision's class has the argument ``split`` ("train" or "test"), not ``train`` (a boolean)."""


_FACTS: dict[str, _Facts] = {
    "CIFAR10": _Facts(10, (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": _Facts(100, (32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "MNIST": _Facts(10, (28, 28), (0.1307,), (0.3081,)),
    "FashionMNIST": _Facts(10, (28, 28), (0.2860,), (0.3530,)),
    "KMNIST": _Facts(10, (28, 28), (0.1918,), (0.3483,)),
    "SVHN": _Facts(10, (32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), has_split=True),
    "STL10": _Facts(10, (96, 96), (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713), has_split=True),
    "USPS": _Facts(10, (16, 16), (0.2469,), (0.2989,)),
}


@dataclass(kw_only=True, eq=False, repr=False)
class TorchvisionSet(ImageData):
    """One of torchvision's sets, with its own test images; validation is cut from the training images, stratified.

    Args:
        name: the set, named as in ``torchvision.datasets``.
        root: folder for the downloaded files.
        num_workers: processes that load; the images are in memory, so none are needed.
        split_seed: seed that draws the validation images.
        val_share: fraction of the training images that is cut off for validation.
    """

    name: SetName
    root: Path = Path("data")
    batch_size: int = 128
    val_share: float = 0.1
    cut_splits = ("val",)

    def __post_init__(self) -> None:
        super().__post_init__()
        facts = _FACTS[self.name]
        self.image_size = facts.image_size
        self.mean, self.std, self.in_channels = facts.mean, facts.std, len(facts.mean)

    def problems(self) -> list[str]:
        problems = super().problems() + cut_problems(val_share=self.val_share)
        return problems if self.name in _FACTS else [*problems, f"name={self.name} is none of {', '.join(_FACTS)}"]

    @property
    def class_names(self) -> list[str]:
        """The set's own names once it is there, else the numbers of the classes."""
        with suppress(UserError):  # it is to be downloaded
            if names := getattr(self._training_set, "classes", None):
                return list(names)
        return [str(label) for label in range(self.num_classes)]

    @property
    def num_classes(self) -> int:
        return _FACTS[self.name].num_classes

    def prepare_data(self) -> None:
        """Downloads what is not there yet, or damaged, with torchvision's progress bar."""
        self._set("train", download=True)
        self._set("test", download=True)

    def _set(self, part: Literal["train", "test"], *, download: bool = False) -> Any:
        import torchvision

        arguments: dict[str, Any] = {"split": part} if _FACTS[self.name].has_split else {"train": part == "train"}
        try:
            return getattr(torchvision.datasets, self.name)(str(self.root), download=download, **arguments)
        except (OSError, RuntimeError) as fault:
            raise UserError(f"{self.name} cannot be loaded from root={self.root}: {fault}") from fault

    @cached_property
    def _training_set(self) -> Any:
        return self._set("train")

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        images, labels = _tensors(self._training_set if split != "test" else self._set("test"))
        if split == "test":
            return Images(images, labels)
        indices = cut_missing(labels.tolist(), {"val": self.val_share}, self.split_seed)[split]
        return Images(images[indices], labels[indices])


def _tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    """Returns uint8 images (n, c, H, W) and int64 labels of a torchvision set."""
    images = torch.as_tensor(np.asarray(dataset.data))
    labels = torch.as_tensor(np.asarray(getattr(dataset, "targets", getattr(dataset, "labels", None)))).long()
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2).contiguous()
    return images, labels


@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR10(TorchvisionSet):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, 32x32 in colour, 10 classes; 170 MB."""

    name: SetName = field(default="CIFAR10", init=False)


@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR100(TorchvisionSet):
    """CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images, 32x32 in colour, 100 classes; 170 MB."""

    name: SetName = field(default="CIFAR100", init=False)
