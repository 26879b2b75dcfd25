"""Batches as the loader of the user's own made them, in modules of theirs and in ours."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from runs import SMALL

from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint


@pytest.fixture
def own(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(Path(__file__).with_name("theirs.py"), in_folder)
    monkeypatch.syspath_prepend(in_folder)
    return in_folder


def flags_of(kind: str) -> list[str]:
    flags = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--wandb.mode=disabled", "--out=run"]
    return [*flags, "--data.class_path=theirs.Data", f"--data.kind={kind}"]


def own_module(kind: str, name: str = "Net") -> list[str]:
    return [f"--module.class_path=theirs.{name}", f"--module.kind={kind}"]


@pytest.mark.parametrize(
    "kind",
    ["dict", "hot", "three", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("pair", "held", "several"))],
)
def test_a_module_of_the_user_s_own_gets_the_batch_as_its_loader_makes_it(own, kind):
    results = fit(resolve([*flags_of(kind), *own_module(kind)]))
    import theirs

    module, data = theirs.Net(kind), theirs.Data(kind)
    control = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    control.fit(module, datamodule=data)
    control.test(module, datamodule=data)
    assert results["test/acc"] == pytest.approx(float(control.callback_metrics["test/acc"]), abs=1e-7)
    for name, weight in read_checkpoint(Path("run/checkpoints/last.ckpt"))["state_dict"].items():
        assert torch.equal(weight, module.state_dict()[name]), name
    # the report of test images needs one label for each
    assert Path("run/test_predictions.npz").is_file() == (kind not in ("three", "held", "several"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dict", "hot"])
def test_a_classifier_takes_images_and_labels_from_any_form(own, kind):
    fit(resolve([*flags_of("pair"), *SMALL]))
    fit(resolve([*flags_of(kind), *SMALL, "--out=other"]))
    runs = [read_checkpoint(Path(name, "checkpoints/last.ckpt"))["state_dict"] for name in ("run", "other")]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-6 if kind == "hot" else 0)
    tables = [dict(np.load(Path(name, "test_predictions.npz"))) for name in ("run", "other")]
    for column in ("index", "label", "prediction"):
        assert tables[0][column].tolist() == tables[1][column].tolist()
    assert main(["predict", "--ckpt=other", "--trust", "--out=predicted"]) == 0
    rows = [line.split(",") for line in Path("predicted/predictions.csv").read_text().splitlines()[1:]]
    assert [int(row[2]) for row in rows] == tables[0]["prediction"].tolist()


@pytest.mark.parametrize("kind", ["held", "several"])
def test_a_classifier_refuses_others_in_a_line_before_its_first_step(own, capsys, kind):
    assert main(["fit", *flags_of(kind), *SMALL]) == 2
    held = {"held": "Held", "several": "torch.float32 (16, 1, 8, 8) and torch.float32 (16, 10)"}[kind]
    said = f"lightning fit: data.class_path=theirs.Data: a batch holds {held}, and ViTClassifier takes float images"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert not Path("run").exists()


def test_labels_of_a_batch_go_by_the_names_of_the_trained_model(own, capsys):
    names = list("abcdefghij")
    results = fit(resolve([*flags_of("dict"), *own_module("dict"), f"--data.class_names={names}"]))
    turned = [*names[1:], names[0]]  # label 0 is b, and so on
    assert main(["test", "--ckpt=run", "--trust", "--out=test", f"--data.class_names={turned}"]) == 0
    predicted = dict(np.load("run/test_predictions.npz"))
    right = ((predicted["label"] + 1) % 10 == predicted["prediction"]).mean()
    found = json.loads(Path("test/results.json").read_text())
    assert found["test/acc"] == pytest.approx(right)
    assert found["test/acc"] != results["test/acc"]
    refused = ["--data.kind=held", "--module.kind=held"]
    assert main(["test", "--ckpt=run", "--trust", f"--data.class_names={turned}", *refused]) == 2
    assert "a batch holds Held, and a model with its classes in another order takes" in capsys.readouterr().err


def test_code_that_calls_a_logger_in_a_test_of_its_own_is_told_that_there_is_none(own, capsys):
    fit(resolve([*flags_of("pair"), *own_module("pair", "Talks"), "--test=false"]))
    assert main(["test", "--ckpt=run", "--trust", "--out=test"]) == 2
    said = "lightning test: self.logger.experiment: validate, test and predict have no logger"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
