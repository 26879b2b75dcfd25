"""Forecast of an ablation: what it can show and what that costs, before its first runs and after its first pairs."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.comparisons import ArmComparison, compare, design_of, read_predictions
from vit_lightning.report.sequential import Course, Flags, at, follow, visible_difference
from vit_lightning.report.study import Compare, Study
from vit_lightning.report.wording import show_time, unit_of

POWER = 0.8
"""Probability of finding a difference, above which a study counts as able to show it."""
FEWEST = 3
"""Pairs from which the spread of their differences is taken."""


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the difference of a pair of runs, and where it comes from."""

    sd: float
    pairs: int = 0
    """Pairs of runs that it was measured with; 0 where it is assumed."""
    images: int | None = None
    """Test images of a run, where the metric counts them."""
    disagreement: float | None = None
    """Share of the test images that one run of a pair gets right and the other wrong; None if the differences vary more
    than it explains, or the metric counts no images."""


@dataclass(frozen=True)
class Forecast:
    """Means over simulated studies."""

    runs: float
    """Training runs of a study."""
    answered: float
    """Share of the comparisons that are decided by the last analysis; of the arms, where the best is looked for."""
    better: float
    """Share of the comparisons with a true difference in which it is found; in all of them, if there is none."""


@dataclass(frozen=True)
class Outlook:
    """Forecast of what a study can show by its last analysis, and of its runs."""

    compare: Compare
    spread: Spread
    visible: float
    """Improvement that is found with a probability of ``POWER``."""
    alike: Forecast
    """If all arms are alike."""
    differ: Forecast
    """If each arm is better than the baseline by the smallest effect; else one arm than all others."""
    most: int
    """Runs if nothing is decided before the last analysis."""

    @property
    def is_able(self) -> bool:
        """Whether the study can show the smallest effect."""
        return self.visible <= self.compare.smallest_effect

    @property
    def runs(self) -> tuple[float, float]:
        """Expected runs of the study, the fewer and the more of both cases."""
        few, many = sorted((self.alike.runs, self.differ.runs))
        return few, many


def assumed_spread(rules: Compare, images: int | None, accuracy: float = math.nan) -> Spread | None:
    """Returns the spread by ``compare.disagreement``; None if the metric counts no images.

    A pair of runs that disagree on a share of the images have a difference with the variance share / images, if it is
    left to chance on each of these images which of the two is right.

    Args:
        rules: rules of the comparison.
        images: test images of a run; None if nobody knows.
        accuracy: of the baseline; two runs can disagree on twice as many images as one gets wrong.
    """
    facts = facts_of(rules.metric)
    if images is None or facts is None or not facts.counts_images:
        return None
    limit = 2 * min(accuracy, 1 - accuracy)
    share = rules.disagreement if math.isnan(limit) else min(rules.disagreement, limit)
    share = max(share, 0.5 / images)
    return Spread(math.sqrt(share / images), 0, images, share)


def measured_spread(study: Study) -> Spread | None:
    """Returns the spread by the pairs of runs so far; None where they are too few.

    Of accuracies one pair is enough: it is the share of the test images on which its runs disagree. Where the
    differences vary more than that explains (chi-squared test at 5 %), as where seeds matter, and for other metrics,
    it is that of the differences, from three pairs of one comparison on.
    """
    comparisons = compare(study)
    shares = [share for one in comparisons for share in _disagreements(study, one)]
    images = next((one.images for one in comparisons if one.images), None)
    seen = [values for one in comparisons if len(values := list(one.differences.values())) >= FEWEST]
    squares = sum(float(np.var(values)) * len(values) for values in seen)
    freedom = sum(len(values) - 1 for values in seen)
    pairs = sum(map(len, seen))
    spread = None
    if shares and images:
        share = max(float(np.mean(shares)), 0.5 / images)
        spread = Spread(math.sqrt(share / images), len(shares), images, share)
    if not freedom or squares == 0:
        return spread
    if spread is not None and special.chdtrc(freedom, squares / spread.sd**2) > 0.05:
        return spread
    return Spread(math.sqrt(squares / freedom), pairs, images)


