"""W&B without a key, with a server that refuses, hangs and answers; each run is a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from processes import Running
from runs import SMALL
from wandb_command import KEY, SECRET, assert_delivered, end_runs, finished, fit, start
from wandb_stub import StubServer, read_wandb_file

from vit_lightning.storage.checkpoint_files import read_checkpoint

NOBODY = ["-c", "user.name=n", "-c", "user.email=e@x.y"]


def test_without_a_key_the_run_is_offline_and_complete(tmp_path):
    remote = "https://jane-q-user:hunter2hunter@github.com/jane-q-user/mine.git"
    text = "from lightning.pytorch import Callback\n\n\nclass Mine(Callback):\n    pass\n"
    (tmp_path / "parts.py").write_text(text)
    for words in (
        ["init", "-q"],
        ["remote", "add", "origin", remote],
        ["add", "parts.py"],
        [*NOBODY, "commit", "-qm."],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    with (tmp_path / "parts.py").open("a") as file:
        file.write(f"KEY = '{KEY}'\n")
    folder = tmp_path / "home/run"
    flags = ["--wandb.group=study", "--wandb.job_type=arm", "--wandb.tags=[one, two]", f"--wandb.notes=why {KEY}"]
    flags += [f"--out={folder}", "--trainer.log_every_n_steps=10", "--ema.decay=0.9", "--loss.label_smoothing=0.1"]
    flags += ["--wandb.code=true"]
    flags += ["--trainer.callbacks=[parts.Mine]"]
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
    best = {"max": results["val/acc"], "best": results["val/acc"]}
    assert told["summary"]["val/acc"] == pytest.approx(best)
    assert told["metrics"] | {"val/acc": ["max"], "val/loss": ["min"], "val/raw_acc": ["max"]} == told["metrics"]
    assert_values(told, file.parent / "files", facts, tmp_path)
    assert "+KEY = '***'" in (file.parent / "files" / "diff.patch").read_text()
    assert [[*each["files"]] for found in told["artifacts"].values() for each in found if each["type"] == "code"] == [
        ["parts.py"]
    ]
    assert not [path for path in (tmp_path / "home").rglob("*wandb*") if not path.is_relative_to(folder)]
    assert [path.name for path in (folder / "wandb" / "cache").rglob("*") if path.is_dir()] == ["artifacts", "staging"]


def assert_values(told: dict, files: Path, facts: dict, folder: Path) -> None:
    """Tables and interactive plots of a validation, their images in files that ``wandb sync`` finds."""
    staged = {
        name: path for found in told["artifacts"].values() for each in found for name, path in each["files"].items()
    }
    (row,) = [row for row in told["rows"] if "validation/predictions" in row]
    table = json.loads(Path(folder, staged["validation/predictions.table.json"]).read_text())
    assert table["columns"] == ["epoch", "index", "image", "label", "prediction", "right", "confidence"]
    sample, names = facts["sample"], facts["classes"]
    assert [line[1] for line in table["data"]] == sample["index"]
    assert [line[3:5] for line in table["data"]] == [
        [names[label], names[predicted]] for label, predicted in zip(sample["label"], sample["prediction"], strict=True)
    ]
    assert [line[6] for line in table["data"]] == sample["confidence"]
    for line in table["data"]:
        with Image.open(folder / staged[line[2]["path"]]) as picture:
            assert picture.size == (112, 112)
    for name, column, wanted in (("confusion", 2, sum(cell[2] for cell in facts["confusion"])), ("calibration", 2, 0)):
        (row,) = [row for row in told["rows"] if f"validation/{name}_table" in row]
        shown = json.loads((files / row[f"validation/{name}_table"]["path"]).read_text())
        assert sum(line[column] for line in shown["data"]) == (wanted or facts["images"])
        assert told["config"]["_wandb"]["visualize"][f"validation/{name}"]


def test_divergence_failure_and_preemption_are_told(tmp_path):
    """A run that W&B's agent ends by SIGTERM is not marked, since W&B itself has stopped it."""
    home = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {"HOME": str(tmp_path)}
    done = Running(end_runs, folder=tmp_path, environment=home).finish()
    assert done.returncode == 0, done.stderr
    told = {path.parent.parent.parent.name: read_wandb_file(path) for path in tmp_path.rglob("*.wandb")}
    assert {name: (run["alerts"], run["preempting"]) for name, run in told.items()} == {
        "bad": ([("ERROR", "bad diverged", "Diverged: loss is nan")], False),
        "lost": ([("ERROR", "lost failed", "OSError: gone")], False),
        "cut": ([], True),
        "queued": ([], True),
        "stopped": ([], False),
        "again": ([], True),
    }


