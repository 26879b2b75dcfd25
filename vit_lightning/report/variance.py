"""Variance components of accuracy (seeds, test images, both together), and effects of factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vit_lightning.report.sequential import Values
from vit_lightning.report.statistics import paired_p, t_interval


@dataclass(frozen=True)
class Components:
    """Variance components of a table (seeds, images) in a two-way random model without replication."""

    seeds: int
    images: int
    seed: float
    """Variance between seeds in the limit of infinitely many test images; never below 0."""
    image: float
    """Variance between images, common to all seeds."""
    rest: float
    """Residual variance: one seed on one image."""
    run_sd: float
    """Observed standard deviation of single runs on this test set."""

    @property
    def seed_fraction(self) -> float:
        """Fraction of the variance of runs that is due to seeds; nan where runs do not differ."""
        return self.seed / self.run_sd**2 if self.run_sd > 0 else math.nan

    @property
    def error_new_seeds(self) -> float:
        """Standard error of the mean for new seeds on this test set."""
        return self.run_sd / math.sqrt(self.seeds)

    @property
    def error_new_images(self) -> float:
        """Standard error of the mean for new seeds and new images of the same kind."""
        return math.sqrt(self.error_new_seeds**2 + self.image / self.images)


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
    by_seeds, by_images = max(0.0, (between_seeds - rest) / images), max(0.0, (between_images - rest) / seeds)
    return Components(seeds, images, by_seeds, by_images, rest, math.sqrt(between_seeds / images))


@dataclass(frozen=True)
class McNemar:
    """Two single runs on the same test images: numbers of images that only one of them has right."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first: NDArray[Any], second: NDArray[Any]) -> McNemar:
    """Applies the exact two-sided McNemar test. It compares two trained networks on new images, not two recipes.

    Args:
        first, second: (images,), whether each run was right.
    """
    one, other = int(np.sum(first & ~second)), int(np.sum(~first & second))
    p = float(stats.binomtest(one, one + other).pvalue) if one + other else 1.0
    return McNemar(one, other, p)


@dataclass(frozen=True)
class Effect:
    """Effect of a factor, or of two together, on the result: a description, of which nothing is claimed."""

    name: str
    n: int
    effect: float
    low: float
    high: float
    """t-interval; the level is alpha over the number of effects."""
    p: float
    p_adjusted: float
    """p times the number of effects."""

    @property
    def is_interaction(self) -> bool:
        return self.name.startswith("(")


def factor_effects(
    factors: Mapping[str, Sequence[Any]], results: Mapping[tuple[Any, ...], Mapping[int, float]], alpha: float
) -> list[Effect]:
    """Estimates main effects and two-way interactions of a full grid by contrasts within the seed, t-tested over seeds.

    A main effect is a level against the first of its factor, averaged over the others. An interaction is the change of
    that difference with a level of another factor. Bonferroni's correction is over all of them; the choice of the time
    to stop is not corrected for.

    Args:
        factors: levels by factor, the first of each being that of the baseline.
        results: result by seed for each combination of levels, in the order of ``factors``.
        alpha: 1 minus the coverage of all intervals together.
    """
    cells = list(product(*factors.values()))
    seeds = sorted(set.intersection(*(set(results.get(cell, {})) for cell in cells)))
    table = np.array([[results[cell][seed] for cell in cells] for seed in seeds], dtype=np.float64)
    table = table.reshape(len(seeds), *map(len, factors.values()))
    contrasts = [*_main(factors, table), *_interactions(factors, table)]
    found = []
    for name, values in contrasts:
        mean, p = float(values.mean()) if len(values) else math.nan, paired_p(values)
        interval = t_interval(values, alpha / len(contrasts))
        found.append(Effect(name, len(values), mean, *interval, p, min(1.0, len(contrasts) * p)))
    return found


def _main(factors: Mapping[str, Sequence[Any]], table: Values) -> list[tuple[str, Values]]:
    contrasts = []
    for axis, (factor, levels) in enumerate(factors.items()):
        others = tuple(other + 1 for other in range(len(factors)) if other != axis)
        means = table.mean(axis=others)  # seed, level
        for number, level in enumerate(levels[1:], 1):
            contrasts.append((f"{factor}: {level} instead of {levels[0]}", means[:, number] - means[:, 0]))
    return contrasts


def _interactions(factors: Mapping[str, Sequence[Any]], table: Values) -> list[tuple[str, Values]]:
    contrasts = []
    for (one, (first, levels)), (two, (second, others)) in combinations(enumerate(factors.items()), 2):
        rest = tuple(axis + 1 for axis in range(len(factors)) if axis not in (one, two))
        means = table.mean(axis=rest)  # seed, level of the first, level of the second
        for i, j in product(range(1, len(levels)), range(1, len(others))):
            values = means[:, i, j] - means[:, 0, j] - means[:, i, 0] + means[:, 0, 0]
            contrasts.append((f"({first}: {levels[i]}) x ({second}: {others[j]})", values))
    return contrasts
