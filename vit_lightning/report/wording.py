"""An ablation in words: the answer, a line for each arm with its next step, and how numbers are written."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of
from vit_lightning.notation import counted, show_time
from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.comparisons import ArmComparison
from vit_lightning.report.sequential import MIRRORED
from vit_lightning.report.study import Run, Study
from vit_lightning.report.variance import highest_rate

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

OUTCOMES = {
    **dict.fromkeys(("better", "the best", "among the best"), "better"),
    **dict.fromkeys(("worse", "not the best"), "worse"),
    **dict.fromkeys(("equivalent", "not better", "not worse"), "same"),
    "failed": "failed",
}
"""Meaning of verdicts and ranks; others are open."""


@dataclass(frozen=True)
class Unit:
    """Notation of a metric: fractions as percentages, others as they are."""

    scale: float = 1.0
    digits: int = 4
    points: str = ""
    """Unit of a difference: percentages differ by points."""
    sign: str = ""
    """Unit of a value."""

    def label(self, name: str) -> str:
        """Returns a name of values with their unit."""
        return f"{name} ({self.sign.strip()})" if self.sign else name

    def difference_label(self, name: str) -> str:
        """Returns a name of differences with their unit."""
        return f"{name} ({self.points.strip()})" if self.points else name

    def value(self, number: float, sign: str = "") -> str:
        return NONE if math.isnan(number) else f"{self.scale * number:{sign}.{self.digits}f}".replace("-", MINUS)

    def signed(self, number: float) -> str:
        return self.value(number, "+" if number else "")

    def difference(self, number: float) -> str:
        """Writes a difference with its unit."""
        return self.signed(number) + self.points

    def interval(self, low: float, high: float) -> str:
        return NONE if math.isnan(low) else f"{self.signed(low)} to {self.signed(high)}"

    def plain(self, number: float) -> str:
        shown = f"{self.scale * number:.6g}"
        return shown + (self.points.removesuffix("s") if shown == "1" else self.points)

    def rounded(self, number: float) -> str:
        """Writes a number with two significant digits."""
        return self.plain(float(f"{number:.2g}"))


def unit_of(metric: str) -> Unit:
    """Returns the notation of a metric."""
    facts = facts_of(metric)
    return Unit(100.0, 2, " points", " %") if facts is not None and facts.percent else Unit()


def show_p(p: float) -> str:
    """Writes a p-value with two significant digits."""
    if math.isnan(p):
        return NONE
    return "< .0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def show_fraction(fraction: float) -> str:
    return NONE if math.isnan(fraction) else f"{100 * fraction:.0f} %"


def listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def few(names: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """Names some arms, each as ``shown`` writes it, or counts them if they are many."""
    if len(names) > FEW:
        return f"{len(names)} arms"
    return listed([shown(f'"{name}"' if "," in name else name) for name in names])


def answer(analysis: Analysis, shown: Callable[[str], str] = str) -> str:
    """Returns the answer in one line: the arms of each verdict, the strongest first; ``shown`` writes their names."""
    baseline, groups = analysis.study.baseline, _by_kind(analysis)
    if not analysis.comparisons:
        return f"{shown(baseline)} is alone: there is nothing to compare"
    if analysis.standings:
        found = [(arms, rank, "") for rank, arms in groups.items()]
    elif analysis.study.compare.arms == "pairs":  # of the arm with the best mean, against all others
        kinds = {MIRRORED.get(line.kind, line.kind): line.kind for line in lines(analysis)}
        of = {kind: groups[kinds[kind]] for kind in PHRASES if kind in kinds}
        found = [([analysis.reference], PHRASES[kind], few(arms, shown)) for kind, arms in of.items()]
    else:
        found = [(groups[kind], kind, "") for kind in PHRASES if kind in groups]
        arms, first, _ = found[0]
        if first != "failed":  # the baseline is named once
            found[0] = arms, PHRASES[first], shown(baseline)
    parts = []
    for arms, claim, others in found:
        verb = "" if claim.startswith("failed") else "is" if len(arms) == 1 else "are"
        parts.append(" ".join(filter(None, [few(arms, shown), verb, claim, others])))
    return ("So far: " if analysis.study.missing else "") + "; ".join(parts)


def _by_kind(analysis: Analysis) -> dict[str, list[str]]:
    """Returns the arms of each verdict or rank, the best mean first."""
    groups: dict[str, list[str]] = {}
    for line in lines(analysis):
        groups.setdefault(line.kind, []).append(line.arm)
    return groups


def headline(analysis: Analysis) -> str:
    """Returns the answer in one line; of a grid, with the effects of its factors."""
    return ". ".join(filter(None, [answer(analysis), factors(analysis)]))


def factors(analysis: Analysis) -> str:
    """Returns the main effects of a grid that are the largest, each on average over the other factors."""
    unit = unit_of(analysis.study.compare.metric)
    known = [effect for effect in analysis.effects if not effect.is_interaction and effect.n]
    largest = sorted(known, key=lambda effect: -abs(effect.effect))[:FEW]
    text = "; ".join(f"{unit.difference(effect.effect)} ({effect.name})" for effect in largest)
    more = f"; {counted(len(known) - FEW, 'smaller effect')}" if len(known) > FEW else ""
    return f"On average over the grid: {text}{more}" if known else ""


@dataclass(frozen=True)
class Line:
    """An arm on the first screen."""

    arm: str
    verdict: str
    kind: str
    """The verdict or rank alone; where all pairs are compared, that against the arm with the best mean."""
    mean: float
    n: int
    """Pairs behind the difference; runs where there is none."""
    following: str = ""
    """Next step with its cost."""
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    values: tuple[float, ...] = ()
    """Differences of the pairs."""

    @property
    def outcome(self) -> str:
        """Meaning of the kind: better, worse, same, failed or open."""
        return OUTCOMES.get(self.kind, "open")


@functools.lru_cache(maxsize=4)
def lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each arm, the best mean first."""
    both = [*analysis.ordered, *(one.mirrored() for one in analysis.ordered)]
    make = _among_all if analysis.standings else _against_one
    return [make(analysis, arm, [one for one in both if one.arm == arm.name]) for arm in analysis.ranked]


