"""How often an ablation is wrong, what its intervals cover, and how many runs it takes: simulated studies.

    python experiments/benchmarks/ablation_errors.py [--studies 2000] [--random 0] [--only "5 arms, quiet"]

Each study is followed to its end by the rules of ``report/sequential.py`` and ``report/comparisons.py``. Differences
are in units of the smallest effect. Fixed: runs of a design with as many runs of each arm, t-tests with Bonferroni's
correction and the smallest such number that answers as many comparisons; nobody knows that number beforehand.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import special

from vit_lightning.report.comparisons import design_of, most_seeds, terms_of
from vit_lightning.report.sequential import Answer, Course, at, follow
from vit_lightning.report.study import SIZES, Compare, Run, Study, arm_name

Values = np.ndarray[Any, Any]
Flags = np.ndarray[Any, Any]
ALPHA, MAX_SEEDS, SD = 0.05, 60, 1.7
"""Of the scenes that do not say otherwise; SD is that of a difference."""
IMAGES, ACCURACY, EFFECT = 360, 0.97, 0.005
"""Test images, accuracy of the baseline and smallest effect where results are counts."""


@dataclass(frozen=True)
class Scene:
    """Kind of study."""

    truth: tuple[float, ...] = (0.0, 0.0)
    """True difference of each arm to the baseline."""
    noise: Literal["normal", "counts", "basins", "signs", "skewed", "uniform"] = "normal"
    """Basins: three runs of ten end 4 standard deviations lower. Signs: differences vary in sign alone. Skewed: so are
    the results of the baseline (exponential), and those of the other arms hardly vary."""
    sd: float = SD
    max_seeds: int = MAX_SEEDS
    failing: float = 0.0
    """Share of the runs that fail."""
    informative: bool = False
    """Whether it is the lowest runs that fail, of all arms but the baseline."""
    varying: tuple[float, ...] = ()
    """Factors of the standard deviation of each arm, the baseline first; all 1 where it is empty."""
    extended: tuple[int, ...] = ()
    """Earlier maxima, at which all comparisons that were open or had ended without an answer went on."""
    arms: Literal["baseline", "pairs"] = "baseline"
    factors: tuple[int, ...] = ()
    """Levels of the two factors of a grid, whose combinations are the arms."""
    sizes: bool = False
    """Whether the second one is that of sizes: each arm is compared with the baseline of its size."""
    until: Answer = "equivalent"
    then: tuple[float, ...] = ()
    """True difference of each arm by a second metric, asked where better or worse is claimed by the first."""
    alike: float = 0.0
    """Correlation of the results by both metrics."""

    @functools.cached_property
    def rules(self) -> Compare:
        """Rules of the comparisons."""
        rest = {"arms": self.arms, "until": self.until, "extended": self.extended}
        rest |= {"then": {"other": 1.0}} if self.then else {}
        return Compare("score", 1.0, self.max_seeds, alpha=ALPHA, **rest)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the arms, the baseline first."""
        levels = [[f"{factor}{level}" for level in range(count)] for factor, count in enumerate(self.factors)]
        return [arm_name(*one) for one in itertools.product(*levels)] if levels else [*map(str, range(self.count))]

    @property
    def count(self) -> int:
        """Number of arms."""
        return len(self.truth) + 1

    @functools.cached_property
    def signs(self) -> Values:
        """Signs of the arms in each comparison (comparisons, arms)."""
        terms = terms_of(study_of(np.zeros((self.count, 0)), self)).values()
        return np.array([[own.get(name, 0) for name in self.names] for own in terms])

    def gaps(self, results: Values) -> Values:
        """Returns differences (studies, comparisons, seeds) of results (studies, arms, seeds)."""
        return np.stack([sum(row[arm] * results[:, arm] for arm in np.nonzero(row)[0]) for row in self.signs], 1)

    @property
    def promised(self) -> bool:
        """Whether any false claim has at most probability alpha."""
        return not self.informative and self.noise != "skewed"


