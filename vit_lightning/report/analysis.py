"""Numbers of an ablation: its arms, their comparisons, the effects of factors, the sources of variance."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_lightning.config.files import word
from vit_lightning.report.comparisons import ArmComparison, Standing, compare, read_predictions, standings
from vit_lightning.report.sequential import Values
from vit_lightning.report.statistics import correlation, highest_rate, sign_flip_p, spread, welch_p
from vit_lightning.report.study import Run, Study
from vit_lightning.report.variance import Components, Effect, McNemar, components, factor_effects, mcnemar

Correct = Mapping[tuple[str, int], NDArray[np.bool_]]
"""Correctness of the prediction for each test image, by arm and seed."""


@dataclass(frozen=True)
class Collapsed:
    """Runs that ended near chance: below the midpoint between chance and the median accuracy of their arm."""

    seeds: list[int]
    runs: int
    """Runs of the arm with results."""
    below: float
    """The midpoint."""

    @property
    def highest(self) -> float:
        """Largest rate of collapse that these runs are compatible with: the one-sided 95 % limit."""
        return highest_rate(len(self.seeds), self.runs)


@dataclass(frozen=True)
class Arm:
    """An arm with the results of its runs."""

    name: str
    overrides: dict[str, Any]
    runs: list[Run]
    values: dict[int, float]
    """The compared metric by seed, of the runs that are done."""
    collapsed: Collapsed | None
    """None where the metric is no accuracy, or nothing is known of its classes."""
    components: Components | None
    """Variance components of correctness over seeds and test images."""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return float(np.mean(self.at(self.values))) if self.values else math.nan

    @property
    def sd(self) -> float:
        return spread(self.at(self.values))

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.state == "failed"]

    def at(self, seeds: Sequence[int] | Mapping[int, float]) -> Values:
        """Returns the values of some seeds."""
        return np.array([self.values[seed] for seed in seeds])

    def median(self, key: str) -> float:
        """Returns the median of a cost over the runs; nan where no run has it."""
        costs = [run.results.get(key) for run in self.runs if run.seed in self.values]
        found = [float(cost) for cost in costs if cost is not None]
        return float(np.median(found)) if found else math.nan


@dataclass(frozen=True)
class Beside:
    """Tests beside the claims of a comparison; they claim nothing and use its pairs."""

    comparison: ArmComparison
    p_sign_flip: float
    p_welch: float
    correlation: float
    """Pearson's, between the arms over the seeds."""
    components: Components | None
    """Variance components of the difference in correctness over seeds and test images."""
    single_runs: dict[int, McNemar]
    """The two runs of each seed, compared on the test images."""


