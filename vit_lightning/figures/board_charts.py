"""Charts of a board as Plotly takes them; curves come as numbers, which ``board.js`` smooths, cuts and averages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from vit_lightning.figures.style import SPLITS
from vit_lightning.metric_facts import facts_of

Chart = dict[str, Any]
"""``data`` and ``layout`` of Plotly, or the ``lines`` of curves; colours are names of the page's variables."""
Run = Mapping[str, Any]

SECTIONS = {"Quality": r"(train|val)/", "Optimization": r"lr$|lr[/-]|optim/", "Speed": "speed/", "System": "system/"}
ORDER = ("val/acc", "val/loss", "train/ce", "train/loss", "train/loss_step", "train/acc")
COMPARED = {
    "accuracy": ("train/acc", "val/acc", "val/raw_acc"),
    "loss": ("train/loss", "val/loss"),
    "loss of a batch": ("train/loss_step",),
}
REGULARIZED = {
    "accuracy": COMPARED["accuracy"],
    "cross entropy": ("train/ce", "val/loss"),
    "training loss": ("train/loss", "train/loss_step"),
}
"""Metrics of one run that share a chart, where the training loss is plain cross entropy and where it is more."""
DASHES = {"solid": "", "dash": "7 3", "dot": "2 2", "longdash": "10 3", "dashdot": "9 3 2 3", "longdashdot": "12 3 2 3"}
"""Dashes of Plotly, and of SVG."""
COLOURS = 6
LAYOUT: Chart = {
    "height": 220,
    "margin": {"l": 40, "r": 8, "t": 8, "b": 24},
    "font": {"family": "system-ui, sans-serif", "size": 11, "color": "--faint"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hovermode": "x unified",
    "hoverlabel": {"bgcolor": "--paper", "bordercolor": "--line", "font": {"color": "--ink"}, "namelength": -1},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    "uirevision": True,
    "xaxis": {"zeroline": False, "showgrid": False, "hoverformat": ",.6~g"},
    "yaxis": {"zeroline": False, "gridcolor": "--line", "fixedrange": True, "automargin": True},
}


def look(run: Run) -> tuple[str, str]:
    """Returns colour and dash of a run among several: runs of one config, which differ by chance, share the colour."""
    group, seed = run["group"], run["seed_place"]
    return f"--c{group % COLOURS}", list(DASHES)[(seed + group // COLOURS) % len(DASHES)]


def curve_charts(runs: Sequence[Run]) -> dict[str, dict[str, Chart]]:
    """Returns the charts of curves by section and title: one for each metric, or for one run, each comparison."""
    known = {name for run in runs for name, one in run["series"].items() if one["n"]}
    charts: dict[str, Sequence[str]] = {}
    if len(runs) == 1:
        charts = _compared(runs[0]["series"], known)
    rest = known.difference(*charts.values())
    charts |= {name: [name] for name in (*(name for name in ORDER if name in rest), *sorted(rest.difference(ORDER)))}
    found: dict[str, dict[str, Chart]] = {section: {} for section in (*SECTIONS, "Other")}
    for title, shown in charts.items():
        section = next((section for section, test in SECTIONS.items() if re.match(test, shown[0])), "Other")
        found[section][title] = _curves(runs, shown)
    return {section: drawn for section, drawn in found.items() if drawn}


def _compared(series: Mapping[str, Any], known: set[str]) -> dict[str, Sequence[str]]:
    """Returns the metrics of the charts of one run in which several can be compared; takes what repeats others away."""
    batches, epochs = (series.get(name, {"n": 0})["n"] for name in ("train/loss_step", "train/loss"))
    if batches <= epochs:  # a short run
        known -= {"train/loss_step"}
    charts = REGULARIZED if "train/ce" in series else COMPARED
    found = {title: [name for name in shown if name in known] for title, shown in charts.items()}
    return {title: shown for title, shown in found.items() if shown}


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Chart:
    """Returns the curves of metrics in one chart."""
    alone, percent = len(runs) == 1, is_percent(names[0])
    lines: list[Chart] = []
    notes: dict[str, None] = {}
    for place, run in enumerate(runs):
        for name in (name for name in names if name in run["series"]):
            series, epoch = run["series"][name], run["steps_per_epoch"]
            if series["bad"]:
                notes[f"{series['bad']:,} values are not finite"] = None
            if "low" in series:
                notes[f"{series['n']:,} values in {len(series['y']):,} parts: mean and range"] = None
            if not series["n"]:
                continue
            label, (colour, dash) = (name, _split(name, names)) if alone else (run["name"], look(run))
            trace = {
                "name": plain(label),
                "legendgroup": plain(label),
                "mode": "lines" if len(series["y"]) > 30 else "lines+markers",
                "line": {"color": colour, "dash": dash, "width": 1.8},
                "marker": {"size": 4 if series["n"] > 1 else 8},
            }
            noisy = name != "lr" and series["n"] > max(30, 2 * series["step"][-1] / epoch)
            numbers = {key: series[key] for key in ("step", "minute", "y", "low", "high") if key in series}
            same = {"run": place, "group": place if alone else run["group"], "epoch": epoch, "noisy": noisy}
            lines.append({**numbers, **same, "trace": trace})
    chart = _chart([], showlegend=alone and len(names) > 1, yaxis={"tickformat": ".4~%" if percent else ""})
    chart |= {"lines": lines, "number": ".2%" if percent else ".5~g", "notes": list(notes)}
    step = runs[0]["results"].get("best_step")
    if alone and step:
        minute = float(np.interp(step, lines[0]["step"], lines[0]["minute"]))
        chart["best"] = {"step": [step], "minute": [minute], "epoch": lines[0]["epoch"]}
    return chart


def plain(text: str) -> str:
    """Returns a text in which Plotly finds no tags."""
    return escape(text, quote=False)


def is_percent(name: str) -> bool:
    """Whether a metric is a fraction that is written in percent."""
    facts = facts_of(name.replace("/raw_", "/"))
    return facts is not None and facts.percent


def _split(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Returns colour and dash of a metric of one run: those of its split, dotted beside another of the same split."""
    split = name.partition("/")[0]
    second = any(other.startswith(f"{split}/") for other in names[: names.index(name)])
    place, dash = SPLITS.get(split, SPLITS["train"])
    return f"--c{place}", "dot" if second else dash


def rounded(values: Iterable[float]) -> list[float]:
    """Returns numbers with five significant digits."""
    return [float(f"{value:.5g}") for value in values]


def _chart(data: list[Chart], *, xaxis: Chart | None = None, yaxis: Chart | None = None, **layout: Any) -> Chart:
    axes = {"xaxis": {**LAYOUT["xaxis"], **(xaxis or {})}, "yaxis": {**LAYOUT["yaxis"], **(yaxis or {})}}
    return {"data": data, "layout": {**LAYOUT, **axes, **layout}}


def matrix(evaluation: Mapping[str, Any]) -> Chart:
    """Returns a confusion matrix: rows are true classes, shades are shares of a row, errors have their own colour."""
    classes, cells = [plain(name) for name in evaluation["classes"]], evaluation["confusion"]
    shades = [0.12 + 0.88 * (number / (evaluation["class_images"][true] or number)) ** 0.5 for true, _, number in cells]
    few, last = len(classes) <= 20, len(classes) - 0.5
    axis = {"tickvals": list(range(len(classes))), "ticktext": classes, "showticklabels": few, "automargin": True}
    axis |= {"ticks": "", "showgrid": False, "fixedrange": few}
    trace = {
        "type": "heatmap",
        "x": [guess for _, guess, _ in cells],
        "y": [true for true, _, _ in cells],
        "z": [round(shade if cell[0] == cell[1] else -shade, 3) for shade, cell in zip(shades, cells, strict=True)],
        "text": [number for _, _, number in cells],
        "hovertemplate": "%{text} images of %{y} are taken for %{x}<extra></extra>",
        "texttemplate": "%{text}" if few else "",
        "zmin": -1,
        "zmax": 1,
        "colorscale": [[0, "--c1"], [0.5, "--paper"], [1, "--c0"]],
        "showscale": False,
        "zsmooth": "fast" if len(classes) > 150 else False,  # where a cell is less than a pixel
        "xgap": int(few),
        "ygap": int(few),
    }
    axes = {"xaxis": {**axis, "range": [-0.5, last]}, "yaxis": {**axis, "range": [last, -0.5]}}
    return _chart([trace], height=340, hovermode="closest", **axes)


def bars(evaluation: Mapping[str, Any], most: int = 30) -> Chart:
    """Returns the accuracy of each class, or of the lowest classes."""
    found = zip(evaluation["classes"], evaluation["class_accuracy"], evaluation["class_images"], strict=True)
    known = [(plain(name), value, number) for name, value, number in found if value is not None]
    known = sorted(known, key=lambda one: one[1])[:most] if len(known) > most else known
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(known))),
        "x": [value for _, value, _ in known],
        "text": [f"{value:.2%}" for _, value, _ in known],
        "hovertext": [f"{name}: {value:.2%} of {number:,} images" for name, value, number in known],
        "hoverinfo": "text",
        "marker": {"color": "--c0"},
    }
    names = {"tickvals": trace["y"], "ticktext": [name for name, *_ in known], "autorange": "reversed"}
    axes = {"xaxis": {"tickformat": ".0%", "fixedrange": True}, "yaxis": {**names, "showgrid": False}}
    return _chart([trace], height=60 + 20 * len(known), hovermode="closest", **axes)


def histogram(evaluation: Mapping[str, Any]) -> Chart:
    """Returns the confidence of right and wrong predictions."""
    bins = evaluation["confidence"]
    middles = [(low + high) / 2 for low, high in zip(bins["edges"], bins["edges"][1:], strict=False)]
    looks = {"right": {"color": "--c0"}, "wrong": {"color": "--c1", "pattern": {"shape": "/"}}}
    data = [{"type": "bar", "name": kind, "x": middles, "y": bins[kind], "marker": of} for kind, of in looks.items()]
    return _chart(data, barmode="stack", bargap=0.05, xaxis={"range": [0, 1], "fixedrange": True})
