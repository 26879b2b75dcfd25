"""W&B without a key, with a server that refuses, hangs and answers; each run is a process of its own."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from runs import SMALL
from wandb_command import KEY, SECRET, assert_delivered, finished, fit, start
from wandb_stub import StubServer, read_wandb_file

NOBODY = ["-c", "user.name=n", "-c", "user.email=e@x.y"]


def test_without_a_key_the_run_is_offline_and_complete(tmp_path):
    remote = "https://jane-q-user:hunter2hunter@github.com/jane-q-user/mine.git"
    for words in (["init", "-q"], ["remote", "add", "origin", remote], [*NOBODY, "commit", "-qm.", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    folder = tmp_path / "home/run"
    flags = ["--wandb.group=study", "--wandb.job_type=arm", "--wandb.tags=[one, two]", f"--wandb.notes=why {KEY}"]
    flags += [f"--out={folder}", "--trainer.log_every_n_steps=10", "--ema.decay=0.9", "--loss.label_smoothing=0.1"]
    said = fit(tmp_path, *flags, LOGNAME="jane-q-user", WANDB_HOST="secret-host", WANDB_USERNAME="jane-q-user")
    assert "offline (no API key)" in said
    assert f"wandb leet {folder}/wandb" in said
    assert f"lightning sync {folder}" in said
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    told = read_wandb_file(file)
    environment = json.loads((folder / "environment.json").read_text())
    results = json.loads((folder / "results.json").read_text())
    assert told["run"] == {
        "id": environment["run_id"],
        "name": "run",
        "group": "study",
        "job_type": "arm",
        "tags": ["one", "two"],
        "notes": "why ***",
    }
    given = json.loads((file.parent / "files" / "wandb-metadata.json").read_text())
    assert given["args"][:1] == ["fit"]
    assert {"--out=~/run", "--wandb.notes=why ***"} <= {*given["args"]}
    commit = environment["git"]["working folder"]["commit"]
    assert told["git"] == {"commit": commit, "remote_url": "https://github.com/USER/mine.git"}
    assert given["git"] == {"commit": commit, "remote": told["git"]["remote_url"]}
    assert given["python"] == environment["python"]
    assert given["cpu"]["model"] == environment["processor"]
    assert given["cpu_count"] == environment["cores"]
    assert not {"host", "username", "email", "slurm"} & {*given}
    assert told["host"] == ""
    assert told["config"]["versions"] == environment["packages"]
    assert "proc.memory.rssMB" in told["stats"][0]
    for line in ("epoch 1/1  train loss", "run         ~/run", "test        accuracy", "model       ViT"):
        assert f"\n{line}" in f"\n{told['console']}"
    private = ("jane-q-user", str(tmp_path / "home"), KEY, "hunter2hunter", "secret-host")
    for path in (folder / "wandb").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [word for word in private if word.encode() in content], path
    assert platform.node() not in re.findall(r"[\w.-]+", told["console"] + json.dumps([given, told["config"]]))
    names = {name for row in told["rows"] for name in row}
    assert {"train/loss_step", "train/loss", "train/ce", "lr", "val/acc", "val/raw_acc"} <= names
    assert {"speed/images_per_second", "speed/step_seconds", "speed/data_seconds"} <= names
    assert {"optim/grad_norm", "optim/update_norm", "system/memory_mb", "system/cpu_percent"} <= names
    assert {"images/validation", "images/confusion", "images/confidence", "val_class/3"} <= names

    assert told["config"]["model"]["init_args"]["emb_size"] == 16
    assert told["config"]["flops"] == results["flops"] > 0
    assert told["config"]["parameters"] == results["parameters"]
    images = [row for row in told["rows"] if "curves" in row]
    assert_delivered(told["rows"], folder)
    assert {"curves", "confusion", "test_images"} <= {*images[0]}
    for name in ("curves", "confusion", "test_images"):
        with Image.open(file.parent / "files" / images[0][name]["path"]) as picture:
            assert picture.width > 200
    (validated,) = [row for row in told["rows"] if "images/validation" in row]
    facts = json.loads((folder / "validation" / "epoch-0001.json").read_text())
    assert validated["_step"] == facts["step"]
    assert validated["val/acc"] == pytest.approx(facts["accuracy"], abs=1e-6)
    assert [validated[f"val_class/{name}"] for name in range(10)] == pytest.approx(facts["class_accuracy"])
    assert sum(validated["images/confidence"]["values"]) == facts["images"]
    for name, file_name in (("validation", "epoch"), ("confusion", "confusion")):
        sent = file.parent / "files" / validated[f"images/{name}"]["path"]
        assert sent.read_bytes() == (folder / "validation" / f"{file_name}-0001.png").read_bytes()
    assert told["summary"]["test/acc"] == pytest.approx(results["test/acc"])
    assert not [path for path in (tmp_path / "home").rglob("*wandb*") if not path.is_relative_to(folder)]
    assert not (folder / "wandb" / "cache").exists()


def test_disabled_leaves_nothing_and_sending_later_needs_a_key(tmp_path):
    assert "W&B" not in fit(tmp_path, WANDB_MODE="disabled")
    assert not (tmp_path / "run" / "wandb").exists()
    sent = start(tmp_path, "sync", "run").finish()
    assert sent.returncode == 2
    assert "wandb login" in sent.stderr
    assert "no API key" in sent.stderr
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
    given = json.loads(server.files["wandb-metadata.json"])
    assert (given["program"], given["args"][0]) == ("lightning", "fit")
    assert [run for run in server.runs.values() if run.get("host")] == []
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
