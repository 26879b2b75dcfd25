"""The HTML of a board: one file that loads nothing, its charts drawn by Plotly, whose script it carries."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from vit_lightning.figures.board_charts import (
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
from vit_lightning.figures.style import COLOURS, STYLE
from vit_lightning.notation import show_time

DARK = ("#5aa9e6", "#ff8a3d", "#2cc295", "#e3a0c8", "#f0b429", "#a5dcff")
"""The same colours, lighter, for a dark screen."""
NONE = "\N{EN DASH}"
HERE = Path(__file__).parent


def board_page(data: Mapping[str, Any]) -> str:
    """Returns the page of what ``board.read_board`` has read: ``board.html``, in which all texts are escaped."""
    charts: list[Chart] = []

    def place(chart: Chart) -> int:
        """Adds a chart to those that the page carries; returns its place."""
        charts.append(chart)
        return len(charts) - 1

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    runs = data["runs"]
    cells = [_cells(run, data["differing"]) for run in runs]
    page = environment.get_template("board.html").render(
        **data,
        colours=["".join(f"--c{n}:{colour};" for n, colour in enumerate(of)) for of in (COLOURS, DARK)],
        style=STYLE + (HERE / "board.css").read_text(encoding="utf-8"),
        script=(HERE / "board.js").read_text(encoding="utf-8"),
        plotly=_packed(get_plotlyjs()),
        packed_charts=lambda: _packed(json.dumps(charts, separators=(",", ":"))),
        place=place,
        sections=curve_charts(runs),
        table=[{name: text for name, (text, _) in row.items()} for row in cells],
        ranks={name: _ranks([row[name][1] for row in cells]) for name in cells[0]},
        **{of.__name__: of for of in (bars, histogram, look, matrix)},
        dashes=DASHES,
        dumps=json.dumps,
        facts=_facts,
        moments=_moments,
    )
    return page.lstrip()


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _number(value: Any, name: str = "") -> str:
    """Writes a number of a metric, or what else stands in its place."""
    if value in (None, "") or isinstance(value, bool) or not isinstance(value, int | float):
        return NONE if value in (None, "") else str(value)
    if is_percent(name):
        return f"{value:.2%}".replace("%", " %")
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _accuracy(run: Run) -> str:
    accuracy, low, high = (run["results"].get(f"test/acc{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return _number(accuracy, "test/acc") + interval


def _time(run: Run) -> str:
    return NONE if run["seconds"] is None else show_time(run["seconds"])


def _cells(run: Run, differing: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Returns the row of a run in the table: text of each column, and the value by which it is sorted."""
    best, speed = run["best"], run["images_per_second"]
    return {
        "run": (run["name"], run["name"]),
        "state": (run["state"], run["state"]),
        "test accuracy": (_accuracy(run), run["results"].get("test/acc")),
        "best validation": (f"{_number(best, run['monitor'])} {run['monitor']}", best),
        "seed": (_number(run["seed"]), run["seed"]),
        "time": (_time(run), run["seconds"]),
        "images/s": (_number(speed and round(speed)), speed),
        **{key: (run["config"].get(key, NONE), run["config"].get(key)) for key in differing},
    }


def _ranks(values: Sequence[Any]) -> list[int]:
    """Returns the place of each value among all: numbers first, then words, then what is not known."""

    def order(value: Any) -> tuple[int, float, str]:
        try:
            return 0, float(value), ""
        except (TypeError, ValueError):
            return (2, 0.0, "") if value is None else (1, 0.0, str(value))

    known = sorted(values, key=order)
    return [known.index(value) for value in values]


def _facts(run: Run) -> dict[str, str]:
    """Returns what the run is, and its results."""
    place, results = run["environment"], run["results"]
    step, speed, parameters = results.get("best_step"), run["images_per_second"], results.get("parameters")
    best = f"step {step:,}, epoch {step / run['steps_per_epoch']:.4g}, " if step else ""
    images = results.get("test_images")
    tested = f", {images:,} images; in brackets its 95 % interval over images" if images else ""
    seed = "" if run["seed"] is None else f"seed {run['seed']}"
    found = {
        "cause": run["cause"],
        "cannot be read": "; ".join(run["damaged"]),
        "test accuracy": _accuracy(run) + tested if "test/acc" in results else "",
        f"best {run['monitor']}": "" if run["best"] is None else best + _number(run["best"], run["monitor"]),
        "config": ", ".join(filter(None, (str(run["experiment"] or ""), seed))),
        "started": place.get("started"),
        "time": _time(run) + (f", {speed:,.0f} images/s" if speed else "") if run["seconds"] else "",
        "last row": run["last"],
        "parameters": _number(parameters) if parameters else "",
        **{name: place.get(name) for name in ("device", "commit", "command")},
    }
    return {name: text for name, text in found.items() if text}


def _moments(run: Run) -> list[str]:
    """Returns the titles of the validations in order."""
    titles = {
        title: int(title.rpartition(" ")[2])
        for title in (*run["evaluations"], *run["pictures"])
        if title.startswith("validation")
    }
    return sorted(titles, key=lambda title: titles[title])
