"""W&B without a key, with a server that refuses, hangs, dies and answers; each run is a process of its own."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import forget, pretend
from PIL import Image
from processes import Running
from runs import SMALL
from wandb_command import KEY, SECRET, assert_delivered, end_runs, finished, fit, start, steps
from wandb_stub import StubServer, read_wandb_file

from vit_lightning.config.files import read_flags
from vit_lightning.report.dashboard import read_sets
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.credentials import masked
from vit_lightning.storage.parsing import parse_yaml
from vit_lightning.storage.wandb_logger import STEP, RunLogger, WandbConfig


def records_of(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return {**read_wandb_file(file), "files": file.parent / "files"}


def test_without_a_key_the_run_is_offline_and_complete(tmp_path, drawn):
    text = "from lightning.pytorch import Callback\n\n\nclass Mine(Callback):\n"
    text += "    def __init__(self, api_key: str):\n        self.api_key = api_key\n"
    (tmp_path / "parts.py").write_text(text)
    remote = "https://jane:hunter2hunter@github.com/jane/mine.git"
    name = ["-c", "user.name=n", "-c", "user.email=e@x.y"]
    for words in (["init", "-q"], ["remote", "add", "origin", remote], ["add", "parts.py"], [*name, "commit", "-qm."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "parts.py").write_text(f"{text}\n# changed\n")
    flags = ["--wandb.group=study", "--wandb.notes=why", "--trainer.log_every_n_steps=10", "--ema.decay=0.9"]
    flags += ["--loss.label_smoothing=0.1", "--wandb.code=true", "--wandb.log_model=true"]
    mine = '--trainer.callbacks=[{"class_path":"parts.Mine","init_args":{"api_key":"my-own-key"}}]'
    given = {"PROJECT": "vits", "NAME": "first", "RUN_GROUP": "other", "JOB_TYPE": "arm", "TAGS": "one,two"}
    said = fit(tmp_path, mine, *flags, **{f"WANDB_{key}": value for key, value in given.items()})
    folder = tmp_path / "run"
    assert "W&B         offline (no API key)\n" in said
    assert said.endswith("view: wandb leet run/wandb; send: lightning sync run (or wandb sync)\n")
    told = records_of(folder)
    environment = json.loads((folder / "environment.json").read_text())
    results = json.loads((folder / "results.json").read_text())
    about = {"name": "first", "group": "study", "job_type": "arm", "tags": ["one", "two"], "notes": "why"}
    assert told["run"] == {"id": environment["run_id"], **about}, "flags before variables"
    assert told["place"] == (f"/vits/{environment['run_id']}", "")
    commit = environment["git"]["working folder"]["commit"]
    assert told["environment"]["git"]["commit"] == commit
    assert told["environment"]["args"][0] == "fit"
    (shown,) = told["config"]["trainer"]["callbacks"]
    assert shown["init_args"] == {"api_key": "***"}
    assert mine.replace("my-own-key", "***") in told["environment"]["args"]
    (versions,) = (found for found in told["artifacts"].values() if found[0]["type"] == "model")
    configs = [yaml.safe_load(Path(version["files"]["config.yaml"]).read_text()) for version in versions]
    assert [config["trainer"]["callbacks"] for config in configs] == [[shown], [shown]]
    assert "proc.memory.rssMB" in told["stats"][0]
    for line in ("epoch 1/1  train loss", "test        accuracy"):
        assert f"\n{line}" in told["console"]
    names = {name for row in told["rows"] for name in row}
    assert {"train/loss_step", "train/loss", "lr", "val/acc"} <= names
    assert {"speed/images_per_second", "optim/grad_norm"} <= names
    assert {"images/validation", "images/confusion", "val_class/3"} <= names
    assert_delivered(told["rows"], folder)
    assert told["config"]["model"]["init_args"]["emb_size"] == 16
    assert told["config"]["flops"] == results["flops"] > 0
    (drawn,) = [row for row in told["rows"] if "curves" in row]
    for name in ("curves", "confusion", "test_images"):
        with Image.open(told["files"] / drawn[name]["path"]) as picture:
            assert picture.width > 200
    (validated,) = [row for row in told["rows"] if "images/validation" in row]
    facts = json.loads((folder / "validation" / "epoch-0001.json").read_text())
    assert validated[STEP] == facts["step"]
    assert [validated[f"val_class/{name}"] for name in range(10)] == pytest.approx(facts["class_accuracy"])
    for name, file in (("validation", "epoch"), ("confusion", "confusion")):
        sent = told["files"] / validated[f"images/{name}"]["path"]
        assert sent.read_bytes() == (folder / "validation" / f"{file}-0001.png").read_bytes()
    assert told["summary"]["test/acc"] == pytest.approx(results["test/acc"])
    assert told["summary"]["val/acc"] == pytest.approx({"max": results["val/acc"], "best": results["val/acc"]})
    assert told["metrics"] | {"val/acc": ["max"], "val/loss": ["min"]} == told["metrics"]
    assert {told["axes"][name] for name in ("*", "val/acc")} == {STEP}
    assert_values(told, facts)
    assert "+# changed" in (told["files"] / "diff.patch").read_text()
    code = [[*each["files"]] for found in told["artifacts"].values() for each in found if each["type"] == "code"]
    assert code == [["parts.py"]]
    contents = {path: path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file()}
    assert not [path for path, content in contents.items() if SECRET.encode() in content or b"hunter2" in content]
    sent = start(tmp_path, "sync", "run").finish()
    assert sent.returncode == 2
    assert "was not sent (for an API key: wandb login)" in sent.stderr


def assert_values(told: dict[str, Any], facts: dict[str, Any]) -> None:
    """Tables and interactive plots of a validation, their images in files that ``wandb sync`` finds."""
    staged = {
        name: file for found in told["artifacts"].values() for each in found for name, file in each["files"].items()
    }
    table = json.loads(Path(staged["validation/predictions.table.json"]).read_text())
    assert table["columns"] == ["epoch", "index", "image", "label", "prediction", "right", "confidence"]
    sample, names = facts["sample"], facts["classes"]
    assert [line[1] for line in table["data"]] == sample["index"]
    assert [line[3:5] for line in table["data"]] == [
        [names[label], names[predicted]] for label, predicted in zip(sample["label"], sample["prediction"], strict=True)
    ]
    for line in table["data"]:
        with Image.open(staged[line[2]["path"]]) as picture:
            assert picture.size == (112, 112)
    (row,) = [row for row in told["rows"] if "validation/confusion_table" in row]
    shown = json.loads((told["files"] / row["validation/confusion_table"]["path"]).read_text())
    assert sum(line[2] for line in shown["data"]) == sum(cell[2] for cell in facts["confusion"])
    assert told["config"]["_wandb"]["visualize"]["validation/confusion"]


def test_preemption_is_told(tmp_path):
    """A run that W&B's agent ends by SIGTERM is not marked, since W&B itself has stopped it."""
    home = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {"HOME": str(tmp_path)}
    done = Running(end_runs, folder=tmp_path, environment=home).finish()
    assert done.returncode == 0, done.stderr
    told = {path.parent.parent.parent.name: read_wandb_file(path) for path in tmp_path.rglob("*.wandb")}
    preempted = {"bad": False, "lost": False, "cut": True, "queued": True, "stopped": False, "again": True}
    assert {name: run["preempting"] for name, run in told.items()} == preempted


