"""Comparisons of the arms of a study, and the runs that they need, by its finished runs alone.

Only the results of finished runs decide, in the order of the plan's seeds, never the order in which runs end: all
processes that share an ablation come to the same claims and the same runs, however often they are killed. For each
comparison that is open the seeds up to its next analysis are run, and none beyond.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from vit_lightning.report.sequential import Claim, Course, Design, follow, p_value
from vit_lightning.report.study import SIZES, Compare, Run, Study, arm_name

Verdict = Literal["better", "worse", "equivalent", "not better", "not worse", "undecided", "failed"]


@dataclass(frozen=True)
class ArmComparison:
    """Comparison of an arm with another, or of two levels together with the sum of what each does, paired by seed.

    Numbers are those of the analysis that decided it, else of the latest; before the first, of the pairs so far. They
    are arm minus other in the metric's own units, nan where there are too few pairs, or no interval.
    """

    arm: str
    other: str
    terms: dict[str, int]
    """Signs of the arms whose results make a difference: of arm and other; of an interaction, of four arms."""
    study: Study
    design: Design
    differences: dict[int, float]
    """Arm minus other for each seed that has results of all its arms."""
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

    @property
    def metric(self) -> str:
        return self.study.compare.metric

    @property
    def is_interaction(self) -> bool:
        """Whether it asks if the effects of two factors add up."""
        return len(self.terms) == 4

    @property
    def n(self) -> int:
        """Pairs behind the numbers."""
        return self.complete if self.analysis is None else self.course.pairs[self.analysis]

    @property
    def counted(self) -> dict[int, float]:
        """Differences behind the numbers."""
        return dict(itertools.islice(self.differences.items(), self.n))

    @property
    def mean(self) -> float:
        """Mean difference, not corrected for the choice of the time to stop."""
        return float(np.mean(list(self.counted.values()))) if self.n else math.nan

    @property
    def sd(self) -> float:
        """Standard deviation of the differences."""
        return math.nan if self.analysis is None else float(self.course.sd[self.analysis])

    @property
    def claims(self) -> list[Claim]:
        """Claims made by the analysis behind the numbers, the strongest first."""
        claims = self.course.claims.items()
        return [name for name, made in claims if self.analysis is not None and made[self.analysis]]

    @property
    def differs(self) -> bool:
        """Whether it is claimed to be better or worse."""
        return not {"better", "worse"}.isdisjoint(self.claims)

    @property
    def verdict(self) -> Verdict:
        """The strongest claim."""
        if self.claims == ["not better", "not worse"]:
            return "equivalent"
        return next(iter(self.claims), "failed" if self.blocked else "undecided")

    @property
    def is_unlikely(self) -> bool:
        """Whether it has ended without an answer, as that has become unlikely."""
        return self.analysis is not None and bool(self.course.unlikely[self.analysis])

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
        seen, now = slice(self.analysis + 1), self._at("low", "high")
        low, high = float(self.course.low[seen].max()), float(self.course.high[seen].min())
        shared = math.isfinite(now[1] - now[0]) and low <= self.course.mean[self.analysis] <= high
        return (low, high) if shared else (now[0], now[1])

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
        if math.isnan(self.interval[0]):
            return self.interval
        effect, (low, high) = self.design.smallest_effect, self._shared
        floor, ceiling, mean = self._at("floor", "ceiling", "mean")
        if "not better" in self.claims and high >= effect:
            high = min(effect, max(ceiling, 0.0, mean))
        if "not worse" in self.claims and low <= -effect:
            low = max(-effect, min(floor, 0.0, mean))
        return self._ends(low, high)

    def _at(self, *names: str) -> list[float]:
        """Returns values of the course at the analysis behind the numbers."""
        return [float(getattr(self.course, name)[self.analysis]) for name in names]

    def _ends(self, low: float, high: float) -> tuple[float, float]:
        """Returns the ends of an interval of improvements as differences; nan for both where one is infinite."""
        if not math.isfinite(high - low):
            return math.nan, math.nan
        return (low, high) if self.study.goal == "maximize" else (-high, -low)

    @functools.cached_property
    def p(self) -> float:
        """p of a difference on the scale of the study's alpha, corrected for all comparisons and analyses."""
        return p_value(np.array(list(self.counted.values())), self.design)

    def mirrored(self) -> Self:
        """Returns the comparison of the other with the arm."""
        differences = {seed: -value for seed, value in self.differences.items()}
        terms = {arm: -sign for arm, sign in self.terms.items()}
        course = self.course.mirrored()
        return replace(self, arm=self.other, other=self.arm, terms=terms, course=course, differences=differences)

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
    def blocked(self) -> bool:
        """Whether so many runs have failed that the seeds of the next analysis do not hold its pairs."""
        return self.next is not None and len(self._whole(self.next)) < self.next

    def seeds_for(self, pairs: int) -> int:
        """Returns how many seeds of the plan some pairs take, with those of failed runs; at most ``most_seeds``.

        Where too many have failed it is the place of the failure after which the others are too few.
        """
        whole, most = self._whole(pairs), min(most_seeds(pairs), len(self.study.seeds))
        return whole[pairs - 1] if len(whole) >= pairs else sorted({*range(1, most + 1)} - {*whole})[most - pairs]

    def _whole(self, pairs: int) -> list[int]:
        """Returns the places of the seeds without a failed run, from 1 on, among those that some pairs may take."""
        failed = {run.seed for run in self.failed}
        return [place for place, seed in enumerate(self.study.seeds[: most_seeds(pairs)], 1) if seed not in failed]

    @functools.cached_property
    def failed(self) -> list[Run]:
        """Runs of its arms that have failed, seed by seed."""
        ours = [run for run in self.study.runs if run.arm in self.terms and run.seed in self.study.seeds]
        return sorted((run for run in ours if run.state == "failed"), key=lambda run: run.seed)


