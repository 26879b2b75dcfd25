"""Forecast of an ablation: what it can show by its maximum of seeds, what that costs, and the luck of tuning.

Before the first analysis it is the mean over simulated studies by the same rules, with the spread as far as it is
known; from then on the chance by which comparisons also end early (``Course.chance``).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from vit_lightning.errors import counted, show_time
from vit_lightning.report.comparisons import compare, compare_all, design_of, runs_left, terms_of
from vit_lightning.report.sequential import Values, at, follow
from vit_lightning.report.study import Compare, Study

POWER = 0.8
"""Probability of finding a difference, below which a study is called too small for it."""
FEWEST = 3
"""Pairs from which the spread of their differences is taken."""


def measured_sd(study: Study) -> float | None:
    """Returns the standard deviation of the difference of two runs, by all comparisons with pairs enough for it."""
    pairs = [list(one.differences.values()) for one in compare(study) if not one.is_interaction]
    seen = [values for values in pairs if len(values) >= FEWEST]
    squares = sum(float(np.var(values)) * len(values) for values in seen)
    return math.sqrt(squares / sum(len(values) - 1 for values in seen)) if squares else None


def assumed_sd(rules: Compare, images: int | None) -> float | None:
    """Returns it by ``compare.disagreement``; None if the metric counts no images, or nobody knows how many.

    A pair of runs that disagree on a fraction of the images have a difference with the variance fraction / images, if
    it is left to chance on each of these images which of the two is right.
    """
    return math.sqrt(rules.disagreement / images) if rules.counts_images and images else None


@dataclass(frozen=True)
class Forecast:
    """Means over simulated studies."""

    runs: float
    """Training runs of a study."""
    answered: float
    """Fraction of the comparisons that are decided by the last analysis."""
    better: float
    """Fraction of the comparisons with a true difference in which it is found; in all of them, if there is none."""


def expect(rules: Compare, terms: Collection[Mapping[str, int]], sd: float, truth: float) -> Forecast:
    """Returns the means over simulated studies with normal results.

    Args:
        rules: rules of the comparisons.
        terms: signs of the arms of each comparison.
        sd: standard deviation of the paired differences.
        truth: true difference of each arm to the baseline; for pairs, of the last arm to all others.
    """
    design, arms = design_of(rules, len(terms)), list(dict.fromkeys(arm for own in terms for arm in reversed([*own])))
    signs = np.array([[own.get(arm, 0) for arm in arms] for own in terms])
    pairs = (signs != 0).sum(1) == 2
    gains = ~(signs[pairs] == -1).any(0)  # of baselines and, of pairs, all but the last none
    studies = max(50, min(1000, 400_000 // ((len(terms) + 1) * design.max_pairs)))
    results = np.random.default_rng(0).standard_normal((studies, len(arms), design.max_pairs)) * sd / math.sqrt(2)
    results += truth * gains[:, None]
    course = follow(np.einsum("ca,sap->scp", signs, results), design)
    decided, better = (at(flags, course.stop) for flags in (course.decided, course.claims["better"]))
    last = np.array(course.pairs)[course.stop]
    runs = sum(last[:, signs[:, one] != 0].max(-1).mean() for one in range(len(arms)))
    return Forecast(float(runs), float(decided.mean()), float(better[:, pairs & (signs @ gains == 1)].mean()))


def forecast_sentences(study: Study, images: int | None, seconds: float | None) -> list[str]:
    """Describes what a study can show, what that costs, and if it cannot show what is asked, what could.

    Args:
        study: its rules, arms and runs so far.
        images: test images of a run; None if nobody knows.
        seconds: time of the study for each of its runs; None if nobody knows.
    """
    rules, comparisons = study.compare, compare_all(study)
    left = len(runs_left(study, comparisons, until_last=True))
    most = f"at most {counted(left, 'run')}" + ("" if seconds is None else f": {show_time(seconds * left)}")
    if under_way := [(one, one.analysis) for one in comparisons if one.is_open and one.analysis is not None]:
        chance = float(np.mean([one.course.chance[place] for one, place in under_way]))
        text = f"by the pairs so far, {rules.max_seeds} seeds answer {counted(len(under_way), 'open comparison')}"
        return [f"{text} with a chance of {_percent(chance)}; {most}"]
    sd, source = measured_sd(study), "as measured so far"
    if sd is None:
        sd = assumed_sd(rules, images)
        source = f"if on {_percent(rules.disagreement)} of {images} test images one is right and the other wrong"
    if sd is None:
        return [f"what {rules.metric} can show is said after {FEWEST} pairs of runs; {most}"]
    terms = terms_of(study).values()
    effect, who = rules.shown_effect, "each arm is" if rules.arms == "baseline" else "one arm is"
    alike, differ = (expect(rules, terms, sd, truth) for truth in (0.0, rules.smallest_effect))
    few = "" if differ.better >= POWER else ": raise compare.max_seeds, compare.smallest_effect or the test images"
    return [
        f"two runs differ by {rules.unit.plain(float(f'{sd:.2g}'))} (standard deviation), {source}",
        f"{rules.max_seeds} seeds show an improvement of {effect} with a probability of {_percent(differ.better)}{few}",
        f"about {alike.runs:.0f} runs if the arms are alike ({_percent(alike.answered)} of the comparisons answered), "
        f"{differ.runs:.0f} if {who} better by {effect}; {most}",
    ]


def tuning_luck(study: Study, sd: float) -> Values | None:
    """Returns by how much two arms that are exactly alike would differ by tuning alone, from the spread of the trials.

    Both are tuned with new seeds, by the mean results of all arms and the noise that the trials have around them, and
    then compared. What differs of these means by chance is left out of their spread.

    Args:
        study: the study.
        sd: standard deviation of the difference of a pair of runs.

    Returns:
        Size of the difference in each of 1,000 studies, by the arms whose trials have all ended: nan where both choose
        the same values, 0 where neither is called better or worse. None before there is such an arm, with one seed,
        with replicates, or where validation lacks the compared metric.
    """
    tuning, rules = study.tuning, study.compare
    if tuning is None or tuning.replicates or len(tuning.seeds) < 2:
        return None
    names = study.metric, rules.metric.replace("test", "val", 1)
    table = np.full((2, len(study.arms), len(tuning.tried), len(tuning.seeds)), math.nan)
    for run in tuning.trials:
        place = [*study.arms].index(run.arm), tuning.tried.index(run.tried or {}), tuning.seeds.index(run.seed)
        table[:, *place] = [run.results.get(name, math.nan) for name in names]
    whole = ~np.isnan(table).any((0, 2, 3))
    if not whole.any():
        return None
    (means, noise), (effects, _) = map(_response, table[:, whole])
    draw, sign = np.random.default_rng(0), {"min": -1, "max": 1}[tuning.mode]
    luck = noise / math.sqrt(len(tuning.seeds)) * draw.standard_normal((1000, 2, len(means)))
    one, other = (sign * (means + luck)).argmax(-1).T
    gaps = (effects[one] - effects[other])[:, None] + sd * draw.standard_normal((len(one), rules.max_seeds))
    course = follow(gaps, design_of(rules, len(terms_of(study))))
    called, size = (at(found, course.stop) for found in (course.claims["better"] | course.claims["worse"], course.mean))
    return np.where(one == other, math.nan, np.where(called, np.abs(size), 0.0))


def _response(table: Values) -> tuple[Values, float]:
    """Returns the mean result of each value over arms and seeds, and the standard deviation of trials around them.

    Args:
        table: results (arms, values, seeds).
    """
    arms, values, seeds = table.shape
    by_arm = table.mean((1, 2), keepdims=True)
    rest = table - table.mean(2, keepdims=True) - table.mean(1, keepdims=True) + by_arm
    variance = float((rest**2).sum()) / (arms * (values - 1) * (seeds - 1))
    means = table.mean((0, 2))
    spread = float(means.var(ddof=1))
    kept = max(0.0, 1 - variance / (arms * seeds) / spread) if spread else 0.0
    return means.mean() + math.sqrt(kept) * (means - means.mean()), math.sqrt(variance)


def _percent(fraction: float) -> str:
    """Writes the result of a simulation, which is no certainty where it is near 1."""
    return "over 99 %" if fraction >= 0.995 else f"{100 * fraction:.2g} %"
