"""``metrics.jsonl`` and ``results.json`` of a run."""

import contextlib
import csv
import hashlib
import json
import math
import os
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from vit_lightning.storage.folder import is_run, read_json, write_whole

Row = dict[str, Any]
NOT_FINITE = ("nan", "inf", "-inf")
"""Numbers that JSON lacks, as ``json_number`` writes them."""


class MetricsFile(Logger):
    """Lightning logger that appends each set of metrics as one line of JSON to ``metrics.jsonl`` in the run folder.

    A line is written at once, so that a killed run keeps everything it has logged; on a full disk lines are kept in
    memory and written later. Keys besides the metrics: ``step`` (0 is the first optimizer step), ``epoch`` and ``time``
    (seconds since 1970).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file: BinaryIO | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        numbers = {name: json_number(value) for name, value in metrics.items() if name != "epoch"}
        epoch = {"epoch": int(metrics["epoch"])} if "epoch" in metrics else {}
        row = {"step": step, **epoch, **numbers, "time": round(time.time(), 3)}
        if self._file is None:
            self._file = open_lines(self.folder / "metrics.jsonl")
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    @rank_zero_only
    def resume(self, step: int, *rows: Row | None) -> list[Row]:
        """Marks that the rows of ``step`` and later ones are logged again, and returns those that it had lost.

        Args:
            step: number of the first such step, the first of all being 0.
            rows: last rows before the checkpoint, stored in it; written if a kill has prevented that.
        """
        known = read_metrics(self.folder) if (self.folder / "metrics.jsonl").is_file() else []
        if known:
            self.log_metrics({"resumed": 1.0}, step=step)
        return _log_lost(self, [earlier for earlier in known if (earlier["step"] or 0) < step], rows)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of what a full disk has not taken
                self._file.close()
            self._file = None


@rank_zero_only
def resume_rows(loggers: Sequence[Logger], step: int, *rows: Row | None) -> None:
    """Marks in ``metrics.jsonl`` that the rows of a step and later ones are logged again, see ``MetricsFile.resume``.

    A CSVLogger goes on with the rows before them in a file of its version, which it would delete. Others get what the
    file had lost.
    """
    lost = next(logger for logger in loggers if isinstance(logger, MetricsFile)).resume(step, *rows) or ()
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (file := Path(logger.log_dir, "metrics.csv")).is_file():
            kept = [row for row in csv.DictReader(file.read_text().splitlines()) if int(row["step"]) < step]
            known = [{name: value for name, value in row.items() if value} | {"step": int(row["step"])} for row in kept]
            with warnings.catch_warnings(action="ignore"):  # that it deletes the file
                logger.experiment.metrics += known
            _log_lost(logger, known, rows)
            logger.save()
        elif not isinstance(logger, MetricsFile):
            _log_lost(logger, (), lost)


def _log_lost(logger: Logger, known: Sequence[Row], rows: Sequence[Row | None]) -> list[Row]:
    """Logs the rows that a kill has prevented, and returns them."""
    lost = [
        row
        for row in filter(None, rows)
        if not any(one["step"] == row["step"] and row.keys() <= one.keys() for one in known)
    ]
    for row in lost:
        logger.log_metrics({name: value for name, value in row.items() if name != "step"}, step=row["step"])
    return lost


def open_lines(path: Path) -> BinaryIO:
    """Opens the file to append lines; ends a last line that a kill has truncated."""
    file = path.open("a+b")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def json_number(value: float | Tensor) -> float | str:
    """Returns a number for JSON: a float32 with its shortest digits; text for nan and infinity, which JSON lacks."""
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    single = np.float32(number)
    return float(str(single)) if float(single) == number else number


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of ``metrics.jsonl`` without damaged lines and rows that a resumed run has logged again.

    The folder may be anybody's, as that of ``read_results``.
    """
    rows: list[dict[str, Any]] = []
    path = Path(folder, "metrics.jsonl")
    if not path.exists() and is_run(path.parent):  # one that has logged nothing yet
        return rows
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # truncated, not UTF-8, or nested without end
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step", ""), int | None):
            continue
        if "resumed" in row:  # rows after the checkpoint are logged again
            rows = [earlier for earlier in rows if (earlier["step"] or 0) < (row["step"] or 0)]
        else:
            rows.append({"step": row.get("step"), **_numbers(row)})
    return rows


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes ``results.json`` with a checksum; a run with an intact one is finished."""
    sealed = {**results, "sha256": _digest(results)}
    write_whole(folder / "results.json", json.dumps(sealed, indent=2) + "\n")


def read_results(folder: Path) -> dict[str, Any] | None:
    """Returns ``results.json`` without its checksum; None if it is missing or damaged.

    The folder may be anybody's: what is neither a number nor the text of one that is not finite is left out.
    """
    results = read_json(folder / "results.json")
    if results.pop("sha256", None) != _digest(results):
        return None
    return _numbers(results)


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if type(value) in (int, float) or value in NOT_FINITE}


def _digest(results: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()
