"""Charts of a board as Plotly takes them; curves come as numbers, which ``board.js`` smooths and cuts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from vit_lightning.metric_facts import facts_of

Chart = dict[str, Any]
"""``data`` and ``layout`` of Plotly, or the ``lines`` of curves; colours are names of the page's variables."""
Run = Mapping[str, Any]

SECTIONS = {"Quality": r"(train|val)/", "Optimization": r"lr$|lr[/-]|optim/", "Speed": "speed/", "System": "system/"}
ORDER = ("val/acc", "val/loss", "train/ce", "train/loss", "train/loss_step", "train/acc")
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
}
X = {"zeroline": False, "showgrid": False, "hoverformat": ",.6~g"}
Y = {"zeroline": False, "gridcolor": "--line", "fixedrange": True, "automargin": True}


def look(run: Run) -> tuple[str, str]:
    """Returns colour and dash of a run among several: runs of one config, which differ by chance, share the colour."""
    group, seed = run["group"], run["seed_place"]
    return f"--c{group % COLOURS}", list(DASHES)[(seed + group // COLOURS) % len(DASHES)]


def curve_charts(runs: Sequence[Run]) -> dict[str, dict[str, Chart]]:
    """Returns the charts of curves by section and title: one for each metric, or for one run, each comparison."""
    names = sorted({name for run in runs for name in run["series"]}, key=lambda name: (_place(name), name))
    charts = {name: [name] for name in names}
    if len(runs) == 1:
        charts = _compared(runs[0]["series"])
    found: dict[str, dict[str, Chart]] = {section: {} for section in (*SECTIONS, "Other")}
    for title, shown in charts.items():
        section = next((section for section, test in SECTIONS.items() if re.match(test, shown[0])), "Other")
        if chart := _curves(runs, shown):
            found[section][title] = chart
    return {section: drawn for section, drawn in found.items() if drawn}


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _compared(series: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the metrics of each chart of one run; those that can be compared share one."""
    same = "train/ce" not in series  # the training loss is plain cross entropy, as that of the validation is
    charts = {
        "accuracy": ["train/acc", "val/acc", "val/raw_acc"],
        "loss" if same else "cross entropy": ["train/loss" if same else "train/ce", "val/loss"],
        "loss of a batch" if same else "training loss": ["train/loss_step"]
        if same
        else ["train/loss_step", "train/loss"],
    }
    known = {name for name, one in series.items() if one["n"]}
    if series.get("train/loss_step", {"n": 0})["n"] <= series.get("train/loss", {"n": 0})["n"]:
        known -= {"train/loss_step"}  # a short run: it says no more than the mean of each epoch
    rest = sorted(known - {name for shown in charts.values() for name in shown})
    charts = {title: [name for name in shown if name in known] for title, shown in charts.items()}
    return {title: shown for title, shown in charts.items() if shown} | {name: [name] for name in rest}


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """Returns the curves of metrics in one chart; None if there is no value to draw."""
    alone, percent = len(runs) == 1, is_percent(names[0])
    number = ".2%" if percent else ".5~g"
    lines, notes = [], []
    for place, run in enumerate(runs):
        for name in (name for name in names if name in run["series"]):
            series = run["series"][name]
            if series["bad"]:
                notes.append(f"{series['bad']:,} values are not finite")
            if not series["n"]:
                continue
            if "low" in series:
                notes.append(f"{series['n']:,} values in {len(series['y']):,} parts: mean and range")
            label, (colour, dash) = (name, _split(name, names)) if alone else (run["name"], look(run))
            steps, epoch = series["step"], run["steps_per_epoch"]
            line = {
                **{key: series[key] for key in ("step", "y", "low", "high") if key in series},
                "epoch": rounded(step / epoch for step in steps),
                "minute": _minutes(run, steps),
                "noisy": name != "lr" and series["n"] > max(30, 2 * steps[-1] / epoch),
                "runs": [place],
                "mean": None,
                **_traces(label, colour, dash, number, len(steps), "low" in series),
            }
            lines.append(line)
    if not lines:
        return None
    groups = [[line for line in lines if runs[line["runs"][0]]["group"] == group] for group in range(len(runs))]
    for group in groups if not alone else []:
        if len(group) > 1:
            for line in group:
                line["mean"] = False
            lines.append(_mean(group, number))
    axis = {**Y, "tickformat": ".4~%" if percent else ""}
    layout = {**LAYOUT, "showlegend": alone and len(names) > 1, "xaxis": X, "yaxis": axis}
    return {
        "lines": lines,
        "layout": layout,
        "best": _best(runs[0]) if alone else None,
        "notes": list(dict.fromkeys(notes)),
    }


def plain(text: str) -> str:
    """Returns a text in which Plotly finds no tags."""
    return escape(text, quote=False)


def _minutes(run: Run, steps: Sequence[int]) -> list[float]:
    """Returns the minutes from the first row of a run to some steps."""
    clock = run["clock"] or ([0], [0.0])
    return rounded(np.interp(steps, *clock))


def is_percent(name: str) -> bool:
    """Whether a metric is a fraction that is written in percent."""
    facts = facts_of(name.replace("/raw_", "/"))
    return facts is not None and facts.percent


def _split(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Returns colour and dash of a metric of one run: those of its split, dotted beside another of the same split."""
    split = name.partition("/")[0]
    second = any(other.startswith(f"{split}/") for other in names[: names.index(name)])
    return ("--c1", "dot" if second else "dash") if split == "val" else ("--c0", "dot" if second else "solid")


def _traces(label: str, colour: str, dash: str, number: str, points: int, ranged: bool) -> dict[str, Chart]:
    """Returns all of a curve, of its values and of its band for Plotly but the numbers."""
    name = plain(label)
    between = f" (%{{customdata[0]:{number}}} to %{{customdata[1]:{number}}})" if ranged else ""
    behind = {"legendgroup": name, "showlegend": False, "hoverinfo": "skip", "mode": "lines", "opacity": 0.35}
    trace = {
        "uid": name,
        "name": name,
        "legendgroup": name,
        "showlegend": True,
        "mode": "lines" if points > 30 else "lines+markers",
        "line": {"color": colour, "dash": dash, "width": 1.8},
        "marker": {"size": 4 if points > 1 else 8},
        "hovertemplate": f"%{{y:{number}}}{between}",
    }
    band = {**behind, "uid": f"{name} band", "fill": "toself", "fillcolor": colour, "line": {"width": 0}}
    values = {**behind, "uid": f"{name} values", "line": {"color": colour, "width": 1}}
    return {"trace": trace, "values": values} | ({"band": band} if ranged else {})


def _mean(lines: Sequence[Chart], number: str, most: int = 200) -> Chart:
    """Returns mean and standard deviation of the curves of one config, at the steps that any has."""
    first = lines[0]
    steps = np.unique(np.concatenate([line["step"] for line in lines]))
    steps = steps if len(steps) <= most else np.linspace(steps[0], steps[-1], most).round()

    def mean(key: str) -> tuple[Any, Any]:
        each = np.array([np.interp(steps, line["step"], line[key], np.nan, np.nan) for line in lines])
        count, middle = np.isfinite(each).sum(0), np.nanmean(each, 0)
        return middle, np.sqrt(np.nansum((each - middle) ** 2, 0) / np.maximum(1, count - 1))

    middle, deviation = mean("y")
    look = first["trace"]["line"]
    label = f"{len(lines)} seeds of {first['trace']['name']}"
    return {
        **first,
        "step": steps.tolist(),
        **{axis: rounded(mean(axis)[0]) for axis in ("epoch", "minute")},
        "y": rounded(middle),
        "low": rounded(middle - deviation),
        "high": rounded(middle + deviation),
        "runs": [run for line in lines for run in line["runs"]],
        "mean": True,
        **_traces(label, look["color"], look["dash"], number, len(steps), ranged=True),
    }


def rounded(values: Any) -> list[float]:
    """Returns numbers with five significant digits."""
    return [float(f"{value:.5g}") for value in values]


def _best(run: Run) -> Chart | None:
    """Returns the line at the best checkpoint, for each x axis."""
    step = run["results"].get("best_step")
    if not step:
        return None
    line = {"color": "--faint", "dash": "dot", "width": 1.5}
    shape = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    places = {"step": step, "epoch": step / run["steps_per_epoch"], "minute": _minutes(run, [step])[0]}
    return {axis: [{**shape, "x0": place, "x1": place}] for axis, place in places.items()}


def matrix(evaluation: Mapping[str, Any]) -> Chart:
    """Returns a confusion matrix: rows are true classes, shades are shares of a row, errors have their own colour."""
    classes, cells = _names(evaluation), evaluation["confusion"]
    shades = [
        0.12 + 0.88 * (number / (evaluation["class_images"][truth] or number)) ** 0.5 for truth, _, number in cells
    ]
    few = len(classes) <= 20
    axis = {"tickvals": list(range(len(classes))), "ticktext": classes, "showticklabels": few, "automargin": True}
    axis |= {"ticks": "", "showgrid": False, "zeroline": False, "fixedrange": few}
    trace = {
        "type": "heatmap",
        "x": [guess for _, guess, _ in cells],
        "y": [truth for truth, _, _ in cells],
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
    ends = [-0.5, len(classes) - 0.5]
    axes = {"xaxis": {**axis, "range": ends}, "yaxis": {**axis, "range": ends[::-1]}}
    return {"data": [trace], "layout": {**LAYOUT, "height": 340, "hovermode": "closest", **axes}}


def bars(evaluation: Mapping[str, Any], most: int = 30) -> Chart:
    """Returns the accuracy of each class, or of the lowest classes."""
    found = zip(_names(evaluation), evaluation["class_accuracy"], evaluation["class_images"], strict=True)
    known = [one for one in found if one[1] is not None]
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
    axes = {"xaxis": {**X, "tickformat": ".0%", "fixedrange": True}, "yaxis": {**Y, **names, "showgrid": False}}
    return {"data": [trace], "layout": {**LAYOUT, "height": 60 + 20 * len(known), "hovermode": "closest", **axes}}


def histogram(evaluation: Mapping[str, Any]) -> Chart:
    """Returns the confidence of right and wrong predictions."""
    bins = evaluation["confidence"]
    middles = [(low + high) / 2 for low, high in zip(bins["edges"], bins["edges"][1:], strict=False)]
    looks = {"right": {"color": "--c0"}, "wrong": {"color": "--c1", "pattern": {"shape": "/"}}}
    data = [
        {"type": "bar", "name": name, "x": middles, "y": bins[name], "marker": look} for name, look in looks.items()
    ]
    axes = {"xaxis": {**X, "range": [0, 1], "fixedrange": True}, "yaxis": Y}
    return {"data": data, "layout": {**LAYOUT, "barmode": "stack", "bargap": 0.05, **axes}}


def _names(evaluation: Mapping[str, Any]) -> list[str]:
    return [plain(str(name)[:40]) for name in evaluation["classes"]]
