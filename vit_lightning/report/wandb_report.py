"""An ablation in W&B: a run of its own that holds the tables and figures, beside those of the arms."""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vit_lightning.errors import UserError
from vit_lightning.report.analysis import Analysis, analyse
from vit_lightning.report.checks import read_pages, warnings_of
from vit_lightning.report.figures import draw_figures
from vit_lightning.report.study import Study
from vit_lightning.report.tables import Table, arm_table, cost_table, difference_table, effect_table
from vit_lightning.report.wording import headline, sentences
from vit_lightning.report.write import verdicts
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror

REPORT = "report"
"""Job type of the run, as those of the other runs are their arms."""


def wandb_settings(study: Study) -> dict[str, Any]:
    """Mode, project and entity of the study's runs, as the first page that can be read has them."""
    said = next((page.get("wandb") for page in read_pages(study).values()), None) or {}
    return {name: said[name] for name in ("mode", "project", "entity") if said.get(name) is not None}


def log_report(study: Study, *, send: bool = False) -> str:
    """Logs the aggregated tables and the figures to a run in the ablation's group; returns where it is, in a line.

    Whatever is wrong with W&B, nothing is raised. The same run is updated each time, unless it has all of it already.

    Args:
        study: the ablation.
        send: to W&B's server and nowhere else, whatever the pages say.

    Raises:
        UserError: it was to be sent and was not.
    """
    analysis = analyse(study)
    known, values = _known(study.folder), summary(analysis)
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    if known.get("logged") == digest and not send:
        return ""
    settings = wandb_settings(study) | ({"mode": "online"} if send else {})
    config = WandbConfig(**settings, group=study.name, job_type=REPORT, tags=[study.name[:64], REPORT])
    page = {
        "ablation": study.name,
        "baseline": study.baseline,
        "report": study.report,
        "smallest_effect": study.smallest_effect,
        "alpha": study.alpha,
        "arms": study.arms,
    }
    mirror = WandbMirror(study.folder, known["run_id"], config, page)
    mirror.start(otherwise=() if send else ("offline",))
    if mirror.mode == "disabled":
        if send:
            raise UserError(f"the report was not sent: {mirror.reason} (for a key: wandb login)")
        return mirror.hint()
    try:
        for name, table in report_tables(analysis).items():
            mirror.log_table(f"{REPORT}/{name}", table.header, table.rows)
        images = _save_images(study.folder, draw_figures(analysis))
        mirror.log_images({f"{REPORT}/{name}": path for name, path in images.items()})
        mirror.log_summary(values)
    finally:
        taken, place = mirror.is_live, mirror.hint()
        mirror.finish()
    if not taken or (mirror.mode == "online" and mirror.reason):
        if send:
            raise UserError(f"the report was not sent, or not all of it: {mirror.reason}")
        return f"W&B         took not all of the report ({mirror.reason})"
    write_whole(study.folder / "wandb.json", json.dumps({**known, "logged": digest}) + "\n")
    if mirror.mode == "offline":
        return f"W&B         offline; send all of it: lightning sync {shlex.quote(str(study.folder))}"
    return place


def report_tables(analysis: Analysis) -> dict[str, Table]:
    """The tables that go to W&B, by name."""
    tables = {"differences": difference_table, "effects": effect_table, "arms": arm_table, "costs": cost_table}
    return {name: made for name, make in tables.items() if (made := make(analysis)) is not None and made.rows}


def summary(analysis: Analysis) -> dict[str, Any]:
    """Final values of the run: the answer, and for each arm what ``verdicts.json`` says of it."""
    lines = [*sentences(analysis), *warnings_of(analysis)]
    found: dict[str, Any] = {"headline": headline(analysis), "verdicts": "\n".join(lines)}
    for verdict in verdicts(analysis):
        for key in ("verdict", "difference", "low", "high", "p_adjusted", "n"):
            found[f"{verdict['arm']}/{key}"] = verdict[key]
    return found


def _save_images(folder: Path, figures: Mapping[str, Figure]) -> dict[str, Path]:
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = {name: folder / "figures" / f"{name}.png" for name in figures}
    for name, figure in figures.items():
        figure.savefig(paths[name], dpi=120, facecolor="white", transparent=False)
    return paths


def _known(folder: Path) -> dict[str, str]:
    """What ``wandb.json`` says: the id of the run, drawn where there is none yet, and what was logged to it."""
    try:
        found = json.loads((folder / "wandb.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {"run_id": secrets.token_hex(4), **found}
