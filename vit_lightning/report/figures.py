"""The figures of an ablation's report, as matplotlib figures without a window and as SVG for a page."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vit_lightning.report.analysis import Analysis
from vit_lightning.report.wording import unit_of
from vit_lightning.storage.metrics import read_metrics

INK = "#010203"
"""Black that ``inline_svg`` replaces by the text colour of the page."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vit_lightning",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.parse_math": False,  # names of arms may hold dollars
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.transparent": True,
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind can tell apart; after six they repeat with other lines and points."""
LINES, POINTS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
Curve = NDArray[np.float64]
WIDTH = 4.8  # inches: on a phone the letters stay readable


def draw_figures(analysis: Analysis) -> dict[str, Figure]:
    """Draws all figures that there are data for, by name."""
    with matplotlib.rc_context(STYLE):
        figures = {"seeds": seeds_figure(analysis)}
        if any(one.differences for one in analysis.comparisons):
            figures["differences"] = differences_figure(analysis)
        figures |= {f"curves_{number}": figure for number, figure in enumerate(curve_figures(analysis))}
        if _known_costs(analysis):
            figures["costs"] = costs_figure(analysis)
    return figures


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _kind(number: int, kinds: Sequence[str]) -> str:
    return kinds[number // len(COLOURS) % len(kinds)]


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _stacked(values: Curve, room: float) -> Curve:
    """Returns offsets that keep equal points from hiding each other."""
    near = np.round(values, 9)  # differences of equal numbers differ in their last digits
    ties = np.array([int(np.sum(near[:place] == value)) for place, value in enumerate(near)], dtype=np.float64)
    step = min(0.09, room / max(1.0, float(ties.max(initial=0.0))))
    return np.multiply(ties, step)


def _legend(figure: Figure, handles: dict[str, Any]) -> None:
    """Adds a legend below the figure, which grows by its height."""
    columns = 1 if max(map(len, handles), default=0) > 28 else 2
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * math.ceil(len(handles) / columns))
    names = [_shortened(f" {name}" if name.startswith("_") else name) for name in handles]  # those would be left out
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK}
    figure.legend(list(handles.values()), names, loc="outside lower center", ncols=columns, **style)


def _shortened(name: str) -> str:
    return name if len(name) < 52 else f"{name[:49]}..."


def seeds_figure(analysis: Analysis) -> Figure:
    """Draws every run as a point, runs of one seed joined, with the mean of each arm."""
    unit = unit_of(analysis.study.compare.metric)
    arms = analysis.arms
    figure, axis = _canvas(0.7 + 0.6 * len(arms))
    for seed in sorted({run.seed for run in analysis.study.runs}):
        places = [(unit.scale * arm.values[seed], row) for row, arm in enumerate(arms) if seed in arm.values]
        axis.plot(*zip(*places, strict=True), color="0.6", linewidth=0.6, zorder=1) if places else None
    for row, arm in enumerate(arms):
        values = unit.scale * np.array(list(arm.values.values()))
        axis.scatter(values, row + _stacked(values, 0.4), s=22, color=colour(row), alpha=0.8, linewidth=0, zorder=2)
        if len(values):
            axis.plot([values.mean()] * 2, [row - 0.22, row + 0.22], color=colour(row), linewidth=2.5, zorder=3)
    _name_rows(axis, [f"{arm.name} (n={arm.n})" for arm in arms])
    axis.set_xlabel(f"{analysis.study.compare.metric}{unit.sign and f' ({unit.sign.strip()})'}; a bar is the mean")
    return figure


def differences_figure(analysis: Analysis) -> Figure:
    """Draws paired differences with both intervals, zero and the range of differences too small to matter."""
    study, unit, comparisons = analysis.study, unit_of(analysis.study.compare.metric), analysis.comparisons
    figure, axis = _canvas(0.7 + 0.75 * len(comparisons))
    edge = unit.scale * study.compare.smallest_effect
    axis.axvspan(-edge, edge, color="0.5", alpha=0.18, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8)
    numbers = {arm.name: number for number, arm in enumerate(analysis.arms)}
    for row, one in enumerate(comparisons):
        own = colour(numbers[one.arm])
        values = unit.scale * np.array(list(one.differences.values()))
        axis.scatter(values, row + 0.2 + _stacked(values, 0.3), s=14, color=own, alpha=0.6, linewidth=0)
        if one.n:
            ends = unit.scale * np.array([one.low, one.high])
            axis.plot(ends, [row, row], color=own, linewidth=4.5, solid_capstyle="butt", alpha=0.8)
            axis.scatter([unit.scale * one.mean], [row], s=34, color=own, edgecolor="white", zorder=4)
    _name_rows(axis, [f"{one.arm}: {one.verdict}" for one in comparisons])
    unit_name = f" ({unit.suffix.strip()})" if unit.suffix else ""
    axis.set_xlabel(f"{study.compare.metric}, difference to {study.baseline}{unit_name}")
    return figure


def _name_rows(axis: Axes, names: Sequence[str]) -> None:
    """Writes the name of each row above it, so that long ones fit on a phone."""
    for row, name in enumerate(names):
        axis.text(0.01, row - 0.3, _shortened(name), transform=axis.get_yaxis_transform(), va="bottom", fontsize=9)
    axis.set_yticks([])
    axis.set_ylim(len(names) - 0.55, -0.75)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", alpha=0.3)


def curve_figures(analysis: Analysis) -> list[Figure]:
    """Draws learning curves of the validation metric and the training loss: runs thin, means of arms thick."""
    folders = {
        (run.arm, run.seed): analysis.study.folder / run.folder for run in analysis.study.runs
    }  # failed ones too
    rows = {run: read_metrics(folder) for run, folder in folders.items() if (folder / "metrics.jsonl").is_file()}
    measured = {name for run in rows.values() for row in run for name in row}
    shown = [name for name in dict.fromkeys([analysis.study.metric, "train/loss"]) if name in measured]
    return [_curves(analysis, rows, name) for name in shown]


def _curves(analysis: Analysis, rows: dict[tuple[str, int], list[dict[str, Any]]], name: str) -> Figure:
    unit = unit_of(name)
    figure, axis = _canvas(2.8)
    handles: dict[str, Any] = {}
    for number, arm in enumerate(analysis.arms):
        done = []
        for run in arm.runs:
            steps, values = _series(rows.get((arm.name, run.seed), []), name)
            axis.plot(*_thinned(steps, unit.scale * values), color=colour(number), linewidth=0.6, alpha=0.35)
            if len(steps) and run.state == "done":
                done.append((steps, unit.scale * values))
        if done:
            style: dict[str, Any] = {"color": colour(number), "linestyle": _kind(number, LINES), "linewidth": 2}
            [handles[arm.name]] = axis.plot(*_thinned(*_mean(done)), **style)
    axis.set(xlabel="step", ylabel=f"{name}{unit.sign and f' ({unit.sign.strip()})'}")
    axis.grid(alpha=0.3)
    _legend(figure, handles)
    return figure


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], Curve]:
    pairs = {row["step"]: float(row[name]) for row in rows if name in row and row.get("step") is not None}
    kept = {step: value for step, value in pairs.items() if math.isfinite(value)}
    return list(kept), np.array(list(kept.values()), dtype=np.float64)


def _mean(runs: Sequence[tuple[list[int], Curve]]) -> tuple[list[int], Curve]:
    """Returns the mean at the steps that all runs have."""
    shared = set.intersection(*(set(steps) for steps, _ in runs))
    kept = [values[np.isin(steps, list(shared))] for steps, values in runs]
    return sorted(shared), np.mean(kept, axis=0)


def _thinned(steps: Sequence[int], values: Curve, most: int = 400) -> tuple[Any, Any]:
    every = max(1, math.ceil(len(steps) / most))
    return np.asarray(steps)[::every], values[::every]


def costs_figure(analysis: Analysis) -> Figure:
    """Draws the reported metric against costs; arms that no other beats in both are joined."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    shown, handles = _known_costs(analysis), {}
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (key, text) in zip(axes, shown.items(), strict=True):
        places = {arm.name: (arm.median(key), arm.mean) for arm in analysis.arms if arm.n and arm.median(key) > 0}
        divisor = 1e6 if key == "flops" else 1.0
        line = [places[name] for name in front(places, study.goal)]
        axis.plot([x / divisor for x, _ in line], [unit.scale * y for _, y in line], color="0.5", linewidth=1, zorder=1)
        for number, arm in enumerate(analysis.arms):
            if arm.name in places:
                x, y = places[arm.name]
                error = 0.0 if math.isnan(arm.sd) else unit.scale * arm.sd / math.sqrt(arm.n)
                style: dict[str, Any] = {"color": colour(number), "fmt": _kind(number, POINTS), "markersize": 6}
                handles[arm.name] = axis.errorbar(x / divisor, unit.scale * y, yerr=error, capsize=2, **style)
        axis.set_xlabel(text)
        axis.grid(alpha=0.3)
        axis.margins(0.15)
    axes[0].set_ylabel(f"{study.compare.metric}{unit.sign and f' ({unit.sign.strip()})'}")
    _legend(figure, handles)
    return figure


