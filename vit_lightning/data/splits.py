"""Splits of a dataset: which images train, choose and measure; what is missing is cut from training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vit_lightning.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def stratified_cut(
    labels: Sequence[int], share: int | float, seed: int, *, split: Split
) -> tuple[list[int], list[int]]:
    """Indices (rest, cut), both in order; the cut holds ``share`` of the images, as a number or as a share.

    Raises:
        UserError: there is no such cut with an image of each class on both sides; names the share of ``split``.
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


def cut_problems(*, val_share: float, test_share: float | None = None) -> list[str]:
    """What is wrong with the shares that are cut from training; None where the test is never cut."""
    shares = {"val_share": val_share, "test_share": test_share}
    return [
        f"{key}={share} must be above 0 and below 1"
        for key, share in shares.items()
        if share is not None and not 0.0 < share < 1.0
    ]
