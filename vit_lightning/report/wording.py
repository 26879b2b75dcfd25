"""An ablation in words: the answer, a line for each arm with its next step, and how numbers are written."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vit_lightning.config.files import word
from vit_lightning.notation import counted, show_time
from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.comparisons import ArmComparison, base_of, runs_left
from vit_lightning.report.sequential import KEPT, UNLIKELY
from vit_lightning.report.study import MOST_SEEDS, SIZES, Study, arm_name, written
from vit_lightning.report.units import NONE, unit_of
from vit_lightning.report.variance import unlike_spreads

FEW = 3
"""Arms that a sentence names; more are counted."""


@dataclass(frozen=True)
class Kind:
    """Words of a verdict."""

    phrase: str
    """The verdict; than, to and against another arm."""
    outcome: str
    """Its meaning: better, worse, same, failed or open."""
    following: str
    """What it means for a choice."""


KINDS = {
    "clearly better": Kind("better{than}, by {effect} or more", "better", "{take}{price}"),
    "better": Kind("better{than}", "better", "{take}{price}"),
    "slightly better": Kind("slightly better{than} (by less than {effect})", "same", "no reason to switch{price}"),
    "clearly worse": Kind("worse{than}, by {effect} or more", "worse", "leave it"),
    "worse": Kind("worse{than}", "worse", "leave it"),
    "slightly worse": Kind("slightly worse{than} (by less than {effect})", "same", "no reason to switch{price}"),
    "equivalent": Kind("equivalent{to} (within {effect})", "same", "{either}{price}"),
    "not better": Kind(
        "not better{than} by {effect}, not shown worse", "same", "stop: no gain of {effect}, no loss shown"
    ),
    "not worse": Kind(
        "not worse{than} by {effect}, not shown better", "same", "stop: no loss of {effect}, no gain shown{failed}"
    ),
    "undecided": Kind("undecided{against}", "open", "stop{why}"),
    "failed": Kind("failed, no answer{against}", "failed", ""),
}
"""Verdicts, the strongest first."""
HERE = "on these images only"
SUM = "the sum of what each does alone"
"""What two levels together are compared with."""
BETTER, WORSE = ("clearly better", "better"), ("clearly worse", "worse", "slightly worse")


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


def quoted(name: str) -> str:
    """Sets a name apart, which may be a word such as none or hold commas."""
    return f"'{name}'"


def few(names: Sequence[str], shown: Callable[[str], str] = quoted, noun: str = "arms") -> str:
    """Names some arms, each as ``shown`` writes it, or counts them if they are many."""
    return f"{len(names)} {noun}" if len(names) > FEW else listed([shown(name) for name in names])


def named(analysis: Analysis, arm: str, shown: Callable[[str], str] = quoted) -> str:
    """Names an arm with the values that tuning chose for it: verdicts are about these; ``shown`` writes the name."""
    chosen = {} if analysis.study.tuning is None else analysis.study.tuning.chosen.get(arm, {})
    values = listed([f"{key.rpartition('.')[2]} {word(value)}" for key, value in chosen.items()])
    return shown(arm) + (f" with {values}" if values else "")


def reference(analysis: Analysis) -> str:
    """Names the arm or arms that the differences on the first screen are to."""
    if SIZES in analysis.study.factors:
        base = analysis.study.baseline.removesuffix(arm_name("", analysis.study.factors[SIZES][0]))
        return f"{quoted(base)} of its size"
    return quoted(analysis.reference)


def kind_of(one: ArmComparison) -> str:
    """Returns the verdict by all that is claimed: beside a difference also whether it matters, or is shown not to.

    A difference that is claimed and whose interval lies beyond the smallest effect matters; a claim of that is false
    with less than half the level of a comparison, where nothing else that is claimed on its side can be false.
    """
    if one.verdict not in ("better", "worse"):
        return one.verdict
    if f"not {one.verdict}" in one.claims:
        return f"slightly {one.verdict}"
    matters = min(abs(one.low), abs(one.high)) >= one.design.smallest_effect
    return f"clearly {one.verdict}" if matters else one.verdict


def phrase(analysis: Analysis, kind: str, others: str = "") -> str:
    """Writes a verdict, against other arms if they are given."""
    joined = {name: f" {name} {others}" if others else "" for name in ("than", "to", "against")}
    return KINDS[kind].phrase.format(effect=_effect(analysis), **joined)


def _effect(analysis: Analysis) -> str:
    rules = analysis.study.compare
    return unit_of(rules.metric).plain(rules.smallest_effect)


def headline(analysis: Analysis, shown: Callable[[str], str] = quoted) -> str:
    """Returns the answer in one line: the arms of each verdict, the strongest first; ``shown`` writes their names."""
    text = ("So far: " if analysis.study.missing and analysis.comparisons else "") + _answer(analysis, shown)
    further = [] if analysis.then is None else [*analysis.then.by_metric()]
    return "; ".join([text, *(f"by {one.study.compare.metric} {_answer(one, shown)}" for one in further)])


def _answer(analysis: Analysis, shown: Callable[[str], str]) -> str:
    baseline, groups = analysis.study.baseline, _by_kind(analysis)
    names = functools.partial(few, shown=functools.partial(named, analysis, shown=shown))
    if not analysis.comparisons:
        return f"{shown(baseline)} is alone: there is nothing to compare"
    if "leader" in groups:  # of the arm with the best mean, against all others
        return f"{names(groups['leader'])} is {lines(analysis)[0].verdict}"
    base = reference(analysis) if SIZES in analysis.study.factors else names([baseline])
    parts, together = list[str](), dict[str, list[str]]()
    for line in interaction_lines(analysis):
        together.setdefault(line.kind, []).append(line.arm)
    for found, others in ((groups, base), (together, SUM)):
        for kind in (kind for kind in KINDS if kind in found):
            verb = [] if kind == "failed" else ["is" if len(found[kind]) == 1 else "are"]
            noun = "arms" if found is groups else "interactions"
            parts.append(" ".join([names(found[kind], noun=noun), *verb, phrase(analysis, kind, others)]))
    return "; ".join(parts) + _finished(analysis.comparisons)


def _finished(comparisons: Sequence[ArmComparison]) -> str:
    """Says what claims leave out where runs have failed."""
    return ", of runs that finish" if any(one.claims and one.failed for one in comparisons) else ""


def _holds(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says whether all that is claimed also holds by the ranges for new images; an empty text without images."""
    found = []
    for one in comparisons:
        (low, high), effect = analysis.for_new_images(one), one.design.smallest_effect
        low, high = (0.0, 0.0) if analysis.is_same(one) else (low, high)
        shown = {"better": low > 0, "worse": high < 0, "not better": high < effect, "not worse": low > -effect}
        matters = not kind_of(one).startswith("clearly") or min(abs(low), abs(high)) >= effect
        found += [matters and all(shown[claim] for claim in one.claims)] * (bool(one.claims) and analysis.tested.same)
    return ("also on new images" if all(found) else HERE) if found else ""


