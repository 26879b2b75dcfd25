"""Picture of what a run logs to W&B, drawn from the records of an offline run, and so no screenshot of W&B.

lightning fit --config digits --trainer.max_epochs=60 --wandb.mode=offline --wandb.log_model=true
python experiments/pictures/wandb_records.py runs/digits/RUN experiments/pictures/wandb.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vit_lightning.figures.style import COLOURS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from wandb_stub import read_wandb_file

LOOKS = {"train": (COLOURS[0], "-"), "val": (COLOURS[1], "--"), "optim": (COLOURS[2], "-")}


def lines(axis: Axes, rows: list[dict[str, Any]], *names: str) -> None:
    """Draws values of splits over steps, each in its colour and dash."""
    for name in names:
        colour, dash = LOOKS[name.split("/")[0]]
        points = [(row["trainer/global_step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=name)
    axis.set_xlabel("step")
    axis.legend(frameon=False)


def confusion(axis: Axes, counts: list[list[Any]]) -> None:
    """Draws the counts of an interactive confusion matrix."""
    names = sorted({row[0] for row in counts} | {row[1] for row in counts})
    cells = np.zeros((len(names), len(names)))
    for label, predicted, count in counts:
        cells[names.index(label), names.index(predicted)] = count
    axis.imshow(cells, cmap="Blues")
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(names)), names)
    axis.set_title("validation/confusion\n(interactive in W&B)")


def predictions(axis: Axes, table: dict[str, Any], staged: dict[str, str], most: int = 4) -> None:
    """Draws rows of a table, those of the last epoch, errors first."""
    last = [row for row in table["data"] if row[0] == table["data"][-1][0]]
    rows = sorted(last, key=lambda row: (row[5], row[6]))[:most]
    epoch, _, *names = table["columns"]  # the second is the number of the image
    shown = [[str(row[0]), "", *map(str, row[3:6]), f"{row[6]:.2f}"] for row in rows]
    axis.axis("off")
    drawn = axis.table(shown, colLabels=[epoch, *names], loc="center", cellLoc="center", bbox=(0, 0, 1, 1))
    drawn.auto_set_font_size(False)
    for number, row in enumerate(rows):
        inner = axis.inset_axes((1.05 / 6, 1 - (number + 1.95) / (most + 1), 0.9 / 6, 0.9 / (most + 1)))
        inner.imshow(np.asarray(Image.open(staged[row[2]["path"]]).convert("RGB")))
        inner.axis("off")
    axis.set_title(f"validation/predictions: {most} of {len(table['data'])} rows")


def draw(run: Path) -> Figure:
    """Draws what the last offline record of a run holds, to be read at 420 pixels too."""
    (file,) = sorted((run / "wandb").glob("offline-run-*/*.wandb"))[-1:]
    told = read_wandb_file(file)
    rows, kept = told["rows"], told["artifacts"].values()
    staged = {path: local for found in kept for one in found for path, local in one["files"].items()}
    counts = [row["validation/confusion_table"]["path"] for row in rows if "validation/confusion_table" in row][-1]
    figure = Figure(figsize=(6, 8.8), layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=[1, 1.1, 1.1, 0.45])
    lines(figure.add_subplot(grid[0, 0]), rows, "train/loss", "val/loss")
    lines(figure.add_subplot(grid[0, 1]), rows, "train/acc", "val/acc")
    lines(figure.add_subplot(grid[1, 0]), rows, "optim/grad_norm")
    confusion(figure.add_subplot(grid[1, 1]), json.loads((file.parent / "files" / counts).read_text())["data"])
    table = json.loads(Path(staged["validation/predictions.table.json"]).read_text(encoding="utf-8"))
    predictions(figure.add_subplot(grid[2, :]), table, staged)
    axis = figure.add_subplot(grid[3, :])
    axis.axis("off")
    axis.text(0, 1, words(told), va="top", transform=axis.transAxes).set_in_layout(False)
    figure.suptitle("One run in W&B, drawn from its offline records:\nthis is no screenshot of W&B")
    return figure


def words(told: dict[str, Any]) -> str:
    """Returns values of the summary, the aliases of checkpoints and the number of keys in words."""
    summary = told["summary"]
    kept = {f"{name}.{kind}": value for name in ("val/acc", "val/loss") for kind, value in summary[name].items()}
    models = [one for found in told["artifacts"].values() for one in found if one["type"] == "model"]
    aliases = {alias for one in models for alias in one["aliases"]}
    keys = {name for row in told["rows"] for name in row if not name.startswith("_")}
    return "\n".join(
        [
            "summary: " + ", ".join(f"{name} {value:.3g}" for name, value in kept.items() if "best" not in name),
            ", ".join(f"{name} {summary[name]:.3g}" for name in ("best_step", "test/acc", "test/ece")),
            f"artifacts: {len(models)} checkpoints ({', '.join(sorted(aliases))}), the table",
            f"{len(keys)} keys in all; system metrics, console, config, commit",
        ]
    )


if __name__ == "__main__":
    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9})
    draw(Path(sys.argv[1])).savefig(sys.argv[2], dpi=200)
