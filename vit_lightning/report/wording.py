"""An ablation in words: the answer, a line for each arm with its next step, and how numbers are written."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of
from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.comparisons import ArmComparison
from vit_lightning.report.sequential import Design, visible_difference
from vit_lightning.report.study import Run, Study

NONE = "\N{EN DASH}"
"""Stands where there is no number."""
MINUS, PLUS_MINUS = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}"
FEW = 3
"""Arms that a sentence names; more are counted."""
PHRASES: dict[str, str] = {
    "better": "better than",
    "worse": "worse than",
    "equivalent": "equivalent to",
    "not better": "not better than",
    "not worse": "not worse than",
    "undecided": "undecided against",
    "failed": "failed, so no answer against",
}


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
        sign = "+" if number else ""
        return NONE if math.isnan(number) else f"{self.scale * number:{sign}.{self.digits}f}".replace("-", MINUS)

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


def show_time(seconds: float) -> str:
    """Writes a time with its unit: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class Answer:
    """Part of the headline: what is claimed of some arms."""

    arms: list[str]
    claim: str
    others: list[str]

    @property
    def phrase(self) -> str:
        """The claim with its verb."""
        verb = "" if self.claim.startswith("failed") else "is " if len(self.arms) == 1 else "are "
        return verb + self.claim

    def __str__(self) -> str:
        return " ".join(filter(None, [few(self.arms), self.phrase, few(self.others)]))


def few(names: Sequence[str]) -> str:
    """Names some arms, or counts them if they are many."""
    if len(names) > FEW:
        return f"{len(names)} arms"
    return listed([f'"{name}"' if "," in name else name for name in names])


def answers(analysis: Analysis) -> list[Answer]:
    """Returns the answer: the arms of each verdict, the strongest first."""
    study, groups = analysis.study, dict[str, list[str]]()
    if not analysis.comparisons:
        return [Answer([study.baseline], "alone: there is nothing to compare", [])]
    if analysis.standings:
        place = {standing.arm: standing.rank for standing in analysis.standings}
        for arm in analysis.ranked:
            groups.setdefault(place[arm.name], []).append(arm.name)
        return [Answer(arms, rank, []) for rank, arms in groups.items()]
    if study.compare.arms == "pairs":  # of the arm with the best mean, against all others
        leader = analysis.ranked[0].name
        for one in analysis.ordered:
            groups.setdefault(one.verdict, []).extend([one.other] * (one.arm == leader))
        return [Answer([leader], phrase, groups[name]) for name, phrase in PHRASES.items() if groups.get(name)]
    for one in analysis.ordered:
        groups.setdefault(one.verdict, []).append(one.arm)
    found = [Answer(groups[name], name, []) for name in PHRASES if name in groups]
    if found[0].claim != "failed":  # the baseline is named once
        found[0] = Answer(found[0].arms, PHRASES[found[0].claim], [study.baseline])
    return found


def headline(analysis: Analysis) -> str:
    """Returns the answer in one line; of a grid, with the effects of its factors."""
    return so_far(analysis) + ". ".join(filter(None, ["; ".join(map(str, answers(analysis))), factors(analysis)]))


def so_far(analysis: Analysis) -> str:
    """Returns what stands before the answer of a study that has not finished."""
    return "So far: " if analysis.study.missing else ""


def factors(analysis: Analysis) -> str:
    """Returns the main effects of a grid that are the largest, each on average over the other factors."""
    unit = unit_of(analysis.study.compare.metric)
    known = [effect for effect in analysis.effects if not effect.is_interaction and effect.n]
    largest = sorted(known, key=lambda effect: -abs(effect.effect))[:FEW]
    text = "; ".join(f"{unit.signed(effect.effect)}{unit.suffix} ({effect.name})" for effect in largest)
    more = f"; {counted(len(known) - FEW, 'smaller effect')}" if len(known) > FEW else ""
    return f"On average over the grid: {text}{more}" if known else ""


