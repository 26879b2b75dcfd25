"""What an ablation is once it is run: its arms, its rules and its runs, as plain data.

The ledger reads it from the folder; the report is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Trial:
    """One run of the plan: an arm with a seed."""

    arm: str
    seed: int
    overrides: dict[str, Any]
    """The keys that the arm changes, dotted, as in a page."""
    folder: str
    """The run folder, relative to the study's; it may not be there yet."""
    state: Literal["done", "failed", "missing"]
    cause: str | None = None
    """Why it failed, in a line."""
    results: dict[str, Any] = field(default_factory=dict)
    """What ``results.json`` of the run holds; empty unless it is done."""
    look: int = 1
    """The look it was planned for: 1, or 2 for a seed of ``--add-seeds``."""


@dataclass(frozen=True)
class Study:
    """A plan, its rules and what has come of it so far."""

    name: str
    folder: Path
    page: str
    """The page that the arms change, as the plan names it."""
    metric: str
    """What chose epoch and rate: a metric of validation."""
    goal: Literal["maximize", "minimize"]
    """Which way ``report`` gets better; ``metric`` may go the other way."""
    report: str
    """What the arms are compared by, measured once at the end: a metric of test."""
    baseline: str
    """The arm that the others are compared with."""
    smallest_effect: float
    """The smallest difference of ``report`` that would matter, in its own units (0.005 is half a point of accuracy)."""
    alpha: float
    """Chance of any false claim in the whole study, over all arms and both looks."""
    arms: dict[str, dict[str, Any]]
    """Dotted keys that each arm changes, the baseline first."""
    seeds: list[int]
    """Seeds of the first look."""
    added_seeds: list[int]
    """Seeds of the second look; empty until there is one."""
    trials: list[Trial]
    """Arm by arm, seed by seed; one for each of the plan."""
    factors: dict[str, list[Any]] = field(default_factory=dict)
    """Values of each key that the plan lays out as a full grid; empty where arms are named one by one."""
    plan_changed: list[str] = field(default_factory=list)
    """What is no longer as it was when the ledger began (plan, page, code), a line each."""
    plan_file: str | None = None
    """Path of the sweep file, for the commands that the page prints."""

    @property
    def missing(self) -> int:
        """Runs that have not ended; before they have, nothing is claimed."""
        return sum(trial.state == "missing" for trial in self.trials)

    @property
    def looks(self) -> int:
        """The look that the results are of: 1, or 2 once seeds were added."""
        return 2 if self.added_seeds else 1