def design_of(rules: Compare, comparisons: int) -> Design:
    """Returns the rules of each of so many comparisons, which share alpha."""
    rest = rules.max_seeds, rules.until, rules.extended
    return Design(rules.smallest_effect, rules.alpha, max(1, comparisons), *rest, gates=bool(rules.then))


Terms = dict[tuple[str, str], dict[str, int]]
"""Signs of the arms whose results make the difference of a comparison, by its arm and other."""


def terms_of(study: Study) -> Terms:
    """Returns the comparisons of a plan: with the baseline, or of all pairs of arms; interactions last."""
    if study.compare.arms == "pairs":
        pairs = [(arm, other) for other, arm in itertools.combinations(study.arms, 2)]
    else:
        pairs = [(arm, other) for arm in study.arms if (other := base_of(study, arm)) != arm]
    return {(arm, other): {arm: 1, other: -1} for arm, other in pairs} | _interactions(study)


def base_of(study: Study, arm: str) -> str:
    """Returns the arm that an arm is compared with: the baseline, of several sizes that of the same size."""
    return arm_name(study.levels[study.baseline][0], study.levels[arm][1]) if SIZES in study.factors else study.baseline


def _interactions(study: Study) -> Terms:
    """Returns the interactions of two factors: whether two levels gain more together than the sum of their gains.

    Those of arms and sizes ask whether the difference of an arm changes with the size. There are none where all pairs
    of arms are compared.
    """
    varied = [place for place, values in enumerate(study.factors.values()) if len(values) > 1]
    if len(varied) != 2 or study.compare.arms == "pairs":
        return {}
    base, found = study.levels[study.baseline], Terms()
    for arm, levels in study.levels.items():
        if all(levels[place] != base[place] for place in varied):
            alone = [arm_name(*base[:place], levels[place], *base[place + 1 :]) for place in varied]
            name = " x ".join(levels[place] for place in varied)
            found[name, study.baseline] = {arm: 1, study.baseline: 1, **dict.fromkeys(alone, -1)}
    return found


def compare(study: Study, asked: Collection[tuple[str, str]] | None = None) -> list[ArmComparison]:
    """Compares the arms of a study by its first metric as its plan says, interactions last.

    Args:
        study: the study.
        asked: arm and other of the comparisons that are made; None for all.
    """
    terms = terms_of(study)
    design = design_of(study.compare, len(terms))
    return [_compare(study, design, both, own) for both, own in terms.items() if asked is None or both in asked]


def compare_by_metric(study: Study) -> Iterator[tuple[Study, list[ArmComparison]]]:
    """Yields the study by each metric with its comparisons; a further metric compares what differs by that before."""
    by, asked = study, None
    while comparisons := compare(by, asked):
        yield by, comparisons
        if by.next is None:
            return
        by, asked = by.next, {(one.arm, one.other) for one in comparisons if one.differs}


