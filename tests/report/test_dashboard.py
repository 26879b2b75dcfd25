"""Workspaces of runs and ablations in W&B, without a network or with a stub."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_study import make_study
from wandb_command import KEY, start
from wandb_stub import StubServer

from vit_lightning.errors import UserError
from vit_lightning.report import dashboard as module
from vit_lightning.report.dashboard import dashboard, make_workspace, read_sets, set_workspace
from vit_lightning.report.report import make_report
from vit_lightning.storage.metrics import write_results


def spec_of(view: Any) -> Any:
    return view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def test_the_workspace_of_an_ablation_has_its_runs_by_arm_and_the_answer(tmp_path):
    study = make_study(tmp_path / "pooling", images=60)
    shutil.rmtree(study.folder / study.runs[0].folder)  # its result stays in the ledger
    workspace = spec_of(make_workspace(make_report(study), "p", "e"))
    [runs] = workspace["spec"]["section"]["runSets"]
    chosen = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
    assert chosen == [("group", "=", "pooling"), ("jobType", "!=", "tuning")]
    assert runs["grouping"] == [{"section": "run", "name": "jobType"}]
    sections = workspace["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Result", "Quality", "Images"]
    assert "undecided against 'cls'" in json.dumps(sections[0])


def test_what_keeps_a_workspace_from_being_made_is_an_error_of_a_line(tmp_path, monkeypatch):
    report = make_report(make_study(tmp_path / "pooling", images=60))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match=r"^WANDB_MODE=offline: workspaces are made in W&B .*lightning sync"):
        dashboard(report)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(module, "has_key", lambda: False)
    with pytest.raises(UserError, match=r"^no API key: "):
        dashboard(report)

    def refuse(view: Any) -> None:
        raise RuntimeError("permission denied\nat line 7")

    monkeypatch.setattr(module, "_entity", lambda settings: "team")
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.save_as_new_view", refuse)
    with pytest.raises(UserError, match=r"W&B did not save the workspace: permission denied$"):
        dashboard(report)


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


def test_runs_are_grouped_by_what_differs_but_for_the_seed_and_drawn_as_bands(tmp_path):
    import wandb_workspaces.reports.v2.interface as reports
    import wandb_workspaces.workspaces.interface as workspaces

    for seed, depth in ((0, 1), (1, 1), (0, 2)):
        lora = None if depth == 1 else {"rank": 8}  # which not all have
        options = {"init_from": f"weights/depth{depth}.pth", "lora": lora}
        write_run(tmp_path / "runs" / "digits" / f"depth{depth}-seed{seed}", seed=seed, depth=depth, **options)
    other = tmp_path / "runs" / "cifar" / "one"
    write_run(other, seed=0, experiment="cifar", wandb={"project": "mine", "entity": "team"})
    write_run(tmp_path / "runs" / "cifar" / "two", seed=0, experiment="cifar")  # in another entity
    sets = {(runs.name, runs.entity): runs for runs in read_sets(tmp_path / "runs")}
    assert sets.keys() == {("digits", None), ("cifar", None), ("cifar", "team")}
    spec = spec_of(set_workspace(sets["digits", None], "me"))
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
    alone = spec_of(set_workspace(read_sets(other)[0], "me"))
    assert (alone["displayName"], alone["spec"]["section"]["runSets"][0]["grouping"]) == ("one", [])
    many = {f"option{number}": 0 for number in range(7)}
    write_run(tmp_path / "many" / "a", seed=0, **many)
    write_run(tmp_path / "many" / "b", seed=0, **dict.fromkeys(many, 1))
    assert read_sets(tmp_path / "many")[0].keys == [], "7 options are too many levels"


@pytest.mark.full
def test_a_workspace_of_runs_arrives_at_the_server(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"seed{seed}", seed=seed)
    server = StubServer()
    environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    said = start(tmp_path, "dashboard", "runs", **environment).finish()
    assert said.returncode == 0, said.stderr
    assert f"workspace   {server.url}/me/mine?nw=" in said.stdout
    assert {*server.views} == {"digits"}
