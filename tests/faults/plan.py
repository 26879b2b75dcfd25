"""The fault plan, rows 1 to 26, in one command: ``python tests/faults/plan.py runs/faults.jsonl``.

Each finished test is a line of that file. The same command goes on where it was stopped, leaves out what has passed,
whatever the commit was, and prints the table of rows; another file begins anew. Further arguments are pytest's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PLACES = {
    "tests/data/test_workers.py": [11],
    "tests/training/test_endings.py": [12],
    "tests/faults/test_images.py": [15],
    "tests/data/test_decoding.py": [15],
    "tests/commands/test_check_data.py": [15],
    "tests/config/test_mistakes.py": [16],
    "tests/faults/test_files.py": [13],
    "tests/commands/test_run.py::test_eight_runs": [18],
    "tests/storage/test_wandb.py": [20],
    "tests/faults/test_ablation_faults.py::test_runs_that_fail_for_good": [22],
    "tests/faults/test_ablation_faults.py": [21],
    "tests/ablation/test_slurm.py": [21],
    "tests/faults": [],
}
"""Rows of tests whose names have none."""
OUTCOMES = ("passed", "failed", "skipped", "xfailed")
FILE, READ, COMMIT = "VITL_PLAN", "VITL_PLAN_READ", "VITL_PLAN_COMMIT"
"""Variables: the file, how much of it there was at the start, the commit."""


def rows_of(test: str) -> list[int]:
    rows = [int(row) for row in re.findall(r"_(\d\d)(?=_)", test.partition("::test_row")[2])]
    return rows or next((rows for place, rows in PLACES.items() if test.startswith(place)), [])


def finished(size: int = -1) -> dict[str, dict[str, Any]]:
    """The last line of each test."""
    path = Path(os.environ[FILE])
    text = path.read_text()[:size] if path.exists() else ""
    return {line["test"]: line for line in map(json.loads, text.splitlines())}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what has passed, and puts each case before its repetitions.

    Each process has to find the same tests, also one that starts later.
    """
    done = finished(int(os.environ[READ]))
    items[:] = [
        item
        for item in items
        if max(rows_of(item.nodeid), default=99) <= 26
        and done.get(item.nodeid, {}).get("outcome") not in ("passed", "xfailed")
    ]
    items.sort(
        key=lambda item: getattr(item, "callspec", None) is not None and item.callspec.params.get("again", 0) > 0
    )


class Plan:
    """What the first process writes down."""

    def __init__(self) -> None:
        self.began, self.seconds, self.outcomes = time.time(), Counter[str](), dict[str, str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test, outcome = report.nodeid, report.outcome
        self.seconds[test] += report.duration
        if outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "xfailed"
        if report.when == "call" or outcome != "passed":
            self.outcomes[test] = outcome
        if report.when == "teardown":
            line = {"test": test, "outcome": self.outcomes.pop(test), "seconds": round(self.seconds[test], 1)}
            session = {"commit": os.environ[COMMIT], "began": self.began, "at": round(time.time() - self.began, 1)}
            with Path(os.environ[FILE]).open("a") as file:
                file.write(json.dumps({**line, **session}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(table(list(finished().values())))


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown, with the seconds of their tests one after another, and the time of all."""
    text = [f"| row | tests | {' | '.join(OUTCOMES)} | seconds |", "|---" * 7 + "|"]
    for row in [*range(1, 27), "all"]:
        some = [line for line in lines if row == "all" or row in rows_of(line["test"])]
        counts = Counter(line["outcome"] for line in some)
        numbers = [len(some), *(counts[outcome] for outcome in OUTCOMES), round(sum(line["seconds"] for line in some))]
        text.append(f"| {' | '.join(map(str, [row, *numbers]))} |")
    sessions = {line["began"]: 0.0 for line in lines}
    for line in lines:
        sessions[line["began"]] = max(sessions[line["began"]], line["at"])
    commits = ", ".join(f"{commit} ({n})" for commit, n in Counter(line["commit"] for line in lines).items())
    return "\n".join([*text, f"{sum(sessions.values()) / 60:.1f} minutes in all; commits: {commits}"])


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(Path(__file__).parents[2])
    say = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    commit = subprocess.run(say, capture_output=True, text=True).stdout.strip() or "unknown"
    os.environ |= {FILE: str(path), READ: str(len(path.read_text()) if path.exists() else 0), COMMIT: commit}
    places = dict.fromkeys(place.partition("::")[0] for place in reversed(PLACES))
    kept = [place for place in places if place == "tests/faults" or not place.startswith("tests/faults")]
    sys.exit(
        pytest.main(
            ["-p", "plan", "-m", "", "-q", "--dist=load", "--maxschedchunk=1", *kept, *sys.argv[2:]], plugins=[Plan()]
        )
    )
