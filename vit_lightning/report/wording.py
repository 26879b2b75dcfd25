"""An ablation in words: the answer, a line for each arm with its next step, and how numbers are written."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vit_lightning.config.files import word
from vit_lightning.notation import counted, show_time
from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.comparisons import ArmComparison, base_of, design_of, runs_left
from vit_lightning.report.sequential import KEPT, UNLIKELY
from vit_lightning.report.study import MOST_SEEDS, SIZES, Study, arm_name, written
from vit_lightning.report.units import NONE, unit_of
from vit_lightning.report.variance import unlike_spreads

FEW = 3
"""Arms that a sentence names; more are counted."""


class Words(NamedTuple):
    """Words of a verdict."""

    outcome: str
    """Its meaning: better, worse, same, failed or open."""
    said: str
    """The verdict, against other arms if they are given."""
    step: str
    """What it means for a choice."""


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
    chosen = analysis.study.chosen(arm)
    values = listed([f"{key.rpartition('.')[2]} {word(value)}" for key, value in chosen.items()])
    return f"{shown(arm)} with {values}" if values else shown(arm)


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


def words_of(analysis: Analysis, others: str = "") -> dict[str, Words]:
    """Returns the words of each verdict, the strongest first; against other arms if they are given."""
    e = _effect(analysis)
    than, to, against = (f" {word} {others}" if others else "" for word in ("than", "to", "against"))
    return {
        "clearly better": Words("better", f"better{than}, by {e} or more", "take it"),
        "better": Words("better", f"better{than}", f"take it if any gain will do: it may be under {e}"),
        "slightly better": Words("same", f"slightly better{than} (by less than {e})", "no reason to switch"),
        "clearly worse": Words("worse", f"worse{than}, by {e} or more", "leave it"),
        "worse": Words("worse", f"worse{than}", "leave it"),
        "slightly worse": Words("same", f"slightly worse{than} (by less than {e})", "no reason to switch"),
        "equivalent": Words("same", f"equivalent{to} (within {e})", "take either"),
        "not better": Words("same", f"not better{than} by {e} or more, perhaps worse", f"stop: no gain of {e} or more"),
        "not worse": Words("same", f"not worse{than} by {e} or more, perhaps better", f"stop: no loss of {e} or more"),
        "undecided": Words("open", f"undecided{against}", "stop"),
        "failed": Words("failed", f"failed, no answer{against}", ""),
    }


def _effect(analysis: Analysis) -> str:
    rules = analysis.study.compare
    return unit_of(rules.metric).plain(rules.smallest_effect)


def headline(analysis: Analysis, shown: Callable[[str], str] = quoted) -> str:
    """Returns the answer in one line: the arms of each verdict, the strongest first; ``shown`` writes their names."""
    first, *further = analysis.by_metric()
    texts = [_answer(first, shown), *(f"by {one.study.compare.metric} {_answer(one, shown)}" for one in further)]
    return ("So far: " if analysis.study.missing else "") + "; ".join(texts)


def _answer(analysis: Analysis, shown: Callable[[str], str]) -> str:
    found, name = lines(analysis), functools.partial(named, analysis, shown=shown)
    if found[0].kind == "leader":  # of the arm with the best mean, against all others
        return f"{name(found[0].arm)} is {found[0].verdict}" + (f", {HERE}" if found[0].holds == HERE else "")
    base = reference(analysis) if SIZES in analysis.study.factors else name(analysis.study.baseline)
    parts = []
    for said, others, noun in ((found, base, "arms"), (interaction_lines(analysis), SUM, "interactions")):
        for (kind, words), here in itertools.product(words_of(analysis, others).items(), (False, True)):
            if arms := [line.arm for line in said if (line.kind, line.holds == HERE) == (kind, here)]:
                verb = "" if kind == "failed" else " is" if len(arms) == 1 else " are"
                parts.append(f"{few(arms, name, noun)}{verb} {words.said}" + (f", {HERE}" if here else ""))
    leaves_out = any(one.claims and one.failed for one in analysis.comparisons)
    return "; ".join(parts) + (", of runs that finish" if leaves_out else "")


def _holds(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says whether all that is claimed also holds by the ranges for new images; an empty text without images."""
    claimed = [one for one in comparisons if one.claims and analysis.tested.same]
    if not claimed:
        return ""
    for one in claimed:
        low, high = (0.0, 0.0) if analysis.is_same(one) else analysis.for_new_images(one)
        effect = one.design.smallest_effect
        shown = {"better": low > 0, "worse": high < 0, "not better": high < effect, "not worse": low > -effect}
        matters = min(abs(low), abs(high)) >= effect
        if not all(shown[claim] for claim in one.claims) or (kind_of(one).startswith("clearly") and not matters):
            return HERE
    return "also on new images"


