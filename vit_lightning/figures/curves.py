"""Figures of a run, as matplotlib figures without a window."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vit_lightning.config.experiment import Experiment
from vit_lightning.figures.style import COLOURS
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.metrics import read_metrics

Look = dict[str, Any]
TRAIN: Look = {"color": COLOURS[0], "linestyle": "-"}
VAL: Look = {"color": COLOURS[1], "linestyle": "--"}
BATCH: Look = {"color": "0.8", "linewidth": 0.8}
LR: Look = {"color": COLOURS[2]}
"""How the lines of a figure look."""

Rows = Sequence[dict[str, Any]]

as_written = rc_context({"text.parse_math": False})
"""Decorator of what draws names: these may hold dollars."""


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG, sharp on a screen of high resolution too."""
    write_whole(path, file_of(figure))


def file_of(figure: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def draw_curves(experiment: Experiment, folder: Path, best_step: int) -> None:
    """Draws ``curves.png`` of a finished run."""
    ema = experiment.settings.ema
    drawn = curves(
        read_metrics(folder),
        folder.name,
        mixed=bool(experiment.data.mixing),
        averaged=ema is not None and ema.decay is not None,
        best_step=best_step,
    )
    save(drawn, folder / "curves.png")


@as_written
def curves(
    rows: Rows, title: str, *, mixed: bool = False, averaged: bool = False, best_step: int | None = None
) -> Figure:
    """Draws loss, accuracy and learning rate over the steps of a run, and marks its best checkpoint.

    Args:
        rows: rows of ``metrics.jsonl``, from ``read_metrics``.
        title: title of the figure; the test accuracy is added if there is one.
        mixed: whether training images are mixed, so that their accuracy is that of the larger part.
        averaged: whether validation is of averaged weights.
        best_step: optimizer steps before the best checkpoint.
    """
    batches = [("train/loss_step", BATCH)] if _series(rows, "train/loss_step")[0] else []  # none in a short run
    training = [*batches, ("train/loss", TRAIN)]
    panels = {
        "training loss": training,
        "validation loss": [("val/loss", VAL)],  # another one, with mixing or smoothing
        "accuracy": [("train/acc", TRAIN), ("val/acc", VAL)],
        "learning rate": [("lr", LR)],
    }
    # a module of the user's may log other names
    panels = {label: drawn for label, drawn in panels.items() if any(_series(rows, name)[0] for name, _ in drawn)}
    panels = panels or {"training loss": training}
    figure = Figure(figsize=(3.9 * len(panels), 3.8))  # fixed margins: a layout engine takes longer than the drawing
    width = figure.get_figwidth()
    margins = {"left": 0.75 / width, "right": 1 - 0.15 / width, "bottom": 0.21, "top": 0.84, "wspace": 0.28}
    axes = figure.subplots(1, len(panels), sharex=True, gridspec_kw=margins, squeeze=False)[0]
    for axis, (label, drawn) in zip(axes, panels.items(), strict=True):
        for name, look in drawn:
            steps, values = _series(rows, name)
            axis.plot(steps, values, marker="o" if len(steps) < 3 else None, **look)
            if name.startswith("val/") and best_step in steps:
                best = values[steps.index(best_step)]
                axis.plot([best_step], [best], "o", color=look["color"], markersize=5)
                shown = f"{100 * best:.2f} %" if label == "accuracy" else f"{best:.4f}"
                axis.set_title(f"validation at the best checkpoint: {shown}", fontsize=8)
        if best_step is not None:
            axis.axvline(best_step, color="0.4", linestyle=":", linewidth=1)
        if label == "accuracy":
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            axis.ticklabel_format(axis="y", scilimits=(-2, 3))
        axis.set(xlabel="step", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.grid(alpha=0.3)
    key = {"training" + ", mixed images" * mixed: TRAIN, "validation" + ", averaged weights" * averaged: VAL}
    key = {"training, of a batch": BATCH} | key if batches else key
    if best_step is not None:
        key[f"best checkpoint (step {best_step:,})"] = {"color": "0.4", "linestyle": ":"}
    figure.legend(
        [Line2D([], [], **look) for look in key.values()],
        key,
        frameon=False,
        loc="lower center",
        ncols=len(key),
        fontsize=9,
    )
    steps, tested = _series(rows, "test/acc")
    title = f"{title}: test accuracy {100 * tested[-1]:.2f} %" if len(tested) else title
    figure.suptitle(title)
    return figure


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Returns steps done, as the best checkpoint counts them, and values of a metric."""
    pairs = [(row["step"] + 1, float(row[name])) for row in rows if name in row and row.get("step") is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
