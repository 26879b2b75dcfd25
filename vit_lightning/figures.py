"""Figures of a run, as matplotlib figures without a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]


def curves(rows: Rows, title: str) -> Figure:
    """Loss and accuracy over the steps of a run, from the rows of ``metrics.jsonl``.

    Args:
        rows: as ``read_metrics`` gives them.
        title: what the figure is of; the test result is added if there is one.
    """
    figure = Figure(figsize=(9, 3.6))  # with fixed margins: to find them takes longer than to draw
    loss, accuracy = figure.subplots(
        1, 2, gridspec_kw={"left": 0.07, "right": 0.99, "bottom": 0.13, "top": 0.9, "wspace": 0.18}
    )
    steps, values = _series(rows, "train/loss_step")
    loss.plot(steps, values, color="0.75", linewidth=0.8, label="training, batch")
    for axis, metric in ((loss, "loss"), (accuracy, "acc")):
        for stage, name, colour in (("train", "training", "C0"), ("val", "validation", "C1")):
            steps, values = _series(rows, f"{stage}/{metric}")
            axis.plot(steps, values, color=colour, marker="o" if len(steps) < 3 else None, label=name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    names = ("train/loss_step", "train/loss", "val/loss")
    loss.set(ylabel="loss", ylim=_without_outliers([value for name in names for value in _series(rows, name)[1]]))
    loss.legend(frameon=False)
    accuracy.set(ylabel="accuracy")
    accuracy.legend(frameon=False, loc="lower right")
    steps, tested = _series(rows, "test/acc")
    figure.suptitle(f"{title}: test accuracy {100 * tested[-1]:.2f} %" if len(tested) else title)
    return figure


def image_grid(images: np.ndarray[Any, Any], titles: Sequence[str], wrong: Sequence[bool]) -> Figure:
    """Images (n, c, H, W), uint8, each under its title, red where it is wrong."""
    columns = 8
    rows = -(-len(images) // columns)
    _, channels, height, width = images.shape
    gap = max(2, height // 4)
    # one picture of all is drawn many times faster than one axis for each
    sheet = np.full((rows * (height + gap), columns * (width + 1), channels), 255, dtype=np.uint8)
    figure = Figure(figsize=(columns * 1.2, rows * 1.2 * (height + gap) / (width + 1)))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.axis("off")
    for number, (image, title, bad) in enumerate(zip(images, titles, wrong, strict=True)):
        row, column = divmod(number, columns)
        top, left = row * (height + gap) + gap, column * (width + 1)
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
        colour = "C3" if bad else "black"
        axis.text(left + width / 2 - 0.5, top - 0.7, title, ha="center", va="bottom", fontsize=7, color=colour)
    axis.imshow(sheet.squeeze(), cmap="gray" if channels == 1 else None, vmin=0, vmax=255, aspect="auto")
    return figure


def confusion(matrix: np.ndarray[Any, Any], names: Sequence[str]) -> Figure:
    """Confusion matrix: rows are the true classes, columns the predicted ones."""
    size = min(12.0, 2.5 + 0.4 * len(names))
    figure = Figure(figsize=(size, size), layout="constrained")
    axis = figure.subplots()
    axis.imshow(matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True)), cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true")
    if len(names) <= 20:
        axis.set_xticks(range(len(names)), names, rotation=90)
        axis.set_yticks(range(len(names)), names)
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                dark = count > 0.5 * matrix[row].sum()
                axis.text(column, row, str(count), ha="center", va="center", fontsize=7, color="w" if dark else "k")
    return figure


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], float(row[name])) for row in rows if name in row and row.get("step") is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _without_outliers(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits that a few huge losses at the start do not blow up."""
    finite = np.asarray(values)[np.isfinite(values)]
    if len(finite) < 20:
        return None
    low, high = np.quantile(finite, [0.0, 0.99])
    return float(low) - 0.05 * float(high - low), float(high) + 0.05 * float(high - low)
