"""Forecast of an ablation: what it can show and what that costs, before its first runs and after its first pairs.

How many seeds would do comes from simulated studies by the rules of their comparisons (``_smallest``), so that a study
that follows the advice has the chance that was said: before the first analysis with the spread as far as it is known,
from then on with what each open comparison has found so far (``chance_of_answers``).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special

from vit_lightning.metric_facts import facts_of
from vit_lightning.notation import counted, show_time
from vit_lightning.report.comparisons import ArmComparison, are_first, compare, design_of, read_predictions
from vit_lightning.report.schedule import runs_left
from vit_lightning.report.sequential import (
    FIRST,
    KEPT,
    STEP,
    Course,
    Design,
    Flags,
    Spending,
    Values,
    at,
    follow,
    moderated,
    variances_by_others,
)
from vit_lightning.report.study import MOST_SEEDS, Compare, Study
from vit_lightning.report.units import Unit, unit_of

POWER = 0.8
"""Probability of finding a difference, above which a study counts as able to show it."""
ANSWERED = 0.98
"""Fraction of the comparisons; where early spending answers fewer, late spending is chosen."""
FEWEST = 3
"""Pairs from which the spread of their differences is taken; it is a rough one before the first analysis."""
CERTAIN = 3
"""Most that may be known of a spread."""
LIKELY = 0.5
"""Coverage of the interval of true differences among which advice looks for the one that is hardest to answer. With
what the pairs tell on average instead, 58 to 70 % were answered for 80 at half an effect; with .8, 94 to 100 %."""
PATHS = 500
"""Simulated continuations behind a chance of an answer; its standard error is 2 %."""


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the difference of a pair of runs, and where it comes from."""

    sd: float
    pairs: int = 0
    """Pairs of runs that it was measured with; 0 where it is assumed."""
    images: int | None = None
    """Test images of a run, where the metric counts them."""
    disagreement: float | None = None
    """Fraction of the test images that one run of a pair gets right and the other wrong; None if the differences vary
    more than it explains, or the metric counts no images."""
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

    Of accuracies one pair tells the least that it can be: its runs disagree on a fraction of the test images. From
    three pairs of one comparison on it is that of the differences, if they vary more than that explains (chi-squared
    test at 5 %), as where seeds matter, and for other metrics; else the larger of the two.
    """
    comparisons = compare(study)
    counted = _by_disagreement(study, comparisons)
    seen = [values for one in comparisons if len(values := list(one.differences.values())) >= FEWEST]
    squares = sum(float(np.var(values)) * len(values) for values in seen)
    freedom = sum(len(values) - 1 for values in seen)
    if squares == 0 or (counted is not None and special.chdtrc(freedom, squares / counted.sd**2) > 0.05):
        more = max(counted.sd, math.sqrt(squares / freedom)) if counted and squares else 0.0
        return replace(counted, sd=more, freedom=freedom) if counted and more else counted
    images, most = counted.images if counted else None, max(map(len, seen))
    return Spread(math.sqrt(squares / freedom), sum(map(len, seen)), images, seeds=most, freedom=freedom)


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
    """Fraction of the comparisons that are decided by the last analysis; of the arms, where the best is looked for."""
    better: float
    """Fraction of the comparisons with a true difference in which it is found; in all of them, if there is none."""


def expect(rules: Compare, arms: int, sd: float, truth: float, freedom: int = 0) -> Forecast:
    """Returns the means over simulated studies with normal results.

    Args:
        rules: rules of the comparisons.
        arms: number of arms, the baseline included.
        sd: standard deviation of the paired differences.
        truth: true difference of each arm to the baseline; for pairs and best, of the last arm to all others.
        freedom: degrees of freedom of that deviation, which then varies between studies by what they leave open.
    """
    design, alone = design_of(rules, arms), rules.arms == "baseline"
    studies = max(50, min(1000, 400_000 // ((arms if alone else arms**2) * design.max_pairs)))
    results = np.random.default_rng(0).standard_normal((studies, arms, design.max_pairs)) * sd / math.sqrt(2)
    if freedom:
        results *= np.sqrt(freedom / np.random.default_rng(1).chisquare(freedom, (studies, 1, 1)))
    results[:, 1 if alone else -1 :] += truth
    by_others = variances_by_others(results[..., :FIRST])
    if rules.arms == "best":
        return _expect_race(follow(results[:, :, None] - results[:, None], design, by_others))
    pairs = [(arm, other) for other, arm in itertools.combinations(range(arms), 2) if not (alone and other)]
    arm, other = np.array(pairs).T
    course = follow(results[:, arm] - results[:, other], design, by_others[:, arm, other])
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


def best_spending(rules: Compare, arms: int, spread: Spread | None) -> Spending:
    """Returns how alpha is best spent; early where nobody knows the spread."""
    if rules.spending or spread is None:
        return rules.spending or "early"
    answered = [expect(rules, arms, spread.sd, truth).answered for truth in (0.0, rules.smallest_effect)]
    return "early" if sum(answered) >= len(answered) * ANSWERED else "late"


@functools.lru_cache
def visible(rules: Compare, arms: int, spread: Spread) -> float:
    """Returns the improvement that a study finds with a probability of ``POWER`` by its last analysis."""
    high = spread.sd

    def missing(difference: float) -> float:
        return POWER - expect(rules, arms, spread.sd, difference, spread.freedom).better

    while missing(high) > 0:
        high *= 2
    return float(optimize.bisect(missing, 0.0, high, xtol=spread.sd / 100))


Known = tuple[tuple[tuple[float, ...], ...], float | None]
"""Improvements of a comparison so far, and the variance by the other arms; of a race for the best, the results of the
arms that are left."""


def _known(study: Study, comparisons: Sequence[ArmComparison]) -> tuple[Known, ...]:
    """Returns what the comparisons have found so far."""
    sign = 1.0 if study.goal == "maximize" else -1.0
    if study.compare.arms == "best":
        arms = dict.fromkeys(arm for one in comparisons if not one.decided for arm in (one.arm, one.other))
        done = {(run.arm, run.seed): sign * float(run.results[study.compare.metric]) for run in study.done}
        seeds = [seed for seed in study.seeds if all((arm, seed) in done for arm in arms)]
        return ((tuple(tuple(done[arm, seed] for seed in seeds) for arm in arms), None),)
    found = []
    for one in comparisons:
        values = tuple(sign * value for value in itertools.islice(one.differences.values(), one.complete))
        found.append(((values,), None if np.isnan(one.by_others) else float(one.by_others)))
    return tuple(found)


def _continued(values: Values, by_others: float | None, count: int, hardest: float | None) -> Values:
    """Returns values that may follow, by all that those so far tell of their mean and covariance: (paths, k, count).

    Args:
        values: (k, n).
        by_others: variance by the other arms, of one row of values.
        count: number of values.
        hardest: true mean of one row that they have, or the nearest to it in their ``LIKELY`` interval; None for what
            they tell of it (a flat prior on the mean and on the logarithm of the deviation).
    """
    n, mean, draw = values.shape[-1], values.mean(-1), np.random.default_rng(0)
    variance, freedom = np.atleast_2d(np.cov(values)), n - 1.0
    if len(values) == 1:
        prior = None if by_others is None else np.array(by_others)
        error, borrowed = moderated(np.sqrt(variance[0]), np.array([n]), prior)
        variance, freedom = error[None] ** 2 * n, float(borrowed[0])
    sizes, directions = np.linalg.eigh(variance)
    factor = directions * np.sqrt(np.maximum(sizes, 0.0))
    scale = np.sqrt(freedom / draw.chisquare(freedom, PATHS))
    noise = draw.standard_normal((count + 1, PATHS, len(values))) @ factor.T * scale[:, None]  # a longer one goes on
    following: Values = noise[1:] + mean + noise[0] / math.sqrt(n)
    if hardest is not None:
        half = special.stdtrit(freedom, (1 + LIKELY) / 2) * math.sqrt(float(variance[0, 0]) / n)
        following = noise[1:] + np.clip(hardest, mean - half, mean + half)
    return np.moveaxis(following, 0, -1)


@functools.lru_cache(maxsize=1024)
def _chance(known: tuple[Known, ...], design: Design, hardest: bool, anew: bool) -> float:
    """Returns the expected fraction of comparisons, or of the arms in a race, that have an answer by the last analysis.

    Args:
        known: what they have found.
        design: the rules.
        hardest: whether the true differences are those that take most seeds: half the smallest effect, or near to it.
        anew: whether other seeds than theirs begin the comparisons.
    """
    shares = []
    for rows, by_others in known:
        values = np.array(rows)
        sign = -1 if values.mean() < 0 and design.until == "equivalent" else 1
        truth = sign * design.smallest_effect / 2 if hardest and not design.one_sided else None
        paths = _continued(values, by_others, design.max_pairs - (0 if anew else values.shape[-1]), truth)
        if not anew:
            paths = np.concatenate([np.broadcast_to(values, (PATHS, *values.shape)), paths], -1)
        if design.one_sided:
            others = variances_by_others(paths[..., :FIRST])
            shares.append(_expect_race(follow(paths[:, :, None] - paths[:, None], design, others)).answered)
        else:
            course = follow(paths[:, 0], design, None if by_others is None else np.full(PATHS, by_others))
            shares.append(float(at(course.decided, course.stop).mean()))
    return float(np.mean(shares))


def chance_of_answers(study: Study, comparisons: Sequence[ArmComparison]) -> float:
    """Returns the expected fraction of comparisons, after at least one analysis, that are answered by the last one.

    It is simulated by the rules with the results so far, and results to come by all that those tell of the true
    difference and the spread.
    """
    return _chance(_known(study, comparisons), design_of(study.compare, len(study.arms)), hardest=False, anew=False)


def raised(rules: Compare, seeds: int) -> Compare:
    """Returns the rules after ``max_seeds`` is raised while there are results; the same if it is no more."""
    if seeds <= rules.max_seeds:
        return rules
    return replace(rules, max_seeds=seeds, extended=(*rules.extended, rules.max_seeds))


def _smallest(enough: Callable[[int], bool], above: int) -> int | None:
    """Returns the number of seeds above another one that is enough, to 9 %; None if no plan may have so many."""
    low = high = above
    while high < MOST_SEEDS:
        low, high = high, min(_rounded(2 * high), MOST_SEEDS)
        if enough(high):
            grid = {_rounded(low * (high / low) ** (part / 8)) for part in range(1, 8)}
            finer = sorted({n + n % STEP for n in grid if low < n < high} - {high})
            return [*finer, high][bisect.bisect_left(finer, True, key=enough)]
    return None


def needed_seeds(study: Study, comparisons: Sequence[ArmComparison], *, anew: bool = False) -> int | None:
    """Returns the ``max_seeds`` by which ``POWER`` of the comparisons are answered, also where that is hardest.

    It is a maximum only: a comparison ends earlier where it has its answer, and no level is spent for it.

    Args:
        study: the study.
        comparisons: comparisons after at least one analysis.
        anew: whether a new plan compares the same arms with unused seeds instead.
    """
    known, rules, arms = _known(study, comparisons), study.compare, len(study.arms)

    def enough(seeds: int) -> bool:
        then = replace(rules, max_seeds=seeds, extended=()) if anew else raised(rules, seeds)
        return _chance(known, design_of(then, arms), hardest=True, anew=anew) >= POWER

    return _smallest(enough, (*rules.extended, rules.max_seeds)[0] if anew else rules.max_seeds)


@functools.lru_cache
def seeds_to_show(rules: Compare, arms: int, spread: Spread, *, begun: bool) -> int | None:
    """Returns the ``max_seeds`` by which the smallest effect is found with ``POWER``, before the first analysis."""

    def enough(seeds: int) -> bool:
        more = raised(rules, seeds) if begun else replace(rules, max_seeds=seeds)
        return expect(more, arms, spread.sd, rules.smallest_effect, spread.freedom).better >= POWER

    return _smallest(enough, rules.max_seeds)


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
    lines, luck = [_source(spread, unit)], tuning_sentences(study, spread)
    if under_way := [one for one in comparisons if one.is_open and one.analysis is not None]:
        time = "" if seconds is None else f": at most {show_time(seconds * left)}"
        return [*lines, f"{_chances(study, under_way)}; {most}{time}", *luck]
    seen = visible(rules, arms, spread)
    alike, differ = (expect(rules, arms, spread.sd, truth, spread.freedom) for truth in (0.0, rules.smallest_effect))
    who = "each arm is" if rules.arms == "baseline" else "one arm is"
    times = [] if seconds is None else [show_time(seconds * runs) for runs in sorted((alike.runs, differ.runs))]
    if ended:
        most += "" if seconds is None else f": at most {show_time(seconds * left)}"
    else:
        most += f": {' to '.join(dict.fromkeys(times))}" if times else ""
    lines += [
        f"{_condition(spread)}{rules.max_seeds} seeds show an improvement of {unit.rounded(seen)} with "
        f"{100 * POWER:.0f} % power, of {effect} with {_chance_text(differ.better)}",
        f"about {alike.runs:.0f} runs if the arms are alike ({_chance_text(alike.answered)} of the comparisons "
        f"answered), {differ.runs:.0f} runs if {who} better by {effect}; {most}",
    ]
    if short := shortfall(study, spread):
        images = spread.images if spread.disagreement is not None else None
        more = [f"take about {_rounded(_factor(study, spread) * images):,} test images"] if images else []
        needed = seeds_to_show(rules, arms, spread, begun=bool(ended))
        advice = [f"compare.max_seeds to {needed}"] if needed else []
        if ended:  # what the plan promised stays
            anew = seeds_to_show(rules, arms, spread, begun=False) if needed is None else None
            others = [f"unused seeds and compare.max_seeds={anew}"] if anew else []
            others += ["a larger compare.smallest_effect", *(text.removeprefix("take ") for text in more)]
            advice = [*(f"raise {text}" for text in advice), f"take, in a new plan, {' or '.join(others)}"]
        else:
            advice = ["raise compare.smallest_effect", *advice, *more]
        lines.append(f"{short}: {', or '.join(advice)}")
    return [*lines, *luck]


def _chances(study: Study, comparisons: Sequence[ArmComparison]) -> str:
    """Says how likely answers are by the results so far, and if they are not, how many seeds would make them so."""
    seeds, known = study.compare.max_seeds, sorted({one.n for one in comparisons})
    chance = chance_of_answers(study, comparisons)
    after = f"by the first {known[0]} pairs" if len(known) == 1 else f"by the first {known[0]} to {known[-1]} pairs"
    if study.compare.arms == "best":
        text = f"{after}, {seeds} seeds rank {_chance_text(chance)} of the arms that are left"
    elif len(comparisons) == 1:
        text = f"{after}, an answer by {seeds} seeds has a chance of {_chance_text(chance)}"
    else:
        text = f"{after}, {seeds} seeds answer {_chance_text(chance)} of the {len(comparisons)} open comparisons"
    return text if chance >= POWER else f"{text}{_advice(study, comparisons)}"


def more_seeds(study: Study, comparisons: Sequence[ArmComparison]) -> str:
    """Says, behind what comparisons could not answer, how many seeds would."""
    return _advice(study, comparisons) if study.compare.max_seeds < MOST_SEEDS else ""


def _advice(study: Study, comparisons: Sequence[ArmComparison]) -> str:
    """Says how many seeds give comparisons answers, or what else does."""
    chance, rules = f"{100 * POWER:.0f} %", study.compare
    gives = f"answers about {chance} of the open ones"
    if len(comparisons) == 1:
        can_be_kept = comparisons[0].verdict == "not worse"
        gives = f"{'tells whether it is better' if can_be_kept else 'gives an answer'} with a chance of about {chance}"
    gives = f"ranks about {chance} of the arms that are left" if rules.arms == "best" else gives
    if needed := needed_seeds(study, comparisons):
        return f"; compare.max_seeds={needed} {gives}"
    images = " or more test images" if any(one.images for one in comparisons) else ""
    new = needed_seeds(study, comparisons, anew=True)
    helps = f"compare.max_seeds={new} from the start" if new else f"a larger compare.smallest_effect{images}"
    planned = (*rules.extended, rules.max_seeds)[0]
    why = f", as {_percent(KEPT)} of each level are left beyond the planned {planned} seeds"
    helps += f", or {images.removeprefix(' or ')}" if new and images else ""
    return f"; no compare.max_seeds up to {MOST_SEEDS} {gives}{why}: take a new plan with unused seeds and {helps}"


def _factor(study: Study, spread: Spread) -> float:
    """Returns how many times as many results as those of all its seeds show a study's smallest effect."""
    rules = study.compare
    return (visible(rules, len(study.arms), spread) / rules.smallest_effect) ** 2


