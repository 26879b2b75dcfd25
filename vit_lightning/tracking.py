"""What a run writes down while it goes."""

from __future__ import annotations

import io
import json
import math
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor


class MetricsFile(Logger):
    """Lightning logger that appends each set of metrics as one line of JSON to ``metrics.jsonl`` in the run folder.

    A line is written out at once, so that a killed run keeps all it had logged. Keys besides the metrics: ``step``
    (Lightning's: 0 is the first optimizer step), ``epoch`` and ``time`` (seconds since 1970).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file: TextIO | None = None

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
        if self._file is None:
            self._file = _open_lines(self.folder / "metrics.jsonl")
        numbers = {name: json_number(value) for name, value in metrics.items() if name != "epoch"}
        epoch = {"epoch": int(metrics["epoch"])} if "epoch" in metrics else {}
        row = {"step": step, **epoch, **numbers, "time": round(time.time(), 3)}
        self._file.write(json.dumps(row) + "\n")

    @rank_zero_only
    def mark_resumed(self, step: int) -> None:
        """Says that the rows after ``step`` optimizer steps come again, from a run that goes on from there."""
        self.log_metrics({"resumed": 1.0}, step=step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_lines(path: Path) -> TextIO:
    """The file, to append whole lines to; a line that a kill cut short is ended first."""
    file = path.open("a+b")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8", line_buffering=True)


def json_number(value: float | Tensor) -> float | str:
    """A number for JSON: a float32 with its own digits only, and words for nan and infinity, which JSON lacks."""
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    single = np.float32(number)
    return float(str(single)) if float(single) == number else number


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``, each step once; a line that a kill cut short is left out."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "resumed" in row:  # what was logged after the checkpoint that the run went on from comes again
            rows = [earlier for earlier in rows if earlier["step"] < row["step"]]
        else:
            rows.append(row)
    return rows
