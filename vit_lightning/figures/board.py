"""``lightning board``: one HTML page of a run, or of several runs side by side, from the files in their folders.

All that the page shows is one plain mapping, made here; ``board_page`` writes it into the page.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit_lightning.config.files import options_of, value_at, word
from vit_lightning.errors import UserError
from vit_lightning.figures.board_charts import Run, rounded
from vit_lightning.figures.board_page import board_page
from vit_lightning.figures.pictures import data_url, numbers
from vit_lightning.figures.run_files import RunFiles, differing_options, is_chance, read_mapping
from vit_lightning.metric_facts import goal_of
from vit_lightning.notation import counted
from vit_lightning.storage.folder import runs_in, write_whole
from vit_lightning.storage.redaction import Redaction

NUMBERS = 250_000
"""Numbers of all curves of a page, about 3 bytes each; longer curves are thinned."""
PICTURES = 1_400_000
"""Bytes of all pictures of a page; the less important ones are left out."""
CELLS = 40_000
"""Cells of all confusion matrices of a page, about 5 bytes each; the less important ones are left out."""
CLASSES = 100_000
BINS = ("edges", "right", "wrong")
FIGURES = {"test_images": "Test images", "worst_errors": "Worst errors of the test", "calibration": "Calibration"}


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
        if run["damaged"]:
            print(f"{run['name']}: {counted(len(run['damaged']), 'file')} cannot be read: {'; '.join(run['damaged'])}")
        if run["state"] == "running":
            print(f"{run['name']} is running, last row {run['last'] or 'still to come'}; the same command refreshes")
    print(path)


def read_board(folders: Iterable[Path]) -> dict[str, Any]:
    """Returns all that a page shows of some run folders, as plain data."""
    folders = list({folder.resolve(): None for folder in folders})
    above = Path(os.path.commonpath([folder.parent for folder in folders]))
    configs: list[dict[str, Any]] = []
    runs = [_read_run(folder, folder.relative_to(above).as_posix(), 1 / len(folders), configs) for folder in folders]
    differing = differing_options(configs)
    arms = [tuple(run["config"].get(key) for key in differing if not is_chance(key)) for run in runs]
    for place, (run, arm) in enumerate(zip(runs, arms, strict=True)):
        run["group"] = list(dict.fromkeys(arms)).index(arm)
        run["seed_place"] = arms[:place].count(arm)
    whole = above.parent if (above.parent / "ledger.json").is_file() else above  # an ablation
    name = whole.name if len(folders) > 1 else folders[0].name
    return {"name": name, "made": _clock(time.time()), "differing": differing, "runs": runs}


def _read_run(folder: Path, name: str, share: float, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a run as plain data within a share of the page, and appends its config as the file has it."""
    files = RunFiles(folder)
    rows, config, results = files.rows(), files.config(), files.results()
    configs.append(config)
    state, cause = files.state(bool(results))
    times = [row["time"] for row in rows if "time" in row]
    monitor = str(value_at(config, "checkpoint.monitor") or "val/acc")
    is_lower = (value_at(config, "checkpoint.mode") or goal_of(monitor) or "")[:3] == "min"
    series = _series(rows)
    best = series[monitor]["y"] if monitor in series else []
    speed = series["speed/images_per_second"]["y"] if "speed/images_per_second" in series else []
    parts = max(50, min(2000, int(NUMBERS * share / 6) // max(1, len(series))))
    nothing: dict[str, Any] = {}
    run: dict[str, Any] = {
        "name": name,
        "state": state,
        "cause": cause,
        "last": _clock(times[-1]) if times else "",
        "seed": config.get("seed_everything"),
        "experiment": config.get("experiment"),
        "monitor": monitor,
        "best": (min if is_lower else max)(best, default=None),
        "seconds": times[-1] - times[0] if times else None,
        "images_per_second": speed[-1] if len(speed) else None,
        "results": {key: value for key, value in results.items() if isinstance(value, int | float)},
        "steps_per_epoch": 1 + max((row["step"] for row in rows if row.get("epoch") == 0 and "step" in row), default=0),
        "series": {name: _thin(one, parts) for name, one in series.items()},
        "config": files.read("config.yaml", lambda _: _words(config), nothing),
        "environment": files.read("environment.json", _environment, nothing),
        "errors": files.table("errors.csv"),
        "warnings": files.lines("warnings.log", 20),
    }
    for key, value in {"best": monitor, "seconds": "train_seconds", "images_per_second": "images_per_second"}.items():
        run[key] = run["results"].get(value, run[key])
    run["evaluations"] = _evaluations(files, int(CELLS * share))
    pictures, left_out = _pictures(files, int(PICTURES * 4 / 3 * share))
    damaged = [f"{name}: {why}" for name, why in files.damaged.items()]
    redacted: dict[str, Any] = _redacted(run | {"left_out": left_out, "damaged": damaged})
    return redacted | {"pictures": pictures}


def _words(config: dict[str, Any]) -> dict[str, Any]:
    return {key: word(value) for key, value in options_of(config).items()}


def _environment(path: Path) -> dict[str, Any]:
    """Returns what the page says of the machine and the code, and all of the file."""
    place = read_mapping(path)
    gpus, device, commits = place.get("gpus"), "", []
    if gpus or "processor" in place:
        device = f"{place.get('processor')}, {place.get('cores')} cores, threads: {place.get('threads')}"
        device = f"{len(gpus)} x {gpus[0]}" if gpus else device
    for name, found in (place.get("git") or {}).items():
        changed = f", {counted(len(found['changed']), 'file')} changed" if found and found.get("changed") else ""
        commits += [f"{str(found['commit'])[:12]} ({name}{changed})"] if found else []
    words = {key: str(place.get(key) or "") for key in ("started", "command")}
    return {**words, "device": device, "commit": ", ".join(commits), "all": place}


def _series(rows: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Returns steps done, minutes and values of each metric but those of the test; what is not finite is counted."""
    rows = [row for row in rows if "step" in row]
    began = next((row["time"] for row in rows if "time" in row), 0.0)
    found = {}
    for name in sorted({name for row in rows for name in row} - {"step", "epoch", "time"}):
        if not name.startswith("test/"):
            known = [(row["step"] + 1, (row.get("time", began) - began) / 60, row[name]) for row in rows if name in row]
            steps, minutes, values = (np.array(column) for column in zip(*known, strict=True))
            finite = np.isfinite(values)
            found[name] = {"step": steps[finite], "minute": minutes[finite], "y": values[finite]}
            found[name]["bad"] = int((~finite).sum())
    return found


def _thin(series: dict[str, Any], parts: int) -> dict[str, Any]:
    """Returns rounded values; of a long curve mean, least and largest value of as many parts as there is room for.

    The first and the last value stay. ``n`` is the number of values, and a thinned curve has ``low`` and ``high``.
    """
    steps, minutes, values, count = series["step"], series["minute"], series["y"], len(series["y"])
    found = {"n": count, "bad": series["bad"]}
    if count > max(parts, 150):
        starts = np.array([0, *np.linspace(1, count - 1, parts - 1).astype(int)])
        ends = np.append(starts[1:], count)
        middle = (starts + ends - 1) // 2
        found |= {
            "low": rounded(np.minimum.reduceat(values, starts)),
            "high": rounded(np.maximum.reduceat(values, starts)),
        }
        steps, minutes, values = steps[middle], minutes[middle], np.add.reduceat(values, starts) / (ends - starts)
    return {**found, "step": steps.tolist(), "minute": rounded(minutes), "y": rounded(values)}


def _epochs(files: RunFiles, ending: str) -> dict[str, str]:
    """Returns the files of the validations that were drawn by their titles, the last first."""
    names = [f"validation/{path.name}" for path in (files.folder / "validation").glob(f"epoch-*.{ending}")]
    epochs = {name: files.read(name, lambda path: int(path.stem.removeprefix("epoch-")), None) for name in names}
    known = sorted(((epoch, name) for name, epoch in epochs.items() if epoch is not None), reverse=True)
    return {f"validation, epoch {epoch}": name for epoch, name in known}


def _evaluations(files: RunFiles, cells: int) -> dict[str, Any]:
    """Returns the numbers of the test and of the validations, the last first, within a number of cells."""
    found: dict[str, Any] = {}
    tested = files.read("test_predictions.npz", partial(_test, files), None)
    for title, name in {"test": "", **_epochs(files, "json")}.items():
        one = files.read(name, lambda path: _evaluation(read_mapping(path)), None) if name else tested
        if found and one and len(one["confusion"]) > cells:
            break
        if one:
            found[title] = {**one, "confusion": one["confusion"][:cells], "cut": len(one["confusion"]) > cells}
            cells -= len(found[title]["confusion"])
    return found


def _test(files: RunFiles, path: Path) -> dict[str, Any]:
    """Returns the numbers of the test as those of a validation, from ``test_predictions.npz`` and ``classes.csv``."""
    with np.load(path) as file:
        label, prediction, confidence = (file[name] for name in ("label", "prediction", "confidence"))
    classes = [row[0] for row in files.table("classes.csv", most=CLASSES)[1:]]
    count = max(len(classes), 1 + int(max(label.max(initial=0), prediction.max(initial=0))))
    if count > CLASSES:
        raise ValueError(f"a class of number {count - 1}")
    classes += [str(number) for number in range(len(classes), count)]
    return _evaluation(numbers(label, prediction, confidence, classes))


def _evaluation(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of an evaluation as plain data, the largest cells first; raises where they do not fit."""
    classes, images, accuracies = (found[key] for key in ("classes", "class_images", "class_accuracy"))
    cells = np.asarray(found["confusion"], dtype=np.int64).reshape(-1, 3)
    if not len(classes) == len(images) == len(accuracies) or (cells < 0).any() or (cells[:, :2] >= len(classes)).any():
        raise ValueError("its classes and numbers do not fit together")
    return {
        "classes": [str(name)[:40] for name in classes],
        "class_images": [int(number) for number in images],
        "class_accuracy": [None if value is None else float(value) for value in accuracies],
        "confusion": cells[np.argsort(-cells[:, 2], kind="stable")].tolist(),
        "confidence": {key: [float(number) for number in found["confidence"][key]] for key in BINS},
    }


def _pictures(files: RunFiles, room: int) -> tuple[dict[str, str], int]:
    """Returns pictures as data URLs by title, and how many had no room; early validations are left out first."""
    epochs = _epochs(files, "png")
    last = dict(list(epochs.items())[:1])
    found, left_out = {}, 0
    for title, name in {**last, **{title: f"{name}.png" for name, title in FIGURES.items()}, **epochs}.items():
        if url := files.read(name, _picture, ""):
            left_out += len(url) > room
            if len(url) <= room:
                room -= len(url)
                found[title] = url
    return found, left_out


def _picture(path: Path, most: int = 40_000) -> str:
    """Returns a PNG as it is, or if it is large, as WebP at most 1400 pixels wide."""
    content, kind = path.read_bytes(), "png"
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        if len(content) > most:
            image.thumbnail((1400, 4000))
            file = io.BytesIO()
            image.convert("RGB").save(file, "WEBP", quality=85)
            content, kind = file.getvalue(), "webp"
    return data_url(content, kind)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _redacted(value: Any) -> Any:
    """Returns plain data without keys, names and home folders, also those of the machines on which the runs were."""
    text = json.dumps(Redaction().of(value), ensure_ascii=False, default=str)
    text = re.sub(r"(?<![\w.~-])(/(home|Users)/[^/\s\"'\\:,]+|/root(?![\w.-]))", "~", text)
    return json.loads(text, parse_constant=lambda _: None)  # nan and infinity, which no browser reads
