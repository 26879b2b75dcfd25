"""``lightning check-data`` and ``lightning show-batch``."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import SMALL
from tensors import write_images

from vit_lightning.cli import main


@pytest.fixture(scope="module")
def dirty(tmp_path_factory) -> tuple[Path, list[str], list[Path]]:
    """400 images of two classes, four damaged, with copies; names of the damaged, and places of the copies."""
    root = tmp_path_factory.mktemp("dirty")
    for number, (split, name) in enumerate((split, name) for split in ("train", "val", "test") for name in "ab"):
        write_images(root / split / name, 100 if split == "train" else 50, seed=number)
    draw, images = random.Random(0), sorted(root.rglob("*.jpg"))
    bad = draw.sample(images, 4)
    for path, content in zip(bad, (b"", b"text", bad[2].read_bytes()[:300], bytes(900)), strict=True):
        path.write_bytes(content)
    whole = [path for path in images if path not in bad]
    twins = [next(path for path in whole if path.match(f"{split}/a/*")) for split in ("train", "test")]
    shutil.copy(twins[0], root / "train" / "a" / "twin.jpg")  # within a split
    shutil.copy(twins[1], root / "val" / "b" / "leak.jpg")  # across splits, and of another class
    original = whole[-1]  # of validation, again in the test under another format
    Image.open(original).save(root / "test" / "b" / "other format.png")
    return root, sorted(map(str, bad)), [*twins, original]


def check(root: Path, *arguments: str) -> int:
    words = ["--data.class_path=ImageFolder", f"--data.root={root}", "--data.image_size=8", *SMALL]
    return main(["check-data", *words, "--out=report", *arguments])


def test_everything_that_is_wrong_is_found(dirty, in_folder, capsys):
    root, bad, (*twins, original) = dirty
    assert check(root) == 2
    output = capsys.readouterr()
    assert sorted(line.split(": ")[1] for line in output.err.splitlines() if line.startswith("lightning")) == bad
    report = json.loads((in_folder / "report" / "data.json").read_text())
    damaged = [line.split(": ")[0] for part in report["splits"].values() for line in part["damaged"]]
    assert sorted(damaged) == bad
    assert [part["images"] for part in report["splits"].values()] == [201, 101, 101]
    assert report["splits"]["train"]["per_class"] == {"a": 101, "b": 100}
    assert report["splits"]["train"]["width"] == {"min": 20, "median": 20.0, "max": 20}
    twin = [f"train: {path}" for path in (twins[0], twins[0].with_name("twin.jpg"))]
    assert report["duplicates_within_splits"] == [twin]
    across = [f"val: {root / 'val/b/leak.jpg'}", f"test: {twins[1]}"]
    other = root / "test/b/other format.png"
    assert report["duplicates_across_splits"] == [[f"val: {original}", f"test: {other}"], across]
    assert report["duplicates_with_other_labels"] == [across]
    lines = output.out.splitlines()
    assert f"same across splits: val: {original} = test: {other}" in lines
    assert f"same across splits: {' = '.join(across)}" in lines
    assert f"same with other labels: {' = '.join(across)}" in lines


def test_mean_and_std_are_those_of_all_training_pixels(in_folder):
    root = in_folder / "images"
    for name, size in (("a", (20, 14)), ("b", (9, 30))):
        write_images(root / "train" / name, 4, size=size)
        write_images(root / "val" / name, 1)
        write_images(root / "test" / name, 1, seed=5)
    assert check(root) == 0
    files = sorted((root / "train").rglob("*.jpg"))
    pixels = np.concatenate([np.asarray(Image.open(path)).reshape(-1, 3) for path in files]) / 255
    report = json.loads((in_folder / "report" / "data.json").read_text())
    assert report["mean"] == pytest.approx(pixels.mean(0), abs=6e-5)
    assert report["std"] == pytest.approx(pixels.std(0), abs=6e-5)


def test_digits_have_the_mean_and_deviation_that_they_say(in_folder, capsys):
    assert main(["check-data", *SMALL, "--out=report"]) == 0
    report = json.loads((in_folder / "report" / "data.json").read_text())
    assert report["mean"] == pytest.approx([0.3053], abs=3e-4)  # which are of pixels before rounding to 8 bits
    assert report["std"] == pytest.approx([0.3761], abs=3e-4)
    assert report["splits"]["test"]["images"] == 360


def test_a_figure_is_written(in_folder, capsys):
    mixing = "--data.mixing=[{class_path: MixUp}, {class_path: CutMix}]"
    assert main(["show-batch", *SMALL, "--data.augment=[{class_path: RandAugment}]", mixing, "--out=shown"]) == 0
    assert Image.open(in_folder / "shown" / "batch.png").size[0] > 500
    assert "32 of 64 images" in capsys.readouterr().out