class Broken:
    logged = 0
    ended: int | None = None

    def log(self, *_: Any) -> None:
        self.logged += 1
        raise BrokenPipeError("wandb-core has gone")

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code
        raise BrokenPipeError("again")


def test_a_fault_of_w_and_b_is_noted_and_raises_nothing(tmp_path):
    run, broken = RunLogger(tmp_path, "a", WandbConfig(mode="offline"), {}), Broken()
    run._experiment, run._has_begun, run.mode = broken, True, "online"
    for _ in range(2):
        run.log_metrics({"a": 1.0}, 1)
    run.experiment.log({"by": "the user"})
    run.log_results({"steps": 2})
    run.finish(1)
    assert (broken.logged, broken.ended) == (1, 1)
    assert f"lacks some of it (wandb-core has gone): wandb sync {tmp_path}/wandb/run-*" in run.hint()


COMMIT = {"commit": KEY, "notes": f"commit {KEY}, sha={KEY}", "init_from": f"hf-hub:me/vit@{KEY}"}
NAMED = {"secret_key": "my key", "aws_secret_access_key": "x", "X-Api-Key": "x", "Authorization": "Bearer x"}
WORDS = ["--hub_token", "my key", "--class_token=true", "--key={a: {Authorization: Bearer KEY}}", "--api_key=a,b;c"]
KEPT = ["--hub_token", "***", "--class_token=true", "--key={a: {Authorization: Bearer ***", "--api_key=***"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"hub_token": "x", "class_token": True, "lr": 0.1}, {"hub_token": "***", "class_token": True, "lr": 0.1}),
        ([f"/a/{SECRET}", "https://me:hunter2@h/x"], ["/a/***", "https://h/x"]),
        (f"{SECRET}-longer", "***"),
        (NAMED, dict.fromkeys(NAMED, "***")),
        *(({"notes": f"uses {form}_{'aB3' * 8}."}, {"notes": "uses ***."}) for form in ("hf", "ghp", "github_pat")),
        ({"notes": f"uses wandb_v1_{'aB3' * 8}."}, {"notes": "uses ***."}),
        (["--x", KEY, f"key {KEY}"], ["--x", "***", "key ***"]),
        ({**COMMIT, "revision": KEY, "digest": "0f" * 32}, {**COMMIT, "revision": KEY, "digest": "0f" * 32}),
        ("no: {'api_key': 'KEY'}, token=KEY at", "no: {'api_key': '***'}, token=*** at"),
        ("pool=cls needs class_token=true", "pool=cls needs class_token=true"),
        ("\0".join(["fit", *WORDS]), "\0".join(["fit", *KEPT])),  # as a process has its command
    ],
)
def test_keys_are_masked_by_name_by_form_and_by_value_and_commits_are_not(given, kept, monkeypatch):
    for name, value in {"MY": SECRET, "OTHER": f"{SECRET}-longer"}.items():
        monkeypatch.setenv(f"{name}_TOKEN", value)
    monkeypatch.setenv("DB", "p://u:hunter2@h/d")
    assert masked(given) == kept


