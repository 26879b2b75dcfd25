"""A trained model on images that lie elsewhere: seen as those of its run, and of the one split that is needed."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import SMALL
from tensors import write_parquet

from vit_lightning import UserError
from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.commands.trained import evaluate, predict
from vit_lightning.config.resolve import resolve

SHADES = {"cat": 60, "dog": 130, "owl": 200}
VIEW = {
    "image_size": [12, 16],
    "mean": [0.3, 0.4, 0.6],
    "std": [0.3, 0.2, 0.25],
    "interpolation": "fast_bilinear",
    "centre_share": 0.75,
}
FLAGS = [f"--data.{name}={json.dumps(value)}" for name, value in VIEW.items()]
FLAGS += ["--data=ImageFolder", "--data.root=images", "--data.min_area=1", "--data.num_workers=0"]
FLAGS += ["--model.patch_size=4", "--model.emb_size=32", "--model.depth=1", "--model.num_heads=2"]
FLAGS += ["--data.batch_size=8", "--optimizer.lr=0.003", "--optimizer.warmup_epochs=0"]
FLAGS += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--wandb.mode=disabled"]


def draw(folder: str, count: int, seed: int = 0) -> None:
    """Noisy images in class folders, of a shape of their own."""
    draw = np.random.default_rng(seed)
    for name, shade in SHADES.items():
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = shade + draw.integers(-60, 60, (24, 32, 3)) + draw.integers(-60, 60)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(Path(folder, name, f"{seed}_{number}.png"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed, (split, count) in enumerate({"train": 16, "val": 4, "test": 8}.items()):
            draw(f"images/{split}", count, seed)
        shutil.copy(Path(__file__).with_name("own_data.py"), "own.py")
        return folder, fit(resolve([*FLAGS, "--out=run"]))


@pytest.fixture
def control(trained, tmp_path, monkeypatch):
    """Results of a run in the working folder with its images."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return trained[1]


def measure(*flags, stage="test"):
    return evaluate(resolve(["--ckpt=run", *flags, f"--out={stage}ed"], stage), stage)


def rows_of(file):
    return list(csv.reader(Path(file).read_text().splitlines()))[1:]


def counted(folder):
    return sum(int(row[1]) for row in rows_of(f"{folder}/classes.csv"))


def test_another_class_of_data_shows_the_model_the_same_images(control, capsys):
    for split in ("val", "test"):
        write_parquet(Path(f"hf/{split}.parquet"), Path("images", split))
    flags = ["--data.class_path=HuggingFaceSet", "--data.path=hf"]
    for stage, split in ("test", "test"), ("validate", "val"):
        found = measure(*flags, stage=stage)
        assert found[f"{split}/acc"] == control[f"{split}/acc"]
        assert found[f"{split}/loss"] == pytest.approx(control[f"{split}/loss"], abs=1e-6)
    assert "data.image_size=[12, 16]" in capsys.readouterr().out
    for given in ([], flags):
        predict(resolve(["--ckpt=run", *given, f"--out=predicted{len(given)}"], "predict"))
    assert rows_of("predicted2/predictions.csv") == rows_of("predicted0/predictions.csv")
    Path("data.yaml").write_text("data: {class_path: HuggingFaceSet, init_args: {path: hf, num_workers: 0}}\n")
    Path("name.yaml").write_text("data: HuggingFaceSet\n")
    for given in ["--config=data.yaml"], ["--config=name.yaml", "--data.path=hf"]:
        view = resolve(["--ckpt=run", *given], "test").data.test_view()
        assert {name: view[name] for name in VIEW} == VIEW


def test_what_a_dataset_of_the_users_own_cannot_take_or_the_user_gives_is_said(control):
    tested = resolve(["--ckpt=run", "--data=own.Cropped"], "test")
    found = tested.data.test_view()
    assert [found[name] for name in ("image_size", "mean", "std")] == [[12, 16], [0.3, 0.4, 0.6], [0.3, 0.2, 0.25]]
    assert [note for note in tested.trained.notes if "not that of" in note] == [
        "data.centre_share is not that of the source, 0.75",
        "data.interpolation is not that of the source, fast_bilinear",
    ]
    flags = ["--data.mean=[0, 0, 0]", "--data.std=[0.3, 0.20, 0.25]", "--data.image_size=[12, 16]"]
    given = resolve(["--ckpt=run", "--data=own.Cropped", *flags], "test")
    assert given.data.mean == (0, 0, 0)
    assert {*given.trained.notes} - {*tested.trained.notes} == {
        "data.in_channels=3 as in the source",
        "data.mean is not that of the source, [0.3, 0.4, 0.6]",
    }


