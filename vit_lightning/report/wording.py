"""An ablation in words: verdicts and their next steps, the answer, what to do now, and what stands beside it."""

import itertools
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vit_lightning.config.files import word
from vit_lightning.errors import counted, show_time
from vit_lightning.report.analysis import HERE, Analysis, Line, holds, kind_of, lines
from vit_lightning.report.comparisons import ArmComparison, base_of, design_of, runs_left
from vit_lightning.report.sequential import KEPT, UNLIKELY
from vit_lightning.report.study import MOST_SEEDS, SIZES, Study, arm_name, written
from vit_lightning.report.units import NONE, unit_of
from vit_lightning.report.variance import unlike_spreads


class Words(NamedTuple):
    """Words of a kind of verdict; {e} is the smallest effect, {than}, {to} and {against} name other arms, if any."""

    outcome: str
    """Its meaning: better, worse, same, failed or open."""
    said: str
    """The verdict."""
    step: str
    """What it means for a choice."""


WORDS = {
    "clearly better": Words("better", "better{than}, by {e} or more", "take it"),
    "better": Words("better", "better{than}", "take it if any gain will do: it may be under {e}"),
    "slightly better": Words("same", "slightly better{than} (by less than {e})", "no reason to switch"),
    "clearly worse": Words("worse", "worse{than}, by {e} or more", "leave it"),
    "worse": Words("worse", "worse{than}", "leave it"),
    "slightly worse": Words("same", "slightly worse{than} (by less than {e})", "no reason to switch"),
    "equivalent": Words("same", "equivalent{to} (within {e})", "take either"),
    "not better": Words("same", "not better{than} by {e} or more, perhaps worse", "stop: no gain of {e} or more"),
    "not worse": Words("same", "not worse{than} by {e} or more, perhaps better", "stop: no loss of {e} or more"),
    "undecided": Words("open", "undecided{against}", "stop"),
    "failed": Words("failed", "failed, no answer{against}", ""),
    "baseline": Words("open", "baseline", ""),
    "leader": Words("open", "", "take it"),
}
"""Words of each kind of verdict, the strongest first; at last those of the arms that others are compared with."""
SUM = "the sum of what each does alone"
"""What two levels together are compared with."""
FEW = 3
"""Arms that a sentence names; more are counted."""


def show_p(p: float) -> str:
    """Writes a p-value with two significant digits."""
    if math.isnan(p):
        return NONE
    return "< .0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def quoted(name: str) -> str:
    """Sets a name apart, which may be a word such as none or hold commas."""
    return f"'{name}'"


def few(names: Sequence[str], noun: str = "arms") -> str:
    """Lists some names, or counts them if they are many."""
    return f"{len(names)} {noun}" if len(names) > FEW else listed(names)


def few_arms(lines: Iterable[Line]) -> str:
    """Names some arms, or counts them if they are many."""
    return few([quoted(line.arm.name) for line in lines])


def named(analysis: Analysis, arm: str) -> str:
    """Names an arm with the values that tuning chose for it: verdicts are about these."""
    return quoted(arm) + tuned(analysis, arm)


def tuned(analysis: Analysis, arm: str) -> str:
    """Writes the values that tuning chose for an arm, as they follow its name; an empty text without any."""
    values = [f"{key.rpartition('.')[2]} {word(value)}" for key, value in analysis.study.chosen(arm).items()]
    return f" with {listed(values)}" if values else ""


def reference(analysis: Analysis) -> str:
    """Names the arm or arms that the differences on the first screen are to."""
    study = analysis.study
    if SIZES in study.factors:
        return f"{quoted(study.levels[study.baseline][0])} of its size"
    return quoted(analysis.reference_of(study.baseline))


def phrase(analysis: Analysis, kind: str, others: str = "") -> str:
    """Writes a kind of verdict, against other arms if they are given."""
    than, to, against = (f" {how} {others}" if others else "" for how in ("than", "to", "against"))
    return WORDS[kind].said.format(e=analysis.rules.shown_effect, than=than, to=to, against=against)


def headline(analysis: Analysis) -> str:
    """Returns the answer in one line: the arms of each verdict, the strongest first."""
    first, *further = analysis.by_metric()
    texts = [_answer(first), *(f"by {one.rules.metric} {_answer(one)}" for one in further)]
    return ("So far: " if analysis.study.missing else "") + "; ".join(texts)


