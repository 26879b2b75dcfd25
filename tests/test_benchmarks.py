"""Scripts of ``experiments/benchmarks``: what they count, time and keep."""

import os
import subprocess
import sys

import gpu
import gpu_trainings
import pytest
import torch
import yaml
from measuring import Rounds
from runs import REPOSITORY
from tensors import write_images

from vit_lightning.config.experiment import make_data

BENCHMARKS = REPOSITORY / "experiments" / "benchmarks"
MOST_LAUNCHES = {
    "RandAugment": (140,),
    "ThreeAugment": (156,),
    "cifar10_vit_tiny": (62, 81, 85, 12),
    "deit3": (212, 91, 103, 37),
}
"""Launches of an augmentation; of a step with two blocks those of data, forward, backward and optimizer."""


def test_no_step_waits_for_a_gpu_and_launches_do_not_grow():
    """In a process of its own, where torch takes tensors for those of a GPU."""
    command = [sys.executable, BENCHMARKS / "gpu_counts.py", "--small", "--images=4", "--only", *MOST_LAUNCHES]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).stdout
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    counted = {name: [*map(int, numbers)] for name, *numbers in rows if name in MOST_LAUNCHES}
    assert counted.keys() == MOST_LAUNCHES.keys()
    assert not {name: crossings for name, (crossings, *_) in counted.items() if crossings}
    for name, (_, *launches) in counted.items():
        assert all(map(int.__le__, launches, MOST_LAUNCHES[name])), name


def test_a_ratio_above_1_means_that_the_first_is_faster():
    result = Rounds({"ours": [1.0, 2.0, 4.0, 1.0], "theirs": [2.0, 4.0, 8.0, 8.0]})
    assert result.ratios("ours", "theirs") == [2.0, 2.0, 2.0, 8.0]
    median, low, high = result.ratio("ours", "theirs")
    assert (median, low) == pytest.approx((2.0, 2.0))
    assert 2.0 <= high <= 8.0
    assert str(Rounds({"a": [2.0], "b": [1.0]}).ratio("a", "b")) == "0.500 (0.500 to 0.500)"
    assert result.fastest(["theirs", "ours"]) == "ours"
    assert result.median("theirs") == 6.0


class Ablate:
    """``lightning ablate`` that ends at once, told to end, or since it refuses the plan."""

    returncode = 143

    def __init__(self, command, **_):
        pass

    def wait(self, seconds):
        pass


def test_a_search_sees_no_test_image(tmp_path, monkeypatch):
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")):
        write_images(tmp_path / "set" / split / name, 10)
    place = gpu.Place(torch.device("cpu"), True, tmp_path / "runs", 0.0, tmp_path / "set", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Ablate)
    with pytest.raises(gpu.Unfinished):
        gpu_trainings.study(place, "cifar10_95", 1, {}, tests=False)
    data = make_data(yaml.safe_load((place.runs / "data.yaml").read_text()))
    assert data.cut_splits == ("val", "test")
    assert sum(map(data.image_count, ("train", "val", "test"))) == 20


@pytest.mark.full
def test_all_of_it_at_a_small_size(tmp_path):
    flags = ["--device=cpu", "--small", "--minutes=25", f"--runs={tmp_path}"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in (tmp_path / "trial").glob("*.json")} == {item.file for item in gpu.ITEMS}
