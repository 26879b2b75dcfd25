"""``lightning dashboard``: workspaces and a report of runs or of an ablation in W&B, or their specs without W&B."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vit_lightning.errors import UserError, first_line
from vit_lightning.report.report import Report
from vit_lightning.report.run_views import curve, curve_sections, read_sets, set_report, set_workspace, workspace
from vit_lightning.report.study import TUNING, Study
from vit_lightning.report.tables import markdown
from vit_lightning.report.wandb_report import REPORT, report_tables, wandb_settings
from vit_lightning.report.wording import rule
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.wandb_logger import project_of
from vit_lightning.storage.wandb_sources import has_key

PATIENCE = 60.0
"""Seconds within which W&B must save both."""


def dashboard(report: Report) -> None:
    """Makes the workspace and the report of an ablation, as ``publish`` does."""
    settings = wandb_settings(report)
    project, known = project_of(settings.get("project")), settings.get("entity")

    def views(entity: str | None) -> dict[str, Any]:
        own = "" if entity is None else known or entity
        return {"workspace": make_workspace(report, project, own), "report": make_wandb_report(report, project, own)}

    publish(report.study.folder, settings, views)


def runs_dashboard(folder: Path) -> None:
    """Makes a workspace for each experiment of the runs in a folder and a report of all, as ``publish`` does.

    Raises:
        UserError: the folder holds no run.
    """
    sets = read_sets(folder)
    for runs in sets:
        if not runs.keys and not runs.alone:
            print(f"{runs.name}: its runs differ in {len(runs.options)} options and are not grouped")

    def views(entity: str | None) -> dict[str, Any]:
        names = [runs.name if len(sets) > 1 else "workspace" for runs in sets]
        names = [
            name
            if [*names, "report"].count(name) == 1
            else " ".join(filter(None, (name, "in", runs.entity, runs.project)))
            for name, runs in zip(names, sets, strict=True)
        ]
        made = {name: set_workspace(runs, entity) for name, runs in zip(names, sets, strict=True)}
        return {**made, "report": set_report(sets, f"Runs of {folder.resolve().name}", entity)}

    publish(folder, sets[0].configs[0].get("wandb") or {}, views)


def publish(folder: Path, settings: Mapping[str, Any], views: Callable[[str | None], Mapping[str, Any]]) -> None:
    """Saves views in W&B and prints their addresses; without W&B, writes their specs into ``folder/dashboard``.

    Args:
        folder: of the runs or the ablation.
        settings: those of the runs for W&B.
        views: returns the views, by name, for the entity of those whose settings name none; without an entity, which
            the library would look up in W&B, if it is None.

    Raises:
        UserError: the extra ``dashboard`` is not installed.
    """
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as fault:
        raise UserError('dashboard needs wandb-workspaces: pip install "vit-lightning[dashboard]"') from fault
    why = _why_offline(settings)
    if not why:
        links, why = _bounded(lambda: _send(views, settings.get("entity")))
        if links:
            print("\n".join(links))
            return
    _write_specs(folder, views(None), why)


def _why_offline(settings: Mapping[str, Any]) -> str:
    """Returns why W&B cannot be used; runs logged offline may have been sent since, so only the environment counts."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return f"W&B is {mode} (WANDB_MODE)"
    if settings.get("mode") == "disabled":
        return "W&B is disabled in the configs of the runs"
    return "" if has_key() else "no API key"


def _send(views: Callable[[str | None], Mapping[str, Any]], entity: str | None) -> list[str]:
    """Saves the views; returns their addresses."""
    import wandb

    links = []
    for name, view in views(entity or str(wandb.Api(timeout=20).default_entity)).items():
        view.save_as_new_view() if hasattr(view, "save_as_new_view") else view.save()
        links.append(f"{name:<11} {view.url}")
    return links


