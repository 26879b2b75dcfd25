"""``lightning dashboard``: a workspace and a report of an ablation in W&B, or their specs where W&B is not there."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable
from typing import Any

from vit_lightning.errors import UserError, first_line
from vit_lightning.report.report import Report
from vit_lightning.report.study import TUNING, Study
from vit_lightning.report.tables import markdown
from vit_lightning.report.wandb_report import REPORT, report_tables, wandb_settings
from vit_lightning.report.wording import claim_is_about, rule
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.wandb_mirror import WandbConfig, has_key, import_wandb

PATIENCE = 60.0
"""Seconds within which W&B must save both."""


def dashboard(report: Report) -> None:
    """Makes both in the project of the runs and prints their addresses; without W&B, writes their specs instead.

    Raises:
        UserError: the extra ``dashboard`` is not installed.
    """
    wandb = import_wandb(report.study.folder)
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as fault:
        raise UserError('dashboard needs wandb-workspaces: pip install "vit-lightning[dashboard]"') from fault
    settings = wandb_settings(report)
    project = settings.get("project", WandbConfig.project)
    why = _why_offline(wandb, settings)
    if not why:
        links, why = _bounded(lambda: _send(wandb, report, project, settings.get("entity")))
        if links:
            print("\n".join(links))
            return
    _write_specs(report, project, settings.get("entity") or "", why)


def _why_offline(wandb: Any, settings: dict[str, Any]) -> str:
    """Returns why W&B cannot be used; runs logged offline may have been sent since, so only the environment counts."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return f"W&B is {mode} (WANDB_MODE)"
    if settings.get("mode") == "disabled":
        return "W&B is disabled in the configs of the runs"
    return "" if has_key(wandb) else "no API key"


def _send(wandb: Any, report: Report, project: str, entity: str | None) -> list[str]:
    """Saves both; returns their addresses."""
    entity = entity or str(wandb.Api(timeout=20).default_entity)
    workspace, page = make_workspace(report, project, entity), make_wandb_report(report, project, entity)
    workspace.save_as_new_view()
    page.save()
    return [f"workspace   {workspace.url}", f"report      {page.url}"]


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


def _write_specs(report: Report, project: str, entity: str, why: str) -> None:
    folder = report.study.folder / "dashboard"
    folder.mkdir(exist_ok=True)
    # without an entity, the library would ask W&B for it
    for name, make in (("workspace", make_workspace), ("report", make_wandb_report)):
        view = make(report, project, entity)
        spec = view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
        write_whole(folder / f"{name}.json", json.dumps(spec, indent=2) + "\n")
    place = shlex.quote(str(report.study.folder))
    print(f"{why}: the specs are in {folder}, workspace.json and report.json")
    print(f"to send them: wandb login; lightning sync {place}; lightning dashboard {place}")


def make_workspace(report: Report, project: str, entity: str) -> Any:
    """Makes a workspace of the runs grouped by arm, with the answer, results, curves and costs."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    study = report.study
    curves = [panels.LinePlot(title=name, x="Step", y=[name]) for name in (study.metric, "train/loss", "lr")]
    answer = [panels.MarkdownPanel(markdown=_answer(report))]
    bars = [panels.BarPlot(title=study.compare.metric, metrics=[study.compare.metric])]
    sections = {"Result": answer + bars, "Learning curves": curves, "Costs": _costs(study)}
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"Ablation {study.name}",
        sections=[workspaces.Section(name=name, panels=shown, is_open=True) for name, shown in sections.items()],
        runset_settings=workspaces.RunsetSettings(filters=_own_runs(study), groupby=[workspaces.Metric("JobType")]),
    )


def make_wandb_report(report: Report, project: str, entity: str) -> Any:
    """Makes a W&B report: the answer, the tables, and panels over the runs."""
    import wandb_workspaces.reports.v2 as blocks

    study = report.study
    own = _own_runs(study)
    runs = blocks.Runset(entity=entity, project=project, name=study.name, filters=own, groupby=["JobType"])
    curves = [blocks.LinePlot(title=name, x="Step", y=[name]) for name in (study.metric, "train/loss")]
    return blocks.Report(
        entity=entity,
        project=project,
        title=f"Ablation {study.name}",
        description=report.headline,
        blocks=[
            blocks.MarkdownBlock(text=_answer(report)),
            blocks.PanelGrid(runsets=[runs], panels=[*curves, *_costs(study)]),
            *(blocks.MarkdownBlock(text=table.to_markdown()) for table in report_tables(report).values()),
        ],
    )


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
    lines = "\n".join(f"- {markdown(line)}" for line in [*report.sentences, *report.warnings])
    facts = "\n".join(f"- {name}: {markdown(text)}" for name, text in report.facts.items())
    about = markdown(f"{claim_is_about(report.analysis)} {rule(report.analysis)}")
    answer = f"**{markdown(report.headline)}**\n\n{markdown(report.recommendation)}"
    return f"{question}{answer}\n\n{lines}\n\n{facts}\n\n{about}"