def _by_kind(analysis: Analysis) -> dict[str, list[str]]:
    """Returns the arms of each verdict, the best mean first."""
    groups: dict[str, list[str]] = {}
    for line in lines(analysis):
        groups.setdefault(line.kind, []).append(line.arm)
    return groups


@dataclass(frozen=True)
class Line:
    """An arm on the first screen."""

    arm: str
    label: str
    """The verdict in words, against the reference."""
    verdict: str
    """The same, against all arms that it is compared with."""
    kind: str
    """The verdict alone; where all pairs are compared, that against the arm with the best mean."""
    mean: float
    n: int
    """Pairs behind the difference; runs where there is none."""
    following: str = ""
    """Next step with its cost."""
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    new_images: tuple[float, float] = (math.nan, math.nan)
    """Ends of the range for new images as well."""
    holds: str = ""
    """Whether the verdict holds on new images, too."""
    values: tuple[float, ...] = ()
    """Differences of the pairs."""
    changes: str = ""
    """Every option in which the arm differs from the baseline; of that what the plan gives it."""

    @property
    def outcome(self) -> str:
        """Meaning of the kind: better, worse, same, failed or open."""
        return KINDS[self.kind].outcome if self.kind in KINDS else "open"


@functools.lru_cache(maxsize=4)
def lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each arm, the best mean first."""
    both = [*analysis.ordered, *(one.mirrored() for one in analysis.ordered)]
    own = [(arm, [one for one in both if one.arm == arm.name]) for arm in analysis.ranked]
    bases = {base_of(analysis.study, arm) for arm in analysis.study.arms}
    return [_line(analysis, arm, found) for arm, found in own if found or arm.name in bases]


def _line(analysis: Analysis, arm: Arm, own: list[ArmComparison]) -> Line:
    """Returns the line of an arm by its comparison with the baseline, or with the arm that has the best mean."""
    pairs = analysis.study.compare.arms == "pairs"
    groups: dict[str, list[str]] = {}
    for comparison in own:
        groups.setdefault(kind_of(comparison), []).append(comparison.other)
    found = [(kind, few(groups[kind], functools.partial(named, analysis))) for kind in KINDS if kind in groups]
    verdict = "; ".join(phrase(analysis, *against) for against in found) + _finished(own)
    base = analysis.reference if pairs else base_of(analysis.study, arm.name)
    one = next((one for one in own if one.other == base), None)
    if one is None:
        following = (_to_next(analysis, own) or "take it") if pairs else ""
        verdict, kind = (verdict, "leader") if pairs else ("baseline", "baseline")
        holds, changes = _holds(analysis, own * pairs), differs_in(analysis, arm.name)
        return Line(arm.name, verdict, verdict, kind, arm.mean, arm.n, following, holds=holds, changes=changes)
    kind = kind_of(one)
    so_far = " so far" * (kind == "undecided" and one.is_open)
    label = phrase(analysis, kind) + so_far + _finished([one])
    following = _to_next(analysis, own) or (next_step(analysis, one) if analysis.is_first else "")
    images = analysis.for_new_images(one), _holds(analysis, own)
    numbers = one.mean, one.low, one.high, *images, tuple(one.counted.values()), differs_in(analysis, arm.name)
    luck = _luck(analysis, one)
    return Line(arm.name, label + luck, verdict + so_far + luck, kind, arm.mean, one.n, following, *numbers)


def interaction_lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each interaction: two levels together against the sum of what each does alone."""
    found = []
    for one in analysis.interactions:
        kind = kind_of(one)
        verdict = phrase(analysis, kind, SUM) + " so far" * (kind == "undecided" and one.is_open) + _finished([one])
        numbers = one.mean, one.low, one.high, analysis.for_new_images(one), _holds(analysis, [one])
        rest = _to_next(analysis, [one]), *numbers, tuple(one.counted.values())
        found.append(Line(one.arm, verdict, verdict, kind, math.nan, one.n, *rest))
    return found


