"""An ablation in words: the claim for each arm or the next step where there is none, and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.analysis import Analysis, ArmComparison
from vit_lightning.report.statistics import LEAST_PAIRS, POWER

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
        return f"Undecided: {_missing(analysis)}"
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
    study, claim, base = analysis.study, one.claim, analysis.study.baseline
    if analysis.study.missing:
        return f"{one.arm} against {base}: undecided, {_missing(analysis)}.{_first_verdict(one)}"
    if claim.n < 2:
        there = "there is 1 pair of runs" if claim.n else "there is no pair of runs"
        return f"{one.arm} against {base}: undecided, as {there}.{_failures(analysis, one)}"
    unit = unit_of(study.report)
    effect = unit.plain(study.smallest_effect)
    numbers = (
        f"{study.report} {unit.signed(claim.difference)}{unit.suffix}, {100 * (1 - study.alpha):g} % interval "
        f"{unit.interval(claim.low, claim.high)}, {claim.n} pairs of runs, "
        f"p = {show_p(claim.p_adjusted)} after Holm".replace("= <", "<")
    )
    rest = _first_verdict(one) + _failures(analysis, one) + _no_spread(one)
    if claim.verdict == "undecided":
        return f"{one.arm} against {base}: undecided ({numbers}). {_what_next(analysis, one)}{rest}"
    if claim.verdict == "equivalent":
        how = f"p = {show_p(claim.p_equivalence)} after Holm".replace("= <", "<")
        return f"{one.arm} is equivalent to {base} within {effect}, {how} (difference: {numbers}).{rest}"
    small = f" That is less than the {effect} that matter." if abs(claim.difference) < study.smallest_effect else ""
    return f"{one.arm} is {claim.verdict} than {base} ({numbers}).{small}{rest}"


def _missing(analysis: Analysis) -> str:
    study, look = analysis.study, "the second look" if analysis.study.number == 2 else "the study"
    return f"{look} is not over: {analysis.study.missing} of {len(study.runs)} runs still to come"


def _first_verdict(one: ArmComparison) -> str:
    return f" At the first look: {one.first_verdict}." if one.first_verdict is not None else ""


def _failures(analysis: Analysis, one: ArmComparison) -> str:
    failed = [
        f"{sum(run.state == 'failed' for run in arm.runs)} of {len(arm.runs)} runs of {arm.name} failed"
        for arm in analysis.arms
        if arm.name in (one.arm, analysis.study.baseline) and any(run.state == "failed" for run in arm.runs)
    ]
    return f" Left out: {_and(failed)}." if failed else ""


def _no_spread(one: ArmComparison) -> str:
    if one.claim.sd != 0:
        return ""
    if one.claim.difference == 0:
        return " Every pair of runs came out alike: do the keys of this arm change anything?"
    return " Every pair differs by the same, so p is that of the sign-flip test."


def _what_next(analysis: Analysis, one: ArmComparison) -> str:
    claim, study = one.claim, analysis.study
    few = f"Below {LEAST_PAIRS} pairs nothing is claimed. " if claim.n < LEAST_PAIRS else ""
    if one.seeds_needed is None:
        return f"{few}How many seeds it takes cannot be said.".strip()
    unit = unit_of(study.report)
    effect = unit.plain(study.smallest_effect)
    if study.number == 1:
        how = f"--add-seeds {one.seeds_needed}"
        if one.seeds_needed > 10 * len(study.seeds) and not math.isnan(one.visible):
            how = f"many: those that there are see {unit.rounded(one.visible)}"
    else:
        how = f"in a new study of {claim.n + one.seeds_needed} fresh seeds, as there is no third look"
    more = f"{one.seeds_needed} more seed{'' if one.seeds_needed == 1 else 's'}"
    if one.between:
        seen = f"if the true difference is the one that was seen, it takes about {more} to tell which"
        return f"There are seeds enough to tell {effect} from none, so the truth may lie between; {seen} ({how})."
    return f"{few}It takes about {more} to decide about {effect} with {100 * POWER:.0f} % power ({how})."


def _effects(analysis: Analysis) -> list[str]:
    """Describes the effect of each factor, averaged over the others; nothing is claimed of them."""
    unit = unit_of(analysis.study.report)
    return [
        f"{effect.name}: {analysis.study.report} {unit.signed(effect.effect)}{unit.suffix}, "
        f"{100 * (1 - analysis.study.alpha):g} % interval {unit.interval(effect.low, effect.high)}, "
        f"averaged over the other factors, p = {show_p(effect.p_adjusted)} after Holm".replace("= <", "<")
        for effect in analysis.effects
        if effect.n > 1 and not effect.name.startswith("(") and not analysis.study.missing
    ]


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    study, rules = analysis.study, analysis.rules
    unit = unit_of(study.report)
    first, second = f"{len(study.seeds)} seeds", f"{len(study.added_seeds)} added"
    look = f"look 2 of 2 ({first}, {second})" if study.number == 2 else f"look 1 of at most 2 ({first})"
    level, arms = show_level(rules.level), len(analysis.comparisons)
    earlier = rules.level_with(0)
    levels = f"two looks at {show_level(earlier)} and {level}" if rules.level < earlier else "two looks at that level"
    wider = (
        f" After two looks they are t-intervals at {100 * (1 - rules.interval_level):.1f} %, which hold the truth "
        f"{100 * (1 - study.alpha):g} % of the time."
    )
    family = f" after Holm's correction for {arms} arms" if arms > 1 else ""
    return (
        f"This is {look}. A difference is claimed if the paired t-test over seeds has p at most {level}{family}: "
        f"{levels} keep the chance of any false difference at {study.alpha:g}. Equivalent means that "
        f"two one-sided t-tests at the same level place the difference within {unit.plain(study.smallest_effect)}. "
        f"Below {LEAST_PAIRS} pairs nothing is claimed. Intervals speak of new seeds on this test set."
    ) + (wider if study.number == 2 else "")
