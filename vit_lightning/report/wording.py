"""An ablation in words: the claim for each arm or the next step where there is none, and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.analysis import Analysis, ArmComparison
from vit_lightning.report.statistics import LEAST_PAIRS, POWER
from vit_lightning.report.study import Study

NONE = "\N{EN DASH}"
"""Stands where there is no number."""
MINUS, PLUS_MINUS = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Unit:
    """Notation of a metric: fractions as percentages, others as they are."""

    scale: float
    digits: int
    suffix: str
    """Stands behind a difference: percentages differ by points."""
    sign: str
    """Stands behind a value."""

    def value(self, number: float) -> str:
        return NONE if math.isnan(number) else f"{self.scale * number:.{self.digits}f}".replace("-", MINUS)

    def signed(self, number: float) -> str:
        return NONE if math.isnan(number) else f"{self.scale * number:+.{self.digits}f}".replace("-", MINUS)

    def interval(self, low: float, high: float) -> str:
        return NONE if math.isnan(low) else f"{self.signed(low)} to {self.signed(high)}"

    def plain(self, number: float) -> str:
        shown = f"{self.scale * number:.6g}"
        return shown + (self.suffix.removesuffix("s") if shown == "1" else self.suffix)

    def rounded(self, number: float) -> str:
        """Writes a number with two significant digits."""
        return self.plain(float(f"{number:.2g}"))


def unit_of(metric: str) -> Unit:
    """Returns the notation of a metric."""
    facts = facts_of(metric)
    return Unit(100.0, 2, " points", " %") if facts is not None and facts.percent else Unit(1.0, 4, "", "")


def show_p(p: float) -> str:
    """Writes a p-value with two significant digits."""
    if math.isnan(p):
        return NONE
    return "< .0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def show_r(correlation: float) -> str:
    return NONE if math.isnan(correlation) else f"{correlation:+.2f}".replace("-", MINUS)


def show_fraction(fraction: float) -> str:
    return NONE if math.isnan(fraction) else f"{100 * fraction:.0f} %"


def show_level(level: float) -> str:
    """Writes a level as papers do, such as .0294."""
    return f"{level:.4f}".lstrip("0")


def headline(analysis: Analysis) -> str:
    """Returns the answer in one line."""
    claims: dict[str, list[str]] = {}
    for one in analysis.comparisons:
        claims.setdefault(one.claim.verdict, []).append(_quoted(one.arm))
    if not claims:
        return f"Only {analysis.study.baseline}: there is nothing to compare"
    if analysis.study.missing:
        return f"Undecided: {_missing(analysis.study)}"
    base = _quoted(analysis.study.baseline)
    ends = {"better": f"better than {base}", "worse": f"worse than {base}", "equivalent": f"equivalent to {base}"}
    parts = [
        f"{_few(claims[verdict])}: {ends.get(verdict, f'undecided against {base}')}"
        for verdict in ("better", "worse", "equivalent", "undecided")
        if verdict in claims
    ]
    return "; ".join(parts)


def _few(names: list[str]) -> str:
    return _and(names) if len(names) <= 4 else f"{len(names)} arms"


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentences(analysis: Analysis) -> list[str]:
    """Returns the claim for each arm with its numbers, then the effects of the factors of a grid."""
    return [*(sentence(analysis, one) for one in analysis.comparisons), *_effects(analysis)]


def sentence(analysis: Analysis, one: ArmComparison) -> str:
    """Returns the claim for an arm, or the reason for none."""
    study, claim, pair = analysis.study, one.claim, f"{one.arm} against {analysis.study.baseline}"
    first = f" In the first analysis: {one.first_verdict}." if one.first_verdict is not None else ""
    if study.missing:
        return f"{pair}: undecided, {_missing(study)}.{first}"
    if claim.n < 2:
        return f"{pair}: undecided, as there is {'1' if claim.n else 'no'} pair of runs.{_failures(analysis, one)}"
    unit = unit_of(study.report)
    effect = unit.plain(study.smallest_effect)
    numbers = (
        f"{study.report} {unit.signed(claim.difference)}{unit.suffix}, {100 * (1 - study.alpha):g} % interval "
        f"{unit.interval(claim.low, claim.high)}, {claim.n} pairs of runs, {_equals_p(claim.p_adjusted)} after Holm"
    )
    rest = first + _failures(analysis, one) + _no_variance(one)
    if claim.verdict == "undecided":
        return f"{pair}: undecided ({numbers}). {_next_step(analysis, one)}{rest}"
    if claim.verdict == "equivalent":
        how = f"{_equals_p(claim.p_equivalence)} after Holm"
        return f"{one.arm} is equivalent to {study.baseline} within {effect}, {how} (difference: {numbers}).{rest}"
    small = f" Less than the smallest effect, {effect}." if abs(claim.difference) < study.smallest_effect else ""
    return f"{one.arm} is {claim.verdict} than {study.baseline} ({numbers}).{small}{rest}"


def _equals_p(p: float) -> str:
    return f"p = {show_p(p)}".replace("= <", "<")


def _missing(study: Study) -> str:
    which = " (analysis 2 of 2)" if study.number == 2 else ""
    return f"{study.missing} of {len(study.runs)} runs have not finished{which}"


def _failures(analysis: Analysis, one: ArmComparison) -> str:
    failed = [
        f"{sum(run.state == 'failed' for run in arm.runs)} of {len(arm.runs)} runs of {arm.name} failed"
        for arm in analysis.arms
        if arm.name in (one.arm, analysis.study.baseline) and any(run.state == "failed" for run in arm.runs)
    ]
    return f" Left out: {_and(failed)}." if failed else ""


def _no_variance(one: ArmComparison) -> str:
    if one.claim.sd != 0:
        return ""
    if one.claim.difference == 0:
        return " Every pair of runs has the same result: do the keys of this arm change anything?"
    return " All differences are equal, so p is that of the sign-flip test."


def _next_step(analysis: Analysis, one: ArmComparison) -> str:
    claim, study, unit = one.claim, analysis.study, unit_of(analysis.study.report)
    few = f"Below {LEAST_PAIRS} pairs nothing is claimed. " if claim.n < LEAST_PAIRS else ""
    if one.seeds_needed is None:
        return f"{few}The number of seeds needed is unknown."
    effect = unit.plain(study.smallest_effect)
    if study.number == 2:
        how = f"in a new study of {claim.n + one.seeds_needed} new seeds, as there is no third analysis"
    elif one.seeds_needed > 10 * len(study.seeds) and not math.isnan(one.visible):
        how = f"many: the present ones detect {unit.rounded(one.visible)}"
    else:
        how = f"--add-seeds {one.seeds_needed}"
    more = f"about {one.seeds_needed} more seed{'' if one.seeds_needed == 1 else 's'}"
    if one.between:
        enough = f"There are enough seeds to tell {effect} from none, so the true difference may lie between"
        return f"{enough}; if it is the observed one, {more} would tell which ({how})."
    return f"{few}It takes {more} to decide on {effect} with {100 * POWER:.0f} % power ({how})."


def _effects(analysis: Analysis) -> list[str]:
    """Describes the effect of each factor, averaged over the others; nothing is claimed of them."""
    unit = unit_of(analysis.study.report)
    return [
        f"{effect.name}: {analysis.study.report} {unit.signed(effect.effect)}{unit.suffix}, "
        f"{100 * (1 - analysis.study.alpha):g} % interval {unit.interval(effect.low, effect.high)}, "
        f"averaged over the other factors, {_equals_p(effect.p_adjusted)} after Holm"
        for effect in analysis.effects
        if effect.n > 1 and not effect.name.startswith("(") and not analysis.study.missing
    ]


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    study, rules, unit = analysis.study, analysis.rules, unit_of(analysis.study.report)
    first, second = f"{len(study.seeds)} seeds", f"{len(study.added_seeds)} added"
    which = f"2 of 2 ({first}, {second})" if study.number == 2 else f"1 of at most 2 ({first})"
    level, earlier, arms = show_level(rules.level), rules.level_with(0), len(analysis.comparisons)
    levels = f"at {show_level(earlier)} and {level}" if rules.level < earlier else "at that level"
    family = f" after Holm's correction for {arms} arms" if arms > 1 else ""
    text = (
        f"This is interim analysis {which}. A difference is claimed if the paired t-test over seeds has p at most "
        f"{level}{family}: two analyses {levels} keep the probability of any false difference at {study.alpha:g}. "
        "Equivalent means that two one-sided t-tests at the same level place the difference within "
        f"{unit.plain(study.smallest_effect)}. Below {LEAST_PAIRS} pairs nothing is claimed. Intervals are for new "
        "seeds on this test set."
    )
    if study.number == 1:
        return text
    return (
        f"{text} After two analyses they are t-intervals at {100 * (1 - rules.interval_level):.1f} %, which cover the "
        f"true difference {100 * (1 - study.alpha):g} % of the time."
    )
