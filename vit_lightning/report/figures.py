"""The figures of an ablation's report, as matplotlib figures without a window and as SVG for a page."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vit_lightning.config.files import word
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.study import Study
from vit_lightning.report.style import COLOURS
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
POINTS = ("o", "s", "^", "D", "v", "P")
GREY = "0.6"
"""Arms beyond those that have a colour of their own."""
VERDICTS = {
    **dict.fromkeys(("better", "the best", "among the best"), "#009e73"),
    **dict.fromkeys(("worse", "not the best"), "#d55e00"),
    **dict.fromkeys(("equivalent", "not better", "not worse"), "#0072b2"),
}
"""Colours of verdicts; others are grey."""
Curve = NDArray[np.float64]
NARROW, WIDE = 4.8, 9.6  # inches: letters of one size, on a phone and on a screen
MANY = 12
"""Rows above which single runs are left out and rows are low."""


def draw_figures(analysis: Analysis, curves: Curves, width: float = WIDE) -> dict[str, Figure]:
    """Draws all figures that there are data for, by name; the answer comes first."""
    with matplotlib.rc_context(STYLE):
        figures = {}
        if any(not math.isnan(row.mean) for row in forest_rows(analysis)):
            figures["differences"] = differences_figure(analysis, width)
        figures["seeds"] = seeds_figure(analysis, width)
        figures |= {f"curves_{number}": figure for number, figure in enumerate(curve_figures(analysis, curves, width))}
        if analysis.study.tuning is not None:
            figures["tuning"] = tuning_figure(analysis, width)
        if _known_costs(analysis):
            figures["costs"] = costs_figure(analysis, width)
    return figures


def coloured(analysis: Analysis) -> dict[str, str]:
    """Returns the colours of the arms: of all if there are enough colours, else of the baseline and the best."""
    names = [arm.name for arm in analysis.arms]
    if len(names) > len(COLOURS):
        names = [analysis.study.baseline]
        names += [arm.name for arm in analysis.ranked if arm.name not in names][: len(COLOURS) - 1]
    return dict(zip(names, COLOURS, strict=False))


def _canvas(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Makes a figure; its panels stand beside each other where it is wide enough."""
    beside = panels if width > NARROW else 1
    rows = math.ceil(panels / beside)
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, beside, squeeze=False).ravel())


def _stacked(values: Curve, room: float) -> Curve:
    """Returns offsets that keep equal points from hiding each other."""
    near = np.round(values, 9)  # differences of equal numbers differ in their last digits
    ties = np.array([int(np.sum(near[:place] == value)) for place, value in enumerate(near)], dtype=np.float64)
    step = min(0.09, room / max(1.0, float(ties.max(initial=0.0))))
    return np.multiply(ties, step)


def _legend(figure: Figure, handles: dict[str, Any]) -> None:
    """Adds a legend below the figure, which grows by its height."""
    width, height = figure.get_size_inches()
    longest = max((min(len(name), 52) for name in handles), default=0)
    columns = max(1, min(4, int(width * 14 / (longest + 6))))
    figure.set_size_inches(width, height + 0.19 * math.ceil(len(handles) / columns))
    names = [_shortened(f" {name}" if name.startswith("_") else name) for name in handles]  # those would be left out
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
    figure.legend(list(handles.values()), names, loc="outside lower center", ncols=columns, **style)