def _against_one(analysis: Analysis, arm: Arm, own: list[ArmComparison]) -> Line:
    """Returns the line of an arm by its comparison with the baseline, or with the arm that has the best mean."""
    pairs = analysis.study.compare.arms == "pairs"
    groups = {verdict: [one.other for one in own if one.verdict == verdict] for verdict in PHRASES}
    verdict = "; ".join(f"{PHRASES[name]} {few(others)}" for name, others in groups.items() if others)
    one = next((one for one in own if one.other == analysis.reference), None)
    if one is None:
        following = (_to_next(analysis, own) or "take it") if pairs else ""
        verdict, kind = (verdict, "leader") if pairs else ("baseline", "baseline")
        return Line(arm.name, verdict, kind, arm.mean, arm.n, following)
    if not pairs and (one.verdict == "failed" or (one.verdict == "undecided" and one.is_open)):
        verdict = "failed" if one.verdict == "failed" else "open"
    following = _to_next(analysis, own) or next_step(analysis, one)
    numbers = one.mean, one.low, one.high, one.p, tuple(one.counted.values())
    return Line(arm.name, verdict, one.verdict, arm.mean, one.n, following, *numbers)


def _among_all(analysis: Analysis, arm: Arm, own: list[ArmComparison]) -> Line:
    [place] = [standing for standing in analysis.standings if standing.arm == arm.name]
    following = "leave it" if place.verdict == "not the best" else _to_next(analysis, own)
    if not following:
        last = f"may be the best too: {analysis.study.compare.max_seeds} seeds do not tell"
        following = "see which runs failed" if place.verdict == "failed" else "take it" if place.decided else last
    return Line(arm.name, place.verdict, place.verdict, arm.mean, arm.n, following, place.mean, place.low, place.high)


