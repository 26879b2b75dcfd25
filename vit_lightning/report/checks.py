"""Facts of how the runs of an ablation were made, and checks of what their comparison assumes, by the run folders."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vit_lightning.errors import counted
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.comparisons import images_of
from vit_lightning.report.study import written

HARDWARE = ("processor", "cores", "gpus", "threads", "python", "packages")
"""Keys of ``environment.json`` that must agree for costs to be comparable."""

SOURCES = ("data.class_path", "data.root", "data.path", "data.name")
"""Options that say where images are from."""

Result = tuple[bool | None, str]
"""Whether a check holds, and what was found."""


@dataclass(frozen=True)
class Check:
    """Result of one check; ``ok`` is None where it could not be made."""

    name: str
    ok: bool | None
    text: str


def run_checks(analysis: Analysis) -> list[Check]:
    """Returns all checks, the most important first."""
    study = analysis.study
    found: dict[str, Result] = {
        "arms differ only in what the plan names": _differ_as_planned(analysis),
        "nothing is selected on test images": _nothing_chosen_on_test(analysis),
        "plan, code, results and claims are as they were first": (
            not study.plan_changed,
            "; ".join(study.plan_changed) or "no change was found",
        ),
        "arms are tested on the same images": _same_images(analysis),
        "all runs had the same hardware and versions": _same_place(analysis),
    }
    if study.tuning is not None and (left_out := study.tuning.left_out):
        failed = [f"{'; '.join(map(written, values))} failed in {arm}" for arm, values in left_out.items()]
        found["every arm could choose of the same values"] = False, f"{'; '.join(failed)}: left out there alone"
    return [Check(name, ok, text) for name, (ok, text) in found.items()]


def _differ_as_planned(analysis: Analysis) -> Result:
    study, configs, differences = analysis.study, analysis.configs, analysis.differences
    if not configs:
        return None, "no run folder holds a config.yaml"
    unplanned = [difference.key for difference in differences if not difference.planned]
    if unplanned:
        return False, f"these differ too: {', '.join(unplanned)}"
    seeds = [f"{arm}, seed {seed}" for (arm, seed), config in configs.items() if config.get("seed_everything") != seed]
    if seeds:
        return False, f"these configs have another seed than the plan: {'; '.join(seeds)}"
    named = ", ".join(difference.key for difference in differences) or "nothing"
    without = sum((run.arm, run.seed) not in configs for run in study.done)
    text = f"the configs of {len(configs)} runs differ in {named}, and the seed"
    return None if without else True, text + (f"; {counted(without, 'run')} without a config" if without else "")


def _nothing_chosen_on_test(analysis: Analysis) -> Result:
    study, configs = analysis.study, analysis.configs
    monitors = sorted({str((config.get("checkpoint") or {}).get("monitor")) for config in configs.values()})
    on_test = [name for name in (study.metric, *monitors) if name.startswith("test")]
    if on_test:
        return False, f"{', '.join(on_test)} selects and is measured on test images"
    known = configs and "None" not in monitors
    chosen = f"checkpoints are selected by {', '.join(monitors)}" if known else "not all configs name what selects"
    text = f"{chosen}; {study.compare.metric} is measured once, at the end of a run"
    return True if known else None, text


def _same_images(analysis: Analysis) -> Result:
    """Checks that all arms of a seed have the same test images, and all seeds unless the split varies."""
    study, tested = analysis.study, analysis.tested
    if (other := [one.key for one in analysis.differences if one.key in SOURCES]) and not tested.differ:
        return None, f"arms differ in {', '.join(other)}: their labels alone tell that images are the same"
    if not tested.correct:
        return False if tested.differ else None, tested.why
    text = f"{len(next(iter(tested.correct.values()))):,} images with the same labels"
    if tested.same:
        return True, text + (", although the split varies with the seed" if study.split_varies else "")
    return study.split_varies, f"{text} for all arms of a seed; {tested.why}"


def _same_place(analysis: Analysis) -> Result:
    """Checks that costs can be compared: the same hardware and versions in all runs."""
    if not analysis.environments:
        return None, "no run folder holds an environment.json"
    first = analysis.environments[0][1]
    differing = sorted(
        key for key in HARDWARE if any(place.get(key) != first.get(key) for _, place in analysis.environments)
    )
    if differing:
        seen = {(arm, str([place.get(key) for key in differing])) for arm, place in analysis.environments}
        alike = len(seen) == len({arm for arm, _ in seen}) * len({values for _, values in seen})
        confounded = "" if alike else ", and between arms: a difference may be that of hardware or versions"
        return False, f"they differ in {', '.join(differing)}{confounded}; times cannot be compared"
    shown = [first.get("processor"), *(first.get("gpus") or []), f"threads: {first.get('threads')}"]
    return True, ", ".join(map(str, shown))


def read_facts(analysis: Analysis) -> dict[str, str]:
    """Returns the facts by name, without those that nothing is known of."""
    study, rules, places = analysis.study, analysis.rules, [place for _, place in analysis.environments]
    lengths = [_range((run.results.get(key) for run in study.done), noun) for key, noun in LENGTHS.items()]
    days = sorted({str(place["started"])[:10] for place in places if place.get("started")})
    states = {"failed": sum(run.state == "failed" for run in study.runs), "missing": study.missing}
    more = "".join(f", {number} {state}" for state, number in states.items() if number)
    raised = f" (raised from {', '.join(map(str, rules.extended))})" if rules.extended else ""
    found = {
        "config": study.config,
        "plan": study.plan_file or "",
        "training": ", ".join(filter(None, lengths)),
        "test": _range((images_of(rules, run) for run in study.done), "image"),
        "split": "one for each seed, the same for all arms" if study.split_varies else "the same for all seeds",
        "runs": f"{len(study.done)} done{more}",
        "seeds": f"from {study.seeds[0]} on, at most {rules.max_seeds}{raised}",
        "tuning": "" if study.tuning else "none: all arms have the config's values, or their own",
        "rules": f"smallest effect {rules.shown_effect} of {rules.metric}, alpha {rules.alpha:g}",
        "date": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
        "commit": ", ".join(dict.fromkeys(filter(None, map(_commit, places)))),
    }
    return {name: text for name, text in found.items() if text}


LENGTHS = {"train_images": "image", "epochs": "epoch"}
"""Numbers in ``results.json`` that tell how long a run trained."""


def _range(values: Iterable[Any], noun: str) -> str:
    """Returns a number that all runs have, or the least and the largest."""
    known = sorted({value for value in values if value is not None})
    if len(known) > 1:
        return f"{known[0]:,} to {known[-1]:,} {noun}s"
    return counted(known[0], noun) if known else ""


def _commit(place: dict[str, Any]) -> str:
    """Returns the commit of the code, of the working folder where the package is installed without one."""
    git = place.get("git") or {}
    state = git.get("package") or git.get("working folder")
    return state["commit"][:10] + (" with changes" if state["changed"] else "") if state else ""
