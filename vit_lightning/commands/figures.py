"""Figures of a run, a test and a search, as matplotlib figures without a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vit_lightning.metric_facts import METRICS

Rows = Sequence[dict[str, Any]]


def curves(rows: Rows, title: str) -> Figure:
    """Draws loss and accuracy over the steps of a run.

    Args:
        rows: rows of ``metrics.jsonl``, from ``read_metrics``.
        title: title of the figure; the test accuracy is added if there is one.
    """
    figure = Figure(figsize=(9, 3.6))  # fixed margins: a layout engine takes longer than the drawing
    loss, accuracy = figure.subplots(
        1, 2, gridspec_kw={"left": 0.07, "right": 0.99, "bottom": 0.13, "top": 0.9, "wspace": 0.18}
    )
    steps, values = _series(rows, "train/loss_step")
    loss.plot(steps, values, color="0.75", linewidth=0.8, label="training, batch")
    for axis, metric in ((loss, "loss"), (accuracy, "acc")):
        for stage, name, colour in (("train", "training", "C0"), ("val", "validation", "C1")):
            steps, values = _series(rows, f"{stage}/{metric}")
            axis.plot(steps, values, color=colour, marker="o" if len(steps) < 3 else None, label=name)
        axis.set(xlabel="step", ylabel=METRICS[metric].label)
        axis.grid(alpha=0.3)
    names = ("train/loss_step", "train/loss", "val/loss")
    loss.set(ylim=_without_outliers([value for name in names for value in _series(rows, name)[1]]))
    loss.legend(frameon=False)
    accuracy.legend(frameon=False, loc="lower right")
    steps, tested = _series(rows, "test/acc")
    figure.suptitle(f"{title}: test accuracy {100 * tested[-1]:.2f} %" if len(tested) else title)
    return figure


def image_grid(
    images: np.ndarray[Any, Any], titles: Sequence[str], wrong: Sequence[bool], *, columns: int = 8
) -> Figure:
    """Draws images (n, c, H, W), uint8, under titles of one or two lines; the titles of ``wrong`` ones are red."""
    rows = -(-len(images) // columns)
    _, channels, height, width = images.shape
    gap = max(2, height // 4)
    # one picture of all images is drawn many times faster than one axis per image
    sheet = np.full((rows * (height + gap), columns * (width + 1), channels), 255, dtype=np.uint8)
    inches = 1.2 if columns > 5 else 1.8
    figure = Figure(figsize=(columns * inches, rows * inches * (height + gap) / (width + 1)))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.axis("off")
    for number, (image, title, bad) in enumerate(zip(images, titles, wrong, strict=True)):
        row, column = divmod(number, columns)
        top, left = row * (height + gap) + gap, column * (width + 1)
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
        colour = "C3" if bad else "black"
        position = (left + width / 2 - 0.5, top - 0.7)
        text = "\n".join(_short(line, round(19 * inches)) for line in title.split("\n"))
        axis.text(*position, text, ha="center", va="bottom", fontsize=7, color=colour, parse_math=False)
    axis.imshow(sheet.squeeze(), cmap="gray" if channels == 1 else None, vmin=0, vmax=255, aspect="auto")
    return figure


def reliability(
    counts: np.ndarray[Any, Any], confidences: np.ndarray[Any, Any], accuracies: np.ndarray[Any, Any], error: float
) -> Figure:
    """Draws a reliability diagram (Niculescu-Mizil and Caruana 2005) over equal bins of confidence.

    Args:
        counts: (bins,), number of images.
        confidences: (bins,), mean confidence; nan in an empty bin.
        accuracies: (bins,), fraction of correct predictions; nan in an empty bin.
        error: expected calibration error, for the title.
    """
    figure = Figure(figsize=(4.4, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1 / len(counts)
    centres = (np.arange(len(counts)) + 0.5) * width
    filled = counts > 0
    above.bar(centres[filled], accuracies[filled], width=0.94 * width, color="C0", alpha=0.6, label="accuracy")
    above.plot(confidences[filled], accuracies[filled], "o", color="C1", markersize=4, label="at the mean confidence")
    above.plot([0, 1], [0, 1], "--", color="0.4", linewidth=1, label="calibrated")
    above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02), title=f"expected calibration error {100 * error:.2f} %")
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=8, columnspacing=1.0)
    below.bar(centres, counts, width=0.94 * width, color="0.6")
    below.set(xlabel="confidence of the prediction", ylabel="images")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    return figure


def rate_search(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float | None, lr: float
) -> Figure:
    """Draws the losses of ``lr-find`` over the learning rate, with the suggestion and the ``lr`` of the config."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(rates, losses, color="0.75", linewidth=0.8, label="loss of a step")
    axis.plot(rates, smoothed, color="C0", label="smoothed")
    if suggestion is not None:
        loss = float(np.interp(suggestion, rates, smoothed))
        axis.plot([suggestion], [loss], "o", color="C3", label=f"steepest descent: {suggestion:.2g}")
    axis.axvline(lr, color="C2", linestyle="--", linewidth=1, label=f"config: {lr:g}")
    axis.set(
        xscale="log", xlabel="learning rate (optimizer.lr)", ylabel="training loss", ylim=_without_outliers(losses)
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}\u2026"


def confusion(matrix: np.ndarray[Any, Any], names: Sequence[str]) -> Figure:
    """Draws a confusion matrix of counts (true, predicted)."""
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
    """Returns axis limits that leave out the highest 1 % of the values, such as huge losses of the first steps."""
    finite = np.asarray(values)[np.isfinite(values)]
    if len(finite) < 20:
        return None
    low, high = np.quantile(finite, [0.0, 0.99])
    return float(low) - 0.05 * float(high - low), float(high) + 0.05 * float(high - low)
