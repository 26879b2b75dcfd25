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

    def times(*names: str) -> list[int]:
        return [len((tmp_path / name).read_text().split()) for name in names]

    def bad(place):
        note(place, "bad")
        raise ValueError("not this time")

    def parts(place):
        note(place, "parts")
        if times("parts") == [1]:
            raise gpu.Unfinished("step 7")
        return [{"column": "parts"}, {"other": "2"}]

    def slow(place):
        note(place, "slow")
        if times("slow") == [1]:
            time.sleep(60)
        return [{"column": "slow"}]

    items = (
        gpu.Item("good", 0, lambda place: note(place, "good")),
        gpu.Item("bad", 0, bad),
        gpu.Item("parts", 0, parts),
        gpu.Item("reads", 0, lambda place: note(place, "reads"), data=True),
        gpu.Item("slow", 0, slow),
        gpu.Item("large", 100, lambda place: note(place, "large")),
    )
    flags = ("--device=cpu", f"--runs={tmp_path}", f"--out={tmp_path / 'out'}")
    assert gpu.main([*flags, "--minutes=0.08"], items) == 1
    said = capfd.readouterr().out
    assert "bad: failed after" in said
    assert "ValueError: not this time" in said
    assert "parts: open after" in said
    assert "reads: later, wants --data FOLDER" in said
    assert "large: later, wants 100 s of the" in said
    assert [file.name for file in (tmp_path / "trial").glob("*.json")] == ["good.json"]
    good = json.loads((tmp_path / "out/good.json").read_text())
    assert good["versions"]["torch"] == torch.__version__.split("+")[0]
    assert good["command"].startswith("python experiments/benchmarks/gpu.py --device=cpu")
    with pytest.raises(ProcessLookupError):  # it has ended with the minutes
        os.kill(int((tmp_path / "slow").read_text()), 0)

    assert gpu.main([*flags, "--minutes=5", f"--data={tmp_path}"], items) == 1
    assert times("good", "bad", "parts", "reads", "slow", "large") == [1, 2, 2, 1, 2, 1]
    assert (
        "## parts\n\n| column | other |\n| --- | --- |\n| parts |  |\n|  | 2 |\n"
        in (tmp_path / "trial/gpu.md").read_text()
    )

    (tmp_path / "trial/good.json").unlink()  # which asks for it again
    assert gpu.main([*flags, "--minutes=5", "--only", "parts", "good"], items) == 0
    assert times("good", "parts") == [2, 2]


def test_the_next_calls_are_of_open_items_and_say_what_to_bring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "CARRIED", 10e6 + gpu.CARRIED)  # about 60 MB beside the repository
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/done.json").write_text("{}")
    for name in ("a", "b", "c"):
        with (tmp_path / f"{name}.parquet").open("wb") as file:
            file.truncate(40_000_000)
    items = (
        gpu.Item("done", 200, print),
        gpu.Item("first", 200, print, data=True, packages=("datasets",)),
        gpu.Item("long", 500, print),
        gpu.Item("short", 300, print, packages=("dill<1",)),
        gpu.Item("two", 10, print, gpus=2),
    )
    assert gpu.main(["--next", f"--data={tmp_path}"], items) == 0
    first, long, two = capsys.readouterr().out.split("\n\n")
    assert first.startswith("8.3 minutes; the repository has ")
    assert "-d wheels datasets 'dill<1'" in first
    assert first.index("a.parquet (40.0 MB)") < first.index("load 1 of ") < first.index("c.parquet (40.0 MB)")
    assert first.endswith(f"python experiments/benchmarks/gpu.py --minutes=9 --data={tmp_path} --only first short")
    assert long.startswith("8.3 minutes")
    assert long.endswith("gpu.py --minutes=9 --only long")
    assert two.startswith("0.2 minutes, 2 GPUs")


def test_every_item_takes_nine_minutes_at_most():
    assert max(item.seconds for item in gpu.ITEMS) <= 540
    assert len({item.file for item in gpu.ITEMS}) == len(gpu.ITEMS)
    assert {file.name for file in (BENCHMARKS / "gpu").glob("*.json")} < {item.file for item in gpu.ITEMS}


@pytest.mark.parametrize("devices", [None, ["0"], ["0", "1"]])
def test_workers_by_default_are_as_many_as_are_fastest_on_a_gpu(devices, monkeypatch):
    from vit_lightning.ablation import workers

    monkeypatch.setattr(workers, "RUNS_PER_GPU", 4)
    assert workers.workers_of("auto", devices, 10**6) == (1 if devices is None else 4 * len(devices))
    assert workers.workers_of(3, devices, 1) == 3


def test_predictions_count_the_operations_of_a_step_as_torch_does():
    import gpu_predictions

    for network in gpu_predictions.NETWORKS.values():
        sizes = {"image_size": network.image, "patch_size": network.patch, "emb_size": network.width}
        vit = ViT(**sizes, depth=network.depth, num_heads=network.heads, num_classes=network.classes)
        counted = 3 * forward_flops(vit, (3, network.image, network.image)) - 2 * 3 * network.image**2 * network.width
        assert gpu_predictions.image_flops(network) == pytest.approx(counted, rel=0.001)
    assert len(gpu_predictions.table(gpu_predictions.Machine())) == 2 + 15


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
    assert {file.name for file in (tmp_path / "trial").glob("*.json")} == {item.file for item in gpu.ITEMS}


@pytest.mark.full
def test_a_training_that_is_told_to_end_is_resumed(tmp_path, monkeypatch):
    import gpu_trainings

    monkeypatch.setattr(gpu_trainings, "SAVING", 0.0)
    monkeypatch.setattr(
        gpu_trainings, "SMALL", (*gpu_trainings.SMALL, "--data.batch_size=16", "--trainer.max_epochs=400")
    )

    def train(seconds: float):
        place = gpu.Place(torch.device("cpu"), True, tmp_path, time.monotonic() + seconds)
        return gpu_trainings.goal(place)

    with pytest.raises(gpu.Unfinished, match="told to end"):
        train(25)
    steps = [row["step"] for row in gpu_trainings.read_metrics(tmp_path / "cifar10-goal")]
    assert steps, "it never began"
    assert train(300)[0]["goal"] == "95 %"