@dataclass(frozen=True)
class Line:
    """An arm on the first screen, or an interaction."""

    arm: str
    label: str
    """The verdict in words, against the reference."""
    verdict: str
    """The same, against all arms that it is compared with."""
    kind: str
    """The verdict alone; where all pairs are compared, that against the arm with the best mean."""
    outcome: str
    """Its meaning: better, worse, same, failed or open."""
    mean: float
    n: int
    """Pairs behind the difference; runs where there is none."""
    following: str
    """Next step with its cost."""
    holds: str
    """Whether the verdict holds on new images, too."""
    changes: str = ""
    """Every option in which the arm differs from the baseline; of that what the plan gives it."""
    one: ArmComparison | None = None
    """Its comparison with the reference."""


@functools.lru_cache(maxsize=4)
def lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each arm, the best mean first."""
    both = [*analysis.ordered, *(one.mirrored() for one in analysis.ordered)]
    pairs, found = analysis.study.compare.arms == "pairs", []
    for arm in analysis.ranked:
        own = [one for one in both if one.arm == arm.name]
        base = analysis.reference if pairs else base_of(analysis.study, arm.name)
        one = next((one for one in own if one.other == base), None)
        if one is not None:
            found.append(_line(analysis, one, own, arm))
        elif base == arm.name:
            kind, said, step, holds = "baseline", "baseline", "", ""
            if pairs:
                kind, said, holds = "leader", _against(analysis, own), _holds(analysis, own)
                step = _to_next(analysis, own) or "take it"
            changes = differs_in(analysis, arm.name)
            found.append(Line(arm.name, said, said, kind, "open", arm.mean, arm.n, step, holds, changes))
    return found


def interaction_lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each interaction: two levels together against the sum of what each does alone."""
    return [_line(analysis, one, [one], None) for one in analysis.interactions]


def _line(analysis: Analysis, one: ArmComparison, own: list[ArmComparison], arm: Arm | None) -> Line:
    """Returns the line of an arm or, without one, of an interaction.

    Args:
        analysis: the analysis.
        one: comparison with the reference.
        own: all comparisons of the arm.
        arm: the arm.
    """
    kind, holds, following = kind_of(one), _holds(analysis, own), _to_next(analysis, own)
    verdict, words, more = _against(analysis, own), words_of(analysis)[kind], ""
    if kind == "undecided" and one.is_open:
        more = " so far"
    elif luck := _luck(analysis, one):
        more = f"; tuning luck alone would do this in {show_fraction(luck)} of studies"
    verdict, label = verdict + more, words.said + more
    if arm is None:
        return Line(one.arm, verdict, verdict, kind, words.outcome, math.nan, one.n, following, holds, one=one)
    if not following and analysis.is_first:
        following = next_step(analysis, one)
    changes = differs_in(analysis, arm.name)
    return Line(arm.name, label, verdict, kind, words.outcome, arm.mean, one.n, following, holds, changes, one)


def _against(analysis: Analysis, own: Sequence[ArmComparison]) -> str:
    """Writes the verdicts of comparisons against all others, the strongest first."""
    groups: dict[str, list[str]] = {}
    for one in own:
        groups.setdefault(kind_of(one), []).append(SUM if one.is_interaction else named(analysis, one.other))
    kinds = [kind for kind in words_of(analysis) if kind in groups]
    return "; ".join(words_of(analysis, few(groups[kind], str))[kind].said for kind in kinds)


def differs_in(analysis: Analysis, arm: str) -> str:
    """Names every option in which an arm differs from the baseline; of that what the plan gives it."""
    study, baseline = analysis.study, base_of(analysis.study, arm)
    own, base = study.given(arm), study.given(baseline)
    if arm == baseline:
        return written(own)
    found = [written({key: value}) for key, value in own.items() if key not in base or base[key] != value]
    found += [f"{key} as in the config" for key in base if key not in own]
    for one in analysis.differences:
        if not one.planned and one.values.get(arm) not in (None, one.values.get(baseline)):
            found.append(f"{one.key}={' or '.join(map(word, one.values[arm]))} (not in the plan)")
    return ", ".join(found)


