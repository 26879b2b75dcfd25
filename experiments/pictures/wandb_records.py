"""Picture of what a run logs to W&B, drawn from the records of an offline run, and so no screenshot of W&B.

    lightning fit --config digits --trainer.max_epochs=60 --wandb.mode=offline --wandb.histograms_every_n_steps=50
    python experiments/pictures/wandb_records.py runs/digits/RUN experiments/pictures/wandb.png

Artifacts are those of ``--wandb.log_model=true``.
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

from vit_lightning.figures.style import COLOURS, SPLITS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from wandb_stub import read_wandb_file

DASHES = {"solid": "-", "dash": "--"}
LAYER = "encoder.0.attention.fn.attention.qkv.weight"


def lines(axis: Axes, rows: list[dict[str, Any]], *names: str) -> None:
    """Draws values over steps; those of a split in its colour and dash."""
    for number, name in enumerate(names):
        colour, dash = SPLITS.get(name.split("/")[0], (2 + number, "solid"))
        points = [(row["_step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), color=COLOURS[colour], linestyle=DASHES[dash], label=name, linewidth=1)
    axis.set_title(", ".join(names), fontsize=7)
    axis.tick_params(labelsize=6)
    if len(names) > 1:
        axis.legend(fontsize=6, frameon=False)


def histograms(axis: Axes, rows: list[dict[str, Any]], name: str, bins: int = 24) -> None:
    """Draws histograms over steps, the share of each bin as a shade."""
    found = [(row["_step"], row[name]) for row in rows if name in row]
    low, high = min(one["bins"][0] for _, one in found), max(one["bins"][-1] for _, one in found)
    edges = np.linspace(low, high, bins + 1)
    shares = []
    for _, one in found:
        middles, counts = (np.array(one["bins"][:-1]) + np.diff(one["bins"]) / 2), np.array(one["values"])
        shares.append(np.histogram(middles, edges, weights=counts / counts.sum())[0])
    extent = (found[0][0], found[-1][0], low, high)
    axis.imshow(np.sqrt(np.array(shares).T), origin="lower", aspect="auto", extent=extent, cmap="Blues")
    axis.set_title(name, fontsize=7)
    axis.tick_params(labelsize=6)


def picture(axis: Axes, file: Path, name: str) -> None:
    axis.imshow(np.asarray(Image.open(file).convert("RGB")))
    axis.set_title(name, fontsize=7)
    axis.axis("off")


def predictions(axis: Axes, table: dict[str, Any], staged: dict[str, str], folder: Path) -> None:
    """Draws rows of a table, those of the last epoch, errors first."""
    last = [row for row in table["data"] if row[0] == table["data"][-1][0]]
    rows = sorted(last, key=lambda row: (row[5], row[6]))[:5]
    shown = [[*(str(cell) for cell in row[:2]), "", *(str(cell) for cell in row[3:6]), f"{row[6]:.2f}"] for row in rows]
    axis.axis("off")
    drawn = axis.table(shown, colLabels=table["columns"], loc="center", cellLoc="center", bbox=(0, 0, 1, 1))
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7)
    for number, row in enumerate(rows):
        place = (2.05 / 7, 1 - (number + 1.95) / 6, 0.9 / 7, 0.9 / 6)
        inner = axis.inset_axes(place)
        inner.imshow(np.asarray(Image.open(folder / staged[row[2]["path"]]).convert("RGB")))
        inner.axis("off")
    title = (
        f"validation/predictions: {len(table['data'])} rows, here {len(rows)} of epoch {last[0][0]}, the doubtful first"
    )
    axis.set_title(title, fontsize=7)


def draw(run: Path) -> Figure:
    """Draws what the last offline record of a run holds."""
    (file,) = sorted((run / "wandb").glob("offline-run-*/*.wandb"))[-1:]
    told = read_wandb_file(file)
    rows, files = told["rows"], file.parent / "files"
    staged = {
        path: local for found in told["artifacts"].values() for one in found for path, local in one["files"].items()
    }

    def last(name: str) -> Any:
        return [row[name] for row in rows if name in row][-1]

    def table_of(name: str) -> dict[str, Any]:
        return json.loads((files / last(name)["path"]).read_text(encoding="utf-8"))

    figure = Figure(figsize=(13, 12), layout="constrained")
    grid = figure.add_gridspec(5, 4, height_ratios=[1, 1.15, 1, 1.2, 0.4])
    lines(figure.add_subplot(grid[0, 0]), rows, "train/loss", "val/loss")
    lines(figure.add_subplot(grid[0, 1]), rows, "train/acc", "val/acc")
    lines(figure.add_subplot(grid[0, 2]), rows, "optim/grad_norm", "optim/update_norm")
    lines(figure.add_subplot(grid[0, 3]), rows, "speed/images_per_second")
    places = {"validation": grid[1, :2], "confusion": grid[1, 2], "attention": grid[1, 3]}
    for name, place in places.items():
        picture(figure.add_subplot(place), files / last(f"images/{name}")["path"], f"images/{name}")
    confusion = table_of("validation/confusion_table")["data"]
    names = sorted({row[0] for row in confusion} | {row[1] for row in confusion})
    cells = np.zeros((len(names), len(names)))
    for label, predicted, count in confusion:
        cells[names.index(label), names.index(predicted)] = count
    axis = figure.add_subplot(grid[2, 0])
    axis.imshow(cells, cmap="Blues")
    axis.set_xticks(range(len(names)), names, fontsize=6)
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.set_title("validation/confusion (interactive)", fontsize=7)
    axis = figure.add_subplot(grid[2, 1])
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    axis.plot(
        *zip(*(row[:2] for row in table_of("validation/calibration_table")["data"]), strict=True), "o-", markersize=3
    )
    axis.set_title("validation/calibration (interactive)", fontsize=7)
    axis.tick_params(labelsize=6)
    histograms(figure.add_subplot(grid[2, 2]), rows, f"weights/{LAYER}")
    histograms(figure.add_subplot(grid[2, 3]), rows, f"gradients/{LAYER}")
    table = json.loads(Path(staged["validation/predictions.table.json"]).read_text(encoding="utf-8"))
    predictions(figure.add_subplot(grid[3, :3]), table, staged, Path())
    histograms(figure.add_subplot(grid[3, 3]), rows, "images/confidence", bins=20)
    axis = figure.add_subplot(grid[4, :])
    axis.axis("off")
    axis.text(0, 1, words(told), fontsize=8, va="top", family="monospace", transform=axis.transAxes)
    figure.suptitle("One run in W&B, drawn from its offline records: this is no screenshot of W&B", fontsize=11)
    return figure


def words(told: dict[str, Any]) -> str:
    """Returns summary, artifacts and the kinds of keys in words."""
    summary = told["summary"]
    kept = {f"{name}.{kind}": value for name in ("val/acc", "val/loss") for kind, value in summary[name].items()}
    kept |= {name: summary[name] for name in ("test/acc", "test/ece", "parameters", "best_step")}
    models = [
        f"{name}:{'/'.join(one['aliases'])}"
        for name, found in told["artifacts"].items()
        for one in found
        if one["type"] == "model"
    ]
    keys = sorted({name for row in told["rows"] for name in row if not name.startswith("_")})
    kinds: dict[str, int] = {}
    for name in keys:
        kind = name.partition("/")[0] if "/" in name else "others"
        kinds[kind] = kinds.get(kind, 0) + 1
    system = sorted({name.partition(".")[0] for row in told["stats"] for name in row})
    return "\n".join(
        [
            "summary    " + ", ".join(f"{name} {value:.4g}" for name, value in kept.items()),
            "artifacts  " + ", ".join(models),
            "keys       " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()) + f": {len(keys)} in all",
            "system     " + ", ".join(system) + ", each 10 s; and console, config, commit, versions, hardware",
        ]
    )


if __name__ == "__main__":
    matplotlib.use("agg")
    draw(Path(sys.argv[1])).savefig(sys.argv[2], dpi=110)