def _shortened(name: str, most: int = 52) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _rows(names: Sequence[str], width: float, least: float) -> tuple[Figure, Axes]:
    """Makes a figure with a named row for each arm; names stand beside the plot, clear of its lines."""
    letters = 34 if width > NARROW else 17
    wrapped = [textwrap.wrap(name, letters) or [name] for name in names]
    wrapped = [[*lines[:2], _shortened(" ".join(lines[2:]), letters)] if len(lines) > 3 else lines for lines in wrapped]
    height = max(least, 0.16 * max(map(len, wrapped)) + 0.06)
    figure, [axis] = _canvas(width, 0.75 + height * len(names))
    axis.set_yticks(range(len(names)), ["\n".join(lines) for lines in wrapped], fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    return figure, axis


def seeds_figure(analysis: Analysis, width: float = WIDE) -> Figure:
    """Draws every run as a point, the best arm first, with the mean of each arm; lines join the runs of a seed."""
    unit = unit_of(analysis.study.compare.metric)
    arms, colours = analysis.ranked, coloured(analysis)
    figure, axis = _rows([f"{arm.name} (n={arm.n})" for arm in arms], width, 0.5 if len(arms) <= MANY else 0.26)
    for seed in sorted({run.seed for run in analysis.study.runs}) if len(arms) <= MANY else ():
        places = [(unit.scale * arm.values[seed], row) for row, arm in enumerate(arms) if seed in arm.values]
        axis.plot(*zip(*places, strict=True), color="0.6", linewidth=0.5, alpha=0.6, zorder=1) if places else None
    for row, arm in enumerate(arms):
        values, own = unit.scale * np.array(list(arm.values.values())), colours.get(arm.name, GREY)
        axis.scatter(values, row + _stacked(values, 0.3), s=20, color=own, alpha=0.8, linewidth=0, zorder=2)
        if len(values):
            axis.plot([values.mean()] * 2, [row - 0.3, row + 0.3], color=own, linewidth=2.5, zorder=3)
    axis.set_xlabel(f"{analysis.study.compare.metric}{unit.sign and f' ({unit.sign.strip()})'}; a bar is the mean")
    return figure


@dataclass(frozen=True)
class ForestRow:
    """Row of the figure of differences."""

    name: str
    verdict: str
    values: list[float]
    mean: float
    low: float
    high: float


def forest_rows(analysis: Analysis) -> list[ForestRow]:
    """Returns what the figure of differences shows: comparisons, or the standings of a study that looks for the best.

    Of many pairs, only those with the arm that has the best mean.
    """
    if analysis.standings:
        found = {one.arm: one for one in analysis.standings}
        ordered = [found[arm.name] for arm in analysis.ranked]
        return [ForestRow(one.arm, one.rank, [], one.mean, one.low, one.high) for one in ordered]
    shown, pairs = analysis.ordered, analysis.study.compare.arms == "pairs"
    if pairs and len(shown) > 2 * MANY:
        leader = analysis.ranked[0].name
        shown = [one.mirrored() for one in shown if one.arm == leader]
    return [
        ForestRow(
            f"{one.arm} against {one.other}" if pairs else one.arm,
            one.verdict,
            list(one.counted.values()),
            one.mean,
            one.low,
            one.high,
        )
        for one in shown
    ]


def differences_figure(analysis: Analysis, width: float = WIDE) -> Figure:
    """Draws differences with their intervals, zero, and the range of differences too small to matter."""
    study, unit, rows = analysis.study, unit_of(analysis.study.compare.metric), forest_rows(analysis)
    few = len(rows) <= MANY
    figure, axis = _rows([f"{row.name}: {row.verdict}" for row in rows], width, 0.46 if few else 0.26)
    edge = unit.scale * study.compare.smallest_effect
    axis.axvspan(-edge, edge, color="0.5", alpha=0.18, linewidth=0)
    axis.axvline(0, color=INK, linewidth=0.8)
    for number, row in enumerate(rows):
        own, values = VERDICTS.get(row.verdict, "0.45"), unit.scale * np.array(row.values)
        if few and len(values):
            places = number + 0.18 + _stacked(values, 0.25)
            axis.scatter(values, places, s=12, color=own, alpha=0.5, linewidth=0)
    numbers = unit.scale * np.array([(row.low, row.high, row.mean) for row in rows])
    colours, height = [VERDICTS.get(row.verdict, "0.45") for row in rows], range(len(rows))
    axis.hlines(height, numbers[:, 0], numbers[:, 1], colors=colours, linewidth=4.0, alpha=0.85)
    axis.scatter(numbers[:, 2], height, s=36, color=colours, edgecolor="white", zorder=4)
    to = {"baseline": study.baseline, "best": "the best other arm"}.get(study.compare.arms, "the other arm")
    side = "right" if study.goal == "maximize" else "left"
    unit_name = f" ({unit.suffix.strip()})" if unit.suffix else ""
    label = _shortened(f"{study.compare.metric}, difference to {to}", 60) + f"{unit_name}; {side} is better"
    axis.set_xlabel(textwrap.fill(label, 90 if width > NARROW else 54))
    return figure


Series = tuple[list[int], Curve]
"""Steps and finite values of a metric of a run."""
Curves = dict[tuple[str, int], dict[str, Series]]
"""Series by metric, of each run by arm and seed; failed runs have them too."""


def read_curves(study: Study) -> Curves:
    """Reads validation metrics and training losses of all runs."""
    found: Curves = {}
    for run in study.runs:
        if (study.folder / run.folder / "metrics.jsonl").is_file():
            rows = read_metrics(study.folder / run.folder)
            series = {name: _series(rows, name) for name in dict.fromkeys([study.metric, "val/acc", "train/loss"])}
            found[run.arm, run.seed] = {name: one for name, one in series.items() if one[0]}
    return found


def _series(rows: Sequence[dict[str, Any]], name: str) -> Series:
    pairs = {row["step"]: float(row[name]) for row in rows if name in row and row.get("step") is not None}
    kept = {step: value for step, value in pairs.items() if math.isfinite(value)}
    return list(kept), np.array(list(kept.values()), dtype=np.float64)


def curve_figures(analysis: Analysis, curves: Curves, width: float = WIDE) -> list[Figure]:
    """Draws the mean of each arm with a band of one standard deviation: the whole training, and its last third."""
    names = dict.fromkeys(name for series in curves.values() for name in series)
    return [_curves(analysis, curves, name, width) for name in names]


def _curves(analysis: Analysis, curves: Curves, name: str, width: float) -> Figure:
    unit, colours = unit_of(name), coloured(analysis)
    figure, axes = _canvas(width, 2.9, panels=2)
    handles: dict[str, Any] = {}
    last, ends, spreads, others = 0, list[float](), list[float](), list[Curve]()
    for arm in analysis.arms:
        done = [curves.get((arm.name, run.seed), {}).get(name) for run in arm.runs if run.state == "done"]
        steps, mean, sd = _band([series for series in done if series is not None])
        last = max(last, *steps, 0)
        own, known = colours.get(arm.name, GREY), arm.name in colours
        if len(steps) and not known:
            others.append(np.column_stack([steps, unit.scale * mean]))
        for axis in axes if len(steps) and known else ():
            [handles[arm.name]] = axis.plot(steps, unit.scale * mean, color=own, linewidth=1.8)
            band = unit.scale * (mean - sd), unit.scale * (mean + sd)
            axis.fill_between(steps, *band, color=own, alpha=0.18, linewidth=0)
        if known and len(steps):
            ends += [*mean[np.array(steps) >= 2 / 3 * last]]
            spreads += [*sd[np.array(steps) >= 2 / 3 * last]]
        for run in arm.failed:
            cut_short, values = curves.get((arm.name, run.seed), {}).get(name, ([], np.empty(0)))
            if cut_short:
                axes[0].plot(*_thinned(cut_short, unit.scale * values), color=own, linewidth=0.8, linestyle=":")
                axes[0].scatter(cut_short[-1:], unit.scale * values[-1:], marker="x", s=24, color=own)
    for axis in axes:
        if others:  # below, and all at once: many lines of their own take long
            lines = LineCollection(others, colors=GREY, linewidths=0.6, zorder=1)
            handles[f"{len(analysis.arms) - len(colours)} other arms"] = axis.add_collection(lines)
            axis.autoscale_view()
        axis.set(xlabel="step", ylabel=f"{name}{unit.sign and f' ({unit.sign.strip()})'}")
        axis.grid(alpha=0.3)
    axes[1].set(xlabel="step, the last third")
    axes[1].set_xlim(2 / 3 * last, last + 0.01 * max(last, 1))
    if ends:
        low, high = unit.scale * min(ends), unit.scale * max(ends)
        widest = min(max(spreads), 3 * float(np.median(spreads)))  # of a collapsed run, not all
        room = 0.1 * (high - low) + unit.scale * (widest + 1e-3)
        axes[1].set_ylim(low - room, high + room)
    named = {arm.name: handles[arm.name] for arm in analysis.ranked if arm.name in handles}
    _legend(figure, named | handles)
    return figure


def _band(runs: Sequence[Series]) -> tuple[list[int], Curve, Curve]:
    """Returns mean and standard deviation at the steps that all runs have."""
    if not runs:
        return [], np.empty(0), np.empty(0)
    shared = sorted(set.intersection(*(set(steps) for steps, _ in runs)))
    table = np.array([values[np.isin(steps, shared)] for steps, values in runs])
    sd = table.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    steps, mean = _thinned(shared, table.mean(axis=0))
    return list(steps), mean, _thinned(shared, sd)[1]


def _thinned(steps: Sequence[int], values: Curve, most: int = 400) -> tuple[Any, Any]:
    every = max(1, math.ceil(len(steps) / most))
    return np.asarray(steps)[::every], values[::every]


def tuning_figure(analysis: Analysis, width: float = WIDE) -> Figure:
    """Draws the validation metric of each arm against the values that were tried; the chosen one has a ring."""
    tuning, colours = analysis.study.tuning, coloured(analysis)
    assert tuning is not None
    unit, tried, handles = unit_of(analysis.study.metric), tuning.tried, dict[str, Any]()
    figure, [axis] = _canvas(width, 2.9)
    for arm in sorted(analysis.arms, key=lambda arm: arm.name in colours):
        own, known = colours.get(arm.name, GREY), arm.name in colours
        means = unit.scale * np.array([tuning.mean(arm.name, values) for values in tried])
        [line] = axis.plot(means, color=own, marker="o", markersize=4, linewidth=1.8 if known else 0.6)
        handles[arm.name if known else f"{len(analysis.arms) - len(colours)} other arms"] = line
        if known and (chosen := tuning.chosen.get(arm.name)) in tried:
            place = tried.index(chosen)
            axis.scatter([place], [means[place]], s=110, facecolor="none", edgecolor=own, linewidth=1.6, zorder=4)
    names = ["\n".join(word(value) for value in values.values()) for values in tried]
    axis.set_xticks(range(len(tried)), [_shortened(name, 20) for name in names])
    axis.set(
        xlabel=", ".join(tuning.options), ylabel=f"{analysis.study.metric}{unit.sign and f' ({unit.sign.strip()})'}"
    )
    axis.grid(alpha=0.3)
    axis.margins(0.08, 0.15)
    _legend(figure, {arm.name: handles[arm.name] for arm in analysis.ranked if arm.name in handles} | handles)
    return figure


def costs_figure(analysis: Analysis, width: float = WIDE) -> Figure:
    """Draws the compared metric against costs; arms that no other beats in both are joined."""
    study, unit, colours = analysis.study, unit_of(analysis.study.compare.metric), coloured(analysis)
    shown, handles = _known_costs(analysis), dict[str, Any]()
    figure = Figure(figsize=(width, 2.7), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    numbers = {name: number for number, name in enumerate(colours)}
    for axis, (key, text) in zip(axes, shown.items(), strict=True):
        places = {arm.name: (arm.median(key), arm.mean) for arm in analysis.arms if arm.n and arm.median(key) > 0}
        divisor = 1e6 if key == "flops" else 1.0
        line = [places[name] for name in front(places, study.goal)]
        axis.plot([x / divisor for x, _ in line], [unit.scale * y for _, y in line], color="0.5", linewidth=1, zorder=1)
        groups = {arm.name: [arm] for arm in analysis.arms if arm.name in colours}
        groups = {f"{len(analysis.arms) - len(colours)} other arms": analysis.arms} | groups  # below
        for name, members in groups.items():
            shown_here = [arm for arm in members if arm.name in places and (arm.name in colours) == (name in colours)]
            x, y = np.array([places[arm.name] for arm in shown_here]).reshape(-1, 2).T
            errors = [0.0 if math.isnan(arm.sd) else unit.scale * arm.sd / math.sqrt(arm.n) for arm in shown_here]
            style: dict[str, Any] = {"color": colours.get(name, GREY), "markersize": 6 if name in colours else 3}
            style["fmt"] = POINTS[numbers.get(name, 0)]
            if shown_here:
                handles[name] = axis.errorbar(x / divisor, unit.scale * y, yerr=errors, capsize=2, **style)
        axis.set_xlabel(text)
        axis.grid(alpha=0.3)
        axis.margins(0.15)
    axes[0].set_ylabel(f"{study.compare.metric}{unit.sign and f' ({unit.sign.strip()})'}")
    _legend(figure, {arm.name: handles[arm.name] for arm in analysis.ranked if arm.name in handles} | handles)
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


@functools.lru_cache(maxsize=32)
def _draw(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
