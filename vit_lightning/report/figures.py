"""The figure of an ablation's report, as one of matplotlib without a window and as SVG for a page."""

import io
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vit_lightning.report.analysis import Analysis, lines
from vit_lightning.report.wording import WORDS, reference, said

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
COLOUR_OF = {"better": "#009e73", "worse": "#d55e00", "same": "#0072b2"}
"""Colours of what verdicts mean; others are grey."""
WIDTH = 9.6  # inches
MANY = 12
"""Rows above which single pairs are left out and rows are low."""


def _shortened(name: str, most: int = 52) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


@matplotlib.rc_context(STYLE)
def draw_differences(analysis: Analysis) -> Figure | None:
    """Draws differences with their intervals, zero, and the range too small to matter; None before there is one."""
    rules, unit = analysis.rules, analysis.rules.unit
    rows = [(line, line.comparison) for line in lines(analysis) if line.comparison is not None]
    if not any(one.n for _, one in rows):
        return None
    labels = [f"{_shortened(line.arm.name)}: {said(analysis, line, briefly=True)}" for line, _ in rows]
    few, names = len(rows) <= MANY, [textwrap.wrap(label, 34) for label in labels]
    tall = 0.75 + max(0.46 if few else 0.26, 0.16 * max(map(len, names)) + 0.06) * len(rows)
    figure = Figure(figsize=(WIDTH, tall), layout="constrained")
    axis = figure.subplots()
    axis.set_yticks(range(len(rows)), ["\n".join(wrapped) for wrapped in names], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    edge = unit.scale * rules.smallest_effect
    axis.axvspan(-edge, edge, color="0.5", alpha=0.18, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8)
    colours, places = [COLOUR_OF.get(WORDS[line.kind].outcome, "0.45") for line, _ in rows], range(len(rows))
    for number, ((_, one), own) in enumerate(zip(rows, colours, strict=True)):
        if few and one.n:
            values = unit.scale * np.array([*one.counted.values()])
            axis.scatter(values, [number + 0.18] * len(values), s=12, color=own, alpha=0.5, linewidth=0)
    numbers = unit.scale * np.array([(one.low, one.high, one.mean) for _, one in rows])
    axis.hlines(places, numbers[:, 0], numbers[:, 1], colors=colours, linewidth=4.0, alpha=0.85)
    low, high = unit.scale * np.array([analysis.for_new_images(one) for _, one in rows]).T
    axis.hlines(places, low, high, colors=colours, linewidth=1.2, zorder=1)
    axis.scatter(numbers[:, 2], places, s=36, color=colours, edgecolor="white", zorder=4)
    side = "right" if analysis.study.goal == "maximize" else "left"
    label = _shortened(f"{rules.metric}, difference to {reference(analysis)}", 60)
    axis.set_xlabel(textwrap.fill(f"{unit.difference_label(label)}; {side} is better", 90))
    return figure


@matplotlib.rc_context(STYLE)
def to_svg(figure: Figure) -> str:
    """Returns the figure as an SVG file: the same bytes each time."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue().replace(INK, "#000000")


def inline_svg(svg: str, description: str) -> str:
    """Returns the file of a figure as part of a page, in the page's text colour."""
    drawn = svg[svg.index("<svg") :].replace("#000000", "currentColor").replace("xlink:href", "href")
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)
