"""What a test says besides its accuracy: interval, accuracy by class, calibration, the worst errors."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from vit_lightning.data.base import ImageData
from vit_lightning.data.sampling import Request
from vit_lightning.figures import confusion, image_grid, reliability
from vit_lightning.storage.folder import write_whole

Array = np.ndarray[Any, Any]
Table = dict[str, Array]
"""A row for each test image, as ``TestPredictions`` gathers them: index, label, prediction, confidence, loss."""

FIGURES = ("confusion", "test_images", "calibration", "worst_errors")
SHOWN_CLASSES = 20
"""Classes up to which their accuracies are printed, besides being written."""
WORST = 20
BINS = 15
"""Bins of the calibration error and of its figure."""


def wilson(correct: int, images: int, z: float = 1.959964) -> tuple[float, float]:
    """Limits of an accuracy (Wilson 1927), 95 % by default: of what other images of the same kind would give.

    It says nothing of what another seed would have trained.
    """
    share = correct / images
    centre = share + z**2 / (2 * images)
    half = z * math.sqrt(share * (1 - share) / images + z**2 / (4 * images**2))
    scale = 1 + z**2 / images
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def interval(table: Table) -> dict[str, float]:
    """The limits of the test accuracy, under the names that ``results.json`` has for them."""
    if not table or not len(table["label"]):
        return {}
    low, high = wilson(int((table["prediction"] == table["label"]).sum()), len(table["label"]))
    return {"test/acc_low": low, "test/acc_high": high}


def class_rows(table: Table, names: Sequence[str]) -> list[tuple[str, int, int, float, float, float]]:
    """Name, images, correct ones, accuracy and its limits of each class; nan where the test has no image of it."""
    rows = []
    for label, name in enumerate(names):
        mine = table["label"] == label
        images, correct = int(mine.sum()), int((table["prediction"][mine] == label).sum())
        low, high = wilson(correct, images) if images else (math.nan, math.nan)
        rows.append((name, images, correct, correct / images if images else math.nan, low, high))
    return rows


def calibration_bins(confidence: Array, correct: Array) -> tuple[Array, Array, Array]:
    """Images, mean confidence and accuracy in each of ``BINS`` equal parts of 0 to 1; nan where there is no image.

    A confidence on an edge counts above it, as in torchmetrics.
    """
    edges = np.linspace(0, 1, BINS + 1, dtype=np.float32)
    bins = np.minimum(np.searchsorted(edges, confidence.astype(np.float32), side="right") - 1, BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    sums = [np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, correct)]
    with np.errstate(invalid="ignore"):
        return counts, sums[0] / counts, sums[1] / counts


def calibration_error(confidence: Array, correct: Array) -> float:
    """Expected calibration error (Guo et al. 2017): mean gap between confidence and accuracy, by images in a bin."""
    counts, confidences, accuracies = calibration_bins(confidence, correct)
    return float(np.nansum(counts * np.abs(confidences - accuracies)) / counts.sum())


def report_test(folder: Path, table: Table, data: ImageData, matrix: Tensor) -> str:
    """Writes tables and figures of a test into a folder; returns what of it fits the screen.

    Args:
        folder: gets ``classes.csv``, ``errors.csv`` and the figures of ``FIGURES``.
        table: a row for each test image.
        data: has the images.
        matrix: (true, predicted), counts.
    """
    names = data.class_names
    correct = table["prediction"] == table["label"]
    worst = np.flatnonzero(~correct)
    worst = worst[np.argsort(-table["loss"][worst], kind="stable")][:WORST]
    drawn = {
        "confusion": confusion(matrix.cpu().numpy(), names),
        "test_images": _sheet(data, table, np.arange(min(32, len(correct)))),
        "calibration": reliability(
            *calibration_bins(table["confidence"], correct), calibration_error(table["confidence"], correct)
        ),
    }
    if len(worst):
        drawn["worst_errors"] = _worst_sheet(data, table, worst)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=100)
    rows = class_rows(table, names)
    write_rows(folder / "classes.csv", ("class", "images", "correct", "accuracy", "low", "high"), rows)
    _write_errors(folder / "errors.csv", data, table, worst)
    return _class_lines(rows) if len(names) <= SHOWN_CLASSES else ""


def write_rows(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A CSV file; numbers with a fraction get six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([f"{item:.6f}" if isinstance(item, float) else item for item in row] for row in rows)
    write_whole(path, text.getvalue())


def _class_lines(rows: Sequence[tuple[str, int, int, float, float, float]]) -> str:
    width = max(5, *(len(row[0]) for row in rows))
    lines = [f"{'class':<{width}}  images  accuracy  95 % interval"]
    for name, images, _, accuracy, low, high in rows:
        numbers = f"{100 * accuracy:6.2f} %  {100 * low:5.1f} to {100 * high:5.1f}" if images else "     -"
        lines.append(f"{name:<{width}}  {images:6}  {numbers}")
    return "\n".join(lines)


def _write_errors(path: Path, data: ImageData, table: Table, worst: Array) -> None:
    dataset: Any = data.dataset("test")
    rows = []
    for row in worst:
        index, label, prediction = (int(table[name][row]) for name in ("index", "label", "prediction"))
        image = dataset.name(index) if hasattr(dataset, "name") else str(index)
        numbers = float(table["confidence"][row]), float(table["loss"][row])
        rows.append((index, image, data.class_names[label], data.class_names[prediction], *numbers))
    write_rows(path, ("index", "image", "label", "prediction", "confidence", "loss"), rows)


def _sheet(data: ImageData, table: Table, rows: Array) -> Figure:
    """Some test images with their predictions, and the true class behind those that are wrong."""
    names, predictions, labels = data.class_names, table["prediction"][rows], table["label"][rows]
    titles = [names[p] if p == t else f"{names[p]} ({names[t]})" for p, t in zip(predictions, labels, strict=True)]
    return image_grid(_images(data, table["index"][rows]), titles, (predictions != labels).tolist())


def _worst_sheet(data: ImageData, table: Table, rows: Array) -> Figure:
    """The errors of highest loss, worst first: what was said and how surely, what is true, the loss."""
    names = data.class_names
    columns = (table[name][rows] for name in ("prediction", "confidence", "label", "loss"))
    titles = [
        f"{names[said]} ({100 * sure:.0f} %)\ntrue {names[true]}, loss {loss:.1f}"
        for said, sure, true, loss in zip(*columns, strict=True)
    ]
    return image_grid(_images(data, table["index"][rows]), titles, [True] * len(titles), columns=5)


def _images(data: ImageData, indices: Array) -> Array:
    dataset: Any = data.dataset("test")
    images: Array = dataset.__getitems__(Request(indices.tolist(), None)).images.numpy()
    return images
