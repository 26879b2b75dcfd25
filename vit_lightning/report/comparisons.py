"""Comparisons of the arms of a study by its finished runs alone, so that every process that reads them agrees."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.sequential import FIRST, Claim, Course, Design, Values, follow, p_value, variances_by_others
from vit_lightning.report.study import Compare, Run, Study

Verdict = Literal["better", "worse", "equivalent", "not better", "not worse", "undecided", "failed"]
Rank = Literal["the best", "among the best", "not the best", "undecided", "failed"]


@dataclass(frozen=True)
class ArmComparison:
    """Comparison of an arm with another, paired by seed.

    Numbers are those of the analysis that decided it, else of the latest; before the first, of the pairs so far. They
    are arm minus other in the metric's own units, nan where there are too few pairs, or no interval.
    """

    arm: str
    other: str
    study: Study
    design: Design
    differences: dict[int, float]
    """Arm minus other for each seed that has results of both."""
    complete: int
    """Pairs before the first seed with a run that has not ended; only these count. Seeds with a failed run are none."""
    course: Course
    """Course over the analyses so far, of improvements: where less is better, other minus arm."""
    analysis: int | None
    """Place in the course of the analysis behind the numbers."""
    decided: bool
    """Whether the comparison needs no more runs: it is answered, or an answer has become unlikely."""
    images: int | None
    """Test images of each run, where the metric counts them and all have the same number."""
    by_others: Values
    """Variance of the differences by the first runs of the other arms; nan where they tell none: ()."""

    @functools.cached_property
    def failed(self) -> list[Run]:
        """Runs of both arms that have failed, seed by seed."""
        ours = [run for run in self.study.runs if run.arm in (self.arm, self.other) and run.seed in self.study.seeds]
        return sorted((run for run in ours if run.state == "failed"), key=lambda run: run.seed)

    def _whole(self, pairs: int) -> list[int]:
        """Returns the places of the seeds without a failed run, from 1 on, among those that some pairs may take."""
        failed = {run.seed for run in self.failed}
        return [place for place, seed in enumerate(self.study.seeds[: most_seeds(pairs)], 1) if seed not in failed]

    def seeds_for(self, pairs: int) -> int:
        """Returns how many seeds of the plan some pairs take, with those of failed runs; at most ``most_seeds``.

        Where too many have failed it is the place of the failure after which the others are too few.
        """
        whole, most = self._whole(pairs), min(most_seeds(pairs), len(self.study.seeds))
        return whole[pairs - 1] if len(whole) >= pairs else sorted({*range(1, most + 1)} - {*whole})[most - pairs]

    @property
    def blocked(self) -> bool:
        """Whether so many runs have failed that the seeds of the next analysis do not hold its pairs."""
        return self.next is not None and len(self._whole(self.next)) < self.next

    @property
    def n(self) -> int:
        """Pairs behind the numbers."""
        return self.complete if self.analysis is None else self.course.pairs[self.analysis]

    @property
    def counted(self) -> dict[int, float]:
        """Differences behind the numbers."""
        return dict(itertools.islice(self.differences.items(), self.n))

    @property
    def next(self) -> int | None:
        """Pairs of the next analysis; None where there is none."""
        later = () if self.decided else self.design.analyses[len(self.course.pairs) :]
        return next(iter(later), None)

    @property
    def is_open(self) -> bool:
        """Whether more runs may decide it."""
        return self.next is not None and not self.blocked

    @property
    def claims(self) -> list[Claim]:
        """Claims made by the analysis behind the numbers."""
        if self.analysis is None:
            return []
        return [name for name, made in self.course.claims.items() if made[self.analysis]]

    @property
    def verdict(self) -> Verdict:
        """The strongest claim."""
        claims = self.claims
        if "better" in claims or "worse" in claims:
            return "better" if "better" in claims else "worse"
        if len(claims) == 2:
            return "equivalent"
        return claims[0] if claims else "failed" if self.blocked else "undecided"

    @property
    def mean(self) -> float:
        """Mean difference, not corrected for the choice of the time to stop."""
        return float(np.mean(list(self.counted.values()))) if self.n else math.nan

    @property
    def sd(self) -> float:
        """Standard deviation of the differences."""
        return math.nan if self.analysis is None else float(self.course.sd[self.analysis])

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """The values that all repeated confidence intervals so far share; excludes zero if it is better or worse.

        The intervals hold at all analyses at once, and so does what they share, which more runs do not widen. Where the
        mean has left that (an early deviation was too small, by chance), it is the interval of this analysis alone.
        """
        return self._ends(*self._shared)

    @functools.cached_property
    def _shared(self) -> tuple[float, float]:
        """The interval, of improvements."""
        if self.analysis is None:
            return math.nan, math.nan
        seen = slice(self.analysis + 1)
        low, high = float(self.course.low[seen].max()), float(self.course.high[seen].min())
        if low <= self.course.mean[self.analysis] <= high:
            return low, high
        low, high = self._at("low", "high")
        return low, high

    @property
    def low(self) -> float:
        return self._range[0]

    @property
    def high(self) -> float:
        return self._range[1]

    @functools.cached_property
    def _range(self) -> tuple[float, float]:
        """The interval, but for an end beyond what a claim excludes: that is the one-sided bound of the claim's level.

        So it has no difference that a claim excludes, and excludes zero exactly if the verdict is better or worse.
        """
        if self.analysis is None:
            return self.interval
        effect, (low, high), (floor, ceiling) = self.design.smallest_effect, self._shared, self._at("floor", "ceiling")
        if "not better" in self.claims and high >= effect:
            high = min(effect, max(ceiling, 0.0))
        if "not worse" in self.claims and low <= -effect:
            low = max(-effect, min(floor, 0.0))
        return self._ends(low, high)

    def _at(self, *names: str) -> list[float]:
        """Returns values of the course at the analysis behind the numbers."""
        return [float(getattr(self.course, name)[self.analysis]) for name in names]

    def _ends(self, low: float, high: float) -> tuple[float, float]:
        """Returns the ends of an interval of improvements as differences; nan for both where one is infinite."""
        if not math.isfinite(high - low):
            return math.nan, math.nan
        return (low, high) if self.study.goal == "maximize" else (-high, -low)

    def mirrored(self) -> ArmComparison:
        """Returns the comparison of the other with the arm."""
        differences = {seed: -value for seed, value in self.differences.items()}
        return replace(self, arm=self.other, other=self.arm, course=self.course.mirrored(), differences=differences)

    @functools.cached_property
    def p(self) -> float:
        """p of a difference on the scale of the study's alpha, corrected for all comparisons and analyses."""
        return p_value(np.array(list(self.counted.values())), self.design, self.by_others)


