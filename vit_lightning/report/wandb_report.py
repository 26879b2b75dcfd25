"""An ablation in W&B: a run of its own that holds the tables and figures, beside those of the arms."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vit_lightning.report.page import verdicts
from vit_lightning.report.report import Report
from vit_lightning.storage.folder import read_json, write_whole
from vit_lightning.storage.wandb_logger import RunLogger, WandbConfig

REPORT = "report"
"""Job type of the report's run; the job types of the other runs are their arms."""


SENT = ("verdicts", "arms", "tuning", "costs", "differences")
"""Tables that go to W&B."""


def wandb_settings(report: Report) -> dict[str, Any]:
    """Returns mode, project and entity of the study's runs, from the first config that could be read."""
    settings = next((config.get("wandb") for config in report.analysis.configs.values()), None) or {}
    return {name: settings[name] for name in ("mode", "project", "entity") if settings.get(name) is not None}


def log_report(report: Report) -> str:
    """Logs tables and figures to a run in the ablation's group; returns where it is, in one line.

    The same run is updated each time, unless nothing has changed.
    """
    study, values = report.study, summary(report)
    known = {"run_id": secrets.token_hex(4), **read_json(study.folder / "wandb.json")}
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    if known.get("logged") == digest:
        return ""
    config = WandbConfig(**wandb_settings(report), group=study.name, job_type=REPORT, tags=[study.name[:64], REPORT])
    plan = {"baseline": study.baseline, "compare": asdict(study.compare), "arms": study.arms}
    run = RunLogger(study.folder, known["run_id"], config, {"ablation": study.name, **plan}, say=lambda _: None)
    run.start()
    if run.mode == "disabled":
        return run.hint()
    write_whole(study.folder / "wandb.json", json.dumps(known) + "\n")  # so that another try updates the same run
    for name in SENT:
        if table := report.tables.get(name):
            run.log_table(f"{REPORT}/{name}", table.header, table.rows)
    run.log_images(_save_images(report))
    run.log_summary(values)
    if not study.missing:
        run.alert(f"{study.name} is finished", report.headline)
    run.finish()
    if not run.fault:
        write_whole(study.folder / "wandb.json", json.dumps({**known, "logged": digest}) + "\n")
    return run.hint()


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
        name += f" by {verdict['metric']}" * (verdict["metric"] != report.study.compare.metric)
        for key in ("verdict", "mean", "low", "high", "p", "n"):
            found[f"{name}/{key}"] = verdict[key]
    return found


def _save_images(report: Report) -> dict[str, Path]:
    folder = report.study.folder / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in report.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white", transparent=False)
    return {f"{REPORT}/{name}": folder / f"{name}.png" for name in report.figures}
