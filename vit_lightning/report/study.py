"""An ablation as plain data: its arms, its rules and the outcomes of its runs.

The ledger reads it from the ablation's folder; the report is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Run:
    """A training run of the plan: one arm with one seed."""

    arm: str
    seed: int
    folder: str
    """Run folder, relative to the study's; it may not exist yet."""
    state: Literal["done", "failed", "missing"]
    cause: str | None = None
    """Cause of a failure, in one line."""
    results: dict[str, Any] = field(default_factory=dict)
    """Contents of ``results.json``; empty unless the run is done."""


@dataclass(frozen=True)
class Study:
    """A plan, its rules and the runs so far."""

    name: str
    folder: Path
    metric: str
    """Validation metric that selects the best checkpoint."""
    goal: Literal["maximize", "minimize"]
    """Direction in which ``report`` improves; ``metric`` may go the other way."""
    report: str
    """Test metric that the arms are compared by, measured once at the end of a run."""
    baseline: str
    """Arm that the others are compared with."""
    smallest_effect: float
    """Smallest difference of ``report`` that would matter, in its own units (0.005 is half a point of accuracy)."""
    alpha: float
    """Probability of any false difference in the whole study, over all arms and both analyses."""
    arms: dict[str, dict[str, Any]]
    """Dotted keys that each arm changes; the baseline comes first."""
    seeds: list[int]
    """Seeds of the first analysis."""
    added_seeds: list[int]
    """Seeds added for the second analysis; empty until then."""
    runs: list[Run]
    """All runs of the plan, arm by arm, then seed by seed."""
    factors: dict[str, list[Any]] = field(default_factory=dict)
    """Values of each key of a full grid; empty where arms are named one by one."""
    plan_changed: list[str] = field(default_factory=list)
    """Changes of plan, config or code since the ablation began, one line each."""
    plan_file: str | None = None
    """Path of the sweep file, for the commands that the report prints."""

    @property
    def done(self) -> list[Run]:
        """Runs with results."""
        return [run for run in self.runs if run.state == "done"]

    @property
    def missing(self) -> int:
        """Number of runs that have not finished; nothing is claimed before it is 0."""
        return sum(run.state == "missing" for run in self.runs)

    @property
    def number(self) -> int:
        """Number of the interim analysis: 1, or 2 after seeds were added."""
        return 2 if self.added_seeds else 1