def _to_next(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says what the next analyses of comparisons cost; an empty text where none follows."""
    runs, seconds = _cost(analysis, [one for one in comparisons if one.is_open])
    return f"{_runs(runs, seconds)} to the next comparison" if runs else ""


def sentence(analysis: Analysis, line: Line) -> str:
    """Returns the line of an arm as a sentence with its numbers."""
    metric = analysis.study.compare.metric
    unit = unit_of(metric)
    value = f"{metric} {unit.value(line.mean)}{unit.sign}"
    if not math.isnan(line.difference):
        against = f" against {analysis.reference}" if analysis.study.compare.arms == "pairs" else ""
        value += f", {unit.difference(line.difference)}{against}"
    if not math.isnan(line.low):
        value += f", interval {unit.interval(line.low, line.high)}"
    if not math.isnan(line.p):
        value += f", p = {show_p(line.p)}".replace("= <", "<")
    value += f", {counted(line.n, 'run' if math.isnan(line.difference) or analysis.standings else 'pair')}"
    return f"{line.arm}: {line.verdict} ({value}){f'. Next: {line.following}' if line.following else ''}"


def next_step(analysis: Analysis, one: ArmComparison) -> str:
    """Says what a verdict means for a choice."""
    if one.blocked:
        again = [run for run in one.failed if run.seed in one.study.seeds[: one.seeds_for(one.next or one.n)]]
        return f"mend what failed, then try again: {_runs(len(again), _seconds(analysis, again))}"
    if one.verdict == "better":
        best = next(better for better in analysis.ordered if better.verdict == "better")
        return f"{'take it' if one.arm == best.arm else 'better too'}{_price(analysis, one)}"
    if one.verdict == "not better" and one.design.until == "not better":
        return "no reason to take it"
    stop = f"stop, no answer with {counted(analysis.study.compare.max_seeds, 'seed')}"
    known = {
        "worse": "leave it",
        "equivalent": f"take either{_price(analysis, one)}",
        "not better": f"no gain that matters; {stop}",
        "not worse": f"no loss that matters; {stop}",
    }
    return known.get(one.verdict, stop)


def _price(analysis: Analysis, one: ArmComparison) -> str:
    """Says how long an arm trains beside the other, if that differs by a tenth or more."""
    times = {arm.name: arm.median("train_seconds") for arm in analysis.arms}
    ratio = times[one.arm] / times[one.other] if times[one.other] > 0 else math.nan
    return f"; trains {ratio:.2g} times as long" if ratio >= 1.1 or ratio <= 0.9 else ""


def _cost(analysis: Analysis, comparisons: Sequence[ArmComparison], *, until_last: bool = False) -> tuple[int, float]:
    """Returns number and seconds of the runs that comparisons need for their next analyses, or for their last."""
    states = {(run.arm, run.seed): run.state for run in analysis.study.runs}
    needed = {
        (arm, seed)
        for one in comparisons
        for arm in (one.arm, one.other)
        for seed in one.study.seeds[: one.seeds_for(one.design.max_pairs if until_last else one.next or one.n)]
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
        number, seconds = _cost(analysis, [one for one in analysis.comparisons if one.is_open], until_last=True)
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
    found, study, best = lines(analysis), analysis.study, few([analysis.ranked[0].name])
    groups = _by_kind(analysis)
    if analysis.standings:
        good = groups.get("the best") or groups.get("among the best") or []
        if good:
            return f"Take {few(good)}." if len(good) == 1 else f"Take any of {few(good)}, the cheapest for example."
        rest = few(groups.get("undecided", []))
        return f"Take {best}, the best mean; it is not shown to be the best ({rest} undecided)."
    if study.compare.arms == "pairs":
        equals = [line.arm for line in found if line.kind not in ("leader", "worse")]
        return f"Take {best}" + (f"; {few(equals)} not shown to be worse." if equals else ".")
    if better := [line for line in found if line.kind == "better"]:
        gain = f"{unit_of(study.compare.metric).difference(better[0].difference)} of {study.compare.metric}"
        several = f", the best mean of the {len(better)} that are better than {few([study.baseline])}"
        return f"Take {few([better[0].arm])} ({gain}){several if len(better) > 1 else ''}."
    if groups.keys() == {"baseline", "failed"}:
        return "No arm could be compared."
    why = "no arm is better" if groups.keys() <= {"baseline", "worse", "equivalent", "not better"} else ""
    also = f"; {few(groups['equivalent'])} may be taken as well" if "equivalent" in groups else ""
    return f"Keep {few([study.baseline])}: {why or 'no arm is shown to be better'}{also}."


def notes(analysis: Analysis) -> list[str]:
    """Returns what a reader must know beside the verdicts: failures, collapses, arms that change nothing, tuning."""
    return [
        *(_failures(analysis, arm) for arm in analysis.arms if arm.failed),
        *(
            f"{arm.name}: {len(arm.collapsed)} of {arm.n} runs collapsed (seed {listed([*map(str, arm.collapsed)])}); "
            f"a rate of up to {show_fraction(highest_rate(len(arm.collapsed), arm.n))} is compatible with that."
            for arm in analysis.arms
            if arm.collapsed
        ),
        *(
            f"{one.arm} and {one.other} have the same result with every seed: do the keys of this arm change anything?"
            for one in analysis.ordered
            if one.sd == 0 and one.mean == 0
        ),
        *_edges(analysis),
    ]


def _failures(analysis: Analysis, arm: Arm) -> str:
    """Says which runs failed, what that leaves out, and how the difference would be if failed runs were the worst."""
    unit = unit_of(analysis.study.compare.metric)
    seeds = listed([str(run.seed) for run in arm.failed])
    text = f"{len(arm.failed)} of {counted(len(arm.runs), 'run')} of {arm.name} failed (seed {seeds}): these "
    text += "seeds do not count, and claims hold only if failures do not depend on the result."
    for one in analysis.comparisons:
        if arm.name in (one.arm, one.other) and not math.isnan(one.with_failures):
            worst = unit.difference(one.with_failures)
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
