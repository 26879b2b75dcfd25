"""Images that cannot be decoded and that ``on_bad_image: skip`` leaves out: their list, and how many there may be."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from vit_lightning.errors import UserError

OnBadImage = Literal["error", "skip"]
BAD_IMAGES = "bad_images.txt"
"""File of a run folder that lists the images that were left out, one a line."""


class DamagedImage(UserError):
    """Image that cannot be decoded."""


def all_damaged(problems: Sequence[str]) -> UserError:
    """Returns the error of a batch of which no image can be decoded."""
    return UserError([*problems, f"all {len(problems)} images of a batch are damaged"])


def list_bad_images(folder: Path, problems: Sequence[str]) -> None:
    """Appends to the list in a run folder what it does not hold yet, from before a resume or from other ranks."""
    path = folder / BAD_IMAGES
    with path.open("a+", encoding="utf-8", errors="surrogateescape") as file:  # file names may be no UTF-8
        file.seek(0)
        known = set(file)
        lines = [f"{' '.join(problem.split())}\n" for problem in problems]
        file.write("".join(line for line in lines if line not in known))


def refuse_too_many(bad: Collection[str], *, total: int, split: str, max_share: float) -> None:
    """Raises a UserError if more than ``max_share`` of the images of a split are damaged."""
    if len(bad) > max_share * total:
        count = f"{len(bad)} of {total} {split} images are damaged, first:"
        raise UserError([f"data.max_bad_share={max_share}: {count}", *sorted(bad)[:5]])
