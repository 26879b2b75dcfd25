"""Runs and ablations in W&B: workspaces, reports, a run with tables and figures; without a network or with a stub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_study import make_study
from processes import Running
from wandb_command import KEY, log_report_twice, start
from wandb_stub import StubServer, read_wandb_file

from vit_lightning.report import dashboard as module
from vit_lightning.report.dashboard import dashboard, runs_dashboard
from vit_lightning.report.report import make_report
from vit_lightning.storage.metrics import write_results

pytest.importorskip("wandb_workspaces")


def test_tables_and_figures_go_to_a_run_of_the_group(tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    result = Running(log_report_twice, folder=tmp_path, environment=environment).finish()
    assert result.returncode == 0, result.stderr
    hint = "view: wandb leet pooling/wandb; send: lightning sync pooling (or wandb sync)"
    assert result.stdout == f"W&B         offline; {hint}\nnothing new\n"
    [file] = (tmp_path / "pooling" / "wandb").glob("offline-run-*/run-*.wandb")
    sent = read_wandb_file(file)
    assert (sent["run"]["group"], sent["run"]["job_type"]) == ("pooling", "report")
    assert sent["run"]["id"] == json.loads((tmp_path / "pooling" / "wandb.json").read_text())["run_id"]
    assert sent["summary"]["question"].startswith("What should go to the head")
    assert sent["summary"]["headline"].endswith("undecided against 'cls'")
    assert sent["alerts"] == [("INFO", "pooling is finished", sent["summary"]["headline"])], "once, though logged twice"
    why = "Nothing is left to run: after 6 pairs an answer by 8 seeds has a chance below 20 %; compare.max_seeds "
    assert sent["summary"]["recommendation"].startswith(f"Keep 'cls': no arm is shown to be better. {why}")
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
    assert [section["name"] for section in sections] == ["Result", "Learning curves", "Images", "Costs"]
    report = (study.folder / "dashboard" / "report.json").read_text()
    assert "Ablation pooling" in report
    assert "undecided against 'cls'" in report
    assert '"jobType"' in report


def test_with_w_and_b_both_are_saved(tmp_path, monkeypatch, capsys):
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    saved = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(module, "has_key", lambda: True)
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
    monkeypatch.setattr(module, "has_key", lambda: True)
    monkeypatch.setattr(module, "_send", refuse)
    study = make_study(tmp_path / "pooling", images=60)
    dashboard(make_report(study))
    assert "permission denied: the specs are in" in capsys.readouterr().out
    assert (study.folder / "dashboard" / "workspace.json").is_file()


def write_run(folder: Path, *, seed: int, experiment: str = "digits", depth: int = 1, **options: Any) -> None:
    (folder / "validation").mkdir(parents=True)
    model = {"class_path": "vit_lightning.ViT", "init_args": {"depth": depth}}
    config = {"experiment": experiment, "seed_everything": seed, "model": model, "checkpoint": {"monitor": "val/acc"}}
    config |= {"wandb": {"project": "mine"}, **options}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({"run_id": f"id-{experiment}-{depth}-{seed}"}))
    (folder / "validation" / "epoch-0001.json").write_text('{"step": 1}')
    names = ("train/loss", "val/acc", "val/loss", "lr", "optim/grad_norm", "speed/step_seconds")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 9, "epoch": 0, **dict.fromkeys(names, 0.5)}) + "\n")
    write_results(folder, {"test/acc": 0.5 + 0.01 * seed, "train_seconds": 3.0, "steps": 9})


def test_runs_are_grouped_by_what_differs_but_for_the_seed_and_drawn_as_bands(tmp_path, monkeypatch, capsys):
    import wandb_workspaces.reports.v2.interface as reports
    import wandb_workspaces.workspaces.interface as workspaces

    monkeypatch.setenv("WANDB_MODE", "offline")
    for seed, depth in ((0, 1), (1, 1), (0, 2)):
        lora = None if depth == 1 else {"rank": 8}  # which not all have
        options = {"init_from": f"weights/depth{depth}.pth", "lora": lora}
        write_run(tmp_path / "runs" / "digits" / f"depth{depth}-seed{seed}", seed=seed, depth=depth, **options)
    other = tmp_path / "runs" / "cifar" / "one"
    write_run(other, seed=0, experiment="cifar", wandb={"project": "mine", "entity": "team"})
    write_run(tmp_path / "runs" / "cifar" / "two", seed=0, experiment="cifar")  # in another entity
    runs_dashboard(tmp_path / "runs")
    assert "the specs are in" in capsys.readouterr().out
    specs = tmp_path / "runs" / "dashboard"
    assert {path.name for path in specs.iterdir()} == {
        f"{name}.json" for name in ("digits", "cifar in mine", "cifar in team mine", "report")
    }
    spec = json.loads((specs / "digits.json").read_text())
    [runs] = spec["spec"]["section"]["runSets"]
    assert runs["grouping"] == [
        {"section": "config", "name": name}
        for name in ("init_from.value", "lora.value.rank", "model.value.init_args.depth")
    ]
    assert runs["filters"]["filters"][0]["value"] == ["id-digits-1-0", "id-digits-1-1", "id-digits-2-0"]
    view = workspaces.Workspace._from_model(workspaces.internal.View.model_validate(spec))
    assert [section.name for section in view.sections] == ["Quality", "Optimization", "Speed", "Images"]
    lines = [panel for section in view.sections for panel in section.panels if isinstance(panel, reports.LinePlot)]
    shown = {panel.title: panel for panel in lines}
    assert {"val/acc", "lr", "optim/grad_norm", "speed/step_seconds"} <= {*shown}
    assert {(panel.groupby_aggfunc, panel.groupby_rangefunc) for panel in shown.values()} == {("mean", "minmax")}
    assert view.sections[-1].panels[0].media_keys == ["images/validation"]
    report = reports.Report._from_model(
        reports.internal.ReportViewspec.model_validate_json((specs / "report.json").read_text())
    )
    tables = [block.text for block in report.blocks if isinstance(block, reports.MarkdownBlock)]
    assert "| depth1-seed1 | finished | 1 | weights/depth1.pth | null | 1 | 0.51 |" in tables[2]
    runs_dashboard(other)
    spec = json.loads((other / "dashboard" / "workspace.json").read_text())
    assert spec["displayName"] == "one"
    assert spec["spec"]["section"]["runSets"][0]["grouping"] == []
    many = {f"option{number}": 0 for number in range(7)}
    write_run(tmp_path / "many" / "a", seed=0, **many)
    write_run(tmp_path / "many" / "b", seed=0, **dict.fromkeys(many, 1))
    runs_dashboard(tmp_path / "many")
    assert "differ in 7 options and are not grouped" in capsys.readouterr().out


def test_workspace_and_report_of_runs_arrive_at_the_server(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"seed{seed}", seed=seed)
    server = StubServer()
    environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    said = start(tmp_path, "dashboard", "runs", **environment).finish()
    assert said.returncode == 0, said.stderr
    assert f"workspace   {server.url}/me/mine?nw=" in said.stdout
    assert f"report      {server.url}/me/mine/reports/" in said.stdout
    assert {*server.views} == {"digits", "Runs of runs"}
    assert not (tmp_path / "runs" / "dashboard").exists()