def _answer(analysis: Analysis) -> str:
    found, study, parts = lines(analysis), analysis.study, list[str]()
    if found[0].kind == "leader":  # the arm with the best mean, against all others
        here = f", {HERE}" if found[0].holds == HERE else ""
        return f"{named(analysis, found[0].arm.name)} is {said(analysis, found[0])}{here}"
    base = reference(analysis) if SIZES in study.factors else named(analysis, study.baseline)
    for is_interaction, others, noun in ((False, base, "arms"), (True, SUM, "interactions")):
        asked = [line for line in found if line.comparison and line.is_interaction == is_interaction]
        for kind, here in itertools.product(WORDS, ("", f", {HERE}")):
            alike = [line for line in asked if (line.kind, line.holds == HERE) == (kind, bool(here))]
            if names := [named(analysis, line.arm.name) for line in alike]:
                verb = "" if kind == "failed" else " is" if len(names) == 1 else " are"
                parts.append(f"{few(names, noun)}{verb} {phrase(analysis, kind, others)}{here}")
    leaves_out = any(one.claims and one.failed for one in analysis.comparisons)
    return "; ".join(parts) + (", of runs that finish" if leaves_out else "")


def said(analysis: Analysis, line: Line, *, briefly: bool = False) -> str:
    """Writes the verdict of a line against all arms that it is compared with; briefly, without their names."""
    one = line.comparison
    if one is None:
        return _against(analysis, line.comparisons) or phrase(analysis, line.kind)
    text = phrase(analysis, line.kind) if briefly and not line.is_interaction else _against(analysis, line.comparisons)
    if line.kind == "undecided" and one.is_open:
        return f"{text} so far"
    luck = _luck(analysis, one)
    return f"{text}; tuning luck alone would do this in {100 * luck:.0f} % of studies" if luck else text


