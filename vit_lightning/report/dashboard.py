"""``lightning dashboard``: a workspace and a report of an ablation in W&B; their specs where there is no W&B."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable
from typing import Any

from vit_lightning.errors import UserError
from vit_lightning.report.analysis import Analysis, analyse
from vit_lightning.report.checks import warnings_of
from vit_lightning.report.study import Study
from vit_lightning.report.tables import markdown
from vit_lightning.report.wandb_report import REPORT, report_tables, wandb_settings
from vit_lightning.report.wording import headline, rule, sentences
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.wandb_mirror import WandbConfig, has_key, import_wandb

PATIENCE = 60.0
"""Seconds that W&B has for both."""


def dashboard(study: Study) -> None:
    """Makes both in the project of the runs and prints where they are; without W&B, writes their specs instead.

    Raises:
        UserError: the extra ``dashboard`` is not installed.
    """
    wandb = import_wandb(study.folder)
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as fault:
        raise UserError('dashboard needs wandb-workspaces: pip install "vit-lightning[dashboard]"') from fault
    analysis, settings = analyse(study), wandb_settings(study)
    project = settings.get("project", WandbConfig.project)
    why = _why_offline(wandb, settings)
    if not why:
        links, why = _bounded(lambda: _send(wandb, analysis, project, settings.get("entity")))
        if links:
            print("\n".join(links))
            return
    _write_specs(analysis, project, settings.get("entity") or "", why)


def _why_offline(wandb: Any, settings: dict[str, Any]) -> str:
    """Runs that were logged offline may have been sent since: only the environment says that W&B is offline now."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return f"W&B is {mode} (WANDB_MODE)"
    if settings.get("mode") == "disabled":
        return "W&B is disabled in the pages of the runs"
    return "" if has_key(wandb) else "no API key"


def _send(wandb: Any, analysis: Analysis, project: str, entity: str | None) -> list[str]:
    """Saves both; returns their addresses."""
    entity = entity or str(wandb.Api(timeout=20).default_entity)
    workspace, report = make_workspace(analysis, project, entity), make_report(analysis, project, entity)
    workspace.save_as_new_view()
    report.save()
    return [f"workspace   {workspace.url}", f"report      {report.url}"]


def _bounded(call: Callable[[], list[str]]) -> tuple[list[str], str]:
    """What the call returns in time, or nothing and why."""
    found: list[str] = []
    why = [f"W&B did not answer in {PATIENCE:.0f} s"]

    def work() -> None:
        try:
            found.extend(call())
        except BaseException as fault:  # of any kind, also SystemExit: the specs are written instead
            why[0] = (str(fault).splitlines() or [type(fault).__name__])[0][:200]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return list(found), why[0]


def _write_specs(analysis: Analysis, project: str, entity: str, why: str) -> None:
    folder = analysis.study.folder / "dashboard"
    folder.mkdir(exist_ok=True)
    # without an entity, the library would ask W&B for it
    made = {"workspace": make_workspace(analysis, project, entity), "report": make_report(analysis, project, entity)}
    for name, view in made.items():
        spec = view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
        write_whole(folder / f"{name}.json", json.dumps(spec, indent=2) + "\n")
    place = shlex.quote(str(analysis.study.folder))
    print(f"{why}: the specs are in {folder}, workspace.json and report.json")
    print(f"to send them: wandb login; lightning sync {place}; lightning dashboard {place}")


def make_workspace(analysis: Analysis, project: str, entity: str) -> Any:
    """Runs of the ablation grouped by arm; the answer, results, curves and costs."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    study = analysis.study
    curves = [panels.LinePlot(title=name, x="Step", y=[name]) for name in (study.metric, "train/loss", "lr")]
    result = [
        panels.MarkdownPanel(markdown=_answer(analysis)),
        panels.BarPlot(title=study.report, metrics=[study.report]),
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"Ablation {study.name}",
        sections=[
            workspaces.Section(name="Result", panels=result, is_open=True),
            workspaces.Section(name="Learning curves", panels=curves, is_open=True),
            workspaces.Section(name="Costs", panels=_costs(study), is_open=True),
        ],
        runset_settings=workspaces.RunsetSettings(
            filters=_own_runs(study),
            groupby=[workspaces.Metric("JobType")],
        ),
    )


def make_report(analysis: Analysis, project: str, entity: str) -> Any:
    """The answer, the tables, and panels over the runs of the ablation."""
    import wandb_workspaces.reports.v2 as blocks

    study = analysis.study
    runs = blocks.Runset(
        entity=entity,
        project=project,
        name=study.name,
        filters=_own_runs(study),
        groupby=["JobType"],
    )
    curves = [blocks.LinePlot(title=name, x="Step", y=[name]) for name in (study.metric, "train/loss")]
    return blocks.Report(
        entity=entity,
        project=project,
        title=f"Ablation {study.name}",
        description=headline(analysis),
        blocks=[
            blocks.MarkdownBlock(text=_answer(analysis)),
            blocks.PanelGrid(runsets=[runs], panels=[*curves, *_costs(study)]),
            *(blocks.MarkdownBlock(text=table.to_markdown()) for table in report_tables(analysis).values()),
        ],
    )


def _own_runs(study: Study) -> str:
    """A filter that leaves the runs of the arms."""
    return f"Metric('Group') == {study.name!r} and Metric('JobType') != {REPORT!r}"


def _costs(study: Study) -> list[Any]:
    import wandb_workspaces.reports.v2 as panels

    result = panels.SummaryMetric(study.report)
    return [
        panels.ScatterPlot(title=f"{study.report} against {name}", x=panels.SummaryMetric(name), y=result)
        for name in ("train_seconds", "flops")
    ]


def _answer(analysis: Analysis) -> str:
    said = [*sentences(analysis), *warnings_of(analysis)]
    lines = "\n".join(f"- {markdown(line)}" for line in said)
    return f"**{markdown(headline(analysis))}**\n\n{lines}\n\n{markdown(rule(analysis))}"