@dataclass(frozen=True)
class Line:
    """An arm on the first screen."""

    arm: str
    verdict: str
    kind: str
    """The verdict or rank alone."""
    mean: float
    n: int
    """Pairs behind the difference; runs where there is none."""
    following: str = ""
    """Next step with its cost."""
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each arm, the best mean first."""
    how = analysis.study.compare.arms
    make = {"baseline": _against_baseline, "pairs": _against_all, "best": _among_all}[how]
    return [make(analysis, arm) for arm in analysis.ranked]


def _against_baseline(analysis: Analysis, arm: Arm) -> Line:
    found = [one for one in analysis.comparisons if one.arm == arm.name]
    if not found:
        return Line(arm.name, "baseline", "baseline", arm.mean, arm.n)
    [one] = found
    verdict = "failed" if one.verdict == "failed" else f"{PHRASES[one.verdict]} {one.other}"
    verdict = "open" if one.verdict == "undecided" and _is_open(one) else verdict
    return _line(arm, verdict, one, next_step(analysis, one))


def _line(arm: Arm, verdict: str, one: ArmComparison, following: str) -> Line:
    return Line(arm.name, verdict, one.verdict, arm.mean, one.n, following, one.mean, one.low, one.high, one.p)


def _against_all(analysis: Analysis, arm: Arm) -> Line:
    """Returns all verdicts of an arm; numbers are those against the arm with the best mean."""
    both = [*analysis.ordered, *(one.mirrored() for one in analysis.ordered)]
    own, leader = [one for one in both if one.arm == arm.name], analysis.ranked[0].name
    groups = {verdict: [one.other for one in own if one.verdict == verdict] for verdict in PHRASES}
    verdict = "; ".join(f"{PHRASES[name]} {few(others)}" for name, others in groups.items() if others)
    runs, seconds = _cost(analysis, [one for one in own if _is_open(one)])
    following = f"{_runs(runs, seconds)} to the next comparison" if runs else ""
    against = [one for one in own if one.other == leader]
    if not against:
        return Line(arm.name, verdict, "leader", arm.mean, arm.n, following or "take it")
    return _line(arm, verdict, against[0], following or next_step(analysis, against[0]))


def _among_all(analysis: Analysis, arm: Arm) -> Line:
    [own] = [standing for standing in analysis.standings if standing.arm == arm.name]
    against = [one for one in analysis.comparisons if arm.name in (one.arm, one.other)]
    runs, seconds = _cost(analysis, [one for one in against if _is_open(one)])
    following = f"{_runs(runs, seconds)} to the next comparison" if runs else ""
    if own.rank == "not the best":
        following = "leave it"
    elif not following:
        last = f"may be the best too: {analysis.study.compare.max_seeds} seeds do not tell"
        following = "see which runs failed" if own.rank == "failed" else "take it" if own.decided else last
    return Line(arm.name, own.rank, own.rank, arm.mean, arm.n, following, own.mean, own.low, own.high)


def sentence(analysis: Analysis, line: Line) -> str:
    """Returns the line of an arm as a sentence with its numbers."""
    metric = analysis.study.compare.metric
    unit = unit_of(metric)
    value = f"{metric} {unit.value(line.mean)}{unit.sign}"
    if not math.isnan(line.difference):
        against = f" against {analysis.ranked[0].name}" if analysis.study.compare.arms == "pairs" else ""
        value += f", {unit.signed(line.difference)}{unit.suffix}{against}"
    if not math.isnan(line.low):
        value += f", interval {unit.interval(line.low, line.high)}"
    if not math.isnan(line.p):
        value += f", p = {show_p(line.p)}".replace("= <", "<")
    value += f", {counted(line.n, 'run' if math.isnan(line.difference) or analysis.standings else 'pair')}"
    return f"{line.arm}: {line.verdict} ({value}){f'. Next: {line.following}' if line.following else ''}"


def next_step(analysis: Analysis, one: ArmComparison) -> str:
    """Says what a verdict means for a choice, or what the next analysis costs."""
    if one.blocked:
        again = [run for run in one.failed if run.seed in one.seeds[: one.next]]
        return f"mend what failed, then try again: {_runs(len(again), _seconds(analysis, again))}"
    if _is_open(one):
        return f"{_runs(*_cost(analysis, [one]))} to the comparison with {one.next} seeds"
    if one.verdict == "better":
        best = next(better for better in analysis.ordered if better.verdict == "better")
        return f"{'take it' if one.arm == best.arm else 'better too'}{_price(analysis, one)}"
    if one.verdict == "worse":
        return "leave it"
    if one.verdict == "equivalent":
        return f"take either{_price(analysis, one)}"
    if one.verdict == "not better" and one.design.until == "not better":
        return "no reason to take it"
    return _unanswered(analysis, one)


def _is_open(one: ArmComparison) -> bool:
    return one.next is not None and not one.decided and not one.blocked


def _price(analysis: Analysis, one: ArmComparison) -> str:
    """Says how long an arm trains beside the other, if that differs by a tenth or more."""
    times = {arm.name: arm.median("train_seconds") for arm in analysis.arms}
    ratio = times[one.arm] / times[one.other] if times[one.other] > 0 else math.nan
    return f"; trains {ratio:.2g} times as long" if ratio >= 1.1 or ratio <= 0.9 else ""


def _unanswered(analysis: Analysis, one: ArmComparison) -> str:
    """Says that a comparison ended without an answer, and what would give one."""
    rules, unit = analysis.study.compare, unit_of(analysis.study.compare.metric)
    known = {"not better": "no gain that matters; ", "not worse": "no loss that matters; "}.get(one.verdict, "")
    needed = rules.max_seeds * (_seen(one) / rules.smallest_effect) ** 2
    if not needed > rules.max_seeds:
        return f"{known}stop, no answer with {counted(rules.max_seeds, 'seed')}"
    seconds = (needed - one.n) * _seconds(analysis, [Run(arm, 0, "", "missing") for arm in (one.arm, one.other)])
    more = "1,000s of" if needed > 1000 else f"about {float(f'{needed:.1g}'):,.0f}"
    time = "" if math.isnan(seconds) else f" ({show_time(seconds)})"
    return f"{known}stop: to see {unit.plain(rules.smallest_effect)} takes {more} seeds{time}"


def _seen(one: ArmComparison) -> float:
    """Returns the difference that a comparison sees by its last analysis; nan where that is not known."""
    if not one.sd > 0 or not one.design.analyses:
        return math.nan
    return _visible(one.design, float(f"{one.sd / one.design.smallest_effect:.1g}")) * one.sd


def _unseen(analysis: Analysis) -> list[str]:
    """Says what the seeds can show where that is less than was asked."""
    rules, unit = analysis.study.compare, unit_of(analysis.study.compare.metric)
    ended = [one for one in analysis.comparisons if one.verdict in ("undecided", "not better", "not worse")]
    seen = sorted(_seen(one) for one in ended if not (_is_open(one) or one.blocked))
    seen = [difference for difference in seen if difference > rules.smallest_effect]
    if not seen or rules.arms == "best":
        return []
    found = " to ".join(
        dict.fromkeys([unit.signed(seen[0]).removeprefix("+"), unit.signed(seen[-1]).removeprefix("+")])
    )
    more = "; more test images would show smaller ones" if any(one.images for one in ended) else ""
    return [
        f"{counted(rules.max_seeds, 'seed')} show differences of {found}{unit.suffix} here, not of "
        f"{unit.plain(rules.smallest_effect)}{more}."
    ]


@functools.cache
def _visible(design: Design, ratio: float) -> float:
    """Returns the difference that a design sees, in standard deviations of ``ratio`` smallest effects."""
    sd = ratio * design.smallest_effect
    return visible_difference(design, sd) / sd


def _cost(analysis: Analysis, comparisons: Sequence[ArmComparison], *, until_last: bool = False) -> tuple[int, float]:
    """Returns number and seconds of the runs that comparisons need for their next analyses, or for their last."""
    states = {(run.arm, run.seed): run.state for run in analysis.study.runs}
    needed = {
        (arm, seed)
        for one in comparisons
        for arm in (one.arm, one.other)
        for seed in one.seeds[: None if until_last else one.next]
        if states.get((arm, seed), "missing") == "missing"
    }
    return len(needed), _seconds(analysis, [Run(arm, seed, "", "missing") for arm, seed in needed])


def _seconds(analysis: Analysis, runs: Sequence[Run]) -> float:
    """Estimates the time of runs, one after the other, by the medians of their arms; nan before any has ended."""
    times = {arm.name: arm.median("seconds") for arm in analysis.arms}
    known = [time for time in times.values() if not math.isnan(time)]
    any_arm = sum(known) / len(known) if known else math.nan
    return sum(any_arm if math.isnan(times[run.arm]) else times[run.arm] for run in runs)


def _runs(number: int, seconds: float) -> str:
    return counted(number, "run") + ("" if math.isnan(seconds) else f" (about {show_time(seconds)} one by one)")


def recommendation(analysis: Analysis) -> str:
    """Returns what to do now, in a sentence or two."""
    study = analysis.study
    if not analysis.comparisons:
        return "Add an arm to the plan."
    blocked = [one for one in analysis.comparisons if one.blocked]
    missing = [run for run in study.runs if run.state == "missing"]
    if missing:
        text = f"Not finished: {_runs(len(missing), _seconds(analysis, missing))} to the next comparison"
        number, seconds = _cost(analysis, [one for one in analysis.comparisons if _is_open(one)], until_last=True)
        text += f", at most {_runs(number, seconds)} to the last" if number > len(missing) else ""
        return f"{text}. Continue with {command(study)}"
    text = _choice(analysis)
    if not blocked:
        return f"{text} Nothing is left to run."
    arms = listed(list(dict.fromkeys(run.arm for one in blocked for run in one.failed)))
    return f"{text} Failed runs of {arms} stopped a comparison: see why, then {command(study)} --retry"


def command(study: Study) -> str:
    """Returns the command that continues a study."""
    return shlex.join(["lightning", "ablate", study.plan_file or "PLAN", f"--out={study.folder}"])


def _choice(analysis: Analysis) -> str:
    study, ranked = analysis.study, [arm.name for arm in analysis.ranked]
    if analysis.standings:
        places = {standing.arm: standing.rank for standing in analysis.standings}
        good = [arm for arm in ranked if places[arm] in ("the best", "among the best")]
        rest = [arm for arm in ranked if places[arm] == "undecided"]
        if good:
            return f"Take {few(good[:1])}." if len(good) == 1 else f"Take any of {few(good)}, the cheapest for example."
        return f"Take {few(ranked[:1])}, the best mean; it is not shown to be the best ({few(rest)} undecided)."
    if study.compare.arms == "pairs":
        equals = [one.other for one in analysis.ordered if one.arm == ranked[0] and one.verdict != "better"]
        return f"Take {few(ranked[:1])}" + (f"; {few(equals)} not shown to be worse." if equals else ".")
    better = [one.arm for one in analysis.ordered if one.verdict == "better"]
    if better:
        several = f", the best mean of the {len(better)} that are better than {few([study.baseline])}"
        [best] = [one for one in analysis.ordered if one.arm == better[0]]
        unit = unit_of(study.compare.metric)
        gain = f"{unit.signed(best.mean)}{unit.suffix} of {study.compare.metric}"
        return f"Take {few([best.arm])} ({gain}){several if len(better) > 1 else ''}."
    verdicts = {one.arm: one.verdict for one in analysis.ordered}
    if {*verdicts.values()} == {"failed"}:
        return "No arm could be compared."
    is_shown = {*verdicts.values()}.isdisjoint(("undecided", "not worse", "failed"))
    equal = [arm for arm, verdict in verdicts.items() if verdict == "equivalent"]
    also = f"; {few(equal)} may be taken as well" if equal else ""
    return f"Keep {few([study.baseline])}: {'no arm is better' if is_shown else 'no arm is shown to be better'}{also}."


def notes(analysis: Analysis) -> list[str]:
    """Returns what a reader must know beside the verdicts: failures, collapses, arms that change nothing, tuning."""
    return [
        *(_failures(analysis, arm) for arm in analysis.arms if arm.failed),
        *(
            f"{arm.name}: {len(arm.collapsed.seeds)} of {arm.collapsed.runs} runs collapsed (seed "
            f"{listed([str(seed) for seed in arm.collapsed.seeds])}); a rate of up to "
            f"{show_fraction(arm.collapsed.highest)} is compatible with that."
            for arm in analysis.arms
            if arm.collapsed is not None and arm.collapsed.seeds
        ),
        *(
            f"{one.arm} and {one.other} have the same result with every seed: do the keys of this arm change anything?"
            for one in analysis.ordered
            if one.sd == 0 and one.mean == 0
        ),
        *_unseen(analysis),
        *_edges(analysis),
    ]


def _failures(analysis: Analysis, arm: Arm) -> str:
    """Says which runs failed, what that leaves out, and how the difference would be if failed runs were the worst."""
    unit = unit_of(analysis.study.compare.metric)
    seeds = listed([str(run.seed) for run in arm.failed])
    text = f"{len(arm.failed)} of {counted(len(arm.runs), 'run')} of {arm.name} failed (seed {seeds}): seeds from the "
    text += "first of these on do not count, and claims hold only if failures do not depend on the result."
    for one in analysis.comparisons:
        if arm.name in (one.arm, one.other) and not math.isnan(one.with_failures):
            worst = f"{unit.signed(one.with_failures)}{unit.suffix}"
            text += f" {one.arm} against {one.other} with the worst result of the study in place of each: {worst}."
            break
    return text


def _edges(analysis: Analysis) -> list[str]:
    """Names arms whose best value is the first or last that was tried: a better one may lie beyond."""
    tuning = analysis.study.tuning
    if tuning is None:
        return []
    found = []
    for key, values in tuning.options.items():
        if len(values) < 3 or not all(isinstance(value, int | float) for value in values):
            continue
        ends = (min(values), max(values))
        arms = [arm for arm, chosen in tuning.chosen.items() if chosen.get(key) in ends]
        if arms:
            text = f"Tuning chose the smallest or largest {key} for {few(arms)}: better values may lie beyond."
            found.append(text)
    return found


def claim_is_about(analysis: Analysis) -> str:
    """Says what the claims generalise to."""
    study = analysis.study
    if not study.split_varies:
        return "One split for all seeds: claims are about new seeds on these test images, not about other images."
    if analysis.tested.same:
        return "Each seed has a training split of its own: claims are about new seeds and splits, on these test images."
    return "Each seed has a split of its own, the same for all arms: claims are about new seeds and new splits."


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    rules, unit = analysis.study.compare, unit_of(analysis.study.compare.metric)
    effect = unit.plain(rules.smallest_effect)
    first = next(iter(analysis.comparisons)).design.analyses if analysis.comparisons else ()
    after = f"after {', '.join(map(str, first[:3]))}{', ...' * (len(first) > 3)} pairs" if first else "never"
    meaning = {
        "baseline": f"Not better: no gain of {effect} or more; not worse: no loss of that size; equivalent: both",
        "pairs": f"Not better: no gain of {effect} or more; not worse: no loss of that size; equivalent: both",
        "best": f"Not the best: worse than some arm. Among the best: less than {effect} worse than any arm left. "
        "Of arms that are exactly alike, one counts as the best",
    }[rules.arms]
    return (
        f"Arms are compared {after} of runs with the same seeds, at most {rules.max_seeds}; decided arms get no more "
        f"runs, and a claim stands once it is made. The probability of any false claim is at most {rules.alpha:g} over "
        f"all arms and analyses. {meaning}. Intervals hold at every analysis at once. Means of arms are over all "
        "their runs, differences over the pairs of the analysis that decided; they are not corrected for the time of "
        "stopping: after an early stop they are a little too large on average."
    )
