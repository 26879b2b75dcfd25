"""``experiments/benchmarks/gpu.py`` without a GPU: what it keeps, and that a call continues where one stopped."""

import os
import subprocess
import sys

import gpu
import pytest
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