def shortfall(study: Study, spread: Spread) -> str:
    """Says plainly what a study shows if that is not its smallest effect; an empty text if it is."""
    rules, arms = study.compare, len(study.arms)
    if expect(rules, arms, spread.sd, rules.smallest_effect, spread.freedom).better >= POWER:
        return ""
    unit, seen = unit_of(rules.metric), visible(rules, arms, spread)
    runs = "these runs can show"
    if spread.disagreement is not None and spread.images is not None and not spread.freedom:
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
    luck = None if spread is None else tuning_luck(study, spread.sd)
    if luck is None:
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
    counted = unit.rounded(math.sqrt(spread.disagreement / spread.images))
    if spread.freedom and counted != sd:
        return f"{text}, which explains {counted} of a standard deviation of {sd} between two runs"
    return f"{text}, so two runs differ by {'' if spread.freedom else 'at least '}{sd} (standard deviation)"


def _condition(spread: Spread) -> str:
    """Says, before what a plan can show, how far that may be trusted: fully from the first analysis on."""
    if spread.seeds >= FIRST:
        return ""
    if spread.freedom:
        return f"allowing for how little {spread.seeds} pairs tell of that: "
    return f"if by no more, which {FIRST} pairs will tell: " if spread.images else ""


def _rounded(number: float) -> int:
    """Rounds up to two significant digits."""
    unit: int = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def _chance_text(fraction: float) -> str:
    """Writes the result of a simulation, which is no certainty where it is near 1."""
    return "over 99 %" if fraction >= 0.995 else _percent(fraction)