def test_a_server_that_answers_gets_everything_and_no_secret(tmp_path, server):
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    assert "lacks" not in fit(tmp_path, "--wandb.log_model=true", **online)
    assert_delivered(server.rows.values(), tmp_path / "run")
    (run_id,) = server.runs
    sent = {sent["artifactCollectionName"]: sent for sent in server.artifacts}
    kinds = {name: one["artifactTypeName"] for name, one in sent.items()}
    for key in ("predictions", "confusion_table"):  # W&B appends a hash in base64, which may hold a "-" itself
        (table,) = (name for name in kinds if name.startswith(f"run-{run_id}-validation{key}-"))
        assert kinds[table] == "run_table"
    models = [sent for sent in server.artifacts if sent["artifactCollectionName"] == f"model-{run_id}"]
    aliases = [{alias["alias"] for alias in model["aliases"]} for model in models]
    assert aliases == [{"last", "latest"}, {"best", "latest"}]
    checkpoint = read_checkpoint(tmp_path / "run/checkpoints/best.ckpt")
    for model in models:
        facts = json.loads(model["metadata"])
        assert facts["fingerprint"] == checkpoint["images"]
        assert (facts["step"], facts["seed"]) == (checkpoint["global_step"], 0)
    assert server.config["model"]["init_args"]["emb_size"] == 16
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert server.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert any(name.startswith("media/images/test_images") for name in server.files)
    assert json.loads(server.files["wandb-metadata.json"])["args"][0] == "fit"
    assert b"epoch 1/1" in server.files["output.log"]
    for path in (tmp_path / "run").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert KEY.encode() not in content, path
        assert SECRET.encode() not in content, path


