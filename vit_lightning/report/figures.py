"""The figures of an ablation's report, as matplotlib figures without a window and as SVG for a page."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vit_lightning.figures.style import COLOURS
from vit_lightning.report.analysis import Analysis
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
MOST_POINTS = 400
"""Points of a curve at most."""
MANY = 12
"""Rows above which single pairs are left out and rows are low."""


def draw_figures(analysis: Analysis) -> dict[str, Figure]:
    """Draws all figures that there are data for, by name; the answer comes first."""
    with matplotlib.rc_context(STYLE):
        figures = {}
        if any(not math.isnan(line.difference) for line in lines(analysis)):
            figures["differences"] = differences_figure(analysis)
        figures |= {f"curves_{number}": figure for number, figure in enumerate(curve_figures(analysis))}
    return figures


def coloured(analysis: Analysis) -> dict[str, str]:
    """Returns the colours of the arms: of all if there are enough colours, else of the baseline and the best."""
    names = [arm.name for arm in analysis.arms]
    if len(names) > len(COLOURS):
        names = [analysis.study.baseline]
        names += [arm.name for arm in analysis.ranked if arm.name not in names][: len(COLOURS) - 1]
    return dict(zip(names, COLOURS, strict=False))


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _stacked(values: Curve, room: float) -> Curve:
    """Returns offsets that keep equal points from hiding each other."""
    near = np.round(values, 9)  # differences of equal numbers differ in their last digits
    ties = np.array([int(np.sum(near[:place] == value)) for place, value in enumerate(near)], dtype=np.float64)
    step = min(0.09, room / max(1.0, float(ties.max(initial=0.0))))
    return np.multiply(ties, step)


def _shortened(name: str, most: int = 52) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def differences_figure(analysis: Analysis) -> Figure:
    """Draws differences with their intervals, zero, and the range of differences too small to matter."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    rows = [line for line in lines(analysis) if line.kind not in ("baseline", "leader")] + interaction_lines(analysis)
    few, names = len(rows) <= MANY, [textwrap.wrap(f"{_shortened(row.arm)}: {row.label}", 34) for row in rows]
    figure, axis = _canvas(0.75 + max(0.46 if few else 0.26, 0.16 * max(map(len, names)) + 0.06) * len(rows))
    axis.set_yticks(range(len(rows)), ["\n".join(wrapped) for wrapped in names], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
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
    """Draws the mean of each arm with a band of one standard deviation, a figure for each metric."""
    names = dict.fromkeys(name for series in analysis.curves.values() for name in series)
    return [_curves(analysis, name) for name in names]


def _curves(analysis: Analysis, name: str) -> Figure:
    unit, colours, handles = unit_of(name), coloured(analysis), dict[str, Any]()
    figure, axis = _canvas(2.9)
    for arm in sorted(analysis.ranked, key=lambda arm: arm.name in colours):  # those with a colour above the others
        runs = [analysis.curves.get((arm.name, seed), {}) for seed in arm.values]
        if not (found := [run[name] for run in runs if name in run]):
            continue
        steps = functools.reduce(np.intersect1d, [steps for steps, _ in found])  # that all have
        thinned = slice(None, None, max(1, math.ceil(len(steps) / MOST_POINTS)))
        table = unit.scale * np.array([values[np.isin(own, steps)] for own, values in found])[:, thinned]
        own, known, mean = colours.get(arm.name, GREY), arm.name in colours, table.mean(0)
        marker = "o" if len(steps) == 1 else None
        [handle] = axis.plot(steps[thinned], mean, color=own, marker=marker, linewidth=1.8 if known else 0.6)
        handles[arm.name if known else f"{len(analysis.arms) - len(colours)} other arms"] = handle
        if known and len(found) > 1:
            sd = table.std(0, ddof=1)
            axis.fill_between(steps[thinned], mean - sd, mean + sd, color=own, alpha=0.18, linewidth=0)
    axis.set(xlabel="step", ylabel=unit.label(name))
    axis.grid(alpha=0.3)
    names = [_shortened(f" {name}" if name.startswith("_") else name) for name in handles]  # those would be left out
    columns = max(1, min(4, int(WIDTH * 14 / (max(map(len, names), default=0) + 6))))
    figure.set_size_inches(WIDTH, 2.9 + 0.19 * math.ceil(len(names) / columns))  # it grows by its legend
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
    figure.legend([*handles.values()], names, loc="outside lower center", ncols=columns, **style)
    return figure


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