@dataclass(frozen=True)
class Rates:
    """Of simulated studies; nan where a number is not simulated."""

    false: float
    """Studies with any false claim."""
    covered: float
    """Comparisons whose interval, as their last analysis shows it, holds the truth; of those that have one."""
    all_covered: float
    """Studies in which all intervals do."""
    bias: float
    """Mean error of the mean difference, as the last analysis shows it."""
    runs: float
    answered: float
    """Comparisons that are answered."""


def results_of(scene: Scene, studies: int, draw: np.random.Generator) -> Values:
    """Returns the results of all runs (studies, arms, seeds), the baseline first; nan for a run that failed."""
    truth = np.array([0.0, *scene.truth])[:, None]
    seeds = most_seeds(scene.max_seeds) if scene.failing else scene.max_seeds
    luck = draw.standard_normal((studies, len(truth), seeds))
    if scene.noise == "basins":
        luck = np.where(draw.random(luck.shape) < 0.3, luck - 4, luck)
    if scene.noise == "uniform":
        luck = math.sqrt(12) * (draw.random(luck.shape) - 0.5)
    if scene.noise == "signs":
        luck = np.sign(luck) * math.sqrt(2) * (np.arange(len(truth)) > 0)[:, None]
    if scene.noise == "skewed":
        luck[:, 1:] /= 10
        luck[:, 0] = math.sqrt(2) * (1 - draw.exponential(size=luck[:, 0].shape))
    results = truth + scene.sd / math.sqrt(2) * luck * np.array(scene.varying or (1.0,))[:, None]
    if scene.noise == "counts":
        results = draw.binomial(IMAGES, np.clip(ACCURACY + EFFECT * results, 0, 1)) / (IMAGES * EFFECT)
    if scene.failing:
        failed = draw.random(luck.shape) < scene.failing
        if scene.informative:
            failed = (luck < np.quantile(luck, scene.failing)) & (np.arange(len(truth)) > 0)[:, None]
        results = np.where(failed, math.nan, results)
    return results


def simulate(scene: Scene, studies: int, random: int = 0) -> Rates:
    """Simulates studies."""
    return rates_of(scene, results_of(scene, studies, np.random.default_rng(random)))


def false_by_second(scene: Scene, results: Values, asked: Flags) -> Flags:
    """Returns which comparisons that are asked by the second metric make a false claim by it."""
    draw, truth = np.random.default_rng(2), np.array([0.0, *scene.truth])[:, None]
    own = scene.sd / math.sqrt(2) * draw.standard_normal(results.shape)
    second = scene.alike * (results - truth) + math.sqrt(1 - scene.alike**2) * own
    true, [study] = scene.signs @ np.array([0.0, *scene.then]), [study_of(np.zeros((scene.count, 0)), scene).next]
    second += np.array([0.0, *scene.then])[:, None]
    course = follow(scene.gaps(second), design_of(study.compare, len(true)))
    return asked & false_claims(course, true, course.stop)


def false_claims(course: Course, true: Values, place: Values) -> Flags:
    """Returns which comparisons make a false claim by an analysis."""
    wrong = {"better": true <= 0, "worse": true >= 0, "not better": true >= 1, "not worse": true <= -1}
    return np.any([at(course.claims[name], place) & wrong[name] for name in wrong], axis=0)


def rates_of(scene: Scene, results: Values) -> Rates:
    """Follows studies to their ends."""
    gaps, true = scene.gaps(results), scene.signs @ np.array([0.0, *scene.truth])
    if scene.noise == "counts":
        gaps = np.rint(gaps * IMAGES * EFFECT) / (IMAGES * EFFECT)
    design = design_of(scene.rules, len(true))
    there = ~np.isnan(gaps)
    whole = np.argsort(~there, axis=-1, kind="stable")[..., : scene.max_seeds]  # the seeds of pairs, then the others
    course = follow(np.nan_to_num(np.take_along_axis(gaps, whole, -1)), design)
    complete = np.minimum(there.sum(-1), scene.max_seeds)
    reached = np.searchsorted(course.pairs, complete, side="right") - 1
    stop = np.minimum(course.stop, reached)
    seen, place = stop >= 0, np.maximum(stop, 0)
    false = false_claims(course, true, place) & seen
    if scene.then:
        false |= false_by_second(scene, results, at(course.claims["better"] | course.claims["worse"], place) & seen)
    held = (at(course.low, place) <= true) & (true <= at(course.high, place)) | ~seen
    last = at(whole, np.array(course.pairs)[course.stop] - 1) + 1  # seeds, those of failed runs too
    needed = [last[:, scene.signs[:, arm] != 0].max(-1) for arm in range(scene.count)]
    return Rates(
        false=float(false.any(-1).mean()),
        covered=float(held[seen].mean()),
        all_covered=float(held.all(-1).mean()),
        bias=float((at(course.mean, place) - true)[seen].mean()),
        runs=float(np.sum(needed, axis=0).mean()),
        answered=float((at(course.decided, place) & seen).mean()),
    )


