"""``experiments/benchmarks/gpu.py`` without a GPU: what it keeps, and that a call continues where one stopped."""

import os
import subprocess
import sys
from functools import partial

import gpu
import gpu_trainings
import pytest
import torch
import yaml
from gpu_trainings import data_of
from pyarrow.parquet import read_table, write_table
from runs import REPOSITORY
from tensors import write_images, write_parquet

from vit_lightning.config.experiment import make_data

BENCHMARKS = REPOSITORY / "experiments" / "benchmarks"


@pytest.mark.parametrize("column", ["image", "img"])
def test_parquet_files_are_read_by_either_name_of_their_images_and_must_be_the_whole_set(column, tmp_path, capsys):
    folder, images = tmp_path / "set", tmp_path / "images"
    for split in ("train", "test"):
        write_images(images / split / "cat", 3)
        write_parquet(folder / f"{split}.parquet", images / split)
        table = read_table(folder / f"{split}.parquet")
        write_table(table.rename_columns({"image": column}), folder / f"{split}.parquet")
    data = make_data({"data": data_of("cifar10_small", folder)})
    assert data.image_count("test") == 3
    with pytest.raises(SystemExit):
        gpu.main(["--next", f"--data={folder}"])
    assert "holds 6 images: CIFAR-10 has 60,000" in capsys.readouterr().err


class Ablate:
    """``lightning ablate`` that ends at once, told to end, or since it refuses the plan."""

    returncode = 143

    def __init__(self, command, **_):
        pass

    def wait(self, seconds):
        pass


def test_a_study_with_another_config_does_not_take_the_runs_of_the_plan_for_its_own(tmp_path, monkeypatch):
    place = gpu.Place(torch.device("cpu"), True, tmp_path, 0.0, tmp_path, tmp_path)
    study = partial(gpu_trainings.study, place, "pretraining_1", 1, {}, "cifar10_mae_36_finetune", "cifar10_mae_36")
    assert (gpu.EXPERIMENTS / "ablations/pretraining_1/runs.tar.xz").is_file()
    monkeypatch.setattr(subprocess, "Popen", Ablate)
    (tmp_path / "pretraining_1.log").write_text("stopped by SIGTERM")
    with pytest.raises(gpu.Unfinished, match=r"^0 runs have ended; stopped by SIGTERM"):
        study()
    monkeypatch.setattr(Ablate, "returncode", 2)  # no later call goes on with a refused plan
    with pytest.raises(RuntimeError, match="stopped by SIGTERM"):
        study()


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