def _luck(analysis: Analysis, one: ArmComparison) -> float:
    """Returns how often tuning alone would call arms exactly alike better or worse by as much; 0 where it cannot."""
    differs = {"better", "worse"} & {*one.claims} and not one.is_interaction
    alike = analysis.study.chosen(one.arm) == analysis.study.chosen(one.other)
    if not differs or alike or analysis.luck is None:
        return 0.0
    share = float((analysis.luck >= abs(one.mean)).mean())
    return share if share >= 0.005 else 0.0  # less is written as 0 %


def _to_next(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says what the next analyses of comparisons cost; an empty text where none follows."""
    needed = [arm for arm, _ in runs_left(analysis.study, [one for one in comparisons if one.is_open])]
    return f"{_runs(analysis, needed)} to the next comparison" if needed else ""


def level_of(analysis: Analysis) -> str:
    """Writes the level of a range, its rest to 100 % with two digits."""
    return f"{100 - float(f'{100 * analysis.comparisons[0].design.level:.2g}'):.9g} %"


def sentence(analysis: Analysis, line: Line) -> str:
    """Returns the line of an arm as a sentence with its numbers."""
    rules, unit, one = analysis.study.compare, unit_of(analysis.study.compare.metric), line.one
    numbers = [] if math.isnan(line.mean) else [f"{rules.metric} {unit.value(line.mean)}{unit.sign}"]
    if one is None:
        numbers.append(counted(line.n, "run"))
    else:
        against = f" against {reference(analysis)}" if rules.arms == "pairs" else ""
        numbers += [f"{unit.difference(one.mean)}{against}"] if one.n else []
        numbers += [f"{level_of(analysis)} range {unit.interval(one.low, one.high)}"] if not math.isnan(one.low) else []
        numbers.append(counted(one.n, "seed" if one.is_interaction else "pair"))
    about = f" [{line.changes}]" if line.changes else ""
    holds = f", {line.holds}" if line.holds else ""
    following = f". Next: {line.following}" if line.following else ""
    return f"{named(analysis, line.arm)}{about}: {line.verdict}{holds} ({', '.join(numbers)}){following}"


def next_step(analysis: Analysis, one: ArmComparison) -> str:
    """Says what a verdict means for a choice."""
    if one.blocked:
        return "see why runs failed, then --retry; what diverges takes a change, in a new study"
    kind, failed, here = kind_of(one), _failed(analysis, one.arm), _holds(analysis, [one]) == HERE
    outcome, _, step = words_of(analysis)[kind]
    parts = [step]
    if kind == "equivalent" and (failed or here):
        parts = ["no reason to switch" if failed else "either does on these images"]
    if kind == "undecided":
        parts = [step + (why_ended([one]) or ", no answer")]
    if outcome in ("better", "same"):
        parts += [failed, "for new images it is open" if here else "", _price(analysis, one)]
    if kind in ("better", "worse") and _luck(analysis, one) > analysis.study.compare.alpha:
        parts.append("tuned anew it may be otherwise (tune.replicates)")
    return "; ".join(filter(None, parts))


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
    verdicts = {one.verdict for one in comparisons if one.analysis is not None and not one.blocked}
    more = "; compare.max_seeds may be raised" if study.compare.max_seeds < MOST_SEEDS else ""
    return f"nothing is left to run{why}{more if why and verdicts & {'undecided', 'not worse'} else ''}"


def _failed(analysis: Analysis, name: str) -> str:
    """Says how many runs of an arm failed; an empty text if none."""
    arm = next(arm for arm in analysis.arms if arm.name == name)
    return f"{len(arm.failed)} of {counted(len(arm.runs), 'run')} failed" if arm.failed else ""


def _price(analysis: Analysis, one: ArmComparison) -> str:
    """Says how long an arm trains beside the other, if that differs by a fifth or more."""
    times = {arm.name: arm.median("train_seconds") for arm in analysis.arms}
    ratio = times[one.arm] / times[one.other] if times[one.other] > 0 else math.nan
    return f"training took {ratio:.2g} times the wall-clock time" if ratio >= 1.2 or ratio <= 0.8 else ""


def _runs(analysis: Analysis, arms: Sequence[str]) -> str:
    """Counts runs, with their time one after the other, by the medians of their arms; without it before any ended."""
    times = {arm.name: arm.median("seconds") for arm in analysis.arms}
    known = [time for time in times.values() if not math.isnan(time)]
    seconds = sum(sum(known) / len(known) if math.isnan(times[arm]) else times[arm] for arm in arms) if known else 0.0
    return counted(len(arms), "run") + (f" (about {show_time(seconds)} one by one)" if known else "")


def recommendation(analysis: Analysis) -> str:
    """Returns what to do now, in a sentence or two."""
    study = analysis.study
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
    """Names the arm to take, and what may be taken as well."""
    study, effect = analysis.study, _effect(analysis)
    found = [line for line in lines(analysis) if line.kind != "baseline"]
    kinds = {line.kind for line in found}
    if not any(arm.n for arm in analysis.arms) or kinds == {"failed"}:
        return "No arm could be compared."
    if SIZES in study.factors:
        return _over_sizes(analysis)
    if study.compare.arms == "pairs":
        equals = [line.arm for line in found if line.kind not in ("leader", "worse", "clearly worse")]
        best = f"Take {quoted(analysis.reference)}"
        return f"{best}; {few(equals)} not shown to be worse by as much as matters." if equals else f"{best}."
    if better := [line for line in found if line.kind in BETTER]:
        return _take(analysis, better)
    if kinds <= {*WORSE}:
        why = "no arm is better"
    elif kinds <= {*WORSE, "slightly better", "equivalent", "not better"}:
        why = f"no arm is better by {effect} or more"
    else:
        why = "no arm is shown to be better"
    parts = [f"Keep {quoted(study.baseline)}: {why}"]
    if slightly := [line.arm for line in found if line.kind == "slightly better"]:
        parts.append(f"{few(slightly)} by less: no reason to switch")
    alike = [line for line in found if line.kind in ("equivalent", "not worse")]
    if also := [line for line in alike if not _failed(analysis, line.arm)]:
        here = " (open for new images)" if any(line.holds == HERE for line in also) else ""
        parts.append(f"{few([line.arm for line in also])} may be taken as well{here}")
    parts += [f"not {quoted(line.arm)}: {_failed(analysis, line.arm)}" for line in alike if line not in also]
    return "; ".join(parts) + "."


def _take(analysis: Analysis, better: Sequence[Line]) -> str:
    """Recommends the best of the arms that are better, and says what to know of it."""
    best, rules = better[0], analysis.study.compare
    assert best.one is not None
    about = [f"{unit_of(rules.metric).difference(best.one.mean)} of {rules.metric}"]
    if best.kind != "clearly better":
        about.append(f"perhaps under {_effect(analysis)}")
    if len(better) > 1:
        about.append(f"the best mean of {len(better)} better arms, which were not compared with each other")
    about += filter(None, [_failed(analysis, best.arm), "open for new images" if best.holds == HERE else ""])
    if ", " in best.changes:
        about.append(f"it differs in {best.changes}")
    if_any = "" if best.kind == "clearly better" else " if any gain will do"
    return f"Take {quoted(best.arm)}{if_any} ({', '.join(about)})."


def _over_sizes(analysis: Analysis) -> str:
    """Says of each arm what is claimed of it at each size, and whether that changes."""
    arms, sizes = analysis.study.factors.values()
    of_arm, words, found = {line.arm: line for line in lines(analysis)}, words_of(analysis), []
    for arm in (arm for arm in arms if of_arm[arm_name(arm, sizes[0])].kind != "baseline"):
        at_size = {size: of_arm[arm_name(arm, size)] for size in sizes}
        outcomes = {line.outcome for line in at_size.values()}
        changes = {one.arm: kind_of(one) for one in analysis.interactions if arm_name(arm, sizes[0]) in one.terms}
        claimed = [name for name, kind in changes.items() if words[kind].outcome in ("better", "worse")]
        answer = "no change is shown"
        if {"better", "worse"} <= outcomes:
            answer = "the answer flips"
        elif claimed:
            answer = f"the difference changes with the size ({few(claimed, noun='interactions')})"
        elif {*changes.values()} <= {"slightly better", "slightly worse", "equivalent"}:
            answer = f"the difference changes by less than {_effect(analysis)} from that with {quoted(sizes[0])}"
        said = "; ".join(f"with {quoted(size)} {words[line.kind].said}" for size, line in at_size.items())
        found.append(f"{quoted(arm)} is {said}: {answer}.")
    return " ".join(found)


def notes(analysis: Analysis) -> list[str]:
    """Returns what a reader must know beside the verdicts: failures, arms that change nothing, tuning."""
    found, means = [], {arm.name: arm.mean for arm in analysis.arms}
    for arm in (arm for arm in analysis.arms if arm.failed):
        runs, seeds = counted(len(arm.runs), "run"), listed([str(run.seed) for run in arm.failed])
        found.append(
            f"{len(arm.failed)} of {runs} of {quoted(arm.name)} failed (seed {seeds}): these seeds do not count, and "
            "claims are about seeds with which both runs finish."
        )
    for one in analysis.ordered:
        both = few([one.arm, one.other])
        if one.sd == 0 and one.mean == 0:
            found.append(
                f"{both} have the same result with every seed: they compute the same, or the option that they differ "
                "in has no effect (compare their config.yaml)."
            )
        elif one.sd == 0:
            found.append(
                f"All {one.n} pairs of {both} differ by the same, which says nothing of how much new seeds differ: "
                "take more test images, or compare by a metric that counts no images, such as test/loss."
            )
        if one.n and one.mean * (means[one.arm] - means[one.other]) < 0:
            found.append(
                f"{quoted(one.arm)}: its difference to {quoted(one.other)} is that of {one.n} pairs with the same "
                "seeds, the means are over all runs, and the signs differ: by these seeds, not by all."
            )
    return found + _edges(analysis.study)


def _edges(study: Study) -> list[str]:
    """Names arms whose best value is the first or last that was tried: a better one may lie beyond."""
    found = []
    for key, values in study.tuning.options.items() if study.tuning else ():
        if len(values) > 2 and all(isinstance(value, int | float) for value in values):
            ends = min(values), max(values)
            if arms := [arm for arm in study.arms if study.chosen(arm).get(key) in ends]:
                found.append(f"Tuning chose the smallest or largest {key} for {few(arms)}: better ones may lie beyond.")
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
    found = [about, *(f"Not as planned: {text}." for text in analysis.study.plan_changed)]
    if analysis.study.plan_changed:
        only = "only if nothing of this was done because of a result, and no result of a run changed by it"
        found.append(f"The error of at most {100 * rules.alpha:g} % holds {only}. Verdicts below are today's.")
    found += unlike_spreads(analysis.ordered)
    if any({"better", "worse"} & {*one.claims} for one in analysis.comparisons):
        unit = unit_of(rules.metric)
        found.append(TOO_LARGE.format(*(unit.plain(share * rules.smallest_effect) for share in (0.2, 1, 0.8, 0.25))))
    return found


TOO_LARGE = (
    "True differences are probably nearer 0 than those beside better and worse, since luck helped to end these "
    "comparisons: on average by up to about {0} if the true one is {1} or more, by up to about {2} if it is {3}."
)
"""Simulated: experiments/README.md, estimates after stopping."""


def _steps_won(analysis: Analysis) -> str:
    """Describes, beside who wins an hour, who wins a step: by the last validation before the shorter training ends."""
    study, unit, found = analysis.study, unit_of(analysis.study.metric), []
    for arm, one in study.timing.items():
        base, by = one["base"], min(one["steps"], one["base_steps"])
        if arm == base:
            continue
        both = [[analysis.reached(name, seed, by) for name in (arm, base)] for seed in study.seeds]
        pairs = [ends for ends in both if not math.isnan(sum(ends))]
        found.append(f"{quoted(arm)} trained {one['steps']:,} steps, {quoted(base)} {one['base_steps']:,}")
        found[-1] += f", and each takes {one['ratio']:.2f} times as long"
        if pairs:
            own, other = (unit.value(sum(ends) / len(ends)) + unit.sign for ends in zip(*pairs, strict=True))
            found[-1] += f"; by step {by:,} their {study.metric} is {own} and {other} ({counted(len(pairs), 'pair')})"
    return f" Who wins a step is no claim here (drop compare.equal for that): {'; '.join(found)}." if found else ""


def rule(analysis: Analysis) -> str:
    """Explains the rule behind the verdicts, for someone who reads only this report."""
    rules = analysis.study.compare
    pairs = [*map(str, design_of(rules, 1).analyses)]
    looks = ", ".join(pairs if len(pairs) < 4 else [*pairs[:3], "..."])
    kinds = "arms, interactions, metrics" if rules.then else "arms, interactions"
    return (
        f"Arms are compared after {looks} pairs of runs with the same seeds, at most {rules.max_seeds}; decided arms "
        "get no more runs, and a verdict is final while the rule stays. The probability of any false claim is at most "
        f"{rules.alpha:g} over all {kinds} and analyses. Means of arms are over all their runs, differences over the "
        f"pairs of the analysis that decided. {show_fraction(KEPT)} of this error is saved in case max_seeds is raised "
        "later; such a study needs somewhat more seeds than one planned with as many."
    )
