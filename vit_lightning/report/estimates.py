"""Estimates beside the mean of a comparison, for its time of stopping and for new test images, and a doubt about it.

They describe; claims are made in ``sequential`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vit_lightning.report.comparisons import ArmComparison
from vit_lightning.report.sequential import Course, Values, at, follow
from vit_lightning.report.variance import Components, spread_p

PATHS = 1000
"""Simulated studies behind an estimate; the error that they add is 4 % of the standard error."""


def estimate(comparison: ArmComparison) -> float:
    """Returns the median-unbiased difference, arm minus other; nan where the comparison has not stopped by its rules.

    It is the true difference with which half of such studies would have a higher outcome, in the stage-wise ordering
    (Jennison and Turnbull 2000, section 8.4): better early, better late, neither, worse late, worse early, and the mean
    where that is equal. The studies are simulated with the standard deviation that was found.
    """
    place, design, course = comparison.analysis, comparison.design, comparison.course
    ended = comparison.decided or comparison.n == design.max_pairs
    if place is None or not ended or design.one_sided:
        return math.nan
    mean, sd = float(course.mean[place]), float(course.sd[place])
    drawn = sd * np.random.default_rng(0).standard_normal((PATHS // 2, design.max_pairs))
    noise = np.concatenate([drawn, -drawn])
    unit = 1000 * (abs(mean) + sd)
    by_others = np.full(PATHS, comparison.by_others)  # they do not depend on the difference
    outcome, low, high = _outcomes(course, np.array(place), unit), mean - 2 * sd, mean + 2 * sd
    while high - low > sd / 500:
        middle = (low + high) / 2
        simulated = follow(middle + noise, design, by_others)
        above = np.mean(_outcomes(simulated, simulated.stop, unit) > outcome) > 0.5
        low, high = (low, middle) if above else (middle, high)
    return low if comparison.study.goal == "maximize" else -low


def _outcomes(course: Course, stop: NDArray[np.int_], unit: float) -> Values:
    """Returns numbers in the order of the outcomes of comparisons; the unit is far larger than any mean."""
    better, worse = at(course.claims["better"], stop), at(course.claims["worse"], stop)
    outcomes: Values = at(course.mean, stop) + unit * (better * 1.0 - worse) / (1 + stop)
    return outcomes


def crossed_interval(comparison: ArmComparison, parts: Components) -> tuple[float, float]:
    """Returns an interval of the difference, arm minus other, for new seeds on new images of the same kind.

    Seeds and images are crossed random effects, with degrees of freedom by Satterthwaite; the level is that of the
    interval over seeds at the same analysis. It is as wide as that at least; nan for both ends where that is.

    Args:
        comparison: comparison whose runs were all tested on the same images.
        parts: variance components of its differences in correctness.
    """
    place, design, (low, high) = comparison.analysis, comparison.design, comparison.interval
    if place is None or math.isnan(low):
        return math.nan, math.nan
    level = design.levels(design.level / design.sides)[place]
    half = float(special.stdtrit(parts.freedom_new_images, 1 - level)) * parts.error_new_images
    return min(low, comparison.mean - half), max(high, comparison.mean + half)


def unlike_spreads(comparisons: Sequence[ArmComparison], level: float = 0.05) -> list[str]:
    """Warns of arms whose runs spread more than those of the other arm, by more than chance.

    The differences of arms with the same distribution are symmetric, which t-tests of few runs rest on. Where one arm
    is quiet, the other's tail to one side stays in them; tests that allow for skew find it too late, if the tail shows
    only in later runs, but the spread shows it.
    """
    found = []
    for one in comparisons:
        results = {(run.arm, run.seed): float(run.results[one.study.compare.metric]) for run in one.study.done}
        ours, theirs = (np.array([results[arm, seed] for seed in one.counted]) for arm in (one.arm, one.other))
        step = 1 / one.images if one.images else 0.0
        if one.analysis is None or spread_p(ours, theirs, step) > level / len(comparisons):
            continue
        (less, quiet), (more, noisy) = sorted([(float(ours.std()), one.arm), (float(theirs.std()), one.other)])
        times = f"{more / less:.2g} times as much as" if less > 0 else "unlike"
        found.append(
            f"Runs of {noisy} spread {times} those of {quiet}. If they also have a tail to one side, false claims are "
            "more frequent than promised: look at the points of the runs."
        )
    return found
