"""An ablation in W&B: a run with its tables and figures, a workspace and a report; here without a network."""

from __future__ import annotations

import json
import os

import pytest
from fake_study import make_study
from processes import Running
from wandb_command import log_report_twice
from wandb_stub import read_wandb_file

from vit_lightning.report import dashboard as module
from vit_lightning.report.dashboard import dashboard
from vit_lightning.report.report import make_report

pytest.importorskip("wandb_workspaces")


def test_tables_and_figures_go_to_a_run_of_the_group(tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    result = Running(log_report_twice, folder=tmp_path, environment=environment).finish()
    assert result.returncode == 0, result.stderr
    assert result.stdout == "W&B         offline; send all of it: lightning sync pooling\nnothing new\n"
    [file] = (tmp_path / "pooling" / "wandb").glob("offline-run-*/run-*.wandb")
    sent = read_wandb_file(file)
    assert (sent["run"]["group"], sent["run"]["job_type"]) == ("pooling", "report")
    assert sent["run"]["id"] == json.loads((tmp_path / "pooling" / "wandb.json").read_text())["run_id"]
    assert sent["summary"]["question"].startswith("What should go to the head")
    assert sent["summary"]["headline"].endswith("undecided against cls")
    assert sent["summary"]["recommendation"] == "Keep cls: no arm is shown to be better. Nothing is left to run."
    assert ", 6 pairs). Next: stop" in sent["summary"]["verdicts"]
    assert sent["summary"]["mean/n"] == 6  # where an answer became unlikely
    names = {path.name.partition("_")[0] for path in file.parent.glob("files/media/*/report/*")}
    assert names == {"verdicts", "differences", "arms", "costs", "seeds", "curves"}


def test_without_w_and_b_the_specs_are_written_and_it_is_said_how_to_send_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    study = make_study(tmp_path / "pooling", images=60)
    dashboard(make_report(study))
    said = capsys.readouterr().out
    assert "W&B is offline" in said
    assert f"lightning sync {study.folder}; lightning dashboard {study.folder}" in said
    workspace = json.loads((study.folder / "dashboard" / "workspace.json").read_text())
    [runs] = workspace["spec"]["section"]["runSets"]
    chosen = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
    assert chosen == [("group", "=", "pooling"), ("jobType", "!=", "report"), ("jobType", "!=", "tuning")]
    assert runs["grouping"] == [{"section": "run", "name": "jobType"}]
    sections = workspace["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Result", "Learning curves", "Costs"]
    report = (study.folder / "dashboard" / "report.json").read_text()
    assert "Ablation pooling" in report
    assert "undecided against cls" in report
    assert '"jobType"' in report


def test_with_w_and_b_both_are_saved(tmp_path, monkeypatch, capsys):
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    saved = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(module, "has_key", lambda wandb: True)
    settings = {"entity": "team", "project": "digits", "mode": "offline"}  # its runs may have been sent since
    monkeypatch.setattr(module, "wandb_settings", lambda report: settings)
    for kind, method in ((workspaces.Workspace, "save_as_new_view"), (reports.Report, "save")):
        monkeypatch.setattr(kind, method, lambda self: saved.append((self.entity, self.project)))
        monkeypatch.setattr(kind, "url", property(lambda self: f"https://w/{self.project}"))
    study = make_study(tmp_path / "pooling", images=60)
    dashboard(make_report(study))
    assert saved == [("team", "digits")] * 2
    assert "https://w/digits" in capsys.readouterr().out
    assert not (study.folder / "dashboard").exists()


def test_a_server_that_refuses_leaves_the_specs(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("permission denied\nat line 7")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(module, "has_key", lambda wandb: True)
    monkeypatch.setattr(module, "_send", refuse)
    study = make_study(tmp_path / "pooling", images=60)
    dashboard(make_report(study))
    assert "permission denied: the specs are in" in capsys.readouterr().out
    assert (study.folder / "dashboard" / "workspace.json").is_file()