def test_disabled_leaves_nothing_and_sending_later_needs_a_key(tmp_path):
    assert "W&B" not in fit(tmp_path, WANDB_MODE="disabled")
    assert not (tmp_path / "run" / "wandb").exists()
    sent = start(tmp_path, "sync", "run").finish()
    assert sent.returncode == 2
    assert "wandb login" in sent.stderr
    assert "no API key" in sent.stderr
    assert not [*(tmp_path / "run").rglob("*.wandb")]


def test_a_server_that_answers_gets_everything_and_no_secret_is_left(tmp_path, server):
    flags = ("--wandb.log_model=true", "--wandb.registry=model/digits")
    assert "lacks" not in fit(tmp_path, *flags, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert_delivered([*server.rows.values()], tmp_path / "run")
    places = [name for name, content in server.files.items() if str(tmp_path).encode() in content]
    assert places == ["wandb-metadata.json"], "the working folder, without the home folder"
    (run_id,) = server.runs
    sent = {sent["artifactCollectionName"]: sent for sent in server.artifacts}
    kinds = {name: one["artifactTypeName"] for name, one in sent.items()}
    for key in ("predictions", "confusion_table"):  # W&B appends a hash in base64, which may hold a "-" itself
        (table,) = (name for name in kinds if name.startswith(f"run-{run_id}-validation{key}-"))
        assert kinds[table] == "run_table"
    assert sent["Digits"]["used"]
    models = [sent for sent in server.artifacts if sent["artifactCollectionName"] == f"model-{run_id}"]
    aliases = [{alias["alias"] for alias in model["aliases"]} for model in models]
    assert aliases == [{"last", "latest"}, {"best", "latest"}]
    (link,) = server.links
    place = {"entityName": "org-entity", "projectName": "wandb-registry-model", "artifactPortfolioName": "digits"}
    assert {**link, "artifactID": models[-1]["id"], **place} == link
    checkpoint = read_checkpoint(tmp_path / "run/checkpoints/best.ckpt")
    for model in models:
        facts = json.loads(model["metadata"])
        assert facts["data"] == {"class_path": "vit_lightning.Digits", **facts["data"]}
        assert facts["data"]["fingerprint"] == checkpoint["images"]
        assert (facts["step"], facts["seed"]) == (checkpoint["global_step"], 0)
    assert facts["metrics"]["val/acc"] == pytest.approx(float(checkpoint["metrics"]["val/acc"]))
    assert server.config["model"]["init_args"]["emb_size"] == 16
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert server.summary["test/acc"] == pytest.approx(results["test/acc"])
    assert any(name.startswith("media/images/test_images") for name in server.files)
    given = json.loads(server.files["wandb-metadata.json"])
    assert (given["program"], given["args"][0]) == ("lightning", "fit")

    source, online = f"wandb:me/vit_lightning/model-{run_id}:best", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    finished(start(tmp_path, "test", f"--ckpt={source}", "--out=test", **online))
    assert json.loads((tmp_path / "test/results.json").read_text())["test/acc"] == results["test/acc"]
    used = models[-1]
    assert not used["used"]
    fit_on = ("fit", *SMALL, f"--init_from={source}", "--wandb.log_model=true", "--out=next", "--test=false")
    finished(start(tmp_path, *fit_on, **online))
    assert used["used"]
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
    assert ("W&B         waiting for its server, 6 s at most" in said) or fault != "hang"
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert_delivered(read_wandb_file(file)["rows"], folder / "run")