def test_a_server_that_cannot_be_used_leaves_an_offline_run(tmp_path):
    """All at once, since they mostly wait."""
    servers, runs = [StubServer(fault) for fault in ("hang", "401")], {}
    for server in servers:
        (folder := tmp_path / server.mode).mkdir()
        online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "TEST_START_SECONDS": "1"}
        runs[folder] = start(folder, "fit", *SMALL, "--out=run", **online)
    for folder, process in runs.items():
        assert "W&B         offline (" in finished(process)
        assert_delivered(records_of(folder / "run")["rows"], folder / "run")
    for server in servers:
        server.die()


WAITING = """import time
from pathlib import Path
from lightning.pytorch import Callback


class Waits(Callback):
    def on_train_batch_end(self, trainer, *_):
        while trainer.global_step == 30 and not Path("goes_on").exists():
            time.sleep(0.05)
"""
WAITS = (*SMALL, "--out=run", "--trainer.max_epochs=2", "--trainer.log_every_n_steps=1")
WAITS += ("--trainer.callbacks=[parts.Waits]",)
"""A run that waits at step 30 for a file."""


def until(done: Any) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_a_server_that_dies_in_mid_run_keeps_nothing_from_the_run(tmp_path, server):
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "TEST_FINISH_SECONDS": "2"}
    (tmp_path / "parts.py").write_text(WAITING)
    process = start(tmp_path, "fit", *WAITS, **online)
    until(lambda: server.rows)
    server.die()
    (tmp_path / "goes_on").touch()
    assert "it lacks some of it (" in finished(process)
    assert {row.get(STEP, 0) for row in server.rows.values()} < steps(tmp_path / "run").keys()
    assert (tmp_path / "run/results.json").is_file()
    assert (tmp_path / "run/wandb/unsent").is_file(), "a resume sends them"


@pytest.mark.full
def test_how_to_resume_is_said_though_a_server_that_died_takes_all_the_time_after_a_signal(tmp_path, server):
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "TEST_LIMIT": "2"}
    process = start(tmp_path, "fit", *SMALL, "--out=run", "--trainer.max_epochs=400", **online)
    until(lambda: server.rows)
    server.die()
    os.kill(process._process.pid, signal.SIGTERM)
    result = process.finish()
    assert (result.returncode, result.stderr) == (143, "lightning: stopped by SIGTERM\n")
    assert "stopped; to resume: lightning fit --resume run\n" in result.stdout


def test_a_run_that_is_killed_is_one_run_there_with_each_step(tmp_path, server):
    (tmp_path / "parts.py").write_text(WAITING)
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    process = start(tmp_path, "fit", *WAITS, **online)
    until(lambda: len(server.rows) > 20)
    process.kill()
    process.finish()
    (tmp_path / "goes_on").touch()
    before = max(row[STEP] for row in server.rows.values() if STEP in row)
    finished(start(tmp_path, "fit", "--resume=run", **online))
    assert len(server.runs) == 1
    known = steps(tmp_path / "run")
    sent = {row[STEP] for row in server.rows.values() if STEP in row}
    assert sent >= {step for step in known if step <= before}, "of the first process"
    assert sent >= {*list(known)[-10:]}


KILLED = """import os
from lightning.pytorch import Callback
from vit_lightning.storage.wandb_logger import RunLogger


class Mine(Callback):
    def on_train_start(self, trainer, module):
        RunLogger.log_results = lambda *_: os.kill(os.getpid(), 9)
"""


