"""Checks of arguments, before anything is built: each returns the problems that it finds, named by the option."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.sizes import Size

T = TypeVar("T")


def choice(name: str, value: object, choices: Collection[str]) -> list[str]:
    """Returns a problem for text that is none of the choices; any other value is a block of the user's own."""
    known = not isinstance(value, str) or value in choices
    return [] if known else [f"{name}={value} must be one of {', '.join(choices)}"]


def chosen(value: str | T, choices: Mapping[str, T]) -> T:
    """Returns the block that a name stands for; for an unknown name, which ``choice`` reports, the first."""
    return choices.get(value, next(iter(choices.values()))) if isinstance(value, str) else value


def patches(image_size: Size, patch_size: Size) -> list[str]:
    """Returns a problem for patches that do not tile the image."""
    image, patch = (str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}" for size in (image_size, patch_size))
    if min(*image_size, *patch_size) < 1:
        return [f"image_size={image} and patch_size={patch} must be at least 1"]
    if patch_size[0] > image_size[0] or patch_size[1] > image_size[1]:
        return [f"patch_size={patch} is larger than image_size={image}"]
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1]:
        choices = [n for n in range(1, min(image_size) + 1) if image_size[0] % n == 0 and image_size[1] % n == 0]
        squares = ", ".join(map(str, choices))
        return [f"patch_size={patch} does not divide image_size={image} (squares that do: {squares})"]
    return []


def needs(setting: str, given: bool, needed: Mapping[str, bool]) -> list[str]:
    """Returns a problem for each need of a setting that is not met, if the setting is given."""
    return [f"{setting} needs {need}" for need, met in needed.items() if given and not met]


@contextlib.contextmanager
def all_at_once(problems: Sequence[str], parts: Mapping[str, tuple[Any, ...]]) -> Iterator[None]:
    """Raises the problems of a network's arguments and, where something is wrong within, what its parts report too.

    Args:
        problems: the problems that have been found.
        parts: what makes each part, with its sizes, by name of the option; the last may depend on all others.
    """
    try:
        refuse(problems)
        yield
    except UserError:
        *others, last = [(name, *part) for name, part in parts.items()]
        refuse(problems, *(_refused(*part) for part in others))
        refuse(_refused(*last))
        raise


def _refused(name: str, make: Callable[..., object], *sizes: object) -> list[str]:
    """Returns what a part reports against its arguments; sizes below 1 have been reported by themselves."""
    if any(isinstance(size, int) and size < 1 for size in sizes):
        return []
    try:
        with torch.device("meta"):  # which takes no memory
            make(*sizes)
    except UserError as error:
        of_the_network = ("num_heads", "emb_size", "pool")
        return [text if text.startswith(of_the_network) else f"{name}.{text}" for text in error.problems]
    return []
