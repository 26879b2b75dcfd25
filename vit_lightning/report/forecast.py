"""Forecast of an ablation: what it can show by its maximum of seeds, what that costs, and the luck of tuning.

Before the first analysis it is the mean over simulated studies by the same rules, with the spread as far as it is
known; from then on the chance by which comparisons also end early (``Course.chance``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from vit_lightning.metric_facts import facts_of
from vit_lightning.notation import counted, show_time
from vit_lightning.report.comparisons import (
    ArmComparison,
    are_first,
    compare,
    design_of,
    read_predictions,
    runs_left,
)
from vit_lightning.report.sequential import FIRST, Values, at, follow
from vit_lightning.report.study import Compare, Study
from vit_lightning.report.units import Unit, unit_of

POWER = 0.8
"""Probability of finding a difference, above which a study counts as able to show it."""
FEWEST = 3
"""Pairs from which the spread of their differences is taken; it is a rough one before the first analysis."""
CERTAIN = 3
"""Most that may be known of a spread."""


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the difference of a pair of runs, and where it comes from."""

    sd: float
    pairs: int = 0
    """Pairs of runs that it was measured with; 0 where it is assumed."""
    images: int | None = None
    """Test images of a run, where the metric counts them."""
    disagreement: float | None = None
    """Fraction of the test images that one run of a pair gets right and the other wrong, where that tells it."""
    seeds: int = 0
    """Most pairs of one comparison, which tell whether seeds add to that."""
    freedom: int = 0
    """Degrees of freedom of the differences, by which the deviation is known; 0 where it is taken as it is."""

    @property
    def certainty(self) -> int:
        """Number for how much is known: nothing, the least that it can be, roughly, or as the first analysis tells."""
        return 0 if not self.pairs else 1 + bool(self.freedom) + (self.seeds >= FIRST)


def assumed_spread(rules: Compare, images: int | None) -> Spread | None:
    """Returns the spread by ``compare.disagreement``; None if the metric counts no images, or nobody knows how many.

    A pair of runs that disagree on a fraction of the images have a difference with the variance fraction / images, if
    it is left to chance on each of these images which of the two is right.
    """
    facts = facts_of(rules.metric)
    if images is None or facts is None or not facts.counts_images:
        return None
    return Spread(math.sqrt(rules.disagreement / images), 0, images, rules.disagreement)


def measured_spread(study: Study) -> Spread | None:
    """Returns the spread by the pairs of runs so far; None where they are too few.

    From three pairs of one comparison on it is that of the differences. Of accuracies one pair tells the least that it
    can be: its runs disagree on a fraction of the test images.
    """
    comparisons = compare(study)
    seen = [values for one in comparisons if len(values := list(one.differences.values())) >= FEWEST]
    squares = sum(float(np.var(values)) * len(values) for values in seen)
    if squares == 0:
        return _by_disagreement(study, comparisons)
    freedom, images = sum(len(values) - 1 for values in seen), next((one.images for one in comparisons), None)
    return Spread(math.sqrt(squares / freedom), sum(map(len, seen)), images, None, max(map(len, seen)), freedom)


def _by_disagreement(study: Study, comparisons: Sequence[ArmComparison]) -> Spread | None:
    """Returns the spread by the test images on which the runs of each pair disagree; None if that was not kept.

    What a difference of the arms itself explains is left out, as in the variance of a paired difference of fractions.
    """
    if study.compare.metric != "test/acc":  # whether the label is among the first five is not kept
        return None
    runs = {(run.arm, run.seed): run for run in study.done}
    found = []
    for one in comparisons:
        for seed in one.differences:
            pair = [runs[arm, seed] for arm in (one.arm, one.other)]
            kept = [(run, read_predictions(study.folder / run.folder)) for run in pair]
            right = [table[1] == table[2] for run, table in kept if table and are_first(run, table)]
            if len({len(correct) for correct in right}) == 1 and len(right) == 2:
                found.append(float(np.var(right[0] * 1.0 - right[1])))
    images = next((one.images for one in comparisons if one.images), None)
    if not found or images is None:
        return None
    fraction = max(float(np.mean(found)), 0.5 / images)
    seeds = max(len(one.differences) for one in comparisons)
    return Spread(math.sqrt(fraction / images), len(found), images, fraction, seeds)


