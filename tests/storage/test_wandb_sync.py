"""What W&B lacks is sent later: after its server died, after kills, and of a whole ablation."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from fake_runs import forget, pretend
from runs import SMALL
from wandb_command import KEY, assert_delivered, finished, start, steps
from wandb_stub import StubServer, read_wandb_file

from vit_lightning.config.files import read_flags
from vit_lightning.report.run_views import read_sets
from vit_lightning.storage.environment import write_environment
from vit_lightning.storage.parsing import parse_yaml


def test_a_server_that_dies_in_mid_run_does_not_stop_it_and_is_sent_the_rest_later(tmp_path, server):
    process = start(
        tmp_path,
        "fit",
        *SMALL,
        "--out=run",
        "--trainer.max_epochs=30",
        "--trainer.log_every_n_steps=1",
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL=server.url,
    )
    deadline = time.monotonic() + 120
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (server.runs and metrics.is_file()) and time.monotonic() < deadline:
        time.sleep(0.05)
    server.die()
    assert "wandb" not in finished(process)
    assert server.runs
    assert {row["_step"] for row in server.rows.values()} < set(steps(tmp_path / "run"))

    again = StubServer()
    again.runs, again.rows, again.summary = server.runs, server.rows, server.summary
    for _ in range(2):  # sending twice changes nothing
        finished(start(tmp_path, "sync", "run", WANDB_API_KEY=KEY, WANDB_BASE_URL=again.url))
        assert_delivered([*again.rows.values()], tmp_path / "run")
    validated = {json.loads(path.read_text())["step"] for path in (tmp_path / "run/validation").glob("*.json")}
    assert {row["_step"] for row in again.rows.values() if "images/validation" in row} == validated
    assert len(validated) == 6, "epochs 1, 2, 4, 8, 16 and 30"
    assert any(name.startswith("media/images/images/validation") for name in again.files)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert again.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert any(name.startswith("media/images/test_images") for name in again.files)
    assert len(again.runs) == 1
    again.die()


def test_what_a_kill_kept_from_wandb_is_sent_from_the_metrics(tmp_path, server):
    often = ["--trainer.log_every_n_steps=4"]
    process = start(tmp_path, "fit", *SMALL, "--out=run", "--trainer.max_epochs=500", *often)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size > 4000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.finish()
    said = finished(start(tmp_path, "sync", "run", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url))
    assert "is in W&B as vit_lightning/" in said
    sent, known = server.rows.values(), steps(tmp_path / "run")
    assert_delivered([row for row in sent if row["_step"] in known], tmp_path / "run")


def test_a_run_that_is_killed_twice_is_one_run_there_with_each_step_once(tmp_path, server):
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    metrics = tmp_path / "run" / "metrics.jsonl"
    flags = (*SMALL, "--out=run", "--trainer.max_epochs=24", "--trainer.log_every_n_steps=1")
    for words in (flags, ("--resume=run",)):
        size = metrics.stat().st_size if metrics.is_file() else 0
        process = start(tmp_path, "fit", *words, **online)
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.stat().st_size > size + 4000) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.finish()
        assert not (tmp_path / "run/results.json").exists(), "it was over before the kill"
    finished(start(tmp_path, "fit", "--resume=run", **online))
    assert len(server.runs) == 1
    assert_delivered([*server.rows.values()], tmp_path / "run")


def test_a_run_of_an_agent_has_the_agent_s_id_and_project_everywhere(tmp_path, server):
    """As ``wandb agent`` starts it: wandb takes id, project and entity from there, whatever it is given."""
    place = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "agent1", "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team"}
    finished(start(tmp_path, "fit", *SMALL, "--out=run", "--wandb.project=ours", **place))
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert read_wandb_file(file)["place"] == ("team/theirs/agent1", "sweep1")
    assert json.loads((tmp_path / "run/environment.json").read_text())["run_id"] == "agent1"
    (runs,) = read_sets(tmp_path / "run")
    assert (runs.entity, runs.project, runs.filter) == ("team", "theirs", "Metric('ID') in ['agent1']")
    said = finished(start(tmp_path, "sync", "run", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url))
    assert "is in W&B as theirs/agent1" in said
    ((name, sent),) = server.runs.items()
    assert (name, sent["project"]) == ("agent1", "theirs")
    write_environment(tmp_path / "run", run_id="agent2", precision="32-true", fast_paths={})  # resumed by another agent
    assert read_sets(tmp_path / "run")[0].filter == "Metric('ID') in ['agent2']"


def test_the_runs_of_an_ablation_carry_group_arm_and_seed_and_are_sent_together(tmp_path, server, monkeypatch):
    plan = {
        "name": "pool",
        "config": "short.yaml",
        "arms": {"cls": {"model.pool": "cls"}, "the mean": {"model.pool": "mean"}},
        "fixed": {key: parse_yaml(value, key) for key, value in read_flags(SMALL)},
        "baseline": "cls",
        "seeds": {"first": 7},
        "compare": {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 6},
    }
    (tmp_path / "short.yaml").write_text("optimizer: {lr: 0.01}\n")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.chdir(tmp_path)
    pretend("plan.yaml", "out", "cls-seed7", "the-mean-seed7")
    finished(start(tmp_path, "ablate", "plan.yaml", "--out=out", WANDB_MODE="offline"))
    for arm, name in (("cls", "cls-seed7"), ("the mean", "the-mean-seed7")):
        (file,) = (tmp_path / "out/runs" / name / "wandb").glob("offline-run-*/*.wandb")
        told = read_wandb_file(file)
        assert {key: told["run"][key] for key in ("name", "group", "job_type", "tags")} == {
            "name": name,
            "group": "pool",
            "job_type": arm,
            "tags": ["pool", arm, "seed7"],
        }
        assert told["config"]["seed_everything"] == 7
        assert told["config"]["model"]["init_args"]["pool"] == ("cls" if arm == "cls" else "mean")
        assert_delivered(told["rows"], tmp_path / "out/runs" / name)
    assert not list((tmp_path / "home").rglob("*wandb*"))
    assert not list((tmp_path / "out").glob(".wandb*"))
    (file,) = (tmp_path / "out/wandb").glob("offline-run-*/*.wandb")
    assert [*file.parent.glob("files/media/images/report/seeds_*.png")], "figures of the report"
    assert [*file.parent.glob("files/media/table/report/arms_*.json")], "tables of the report"
    forget(tmp_path / "out")
    before = {*(tmp_path / "out").rglob("*.wandb")}
    again = start(tmp_path, "sync", "out", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url).finish()
    assert again.returncode == 0, again.stderr
    assert [sent for sent in server.artifacts if "reportarms" in sent["artifactCollectionName"]], "tables of the report"
    sent = {(run["groupName"], run["jobType"]) for run in server.runs.values()}
    assert sent == {("pool", "cls"), ("pool", "the mean"), ("pool", "report")}
    assert {path.parent.name.split("-")[0] for path in {*(tmp_path / "out").rglob("*.wandb")} - before} <= {"run"}