def fixed_runs(scene: Scene, answered: float, studies: int) -> float:
    """Returns the runs of a fixed design that answers as many comparisons; nan if five times the seeds do not."""
    arms, seeds = scene.count, 5 * scene.max_seeds
    results = results_of(replace(scene, max_seeds=seeds, failing=0.0), min(studies, 1000), np.random.default_rng(1))
    gaps, n = scene.gaps(results), np.arange(2, seeds + 1)
    mean = gaps.cumsum(-1)[..., 1:] / n
    error = np.sqrt(np.maximum((gaps**2).cumsum(-1)[..., 1:] / n - mean**2, 0.0) / (n - 1))
    half, whole = (special.stdtrit(n - 1, 1 - ALPHA / len(scene.signs) / sides) * error for sides in (2, 1))
    alike = mean + whole < 1 if scene.until == "not better" else np.abs(mean) + whole < 1
    found = ((np.abs(mean) > half) | alike).mean((0, 1))
    return float(arms * n[np.argmax(found >= answered)] / (1 - scene.failing)) if found.max() >= answered else math.nan


def study_of(values: Values, scene: Scene) -> Study:
    """Returns a study with these results (arms, seeds)."""
    names, metric = scene.names, "score"
    runs = [
        Run(arm, seed, "", "failed" if math.isnan(value) else "done", results={metric: float(value)})
        for arm, row in zip(names, values, strict=True)
        for seed, value in enumerate(row)
    ]
    return Study(
        name="simulated",
        question="",
        folder=Path(),
        config="",
        metric=metric,
        goal="maximize",
        compare=scene.rules,
        baseline=names[0],
        arms={name: {} for name in names},
        seeds=list(range(values.shape[1])),
        split_varies=False,
        runs=runs,
        factors={
            SIZES if scene.sizes and factor else f"factor {factor}": [f"{factor}{level}" for level in range(count)]
            for factor, count in enumerate(scene.factors)
        },
    )


