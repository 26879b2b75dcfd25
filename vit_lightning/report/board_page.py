"""The HTML of a board: one file that loads nothing, its charts drawn by Plotly, whose script it carries."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from vit_lightning.notation import counted, show_time
from vit_lightning.report.board_charts import (
    DASHES,
    Chart,
    Run,
    bars,
    curve_charts,
    histogram,
    is_percent,
    look,
    matrix,
)
from vit_lightning.report.style import COLOURS, STYLE
from vit_lightning.report.wording import NONE

DARK = ("#5aa9e6", "#ff8a3d", "#2cc295", "#e3a0c8", "#f0b429", "#a5dcff")
"""The same colours, lighter, for a dark screen."""
CONTROLS = """<form id="controls" class="controls" autocomplete="off">
<label>x axis <select name="axis"><option>step</option><option>epoch</option><option>minute</option></select></label>
<label>smoothing <input type="range" name="smoothing" min="0" max="0.99" step="0.01" value="0.6"></label>
<label><input type="checkbox" name="log"> logarithmic</label>
"""
MEAN = '<label><input type="checkbox" name="mean"> mean and standard deviation of seeds</label>'
HELP = '<span class="note">drag in a chart to zoom, double click to reset</span></form>'
DIFFERS = ' class="differs"'
Cell = tuple[str, Any]
"""HTML of a cell, and the value by which its column is sorted."""


def board_page(data: Mapping[str, Any]) -> str:
    """Returns the page of what ``board.read_board`` has read."""
    charts = _Charts()
    body = _body(data, charts)
    plots = json.dumps(charts.drawn, separators=(",", ":"))
    folder = Path(__file__).parent
    script, style = ((folder / f"board.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    colours, dark = ("".join(f"--c{n}:{c};" for n, c in enumerate(of)) for of in (COLOURS, DARK))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{escape(str(data["name"]))}</title>
<style>:root {{{colours}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}{STYLE}{style}</style>
</head>
<body>
<main id="board">{body}</main>
<script type="text/plain" id="plots">{_packed(plots)}</script>
<script type="text/plain" id="plotly">{_packed(get_plotlyjs())}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


class _Charts:
    """List of the charts of a page."""

    def __init__(self) -> None:
        self.drawn: list[Chart] = []

    def place(self, title: str, chart: Chart, note: str = "") -> str:
        """Adds a chart; returns where it is drawn."""
        note = "; ".join(chart.pop("notes", [note]))
        self.drawn.append(chart)
        height = chart["layout"]["height"]
        drawn = f'<div class="plot" style="height:{height}px" data-plot="{len(self.drawn) - 1}"></div>'
        return f'<div class="chart"><h3>{escape(title)}</h3>{drawn}{_note(note)}</div>'


def _body(data: Mapping[str, Any], charts: _Charts) -> str:
    runs = data["runs"]
    alone = runs[0] if len(runs) == 1 else None
    running = [run["name"] for run in runs if run["state"] == "running"]
    who = f"{running[0]} was" if len(running) == 1 else f"{len(running)} runs were"
    made = f"{who} running at {data['made']}; to refresh: " if running else f"Made at {data['made']} by "
    command = f'<p class="note">{escape(made)}<code>{escape(data["command"])}</code></p>'
    curves = "".join(
        f"<section><h2>{section}</h2>{_grid(charts.place(title, chart) for title, chart in drawn.items())}</section>"
        for section, drawn in curve_charts(runs).items()
    )
    controls = _controls(runs) + ("" if curves else _note("No metric has been logged yet."))
    if alone:
        return f"<h1>{_title(alone)}</h1>{_facts(alone)}{command}{controls}{curves}{_details(alone, (), charts)}"
    details = "".join(
        f'<details class="run" name="run"><summary id="run-{place}">{_title(run)}</summary>'
        f"{_facts(run)}{_details(run, data['differing'], charts)}</details>"
        for place, run in enumerate(runs)
    )
    heading = f"<h1>{escape(data['name'])} \N{EN DASH} {len(runs)} runs</h1>"
    return f"{heading}{command}{_runs(runs, data['differing'])}{controls}{curves}<h2>Runs</h2>{details}"


def _grid(charts: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def _controls(runs: Sequence[Run]) -> str:
    seeds = len({run["group"] for run in runs}) < len(runs)
    best = ""
    if len(runs) == 1 and (step := runs[0]["results"].get("best_step")):
        best = f"; the dotted line marks the best checkpoint (step {step:,})"
    note = _note(f"A faint line is the values themselves, a full one their smoothed mean{best}.")
    return CONTROLS + MEAN * seeds + HELP + note


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _title(run: Run) -> str:
    return f'{escape(run["name"])} <span class="state {run["state"]}">{run["state"]}</span>'


def _number(value: Any, name: str = "") -> str:
    """Writes a number of a metric, or what else stands in its place."""
    if value is None or isinstance(value, str | bool):
        return NONE if value in (None, "") else str(value)
    if is_percent(name):
        return f"{value:.2%}".replace("%", " %")
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _accuracy(run: Run) -> str:
    accuracy, low, high = (run["results"].get(f"test/acc{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return _number(accuracy, "test/acc") + interval


def _runs(runs: Sequence[Run], differing: Sequence[str]) -> str:
    """Returns the table of the runs, which is the legend of the charts and sorted by its header."""
    columns: dict[str, Callable[[Run], Cell]] = {
        "state": lambda run: (f'<span class="state {run["state"]}">{run["state"]}</span>', run["state"]),
        "test accuracy": lambda run: (_accuracy(run), run["results"].get("test/acc")),
        "best validation": lambda run: (
            f"{_number(run['best'], run['monitor'])} {escape(run['monitor'])}",
            run["best"],
        ),
        "seed": lambda run: (_number(run["seed"]), run["seed"]),
        "time": lambda run: (_time(run), run["seconds"]),
        "images/s": lambda run: (
            _number(run["images_per_second"] and round(run["images_per_second"])),
            run["images_per_second"],
        ),
        **{
            key: lambda run, key=key: (escape(run["config"].get(key, NONE)), run["config"].get(key))
            for key in differing
        },
    }
    cells = [[read(run) for read in columns.values()] for run in runs]
    ranks = [_ranks([row[place][1] for row in cells]) for place in range(len(columns))]
    names = _ranks([run["name"] for run in runs])
    lines = []
    for place, (run, row) in enumerate(zip(runs, cells, strict=True)):
        draw = f'<input type="checkbox" name="run" checked autocomplete="off" aria-label="draw {escape(run["name"])}">'
        name = f'<a href="#run-{place}">{escape(run["name"])}</a>'
        rest = "".join(f'<td data-rank="{ranks[n][place]}">{text}</td>' for n, (text, _) in enumerate(row))
        lines.append(f'<tr><th data-rank="{names[place]}">{draw} {_swatch(*look(run))} {name}</th>{rest}</tr>')
    every = '<input type="checkbox" name="all" checked autocomplete="off" aria-label="draw all runs"> '
    sort = '<button type="button" class="plain" name="sort">'
    first, *others = (f"{sort}{escape(name)}</button></th>" for name in ("run", *columns))
    head = f"<th>{every}{first}{''.join(f'<th>{other}' for other in others)}"
    return f'<div class="wide runs"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _ranks(values: Sequence[Any]) -> list[int]:
    """Returns the place of each value among all: numbers first, then words, then what is not known."""

    def order(value: Any) -> tuple[int, float, str]:
        try:
            return 0, float(value), ""
        except (TypeError, ValueError):
            return (2, 0.0, "") if value is None else (1, 0.0, str(value))

    known = sorted(values, key=order)
    return [known.index(value) for value in values]


def _swatch(colour: str, dash: str) -> str:
    line = f'<path d="M0 4H30" stroke="var({colour})" stroke-dasharray="{DASHES[dash]}"/>'
    return f'<svg class="swatch" viewBox="0 0 30 8">{line}</svg>'


def _time(run: Run) -> str:
    return NONE if run["seconds"] is None else show_time(run["seconds"])


def _facts(run: Run) -> str:
    """Returns what the run is, and its results."""
    place, results = run["environment"], run["results"]
    step, speed, parameters = results.get("best_step"), run["images_per_second"], results.get("parameters")
    best = f"step {step:,}, epoch {step / run['steps_per_epoch']:.4g}, " if step else ""
    images = results.get("test_images")
    tested = f", {images:,} images; in brackets its 95 % interval over images" if images else ""
    found = {
        "cause": run["cause"],
        "test accuracy": "test/acc" in results and _accuracy(run) + tested,
        f"best {run['monitor']}": run["best"] is not None and best + _number(run["best"], run["monitor"]),
        "config": ", ".join(filter(None, (run["experiment"], run["seed"] is not None and f"seed {run['seed']}"))),
        "started": place.get("started"),
        "time": run["seconds"] and _time(run) + (f", {speed:,.0f} images/s" if speed else ""),
        "last row": run["last"],
        "parameters": parameters and _number(parameters),
        "device": _device(place),
        "commit": ", ".join(_commit(name, one) for name, one in (place.get("git") or {}).items() if one),
        "command": place.get("command"),
    }
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in found.items() if text)
    return f"<dl>{''.join(rows)}</dl>"


def _device(place: Mapping[str, Any]) -> str:
    if gpus := place.get("gpus"):
        return f"{len(gpus)} x {gpus[0]}"
    return f"{place['processor']}, {place['cores']} cores, threads: {place['threads']}" if "processor" in place else ""


def _commit(name: str, found: Mapping[str, Any]) -> str:
    changed = f", {counted(len(found['changed']), 'file')} changed" if found.get("changed") else ""
    return f"{str(found['commit'])[:12]} ({name}{changed})"


def _details(run: Run, differing: Sequence[str], charts: _Charts) -> str:
    """Returns pictures and predictions of a run, its errors, config, environment and warnings."""
    pictures = {one["title"]: one["url"] for one in run["pictures"]}
    evaluations = {one["title"]: one for one in run["evaluations"]}
    found = []
    if moments := [title for title in (*evaluations, *pictures) if title.startswith("validation")]:
        moments = sorted(dict.fromkeys(moments), key=lambda title: int(title.rpartition(" ")[2]))
        found.append(f"<h2>Validation</h2>{_moments(moments, pictures, evaluations, charts)}")
    figures = {title: url for title, url in pictures.items() if title not in moments}
    if "test" in evaluations or figures:
        shown = "".join(_picture(title, url) for title, url in figures.items())
        found.append(f'<h2>Test</h2>{_numbers(evaluations.get("test"), charts)}<div class="row">{shown}</div>')
    if run["left_out"]:
        found.append(
            _note(f"{run['left_out']} pictures are left out of this page: a board of this run alone shows more.")
        )
    header, *errors = run["errors"] or [[]]
    if errors:
        found.append(_fold("Misclassified test images of highest loss", _table(header, errors)))
    if run["config"]:
        marked = _note("Marked: options in which the runs differ." if differing else "")
        found.append(_fold("Config", marked + _table([], run["config"].items(), marked=differing)))
    if run["environment"]:
        found.append(_fold("Environment", f"<pre>{escape(json.dumps(run['environment'], indent=2))}</pre>"))
    if run["warnings"]:
        lines = escape("\n".join(run["warnings"]))
        found.append(_fold(f"Warnings (the last {len(run['warnings'])} lines)", f"<pre>{lines}</pre>"))
    return "".join(found)


def _moments(
    titles: Sequence[str], pictures: Mapping[str, str], evaluations: Mapping[str, Any], charts: _Charts
) -> str:
    """Returns the validations, of which a slider shows one."""
    last, parts = len(titles) - 1, []
    for place, title in enumerate(titles):
        picture = _picture(title, pictures[title]) if title in pictures else ""
        hidden = "" if place == last else " hidden"
        parts.append(f"<section{hidden}><h3>{title}</h3>{picture}{_numbers(evaluations.get(title), charts)}</section>")
    slider = f'<input type="range" max="{last}" value="{last}" autocomplete="off" aria-label="validation">'
    return f'<div class="moments">{slider if last else ""}{"".join(parts)}</div>'


def _numbers(evaluation: Mapping[str, Any] | None, charts: _Charts) -> str:
    """Returns confusion matrix, accuracy of classes and confidence of an evaluation."""
    if evaluation is None:
        return ""
    cut = f" The {len(evaluation['confusion']):,} largest cells." if evaluation["cut"] else ""
    drawn = [charts.place("Confusion matrix", matrix(evaluation), f"Rows: true class; columns: prediction.{cut}")]
    drawn.append(charts.place("Accuracy of classes", bars(evaluation)))
    if evaluation.get("confidence"):
        drawn.append(charts.place("Confidence of the predictions", histogram(evaluation)))
    return _grid(drawn)


def _picture(title: str, url: str) -> str:
    return f'<figure><img src="{url}" alt="{escape(title)}"><figcaption>{escape(title)}</figcaption></figure>'


def _fold(name: str, content: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{content}</details>"


def _table(header: Iterable[str], rows: Iterable[Sequence[str]], marked: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = [
        f"<tr{DIFFERS * (row[0] in marked)}><th>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
        if row
    ]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
