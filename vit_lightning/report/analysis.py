"""Numbers of an ablation: each arm, each arm against the baseline, the effects of factors, the sources of variance."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_lightning.config.files import word
from vit_lightning.report.statistics import (
    Comparison,
    Rules,
    Values,
    Verdict,
    correlation,
    judge,
    least_sign_flip_p,
    seeds_needed,
    seeds_to_tell,
    sign_flip_p,
    spread,
    visible_difference,
    welch_p,
)
from vit_lightning.report.study import Run, Study
from vit_lightning.report.variance import Components, Effect, McNemar, components, factor_effects, mcnemar

Correct = Mapping[tuple[str, int], NDArray[np.bool_]]
"""Correctness of the prediction for each test image, by arm and seed."""


@dataclass(frozen=True)
class Arm:
    """An arm with the results of its runs."""

    name: str
    overrides: dict[str, Any]
    runs: list[Run]
    values: dict[int, float]
    """The reported metric by seed, of the runs that are done."""
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

    def at(self, seeds: Sequence[int] | Mapping[int, float]) -> Values:
        """Returns the values of some seeds."""
        return np.array([self.values[seed] for seed in seeds])

    def median(self, key: str) -> float:
        """Returns the median of a cost over the runs; nan where no run has it."""
        costs = [run.results.get(key) for run in self.runs if run.seed in self.values]
        found = [float(cost) for cost in costs if cost is not None]
        return float(np.median(found)) if found else math.nan


@dataclass(frozen=True)
class ArmComparison:
    """Comparison of an arm with the baseline."""

    arm: str
    claim: Comparison
    first_verdict: Verdict | None
    """Verdict of the first analysis; None unless this is the second."""
    seeds_needed: int | None
    """Seeds to add until a claim has 80 % power; 0 where one was made, None where the number cannot be computed."""
    between: bool
    """Whether nothing was claimed although there are enough seeds for either claim; ``seeds_needed`` is then for the
    observed difference."""
    differences: dict[int, float]
    """Arm minus baseline for each seed that both have."""
    p_sign_flip: float
    sign_flip_can_claim: bool
    """Whether the sign-flip test can reach the level at all with this many pairs and arms."""
    p_welch: float
    correlation: float
    """Pearson's, between arm and baseline over the seeds."""
    visible: float
    """True difference that the study detects with 80 % power."""
    components: Components | None
    """Variance components of the difference in correctness over seeds and test images."""
    single_runs: dict[int, McNemar]
    """The two runs of each seed, compared on the test images."""


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report."""

    study: Study
    rules: Rules
    arms: list[Arm]
    comparisons: list[ArmComparison]
    effects: list[Effect]
    no_components: str | None
    """Reason why there are no variance components."""


def analyse(study: Study) -> Analysis:
    """Compares the arms of a study; a seed counts only where both arms of a pair have a result."""
    seeds = len(study.seeds), len(study.added_seeds)
    rules = Rules(study.alpha, study.smallest_effect, study.goal, *seeds, complete=not study.missing)
    correct, why = _read_correct(study)
    arms = []
    for name, overrides in study.arms.items():
        runs = [run for run in study.runs if run.arm == name]
        values = {run.seed: float(run.results[study.report]) for run in runs if run.state == "done"}
        own = [correct[name, seed] for seed in values if (name, seed) in correct]
        arms.append(Arm(name, overrides, runs, values, _components(own)))
    return Analysis(study, rules, arms, _compare(study, rules, arms, correct), _effects(study, rules, arms), why)


def _components(tables: Sequence[NDArray[Any]]) -> Components | None:
    return components(np.stack(tables)) if len(tables) > 1 else None


def _compare(study: Study, rules: Rules, arms: Sequence[Arm], correct: Correct) -> list[ArmComparison]:
    baseline = next(arm for arm in arms if arm.name == study.baseline)
    others = [arm for arm in arms if arm is not baseline]
    pairs = [[seed for seed in arm.values if seed in baseline.values] for arm in others]
    gaps = [arm.at(seeds) - baseline.at(seeds) for arm, seeds in zip(others, pairs, strict=True)]
    early = [gap[np.isin(seeds, study.seeds)] for gap, seeds in zip(gaps, pairs, strict=True)]
    firsts = judge(early, replace(rules, added=0, complete=True))
    found = []
    for arm, seeds, gap, claim, first in zip(others, pairs, gaps, judge(gaps, rules), firsts, strict=True):
        tested = [seed for seed in seeds if {(arm.name, seed), (baseline.name, seed)} <= correct.keys()]
        both = {seed: (correct[arm.name, seed], correct[baseline.name, seed]) for seed in tested}
        needed = seeds_needed(claim, rules, len(others))
        between = needed == 0 and claim.verdict == "undecided"
        found.append(
            ArmComparison(
                arm=arm.name,
                claim=claim,
                first_verdict=first.verdict if study.added_seeds else None,
                seeds_needed=seeds_to_tell(claim, rules, len(others)) if between else needed,
                between=between,
                differences=dict(zip(seeds, gap.tolist(), strict=True)),
                p_sign_flip=sign_flip_p(gap),
                sign_flip_can_claim=least_sign_flip_p(claim.n) <= rules.level / len(others),
                p_welch=welch_p(arm.at(arm.values), baseline.at(baseline.values)),
                correlation=correlation(arm.at(seeds), baseline.at(seeds)),
                visible=visible_difference(claim.n, claim.sd, rules.level / len(others)),
                components=_components([one.astype(float) - other for one, other in both.values()]),
                single_runs={seed: mcnemar(*pair) for seed, pair in both.items()},
            )
        )
    return found


def _effects(study: Study, rules: Rules, arms: Sequence[Arm]) -> list[Effect]:
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
    return factor_effects(ordered, results, rules.interval_level)


def _read_correct(study: Study) -> tuple[Correct, str | None]:
    """Returns the correctness of each run on each test image, and why there is none."""
    if study.report != "test/acc":
        return {}, f"{study.report} is not an accuracy"
    found: dict[tuple[str, int], NDArray[np.bool_]] = {}
    first: tuple[NDArray[Any], NDArray[Any]] | None = None
    for run in study.runs:
        path = study.folder / run.folder / "test_predictions.npz"
        if run.state != "done" or not path.is_file():
            continue
        try:
            with np.load(path) as file:
                index, label, prediction = file["index"], file["label"], file["prediction"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return {}, f"{path} cannot be read"
        first = first or (index, label)
        if not (np.array_equal(index, first[0]) and np.array_equal(label, first[1])):
            return {}, f"{run.arm} with seed {run.seed} has other test images than the runs before it"
        found[run.arm, run.seed] = label == prediction
    return found, None if found else "no run has kept its predictions of the test images"
