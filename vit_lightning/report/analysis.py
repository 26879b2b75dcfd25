"""What an ablation says: each arm, each arm against the baseline, and where the spread comes from."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from vit_lightning.report.study import Study, Trial
from vit_lightning.report.variance import Components, Effect, McNemar, components, factor_effects, mcnemar

Table = NDArray[Any]


@dataclass(frozen=True)
class Arm:
    """An arm with what its runs came to."""

    name: str
    overrides: dict[str, Any]
    trials: list[Trial]
    values: dict[int, float]
    """What is reported, by seed; of the runs that are done."""
    components: Components | None
    """Of right and wrong over seeds and test images."""

    @cached_property
    def done(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.seed in self.values]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values()))) if self.values else math.nan

    @property
    def sd(self) -> float:
        return spread(np.array(list(self.values.values())))

    def median(self, key: str) -> float:
        """Of a cost over the runs; nan where no run has it."""
        found = [float(trial.results[key]) for trial in self.done if trial.results.get(key) is not None]
        return float(np.median(found)) if found else math.nan


@dataclass(frozen=True)
class Against:
    """An arm against the baseline."""

    arm: str
    claim: Comparison
    first_verdict: Verdict | None
    """At the second look, what the first one said."""
    seeds_needed: int | None
    """Seeds to add until a claim has 80 % power; 0 where one was made, None where that cannot be said."""
    between: bool
    """Whether seeds are enough for either claim and none was made: then they are counted for the difference seen."""
    differences: dict[int, float]
    """Arm minus baseline for each seed that both have."""
    p_sign_flip: float
    sign_flip_can: bool
    """Whether the sign-flip test could get under the level at all, with so few pairs and so many arms."""
    p_welch: float
    correlation: float
    """Between the two arms over the seeds."""
    visible: float
    """True difference that the study would see with 80 % power."""
    components: Components | None
    """Of the difference in right and wrong over seeds and test images."""
    single_runs: dict[int, McNemar]
    """Both runs of a seed on the test images."""


@dataclass(frozen=True)
class Analysis:
    """All numbers of the report."""

    study: Study
    rules: Rules
    arms: list[Arm]
    against: list[Against]
    effects: list[Effect]
    no_components: str | None
    """Why there are no variance components."""

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.name == self.study.baseline)

    @property
    def undecided(self) -> list[Against]:
        return [one for one in self.against if one.claim.verdict == "undecided"]


def analyse(study: Study) -> Analysis:
    """Compares what the runs of a study came to; runs that are not there are left out, pair by pair."""
    looks = len(study.seeds), len(study.added_seeds)
    rules = Rules(study.alpha, study.smallest_effect, study.goal, *looks, over=not study.missing)
    tables, why = _read_tables(study)
    arms = []
    for name, overrides in study.arms.items():
        trials = [trial for trial in study.trials if trial.arm == name]
        values = {trial.seed: float(trial.results[study.report]) for trial in trials if _has(trial, study.report)}
        own = [tables[name, seed] for seed in values if (name, seed) in tables]
        arms.append(Arm(name, overrides, trials, values, components(np.stack(own)) if len(own) > 1 else None))
    return Analysis(study, rules, arms, _against(study, rules, arms, tables), _effects(study, rules, arms), why)


def _has(trial: Trial, metric: str) -> bool:
    value = trial.results.get(metric)
    return trial.state == "done" and isinstance(value, int | float) and math.isfinite(value)


def _against(study: Study, rules: Rules, arms: Sequence[Arm], tables: Mapping[Any, Table]) -> list[Against]:
    baseline = next(arm for arm in arms if arm.name == study.baseline)
    others = [arm for arm in arms if arm is not baseline]
    pairs = [_pairs(arm, baseline, arm.values) for arm in others]
    claims = judge([first - second for first, second in pairs], rules)
    before = _first_verdicts(study, rules, others, baseline)
    found = []
    for arm, claim, earlier, (first, second) in zip(others, claims, before, pairs, strict=True):
        seeds = [seed for seed in arm.values if seed in baseline.values]
        both = {
            seed: (tables[arm.name, seed].astype(bool), tables[baseline.name, seed].astype(bool))
            for seed in seeds
            if (arm.name, seed) in tables and (baseline.name, seed) in tables
        }
        gaps = [one.astype(float) - other for one, other in both.values()]
        needed = seeds_needed(claim, rules, len(others))
        between = needed == 0 and claim.verdict == "undecided"
        found.append(
            Against(
                arm.name,
                claim,
                earlier,
                seeds_to_tell(claim, rules, len(others)) if between else needed,
                between,
                dict(zip(seeds, (first - second).tolist(), strict=True)),
                sign_flip_p(first - second),
                least_sign_flip_p(claim.n) <= rules.level / len(others),
                welch_p(np.array(list(arm.values.values())), np.array(list(baseline.values.values()))),
                correlation(first, second),
                visible_difference(claim.n, claim.sd, rules.level / len(others)),
                components(np.stack(gaps)) if len(gaps) > 1 else None,
                {seed: mcnemar(*tables) for seed, tables in both.items()},
            )
        )
    return found


def _first_verdicts(study: Study, rules: Rules, arms: Sequence[Arm], baseline: Arm) -> list[Verdict | None]:
    if study.looks == 1:
        return [None] * len(arms)
    pairs = [_pairs(arm, baseline, study.seeds) for arm in arms]
    claims = judge([first - second for first, second in pairs], replace(rules, added=0, over=True))
    return [claim.verdict for claim in claims]


def _pairs(arm: Arm, baseline: Arm, among: Iterable[int]) -> tuple[Values, Values]:
    seeds = [seed for seed in among if seed in arm.values and seed in baseline.values]
    return np.array([arm.values[seed] for seed in seeds]), np.array([baseline.values[seed] for seed in seeds])


def _effects(study: Study, rules: Rules, arms: Sequence[Arm]) -> list[Effect]:
    """Of a full grid of two or more factors; the levels of the baseline come first."""
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


def _read_tables(study: Study) -> tuple[dict[tuple[str, int], Table], str | None]:
    """Right or wrong for each test image of each run, and why there is none."""
    if study.report != "test/acc":
        return {}, f"{study.report} is no accuracy"
    found: dict[tuple[str, int], Table] = {}
    first: tuple[Table, Table] | None = None
    for trial in study.trials:
        path = study.folder / trial.folder / "test_predictions.npz"
        if trial.state != "done" or not path.is_file():
            continue
        try:
            with np.load(path) as file:
                index, label, prediction = file["index"], file["label"], file["prediction"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return {}, f"{path} cannot be read"
        first = first or (index, label)
        if not (np.array_equal(index, first[0]) and np.array_equal(label, first[1])):
            return {}, f"{trial.arm} with seed {trial.seed} has other test images than the runs before it"
        found[trial.arm, trial.seed] = label == prediction
    return found, None if found else "no run has kept what it said of each test image"
