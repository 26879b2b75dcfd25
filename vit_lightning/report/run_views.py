"""Runs in W&B: a workspace for each experiment, with a section for each kind of curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_lightning.config.files import differing_options
from vit_lightning.metric_facts import LOGGED
from vit_lightning.report.configs import config_of_run
from vit_lightning.storage.folder import is_run, read_json, runs_in
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.wandb_logger import STEP, project_of

SECTIONS = {
    title: [name for numbers in LOGGED.values() for name, logged in numbers.items() if logged.section == title]
    for title in ("Quality", "Optimization", "Speed")
}
"""Metrics of the curves of each section; those that no run has are left out."""
PICTURES = ("images/validation", "images/confusion", "curves", "confusion", "test_images", "worst_errors")
MOST_KEYS = 6
"""Options by which runs are grouped at most: each is a level in W&B's list of runs."""


@dataclass(frozen=True)
class RunSet:
    """Runs of one experiment that are in one project of W&B."""

    name: str
    project: str
    entity: str | None
    folders: tuple[Path, ...]
    configs: tuple[dict[str, Any], ...]
    alone: bool = False
    """Whether the dashboard is of one run alone."""

    @property
    def options(self) -> list[str]:
        """Options in which the runs differ, but for seeds and names: runs that share them differ by chance alone."""
        return [key for key in differing_options(self.configs) if key != "data.split_seed"]

    @property
    def keys(self) -> list[str]:
        """Keys of W&B's config by which the runs are grouped; none if that would be too many levels."""
        if self.alone or len(self.options) > MOST_KEYS:
            return []
        return [_nested(self.configs, key) for key in self.options] or ["experiment"]

    @property
    def filter(self) -> str:
        """Filter of W&B for exactly these runs."""
        known = [read_json(folder / "environment.json").get("run_id") for folder in self.folders]
        return f"Metric('ID') in {[run_id for run_id in known if run_id]!r}"


def read_sets(folder: Path) -> list[RunSet]:
    """Returns the runs in a folder by experiment and project."""
    found: dict[tuple[str, str, str | None], dict[Path, dict[str, Any]]] = {}
    for path in runs_in(folder):
        config = config_of_run(path)
        wandb = config.get("wandb") or {}
        name = str(config.get("experiment") or path.parent.name)
        place = name, project_of(wandb.get("project")), wandb.get("entity")
        found.setdefault(place, {})[path] = config
    alone = is_run(folder)
    return [RunSet(*place, tuple(runs), tuple(runs.values()), alone) for place, runs in found.items()]


def _nested(configs: Iterable[dict[str, Any]], key: str) -> str:
    """Returns a dotted option as the config in W&B has it, where the arguments of a class are under ``init_args``."""
    for config in configs:
        path: list[str] = []
        node: Any = config
        for part in key.split("."):
            if isinstance(node, dict) and part not in node and "init_args" in node:
                path, node = [*path, "init_args"], node["init_args"]
            if not isinstance(node, dict) or part not in node:
                break
            path, node = [*path, part], node[part]
        else:
            return ".".join(path)
    return key


def curve_sections(folders: Sequence[Path], *, grouped: bool, names: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Returns panels by section; curves of grouped runs are means within a band from the least to the greatest.

    Args:
        folders: run folders, which say what there is to draw.
        grouped: whether the runs are grouped.
        names: metrics of a first section, Quality.
    """
    import wandb_workspaces.reports.v2 as panels

    known = {name for folder in folders for row in read_metrics(folder) for name in row}
    drawn = any(folder.glob("validation/epoch-*.json") for folder in folders)
    sections = {
        title: [curve(name, grouped=grouped, y=[name]) for name in chosen if name in known]
        for title, chosen in {**SECTIONS, "Quality": names}.items()
    }
    if drawn and names:
        sections["Quality"] += [curve("accuracy of each class", grouped=grouped, metric_regex="val_class/.*")]
    sections["Images"] = [panels.MediaBrowser(media_keys=[name]) for name in PICTURES if drawn or "/" not in name]
    return {title: shown for title, shown in sections.items() if shown}


def curve(title: str, *, grouped: bool, **metrics: Any) -> Any:
    """Returns the panel of metrics; the curves of a group are drawn as their mean, from the least to the greatest."""
    import wandb_workspaces.reports.v2 as panels

    band = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"} if grouped else {}
    return panels.LinePlot(title=title, x=STEP, **metrics, **band)


def workspace(entity: str, project: str, name: str, sections: dict[str, list[Any]], filters: str, by: list[Any]) -> Any:
    """Makes a workspace of the runs that pass a filter, grouped by some of their values."""
    import wandb_workspaces.workspaces as workspaces

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[workspaces.Section(name=title, panels=shown, is_open=True) for title, shown in sections.items()],
        runset_settings=workspaces.RunsetSettings(filters=filters, groupby=by),
    )


def set_workspace(runs: RunSet, entity: str) -> Any:
    """Makes the workspace of an experiment, or of one run, in its entity or the given one."""
    from wandb_workspaces.workspaces import Config

    name, by = runs.folders[0].name if runs.alone else runs.name, [Config(key) for key in runs.keys]
    monitors = [(config.get("checkpoint") or {}).get("monitor") for config in runs.configs]
    names = list(dict.fromkeys([*filter(None, monitors), *SECTIONS["Quality"]]))
    sections = curve_sections(runs.folders, grouped=bool(runs.keys), names=names)
    return workspace(runs.entity or entity, runs.project, name, sections, runs.filter, by)
