"""Curves of ResNet and ViT over the share of training images, from the kept results of five studies.

    python experiments/pictures/inductive_bias.py

Small points are runs, bars the ranges of the verdicts.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vit_lightning.figures.style import COLOURS

HERE = Path(__file__).parent
STUDIES = HERE.parent / "ablations"
SHARES = (1, 3, 10, 30, 100)
ARMS = ("ResNet", "ViT")


def draw() -> Figure:
    """Returns test accuracies with single runs on the left, their difference with its range on the right."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    values, differences = figure.subplots(1, 2)
    runs = {share: list(csv.DictReader((STUDIES / f"inductive_bias_{share}/results.csv").open())) for share in SHARES}
    for arm, colour, marker in zip(ARMS, COLOURS, "os", strict=False):
        found = [[100 * float(run["test/acc"]) for run in runs[share] if run["arm"] == arm] for share in SHARES]
        values.plot(SHARES, [np.mean(each) for each in found], color=colour, marker=marker, label=arm)
        for share, each in zip(SHARES, found, strict=True):
            values.scatter([share] * len(each), each, color=colour, marker=marker, s=12, alpha=0.5, linewidth=0)
    verdicts = [json.loads((STUDIES / f"inductive_bias_{share}/verdicts.json").read_text())[0] for share in SHARES]
    means, lows, highs = (
        np.array([100 * verdict[key] for verdict in verdicts], dtype=float) for key in ("mean", "low", "high")
    )
    differences.axhspan(-1, 1, color="0.9", linewidth=0)
    differences.axhline(0, color="black", linewidth=1)
    differences.errorbar(SHARES, means, [means - lows, highs - means], color=COLOURS[1], marker="s", capsize=4)
    values.set_ylabel("test accuracy (%)")
    values.legend(frameon=False)
    differences.set_ylabel("ViT less ResNet (points)")
    for axis in (values, differences):
        axis.set_xscale("log")
        axis.set_xticks(SHARES, [str(share) for share in SHARES])
        axis.minorticks_off()
        axis.set_xlabel("share of the 45,000 training images (%)")
        axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    with matplotlib.rc_context({"font.size": 10}):
        draw().savefig(HERE / "inductive_bias.png", dpi=150)
