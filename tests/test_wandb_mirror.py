"""W&B without a key, with a server that refuses, hangs, answers and dies; each run is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from PIL import Image
from wandb_stub import StubServer, read_wandb_file

from vit_lightning.tracking import read_metrics
from vit_lightning.wandb_mirror import merged_by_step

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "a-secret-that-is-nobody-s-business"


@pytest.fixture
def server() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.die()


def start(folder: Path, verb: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The installed command with an empty home and none of the user's W&B settings; nobody sits at the terminal."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "MY_TOKEN": SECRET, **environment}
    command = [str(Path(sys.executable).parent / "lightning"), verb, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert err == ""
    return out


def fit(folder: Path, *flags: str, **environment: str) -> str:
    return finished(start(folder, "fit", *SMALL, "--out=run", *flags, **environment))


def steps(folder: Path) -> dict[int, dict[str, float]]:
    return dict(merged_by_step(read_metrics(folder)))


def assert_delivered(rows: list[dict], folder: Path) -> None:
    """Each step is there once, with the numbers of ``metrics.jsonl``."""
    wanted = steps(folder)
    assert sorted({row["_step"] for row in rows}) == sorted(wanted)
    assert len(rows) == len(wanted)
    for row in rows:
        for name, value in wanted[row["_step"]].items():
            assert row[name] == pytest.approx(value), name


def test_without_a_key_the_run_is_offline_and_complete(tmp_path):
    flags = ["--wandb.group=study", "--wandb.job_type=arm", "--wandb.tags=[one, two]", "--wandb.notes=why"]
    said = fit(tmp_path, *flags)
    assert "offline (no API key)" in said
    assert "wandb leet run/wandb" in said
    assert "lightning sync run" in said
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    told = read_wandb_file(file)
    folder = tmp_path / "run"
    environment = json.loads((folder / "environment.json").read_text())
    results = json.loads((folder / "results.json").read_text())
    assert told["run"] == {
        "id": environment["run_id"],
        "name": "run",
        "group": "study",
        "job_type": "arm",
        "tags": ["one", "two"],
        "notes": "why",
    }
    assert told["config"]["model"]["init_args"]["emb_size"] == 16
    assert told["config"]["flops"] == results["flops"] > 0
    assert told["config"]["parameters"] == results["parameters"]
    images = [row for row in told["rows"] if "curves" in row]
    assert_delivered(told["rows"], folder)
    assert {"curves", "confusion", "test_images"} <= {*images[0]}
    for name in ("curves", "confusion", "test_images"):
        with Image.open(file.parent / "files" / images[0][name]["path"]) as picture:
            assert picture.width > 200
    assert told["summary"]["test/acc"] == pytest.approx(results["test/acc"])
    assert not list((tmp_path / "home").rglob("*wandb*"))
    assert not (folder / "wandb" / "cache").exists()


def test_disabled_leaves_nothing_and_sending_later_needs_a_key(tmp_path):
    assert "W&B" not in fit(tmp_path, WANDB_MODE="disabled")
    assert not (tmp_path / "run" / "wandb").exists()
    process = start(tmp_path, "sync", "run")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "wandb login" in err
    assert "no API key" in err
    assert not [*(tmp_path / "run").rglob("*.wandb")]


def test_a_server_that_answers_gets_everything_and_no_secret_is_left(tmp_path, server):
    flags = ["--wandb.log_model=true"]
    fit(tmp_path, *flags, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert_delivered([*server.rows.values()], tmp_path / "run")
    assert "ArtifactType" in server.operations  # the stub answers no further of what an upload asks
    assert server.config["model"]["init_args"]["emb_size"] == 16
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert server.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert any(name.startswith("media/images/test_images") for name in server.files)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content, path
            assert SECRET.encode() not in content, path


FAULTS = ("refused", "hang", "401", "500")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Runs with servers that cannot be used, all at once, since they mostly wait: folder and what was said."""
    servers = {fault: StubServer(fault) for fault in FAULTS if fault != "refused"}
    runs = {}
    for fault in FAULTS:
        folder = tmp_path_factory.mktemp(fault)
        url = servers[fault].url if fault in servers else "http://127.0.0.1:9"
        runs[fault] = folder, start(folder, "fit", *SMALL, "--out=run", WANDB_API_KEY=KEY, WANDB_BASE_URL=url)
    answers = {fault: (folder, finished(process)) for fault, (folder, process) in runs.items()}
    for server in servers.values():
        server.die()
    return answers


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_cannot_be_used_leaves_an_offline_run(faulty, fault):
    folder, said = faulty[fault]
    assert "W&B         offline (" in said
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert_delivered(read_wandb_file(file)["rows"], folder / "run")


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
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert again.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert any(name.startswith("media/images/test_images") for name in again.files)
    assert len(again.runs) == 1
    again.die()


def test_what_a_kill_kept_from_wandb_is_sent_from_the_metrics(tmp_path, server):
    process = start(tmp_path, "fit", *SMALL, "--out=run", "--trainer.max_epochs=500", "--trainer.log_every_n_steps=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size > 4000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    said = finished(start(tmp_path, "sync", "run", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url))
    assert "is in W&B as vit_lightning/" in said
    assert_delivered([*server.rows.values()], tmp_path / "run")


def test_a_run_that_is_killed_twice_is_one_run_there_with_each_step_once(tmp_path, server):
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    metrics = tmp_path / "run" / "metrics.jsonl"
    flags = (*SMALL, "--out=run", "--trainer.max_epochs=60", "--trainer.log_every_n_steps=1")
    for words in (flags, ("--resume=run",)):
        size = metrics.stat().st_size if metrics.is_file() else 0
        process = start(tmp_path, "fit", *words, **online)
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.stat().st_size > size + 9000) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.communicate()
        assert not (tmp_path / "run/results.json").exists(), "it was over before the kill"
    finished(start(tmp_path, "fit", "--resume=run", **online))
    assert len(server.runs) == 1
    assert_delivered([*server.rows.values()], tmp_path / "run")


def test_the_runs_of_an_ablation_carry_group_arm_and_seed_and_are_sent_together(tmp_path, server):
    arms = [{"name": "cls", "model.pool": "cls"}, {"name": "the mean", "model.pool": "mean"}]
    rules = {"name": "pool", "baseline": "cls", "report": "test/acc", "smallest_effect": 0.01, "alpha": 0.05}
    plan = {
        "command": ["lightning", "fit", "--config", "page.yaml", *SMALL, "${args}"],
        "method": "grid",
        "metric": {"name": "val/acc", "goal": "maximize"},
        "parameters": {"arm": {"values": arms}, "seed_everything": {"values": [7]}, "ablation": {"value": rules}},
    }
    (tmp_path / "page.yaml").write_text("optimizer: {lr: 0.01}\n")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
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
    before = {*(tmp_path / "out").rglob("*.wandb")}
    process = start(tmp_path, "sync", "out", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    said = process.communicate(timeout=240)[1]
    assert "the report was not sent, or not all of it" in said  # the stub takes no tables
    assert process.returncode == 2
    sent = {(run["groupName"], run["jobType"]) for run in server.runs.values()}
    assert sent == {("pool", "cls"), ("pool", "the mean"), ("pool", "report")}
    assert {path.parent.name.split("-")[0] for path in {*(tmp_path / "out").rglob("*.wandb")} - before} <= {"run"}