def _known_costs(analysis: Analysis) -> dict[str, str]:
    """Returns the costs that some arm has, with the labels of their axes."""
    costs = {"train_seconds": "training (s)", "flops": "MFLOPs per image"}
    return {key: text for key, text in costs.items() if any(arm.median(key) > 0 for arm in analysis.arms if arm.n)}


def front(places: dict[str, tuple[float, float]], goal: str) -> list[str]:
    """Returns the names of those that no other beats or equals at no more cost, the cheapest first.

    Args:
        places: cost and result by name.
        goal: direction of improvement of the result.
    """
    sign = 1 if goal == "maximize" else -1
    kept: list[str] = []
    for name in sorted(places, key=lambda name: (places[name][0], -sign * places[name][1])):
        if not kept or sign * places[name][1] > sign * places[kept[-1]][1]:
            kept.append(name)
    return kept


def to_svg(figure: Figure) -> str:
    """Returns the figure as an SVG file: the same bytes each time."""
    return _draw(figure).replace(INK, "#000000")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """Returns the figure as part of a page: in the page's text colour, with ids of its own."""
    drawn = _draw(figure).replace(INK, "currentColor")
    drawn = drawn[drawn.index("<svg") :].replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-")
    drawn = drawn.replace('xlink:href="#', f'href="#{name}-')
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


@functools.lru_cache(maxsize=16)
def _draw(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
