"""``lightning board``: one HTML page of a run, or of several runs side by side, from the files in their folders.

All that the page shows is one plain mapping, made here; ``board_page`` writes it into the page.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit_lightning.config.changes import PER_RUN, changes, options_of
from vit_lightning.config.files import word
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import goal_of
from vit_lightning.report.board_charts import rounded
from vit_lightning.report.board_page import board_page
from vit_lightning.report.configs import read_config
from vit_lightning.storage.folder import in_use, read_json, runs_in, write_whole
from vit_lightning.storage.metrics import read_metrics, read_results
from vit_lightning.storage.redaction import Redaction

NUMBERS = 250_000
"""Numbers of all curves of a page, about 3 bytes each; longer curves are thinned."""
PICTURES = 1_400_000
"""Bytes of all pictures of a page; the less important ones are left out."""
CELLS = 40_000
"""Cells of all confusion matrices of a page, about 5 bytes each; the less important ones are left out."""
FIGURES = {"test_images": "Test images", "worst_errors": "Worst errors of the test", "calibration": "Calibration"}
Rows = Sequence[dict[str, Any]]


def board(*folder: str, out: str | None = None) -> None:
    """Writes the page and prints where it is.

    Args:
        folder: run folders, folders of runs (runs/digits) and folders of ablations.
        out: the HTML file to write; board.html in the folder, or here where several are given.
    """
    if out is not None and Path(out).suffix != ".html":
        raise UserError(f"out={out} must end with .html")
    if not folder:
        raise UserError("FOLDER is missing")
    folders = [Path(text) for text in folder]
    problems, found = [], []
    for each in folders:
        try:
            found += runs_in(each)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    path = Path(out or (folders[0] / "board.html" if len(folders) == 1 else "board.html"))
    data = read_board(found)
    data["command"] = _redacted(shlex.join(["lightning", "board", *folder]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, board_page(data))
    except OSError as fault:
        raise UserError(f"{path} cannot be written: {fault.strerror} (--out=FILE.html chooses another)") from fault
    for run in data["runs"]:
        if run["state"] == "running":
            print(f"{run['name']} is running, last row {run['last'] or 'still to come'}; the same command refreshes")
    print(path)


def read_board(folders: Iterable[Path]) -> dict[str, Any]:
    """Returns all that a page shows of some run folders, as plain data."""
    folders = list({folder.resolve(): None for folder in folders})
    above = Path(os.path.commonpath([folder.parent for folder in folders]))
    runs = [_read_run(folder, folder.relative_to(above).as_posix(), 1 / len(folders)) for folder in folders]
    configs = [run.pop("config") for run in runs]
    differing = differing_options(configs)
    options = [_options(config) for config in configs]
    for run, config in zip(runs, options, strict=True):
        run["config"] = {key: word(value) for key, value in config.items()}
    arms = [tuple(run["config"].get(key) for key in differing if not is_chance(key)) for run in runs]
    for run, arm in zip(runs, arms, strict=True):
        run["group"] = list(dict.fromkeys(arms)).index(arm)
    for place, run in enumerate(runs):
        run["seed_place"] = sum(other["group"] == run["group"] for other in runs[:place])
    runs = _redacted(runs)
    for run, folder in zip(runs, folders, strict=True):
        run["pictures"], run["left_out"] = _pictures(folder, PICTURES // len(folders))
    whole = above.parent if (above.parent / "ledger.json").is_file() else above  # an ablation
    name = whole.name if len(folders) > 1 else folders[0].name
    return {"name": name, "made": _clock(time.time()), "differing": differing, "runs": runs}


def _read_run(folder: Path, name: str, share: float) -> dict[str, Any]:
    """Returns a run as plain data within a share of the page; its config is as the file has it."""
    rows = read_rows(folder)
    config, results = read_config(folder), read_results(folder) or {}
    environment = read_json(folder / "environment.json")
    state, cause = state_of(folder, bool(results))
    times = [float(row["time"]) for row in rows if isinstance(row.get("time"), int | float)]
    monitor = str(_at(config, "checkpoint", "monitor") or "val/acc")
    series = _series(rows)
    parts = max(50, min(2000, int(NUMBERS * share / 6) // max(1, len(series))))
    return {
        "name": name,
        "state": state,
        "cause": cause,
        "last": _clock(times[-1]) if times else "",
        "seed": config.get("seed_everything"),
        "experiment": config.get("experiment"),
        "monitor": monitor,
        "best": results.get(monitor, _best(series.get(monitor), monitor)),
        "seconds": results.get("train_seconds", times[-1] - times[0] if times else None),
        "images_per_second": results.get("images_per_second", _last(series.get("speed/images_per_second"))),
        "results": {key: value for key, value in results.items() if isinstance(value, int | float)},
        "steps_per_epoch": 1 + max((row["step"] for row in rows if row.get("epoch") == 0 and row["step"]), default=0),
        "clock": _minutes(rows),
        "series": {name: _thin(one, parts) for name, one in series.items()},
        "config": config,
        "environment": environment,
        "evaluations": _evaluations(folder, int(CELLS * share)),
        "errors": _table(folder / "errors.csv"),
        "warnings": _lines(folder / "warnings.log", 20),
    }


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics; none where there are none yet."""
    try:
        return read_metrics(folder)
    except OSError:  # no row yet
        return []