BASE = Scene()
QUIET, NOISY = Scene(sd=0.78, max_seeds=40), Scene(sd=1.55, max_seeds=40)
EXTENDED = Scene(sd=3.0, max_seeds=20)
SCENES = {
    "2 arms, no difference": BASE,
    "1 arm": replace(BASE, truth=(0.0,)),
    "5 arms": replace(BASE, truth=(0.0,) * 5),
    "30 arms": replace(BASE, truth=(0.0,) * 30),
    "half an effect": replace(BASE, truth=(0.5, 0.5)),
    "one effect": replace(BASE, truth=(1.0, 1.0)),
    "two effects": replace(BASE, truth=(2.0, 2.0)),
    "5 arms, mixed": replace(BASE, truth=(-1.0, 0.0, 0.5, 1.0, 2.0)),
    "30 arms, mixed": replace(BASE, truth=(-1.0, 0.0, 0.5, 1.0, 2.0, 0.0) * 5),
    "1 arm, one effect": replace(BASE, truth=(1.0,)),
    "1 arm, minus one": replace(BASE, truth=(-1.0,)),
    "sd of half an effect": replace(BASE, sd=0.5),
    "sd of half an effect, one effect": replace(BASE, sd=0.5, truth=(1.0, 1.0)),
    "sd of four effects": replace(BASE, sd=4.0),
    "sd of four effects, one effect": replace(BASE, sd=4.0, truth=(1.0, 1.0)),
    **{
        f"{count} compared, at most {most}, truth {truth:g}": Scene((truth,) * count, sd=0.78, max_seeds=most)
        for most in (6, 40)
        for count in (1, 4, 8)
        for truth in (0.0, 1.0)
    },
    "at most 8 seeds": replace(BASE, max_seeds=8),
    "at most 240 seeds": replace(BASE, max_seeds=240, sd=4.0),
    "counts": replace(BASE, noise="counts"),
    "counts, one effect": replace(BASE, noise="counts", truth=(1.0, 1.0)),
    "counts, quiet": replace(BASE, noise="counts", sd=0.1),
    "basins": replace(BASE, noise="basins"),
    "basins, one effect": replace(BASE, noise="basins", truth=(1.0, 1.0)),
    "basins, 1 arm": replace(BASE, noise="basins", truth=(0.0,), sd=0.5),
    "at most 9 seeds": replace(BASE, max_seeds=9),
    "signs alone": replace(BASE, noise="signs"),
    "signs alone, 30 arms": replace(BASE, noise="signs", truth=(0.0,) * 30),
    "skewed baseline": replace(BASE, noise="skewed"),
    "skewed baseline, 30 arms": replace(BASE, noise="skewed", truth=(0.0,) * 30),
    "5 % fail": replace(BASE, failing=0.05),
    "5 % fail, one effect": replace(BASE, failing=0.05, truth=(1.0, 1.0)),
    "lowest 12.5 % fail": replace(BASE, failing=0.125, informative=True),
    "lowest 2 % fail": replace(BASE, failing=0.02, informative=True),
    "not better?": replace(BASE, until="not better"),
    "not better? one effect": replace(BASE, until="not better", truth=(1.0, 1.0)),
    "not better? mixed": replace(BASE, until="not better", truth=(-1.0, 0.0, 0.5, 1.0, 2.0)),
    "pairs of 4, none": replace(BASE, arms="pairs", truth=(0.0,) * 3),
    "pairs of 4, mixed": replace(BASE, arms="pairs", truth=(0.0, 1.0, 1.0)),
    "3 arms, quiet": QUIET,
    "3 arms, quiet, one effect": replace(QUIET, truth=(1.0, 1.0)),
    "5 arms, quiet": replace(QUIET, truth=(0.0,) * 4),
    "5 arms, quiet, mixed": replace(QUIET, truth=(0.0, 0.5, 1.0, 2.0)),
    "10 arms, quiet": replace(QUIET, truth=(0.0,) * 9),
    "1 arm, quiet": replace(QUIET, truth=(0.0,)),
    "3 arms, noisy": NOISY,
    "3 arms, noisy, one effect": replace(NOISY, truth=(1.0, 1.0)),
    "5 arms, noisy": replace(NOISY, truth=(0.0,) * 4),
    "5 arms, noisy, mixed": replace(NOISY, truth=(0.0, 0.5, 1.0, 2.0)),
    "10 arms, noisy": replace(NOISY, truth=(0.0,) * 9),
    "one arm varies twice, 3 arms, quiet": replace(QUIET, varying=(1, 2, 1)),
    "one arm varies twice, 3 arms": replace(NOISY, varying=(1, 2, 1)),
    "one arm varies twice, 5 arms": replace(NOISY, truth=(0.0,) * 4, varying=(1, 2, 1, 1, 1)),
    "one arm varies five times, 3 arms": replace(NOISY, sd=2.0, varying=(1, 5, 1)),
    "one arm varies ten times, 3 arms": replace(NOISY, sd=1.0, varying=(1, 10, 1)),
    "one arm varies ten times, at most 6": replace(NOISY, sd=1.0, varying=(1, 10, 1), max_seeds=6),
    "baseline varies twice, 3 arms, quiet": replace(QUIET, varying=(2, 1, 1)),
    "baseline varies twice, 3 arms": replace(NOISY, varying=(2, 1, 1)),
    "baseline varies twice, 4 arms": replace(NOISY, truth=(0.0,) * 3, varying=(2, 1, 1, 1)),
    "baseline varies ten times, 3 arms": replace(NOISY, sd=0.155, varying=(10, 1, 1)),
    "uniform, 3 arms, quiet": replace(QUIET, noise="uniform"),
    "grid 2 x 2": replace(BASE, truth=(0.0,) * 3, factors=(2, 2)),
    "grid 2 x 2, effects add up": replace(BASE, truth=(1.0, 1.0, 2.0), factors=(2, 2)),
    "grid 2 x 2, quiet, together": replace(QUIET, truth=(0.0, 0.0, 1.0), factors=(2, 2)),
    "grid 2 x 2, noisy": replace(NOISY, truth=(0.0,) * 3, factors=(2, 2)),
    "grid 3 x 3, mixed": replace(BASE, truth=(0.0, 1.0, -1.0, 0.0, 1.0, 0.5, 1.0, 0.0), factors=(3, 3)),
    "grid 2 x 2, together varies five times": replace(NOISY, truth=(0.0,) * 3, factors=(2, 2), varying=(1, 1, 1, 5)),
    "grid 2 x 2, counts": replace(BASE, noise="counts", truth=(0.0,) * 3, factors=(2, 2)),
    "3 arms at 2 sizes": replace(BASE, truth=(4.0, 0.0, 4.0, 0.0, 4.0), factors=(3, 2), sizes=True),
    "3 arms at 2 sizes, one flips": replace(QUIET, truth=(4.0, 1.0, 3.0, 0.0, 4.0), factors=(3, 2), sizes=True),
    "2 arms at 3 sizes, noisy": replace(NOISY, truth=(4.0, 9.0, 0.0, 4.0, 9.0), factors=(2, 3), sizes=True),
    **{
        f"then by another, {' '.join(f'{one:g}' for one in pair)}, alike {alike:g}": replace(
            QUIET, truth=(pair[0],), then=(pair[1],), alike=alike, sd=0.4, max_seeds=6
        )
        for pair in ((0.0, 0.0), (0.2, 0.0), (0.2, 1.0), (1.0, 0.0), (1.0, 1.0), (-1.0, 1.0), (2.0, 1.0))
        for alike in (-1.0, 0.0, 1.0)
    },
    "then by another, 4 arms": replace(QUIET, truth=(1.0,) * 4, then=(1.0,) * 4),
    "then by another, grid 2 x 2": replace(QUIET, truth=(1.0, 1.0, 3.0), then=(0.0, 1.0, 2.0), factors=(2, 2)),
    "then by another, quiet, at most 40": replace(QUIET, truth=(1.0, 1.0), then=(1.0, 0.0)),
    "then by another, extended": replace(EXTENDED, max_seeds=40, extended=(20,), truth=(1.0, 1.0), then=(1.0, 1.0)),
    "maximum 20": EXTENDED,
    "maximum 20, then 40": replace(EXTENDED, max_seeds=40, extended=(20,)),
    "maximum 20, 40, 80": replace(EXTENDED, max_seeds=80, extended=(20, 40)),
    "maximum 20, 40, 80, 160": replace(EXTENDED, max_seeds=160, extended=(20, 40, 80)),
    "maximum 20 to 160, one effect": replace(EXTENDED, max_seeds=160, extended=(20, 40, 80), truth=(1.0, 1.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(SCENES))
    given = parser.parse_args()
    columns = ("false", "error", "covered", "all", "bias", "runs", "answered", "fixed")
    print(f"{'':<38}" + "".join(f"{name:>9}" for name in columns))
    for name in given.only or SCENES:
        scene = SCENES[name]
        rates = simulate(scene, given.studies, given.random)
        error = math.sqrt(rates.false * (1 - rates.false) / given.studies)
        mark = "" if rates.false <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / given.studies) else "  above alpha"
        shown = f"{rates.false:9.4f}{error:9.4f}{rates.covered:9.3f}{rates.all_covered:9.3f}{rates.bias:9.3f}"
        note = "" if scene.promised else "  not promised"
        fixed = fixed_runs(scene, rates.answered, given.studies)
        print(f"{name:<38}{shown}{rates.runs:9.1f}{rates.answered:9.3f}{fixed:9.0f}{mark}{note}", flush=True)


if __name__ == "__main__":
    main()