def _disagreements(study: Study, one: ArmComparison) -> list[float]:
    """Returns for each pair the share of the test images that one of its runs gets right and the other wrong.

    What a difference of the arms itself explains is left out, as in the variance of a paired difference of shares.
    """
    if study.compare.metric != "test/acc":  # whether the label is among the first five is not kept
        return []
    folders = {(run.arm, run.seed): study.folder / run.folder for run in study.done}
    shares = []
    for seed in one.differences:
        first, other = (_read_correct(folders[arm, seed]) for arm in (one.arm, one.other))
        if first is not None and other is not None and len(first) == len(other):
            shares.append(float(np.mean(first != other)) - (float(np.mean(first)) - float(np.mean(other))) ** 2)
    return shares


@functools.lru_cache(maxsize=1024)
def _read_correct(folder: Path) -> NDArray[np.bool_] | None:
    """Returns which test images a run that is done has got right; None if that was not kept."""
    found = read_predictions(folder)
    if found is None:
        return None
    _, label, prediction = found
    correct: NDArray[np.bool_] = label == prediction
    return correct


def known_accuracy(study: Study) -> float:
    """Returns the accuracy of the baseline by its runs so far, else by its tuning; nan before that."""
    found = [float(run.results[study.compare.metric]) for run in study.done if run.arm == study.baseline]
    facts = facts_of(study.metric)
    if not found and study.tuning is not None and facts is not None and facts.counts_images:
        trials = [trial for trial in study.tuning.trials if trial.arm == study.baseline]
        return max((trial.value for trial in trials if trial.value is not None), default=math.nan)
    return float(np.mean(found)) if found else math.nan


@functools.lru_cache
def make_outlook(rules: Compare, arms: int, spread: Spread) -> Outlook:
    """Simulates studies by their rules.

    Args:
        rules: rules of the comparisons.
        arms: number of arms, the baseline included.
        spread: spread of the differences.
    """
    visible = visible_difference(design_of(rules, arms), spread.sd, POWER)
    alike, differ = (expect(rules, arms, spread.sd, truth) for truth in (0.0, rules.smallest_effect))
    return Outlook(rules, spread, visible, alike, differ, arms * rules.max_seeds)