@dataclass(frozen=True)
class Standing:
    """Standing of an arm among all, of a study that looks for the best.

    The interval is for the difference to the best of the other arms (Hsu 1984, Annals of Statistics 12), simultaneous
    over arms and analyses: it ends at zero where the arm is not the best, or the best. Of arms that are exactly alike,
    one counts as the best.
    """

    arm: str
    n: int
    """Runs of the arm that are done."""
    verdict: Rank
    """The best: all others are worse than some arm. Among the best: not worse by the smallest effect than any arm that
    may be the best."""
    decided: bool
    mean: float
    low: float
    high: float


def design_of(rules: Compare, arms: int) -> Design:
    """Returns the rules of each comparison in a study of so many arms."""
    count = arms * (arms - 1) // 2 if rules.arms == "pairs" else arms - 1
    best = rules.arms == "best"
    spending, extended = rules.spending or "early", rules.extended
    most, until = rules.max_seeds, rules.until
    return Design(rules.smallest_effect, rules.alpha, max(1, count), most, until, best, spending, extended)


def compare(study: Study) -> list[ArmComparison]:
    """Compares the arms of a study as its plan says: with the baseline, or all pairs of them."""
    arms, rules = list(study.arms), study.compare
    others = [arm for arm in arms if arm != study.baseline]
    pairs = [(arm, study.baseline) for arm in others]
    if rules.arms != "baseline":
        pairs = [(arm, other) for other, arm in itertools.combinations(arms, 2)]
    best, design = rules.arms == "best", design_of(rules, len(arms))
    found = _compare_pairs(study, pairs, design)
    if not best:
        return found
    known = {standing.arm: standing for standing in standings(study, found)}
    done = [_is_settled(known[one.arm], known[one.other]) for one in found]
    return [replace(one, decided=settled) for one, settled in zip(found, done, strict=True)]