@pytest.mark.full
def test_a_run_that_is_killed_behind_its_results_sends_them_when_it_is_resumed(tmp_path, server):
    (tmp_path / "parts.py").write_text(KILLED)
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    flags = ("--out=run", "--wandb.log_model=true", "--trainer.callbacks=[parts.Mine]")
    assert start(tmp_path, "fit", *SMALL, *flags, **online).finish().returncode == -9
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert not server.artifacts
    assert finished(start(tmp_path, "fit", "--resume=run", **online)).startswith("run is finished already\n")
    (run_id,) = server.runs
    names = [sent["artifactCollectionName"] for sent in server.artifacts]
    assert names.count(f"model-{run_id}") == 2
    assert [name for name in names if name.startswith(f"run-{run_id}-validationpredictions-")]
    assert server.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert server.summary["val/acc"]["best"] == pytest.approx(results["val/acc"])
    assert server.config["model"]["init_args"]["emb_size"] == 16
    asked = len(server.operations)
    finished(start(tmp_path, "fit", "--resume=run", **online))
    assert len(server.operations) == asked, "it has been sent"


def test_a_run_of_an_agent_has_the_agent_s_id_and_project_everywhere(tmp_path, server):
    """As ``wandb agent`` starts it: wandb takes id, project and entity from there, whatever it is given."""
    place = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "agent1", "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team"}
    finished(start(tmp_path, "fit", *SMALL, "--out=run", "--wandb.project=ours", **place))
    assert records_of(tmp_path / "run")["place"] == ("team/theirs/agent1", "sweep1")
    assert json.loads((tmp_path / "run/environment.json").read_text())["run_id"] == "agent1"
    (runs,) = read_sets(tmp_path / "run")
    assert (runs.entity, runs.project, runs.filter) == ("team", "theirs", "Metric('ID') in ['agent1']")
    sent = start(tmp_path, "sync", "run", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url).finish()
    assert (sent.returncode, sent.stdout) == (0, "sent to W&B: run\n"), sent.stderr
    ((name, sent),) = server.runs.items()
    assert (name, sent["project"]) == ("agent1", "theirs")


def test_the_runs_of_an_ablation_carry_group_arm_and_seed_and_are_sent_together(tmp_path, server, monkeypatch):
    arms = {"cls": {"model.pool": "cls"}, "the mean": {"model.pool": "mean"}}
    plan = {"name": "pool", "config": "short.yaml", "arms": arms, "baseline": "cls", "seeds": {"first": 7}}
    plan |= {"fixed": {key: parse_yaml(value, key) for key, value in read_flags(SMALL)}}
    plan |= {"compare": {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 6}}
    (tmp_path / "short.yaml").write_text("optimizer: {lr: 0.01}\n")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.chdir(tmp_path)
    pretend("plan.yaml", "out", "cls-seed7", "the-mean-seed7")
    finished(start(tmp_path, "ablate", "plan.yaml", "--out=out", WANDB_MODE="offline", WANDB_RUN_ID="mine"))
    for arm, name in (("cls", "cls-seed7"), ("the mean", "the-mean-seed7")):
        told = records_of(tmp_path / "out/runs" / name)
        shown = {key: told["run"][key] for key in ("name", "group", "job_type", "tags")}
        assert shown == {"name": name, "group": "pool", "job_type": arm, "tags": ["pool", arm, "seed7"]}
        assert told["config"]["seed_everything"] == 7
        assert told["config"]["model"]["init_args"]["pool"] == ("cls" if arm == "cls" else "mean")
        assert "epoch 1/1" in told["console"]
        assert_delivered(told["rows"], tmp_path / "out/runs" / name)
    forget(tmp_path / "out")
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    again = start(tmp_path, "sync", "out", **online).finish()
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith("sent to W&B: out/runs/cls-seed7, out/runs/the-mean-seed7\n")
    sent = {(run["groupName"], run["jobType"]) for run in server.runs.values()}
    assert sent == {("pool", "cls"), ("pool", "the mean")}
    assert finished(start(tmp_path, "sync", "out", **online)) == "out: all of its offline runs have been sent\n"
