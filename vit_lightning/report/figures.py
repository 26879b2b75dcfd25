"""The figures of an ablation's report, as matplotlib figures without a window and as SVG for a page."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vit_lightning.figures.style import COLOURS
from vit_lightning.report.analysis import Analysis, Series, Steps
from vit_lightning.report.units import unit_of
from vit_lightning.report.wording import interaction_lines, lines, reference

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
GREY = "0.6"
"""Arms beyond those that have a colour of their own."""
COLOUR_OF = {"better": "#009e73", "worse": "#d55e00", "same": "#0072b2"}
"""Colours of what verdicts mean; others are grey."""
Curve = NDArray[np.float64]
WIDTH = 9.6  # inches
MANY = 12
"""Rows above which single runs are left out and rows are low."""


def draw_figures(analysis: Analysis) -> dict[str, Figure]:
    """Draws all figures that there are data for, by name; the answer comes first."""
    with matplotlib.rc_context(STYLE):
        figures = {}
        if any(not math.isnan(line.difference) for line in lines(analysis)):
            figures["differences"] = differences_figure(analysis)
        figures["seeds"] = seeds_figure(analysis)
        figures |= {f"curves_{number}": figure for number, figure in enumerate(curve_figures(analysis))}
    return figures


def coloured(analysis: Analysis) -> dict[str, str]:
    """Returns the colours of the arms: of all if there are enough colours, else of the baseline and the best."""
    names = [arm.name for arm in analysis.arms]
    if len(names) > len(COLOURS):
        names = [analysis.study.baseline]
        names += [arm.name for arm in analysis.ranked if arm.name not in names][: len(COLOURS) - 1]
    return dict(zip(names, COLOURS, strict=False))


def _with_legend(figure: Figure, handles: dict[str, Any]) -> Figure:
    """Adds a legend below a figure, which grows by its height."""
    width, height = figure.get_size_inches()
    columns = max(1, min(4, int(width * 14 / (max((min(len(name), 52) for name in handles), default=0) + 6))))
    figure.set_size_inches(width, height + 0.19 * math.ceil(len(handles) / columns))
    texts = [_shortened(f" {name}" if name.startswith("_") else name) for name in handles]  # those would be left out
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
    figure.legend([*handles.values()], texts, loc="outside lower center", ncols=columns, **style)
    return figure


def _canvas(height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Makes a figure with panels beside each other."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _stacked(values: Curve, room: float) -> Curve:
    """Returns offsets that keep equal points from hiding each other."""
    near = np.round(values, 9)  # differences of equal numbers differ in their last digits
    ties = np.array([int(np.sum(near[:place] == value)) for place, value in enumerate(near)], dtype=np.float64)
    step = min(0.09, room / max(1.0, float(ties.max(initial=0.0))))
    return np.multiply(ties, step)


def _shortened(name: str, most: int = 52) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _rows(names: Sequence[str], least: float) -> tuple[Figure, Axes]:
    """Makes a figure with a named row for each arm; names stand beside the plot, clear of its lines."""
    wrapped = [textwrap.wrap(name, 34) or [name] for name in names]
    height = max(least, 0.16 * max(map(len, wrapped)) + 0.06)
    figure, [axis] = _canvas(0.75 + height * len(names))
    axis.set_yticks(range(len(names)), ["\n".join(lines) for lines in wrapped], fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    return figure, axis


def seeds_figure(analysis: Analysis) -> Figure:
    """Draws every run as a point, the best arm first, with the mean of each arm; lines join the runs of a seed."""
    unit = unit_of(analysis.study.compare.metric)
    arms, colours = analysis.ranked, coloured(analysis)
    figure, axis = _rows([f"{_shortened(arm.name)} (n={arm.n})" for arm in arms], 0.5 if len(arms) <= MANY else 0.26)
    for seed in sorted({run.seed for run in analysis.study.runs}) if len(arms) <= MANY else ():
        places = [(unit.scale * arm.values[seed], row) for row, arm in enumerate(arms) if seed in arm.values]
        axis.plot(*zip(*places, strict=True), color="0.6", linewidth=0.5, alpha=0.6, zorder=1) if places else None
    for row, arm in enumerate(arms):
        values, own = unit.scale * np.array(list(arm.values.values())), colours.get(arm.name, GREY)
        axis.scatter(values, row + _stacked(values, 0.3), s=20, color=own, alpha=0.8, linewidth=0, zorder=2)
        if len(values):
            axis.plot([values.mean()] * 2, [row - 0.3, row + 0.3], color=own, linewidth=2.5, zorder=3)
    axis.set_xlabel(f"{unit.label(analysis.study.compare.metric)}; a bar is the mean")
    return figure


def differences_figure(analysis: Analysis) -> Figure:
    """Draws differences with their intervals, zero, and the range of differences too small to matter."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    rows = [line for line in lines(analysis) if line.kind not in ("baseline", "leader")] + interaction_lines(analysis)
    few = len(rows) <= MANY
    figure, axis = _rows([f"{_shortened(row.arm)}: {row.label}" for row in rows], 0.46 if few else 0.26)
    edge = unit.scale * study.compare.smallest_effect
    axis.axvspan(-edge, edge, color="0.5", alpha=0.18, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8)
    colours, height = [COLOUR_OF.get(row.outcome, "0.45") for row in rows], range(len(rows))
    for number, (row, own) in enumerate(zip(rows, colours, strict=True)):
        if few and row.values:
            values = unit.scale * np.array(row.values)
            axis.scatter(values, number + 0.18 + _stacked(values, 0.25), s=12, color=own, alpha=0.5, linewidth=0)
    numbers = unit.scale * np.array([(row.low, row.high, row.difference) for row in rows])
    axis.hlines(height, numbers[:, 0], numbers[:, 1], colors=colours, linewidth=4.0, alpha=0.85)
    low, high = unit.scale * np.array([row.new_images for row in rows]).T
    axis.hlines(height, low, high, colors=colours, linewidth=1.2, zorder=1)
    axis.scatter(numbers[:, 2], height, s=36, color=colours, edgecolor="white", zorder=4)
    side = "right" if study.goal == "maximize" else "left"
    label = _shortened(f"{study.compare.metric}, difference to {reference(analysis)}", 60)
    axis.set_xlabel(textwrap.fill(f"{unit.difference_label(label)}; {side} is better", 90))
    return figure