def _is_settled(one: Standing, other: Standing) -> bool:
    """Whether two arms need not be compared any longer: one that is not the best matters to no other."""
    return "not the best" in (one.verdict, other.verdict) or (one.decided and other.decided)


def most_seeds(pairs: int) -> int:
    """Returns how many seeds an analysis may take for its pairs: others replace those of which a run has failed."""
    return pairs + pairs // 2


def _complete_pairs(study: Study, differences: Mapping[int, float], failed: set[int]) -> int:
    """Returns the number of pairs before the first seed with a run that has not ended."""
    ended = itertools.takewhile(lambda seed: seed in differences or seed in failed, study.seeds)
    return sum(seed in differences for seed in ended)


def _compare_pairs(study: Study, pairs: Sequence[tuple[str, str]], design: Design) -> list[ArmComparison]:
    """Compares pairs of arms; those with as many differences are followed together, which takes far less time."""
    done = {(run.arm, run.seed): run for run in study.done}
    sign = 1 if study.goal == "maximize" else -1
    differences = [_differences(study, done, *pair) for pair in pairs]
    failed = {arm: {run.seed for run in study.runs if (run.arm, run.state) == (arm, "failed")} for arm in study.arms}
    complete = [
        _complete_pairs(study, found, failed[arm] | failed[other])
        for (arm, other), found in zip(pairs, differences, strict=True)
    ]
    known, waits = _variances_by_others(study), len(study.arms) > 2 and variance_arms(study) is None
    by_others = np.array([known[pair] for pair in pairs])
    courses: dict[int, Course] = {}
    for count in {*complete}:
        places = [place for place, other in enumerate(complete) if other == count]
        table = np.array([[*itertools.islice(differences[place].values(), 0 if waits else count)] for place in places])
        course = follow(sign * table.astype(np.float64), design, by_others[places])
        courses |= {place: course.of(row) for row, place in enumerate(places)}
    made = []
    for place, (arm, other) in enumerate(pairs):
        course, found = courses[place], differences[place]
        last = len(course.pairs) - 1 if design.one_sided else int(course.stop)
        decided = last >= 0 and not design.one_sided and bool((course.decided | course.unlikely)[last])
        sizes = {images_of(study, done[name, seed]) for name in (arm, other) for seed in found}
        size, analysis = sizes.pop() if len(sizes) == 1 else None, None if last < 0 else last
        rest = analysis, decided, size, by_others[place]
        made.append(ArmComparison(arm, other, study, design, found, complete[place], course, *rest))
    return made


def variance_arms(study: Study) -> list[str] | None:
    """Returns the arms whose first runs tell the variance of the others' differences; None before those have ended.

    They have results of all first seeds. After the first analysis they stay the same: what ends well after a failure
    changes no claim about other arms.
    """
    if study.variance_from is not None:
        return study.variance_from
    states = {(run.arm, run.seed): run.state for run in study.runs}
    first = {arm: {states.get((arm, seed), "missing") for seed in study.seeds[:FIRST]} for arm in study.arms}
    return None if "missing" in set().union(*first.values()) else [arm for arm in first if first[arm] == {"done"}]