def _at(node: Any, *keys: str) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def state_of(folder: Path, finished: bool) -> tuple[str, str]:
    """Returns whether a run is finished, running, diverged, failed or stopped, and the cause in one line."""
    if finished:
        return "finished", ""
    if in_use(folder):
        return "running", ""
    if (folder / "diverged.json").is_file():
        return "diverged", "loss, gradients or weights are no longer finite: see diverged.json"
    ends = sorted((folder.parent.parent / "ledger" / folder.name).glob("*.end"))  # of an ablation
    if ends and (end := read_json(ends[-1])).get("outcome") == "failed":
        return "failed", str(end.get("cause", ""))
    if errors := _lines(folder / "error.log", 1):
        return "failed", errors[0]
    return "stopped", "neither finished nor running: lightning fit --resume continues it"


def _series(rows: Rows) -> dict[str, dict[str, Any]]:
    """Returns steps done and values of each metric, but for those of the test; nan and infinity are counted alone."""
    found = {}
    rows = [row for row in rows if row["step"] is not None]
    names = {name: None for row in rows for name in row if name not in ("step", "epoch", "time")}
    for name in sorted(name for name in names if not name.startswith("test/")):
        own = [row for row in rows if name in row]
        try:
            values = np.array([row[name] for row in own], dtype=np.float64)
            finite = np.isfinite(values).reshape(len(own))
        except (TypeError, ValueError):  # not numbers
            continue
        steps = np.array([row["step"] + 1 for row in own])
        found[name] = {"step": steps[finite], "y": values[finite], "bad": int((~finite).sum())}
    return found


def _best(series: dict[str, Any] | None, monitor: str) -> float | None:
    if series is None or not len(series["y"]):
        return None
    return float((np.max if goal_of(monitor) == "maximize" else np.min)(series["y"]))


def _last(series: dict[str, Any] | None) -> float | None:
    return float(series["y"][-1]) if series and len(series["y"]) else None


def _minutes(rows: Rows, most: int = 100) -> tuple[list[int], list[float]] | None:
    """Returns steps done and the minutes from the first row to them."""
    known = [(row["step"] + 1, row["time"]) for row in rows if row["step"] is not None and "time" in row]
    known = [pair for pair in known if isinstance(pair[1], int | float)]
    if not known:
        return None
    chosen = [known[place] for place in np.linspace(0, len(known) - 1, min(most, len(known))).round().astype(int)]
    return [step for step, _ in chosen], [round((seconds - known[0][1]) / 60, 3) for _, seconds in chosen]