def _against(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Writes the verdicts of comparisons against all others, the strongest first."""
    others: dict[str, list[str]] = {}
    for one in comparisons:
        others.setdefault(kind_of(one), []).append(SUM if one.is_interaction else named(analysis, one.other))
    return "; ".join(phrase(analysis, kind, few(others[kind])) for kind in WORDS if kind in others)


def settings(analysis: Analysis, line: Line) -> str:
    """Names every option in which an arm differs from the baseline; of that what the plan gives it."""
    if line.is_interaction:
        return ""
    study, arm, baseline = analysis.study, line.arm.name, base_of(analysis.study, line.arm.name)
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
    alike = analysis.study.chosen(one.arm) == analysis.study.chosen(one.other)
    if not one.differs or one.is_interaction or alike or analysis.luck is None:
        return 0.0
    share = float((analysis.luck >= abs(one.mean)).mean())
    return share if share >= 0.005 else 0.0  # less is written as 0 %


def level_of(analysis: Analysis) -> str:
    """Writes the level of a range, its rest to 100 % with two digits."""
    return f"{100 - float(f'{100 * analysis.comparisons[0].design.level:.2g}'):.9g} %"


def sentence(analysis: Analysis, line: Line) -> str:
    """Returns a line as a sentence with its numbers."""
    rules, unit, one, arm = analysis.rules, analysis.rules.unit, line.comparison, line.arm
    numbers = [f"{rules.metric} {unit.value(arm.mean)}{unit.sign}"] if arm.n else []
    if one is None:
        numbers.append(counted(arm.n, "run"))
    else:
        against = f" against {reference(analysis)}" if rules.arms == "pairs" else ""
        numbers += [f"{unit.difference(one.mean)}{against}"] if one.n else []
        numbers += [f"{level_of(analysis)} range {unit.interval(one.low, one.high)}"] if not math.isnan(one.low) else []
        numbers.append(counted(one.n, "seed" if one.is_interaction else "pair"))
    about = f" [{options}]" if (options := settings(analysis, line)) else ""
    held = f", {line.holds}" if line.holds else ""
    step = f". Next: {step}" if (step := following(analysis, line)) else ""
    return f"{named(analysis, arm.name)}{about}: {said(analysis, line)}{held} ({', '.join(numbers)}){step}"


def following(analysis: Analysis, line: Line) -> str:
    """Says what to do next about a line: runs to the next analysis with their cost, else what its verdict means."""
    needed = [arm for arm, _ in runs_left(analysis.study, line.comparisons)]
    if needed:
        return f"{_runs(analysis, needed)} to the next comparison"
    if line.comparison is None:
        return WORDS[line.kind].step
    return next_step(analysis, line.comparison) if analysis.is_first and not line.is_interaction else ""


def next_step(analysis: Analysis, one: ArmComparison) -> str:
    """Says what a verdict means for a choice."""
    if one.blocked:
        return "see why runs failed, then --retry; what diverges takes a change, in a new study"
    kind, failed, here = kind_of(one), _failed(analysis, one.arm), holds(analysis, [one]) == HERE
    step = WORDS[kind].step.format(e=analysis.rules.shown_effect)
    if kind == "equivalent" and (failed or here):
        step = "no reason to switch" if failed else "either does on these images"
    if kind == "undecided":
        step += why_ended([one]) or ", no answer"
    parts = [step]
    if WORDS[kind].outcome in ("better", "same"):
        parts += [failed, "for new images it is open" if here else "", _price(analysis, one)]
    if kind in ("better", "worse") and _luck(analysis, one) > analysis.rules.alpha:
        parts.append("tuned anew it may be otherwise (tune.replicates)")
    return "; ".join(filter(None, parts))


def why_ended(comparisons: Sequence[ArmComparison]) -> str:
    """Says why comparisons without an answer have no more runs, behind a colon; an empty text where all have one."""
    most = max((one.design.max_pairs for one in comparisons), default=0)
    if pairs := sorted({one.n for one in comparisons if one.is_unlikely}):
        chance = f"an answer by {most} seeds has a chance below {100 * UNLIKELY:.0f} %"
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
    arm = analysis.arms[name]
    return f"{len(arm.failed)} of {counted(len(arm.runs), 'run')} failed" if arm.failed else ""


def _price(analysis: Analysis, one: ArmComparison) -> str:
    """Says how long an arm trains beside the other, if a fifth more or less, and in each pair more or in each less."""
    own, other = (analysis.arms[arm].costs("train_seconds") for arm in (one.arm, one.other))
    ratios = sorted(own[seed] / other[seed] for seed in own.keys() & other.keys() if other[seed] > 0)
    if not ratios or ratios[0] <= 1 <= ratios[-1] or 0.8 < (middle := statistics.median(ratios)) < 1.2:
        return ""
    pairs = f"{ratios[0]:.2g} to {ratios[-1]:.2g} in {counted(len(ratios), 'pair')}"
    return f"training took {middle:.2g} times the wall-clock time ({pairs})"


def _runs(analysis: Analysis, arms: Sequence[str]) -> str:
    """Counts runs, with their time one after the other, by the medians of their arms; without it before any ended."""
    times = {name: arm.median("seconds") for name, arm in analysis.arms.items()}
    known = [time for time in times.values() if not math.isnan(time)]
    seconds = sum(sum(known) / len(known) if math.isnan(times[arm]) else times[arm] for arm in arms) if known else 0.0
    return counted(len(arms), "run") + (f" (about {show_time(seconds)} one by one)" if known else "")


def recommendation(analysis: Analysis) -> str:
    """Returns what to do now, in a sentence or two."""
    study = analysis.study
    missing = [run.arm for run in study.runs if run.state == "missing"]
    if missing:
        return f"Not finished: {_runs(analysis, missing)} to the next comparison. Continue with {command(study)}"
    failed = [run.arm for one in analysis.comparisons if one.blocked for run in one.failed]
    if not failed:
        return f"{_choice(analysis)} N{at_the_end(study, analysis.comparisons)[1:]}."
    stopped = f"Failed runs of {few([*map(quoted, dict.fromkeys(failed))])} stopped a comparison"
    return f"{_choice(analysis)} {stopped}: see why, then {command(study)} --retry"


def command(study: Study) -> str:
    """Returns the command that continues a study."""
    return shlex.join(["lightning", "ablate", study.plan_file or "PLAN", f"--out={study.folder}"])


def _choice(analysis: Analysis) -> str:
    """Names the arm to take, and what may be taken as well."""
    study, effect = analysis.study, analysis.rules.shown_effect
    found = [line for line in lines(analysis) if line.kind != "baseline" and not line.is_interaction]
    kinds = {line.kind for line in found}
    if not any(arm.n for arm in analysis.arms.values()) or kinds == {"failed"}:
        return "No arm could be compared."
    if SIZES in study.factors:
        return _over_sizes(analysis)
    if analysis.rules.arms == "pairs":
        equals = [line for line in found if line.comparison and WORDS[line.kind].outcome != "worse"]
        rest = f"; {few_arms(equals)} not shown to be worse by as much as matters" if equals else ""
        return f"Take {reference(analysis)}{rest}."
    if better := [line for line in found if WORDS[line.kind].outcome == "better"]:
        return _take(analysis, better)
    worse = {"clearly worse", "worse", "slightly worse"}
    if kinds <= worse:
        why = "no arm is better"
    elif kinds <= worse | {"slightly better", "equivalent", "not better"}:
        why = f"no arm is better by {effect} or more"
    else:
        why = "no arm is shown to be better"
    parts = [f"Keep {quoted(study.baseline)}: {why}"]
    if slightly := [line for line in found if line.kind == "slightly better"]:
        parts.append(f"{few_arms(slightly)} by less: no reason to switch")
    alike = [line for line in found if line.kind in ("equivalent", "not worse")]
    if also := [line for line in alike if not _failed(analysis, line.arm.name)]:
        here = " (open for new images)" if any(line.holds == HERE for line in also) else ""
        parts.append(f"{few_arms(also)} may be taken as well{here}")
    parts += [f"not {quoted(line.arm.name)}: {_failed(analysis, line.arm.name)}" for line in alike if line not in also]
    return "; ".join(parts) + "."


def _take(analysis: Analysis, better: Sequence[Line]) -> str:
    """Recommends the best of the arms that are better, and says what to know of it."""
    best, rules = better[0], analysis.rules
    assert best.comparison is not None
    about = [f"{rules.unit.difference(best.comparison.mean)} of {rules.metric}"]
    if best.kind != "clearly better":
        about.append(f"perhaps under {rules.shown_effect}")
    if len(better) > 1:
        about.append(f"the best mean of {len(better)} better arms, which were not compared with each other")
    about += filter(None, [_failed(analysis, best.arm.name), "open for new images" if best.holds == HERE else ""])
    if ", " in (options := settings(analysis, best)):
        about.append(f"it differs in {options}")
    if_any = "" if best.kind == "clearly better" else " if any gain will do"
    return f"Take {quoted(best.arm.name)}{if_any} ({', '.join(about)})."


def _over_sizes(analysis: Analysis) -> str:
    """Says of each arm what is claimed of it at each size, and whether that changes."""
    arms, sizes = analysis.study.factors.values()
    kinds, found = {line.arm.name: line.kind for line in lines(analysis)}, []
    for arm in (arm for arm in arms if kinds[arm_name(arm, sizes[0])] != "baseline"):
        at_size = {size: kinds[arm_name(arm, size)] for size in sizes}
        outcomes = {WORDS[kind].outcome for kind in at_size.values()}
        changes = {one.arm: kind_of(one) for one in analysis.interactions if arm_name(arm, sizes[0]) in one.terms}
        claimed = [quoted(name) for name, kind in changes.items() if WORDS[kind].outcome in ("better", "worse")]
        answer = "no change is shown"
        if {"better", "worse"} <= outcomes:
            answer = "the answer flips"
        elif claimed:
            answer = f"the difference changes with the size ({few(claimed, 'interactions')})"
        elif {*changes.values()} <= {"slightly better", "slightly worse", "equivalent"}:
            most = f"less than {analysis.rules.shown_effect}"
            answer = f"the difference changes by {most} from that with {quoted(sizes[0])}"
        verdicts = "; ".join(f"with {quoted(size)} {phrase(analysis, kind)}" for size, kind in at_size.items())
        found.append(f"{quoted(arm)} is {verdicts}: {answer}.")
    return " ".join(found)


def notes(analysis: Analysis) -> list[str]:
    """Returns what a reader must know beside the verdicts: failures, arms that change nothing, tuning."""
    found = []
    for arm in (arm for arm in analysis.arms.values() if arm.failed):
        runs, seeds = counted(len(arm.runs), "run"), listed([str(run.seed) for run in arm.failed])
        found.append(
            f"{len(arm.failed)} of {runs} of {quoted(arm.name)} failed (seed {seeds}): these seeds do not count, and "
            "claims are about seeds with which both runs finish."
        )
    for one in analysis.between_arms:
        both = listed([quoted(one.arm), quoted(one.other)])
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
        if one.n and one.mean * (analysis.arms[one.arm].mean - analysis.arms[one.other].mean) < 0:
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
            if arms := [quoted(arm) for arm in study.arms if study.chosen(arm).get(key) in ends]:
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
    rules = analysis.rules
    if rules.equal:
        about += f" Arms trained for equal time: verdicts are about who wins an hour.{_steps_won(analysis)}"
    if more := ", then ".join(rules.then):
        about += f" Arms better or worse by {rules.metric} are compared by {more} too, within the same alpha."
    found = [about, *(f"Not as planned: {text}." for text in analysis.study.plan_changed)]
    if analysis.study.plan_changed:
        only = "only if nothing of this was done because of a result, and no result of a run changed by it"
        found.append(f"The error of at most {100 * rules.alpha:g} % holds {only}. Verdicts below are today's.")
    found += unlike_spreads(analysis.between_arms)
    if any(one.differs for one in analysis.comparisons):
        shares = [rules.unit.plain(share * rules.smallest_effect) for share in (0.2, 1, 0.8, 0.25)]
        found.append(TOO_LARGE.format(*shares))
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
    rules = analysis.rules
    pairs = [*map(str, design_of(rules, 1).analyses)]
    looks = ", ".join(pairs if len(pairs) < 4 else [*pairs[:3], "..."])
    kinds = "arms, interactions, metrics" if rules.then else "arms, interactions"
    return (
        f"Arms are compared after {looks} pairs of runs with the same seeds, at most {rules.max_seeds}; decided arms "
        "get no more runs, and a verdict is final while the rule stays. The probability of any false claim is at most "
        f"{rules.alpha:g} over all {kinds} and analyses. Means of arms are over all their runs, differences over the "
        f"pairs of the analysis that decided. {100 * KEPT:.0f} % of this error is saved in case max_seeds is raised "
        "later; such a study needs somewhat more seeds than one planned with as many."
    )