@dataclass(frozen=True)
class Forecast:
    """Means over simulated studies."""

    runs: float
    """Training runs of a study."""
    answered: float
    """Fraction of the comparisons that are decided by the last analysis."""
    better: float
    """Fraction of the comparisons with a true difference in which it is found; in all of them, if there is none."""


def expect(rules: Compare, arms: int, sd: float, truth: float, freedom: int = 0) -> Forecast:
    """Returns the means over simulated studies with normal results.

    Args:
        rules: rules of the comparisons.
        arms: number of arms, the baseline included.
        sd: standard deviation of the paired differences.
        truth: true difference of each arm to the baseline; for pairs, of the last arm to all others.
        freedom: degrees of freedom of that deviation, which then varies between studies by what they leave open.
    """
    design, alone = design_of(rules, arms), rules.arms == "baseline"
    studies = max(50, min(1000, 400_000 // ((arms if alone else arms**2) * design.max_pairs)))
    results = np.random.default_rng(0).standard_normal((studies, arms, design.max_pairs)) * sd / math.sqrt(2)
    if freedom:
        results *= np.sqrt(freedom / np.random.default_rng(1).chisquare(freedom, (studies, 1, 1)))
    results[:, 1 if alone else -1 :] += truth
    pairs = [(arm, other) for other, arm in itertools.combinations(range(arms), 2) if not (alone and other)]
    arm, other = np.array(pairs).T
    course = follow(results[:, arm] - results[:, other], design)
    decided, better = (at(flags, course.stop) for flags in (course.decided, course.claims["better"]))
    last = np.array(course.pairs)[course.stop]
    runs = sum(last[:, (arm == one) | (other == one)].max(-1).mean() for one in range(arms))
    return Forecast(float(runs), float(decided.mean()), float(better[:, alone | (arm == arms - 1)].mean()))


@functools.lru_cache
def visible(rules: Compare, arms: int, spread: Spread) -> float:
    """Returns the improvement that a study finds with a probability of ``POWER`` by its last analysis."""
    high = spread.sd

    def missing(difference: float) -> float:
        return POWER - expect(rules, arms, spread.sd, difference, spread.freedom).better

    while missing(high) > 0:
        high *= 2
    return float(optimize.bisect(missing, 0.0, high, xtol=spread.sd / 100))


def forecast_sentences(study: Study, spread: Spread, seconds: float | None = None) -> list[str]:
    """Describes what a study can show, what that costs, and if it cannot show what is asked, what could.

    Args:
        study: its rules, arms and trials.
        spread: spread of the differences.
        seconds: time of the study for each of its runs; None if nobody knows.
    """
    rules, arms, comparisons = study.compare, len(study.arms), compare(study)
    unit, effect = unit_of(rules.metric), unit_of(rules.metric).plain(rules.smallest_effect)
    ended = {(run.arm, run.seed) for run in study.runs if run.state != "missing"}
    left = len(runs_left(study, [one for one in comparisons if one.is_open], until_last=True))
    most = f"{counted(len(ended), 'run')} ended, at most {left} left" if ended else f"at most {arms * rules.max_seeds}"
    lines, time = [_source(spread, unit)], "" if seconds is None else f": at most {show_time(seconds * left)}"
    if under_way := [(one, one.analysis) for one in comparisons if one.is_open and one.analysis is not None]:
        chance = float(np.mean([one.course.chance[place] for one, place in under_way]))
        what = "an answer to" if len(under_way) == 1 else "answers to"
        open_ones = counted(len(under_way), "open comparison")
        text = f"by the pairs so far, {rules.max_seeds} seeds give {what} {open_ones} with a chance of "
        return [*lines, f"{text}{_chance_text(chance)}; {most}{time}", *tuning_sentences(study, spread)]
    seen = visible(rules, arms, spread)
    alike, differ = (expect(rules, arms, spread.sd, truth, spread.freedom) for truth in (0.0, rules.smallest_effect))
    who = "each arm is" if rules.arms == "baseline" else "one arm is"
    if not ended and seconds is not None:
        times = [show_time(seconds * runs) for runs in sorted((alike.runs, differ.runs))]
        time = f": {' to '.join(dict.fromkeys(times))}"
    lines += [
        f"{_condition(spread)}{rules.max_seeds} seeds show an improvement of {unit.rounded(seen)} with "
        f"{100 * POWER:.0f} % power, of {effect} with {_chance_text(differ.better)}",
        f"about {alike.runs:.0f} runs if the arms are alike ({_chance_text(alike.answered)} of the comparisons "
        f"answered), {differ.runs:.0f} runs if {who} better by {effect}; {most}{time}",
    ]
    if short := shortfall(study, spread):
        images = " or more test images" if spread.images else ""
        lines.append(f"{short}: raise compare.max_seeds, or plan with a larger compare.smallest_effect{images}")
    return [*lines, *tuning_sentences(study, spread)]


def shortfall(study: Study, spread: Spread) -> str:
    """Says plainly what a study shows if that is not its smallest effect; an empty text if it is."""
    rules, arms = study.compare, len(study.arms)
    if expect(rules, arms, spread.sd, rules.smallest_effect, spread.freedom).better >= POWER:
        return ""
    unit, seen = unit_of(rules.metric), visible(rules, arms, spread)
    runs = "these runs can show"
    if spread.disagreement is not None and spread.images is not None:
        runs = f"{spread.images:,} test images at {_percent(spread.disagreement)} disagreement can show"
    effect = unit.plain(rules.smallest_effect)
    return f"{runs} differences of {unit.rounded(seen)} with {rules.max_seeds} seeds, not of {effect}"


def tuning_luck(study: Study, sd: float) -> tuple[float, float] | None:
    """Returns how often two arms that are exactly alike would differ by tuning alone, from the spread of the trials.

    Both are tuned with new seeds, by the mean results of all arms and the noise that the trials have around them, and
    then compared. What differs of these means by chance is left out of their spread.

    Args:
        study: the study.
        sd: standard deviation of the difference of a pair of runs.

    Returns:
        Probability that they choose different values, and that they do and one is called better or worse, by the arms
        whose trials have all ended; None before there is one, with one seed, with replicates, or where validation lacks
        the compared metric.
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
    course = follow(gaps, design_of(rules, len(study.arms)))
    called = at(course.claims["better"] | course.claims["worse"], course.stop)
    return float((one != other).mean()), float((called & (one != other)).mean())


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


def tuning_sentences(study: Study, spread: Spread | None) -> list[str]:
    """Describes what tuning alone would show; nothing where that is not known."""
    if spread is None or (luck := tuning_luck(study, spread.sd)) is None:
        return []
    alpha, differ, called = map(_percent, (study.compare.alpha, *luck))
    text = f"the {alpha} of false verdicts leave out the luck of tuning: arms exactly alike get different values "
    text += f"in {differ} of the comparisons, and are called better or worse for that alone in {called} "
    return [f"{text}(tune.replicates={study.compare.max_seeds} tunes anew for each pair of runs, which counts it in)"]


def _source(spread: Spread, unit: Unit) -> str:
    """Says by how much two runs differ, and where that comes from."""
    measured = f"measured on {'a pair' if spread.pairs == 1 else f'{spread.pairs} pairs'} of runs"
    sd = unit.rounded(spread.sd)
    if spread.disagreement is None or spread.images is None:
        return f"the differences of two runs have a standard deviation of {sd} ({measured})"
    where = measured if spread.pairs else "compare.disagreement"
    text = f"two runs disagree on {_percent(spread.disagreement)} of {spread.images:,} test images ({where})"
    return f"{text}, so two runs differ by at least {sd} (standard deviation)"


def _condition(spread: Spread) -> str:
    """Says, before what a plan can show, how far that may be trusted: fully from the first analysis on."""
    if spread.seeds >= FIRST:
        return ""
    if spread.freedom:
        return f"allowing for how little {spread.seeds} pairs tell of that: "
    return f"if by no more, which {FIRST} pairs will tell: " if spread.images else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def _chance_text(fraction: float) -> str:
    """Writes the result of a simulation, which is no certainty where it is near 1."""
    return "over 99 %" if fraction >= 0.995 else _percent(fraction)
