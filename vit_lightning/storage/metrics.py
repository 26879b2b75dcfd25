"""What a run writes down while it goes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from vit_lightning.storage.folder import write_whole


class MetricsFile(Logger):
    """Lightning logger that appends each set of metrics as one line of JSON to ``metrics.jsonl`` in the run folder.

    A line is written out at once, so that a killed run keeps all it had logged; what a full disk does not take is kept
    and written later. Keys besides the metrics: ``step`` (Lightning's: 0 is the first optimizer step), ``epoch`` and
    ``time`` (seconds since 1970).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file: FileIO | None = None
        self._pending = b""

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
        self._pending += json.dumps(row).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            if self._file is None:
                self._file = _open_lines(self.folder / "metrics.jsonl")
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as fault:
            warnings.warn(f"metrics.jsonl takes no more rows now ({fault.strerror}), they are kept", stacklevel=4)

    @rank_zero_only
    def go_on(self, step: int, row: dict[str, Any] | None) -> None:
        """Says that the rows after ``step`` optimizer steps come again, from a run that goes on from there.

        Args:
            step: steps that are done.
            row: what the checkpoint knows to be the last row before it, written if the kill came before the row.
        """
        known = read_metrics(self.folder) if (self.folder / "metrics.jsonl").is_file() else []
        if known:
            self.log_metrics({"resumed": 1.0}, step=step)
        if row and not any(earlier["step"] == row["step"] and row.keys() <= earlier.keys() for earlier in known):
            self.log_metrics({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._pending:
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_lines(path: Path) -> FileIO:
    """The file, to append whole lines to; a line that a kill cut short is ended first."""
    file = path.open("a+b", buffering=0)
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


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


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """``results.json``, with a checksum: a run with a whole one is over, whatever became of its process."""
    sealed = {**results, "sha256": _digest(results)}
    write_whole(folder / "results.json", json.dumps(sealed, indent=2) + "\n")


def read_results(folder: Path) -> dict[str, Any] | None:
    """What ``results.json`` holds, without its checksum; None if there is none, or it is damaged."""
    try:
        results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return results if results.pop("sha256") == _digest(results) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(results: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()
