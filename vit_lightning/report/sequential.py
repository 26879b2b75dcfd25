"""Group-sequential comparison of two arms: analyses after 6, 8, 10, ... pairs of runs, and the claims of each.

Four claims, each by one-sided t-tests on the paired differences: better and worse (than the baseline), not better and
not worse (by the smallest effect); equivalent is the last two together. At any true difference only claims of one side
can be false, and of these the weaker one follows from the stronger: partitioning (Goeman, Solari and Stijnen 2010,
Statistics in Medicine 29) then lets better and worse have half of a comparison's level each, the other two all of it.

Each test spends its level over the analyses (Lan and DeMets, Biometrika 1983), so that a claim is false with at most
that probability over all analyses together, and stands once it is made: in proportion to the pairs, but for a part that
is kept for studies that are extended beyond their planned maximum. (The conditional error of Müller and Schäfer,
Biometrics 2001, is zero after the last analysis of a design that keeps nothing. With boundaries that are fixed in
advance, whoever goes on may look at all results before.)

Boundaries are those of normal numbers, turned into t-quantiles at the same nominal level (Jennison and Turnbull 2000,
chapter 11), with ``HELD_BACK``. A comparison also ends where an answer has become unlikely (stochastic curtailment,
chapter 10 there); that makes no claim, and claims are as valid if it goes on all the same.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]
Claim = Literal["better", "worse", "not better", "not worse"]
Answer = Literal["equivalent", "not better"]
PAIRS: tuple[tuple[Claim, Claim], ...] = (("better", "worse"), ("not better", "not worse"))
MIRRORED: dict[Claim, Claim] = {**dict(PAIRS), **{other: one for one, other in PAIRS}}

FIRST, STEP = 6, 2
"""Pairs of the first analysis, and between two. With 5 pairs no exact two-sided test can reach p < .05."""
HELD_BACK = 16
"""The t-statistics of growing samples are less alike than normal ones: at the same nominal levels they cross boundaries
up to 1 - log10(level) / 16 times as often (1.08 at .05, 1.16 at .0025), for 8 to 240 pairs and levels of .05 to .00006
(2 million simulated sequences each)."""
KEPT = 0.2
"""Fraction of the level that is kept for pairs beyond the planned maximum."""
BLOCK = 64
"""Nodes of an integration are a multiple of it, and so many are moved together."""
FAR = 1000
"""Pairs up to which studies that are extended share one integration of their boundaries."""
UNLIKELY = 0.2
"""Probability of an answer by the last analysis, below which a comparison ends without one."""


@dataclass(frozen=True)
class Design:
    """Rules of the comparisons of a study, fixed before its first run.

    Args:
        smallest_effect: smallest difference that would matter, in the metric's own units.
        alpha: probability of any false claim in the study, of whatever kind, over all comparisons and all analyses.
        comparisons: number of comparisons, which share alpha equally.
        max_pairs: pairs of the last analysis.
        extended: earlier maxima in order, if the study was extended. The first one was planned.
        until: answer that decides a comparison, beside better and worse: ``equivalent`` tells those from a difference
            that does not matter; ``not better`` asks only whether the arm should be adopted, which takes fewer runs.
    """

    smallest_effect: float
    alpha: float
    comparisons: int
    max_pairs: int
    until: Answer = "equivalent"
    extended: tuple[int, ...] = ()
    gates: bool = False
    """Whether better and worse open a comparison by a further metric. Where the true difference is the smallest that
    matters, not better is as false as all claims of that may be: each has half of the level (Bretz et al., Statistics
    in Medicine 28, 2009). Where it is zero they are open by a false claim alone, so better and worse lose nothing."""

    @property
    def level(self) -> float:
        """Level of one comparison."""
        return self.alpha / self.comparisons

    @property
    def planned(self) -> int:
        """Pairs of the last analysis, as they were planned first."""
        return (*self.extended, self.max_pairs)[0]

    @property
    def analyses(self) -> tuple[int, ...]:
        """Pairs of each analysis; without any, nothing is ever claimed."""
        return tuple(n for n in self._grid if n <= self.max_pairs)

    @property
    def _grid(self) -> tuple[int, ...]:
        """Pairs of each analysis, and of those that would follow if the study was extended."""
        far = range(FIRST, max(FAR, self.max_pairs) + 1, STEP)
        return tuple(sorted({*far, *self.extended, self.max_pairs})) if self.max_pairs >= FIRST else ()

    def levels(self, level: float, count: int | None = None) -> Values:
        """Returns the nominal one-sided level of each analysis, such that all together have a level.

        The level is spent by the planned maximum but for a part that is kept, of which half is spent by twice as many
        pairs, and so on. So the analyses do not depend on how far a study is extended, nor on why.

        Args:
            level: one-sided level of all analyses together.
            count: number of analyses that are wanted, the first ones; None for all.
        """
        level /= 1 - math.log10(level) / HELD_BACK
        times = [n / self.planned for n in self._grid]
        spent = tuple(level * ((1 - KEPT) * time if time <= 1 else 1 - KEPT / time) for time in times)
        return nominal_levels(self._grid, spent, len(self.analyses[:count]))


@dataclass(frozen=True)
class Course:
    """Course of a comparison over the analyses; all arrays are (..., analyses)."""

    pairs: tuple[int, ...]
    """Pairs of the analyses that have taken place."""
    mean: Values
    """Mean difference, not corrected for the choice of the time to stop."""
    sd: Values
    """Standard deviation of the differences."""
    low: Values
    high: Values
    """Repeated confidence interval (Jennison and Turnbull, JRSS B 1989): at all analyses together it covers the true
    difference with probability 1 - level; excludes zero exactly where better or worse is claimed at that analysis.
    Infinite where all differences are the same: signs may show that there is one, nothing shows how large it is."""
    floor: Values
    ceiling: Values
    """One-sided bounds at which not worse and not better are tested, the closest so far: each holds at all analyses
    together with probability 1 - level. Infinite as the interval."""
    claims: dict[Claim, Flags]
    """Claims made at this analysis or an earlier one."""
    decided: Flags
    """Whether the comparison is answered, at this analysis or an earlier one."""
    chance: Values
    """Probability of an answer at the last analysis, given the pairs so far and nothing else."""
    unlikely: Flags
    """Whether it is open and that has become unlikely."""

    def mirrored(self) -> Self:
        """Returns the course of the opposite differences."""
        swapped = {name: self.claims[MIRRORED[name]] for name in self.claims}
        low, high, floor, ceiling = -self.high, -self.low, -self.ceiling, -self.floor
        return replace(self, mean=-self.mean, low=low, high=high, floor=floor, ceiling=ceiling, claims=swapped)

    @property
    def stop(self) -> NDArray[np.int_]:
        """Place of the analysis after which no more runs are needed, else the latest; -1 before the first: (...)."""
        ended = self.decided | self.unlikely
        ended[..., -1:] = True
        return ended.argmax(-1) if self.pairs else np.full(ended.shape[:-1], -1)


def at(values: NDArray[Any], place: NDArray[np.int_]) -> NDArray[Any]:
    """Returns the values (..., analyses) at a place of each comparison."""
    return np.take_along_axis(values, place[..., None], -1)[..., 0]


def follow(differences: Values, design: Design) -> Course:
    """Makes the claims of each analysis that the pairs of runs allow.

    Args:
        differences: (..., n), arm minus baseline for each pair in the order of the seeds; positive is an improvement.
        design: the rules.
    """
    pairs = tuple(n for n in design.analyses if n <= differences.shape[-1])
    n = np.array(pairs, dtype=int)
    mean = differences.cumsum(-1)[..., n - 1] / n
    centred = differences - differences[..., :1]  # differences that are all alike then have a deviation of exactly 0
    squares = (centred**2).cumsum(-1)[..., n - 1] - centred.cumsum(-1)[..., n - 1] ** 2 / n
    sd = np.sqrt(np.maximum(squares, 0.0) / (n - 1))
    error, effect = sd / np.sqrt(n), design.smallest_effect
    levels = [design.levels(level) for level in (design.level / 2, design.level / (1 + design.gates))]
    halves, whole = (found[: len(pairs)] for found in levels)
    half, outer = (special.stdtrit(n - 1, 1 - found) * error for found in (halves, whole))
    made: dict[Claim, Flags] = {
        "better": _exceeds(differences, half, n, halves, design),
        "worse": _exceeds(-differences, half, n, halves, design),
        "not better": _exceeds(effect - differences, outer, n, whole, design),
        "not worse": _exceeds(effect + differences, outer, n, whole, design),
    }
    claims = {name: np.logical_or.accumulate(flags, axis=-1) for name, flags in made.items()}
    answered = claims["not better"]
    if design.until == "equivalent":
        answered = answered & claims["not worse"]
    decided = claims["better"] | claims["worse"] | answered
    unlikely, chance = ~decided & (n < design.max_pairs), np.ones(sd.shape)
    for most in (*design.extended, design.max_pairs) if pairs else ():  # what had not ended has not, once extended
        last = [special.stdtrit(most - 1, 1 - found[design.analyses.index(most)]) for found in levels]
        chance = _chance(mean, sd, n, claims, design, most, *last)
        unlikely &= (n >= most) | (chance < UNLIKELY)
    differs, better, worse = made["better"] | made["worse"], made["not better"], made["not worse"]
    half[(np.abs(mean) > half) & ~differs] = math.inf  # no range excludes what the exact test of signs does not claim
    for ends in (half, outer):
        ends[(sd == 0) | ((mean + ends < effect) & ~better) | ((mean - ends > -effect) & ~worse)] = math.inf
    floor, ceiling = np.maximum.accumulate(mean - outer, -1), np.minimum.accumulate(mean + outer, -1)
    return Course(pairs, mean, sd, mean - half, mean + half, floor, ceiling, claims, decided, chance, unlikely)


def _chance(
    mean: Values,
    sd: Values,
    n: NDArray[np.int_],
    claims: dict[Claim, Flags],
    design: Design,
    most: int,
    difference: Values,
    weaker: Values,
) -> Values:
    """Returns the probability of an answer at a later analysis, given the pairs so far and nothing else.

    Args:
        mean, sd, n, claims: so far.
        design: the rules.
        most: pairs of the later analysis.
        difference, weaker: t-quantiles of that analysis, of a difference and of the weaker claims.
    """
    error = sd / math.sqrt(most)
    ends = difference * error
    inner = np.minimum(design.smallest_effect - weaker * error, ends)
    upper = np.where(claims["not better"], ends, inner)
    lower = -ends if design.until == "not better" else -np.where(claims["not worse"], ends, inner)
    with np.errstate(divide="ignore", invalid="ignore"):
        step = sd * np.sqrt(1 / n - 1 / most)  # of the predicted mean
        outside = special.ndtr((mean - ends) / step) + special.ndtr((-ends - mean) / step)
        inside = special.ndtr((upper - mean) / step) - special.ndtr((lower - mean) / step)
    return np.where(sd == 0, 1.0, outside + np.maximum(inside, 0.0))


def _exceeds(values: Values, half: Values, n: NDArray[np.int_], levels: Values, design: Design) -> Flags:
    """Returns whether one-sided tests show a mean above zero."""
    signs, mean = _sign_p(values, n, design), values.cumsum(-1)[..., n - 1] / n
    return np.where(np.isnan(signs), mean > half, signs <= levels)


def _sign_p(values: Values, n: NDArray[np.int_], design: Design) -> Values:
    """Returns the one-sided p of the exact sign-flip test where values differ in sign alone, else nan.

    There the t-test is wrong. Six alike are no answer where a further analysis follows: coarse counts say little of
    their spread.
    """
    if len(n) == 0 or not np.any(np.abs(values[..., 0]) == np.abs(values[..., 1])):
        return np.full((*values.shape[:-1], len(n)), math.nan)  # as nearly always
    sizes = np.abs(values)
    alike = (np.maximum.accumulate(sizes, -1) == np.minimum.accumulate(sizes, -1))[..., n - 1]
    p = special.bdtrc((values > 0).cumsum(-1)[..., n - 1] - 1, n, 0.5)
    return np.where(alike, np.where((n == FIRST) & (design.planned > FIRST), 1.0, p), math.nan)


def nominal_levels(pairs: tuple[int, ...], spent: tuple[float, ...], count: int | None = None) -> Values:
    """Returns the one-sided level of each analysis, such that all up to each one have the levels that are spent.

    The density of the sum of n standard normal numbers that no boundary has stopped is integrated from analysis to
    analysis (Armitage, McPherson and Rowe, JRSS A 1969).

    Args:
        pairs: pairs of each analysis.
        spent: one-sided level of all analyses up to each one.
        count: number of analyses that are wanted, the first ones; None for all.
    """
    found, later = _integration(pairs, spent)
    wanted = len(pairs[:count])
    found += itertools.islice(later, max(0, wanted - len(found)))
    assert len(found) >= wanted, "the integration was interrupted"
    return np.array(found[:wanted])


@functools.cache
def _integration(pairs: tuple[int, ...], spent: tuple[float, ...]) -> tuple[list[float], Iterator[float]]:
    """Returns the levels that are known by now, and those that follow: whoever wants more goes on from there."""
    return [], _integrate(pairs, spent)


def _integrate(pairs: tuple[int, ...], spent: tuple[float, ...]) -> Iterator[float]:
    """Yields the level of one analysis after the other."""
    before, spent_before = 0, 0.0
    points, density = np.zeros(1), np.ones(1)  # all paths begin at zero
    for n, spent_by_now in zip(pairs, spent, strict=True):
        step = math.sqrt(n - before)
        z = _boundary(points / step, density, math.sqrt(n) / step, spent_by_now - spent_before)
        yield float(special.ndtr(-z))
        low, high = -8 * math.sqrt(n), z * math.sqrt(n)
        nodes, weights = _nodes(BLOCK * math.ceil(1 + 3 * (high - low) / step / BLOCK))
        sums = (high - low) / 2 * nodes + (high + low) / 2
        moved = np.concatenate(
            [_moved(points / step, density, part / step) for part in np.split(sums, len(sums) // BLOCK)]
        )
        points, density = sums, moved * weights * (high - low) / 2 / step
        before, spent_before = n, spent_by_now


def _moved(points: Values, density: Values, sums: Values) -> Values:
    """Returns the density of sums after a step of length 1 from points, both in order; no step is longer than 10."""
    near = slice(*np.searchsorted(points, (sums[0] - 10, sums[-1] + 10)))
    found: Values = np.exp(-((sums[:, None] - points[near]) ** 2) / 2) @ density[near] / math.sqrt(2 * math.pi)
    return found


_nodes = functools.cache(np.polynomial.legendre.leggauss)  # takes most of the time otherwise, hence few numbers of them


def _boundary(points: Values, density: Values, unit: float, spend: float) -> float:
    """Returns the z above which ``spend`` of the paths come with the next step, of length 1; ``unit`` is that of z."""

    def excess(z: float) -> float:
        return float(density @ special.ndtr(points - z * unit)) - spend

    return float(optimize.brentq(excess, 0.0, 38.0, xtol=1e-9))


def p_value(differences: Values, design: Design) -> float:
    """Returns the smallest alpha of the study at which a difference would have been claimed by now; nan before that.

    Args:
        differences: (n,), as for ``follow``.
        design: the rules.
    """
    course = follow(differences, design)
    if not course.pairs:
        return math.nan
    n = np.array(course.pairs)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(course.mean) / course.sd * np.sqrt(n)
    signs = np.minimum(_sign_p(differences, n, design), _sign_p(-differences, n, design))
    seen = np.where(np.isnan(signs), special.stdtr(n - 1, -t), signs)

    def is_claimed(step: int) -> bool:
        level = design.level * 10 ** (step / 100)  # fixed steps: other arms meet the same levels, known by then
        return bool(np.any(seen <= design.levels(level / 2, len(n))))

    steps = range(-1000, math.ceil(-100 * math.log10(design.level)))
    return min(1.0, design.alpha * 10 ** ((steps[0] + bisect.bisect_left(steps, True, key=is_claimed)) / 100))
