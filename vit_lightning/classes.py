"""Classes go by name: which label of one source stands for each class of another."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vit_lightning.errors import UserError

SHOWN = 12
"""Number of names of a list that an error shows."""


class Match(NamedTuple):
    """Labels of a model for the classes of data, in the order of the data's labels, and what is taken on trust."""

    labels: list[int]
    note: str = ""


def are_named(names: Sequence[str] | None) -> bool:
    """Whether classes have names, and not only their numbers."""
    numbers = [str(number) for number in range(len(names or ()))]
    return bool(names) and list(names or ()) != numbers and not all(re.fullmatch(r"LABEL_\d+", n) for n in names or ())


def _are_numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\d+", name) for name in names)


def one_form(name: Any) -> Any:
    """Returns a name in the form in which equal names are equal (NFC): macOS writes an accent as a character."""
    return unicodedata.normalize("NFC", name) if isinstance(name, str) else name


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names of classes sorted; by value where all are whole numbers, so that 2 comes before 10."""
    found = list(names)
    return sorted(found, key=lambda name: (int(name), name)) if _are_numbers(found) else sorted(found)


def match_classes(model: Sequence[str] | None, data: Sequence[str], *, whose: str, ours: str, classes: int) -> Match:
    """Returns for each class of the data the model's label of the same name.

    Data may lack classes of the model. Of a model without names, classes that are numbers are those outputs; other
    classes without names are equated by their order where there are equally many.

    Args:
        model: names of the model's classes, in the order of its outputs; None if they are not known.
        data: names of the data's classes, in the order of its labels.
        whose: the model in an error, such as ``the model of ckpt=...``.
        ours: the data in an error, such as ``data.root=...``.
        classes: number of the model's outputs.

    Raises:
        UserError: the data has classes that the model lacks, or names cannot tell which is which; names both lists.
    """
    model, data = model and [*map(one_form, model)], [*map(one_form, data)]
    if model is not None and (model == data or _same_by_first_name(model, data)):
        return Match(list(range(len(data))))
    both = (
        f"{ours} has the classes {listed(data)}; {whose} has {listed(model) if model else f'{classes} without names'}"
    )
    unknown = model is None or not (are_named(model) and are_named(data)) or _of_imagenet(model, data)
    numbers = [int(name) for name in data] if not are_named(model) and _are_numbers(data) else []
    if not numbers or len({*numbers}) < len(numbers) or max(numbers) >= classes:
        numbers = list(range(len(data))) if len(data) == classes else []
    if unknown and numbers:
        return Match(numbers, f"{both}: they are equated by their numbers, whose order nothing tells")
    if model is None or are_named(model) != are_named(data):
        raise UserError(f"{both}: numbers cannot tell which is which")
    places = {name: label for label, name in enumerate(model)}
    if missing := [name for name in data if name not in places]:
        raise UserError(f"{both}: the model has no {listed(missing)}")
    if twice := [name for name in data if list(model).count(name) > 1 or list(data).count(name) > 1]:
        raise UserError(f"{both}: {listed(twice)} names more than one class")
    return Match([places[name] for name in data])


def _of_imagenet(model: Sequence[str], data: Sequence[str]) -> bool:
    """Whether one of two lists has ImageNet's folders, such as n01440764, and the other words: in the same order."""
    folders = [all(re.fullmatch(r"n\d{8}", name) for name in names) for names in (model, data)]
    return len(model) == len(data) == 1000 and folders[0] != folders[1]


def differences(first: str, names: Sequence[str], second: str, others: Sequence[str], why: str) -> list[str]:
    """Returns what is wrong with two sources whose classes must have the same names in the same order."""
    both = f"{first} has the classes {listed(names)}, {second} has {listed(others)}"
    return [] if list(names) == list(others) else [f"{both}: {why}"]


def _same_by_first_name(model: Sequence[str], data: Sequence[str]) -> bool:
    """Whether two lists name ImageNet's classes in the same order, one with synonyms, such as "tench, Tinca tinca"."""
    firsts = [[name.partition(",")[0] for name in names] for names in (model, data)]
    alike = sum(one == two for one, two in zip(*firsts, strict=False))
    return len(model) == len(data) == 1000 and alike >= 990  # two of torchvision's names tell cranes and suits apart


def listed(names: Sequence[str]) -> str:
    """Returns names for an error, not all of many."""
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