def expect(rules: Compare, arms: int, sd: float, truth: float) -> Forecast:
    """Returns the means over simulated studies with normal results.

    Args:
        rules: rules of the comparisons.
        arms: number of arms, the baseline included.
        sd: standard deviation of the paired differences.
        truth: true difference of each arm to the baseline; for pairs and best, of the last arm to all others.
    """
    design, alone = design_of(rules, arms), rules.arms == "baseline"
    studies = max(50, min(1000, 10_000 // (arms if alone else arms**2)))
    results = np.random.default_rng(0).standard_normal((studies, arms, design.max_pairs)) * sd / math.sqrt(2)
    results[:, 1 if alone else -1 :] += truth
    if rules.arms == "best":
        return _expect_race(follow(results[:, :, None] - results[:, None], design))
    pairs = [(arm, other) for other, arm in itertools.combinations(range(arms), 2) if not (alone and other)]
    arm, other = np.array(pairs).T
    course = follow(results[:, arm] - results[:, other], design)
    decided, better = (at(flags, course.stop) for flags in (course.decided, course.claims["better"]))
    last = np.array(course.pairs)[course.stop]
    runs = sum(last[:, (arm == one) | (other == one)].max(-1).mean() for one in range(arms))
    return Forecast(float(runs), float(decided.mean()), float(better[:, alone | (arm == arms - 1)].mean()))


def _expect_race(course: Course) -> Forecast:
    """Returns the means over races for the best: an arm that another one beats ends, the others go on together.

    Args:
        course: course of all differences between arms, (studies, arms, arms, analyses).
    """
    worse, not_worse = course.claims["worse"], course.claims["not worse"]
    left: Flags = np.ones(worse.shape[:2], dtype=bool)
    racing, before, runs, decided = left, 0, np.zeros(len(left)), left
    for number, n in enumerate(course.pairs):
        runs += racing.sum(-1) * (n - before)
        rivals = left[:, :, None] & left[:, None] & ~np.eye(left.shape[1], dtype=bool)
        left = np.asarray(left & ~(racing & (worse[..., number] & rivals).any(-1)))
        decided = (not_worse[..., number] | ~(rivals & left[:, None])).all(-1) | ~left
        racing, before = np.asarray(left & (racing & ~decided).any(-1, keepdims=True)), n
    return Forecast(float(runs.mean()), float(decided.mean()), float((~left[:, :-1]).mean()))


def forecast_of(study: Study) -> Outlook | None:
    """Returns what the study can show by the pairs of runs so far; None where they are too few to say."""
    spread = measured_spread(study)
    return None if spread is None else make_outlook(study.compare, len(study.arms), spread)


def forecast_sentences(outlook: Outlook, seconds: float | None = None) -> list[str]:
    """Describes what a study can show, what that costs, and if it cannot show what is asked, what could.

    Args:
        outlook: what it can show.
        seconds: time of the study for each of its runs; None if nobody knows.
    """
    rules, spread = outlook.compare, outlook.spread
    unit = unit_of(rules.metric)
    effect, visible = unit.plain(rules.smallest_effect), unit.rounded(outlook.visible)
    seeds, power = rules.max_seeds, f"{100 * POWER:.0f} %"
    found = _percent(outlook.differ.better)
    alike, differ = (f"{runs:.0f} runs" for runs in (outlook.alike.runs, outlook.differ.runs))
    who = "each arm is" if rules.arms == "baseline" else "one arm is"
    lines = [
        _source(spread, unit.rounded(spread.sd)),
        f"{seeds} seeds show an improvement of {visible} with {power} power, of {effect} with {found}",
        f"about {alike} if the arms are alike ({_percent(outlook.alike.answered)} of them answered), {differ} if {who} "
        f"better by {effect}; at most {outlook.most}{_time(outlook, seconds)}",
    ]
    if not outlook.is_able:
        lines.append(_advice(outlook))
    return lines


def _source(spread: Spread, sd: str) -> str:
    """Says by how much two runs differ, and where that comes from."""
    measured = f"measured on {'a pair' if spread.pairs == 1 else f'{spread.pairs} pairs'} of runs"
    if spread.disagreement is None:
        return f"the differences of two runs have a standard deviation of {sd} ({measured})"
    where = measured if spread.pairs else "compare.disagreement"
    share = f"{_percent(spread.disagreement)} of {spread.images:,} test images"
    return f"two runs disagree on {share} ({where}), so two runs differ by {sd} (standard deviation)"


def _advice(outlook: Outlook) -> str:
    """Says plainly that the study cannot show its smallest effect, and what would."""
    rules, spread, unit = outlook.compare, outlook.spread, unit_of(outlook.compare.metric)
    factor = (outlook.visible / rules.smallest_effect) ** 2
    cannot = f"{unit.rounded(outlook.visible)} with {rules.max_seeds} seeds, not {unit.plain(rules.smallest_effect)}"
    seeds = f"compare.max_seeds to about {_rounded(factor * rules.max_seeds)}"
    if spread.disagreement is None or spread.images is None:
        return f"these runs show {cannot}: raise compare.smallest_effect, or {seeds}"
    images = f"{spread.images:,} test images at {_percent(spread.disagreement)} disagreement show {cannot}"
    more = f"take about {_rounded(factor * spread.images):,} test images"
    return f"{images}: raise compare.smallest_effect, or {seeds}, or {more}"


def _rounded(number: float) -> int:
    """Rounds up to two significant digits."""
    unit: int = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _time(outlook: Outlook, seconds: float | None) -> str:
    if seconds is None:
        return ""
    few, many = (show_time(seconds * runs) for runs in outlook.runs)
    return f": {few}" if few == many else f": {few} to {many}"