def _thin(series: dict[str, Any], parts: int) -> dict[str, Any]:
    """Returns rounded values; of a long curve mean, least and largest value of as many parts as there is room for.

    The first and the last value stay. ``n`` is the number of values, and a thinned curve has ``low`` and ``high``.
    """
    steps, values, count = series["step"], series["y"], len(series["y"])
    found = {"n": count, "bad": series["bad"]}
    if count <= max(parts, 150):
        return {**found, "step": steps.tolist(), "y": rounded(values)}
    edges = [0, *np.linspace(1, count - 1, parts - 1).astype(int).tolist(), count]
    pieces = [values[a:b] for a, b in itertools.pairwise(edges)]
    return {
        **found,
        "step": [int(steps[(a + b - 1) // 2]) for a, b in itertools.pairwise(edges)],
        "y": rounded(piece.mean() for piece in pieces),
        "low": rounded(piece.min() for piece in pieces),
        "high": rounded(piece.max() for piece in pieces),
    }


def _options(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return options_of(config)
    except (AttributeError, TypeError, ValueError):  # not a config of ours
        return config


def differing_options(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the options in which runs differ."""
    found: dict[str, None] = {}
    known = [config for config in configs if config]
    for config in known[1:]:
        try:
            found |= dict.fromkeys(changes(known[0], config))
        except (AttributeError, TypeError, ValueError):
            found |= dict.fromkeys(key for key in {**known[0], **config} if known[0].get(key) != config.get(key))
    return sorted(key for key in found if key.partition(".")[0] not in PER_RUN)


def is_chance(key: str) -> bool:
    """Whether an option only draws other random numbers, or names the run."""
    return key == "data.split_seed" or key.partition(".")[0] in PER_RUN


def _evaluations(folder: Path, cells: int) -> list[dict[str, Any]]:
    """Returns the numbers of the validations that were drawn, by epoch, and of the test, within a number of cells."""
    found = [read_json(path) for path in sorted((folder / "validation").glob("epoch-*.json"))]
    found = [{"title": f"validation, epoch {one.get('epoch')}", **one} for one in found if "confusion" in one]
    if test := _test(folder):
        found.append(test)
    kept: list[dict[str, Any]] = []
    for one in [*found[-1:], *found[:-1][::-1]]:  # the test, then the last validation
        matrix = sorted(one["confusion"], key=lambda cell: -cell[2])
        if kept and len(matrix) > cells:
            break
        kept.append({**one, "confusion": matrix[:cells], "cut": len(matrix) > cells})
        kept[-1].pop("sample", None)
        cells -= len(matrix)
    return kept[:0:-1] + kept[:1]


def _test(folder: Path) -> dict[str, Any] | None:
    """Returns the numbers of the test as those of a validation, from ``test_predictions.npz`` and ``classes.csv``."""
    try:
        with np.load(folder / "test_predictions.npz") as file:
            label, prediction, confidence = (file[name] for name in ("label", "prediction", "confidence"))
    except (OSError, ValueError, KeyError):
        return None
    classes = [row[0] for row in _table(folder / "classes.csv", most=100_000)[1:]]
    count = max(len(classes), 1 + int(max(label.max(initial=0), prediction.max(initial=0))))
    classes += [str(number) for number in range(len(classes), count)]
    right, edges = label == prediction, np.linspace(0, 1, 21)
    cells, counts = np.unique(np.stack([label, prediction], axis=1), axis=0, return_counts=True)
    images, correct = (np.bincount(of, minlength=count) for of in (label, label[right]))
    return {
        "title": "test",
        "images": len(label),
        "accuracy": float(right.mean()) if len(label) else None,
        "classes": classes,
        "class_images": images.tolist(),
        "class_accuracy": [c / n if n else None for c, n in zip(correct.tolist(), images.tolist(), strict=True)],
        "confusion": [[*cell, n] for cell, n in zip(cells.tolist(), counts.tolist(), strict=True)],
        "confidence": {
            "edges": edges.round(6).tolist(),
            "right": np.histogram(confidence[right], edges)[0].tolist(),
            "wrong": np.histogram(confidence[~right], edges)[0].tolist(),
        },
    }


def _table(path: Path, most: int = 21) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return list(itertools.islice(csv.reader(file), most))
    except (OSError, csv.Error):
        return []


def _lines(path: Path, most: int) -> list[str]:
    """Returns the last lines of a file that are not empty."""
    try:
        text = path.read_bytes()[-100_000:].decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line[:500] for line in text.splitlines() if line.strip()][-most:]


def _pictures(folder: Path, room: int) -> tuple[list[dict[str, Any]], int]:
    """Returns figures of a run as data URLs, and how many were left out since there was no room for them."""
    sheets = sorted((folder / "validation").glob("epoch-*.png"))
    epochs = {path: f"validation, epoch {int(path.stem.removeprefix('epoch-').lstrip('0') or 0)}" for path in sheets}
    figures = {folder / f"{name}.png": title for name, title in FIGURES.items() if (folder / f"{name}.png").is_file()}
    last = dict(list(epochs.items())[-1:])
    found, left_out = {}, 0
    for path, title in [*last.items(), *figures.items(), *list(epochs.items())[-2::-1]]:
        content, kind = _small(path)
        if not content or len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        found[path] = {"title": title, "url": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"}
    return [found[path] for path in [*epochs, *figures] if path in found], left_out


def _small(path: Path, most: int = 40_000) -> tuple[bytes, str]:
    """Returns a PNG as it is, or if it is large, as WebP at most 1400 pixels wide; empty if it is none or damaged."""
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if len(content) <= most:
                return content, "png"
            image.thumbnail((1400, 4000))
            file = io.BytesIO()
            image.convert("RGB").save(file, "WEBP", quality=85)
            return file.getvalue(), "webp"
    except (OSError, ValueError, Image.DecompressionBombError):
        return b"", ""


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _redacted(value: Any) -> Any:
    """Returns plain data without keys, names and home folders, also those of the machines on which the runs were."""
    text = json.dumps(Redaction().of(value), ensure_ascii=False, default=str)
    text = re.sub(r"(?<![\w.~-])(/(home|Users)/[^/\s\"'\\:,]+|/root(?![\w.-]))", "~", text)
    return json.loads(text, parse_constant=lambda _: None)  # nan and infinity, which no browser reads