@pytest.mark.parametrize("name", ["Testing", "test"])
def test_a_test_needs_no_other_split(name, control):
    shutil.move("images/test", f"there/{name}")
    found = measure("--data.root=there")
    assert found["test/loss"] == pytest.approx(control["test/loss"], abs=1e-6)
    shutil.copytree(Path("there", name), "there/train")  # of which no split can be cut
    for image in Path("there/train").rglob("*.png"):
        image.unlink()
    shutil.rmtree("tested")
    assert measure("--data.root=there")["test/loss"] == found["test/loss"]
    assert main(["validate", "--ckpt=run", "--data.root=there"]) == 2


def test_a_validation_needs_no_other_split_and_a_training_its_own(control, capsys):
    shutil.move("images/val", "there/dev")
    assert measure("--data.root=there", stage="validate")["val/loss"] == pytest.approx(control["val/loss"], abs=1e-6)
    assert main(["test", "--ckpt=run", "--data.root=there"]) == 2
    assert (
        "data.root=there has images of val, none of test or train (ln -s FOLDER there/test" in capsys.readouterr().err
    )
    assert main(["fit", *FLAGS, "--data.root=there"]) == 2
    assert "data.root=there has images of val, none of train (ln -s FOLDER there/train" in capsys.readouterr().err


def test_other_class_folders_without_splits_are_tested_as_a_whole(control, capsys):
    found = measure("--data.root=images/test")
    assert found["test/loss"] == pytest.approx(control["test/loss"], abs=1e-6)
    assert counted("tested") == 24
    text = "data.root=images/test has no folders of splits: all of its images are taken as test"
    assert text in capsys.readouterr().out
    shutil.copytree("images/test/cat", "one/cat")
    assert len(resolve(["--ckpt=run", "--data.root=one"], "test").data.dataset("test")) == 8


def test_a_copy_of_the_images_of_the_training_keeps_its_cut_and_other_files_may_hold_some(control, capsys):
    fit(resolve([*FLAGS, "--data.root=images/train", "--out=flat"]))
    here = resolve(["--ckpt=flat"], "test").data.dataset("test")
    shutil.copy(here.name(0), "images/train/cat/new.png")  # as of OpenTau#502: another cut, with images of the training
    for command in ("test", "validate", "predict"):
        with pytest.raises(
            UserError, match=r"no longer those that the model learned from, and those of (test|val) are"
        ):
            resolve(["--ckpt=flat", "--data.batch_size=4"], command)
    Path("images/train/cat/new.png").unlink()
    shutil.move("images/train", "moved")
    there = resolve(["--ckpt=flat", "--data.root=moved"], "test").data.dataset("test")
    assert len(here) == 10
    assert [Path(there.name(index)).name for index in range(10)] == [Path(here.name(index)).name for index in range(10)]
    for flag in ("--data.val_share=0.3", "--data.test_share=0.5"):
        with pytest.raises(UserError, match=r"_share=0.\d: the model learned from the split of \w+_share=0.\d, and so"):
            resolve(["--ckpt=flat", "--data.root=moved", flag], "test")
    again = resolve(["--ckpt=flat", "--data.root=moved", "--data.test_share=0.20"], "test").data
    assert len(again.dataset("test")) == 10
    Path(here.name(0).replace("images/train", "moved")).unlink()
    measure("--ckpt=flat", "--data.root=moved")
    assert counted("tested") == 47  # among them those of the training, whose names no checkpoint keeps
    assert "(if it holds images of the training, the accuracy is too high)" in capsys.readouterr().out


def test_gray_statistics_are_not_given_to_images_in_colour(control, capsys):
    fit(resolve([*SMALL, "--wandb.mode=disabled", "--out=gray"]))
    for number in range(2):
        shutil.copytree("images/test/cat", f"digits/test/{number}")
    assert main(["test", "--ckpt=gray", "--data=ImageFolder", "--data.root=digits"]) == 2
    said = capsys.readouterr().err
    assert "model.in_channels=1 does not fit the data, which has 3" in said
    assert "data.mean" not in said
