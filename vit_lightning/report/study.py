"""An ablation as plain data: its arms, its rules and the outcomes of its runs.

The ledger reads it from the ablation's folder; the report is written from it.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from vit_lightning.config.files import word
from vit_lightning.metric_facts import Goal, facts_of, goal_of
from vit_lightning.report.sequential import Answer
from vit_lightning.report.units import Unit, unit_of

MOST_SEEDS = 1000
"""Most seeds of a plan: the boundaries of so many analyses take a second."""


@dataclass(frozen=True)
class Compare:
    """Rules by which the arms of an ablation are compared.

    Args:
        metric: test metric, measured once at the end of a run.
        smallest_effect: smallest difference that would matter, in the metric's own units (0.005 is half a point of
            accuracy).
        goal: whether higher (maximize) or lower values (minimize) of metric are better; needed for a metric of a
            LightningModule of your own that is no accuracy and no loss by its name.
        max_seeds: seeds of the last analysis, 6 to 1000; arms that are decided earlier get fewer. Up to half as many
            more replace seeds of which a run has failed.
        alpha: probability of any false claim in the study, over all arms and all analyses.
        arms: baseline compares each arm with the baseline; pairs, all arms with each other.
        until: what decides a comparison, beside better and worse: equivalent, or not better, which asks only whether
            an arm should be adopted and takes fewer runs.
        then: further test metrics with their smallest differences, in order, as {test/ece: 0.01}. An arm that is better
            or worse is compared by the next one too, within the same alpha: by each metric, better and worse have half
            of its level, and not better, not worse and all that follows the other half.
        equal: with time each arm gets as many steps as take the time of its baseline, by a timing of all arms in turns
            before the first run: the answer is who wins an hour, not a step.
        disagreement: fraction of the test images that one of two runs gets right and the other wrong, for the forecast
            before the first runs.
        extended: earlier ``max_seeds`` in order, where they were raised; kept by the ledger, no option of a plan. The
            first is the one that alpha was planned for: going on does not spend alpha twice.
    """

    metric: str
    smallest_effect: float
    max_seeds: int
    goal: Goal | None = field(default=None, kw_only=True)
    alpha: float = 0.05
    arms: Literal["baseline", "pairs"] = "baseline"
    until: Answer = "equivalent"
    then: dict[str, float] = field(default_factory=dict)
    equal: Literal["time"] | None = None
    disagreement: float = 0.05
    extended: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "extended", tuple(self.extended))  # a list, in the ledger's file

    @property
    def unit(self) -> Unit:
        """Notation of the metric."""
        return unit_of(self.metric)

    @property
    def shown_effect(self) -> str:
        """The smallest effect with its unit."""
        return self.unit.plain(self.smallest_effect)

    @property
    def counts_images(self) -> bool:
        """Whether the metric is a fraction of the test images."""
        facts = facts_of(self.metric)
        return facts is not None and facts.counts_images

    @property
    def test_set(self) -> str:
        """Name of the further test set that the metric is of; empty for the test images."""
        return self.metric.partition("/")[2].rpartition("/")[0]


State = Literal["done", "failed", "missing"]
EDITED = "edited"
"""Cause of a run whose result is not that of its predictions."""


@dataclass(frozen=True)
class Run:
    """A training run of the plan: one arm with one seed, or a trial of the arm's tuning."""

    arm: str
    seed: int
    folder: str
    """Run folder, relative to the study's; it may not exist yet."""
    state: State
    cause: str | None = None
    """Cause of a failure, in one line."""
    results: dict[str, Any] = field(default_factory=dict)
    """Contents of ``results.json``; empty unless the run is done."""
    tried: dict[str, Any] | None = None
    """Values that a trial tries, by dotted keys; it is never tested. None for the runs that are compared."""
    predictions: str | None = None
    """Checksum of the test predictions of its first result, of nothing where it has none; None without a result."""

    @property
    def was_edited(self) -> bool:
        return (self.cause or "").startswith(f"{EDITED}:")


SIZES = "sizes"
"""Factor of a plan with sizes, beside that of its arms: each arm of each size is an arm of the study."""
TUNING = "tuning"
"""W&B job type of the runs that tune; that of the others is their arm."""


def written(values: Mapping[str, Any]) -> str:
    """Writes options with their values."""
    return ", ".join(f"{key}={word(value)}" for key, value in values.items())


def level_name(key: str, value: Any) -> str:
    """Names the value of an option: text as it is, others with their option, such as depth=3."""
    return value if isinstance(value, str) else f"{key.rpartition('.')[2]}={word(value)}"


def arm_name(*levels: str) -> str:
    """Names the arm that has a level of each factor, such as "cls, depth=3"."""
    return ", ".join(levels)


def combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns all combinations of the values of options, in order."""
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


@dataclass(frozen=True)
class Tuning:
    """Equal tuning of all arms: each tries the same values with the same seeds."""

    metric: str
    """Validation metric of the best checkpoint, by which values are chosen."""
    mode: Literal["min", "max"]
    """Direction in which it improves, as checkpoints are selected."""
    options: dict[str, list[Any]]
    seeds: list[int]
    trials: list[Run]
    chosen: dict[str, dict[str, Any]]
    """Values of each arm with the best mean over the seeds; without the arms that have not finished."""
    replicates: int | None = None
    """Number of tunings of each arm, one for each of its runs; then ``chosen`` is empty."""
    choices: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """Values that each of these tunings chose, by arm."""

    @property
    def tried(self) -> list[dict[str, Any]]:
        """All combinations of values, in the order of the plan."""
        return combinations(self.options)

    @property
    def left_out(self) -> dict[str, list[dict[str, Any]]]:
        """Values that an arm could not choose, as a trial of them has failed, by arm."""
        found: dict[str, list[dict[str, Any]]] = {}
        for run in self.trials:
            if run.state == "failed" and run.tried and run.tried not in found.setdefault(run.arm, []):
                found[run.arm].append(run.tried)
        return found

    def mean(self, arm: str, values: dict[str, Any]) -> float:
        """Returns the mean validation metric of some values; nan where a trial is missing or has failed.

        With replicates it is that over the trials that are done.
        """
        found = [run for run in self.trials if (run.arm, run.tried, run.state) == (arm, values, "done")]
        known = [float(run.results[self.metric]) for run in found]
        return statistics.fmean(known) if known and (self.replicates or len(known) == len(self.seeds)) else math.nan


@dataclass(frozen=True)
class Study:
    """A plan, its rules and the runs so far."""

    name: str
    question: str
    """What the ablation asks, in the words of its plan; may be empty."""
    folder: Path
    config: str
    """Config files, as the plan names them."""
    metric: str
    """Validation metric that selects the best checkpoint, and the values of the tuning."""
    goal: Goal
    """Direction in which ``compare.metric`` improves; ``metric`` may go the other way."""
    compare: Compare
    baseline: str
    """Arm that the others are compared with; for pairs, the one that is named first."""
    arms: dict[str, dict[str, Any]]
    """Dotted keys that each arm changes; the baseline comes first."""
    seeds: list[int]
    """All seeds that may be run: those behind the first ``compare.max_seeds`` replace those with a failed run."""
    split_varies: bool
    """Whether each seed has a split of its own, the same for all arms."""
    runs: list[Run]
    """Runs that are done, failed or needed for the next analysis, arm by arm, then seed by seed."""
    tuning: Tuning | None = None
    factors: dict[str, list[Any]] = field(default_factory=dict)
    """Values of each key of a full grid, or names of arms and sizes; empty where arms are named one by one."""
    plan_changed: list[str] = field(default_factory=list)
    """Changes since the ablation began, one line each: of code and question, second results of a run, claims that the
    results would not give any more, earlier studies of the same arms and seeds."""
    plan_file: str | None = None
    """Path of the plan, for the commands that the report prints."""
    goals: dict[str, Goal] = field(default_factory=dict)
    """Directions of the metrics of ``compare.then``."""
    timing: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each arm, with equal time: its baseline, the ratio of the seconds of a step, its steps, options for them."""

    @functools.cached_property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """Names of the levels that make each arm, one of each factor."""
        named = [[level_name(key, value) for value in values] for key, values in self.factors.items()]
        return {arm_name(*levels): levels for levels in itertools.product(*named)}

    def given(self, arm: str) -> dict[str, Any]:
        """Returns the options of an arm: its own, what tuning has chosen, and its steps for equal time."""
        of_time: dict[str, Any] = self.timing.get(arm, {}).get("options", {})
        return self.arms[arm] | self.chosen(arm) | of_time

    def chosen(self, arm: str) -> dict[str, Any]:
        """Returns the values that tuning has chosen for an arm; none with replicates."""
        return {} if self.tuning is None else self.tuning.chosen.get(arm, {})

    @functools.cached_property
    def next(self) -> Self | None:
        """The study by its next metric, which has half of the level; None where there is none."""
        rules = self.compare
        if not rules.then:
            return None
        (metric, effect), *rest = rules.then.items()
        rules = replace(rules, metric=metric, smallest_effect=effect, alpha=rules.alpha / 2, then=dict(rest))
        return replace(self, compare=rules, goal=self.goals.get(metric) or goal_of(metric) or "maximize")

    @property
    def done(self) -> list[Run]:
        """Runs with results."""
        return [run for run in self.runs if run.state == "done"]

    @functools.cached_property
    def results(self) -> dict[tuple[str, int], Run]:
        """Runs with results by arm and seed."""
        return {(run.arm, run.seed): run for run in self.done}

    @property
    def missing(self) -> int:
        """Number of runs that the next analysis needs and that have not finished."""
        return sum(run.state == "missing" for run in self.runs)
