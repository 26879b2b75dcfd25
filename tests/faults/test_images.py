import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np
import pytest
from tensors import write_images, write_parquet

MODEL = [*(flag for flag in harness.FLAGS if not flag.startswith(("--data", "--out"))), "--out=run"]


def write_splits(root: Path, *, train: int = 60, other: int = 10) -> Path:
    """Random images of two classes, as ImageFolder wants them."""
    for number, (split, name) in enumerate((s, n) for s in ("train", "val", "test") for n in ("cat", "dog")):
        write_images(root / split / name, train if split == "train" else other, seed=number)
    return root


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra datasets")
@pytest.mark.full
@pytest.mark.parametrize("workers", [(0, 2), (2, 0)], ids=str)
def test_a_run_on_tables_that_is_killed_in_mid_epoch_continues_at_the_right_image(tmp_path, workers):
    images = write_splits(tmp_path / "images")
    for split in ("train", "val", "test"):
        write_parquet(tmp_path / "tables" / f"{split}.parquet", images / split)
    data = ["--data.class_path=HuggingFaceSet", f"--data.path={tmp_path / 'tables'}", "--data.image_size=8"]
    data += ["--data.batch_size=20", f"--data.cache={tmp_path / 'cache'}"]
    flags = [*data, '--data.augment=[{"class_path": "HorizontalFlip"}]', f"--data.num_workers={workers[0]}", *MODEL]
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert harness.command(reference, "fit", *flags) == 0, harness.log(reference)
    assert len(harness.batches(reference)) == 24  # 4 epochs of 6 batches
    assert harness.command(killed, "fit", *flags, fault="0:9:batch_start:KILL") < 0
    assert harness.resume(killed, f"--data.num_workers={workers[1]}") == 0, harness.log(killed)
    assert not harness.differences(harness.outcome(reference), harness.outcome(killed))


@pytest.mark.full
def test_two_ranks_together_see_what_one_sees(tmp_path):
    flags = [flag for flag in harness.FLAGS if "batch_size" not in flag and "max_epochs" not in flag]
    flags += ["--trainer.max_epochs=1", "--data.num_workers=2"]
    assert harness.command(tmp_path / "one", "fit", *flags, "--data.batch_size=162", "--data.num_workers=0") == 0
    command = [str(Path(sys.executable).parent / "lightning"), "fit", *flags, "--data.batch_size=81"]
    (tmp_path / "two").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{harness.HERE}:{os.environ.get('PYTHONPATH', '')}"}
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    subprocess.run([*command, *ranks], cwd=tmp_path / "two", env=environment, timeout=300, check=True)
    one = harness.batches(tmp_path / "one")
    two = zip(*(harness.batches(tmp_path / "two", rank) for rank in (0, 1)), strict=True)
    for (indices, pixels), parts in zip(one, two, strict=True):
        assert [*parts[0][0], *parts[1][0]] == indices
        assert [*parts[0][1], *parts[1][1]] == pixels
    with np.load(tmp_path / "two" / "run" / "test_predictions.npz") as arrays:
        assert sorted(arrays["index"].tolist()) == list(range(360))  # each once, on one rank or the other
