"""Spread of results and what it does to a difference: variance components.

All of it describes; claims are made in ``sequential`` alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vit_lightning.report.comparisons import ArmComparison
from vit_lightning.report.sequential import Values


def spread(values: Values) -> float:
    """Returns the standard deviation; exactly 0 for values that differ by the rounding of single precision only."""
    if len(values) < 2:
        return math.nan
    alike = np.ptp(values) <= 1e-6 * max(1.0, float(np.max(np.abs(values))))
    return 0.0 if alike else float(np.std(values, ddof=1))


def spread_p(one: Values, other: Values, step: float = 0.0) -> float:
    """Returns the p of a difference in spread between paired results (Pitman, Morgan; both Biometrika 31, 1939).

    Args:
        one, other: (n,), at least 3; normal results, which need not be independent within a pair.
        step: smallest difference between results, of counts; the variance of rounding then counts as theirs too.
    """
    (first, both), (_, second) = np.cov(one, other)
    sums, freedom = first + second + step**2 / 6, len(one) - 2
    # as 1 minus the squared correlation of sum and difference
    left = sums**2 - 4 * both**2 - (first - second) ** 2
    if first == second:
        return 1.0
    return float(2 * special.stdtr(freedom, -abs(first - second) * math.sqrt(freedom / left))) if left > 0 else 0.0


@dataclass(frozen=True)
class Components:
    """Variance components of a table (seeds, images) in a two-way random model without replication."""

    seeds: int
    images: int
    image: float
    """Variance between images, common to all seeds."""
    rest: float
    """Residual variance: one seed on one image."""
    error_new_seeds: float
    """Standard error of the mean for new seeds on this test set."""

    @property
    def error_new_images(self) -> float:
        """Standard error of the mean for new seeds and new images of the same kind."""
        return math.sqrt(self.error_new_seeds**2 + self.image / self.images)

    @property
    def freedom_new_images(self) -> float:
        """Degrees of freedom of the square of that error, by Satterthwaite (Biometrics Bulletin 2, 1946)."""
        seeds, images, both = self.seeds - 1, self.images - 1, self.seeds * self.images
        by_image, rest = self.image / self.images + self.rest / both, self.rest / both
        spread = self.error_new_seeds**4 / seeds + by_image**2 / images + rest**2 / (seeds * images)
        least = min(seeds, images)  # a part that is subtracted brings the estimate below that of any part
        return max(least, self.error_new_images**4 / spread) if spread else math.inf


def components(table: NDArray[Any]) -> Components:
    """Estimates variance components by the method of moments (Searle, Casella & McCulloch 1992, section 4.3).

    Args:
        table: (seeds, images), at least 2 x 2: 1 where a run was right, or the difference of two arms in that.
    """
    values = np.asarray(table, dtype=np.float64)
    seeds, images = values.shape
    mean, by_seed, by_image = values.mean(), values.mean(axis=1), values.mean(axis=0)
    between_seeds = images * float(np.sum((by_seed - mean) ** 2)) / (seeds - 1)
    between_images = seeds * float(np.sum((by_image - mean) ** 2)) / (images - 1)
    left = values - by_seed[:, None] - by_image[None, :] + mean
    rest = float(np.sum(left**2)) / ((seeds - 1) * (images - 1))
    return Components(
        seeds, images, max(0.0, (between_images - rest) / seeds), rest, math.sqrt(between_seeds / images / seeds)
    )


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
    level = design.levels(design.level / 2)[place]
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
        runs = [[one.study.results[arm, seed] for seed in one.counted] for arm in (one.arm, one.other)]
        ours, theirs = (np.array([float(run.results[one.metric]) for run in of_arm]) for of_arm in runs)
        step = 1 / one.images if one.images else 0.0
        if one.analysis is None or spread_p(ours, theirs, step) > level / len(comparisons):
            continue
        (less, quiet), (more, noisy) = sorted([(spread(ours), one.arm), (spread(theirs), one.other)])
        so = f" {more / less:.2g} times as much as" if less else ", unlike"
        found.append(
            f"Runs of '{noisy}' spread{so} those of '{quiet}'. See whether a few of them lie far off on one side "
            "(results.csv): if so, false claims about it are more frequent than promised."
        )
    return found
