"""An ablation in W&B: a run of its own that holds the tables and figures, beside those of the arms."""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vit_lightning.errors import UserError
from vit_lightning.report.page import verdicts
from vit_lightning.report.report import Report
from vit_lightning.report.tables import Table
from vit_lightning.storage.folder import read_json, write_whole
from vit_lightning.storage.redaction import Redaction
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror

REPORT = "report"
"""Job type of the report's run; the job types of the other runs are their arms."""


SENT = ("verdicts", "effects", "arms", "tuning", "costs", "differences")
"""Tables that go to W&B."""


def wandb_settings(report: Report) -> dict[str, Any]:
    """Returns mode, project and entity of the study's runs, from the first config that could be read."""
    settings = next((config.get("wandb") for config in report.analysis.configs.values()), None) or {}
    return {name: settings[name] for name in ("mode", "project", "entity") if settings.get(name) is not None}


def log_report(report: Report, *, send: bool = False) -> str:
    """Logs tables and figures to a run in the ablation's group; returns where it is, in one line.

    Without ``send``, faults of W&B are not raised. The same run is updated each time, unless nothing has changed.

    Args:
        report: of the ablation.
        send: to W&B's server and nowhere else, whatever the configs of the runs say.

    Raises:
        UserError: it was to be sent and was not.
    """
    study, values = report.study, summary(report)
    known = {"run_id": secrets.token_hex(4), **read_json(study.folder / "wandb.json")}
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    if known.get("logged") == digest and not send:
        return ""
    settings = wandb_settings(report) | ({"mode": "online"} if send else {})
    config = WandbConfig(**settings, group=study.name, job_type=REPORT, tags=[study.name[:64], REPORT])
    plan = {"baseline": study.baseline, "compare": asdict(study.compare), "arms": study.arms}
    mirror = WandbMirror(study.folder, known["run_id"], config, {"ablation": study.name, **plan})
    mirror.start(otherwise=() if send else ("offline",))
    if mirror.mode == "disabled":
        if send:
            raise UserError(f"the report was not sent: {mirror.reason} (for a key: wandb login)")
        return mirror.hint()
    write_whole(study.folder / "wandb.json", json.dumps(known) + "\n")  # so that another try updates the same run
    try:
        for name, table in report_tables(report).items():
            mirror.log_table(f"{REPORT}/{name}", table.header, table.rows)
        mirror.log_images(_save_images(report))
        mirror.log_summary(values)
        if not study.missing and known.get("logged") != digest:
            mirror.alert(f"{study.name} is finished", report.headline)
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


def report_tables(report: Report) -> dict[str, Table]:
    """Returns the tables that go to W&B, by name."""
    redacted = Redaction().of
    tables = {name: report.tables[name] for name in SENT if name in report.tables}
    return {name: replace(table, rows=redacted(table.rows)) for name, table in tables.items()}


def summary(report: Report) -> dict[str, Any]:
    """Returns the final values of the run: the answer, and for each arm those of ``verdicts.json``."""
    found: dict[str, Any] = {
        "question": report.study.question,
        "headline": report.headline,
        "recommendation": report.recommendation,
        "verdicts": "\n".join([*report.sentences, *report.caveats, *report.warnings]),
        **{f"facts/{name}": text for name, text in report.facts.items()},
    }
    pairs = report.study.compare.arms == "pairs"
    for verdict in verdicts(report.analysis):
        name = f"{verdict['arm']} against {verdict['other']}" if pairs else verdict["arm"]
        for key in ("verdict", "mean", "low", "high", "p", "n"):
            found[f"{name}/{key}"] = verdict[key]
    return found


def _save_images(report: Report) -> dict[str, Path]:
    folder = report.study.folder / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in report.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white", transparent=False)
    return {f"{REPORT}/{name}": folder / f"{name}.png" for name in report.figures}