def differs_in(analysis: Analysis, arm: str) -> str:
    """Names every option in which an arm differs from the baseline; of that what the plan gives it."""
    study, baseline = analysis.study, base_of(analysis.study, arm)
    own, base = study.given(arm), study.given(baseline)
    if arm == baseline:
        return written(own)
    found = [written({key: value}) for key, value in own.items() if key not in base or base[key] != value]
    found += [f"{key} as in the config" for key in base if key not in own]
    unplanned = [one for one in analysis.differences if not one.planned]
    found += [
        f"{one.key}={' or '.join(map(word, one.values[arm]))} (not in the plan)"
        for one in unplanned
        if arm in one.values and one.values[arm] != one.values.get(baseline)
    ]
    return ", ".join(found)


def _luck(analysis: Analysis, one: ArmComparison) -> str:
    """Says, beside better and worse, how often tuning alone would call arms exactly alike so."""
    chosen = {} if analysis.study.tuning is None else analysis.study.tuning.chosen
    differs = bool({"better", "worse"} & {*one.claims})
    if not differs or analysis.luck is None or chosen.get(one.arm) == chosen.get(one.other):
        return ""
    return f"; tuning luck: {show_fraction(analysis.luck[1])}"


def _to_next(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says what the next analyses of comparisons cost; an empty text where none follows."""
    needed = [arm for arm, _ in runs_left(analysis.study, [one for one in comparisons if one.is_open])]
    return f"{_runs(analysis, needed)} to the next comparison" if needed else ""


def level_of(analysis: Analysis) -> str:
    """Writes the level of a range, its rest to 100 % with two digits."""
    return f"{100 - float(f'{100 * analysis.comparisons[0].design.level:.2g}'):.9g} %" if analysis.comparisons else ""


def sentence(analysis: Analysis, line: Line) -> str:
    """Returns the line of an arm as a sentence with its numbers."""
    rules, unit = analysis.study.compare, unit_of(analysis.study.compare.metric)
    against = f" against {reference(analysis)}" if rules.arms == "pairs" else ""
    numbers = {
        f"{rules.metric} {unit.value(line.mean)}{unit.sign}": line.mean,
        f"{unit.difference(line.difference)}{against}": line.difference,
        f"{level_of(analysis)} range {unit.interval(line.low, line.high)}": line.low,
    }
    known = [text for text, number in numbers.items() if not math.isnan(number)]
    known.append(counted(line.n, "run" if math.isnan(line.difference) else "seed" if math.isnan(line.mean) else "pair"))
    verdict = ", ".join(filter(None, [line.verdict, line.holds]))
    about = f" [{line.changes}]" if line.changes else ""
    following = f". Next: {line.following}" if line.following else ""
    return f"{named(analysis, line.arm)}{about}: {verdict} ({', '.join(known)}){following}"


def next_step(analysis: Analysis, one: ArmComparison) -> str:
    """Says what a verdict means for a choice."""
    if one.blocked:
        return "see why runs failed, then --retry; what diverges takes a change, in a new study"
    failed = _failed(analysis, one.arm)
    here = "; for new images it is open" * (_holds(analysis, [one]) == HERE)
    either = f"either does on these images{here}" if here else "take either"
    words = {
        "effect": _effect(analysis),
        "price": _price(analysis, one),
        "take": f"take it{here}",
        "either": f"no reason to switch: {failed}" if failed else either,
        "failed": f"; {failed}" if failed else "",
        "why": why_ended([one]) or ", no answer",
    }
    lucky = _luck(analysis, one) and analysis.luck and analysis.luck[1] > analysis.study.compare.alpha
    again = "; tuned anew it may be otherwise (tune.replicates)" * bool(lucky and kind_of(one) in ("better", "worse"))
    return KINDS[kind_of(one)].following.format(**words) + again


def why_ended(comparisons: Sequence[ArmComparison]) -> str:
    """Says why comparisons without an answer have no more runs, behind a colon; an empty text where all have one."""
    most = max((one.design.max_pairs for one in comparisons), default=0)
    known = [(one, one.analysis) for one in comparisons]
    if pairs := sorted({one.n for one, place in known if place is not None and one.course.unlikely[place]}):
        chance = f"an answer by {most} seeds has a chance below {show_fraction(UNLIKELY)}"
        return f": after {listed([*map(str, pairs)])} pairs {chance}"
    reached = any(one.next is None and not one.decided for one in comparisons)
    return f": max_seeds={most} is reached" if reached else ""


def at_the_end(study: Study, comparisons: Sequence[ArmComparison]) -> str:
    """Says that nothing is left to run, why, and what would answer what is undecided."""
    why = why_ended(comparisons)
    seen = [one for one in comparisons if one.analysis is not None and not one.blocked]
    open_ones = [one for one in seen if one.verdict in ("undecided", "not worse")]
    more = "; compare.max_seeds may be raised" if study.compare.max_seeds < MOST_SEEDS else ""
    return f"nothing is left to run{why}{more if why and open_ones else ''}"


def _failed(analysis: Analysis, name: str) -> str:
    """Says how many runs of an arm failed; an empty text if none."""
    arm = next(arm for arm in analysis.arms if arm.name == name)
    return f"{len(arm.failed)} of {counted(len(arm.runs), 'run')} failed" if arm.failed else ""


def _price(analysis: Analysis, one: ArmComparison) -> str:
    """Says how long an arm trains beside the other, if that differs by a tenth or more."""
    times = {arm.name: arm.median("train_seconds") for arm in analysis.arms}
    ratio = times[one.arm] / times[one.other] if times[one.other] > 0 else math.nan
    return f"; trained {ratio:.2g} times as long" if ratio >= 1.1 or ratio <= 0.9 else ""


def _runs(analysis: Analysis, arms: Sequence[str]) -> str:
    """Counts runs, with their time one after the other, by the medians of their arms; without it before any ended."""
    times = {arm.name: arm.median("seconds") for arm in analysis.arms}
    known = [time for time in times.values() if not math.isnan(time)]
    seconds = sum(sum(known) / len(known) if math.isnan(times[arm]) else times[arm] for arm in arms) if known else 0.0
    return counted(len(arms), "run") + (f" (about {show_time(seconds)} one by one)" if known else "")


def recommendation(analysis: Analysis) -> str:
    """Returns what to do now, in a sentence or two."""
    study = analysis.study
    if not analysis.comparisons:
        return "Add an arm to the plan."
    blocked = [one for one in analysis.comparisons if one.blocked]
    missing = [run.arm for run in study.runs if run.state == "missing"]
    if missing:
        return f"Not finished: {_runs(analysis, missing)} to the next comparison. Continue with {command(study)}"
    text = _choice(analysis)
    if not blocked:
        return f"{text} N{at_the_end(study, analysis.comparisons)[1:]}."
    arms = few(list(dict.fromkeys(run.arm for one in blocked for run in one.failed)))
    return f"{text} Failed runs of {arms} stopped a comparison: see why, then {command(study)} --retry"


def command(study: Study) -> str:
    """Returns the command that continues a study."""
    return shlex.join(["lightning", "ablate", study.plan_file or "PLAN", f"--out={study.folder}"])


def _choice(analysis: Analysis) -> str:
    found, study, best = lines(analysis), analysis.study, quoted(analysis.ranked[0].name)
    if not any(arm.n for arm in analysis.arms):
        return "No arm could be compared."
    groups = _by_kind(analysis)
    if SIZES in study.factors:
        return _over_sizes(analysis)
    if study.compare.arms == "pairs":
        equals = [line.arm for line in found if line.kind not in ("leader", "worse", "clearly worse")]
        return f"Take {best}" + (f"; {few(equals)} not shown to be worse by as much as matters." if equals else ".")
    if better := [line for line in found if line.kind in BETTER]:
        gain = f"{unit_of(study.compare.metric).difference(better[0].difference)} of {study.compare.metric}"
        more = [] if better[0].kind == "clearly better" else [f"whether {_effect(analysis)} or more is open"]
        if len(better) > 1:
            more.append(f"the best mean of {len(better)} better arms, which were not compared with each other")
        more += filter(None, [_failed(analysis, better[0].arm), "open for new images" * (better[0].holds == HERE)])
        more += [f"it differs in {better[0].changes}"] * (", " in better[0].changes)
        return f"Take {quoted(better[0].arm)} ({', '.join([gain, *more])})."
    if groups.keys() == {"baseline", "failed"}:
        return "No arm could be compared."
    left, why = groups.keys() - {"baseline", *WORSE}, "no arm is shown to be better"
    if left <= {"slightly better", "equivalent", "not better"}:
        why = f"no arm is better{f' by {_effect(analysis)} or more' if left else ''}"
    parts = [f"Keep {quoted(study.baseline)}: {why}"]
    if slightly := groups.get("slightly better"):
        parts.append(f"{few(slightly)} by less: no reason to switch")
    alike = [*groups.get("equivalent", []), *groups.get("not worse", [])]
    if also := [arm for arm in alike if not _failed(analysis, arm)]:
        here = any(line.arm in also and line.holds == HERE for line in found)
        parts.append(f"{few(also)} may be taken as well{' (open for new images)' * here}")
    parts += [f"not {quoted(arm)}: {failed}" for arm in alike if (failed := _failed(analysis, arm))]
    return "; ".join(parts) + "."


def _over_sizes(analysis: Analysis) -> str:
    """Says of each arm what is claimed of it at each size, and whether that changes."""
    arms, sizes = analysis.study.factors.values()
    kinds, found = {line.arm: line.kind for line in lines(analysis)}, []
    for arm in (arm for arm in arms if kinds[arm_name(arm, sizes[0])] != "baseline"):
        of_sizes = {size: kinds[arm_name(arm, size)] for size in sizes}
        outcomes = {KINDS[kind].outcome for kind in of_sizes.values()}
        changes = [one for one in analysis.interactions if arm_name(arm, sizes[0]) in one.terms]
        kinds_of = {one.arm: kind_of(one) for one in changes}
        claimed = [name for name, kind in kinds_of.items() if KINDS[kind].outcome in ("better", "worse")]
        small = all(kind.startswith("slightly") or kind == "equivalent" for kind in kinds_of.values())
        answer = "no change is shown"
        if {"better", "worse"} <= outcomes:
            answer = "the answer flips"
        elif claimed:
            answer = f"the difference changes with the size ({few(claimed, noun='interactions')})"
        elif small:
            answer = f"the difference changes by less than {_effect(analysis)} from that with {quoted(sizes[0])}"
        said = "; ".join(f"with {quoted(size)} {phrase(analysis, kind)}" for size, kind in of_sizes.items())
        found.append(f"{quoted(arm)} is {said}: {answer}.")
    return " ".join(found)


def notes(analysis: Analysis) -> list[str]:
    """Returns what a reader must know beside the verdicts: failures, arms that change nothing, tuning."""
    return [
        *(_failures(arm) for arm in analysis.arms if arm.failed),
        *(
            f"{few([one.arm, one.other])} have the same result with every seed: they compute the same, or the option "
            "that they differ in has no effect (compare their config.yaml)."
            for one in analysis.ordered
            if one.sd == 0 and one.mean == 0
        ),
        *(
            f"All {one.n} pairs of {few([one.arm, one.other])} differ by the same, which says nothing of how much new "
            "seeds differ: take more test images, or compare by a metric that counts no images, such as test/loss."
            for one in analysis.ordered
            if one.sd == 0 and one.mean != 0
        ),
        *_opposite(analysis),
        *_edges(analysis),
    ]


def _opposite(analysis: Analysis) -> list[str]:
    """Names arms whose mean over all runs and whose difference have opposite signs."""
    means = {arm.name: arm.mean for arm in analysis.arms}
    return [
        f"{quoted(one.arm)}: its difference to {quoted(one.other)} is that of {one.n} pairs with the same seeds, the "
        "means are over all runs, and the signs differ: by these seeds, not by all."
        for one in analysis.ordered
        if one.n and one.mean * (means[one.arm] - means[one.other]) < 0
    ]


def _failures(arm: Arm) -> str:
    """Says which runs failed, and what that leaves out."""
    seeds, runs = listed([str(run.seed) for run in arm.failed]), counted(len(arm.runs), "run")
    why = "these seeds do not count, and claims are about seeds with which both runs finish"
    return f"{len(arm.failed)} of {runs} of {quoted(arm.name)} failed (seed {seeds}): {why}."


def _edges(analysis: Analysis) -> list[str]:
    """Names arms whose best value is the first or last that was tried: a better one may lie beyond."""
    if (tuning := analysis.study.tuning) is None:
        return []
    found = []
    for key, values in tuning.options.items():
        ordered = len(values) > 2 and all(isinstance(value, int | float) for value in values)
        ends = (min(values), max(values)) if ordered else ()
        if arms := [arm for arm, chosen in tuning.chosen.items() if chosen.get(key) in ends]:
            found.append(f"Tuning chose the smallest or largest {key} for {few(arms)}: better values may lie beyond.")
    return found


def scope(analysis: Analysis) -> str:
    """Says what the claims generalise to."""
    images = {one.images for one in analysis.comparisons}
    these = f"these {images.pop():,} test images" if len(images) == 1 and None not in images else "these test images"
    if not analysis.study.split_varies:
        return f"Verdicts hold for new seeds on {these}, and for new images where they say so."
    if analysis.tested.same:
        return f"Each seed has a training split of its own: this holds for new seeds and splits, on {these}."
    images_too = "Test images change with the seed" if analysis.tested.correct else "Splits change with the seed"
    return f"{images_too} (split: varies), the same for all arms: this holds for new seeds and new splits of this data."


def caveats(analysis: Analysis, facts: Mapping[str, str]) -> list[str]:
    """Returns what stands beside the answer: what it holds for, and what may be wrong with it."""
    tuning, about = analysis.study.tuning, scope(analysis)
    if tuning is not None and tuning.replicates:
        about += " Each run was tuned anew: verdicts are about arms with their tuning, whatever values it chooses."
    sizes = [f"{name} on {facts[key]}" for key, name in (("training", "trained"), ("test", "tested")) if key in facts]
    about += f" Runs were {' and '.join(sizes)}." if sizes else ""
    rules = analysis.study.compare
    if rules.equal:
        about += f" Arms trained for equal time: verdicts are about who wins an hour.{_steps_won(analysis)}"
    if more := ", then ".join(rules.then):
        about += f" Arms better or worse by {rules.metric} are compared by {more} too, within the same alpha."
    changed = [f"Not as planned: {text}." for text in analysis.study.plan_changed]
    effect, unit = rules.smallest_effect, unit_of(rules.metric)
    shares = [unit.plain(share * effect) for share in (0.2, 1, 0.8, 0.25)]
    differ = any({"better", "worse"} & {*one.claims} for one in analysis.comparisons)
    if changed:
        leaves = "if none of this was done because of a result, and if it leaves those of runs as they were"
        changed.append(f"The {100 * rules.alpha:g} % holds {leaves}.")
    return [about, *changed, *unlike_spreads(analysis.ordered), *[TOO_LARGE.format(*shares)] * differ]


TOO_LARGE = (
    "Expect somewhat less than the differences beside better and worse, since luck helped to end these comparisons: on "
    "average they are too large, by up to about {0} where the true one is {1} or more, by up to about {2} where it is "
    "{3}."
)
"""Simulated: experiments/README.md, estimates after stopping."""


def _steps_won(analysis: Analysis) -> str:
    """Describes, beside who wins an hour, who wins a step: by the last validation before the shorter training ends."""
    study, unit, found = analysis.study, unit_of(analysis.study.metric), []
    for arm, one in study.timing.items():
        base, by = one["base"], min(one["steps"], one["base_steps"])
        both = [[analysis.reached(name, seed, by) for name in (arm, base)] for seed in study.seeds]
        pairs = [ends for ends in both if not math.isnan(sum(ends))]
        text = f"{quoted(arm)} trained {one['steps']:,} steps, {quoted(base)} {one['base_steps']:,}"
        text += f", and each takes {one['ratio']:.2f} times as long"
        if pairs:
            own, other = (unit.value(sum(ends) / len(ends)) + unit.sign for ends in zip(*pairs, strict=True))
            text += f"; by step {by:,} their {study.metric} is {own} and {other} ({counted(len(pairs), 'pair')})"
        found += [text] * (arm != base)
    return f" Who wins a step is no claim here (drop compare.equal for that): {'; '.join(found)}." if found else ""


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    rules = analysis.study.compare
    first = next(iter(analysis.comparisons)).design.analyses if analysis.comparisons else ()
    after = f"after {', '.join(map(str, first[:3]))}{', ...' * (len(first) > 3)} pairs" if first else "never"
    return (
        f"Arms are compared {after} of runs with the same seeds, at most {rules.max_seeds}; decided arms get no more "
        f"runs, and a verdict is final. The probability of any false claim is at most {rules.alpha:g} over "
        f"all arms, interactions{', metrics' * bool(rules.then)} and analyses. Means of arms are over all their runs, "
        f"differences over the pairs of the analysis that decided. {show_fraction(KEPT)} of this error is kept for a "
        "max_seeds that is raised later, which then takes more seeds than a study planned with as many."
    )
