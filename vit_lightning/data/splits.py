"""Splits of a dataset; a missing one is cut from the training images."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vit_lightning.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def stratified_cut(
    labels: Sequence[int], share: int | float, seed: int, *, split: Split
) -> tuple[list[int], list[int]]:
    """Returns sorted indices (rest, cut); ``share`` is the number of images in the cut or their fraction.

    Raises:
        UserError: one side would have fewer images than there are classes, or a class has one image; names the option
            of ``split``.
    """
    size = share if isinstance(share, int) else math.ceil(share * len(labels))
    classes, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if min(size, len(labels) - size) < max(1, len(classes)) or counts.min() < 2:
        raise UserError(
            f"{split}_share={share} of {len(labels)} training images is no cut with an image of each of "
            f"{len(classes)} classes on both sides (give another {split}_share, or images of {split})"
        )
    # the same random numbers as scikit-learn's train_test_split, whose import takes a second
    random = np.random.RandomState(seed)
    in_rest = _in_proportion(counts, len(labels) - size, random)
    in_cut = _in_proportion(counts - in_rest, size, random)
    rest, cut = list[int](), list[int]()
    by_class = np.split(np.argsort(places, kind="stable"), np.cumsum(counts)[:-1])
    for images, first, second in zip(by_class, in_rest, in_cut, strict=True):
        drawn = images[random.permutation(len(images))].tolist()
        rest += drawn[:first]
        cut += drawn[first : first + second]
    return sorted(rest), sorted(cut)


def _in_proportion(counts: NDArray[np.int64], size: int, random: np.random.RandomState) -> NDArray[np.int64]:
    """Returns how many images of each class give ``size`` in all; of equal remainders, those to round up are drawn."""
    exact = counts / counts.sum() * size
    taken: NDArray[np.float64] = np.floor(exact)
    remainders = exact - taken
    for remainder in np.unique(remainders)[::-1]:
        if not (missing := int(size - taken.sum())):
            break
        equal = np.flatnonzero(remainders == remainder)
        taken[random.choice(equal, min(len(equal), missing), replace=False)] += 1
    return taken.astype(np.int64)


def cut_missing(labels: Sequence[int], shares: Mapping[Split, int | float], seed: int) -> dict[Split, list[int]]:
    """Returns the sorted indices of each split that is cut, one after the other, and of what remains.

    Args:
        labels: those of all training images.
        shares: number or fraction of the images in each cut, of those that the earlier cuts leave.
        seed: draws the cuts, stratified.
    """
    train, parts = list(range(len(labels))), dict[Split, list[int]]()
    for split, share in shares.items():
        rest, cut = stratified_cut([labels[i] for i in train], share, seed, split=split)
        parts[split], train = [train[i] for i in cut], [train[i] for i in rest]
    return {**parts, "train": train}


def cut_problems(**shares: float) -> list[str]:
    """Returns what is wrong with the fractions that are cut from training."""
    return [f"{key}={share} must be above 0 and below 1" for key, share in shares.items() if not 0.0 < share < 1.0]
