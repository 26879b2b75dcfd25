"""Facts of how the runs of an ablation were made, to judge or repeat them, read from the run folders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vit_lightning.report.analysis import Analysis
from vit_lightning.report.comparisons import images_of
from vit_lightning.report.study import Study
from vit_lightning.report.wording import counted, unit_of
from vit_lightning.storage.folder import read_json


def read_facts(analysis: Analysis) -> dict[str, str]:
    """Returns the facts by name, without those that nothing is known of."""
    study = analysis.study
    places = [place for run in study.done if (place := read_json(study.folder / run.folder / "environment.json"))]
    results = [run.results for run in study.done]
    rules, failed = study.compare, sum(run.state == "failed" for run in study.runs)
    states = {"failed": failed, "missing": study.missing}
    more = "".join(f", {number} {state}" for state, number in states.items() if number)
    unit = unit_of(rules.metric)
    found = {
        "config": study.config,
        "plan": study.plan_file or "",
        "training": ", ".join(
            filter(None, [_spread(results, "train_images", "image"), _spread(results, "epochs", "epoch")])
        ),
        "test": _numbers((images_of(study, run) for run in study.done), "image"),
        "split": "one for each seed, the same for all arms" if study.split_varies else "the same for all seeds",
        "runs": f"{len(study.done)} done{more}, seeds from {study.seeds[0]} on, at most {rules.max_seeds}",
        "tuning": _tuning(study),
        "rules": f"smallest effect {unit.plain(rules.smallest_effect)} of {rules.metric}, alpha {rules.alpha:g}",
        "checkpoint": f"the best {study.metric} of each run",
        "date": _dates(places),
        "commit": _commits(places),
    }
    return {name: text for name, text in found.items() if text}


def _spread(results: Iterable[dict[str, Any]], key: str, noun: str) -> str:
    return _numbers((result.get(key) for result in results), noun)


def _numbers(values: Iterable[Any], noun: str) -> str:
    """Returns a number that all runs share, or the range."""
    known = sorted({value for value in values if value is not None})
    if len(known) > 1:
        return f"{known[0]:,} to {known[-1]:,} {noun}s"
    return counted(known[0], noun) if known else ""


def _tuning(study: Study) -> str:
    tuning = study.tuning
    if tuning is None:
        return "none: all arms have the config's values, or their own"
    trials = [trial for trial in tuning.trials if trial.arm == study.baseline]
    seeds = ", ".join(map(str, tuning.seeds))
    return f"{counted(len(trials), 'trial')} of each arm with seeds {seeds}, chosen by {study.metric}"


def _dates(places: list[dict[str, Any]]) -> str:
    days = sorted({str(place["started"])[:10] for place in places if place.get("started")})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""


def _commits(places: list[dict[str, Any]]) -> str:
    """Returns the commits of the code, of the working folder where the package is installed without one."""
    found = []
    for place in places:
        git = place.get("git") or {}
        state = git.get("package") or git.get("working folder")
        if state:
            found.append(state["commit"][:10] + (" with changes" if state["changed"] else ""))
    return ", ".join(dict.fromkeys(found))