@dataclass(frozen=True)
class TestSets:
    """Correctness on the test images, as the runs have kept it."""

    correct: Correct
    same: bool
    """Whether all runs have the same test images."""
    why: str | None
    """Reason why correctness cannot be compared over seeds; None where it can."""
    other: list[Run]
    """Runs whose test images are not those of other arms with the same seed."""
    classes: int | None


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report."""

    study: Study
    arms: list[Arm]
    comparisons: list[ArmComparison]
    standings: list[Standing]
    """One for each arm, of a study that looks for the best; else none."""
    beside: list[Beside]
    """One for each comparison."""
    effects: list[Effect]
    tested: TestSets

    @functools.cached_property
    def ranked(self) -> list[Arm]:
        """Arms with the best mean first, those without results last."""
        sign = -1 if self.study.goal == "maximize" else 1
        return sorted(self.arms, key=lambda arm: (not arm.n, sign * arm.mean if arm.n else 0.0))

    @functools.cached_property
    def ordered(self) -> list[ArmComparison]:
        """Comparisons in the order of ``ranked``; of pairs, the arm with the better mean comes first."""
        place = {arm.name: number for number, arm in enumerate(self.ranked)}
        found = self.comparisons
        if self.study.compare.arms != "baseline":
            found = [one if place[one.arm] < place[one.other] else one.mirrored() for one in found]
        return sorted(found, key=lambda one: (place[one.arm], place[one.other]))


def analyse(study: Study) -> Analysis:
    """Compares the arms of a study."""
    tested, comparisons = _read_test_sets(study), compare(study)
    arms = [_arm(study, name, tested) for name in study.arms]
    by_name = {arm.name: arm for arm in arms}
    return Analysis(
        study=study,
        arms=arms,
        comparisons=comparisons,
        standings=standings(study, comparisons) if study.compare.arms == "best" else [],
        beside=[_beside(one, by_name[one.arm], by_name[one.other], tested) for one in comparisons],
        effects=_effects(study, arms),
        tested=tested,
    )


def _arm(study: Study, name: str, tested: TestSets) -> Arm:
    runs = [run for run in study.runs if run.arm == name]
    values = {run.seed: float(run.results[study.compare.metric]) for run in runs if run.state == "done"}
    own = [tested.correct[name, seed] for seed in values if (name, seed) in tested.correct]
    collapsed = None
    if tested.classes and values and study.compare.metric == "test/acc":
        below = (1 / tested.classes + float(np.median(list(values.values())))) / 2
        collapsed = Collapsed([seed for seed, value in values.items() if value < below], len(values), below)
    return Arm(name, study.arms[name], runs, values, collapsed, _components(own, tested))


def _components(tables: Sequence[NDArray[Any]], tested: TestSets) -> Components | None:
    return components(np.stack(tables)) if len(tables) > 1 and tested.same else None


def _beside(one: ArmComparison, arm: Arm, other: Arm, tested: TestSets) -> Beside:
    seeds, gaps = [*one.counted], np.array([*one.counted.values()])
    both = {
        seed: (tested.correct[arm.name, seed], tested.correct[other.name, seed])
        for seed in seeds
        if {(arm.name, seed), (other.name, seed)} <= tested.correct.keys()
    }
    return Beside(
        comparison=one,
        p_sign_flip=sign_flip_p(gaps if one.images is None else np.rint(gaps * one.images)),
        p_welch=welch_p(arm.at(seeds), other.at(seeds)),
        correlation=correlation(arm.at(seeds), other.at(seeds)),
        components=_components([first.astype(float) - second for first, second in both.values()], tested),
        single_runs={seed: mcnemar(*pair) for seed, pair in both.items()},
    )


def _effects(study: Study, arms: Sequence[Arm]) -> list[Effect]:
    """Returns the effects of a full grid of two or more factors; the levels of the baseline come first."""
    factors = {key: levels for key, levels in study.factors.items() if len(levels) > 1}
    if len(factors) < 2:
        return []
    baseline = study.arms[study.baseline]
    ordered = {}
    for key, levels in factors.items():
        first = word(baseline.get(key))  # as words, since levels may be lists and mappings
        ordered[key] = [first, *(level for level in map(word, levels) if level != first)]
    results = {tuple(word(arm.overrides.get(key)) for key in ordered): arm.values for arm in arms}
    return factor_effects(ordered, results, study.compare.alpha)


def _read_test_sets(study: Study) -> TestSets:
    """Reads the correctness of each run on each test image."""
    if study.compare.metric != "test/acc":
        return TestSets({}, False, f"{study.compare.metric} is not an accuracy", [], None)
    correct: dict[tuple[str, int], NDArray[np.bool_]] = {}
    sets: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}  # index and label by seed
    other: list[Run] = []
    for run in study.done:
        path = study.folder / run.folder / "test_predictions.npz"
        if not path.is_file():
            continue
        kept = read_predictions(path.parent)
        if kept is None:
            return TestSets({}, False, f"{path} cannot be read", [], None)
        index, label, prediction = kept
        if not _equal(sets.setdefault(run.seed, (index, label)), (index, label)):
            other.append(run)
        correct[run.arm, run.seed] = label == prediction
    if other:
        which = f"{other[0].arm} with seed {other[0].seed}"
        return TestSets({}, False, f"{which} has other test images than the other arms with this seed", other, None)
    if not sets:
        return TestSets({}, False, "no run has kept its predictions of the test images", [], None)
    first = next(iter(sets.values()))
    same = all(_equal(first, images) for images in sets.values())
    why = None if same else "each seed has test images of its own"
    return TestSets(correct, same, why, [], len(np.unique(first[1])))


def _equal(first: tuple[NDArray[Any], ...], second: tuple[NDArray[Any], ...]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
