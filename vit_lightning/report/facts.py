"""Facts of how the runs of an ablation were made, to judge or repeat them, read from the run folders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vit_lightning.notation import counted
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.comparisons import images_of
from vit_lightning.report.study import Study
from vit_lightning.report.wording import unit_of
from vit_lightning.storage.folder import read_json


def read_facts(analysis: Analysis) -> dict[str, str]:
    """Returns the facts by name, without those that nothing is known of."""
    study, rules = analysis.study, analysis.study.compare
    places = [place for run in study.done if (place := read_json(study.folder / run.folder / "environment.json"))]
    lengths = {noun: [run.results.get(key) for run in study.done] for key, noun in LENGTHS.items()}
    days = sorted({str(place["started"])[:10] for place in places if place.get("started")})
    states = {"failed": sum(run.state == "failed" for run in study.runs), "missing": study.missing}
    more = "".join(f", {number} {state}" for state, number in states.items() if number)
    raised = f" (raised from {', '.join(map(str, rules.extended))})" if rules.extended else ""
    effect = unit_of(rules.metric).plain(rules.smallest_effect)
    found = {
        "config": study.config,
        "plan": study.plan_file or "",
        "training": ", ".join(filter(None, (_range(values, noun) for noun, values in lengths.items()))),
        "test": _range((images_of(study, run) for run in study.done), "image"),
        "split": "one for each seed, the same for all arms" if study.split_varies else "the same for all seeds",
        "runs": f"{len(study.done)} done{more}, seeds from {study.seeds[0]} on, at most {rules.max_seeds}{raised}",
        "tuning": _tuning(study),
        "rules": f"smallest effect {effect} of {rules.metric}, alpha {rules.alpha:g}",
        "checkpoint": f"the best {study.metric} of each run",
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


def _tuning(study: Study) -> str:
    tuning = study.tuning
    if tuning is None:
        return "none: all arms have the config's values, or their own"
    seeds = ", ".join(map(str, tuning.seeds))
    trials = counted(len(tuning.tried) * len(tuning.seeds), "trial")
    anew = ", anew for each run with further seeds" if tuning.replicates else ""
    return f"{trials} of each arm with seeds {seeds}{anew}, chosen by {study.metric}"


def _commit(place: dict[str, Any]) -> str:
    """Returns the commit of the code, of the working folder where the package is installed without one."""
    git = place.get("git") or {}
    state = git.get("package") or git.get("working folder")
    return state["commit"][:10] + (" with changes" if state["changed"] else "") if state else ""