def _variances_by_others(study: Study) -> dict[tuple[str, str], float]:
    """Returns the variance of the difference of two arms by the others, over the first seeds."""
    known, first = variance_arms(study), study.seeds[:FIRST]
    runs = [run for run in study.done if known is None or run.arm in known]
    used = {(run.arm, run.seed): float(run.results[study.compare.metric]) for run in runs}
    table = [[used.get((arm, seed), math.nan) for seed in first] for arm in study.arms]
    pairs = [(arm, other) for arm in study.arms for other in study.arms]
    return dict(zip(pairs, variances_by_others(np.array(table)).flat, strict=True))


def _differences(study: Study, done: Mapping[tuple[str, int], Run], arm: str, other: str) -> dict[int, float]:
    """Returns the differences of two arms; of counts, without their rounding errors."""
    facts, found = facts_of(study.compare.metric), {}
    counts = facts is not None and facts.counts_images
    for seed in study.seeds:
        pair = [done[name, seed] for name in (arm, other) if (name, seed) in done]
        if len(pair) < 2:
            continue
        value, subtracted = (float(run.results[study.compare.metric]) for run in pair)
        count, same = (images_of(study, run) for run in pair)
        if count is not None and count == same:
            found[seed] = (round(value * count) - round(subtracted * count)) / count
        else:
            found[seed] = round(value - subtracted, 6) if counts else value - subtracted  # kept in single precision
    return found


def images_of(study: Study, run: Run) -> int | None:
    """Returns the number of test images of a run; None where it is unknown or the metric does not count images."""
    facts = facts_of(study.compare.metric)
    known: int | None = run.results.get("test_images") if facts is not None and facts.counts_images else None
    return known


def read_predictions(folder: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Returns index, label and prediction of each test image, as a run has kept them; None if they cannot be read."""
    try:
        with np.load(folder / "test_predictions.npz") as file:
            return file["index"], file["label"], file["prediction"]
    except Exception:  # there is no end to what a damaged file raises
        return None


def checksum(predictions: Sequence[NDArray[Any]]) -> str:
    """Returns the checksum of what ``read_predictions`` returns."""
    return hashlib.sha256(b"".join(one.tobytes() for one in predictions)).hexdigest()


def are_first(run: Run, predictions: Sequence[NDArray[Any]]) -> bool:
    """Whether predictions are those of a run's first result, as those of a second one do not count."""
    return run.predictions in (None, checksum(predictions))


def standings(study: Study, comparisons: Sequence[ArmComparison]) -> list[Standing]:
    """Returns the standing of each arm of a study that looks for the best.

    With probability 1 - alpha no comparison of the arm that is truly best shows it too low; all that is said here
    follows from these k - 1 comparisons, whichever they are, so that all pairs need no correction.
    """
    both = [*comparisons, *(one.mirrored() for one in comparisons)]
    dropped = {one.arm for one in both if "worse" in one.claims}
    return [_standing(study, arm, [one for one in both if one.arm == arm], dropped) for arm in study.arms]


def _standing(study: Study, arm: str, against: Sequence[ArmComparison], dropped: set[str]) -> Standing:
    rivals = [one for one in against if one.other not in dropped]
    rank: Rank = "failed" if any(one.blocked for one in rivals) else "undecided"
    if arm in dropped:
        rank = "not the best"
    elif not rivals:
        rank = "the best"
    elif all("not worse" in one.claims for one in rivals):
        rank = "among the best"
    decided, n = rank not in ("undecided", "failed"), sum(run.arm == arm for run in study.done)
    if not against or any(one.analysis is None for one in against):
        return Standing(arm, n, rank, decided, math.nan, math.nan, math.nan)
    sign = 1 if study.goal == "maximize" else -1
    mean = min(sign * one.mean for one in against)
    low = min((one._shared[0] for one in rivals), default=0.0)
    high = 0.0 if arm in dropped else min(one._shared[1] for one in against)
    low, high = (min(low, 0.0), max(high, 0.0)) if math.isfinite(high - low) else (math.nan, math.nan)
    return Standing(arm, n, rank, decided, sign * mean, *((low, high) if sign > 0 else (-high, -low)))
