"""``lightning dashboard``: workspaces in W&B of runs or of an ablation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_lightning.errors import UserError, first_line
from vit_lightning.report.report import Report
from vit_lightning.report.run_views import curve, curve_sections, read_sets, set_workspace, workspace
from vit_lightning.report.study import TUNING, Study
from vit_lightning.report.tables import markdown
from vit_lightning.report.wording import rule
from vit_lightning.storage.wandb_logger import project_of
from vit_lightning.storage.wandb_sources import has_key


def dashboard(report: Report) -> None:
    """Makes the workspace of an ablation in W&B."""
    configs = report.analysis.configs.values()
    settings = next((config.get("wandb") for config in configs), None) or {}
    entity = _entity(settings)
    _save(make_workspace(report, project_of(settings.get("project")), entity))


def runs_dashboard(folder: Path) -> None:
    """Makes a workspace in W&B for each experiment of the runs in a folder.

    Raises:
        UserError: the folder holds no run.
    """
    sets = read_sets(folder)
    entity = _entity(sets[0].configs[0].get("wandb") or {})
    for runs in sets:
        if not runs.keys and not runs.alone:
            print(f"{runs.name}: its runs differ in {len(runs.options)} options and are not grouped")
        _save(set_workspace(runs, entity))


def _entity(settings: Mapping[str, Any]) -> str:
    """Returns the entity of runs by their settings, else that of the user.

    Raises:
        UserError: the extra ``dashboard`` is not installed, or W&B cannot be used.
    """
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ImportError as fault:
        raise UserError('dashboard needs wandb-workspaces: pip install "vit-lightning[dashboard]"') from fault
    mode = os.environ.get("WANDB_MODE", "online")
    why = f"WANDB_MODE={mode}" if mode in ("offline", "disabled", "dryrun") else "" if has_key() else "no API key"
    if why:
        raise UserError(f"{why}: workspaces are made in W&B (wandb login; runs of an offline mode: lightning sync)")
    return str(settings.get("entity") or wandb.Api(timeout=20).default_entity)


def _save(view: Any) -> None:
    """Saves a workspace, and prints its address."""
    try:
        view.save_as_new_view()
    except Exception as fault:  # of many types
        raise UserError(f"W&B did not save the workspace: {first_line(fault)}") from fault
    print(f"workspace   {view.url}")


def make_workspace(report: Report, project: str, entity: str) -> Any:
    """Makes a workspace of the runs grouped by arm, with the answer, results, curves and costs."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces.workspaces import Metric

    study, metric = report.study, report.study.compare.metric
    result = [panels.MarkdownPanel(markdown=_answer(report)), panels.BarPlot(title=metric, metrics=[metric])]
    sections = {"Result": result, "Learning curves": _curves(study), **_more_curves(study), "Costs": _costs(study)}
    return workspace(entity, project, f"Ablation {study.name}", sections, _own_runs(study), [Metric("JobType")])


def _curves(study: Study) -> list[Any]:
    return [curve(name, grouped=True, y=[name]) for name in (study.metric, "train/loss")]


def _more_curves(study: Study) -> dict[str, list[Any]]:
    folders = [study.folder / run.folder for run in study.runs if run.state == "done"]
    return curve_sections(folders, grouped=True)


def _own_runs(study: Study) -> str:
    """Returns a filter for the runs of the arms."""
    return f"Metric('Group') == {study.name!r} and Metric('JobType') != {TUNING!r}"


def _costs(study: Study) -> list[Any]:
    import wandb_workspaces.reports.v2 as panels

    result = panels.SummaryMetric(study.compare.metric)
    return [
        panels.ScatterPlot(title=f"{study.compare.metric} against {name}", x=panels.SummaryMetric(name), y=result)
        for name in ("train_seconds", "flops")
    ]


def _answer(report: Report) -> str:
    """Returns the first screen of the page as Markdown."""
    question = f"{markdown(report.study.question)}\n\n" if report.study.question else ""
    lines = "\n".join(f"- {markdown(line)}" for line in [*report.sentences, *report.caveats, *report.warnings])
    facts = "\n".join(f"- {name}: {markdown(text)}" for name, text in report.facts.items())
    answer = f"**{markdown(report.headline)}**\n\n{markdown(report.recommendation)}"
    return f"{question}{answer}\n\n{lines}\n\n{facts}\n\n{markdown(rule(report.analysis))}"
