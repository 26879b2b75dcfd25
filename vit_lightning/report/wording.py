"""An ablation in words: the claim for each arm or the next step where there is none, and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.comparisons import ArmComparison, Standing

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
    if not analysis.comparisons:
        return f"Only {analysis.study.baseline}: there is nothing to compare"
    claims: dict[str, list[str]] = {}
    if analysis.standings:
        for standing in analysis.standings:
            claims.setdefault(standing.rank, []).append(_quoted(standing.arm))
    for one in analysis.comparisons if not analysis.standings else ():
        named = _quoted(one.arm) if one.other == analysis.study.baseline else f"{one.arm} against {one.other}"
        claims.setdefault(one.verdict, []).append(named)
    return "; ".join(f"{verdict}: {_few(arms)}" for verdict, arms in claims.items())


def _few(names: list[str]) -> str:
    return _and(names) if len(names) <= 4 else f"{len(names)} arms"


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentences(analysis: Analysis) -> list[str]:
    """Returns the claim for each arm with its numbers, then the effects of the factors of a grid."""
    ranks = [_rank(analysis, standing) for standing in analysis.standings]
    return [*ranks, *(sentence(analysis, one) for one in analysis.comparisons), *_effects(analysis)]


def _rank(analysis: Analysis, one: Standing) -> str:
    unit = unit_of(analysis.study.compare.metric)
    interval = unit.interval(one.low, one.high)
    return f"{one.arm}: {one.rank} (against the best of the others {unit.signed(one.mean)}{unit.suffix}, {interval})"


def sentence(analysis: Analysis, one: ArmComparison) -> str:
    """Returns the claim for an arm, or the reason for none."""
    study = analysis.study
    unit = unit_of(study.compare.metric)
    numbers = (
        f"{study.compare.metric} {unit.signed(one.mean)}{unit.suffix}, interval {unit.interval(one.low, one.high)}, "
        f"{one.n} pairs of runs, {_equals_p(one.p)}"
    )
    following = f" Next analysis after {one.next} pairs." if one.next and not one.blocked else ""
    rest = following + _failures(analysis, one) + _no_variance(one)
    return f"{one.arm} against {one.other}: {one.verdict} ({numbers}).{rest}"


def _equals_p(p: float) -> str:
    return f"p = {show_p(p)}".replace("= <", "<")


def _failures(analysis: Analysis, one: ArmComparison) -> str:
    """Says which runs failed, what that leaves out, and how the difference would be if failed runs were the worst."""
    unit = unit_of(analysis.study.compare.metric)
    failed = [
        f"{len(arm.failed)} of {len(arm.runs)} runs of {arm.name} failed (seed "
        f"{_and([str(run.seed) for run in arm.failed])})"
        for arm in analysis.arms
        if arm.name in (one.arm, one.other) and arm.failed
    ]
    if not failed:
        return ""
    first = one.seeds[one.complete] if one.complete < len(one.seeds) else None
    since = f"; from seed {first} on no pair counts" if one.blocked else ""
    worst = f"{unit.signed(one.with_failures)}{unit.suffix}"
    sensitivity = (
        ""
        if math.isnan(one.with_failures)
        else (f" If each failed run had the worst result of the study, the difference would be {worst}.")
    )
    return f" {_and(failed)}{since}.{sensitivity}"


def _no_variance(one: ArmComparison) -> str:
    if one.sd != 0:
        return ""
    if one.mean == 0:
        return " Every pair of runs has the same result: do the keys of this arm change anything?"
    return " All differences are equal, so the sign-flip test decides."


def collapses(analysis: Analysis) -> list[str]:
    """Says for each arm how many runs ended near chance, and which rate of that they are compatible with."""
    return [
        f"{arm.name}: {len(found.seeds)} of {found.runs} runs collapsed; up to {show_fraction(found.highest)} is "
        "compatible with that"
        for arm in analysis.arms
        if (found := arm.collapsed) is not None
    ]


def _effects(analysis: Analysis) -> list[str]:
    """Describes the effect of each factor, averaged over the others; nothing is claimed of them."""
    unit = unit_of(analysis.study.compare.metric)
    return [
        f"{effect.name}: {analysis.study.compare.metric} {unit.signed(effect.effect)}{unit.suffix}, interval "
        f"{unit.interval(effect.low, effect.high)}, averaged over the other factors (no claim)"
        for effect in analysis.effects
        if effect.n > 1 and not effect.name.startswith("(")
    ]


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    rules, unit = analysis.study.compare, unit_of(analysis.study.compare.metric)
    return (
        f"Arms are compared after 6, 8, 10, ... pairs of runs, up to {rules.max_seeds}; the probability of any false "
        f"claim is at most {rules.alpha:g} over all arms and analyses. Equivalent: the difference lies within "
        f"{unit.plain(rules.smallest_effect)}. Intervals are for new seeds on this test set."
    )
