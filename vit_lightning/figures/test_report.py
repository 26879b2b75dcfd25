"""The report of a test beside its accuracy: confidence intervals, accuracy by class, worst errors."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image
from scipy.stats import binomtest

from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Request
from vit_lightning.errors import counted
from vit_lightning.figures.pictures import LARGE, balanced, confusion_picture, numbers, predictions_sheet, write_png
from vit_lightning.storage.folder import to_csv, write_whole

Array = np.ndarray[Any, Any]
Table = dict[str, Array]
"""Columns of one row per test image, from ``TestPredictions``: index, label, prediction, confidence, loss."""

FIGURES = ("confusion", "test_images", "worst_errors")
SHOWN = ("label", "prediction", "confidence")
"""Columns below an image."""
SHOWN_CLASSES = 20
"""Largest number of classes whose accuracies are printed; they are written in any case."""
SAMPLE = 40
"""Number of images in ``test_images.png``."""
WORST = 20
"""Number of errors in ``errors.csv`` and ``worst_errors.png``."""


def wilson(correct: int, images: int) -> tuple[float, float]:
    """Returns the limits of the 95 % interval of an accuracy (Wilson 1927).

    It covers the choice of the test images, not the seed of the training.
    """
    limits = binomtest(correct, images).proportion_ci(method="wilson")
    return float(limits.low), float(limits.high)


def interval(table: Table) -> dict[str, float]:
    """Returns the limits of the test accuracy under their names in ``results.json``."""
    if not table or not len(table["label"]):
        return {}
    low, high = wilson(int((table["prediction"] == table["label"]).sum()), len(table["label"]))
    return {"test/acc_low": low, "test/acc_high": high}


def other_accuracy(table: Table, logged: Mapping[str, Any]) -> str:
    """Says which accuracy that was logged is not that of the predictions, such as a mean over classes; else nothing."""
    if not table or table["label"].min(initial=0) < 0:  # a loss ignores those
        return ""
    right, images = int((table["prediction"] == table["label"]).sum()), len(table["label"])
    values = {name: float(logged[name]) for name in logged if re.fullmatch("test[/_]acc(uracy)?(_epoch)?", name)}
    text = f"is not that of the logits that test_step returns, by which {right:,} of {images:,} images are right"
    wrong = [f"{name}={value:.6g}" for name, value in values.items() if not abs(images * value - right) <= 0.51]
    return f"{', '.join(wrong)} {text}" if wrong else ""


def class_rows(table: Table, names: Sequence[str]) -> list[tuple[str, int, int, float, float, float]]:
    """Returns name, images, correct images, accuracy and its limits of each class; nan for a class without images."""
    rows = []
    for label, name in enumerate(names):
        of_class = table["label"] == label
        images, correct = int(of_class.sum()), int((table["prediction"][of_class] == label).sum())
        low, high = wilson(correct, images) if images else (math.nan, math.nan)
        rows.append((name, images, correct, correct / images if images else math.nan, low, high))
    return rows


def report_test(folder: Path, table: Table, data: ImageData) -> str:
    """Writes tables and figures of a test to a folder; returns the lines to print.

    Args:
        folder: for ``classes.csv``, ``errors.csv`` and the figures of ``FIGURES``.
        table: see ``Table``.
        data: the data module of the test images.
    """
    names = data.label_names
    correct = table["prediction"] == table["label"]
    worst = np.flatnonzero(~correct)
    worst = worst[np.argsort(-table["loss"][worst], kind="stable")][:WORST]
    confusion = numbers(table["label"], table["prediction"], names)["confusion"]
    title = f"{correct.sum():,} of {len(correct):,} test images are right"
    drawn = {"confusion": confusion_picture(confusion, names, title)}
    if data.own_loaders:
        sample = sorted(balanced(table["label"], SAMPLE), key=lambda row: bool(correct[row]))  # errors first
        title = f"{len(sample)} of {len(correct):,} test images, as many of each class, errors first"
        drawn["test_images"] = _sheet(data, table, sample, title, *SHOWN)
    if data.own_loaders and len(worst):
        title = f"{len(worst)} of {counted(int((~correct).sum()), 'error')}, the highest loss first"
        drawn["worst_errors"] = _sheet(data, table, worst, title, *SHOWN, "loss")
    for name, picture in drawn.items():
        write_png(folder / f"{name}.png", picture)
    rows = class_rows(table, names)
    write_rows(folder / "classes.csv", ("class", "images", "correct", "accuracy", "low", "high"), rows)
    _write_errors(folder / "errors.csv", data, table, worst)
    return _class_lines(rows) if len(names) <= SHOWN_CLASSES else ""


def write_rows(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes a CSV file; floats get six decimals."""
    shown = ([f"{item:.6f}" if isinstance(item, float) else item for item in row] for row in rows)
    write_whole(path, to_csv(head, shown))


def _class_lines(rows: Sequence[tuple[str, int, int, float, float, float]]) -> str:
    width = max(5, *(len(row[0]) for row in rows))
    lines = [f"{'class':<{width}}  images  accuracy  95 % interval"]
    for name, images, _, accuracy, low, high in rows:
        numbers = f"{100 * accuracy:6.2f} %  {100 * low:5.1f} to {100 * high:5.1f}" if images else "     -"
        lines.append(f"{name:<{width}}  {images:6}  {numbers}")
    return "\n".join(lines)


def _write_errors(path: Path, data: ImageData, table: Table, worst: Array) -> None:
    dataset: Any = data.dataset("test") if data.own_loaders else None
    rows = []
    for row in worst:
        index, label, prediction = (int(table[name][row]) for name in ("index", "label", "prediction"))
        image = dataset.name(index) if hasattr(dataset, "name") else str(index)
        numbers = float(table["confidence"][row]), float(table["loss"][row])
        rows.append((index, image, data.label_names[label], data.label_names[prediction], *numbers))
    write_rows(path, ("index", "image", "label", "prediction", "confidence", "loss"), rows)


def _sheet(data: ImageData, table: Table, rows: Sequence[int] | Array, title: str, *columns: str) -> Image:
    """Draws test images with columns of the table: label, prediction, confidence and perhaps loss."""
    dataset: Any = data.dataset("test")
    images = dataset.__getitems__(Request(table["index"][rows].tolist(), None)).images.cpu().numpy()
    shown = list(zip(*(table[name][rows].tolist() for name in columns), strict=True))
    return predictions_sheet(images, data.label_names, shown, title, cell=LARGE)
