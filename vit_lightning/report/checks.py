"""What must hold for the comparison of an ablation to mean what it says, read from the run folders themselves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from vit_lightning.config.changes import changes
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.study import Study, Trial

OF_A_RUN = ("seed_everything", "experiment", "wandb")
"""Keys that tell runs apart and change nothing else."""

Pages = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """Something that was looked at; ``ok`` is None where it could not be."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class ConfigDifference:
    """A key that is not the same in all runs."""

    key: str
    values: dict[str, list[Any]]
    """What the runs of each arm have, each value once."""
    planned: bool


def read_pages(study: Study) -> Pages:
    """``config.yaml`` of each run folder that has one."""
    found: Pages = {}
    for trial in study.trials:
        try:
            page = yaml.safe_load((study.folder / trial.folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        if isinstance(page, dict):
            found[trial.arm, trial.seed] = page
    return found


def config_differences(study: Study, pages: Pages) -> list[ConfigDifference]:
    """Keys in which runs differ, apart from those that tell runs apart."""
    if not pages:
        return []
    first = next(iter(pages.values()))
    by_run = {run: changes(first, page) for run, page in pages.items()}
    keys = sorted({key for changed in by_run.values() for key in changed if key.partition(".")[0] not in OF_A_RUN})
    found = []
    for key in keys:
        original = next(changed[key][0] for changed in by_run.values() if key in changed)
        values: dict[str, list[Any]] = {}
        for (arm, _), changed in by_run.items():
            value = changed[key][1] if key in changed else original
            if value not in values.setdefault(arm, []):
                values[arm].append(value)
        found.append(ConfigDifference(key, values, _is_planned(study, key, values)))
    return found


def _is_planned(study: Study, key: str, values: dict[str, list[Any]]) -> bool:
    """Whether runs of an arm agree in a key, and so do all arms that do not change it."""
    others = [found for arm, found in values.items() if not _changes(study.arms[arm], key)]
    return all(len(found) == 1 for found in values.values()) and all(found == others[0] for found in others)


def _changes(overrides: Mapping[str, Any], key: str) -> bool:
    """Whether a key is one of those, or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in map(_plain, overrides))


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "init_args").removesuffix("+")


def run_checks(analysis: Analysis, pages: Pages, differences: Sequence[ConfigDifference]) -> list[Check]:
    """All checks, in the order of their weight."""
    study = analysis.study
    return [
        _all_there(study),
        _differ_as_planned(study, pages, differences),
        _nothing_chosen_on_test(study, pages),
        _plan_unchanged(study),
        _same_images(analysis),
        _same_place(study),
    ]


def warnings_of(analysis: Analysis) -> list[str]:
    """What does not hold, a line each; that runs are still to come is none."""
    pages = read_pages(analysis.study)
    checks = run_checks(analysis, pages, config_differences(analysis.study, pages))
    done = [check for check in checks if check.ok is False and not (check is checks[0] and analysis.study.missing)]
    return [f"Does not hold: {check.name}. {check.text}" for check in done]


def _all_there(study: Study) -> Check:
    done = sum(trial.state == "done" for trial in study.trials)
    failed = [trial for trial in study.trials if trial.state == "failed"]
    text = f"{done} of {len(study.trials)} runs are done"
    if failed or study.missing:
        text += f", {len(failed)} failed, {study.missing} missing; pairs without both runs are left out"
    if failed:
        text += ", so what is compared is the arms where they did not fail"
    return Check("all runs of the plan are there", done == len(study.trials), text)


def _differ_as_planned(study: Study, pages: Pages, differences: Sequence[ConfigDifference]) -> Check:
    name = "arms differ only in what the plan names"
    if not pages:
        return Check(name, None, "no run folder holds a config.yaml")
    unplanned = [difference.key for difference in differences if not difference.planned]
    if unplanned:
        return Check(name, False, f"these differ too: {', '.join(unplanned)}")
    seeds = [f"{arm}, seed {seed}" for (arm, seed), page in pages.items() if page.get("seed_everything") != seed]
    if seeds:
        return Check(name, False, f"these pages have another seed than the plan: {'; '.join(seeds)}")
    for one, other in itertools.combinations({arm: None for arm, _ in pages}, 2):
        if all(difference.values.get(one) == difference.values.get(other) for difference in differences):
            return Check(name, False, f"{one} and {other} have the same page")
    named = ", ".join(difference.key for difference in differences) or "nothing"
    without = sum(trial.state == "done" and (trial.arm, trial.seed) not in pages for trial in study.trials)
    text = f"the pages of {len(pages)} runs differ in {named}, and the seed"
    return Check(name, None if without else True, text + (f"; {without} runs have no page" if without else ""))


def _nothing_chosen_on_test(study: Study, pages: Pages) -> Check:
    monitors = sorted({str((page.get("checkpoint") or {}).get("monitor")) for page in pages.values()})
    on_test = [name for name in (study.metric, *monitors) if name.startswith("test")]
    name = "nothing is chosen on test images"
    if on_test:
        return Check(name, False, f"{', '.join(on_test)} chooses, and is of the test images")
    known = pages and "None" not in monitors
    chosen = f"checkpoints are chosen by {', '.join(monitors)}" if known else "not all pages say what chooses"
    text = f"{chosen}; runs are selected by {study.metric}; {study.report} is measured once, at the end"
    return Check(name, True if known else None, text)


def _plan_unchanged(study: Study) -> Check:
    looks = f"look {study.looks} of at most 2"
    name = "plan and code are as they were when the first run began"
    if study.plan_changed:
        return Check(name, False, f"{'; '.join(study.plan_changed)} ({looks})")
    return Check(name, True, f"no change was found ({looks})")


def _same_images(analysis: Analysis) -> Check:
    name = "all runs are tested on the same images"
    images = [arm.components.images for arm in analysis.arms if arm.components is not None]
    if images:
        return Check(name, True, f"{images[0]:,} images with the same labels")
    why = analysis.no_components or "no arm has two runs"
    return Check(name, False if "other test images" in why else None, why)


def _same_place(study: Study) -> Check:
    """Costs can be compared only where all ran on the same hardware with the same versions."""
    name = "all runs had the same hardware and versions"
    places = [place for trial in study.trials if trial.state == "done" and (place := _environment(study, trial))]
    if not places:
        return Check(name, None, "no run folder holds an environment.json")
    kinds = {json.dumps(place, sort_keys=True) for place in places}
    first = places[0]
    where = ", ".join([str(first["processor"]), *map(str, first["gpus"] or []), f"threads: {first['threads']}"])
    if len(kinds) == 1:
        return Check(name, True, where)
    differing = sorted({key for place in places for key in place if place[key] != first.get(key)})
    return Check(name, False, f"they differ in {', '.join(differing)}; times are not to be compared")


def _environment(study: Study, trial: Trial) -> dict[str, Any]:
    try:
        found = json.loads((study.folder / trial.folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: found.get(key) for key in ("processor", "cores", "gpus", "threads", "python", "packages")}
