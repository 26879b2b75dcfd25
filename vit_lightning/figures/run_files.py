"""The files of a run folder that may be anybody's: read as far as they can be, the rest named."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from vit_lightning.config.files import PER_RUN, changes
from vit_lightning.errors import first_line
from vit_lightning.storage.folder import in_use, is_plain, read_json
from vit_lightning.storage.metrics import read_metrics, read_results
from vit_lightning.storage.parsing import check_size

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads ten times as fast where PyYAML has libyaml."""
LIMITS = {"time": 1e11, "step": 2**53}
Found = TypeVar("Found")


class RunFiles:
    """Files of a run; what is damaged or lies elsewhere is left out and named in ``damaged``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}

    def read(self, name: str, reader: Callable[[Path], Found], default: Found) -> Found:
        """Returns what a reader finds in a file; the default if the file is missing or damaged."""
        path = self.folder / name
        try:
            if path.exists() and not is_plain(path, self.folder):
                raise OSError("a link to another place, or no file")
            return reader(path)
        except FileNotFoundError:
            return default
        except Exception as fault:  # there is no end to what a damaged file raises
            self.damaged[name] = first_line(fault)
            return default

    def config(self) -> dict[str, Any]:
        return self.read("config.yaml", lambda path: mapping(yaml.load(path.read_text("utf-8"), LOADER)), {})

    def results(self) -> dict[str, Any]:
        """Returns the results of a finished run; none if there are none yet."""
        return self.read("results.json", _results, {})

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the metrics, their values as numbers, without those that are none."""
        rows: list[dict[str, Any]] = self.read("metrics.jsonl", lambda path: read_metrics(path.parent), [])
        found = [
            {name: number for name, value in row.items() if (number := _number(name, value)) is not None}
            for row in rows
        ]
        if lost := sum(value is not None for row in rows for value in row.values()) - sum(map(len, found)):
            self.damaged["metrics.jsonl"] = f"{lost} values are no numbers"
        return found

    def table(self, name: str, most: int = 21) -> list[list[str]]:
        """Returns the first rows of a CSV file that are not empty."""

        def read(path: Path) -> list[list[str]]:
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                return list(filter(None, itertools.islice(csv.reader(file), most)))

        return self.read(name, read, [])

    def lines(self, name: str, most: int) -> list[str]:
        """Returns the last lines of a file that are not empty."""
        text = self.read(name, lambda path: path.read_bytes()[-100_000:], b"").decode("utf-8", errors="replace")
        return [line[:500] for line in text.splitlines() if line.strip()][-most:]

    def state(self, finished: bool) -> tuple[str, str]:
        """Returns whether a run is finished, running, diverged, failed or stopped, and the cause in one line."""
        if finished or in_use(self.folder):
            return "finished" if finished else "running", ""
        if (self.folder / "diverged.json").is_file():
            return "diverged", "loss, gradients or weights are no longer finite: see diverged.json"
        ends = sorted((self.folder.parent.parent / "ledger" / self.folder.name).glob("*.end"))  # of an ablation
        if ends and (end := read_json(ends[-1])).get("outcome") == "failed":
            return "failed", str(end.get("cause", ""))
        if errors := self.lines("error.log", 1):
            return "failed", errors[0]
        return "stopped", "neither finished nor running: lightning fit --resume continues it"


def mapping(found: Any) -> dict[str, Any]:
    """Returns plain data if they are a mapping of bearable size, with texts as keys; raises ValueError if not."""
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    check_size(found)
    return {str(key): value for key, value in found.items()}


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file."""
    return mapping(json.loads(path.read_text("utf-8")))


def _results(path: Path) -> dict[str, Any]:
    if (found := read_results(path.parent)) is None and path.is_file():
        raise ValueError("damaged")
    return found or {}


def _number(name: str, value: Any) -> int | float | None:
    """Returns a number of a metric, which is a text if it is not finite; None if it is none."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    if not isinstance(value, int | float | str) or (name in LIMITS and not 0 <= number < LIMITS[name]):
        return None
    return int(number) if name == "step" else number


def differing_options(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the options in which runs differ."""
    found: dict[str, None] = {}
    known = [config for config in configs if config]
    for config in known[1:]:
        try:
            found |= dict.fromkeys(changes(known[0], config))
        except (AttributeError, TypeError, ValueError):  # not a config of ours
            found |= dict.fromkeys(key for key in {**known[0], **config} if known[0].get(key) != config.get(key))
    return sorted(key for key in found if key.partition(".")[0] not in PER_RUN)


def is_chance(key: str) -> bool:
    """Whether an option only draws other random numbers, or names the run."""
    return key == "data.split_seed" or key.partition(".")[0] in PER_RUN