def _bounded(call: Callable[[], list[str]]) -> tuple[list[str], str]:
    """Returns the result of a call, or nothing and the reason if it fails or takes too long."""
    found: list[str] = []
    why = [f"W&B did not answer in {PATIENCE:.0f} s"]

    def work() -> None:
        try:
            found.extend(call())
        except BaseException as fault:  # also SystemExit: the specs are written instead
            why[0] = first_line(fault)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return list(found), why[0]


def _write_specs(place: Path, views: Mapping[str, Any], why: str) -> None:
    folder = place / "dashboard"
    folder.mkdir(exist_ok=True)
    for name, view in views.items():
        spec = view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
        write_whole(folder / f"{name}.json", json.dumps(spec, indent=2) + "\n")
    shown = shlex.quote(str(place))
    print(f"{why}: the specs are in {folder}, {' and '.join(f'{name}.json' for name in views)}")
    print(f"to send them: wandb login; lightning sync {shown}; lightning dashboard {shown}")


def make_workspace(report: Report, project: str, entity: str) -> Any:
    """Makes a workspace of the runs grouped by arm, with the answer, results, curves and costs."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces.workspaces import Metric

    study, metric = report.study, report.study.compare.metric
    result = [panels.MarkdownPanel(markdown=_answer(report)), panels.BarPlot(title=metric, metrics=[metric])]
    sections = {"Result": result, "Learning curves": _curves(study), **_more_curves(study), "Costs": _costs(study)}
    return workspace(entity, project, f"Ablation {study.name}", sections, _own_runs(study), [Metric("JobType")])


def make_wandb_report(report: Report, project: str, entity: str) -> Any:
    """Makes a W&B report: the answer, the tables, and panels over the runs."""
    import wandb_workspaces.reports.v2 as blocks

    study = report.study
    own = _own_runs(study)
    runs = blocks.Runset(entity=entity, project=project, name=study.name, filters=own, groupby=["JobType"])
    more = [blocks.PanelGrid(runsets=[runs], panels=shown) for shown in _more_curves(study).values()]
    return blocks.Report(
        entity=entity,
        project=project,
        title=f"Ablation {study.name}",
        description=report.headline,
        blocks=[
            blocks.MarkdownBlock(text=_answer(report)),
            blocks.PanelGrid(runsets=[runs], panels=[*_curves(study), *_costs(study)]),
            *more,
            *(blocks.MarkdownBlock(text=table.to_markdown()) for table in report_tables(report).values()),
        ],
    )


def _curves(study: Study) -> list[Any]:
    return [curve(name, grouped=True, y=[name]) for name in (study.metric, "train/loss")]


def _more_curves(study: Study) -> dict[str, list[Any]]:
    folders = [study.folder / run.folder for run in study.runs if run.state == "done"]
    return curve_sections(folders, grouped=True)


def _own_runs(study: Study) -> str:
    """Returns a filter for the runs of the arms."""
    others = [f"Metric('JobType') != {kind!r}" for kind in (REPORT, TUNING)]
    return " and ".join([f"Metric('Group') == {study.name!r}", *others])


def _costs(study: Study) -> list[Any]:
    import wandb_workspaces.reports.v2 as panels

    result = panels.SummaryMetric(study.compare.metric)
    return [
        panels.ScatterPlot(title=f"{study.compare.metric} against {name}", x=panels.SummaryMetric(name), y=result)
        for name in ("train_seconds", "flops")
    ]


def _answer(report: Report) -> str:
    """Returns the first screen of the page as Markdown; the table of the verdicts comes with the others."""
    question = f"{markdown(report.study.question)}\n\n" if report.study.question else ""
    lines = "\n".join(f"- {markdown(line)}" for line in [*report.sentences, *report.caveats, *report.warnings])
    facts = "\n".join(f"- {name}: {markdown(text)}" for name, text in report.facts.items())
    answer = f"**{markdown(report.headline)}**\n\n{markdown(report.recommendation)}"
    return f"{question}{answer}\n\n{lines}\n\n{facts}\n\n{markdown(rule(report.analysis))}"
