"""Splits of a dataset; a missing one is cut from the training images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from vit_lightning.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def stratified_cut(
    labels: Sequence[int], share: int | float, seed: int, *, split: Split
) -> tuple[list[int], list[int]]:
    """Returns sorted indices (rest, cut); ``share`` is the number of images in the cut or their fraction.

    Raises:
        UserError: one side would lack a class; names the option of ``split``.
    """
    from sklearn.model_selection import train_test_split

    try:
        rest, cut = train_test_split(range(len(labels)), test_size=share, random_state=seed, stratify=labels)
    except ValueError as fault:
        raise UserError(
            f"{split}_share={share} of {len(labels)} training images is no cut with an image of each of "
            f"{len({*labels})} classes on both sides (give another {split}_share, or images of {split})"
        ) from fault
    return sorted(rest), sorted(cut)


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


def cut_problems(*, val_share: float, test_share: float | None = None) -> list[str]:
    """Returns what is wrong with the fractions that are cut from training; None where the test is never cut."""
    shares = {"val_share": val_share, "test_share": test_share}
    return [
        f"{key}={share} must be above 0 and below 1"
        for key, share in shares.items()
        if share is not None and not 0.0 < share < 1.0
    ]
