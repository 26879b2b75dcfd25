"""``experiments/benchmarks/gpu.py`` without a GPU: what it keeps, and that a call continues where one stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import gpu
import pytest
import torch
from runs import REPOSITORY

from vit_lightning import ViT
from vit_lightning.training.resources import forward_flops

BENCHMARKS = REPOSITORY / "experiments" / "benchmarks"


def test_a_call_continues_where_the_last_one_stopped(tmp_path, capfd):
    def note(place, name: str):
        with (place.runs / name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return [{"column": name, "goal": "1.0"}]

    def bad(place):
        note(place, "bad")
        raise ValueError("not this time" if len((place.runs / "bad").read_text().split()) < 2 else "again")

    def parts(place):
        note(place, "parts")
        if len((place.runs / "parts").read_text().split()) < 2:
            raise gpu.Unfinished("step 7")
        return [{"column": "parts"}, {"other": "2"}]

    def absent(place):
        raise gpu.Missing("--imagenet FOLDER is not given")

    def slow(place):
        note(place, "slow")
        if len((place.runs / "slow").read_text().split()) < 2:
            time.sleep(60)
        return [{"column": "slow"}]

    items = (
        gpu.Item("good", 0, lambda place: note(place, "good")),
        gpu.Item("bad", 0, bad),
        gpu.Item("parts", 0, parts),
        gpu.Item("absent", 0, absent),
        gpu.Item("slow", 0, slow),
        gpu.Item("large", 100, lambda place: note(place, "large")),
    )
    flags = ("--device=cpu", f"--runs={tmp_path}", f"--out={tmp_path / 'out'}")
    assert gpu.main([*flags, "--minutes=0.08"], items) == 1
    said = capfd.readouterr().out
    assert "bad: failed after" in said
    assert "ValueError: not this time" in said
    assert "large: later, wants 4 s of the" in said
    state = {
        name: json.loads((tmp_path / f"out/{name}.json").read_text())
        for name in ("good", "bad", "parts", "absent", "slow")
    }
    assert state["bad"] == json.loads((tmp_path / "gpu_trial/bad.json").read_text())
    assert {name: entry["status"] for name, entry in state.items()} == {
        "good": "done", "bad": "failed", "parts": "open", "absent": "open", "slow": "failed"
    }  # fmt: skip
    assert state["good"]["versions"]["torch"] == torch.__version__.split("+")[0]
    with pytest.raises(ProcessLookupError):  # it has ended with the minutes
        os.kill(int((tmp_path / "slow").read_text()), 0)

    assert gpu.main([*flags, "--list"], items) == 1
    assert capfd.readouterr().out.splitlines()[:3] == [
        "good: done, 0 s",
        "parts: open, 0 s step 7",
        "absent: open, 0 s --imagenet FOLDER is not given",
    ]
    (tmp_path / "out/good.json").unlink()  # as on a machine from which only some files come back
    assert gpu.main([*flags, "--minutes=5"], items) == 1
    assert {name: len((tmp_path / name).read_text().split()) for name in ("good", "bad", "parts", "slow", "large")} == {
        "good": 1, "bad": 2, "parts": 2, "slow": 2, "large": 1
    }  # fmt: skip
    table = (tmp_path / "out/gpu.md").read_text()
    assert "## parts\n\n| column | other |\n| --- | --- |\n| parts |  |\n|  | 2 |\n" in table
    assert "## bad\n\nOpen (failed: ValueError: again).\n" in table

    assert gpu.main([*flags, "--minutes=5", "--only", "parts", "--again", "good"], items) == 0
    assert {name: len((tmp_path / name).read_text().split()) for name in ("good", "bad", "parts")} == {
        "good": 2, "bad": 2, "parts": 2
    }  # fmt: skip


def test_predictions_count_the_operations_of_a_step_as_torch_does():
    import gpu_predictions

    for network in gpu_predictions.NETWORKS.values():
        sizes = {"image_size": network.image, "patch_size": network.patch, "emb_size": network.width}
        vit = ViT(**sizes, depth=network.depth, num_heads=network.heads, num_classes=network.classes)
        counted = 3 * forward_flops(vit, (3, network.image, network.image)) - 2 * 3 * network.image**2 * network.width
        assert gpu_predictions.image_flops(network) == pytest.approx(counted, rel=0.001)
    assert len(gpu_predictions.table(gpu_predictions.Machine())) == 2 + 15


def test_every_config_that_is_open_for_want_of_a_gpu_has_an_item():
    pages = [path for path in (REPOSITORY / "experiments").rglob("*.yaml") if "GPU" in path.read_text()]
    wanted = {str(page.relative_to(REPOSITORY / "experiments")) for page in pages if "Not measured" in page.read_text()}
    assert wanted <= {item.name for item in gpu.ITEMS}
    assert len(wanted) == 10


@pytest.mark.full
def test_all_of_it_at_a_small_size(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--device=cpu",
        "--small",
        "--minutes=25",
        f"--runs={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stdout + done.stderr
    state = [json.loads(file.read_text()) for file in (tmp_path / "gpu_trial").glob("*.json")]
    assert len(state) == len(gpu.ITEMS)
    assert not {entry.get("note") for entry in state if entry["status"] != "done"}


@pytest.mark.full
def test_a_training_that_is_told_to_end_is_resumed(tmp_path, monkeypatch):
    import gpu_trainings

    monkeypatch.setattr(gpu_trainings, "SAVING", 0.0)
    monkeypatch.setattr(gpu_trainings, "SMALL", (*gpu_trainings.SMALL, "--trainer.max_epochs=400"))

    def train(seconds: float):
        place = gpu.Place(torch.device("cpu"), True, tmp_path, time.monotonic() + seconds, {"data": None})
        return gpu_trainings.train(place, "cifar10_vit_tiny", "data", ("--data.batch_size=16",), "95 %")

    with pytest.raises(gpu.Unfinished, match="told to end"):
        train(25)
    steps = [row["step"] for row in gpu_trainings.read_metrics(tmp_path / "cifar10_vit_tiny-goal")]
    assert steps, "it never began"
    assert train(300)[0]["goal"] == "95 %"
