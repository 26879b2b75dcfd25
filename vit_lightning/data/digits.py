"""scikit-learn's digits: real images that need no download."""

import gzip
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.images import Images
from vit_lightning.data.splits import Split, cut_missing


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
    # of the training images for split_seed 0
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
    """Returns one row for each image: 64 pixels and the label, from scikit-learn's file; its import takes a second."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        return np.loadtxt(file, delimiter=",")
