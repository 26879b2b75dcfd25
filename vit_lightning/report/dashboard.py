"""``lightning dashboard``: workspaces in W&B of runs or of an ablation."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_lightning.config.files import Config, by_key, differing_options
from vit_lightning.errors import UserError, first_line
from vit_lightning.report.configs import config_of_run
from vit_lightning.report.report import Report
from vit_lightning.report.study import TUNING
from vit_lightning.report.tables import markdown
from vit_lightning.storage.folder import read_json, runs_in
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.wandb_logger import STEP, project_of
from vit_lightning.storage.wandb_sources import has_key

SECTIONS = {
    "Quality": ("train/loss", "val/loss", "val/acc"),
    "Optimization": ("train/loss_step", "lr", "optim/grad_norm"),
    "Speed": ("speed/images_per_second", "speed/step_seconds", "speed/mfu"),
}
"""Metrics of the curves of each section; those that no run has are left out."""
PICTURES = ("images/validation", "images/confusion", "curves", "confusion", "test_images", "worst_errors")
MOST_KEYS = 6
"""Options by which runs are grouped at most: each is a level in W&B's list of runs."""


def dashboard(report: Report) -> None:
    """Makes the workspace of an ablation in W&B."""
    settings = next((config.get("wandb") for config in report.analysis.configs.values()), None) or {}
    entity = _entity(settings)
    _save(make_workspace(report, project_of(settings.get("project")), entity))


def runs_dashboard(folder: Path) -> None:
    """Makes a workspace in W&B for each experiment of the runs in a folder.

    Raises:
        UserError: the folder holds no run.
    """
    sets = read_sets(folder)
    entity = _entity(next(iter(sets[0].runs.values())).get("wandb") or {})
    for runs in sets:
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
    """Makes a workspace of the runs of an ablation grouped by arm, with the answer, results and curves."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces.workspaces import Metric

    study, metric = report.study, report.study.compare.metric
    said = "\n".join(f"- {markdown(line)}" for line in report.lines)
    answer = panels.MarkdownPanel(markdown=f"**{markdown(report.headline)}**\n\n{said}")
    result = [answer, panels.BarPlot(title=metric, metrics=[metric])]
    curves = _curves([study.folder / run.folder for run in study.done], [study.metric], grouped=True)
    filters = f"Metric('Group') == {study.name!r} and Metric('JobType') != {TUNING!r}"
    sections = {"Result": result, **curves}
    return _workspace(entity, project, f"Ablation {study.name}", sections, filters, [Metric("JobType")])


@dataclass(frozen=True)
class RunSet:
    """Runs of one experiment that are in one project of W&B."""

    name: str
    project: str
    entity: str | None
    runs: dict[Path, Config]
    """Config by folder."""

    @property
    def keys(self) -> list[str]:
        """Keys of W&B's config by which the runs are grouped: what differs, but for seeds; none if it is much."""
        configs = [*self.runs.values()]
        options = [key for key in differing_options(configs) if key != "data.split_seed"]
        if len(configs) == 1 or len(options) > MOST_KEYS:
            return []
        written = {key.replace(".init_args", ""): key for config in configs for key in by_key(config)}
        return [written.get(key, key) for key in options] or ["experiment"]

    @property
    def filter(self) -> str:
        """Filter of W&B for exactly these runs."""
        known = [read_json(folder / "environment.json").get("run_id") for folder in self.runs]
        return f"Metric('ID') in {[run_id for run_id in known if run_id]!r}"


def read_sets(folder: Path) -> list[RunSet]:
    """Returns the runs in a folder by experiment and project."""
    found: dict[tuple[str, str, str | None], dict[Path, Config]] = {}
    for path in runs_in(folder):
        config = config_of_run(path)
        wandb = config.get("wandb") or {}
        name = str(config.get("experiment") or path.parent.name)
        found.setdefault((name, project_of(wandb.get("project")), wandb.get("entity")), {})[path] = config
    return [RunSet(*place, runs) for place, runs in found.items()]


def set_workspace(runs: RunSet, entity: str) -> Any:
    """Makes the workspace of an experiment, or of one run, in its entity or the given one."""
    from wandb_workspaces.workspaces import Config

    folders, keys = [*runs.runs], runs.keys
    monitors = [(config.get("checkpoint") or {}).get("monitor") for config in runs.runs.values()]
    curves = _curves(folders, filter(None, monitors), grouped=bool(keys))
    name = runs.name if len(folders) > 1 else folders[0].name
    return _workspace(runs.entity or entity, runs.project, name, curves, runs.filter, [Config(key) for key in keys])


def _curves(folders: Sequence[Path], monitors: Iterable[str], *, grouped: bool) -> dict[str, list[Any]]:
    """Returns panels of what runs have logged, by section; curves of grouped runs are means, from least to greatest."""
    import wandb_workspaces.reports.v2 as panels

    there = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]  # a ledger outlives its runs
    known = {name for folder in there for row in read_metrics(folder) for name in row}
    drawn = any(folder.glob("validation/epoch-*.json") for folder in folders)
    band = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"} if grouped else {}
    sections: dict[str, list[Any]] = {
        title: [panels.LinePlot(title=name, x=STEP, y=[name], **band) for name in dict.fromkeys(names) if name in known]
        for title, names in {**SECTIONS, "Quality": [*monitors, *SECTIONS["Quality"]]}.items()
    }
    each = panels.LinePlot(title="accuracy of each class", x=STEP, metric_regex="val_class/.*", **band)
    sections["Quality"] += [each] * drawn
    sections["Images"] = [panels.MediaBrowser(media_keys=[name]) for name in PICTURES if drawn or "/" not in name]
    return {title: shown for title, shown in sections.items() if shown}


def _workspace(
    entity: str, project: str, name: str, sections: dict[str, list[Any]], filters: str, by: list[Any]
) -> Any:
    """Makes a workspace of the runs that pass a filter, grouped by some of their values."""
    import wandb_workspaces.workspaces as workspaces

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[workspaces.Section(name=title, panels=shown, is_open=True) for title, shown in sections.items()],
        runset_settings=workspaces.RunsetSettings(filters=filters, groupby=by),
    )