def compare_all(study: Study) -> list[ArmComparison]:
    """Compares by all metrics."""
    return [one for _, comparisons in compare_by_metric(study) for one in comparisons]


def most_seeds(pairs: int) -> int:
    """Returns how many seeds an analysis may take for its pairs: others replace those of which a run has failed."""
    return pairs + pairs // 2


def _compare(study: Study, design: Design, names: tuple[str, str], terms: dict[str, int]) -> ArmComparison:
    """Makes the comparison of an arm with another, both named, by the finished runs of the arms of its terms."""
    differences = _differences(study, terms)
    failed = {run.seed for run in study.runs if run.arm in terms and run.state == "failed"}
    ended = itertools.takewhile(lambda seed: seed in differences or seed in failed, study.seeds)
    complete = sum(seed in differences for seed in ended)
    sign = 1 if study.goal == "maximize" else -1
    course = follow(sign * np.array([*differences.values()][:complete]), design)
    last = int(course.stop)
    place, decided = None if last < 0 else last, last >= 0 and bool((course.decided | course.unlikely)[last])
    images = _images_of_all(study.compare, [study.results[arm, seed] for arm in terms for seed in differences])
    return ArmComparison(*names, terms, study, design, differences, complete, course, place, decided, images)


def _differences(study: Study, terms: Mapping[str, int]) -> dict[int, float]:
    """Returns the differences of arms by seed; of counts, without their rounding errors."""
    rules, found = study.compare, {}
    for seed in study.seeds:
        runs = {arm: study.results[arm, seed] for arm in terms if (arm, seed) in study.results}
        if len(runs) < len(terms):
            continue
        values = {arm: float(run.results[rules.metric]) for arm, run in runs.items()}
        if (images := _images_of_all(rules, runs.values())) is not None:
            found[seed] = sum(sign * round(values[arm] * images) for arm, sign in terms.items()) / images
        else:
            total = sum(sign * values[arm] for arm, sign in terms.items())
            found[seed] = round(total, 6) if rules.counts_images else total  # kept in single precision
    return found


def _images_of_all(rules: Compare, runs: Iterable[Run]) -> int | None:
    """Returns the number of test images that runs have; None where they differ, too."""
    sizes = {images_of(rules, run) for run in runs}
    return sizes.pop() if len(sizes) == 1 else None


def images_of(rules: Compare, run: Run) -> int | None:
    """Returns the number of test images of a run; None where it is unknown or the metric does not count images."""
    name = f"test/{rules.test_set}/images" if rules.test_set else "test_images"
    known: int | None = run.results.get(name) if rules.counts_images else None
    return known


@dataclass(frozen=True)
class Schedule:
    """Runs that the analyses of a study need by now."""

    seeds: dict[str, int]
    """Number of seeds of each arm, the first ones of the plan."""
    open: list[str]
    """Arms of comparisons that are not decided and can be."""
    comparisons: list[ArmComparison]

    @property
    def next_analysis(self) -> int | None:
        """Seeds of the next analysis; None if there is none."""
        return min((self.seeds[arm] for arm in self.open), default=None)


def make_schedule(study: Study) -> Schedule:
    """Plans the runs of a study's next analyses.

    Args:
        study: runs that are missing may be left out of it.
    """
    analyses, comparisons = design_of(study.compare, 1).analyses, compare_all(study)
    seeds = dict.fromkeys(study.arms, analyses[0])
    for one in comparisons:
        needed = one.seeds_for(one.n if one.decided else one.next or analyses[-1])
        seeds |= {arm: max(seeds[arm], needed) for arm in one.terms}
    left = [one for one in comparisons if one.is_open]
    return Schedule(seeds, [arm for arm in study.arms if any(arm in one.terms for one in left)], comparisons)


def runs_left(study: Study, comparisons: Sequence[ArmComparison], *, until_last: bool = False) -> set[tuple[str, int]]:
    """Returns arms and seeds of the runs that open comparisons need for their next analyses, or for their last."""
    ended = {(run.arm, run.seed) for run in study.runs if run.state != "missing"}
    needed = set[tuple[str, int]]()
    for one in (one for one in comparisons if one.is_open):
        count = one.seeds_for(one.design.max_pairs if until_last else one.next or one.n)
        needed |= {(arm, seed) for arm in one.terms for seed in study.seeds[:count]}
    return needed - ended