def curve_figures(analysis: Analysis) -> list[Figure]:
    """Draws the mean of each arm with a band of one standard deviation: the whole training, and its last third."""
    names = dict.fromkeys(name for series in analysis.curves.values() for name in series)
    return [_curves(analysis, name) for name in names]


def _curves(analysis: Analysis, name: str) -> Figure:
    unit, colours, handles = unit_of(name), coloured(analysis), dict[str, Any]()
    arms = sorted(analysis.ranked, key=lambda arm: arm.name in colours)  # those with a colour above the others
    found = {run: series[name] for run, series in analysis.curves.items() if name in series}
    bands = {arm.name: _band([found.get((arm.name, seed)) for seed in arm.values]) for arm in arms}
    most = max((len(steps) for steps, _, _ in bands.values()), default=0)
    figure, axes = _canvas(2.9, panels=2 if most > 2 else 1)
    last = max((steps[-1] for steps, _, _ in bands.values() if len(steps)), default=0)
    ends: list[Curve] = []
    for arm in arms:
        steps, mean, sd = bands[arm.name]
        own, known = colours.get(arm.name, GREY), arm.name in colours
        for axis in axes if len(steps) else ():
            marker = "o" if len(steps) == 1 else None
            [handle] = axis.plot(steps, unit.scale * mean, color=own, marker=marker, linewidth=1.8 if known else 0.6)
            handles[arm.name if known else f"{len(arms) - len(colours)} other arms"] = handle
            if known:
                edges = unit.scale * (mean - sd), unit.scale * (mean + sd)
                axis.fill_between(steps, *edges, color=own, alpha=0.18, linewidth=0)
        if known and len(steps):
            ends.append(unit.scale * np.array([mean, sd])[:, steps >= 2 / 3 * last])
        for run in arm.failed:
            cut_short, values = found.get((arm.name, run.seed), NO_SERIES)
            axes[0].plot(*_thinned(cut_short, unit.scale * values), color=own, linewidth=0.8, linestyle=":")
            axes[0].scatter(cut_short[-1:], unit.scale * values[-1:], marker="x", s=24, color=own)
    for axis in axes:
        axis.set(xlabel="step", ylabel=unit.label(name))
        axis.grid(alpha=0.3)
    if len(axes) > 1:
        axes[1].set(xlabel="step, the last third", xlim=(2 / 3 * last, last + 0.01 * max(last, 1)))
    if len(axes) > 1 and ends:
        mean, sd = np.concatenate(ends, axis=1)
    if len(axes) > 1 and ends and mean.size:  # else arms without a colour have trained for much longer
        room = 0.1 * np.ptp(mean) + min(sd.max(), 3 * np.median(sd)) + 1e-3 * unit.scale  # of a collapsed run, not all
        axes[1].set_ylim(mean.min() - room, mean.max() + room)
    return _with_legend(figure, handles)


NO_SERIES: Series = np.empty(0, dtype=int), np.empty(0)


def _band(runs: Sequence[Series | None]) -> tuple[Steps, Curve, Curve]:
    """Returns mean and standard deviation at the steps that all runs have, of the runs with values."""
    known = [run for run in runs if run is not None]
    if not known:
        return *NO_SERIES, np.empty(0)
    shared = functools.reduce(np.intersect1d, [steps for steps, _ in known])
    table = np.array([values[np.isin(steps, shared)] for steps, values in known])
    sd = table.std(axis=0, ddof=1) if len(known) > 1 else np.zeros(len(shared))
    return *_thinned(shared, table.mean(axis=0)), _thinned(shared, sd)[1]


def _thinned(steps: Steps, values: Curve, most: int = 400) -> Series:
    every = max(1, math.ceil(len(steps) / most))
    return steps[::every], values[::every]


def to_svg(figure: Figure) -> str:
    """Returns the figure as an SVG file: the same bytes each time."""
    return _draw(figure).replace(INK, "#000000")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """Returns the figure as part of a page: in the page's text colour, with ids of its own."""
    drawn = _draw(figure).replace(INK, "currentColor")
    drawn = drawn[drawn.index("<svg") :].replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-")
    drawn = drawn.replace('xlink:href="#', f'href="#{name}-')
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


@functools.lru_cache(maxsize=32)
def _draw(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
