"""Two ranks, and accumulated gradients, train as one process does on the same batches."""

from __future__ import annotations

from pathlib import Path

import harness
import numpy as np
import pytest
from runs import logged_rows
from tensors import write_images
from test_files import finite
from test_group_signals import begin, ended, setting

RANKS = ("--trainer.devices=2", "--trainer.strategy=ddp")
PLAIN = [
    flag
    for flag in harness.FLAGS
    if not any(name in flag for name in ("dropout", "drop_path", "augment", "batch_size", "callbacks"))
]
"""Without what is random: dropout, drop path, augmentation."""
ODD = "--data.fraction=0.75"  # 971 images: the last step has 75, which are 38 and 37, 64 and 11, or 32, 32 and 6 and 5
WAYS = {
    "one": (ODD, "--data.batch_size=128"),
    "two ranks": (ODD, "--data.batch_size=64", *RANKS),
    "accumulated": (ODD, "--data.batch_size=64", "--trainer.accumulate_grad_batches=2"),
    "both": (ODD, "--data.batch_size=16", "--trainer.accumulate_grad_batches=4", *RANKS),
}


def curve(folder: Path) -> dict[str, list[float]]:
    rows = logged_rows(folder / "run")
    names = ("train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc")
    return {name: [row[name] for row in rows if name in row] for name in names}


@pytest.mark.full
def test_two_ranks_and_accumulated_gradients_give_the_curves_of_one_process(tmp_path):
    for name, flags in WAYS.items():
        assert ended(begin(tmp_path / name, "fit", *PLAIN, *flags), 120) == 0, harness.log(tmp_path / name)
    one = curve(tmp_path / "one")
    assert [len(values) for values in one.values()] == [4, 4, 4, 4, 1, 1]
    for name in ("two ranks", "accumulated", "both"):
        found = curve(tmp_path / name)
        for metric, values in one.items():
            assert found[metric] == pytest.approx(values, rel=2e-6), (name, metric)


@pytest.mark.full
def test_a_split_may_be_smaller_than_the_number_of_ranks(tmp_path):
    for split, count in {"train": 6, "val": 1, "test": 1}.items():
        for name in ("cat", "dog"):
            write_images(tmp_path / "images" / split / name, count)
    flags = [flag for flag in PLAIN if "checkpoint" not in flag and "--out" not in flag]
    images = ("--data=ImageFolder", f"--data.root={tmp_path / 'images'}", "--data.image_size=8", "--data.batch_size=2")
    ways = {"one": ("--data.batch_size=6",), "three": ("--trainer.devices=3", "--trainer.strategy=ddp")}
    for name, more in ways.items():
        process = begin(tmp_path / name, "fit", *flags, *images, *more, "--out=run")
        assert ended(process, 120) == 0, harness.log(tmp_path / name)
    one, three = curve(tmp_path / "one"), curve(tmp_path / "three")
    assert one.keys() == three.keys()
    for metric, values in one.items():
        assert three[metric] == pytest.approx(values, rel=2e-6), metric
    first, second = (np.load(tmp_path / name / "run/test_predictions.npz") for name in ways)
    assert second["index"].tolist() == [0, 1]
    for column in ("index", "label", "prediction"):
        assert first[column].tolist() == second[column].tolist()


@pytest.mark.full
@pytest.mark.parametrize("step", [5, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_row_14_a_rank_whose_loss_is_none_stops_all(tmp_path, rank, step):
    """Step 7 is the last of an epoch."""
    flags = (*harness.FLAGS, *setting(workers=0, ranks=2), "--resume=auto")
    assert ended(begin(tmp_path, "fit", *flags, fault=f"{rank}:{step}:forward:NAN"), 60) == 4, harness.log(tmp_path)
    said = harness.log(tmp_path)
    assert f"training diverged in step {step} (the first is 0): loss is nan" in said
    assert "Traceback" not in said
    assert (tmp_path / "run/diverged.json").is_file()
    finite(tmp_path)
    assert ended(begin(tmp_path, "fit", *flags), 60) == 4
    assert "resumed as it is it would do so again (change what it needs" in harness.log(tmp_path)
    assert "Traceback" not in harness.log(tmp_path)
