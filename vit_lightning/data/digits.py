"""scikit-learn's digits: real images that need no download."""

from dataclasses import dataclass

import torch
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
        from sklearn.datasets import load_digits

        digits = load_digits()
        indices = cut_missing(digits.target, {"test": 360, "val": 143}, self.split_seed)[split]
        # 0 to 16 becomes 0 to 255
        images = torch.from_numpy(digits.images[indices]).mul(255.0 / 16.0).round().to(torch.uint8)
        return Images(images[:, None], torch.from_numpy(digits.target[indices]).long())
