"""Batches as the loader of the user's own made them, in modules of theirs and in ours."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from runs import SMALL

from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import as_batch, tensors_in
from vit_lightning.storage.checkpoint_files import read_checkpoint

OWN = """
from collections import UserDict, namedtuple
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

Named = namedtuple("Named", "x y")


@dataclass
class Held:
    x: torch.Tensor
    y: torch.Tensor


def three(images, labels):
    return images, labels, labels + 1000


def hot(images, labels):
    return images, one_hot(labels, 10)


def soft(images, labels):
    return {"image": images, "label": 0.9 * one_hot(labels, 10) + 0.01, "path": ["a"] * len(labels)}


def several(images, labels):
    return images, (one_hot(labels, 10) + one_hot((labels + 1) % 10, 10)).float()


def encoded(images, labels):
    return UserDict(pixel_values=images, labels=labels)


MAKES = {
    "pair": lambda images, labels: [images, labels],
    "dict": lambda images, labels: {"pixel_values": images, "labels": labels},
    "encoded": encoded, "three": three, "named": Named, "held": Held, "hot": hot, "soft": soft, "several": several,
}


class Data(LightningDataModule):
    num_classes = 10

    def __init__(self, kind: str):
        super().__init__()
        self.make = MAKES[kind]

    def setup(self, stage):
        digits = load_digits()
        self.items = [*zip(torch.tensor(digits.images[:96, None]).float() / 16, torch.tensor(digits.target))]

    def _loader(self, items):
        return DataLoader(items, 16, collate_fn=lambda items: self.make(*map(torch.stack, zip(*items))))

    def train_dataloader(self):
        return self._loader(self.items[:64])

    def val_dataloader(self):
        return self._loader(self.items[64:80])

    def test_dataloader(self):
        return self._loader(self.items[72:])


class Net(LightningModule):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layers = kind, nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.acc = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.layers(images)

    def parts(self, batch):
        assert type(batch) is {"pair": list, "dict": dict, "three": tuple, "hot": tuple}.get(self.kind, type(batch))
        if self.kind in ("named", "held"):
            return batch.x, batch.y
        if self.kind in ("dict", "encoded", "soft"):
            images, labels, *_ = batch.values()
            return images, labels
        images, labels, *more = batch
        assert all(torch.equal(each, labels + 1000) for each in more)
        return images, labels

    def training_step(self, batch, batch_idx):
        images, labels = self.parts(batch)
        loss = binary_cross_entropy_with_logits if self.kind == "several" else cross_entropy
        return loss(self(images), labels.float() if labels.ndim == 2 else labels)

    def validation_step(self, batch, batch_idx, name="val/acc"):
        images, labels = self.parts(batch)
        logits = self(images)
        self.acc(logits, labels if labels.ndim == 1 else labels.argmax(dim=1))
        self.log(name, self.acc, batch_size=len(labels))
        return logits

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx, "test/acc")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Talks(Net):
    def test_step(self, batch, batch_idx):
        self.logger.experiment.log({"a": 1})
"""


def in_full_tier(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.full) for kind in kinds]


@pytest.fixture
def own(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_folder / "theirs.py").write_text(OWN)
    monkeypatch.syspath_prepend(in_folder)
    return in_folder


def flags_of(kind: str) -> list[str]:
    flags = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--wandb.mode=disabled", "--out=run"]
    return [*flags, "--data.class_path=theirs.Data", f"--data.kind={kind}"]


def own_module(kind: str, name: str = "Net") -> list[str]:
    return [f"--module.class_path=theirs.{name}", f"--module.kind={kind}"]


@pytest.mark.parametrize(
    "kind", ["dict", "hot", "three", *in_full_tier("pair", "encoded", "named", "held", "soft", "several")]
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
@pytest.mark.parametrize("kind", ["dict", "encoded", "three", "named", "hot"])
def test_a_classifier_takes_images_and_labels_from_any_form(own, kind):
    fit(resolve([*flags_of("pair"), *SMALL]))
    results = fit(resolve([*flags_of(kind), *SMALL, "--out=other"]))
    runs = [read_checkpoint(Path(name, "checkpoints/last.ckpt"))["state_dict"] for name in ("run", "other")]
    for name, weight in runs[0].items():
        torch.testing.assert_close(weight, runs[1][name], rtol=0, atol=1e-6 if kind == "hot" else 0)
    tables = [dict(np.load(Path(name, "test_predictions.npz"))) for name in ("run", "other")]
    for column in ("index", "label", "prediction"):
        assert tables[0][column].tolist() == tables[1][column].tolist()
    assert results["test/acc"] == (tables[0]["label"] == tables[0]["prediction"]).mean().astype(np.float32)
    assert main(["predict", "--ckpt=other", "--trust", "--out=predicted"]) == 0
    rows = [line.split(",") for line in Path("predicted/predictions.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == list(range(24))
    assert [int(row[2]) for row in rows] == tables[0]["prediction"].tolist()


@pytest.mark.parametrize("kind", ["held", "several"])
def test_a_classifier_refuses_others_in_a_line_before_its_first_step(own, capsys, kind):
    assert main(["fit", *flags_of(kind), *SMALL]) == 2
    held = {"held": "Held", "several": "torch.float32 (16, 1, 8, 8) and torch.float32 (16, 10)"}[kind]
    said = f"lightning fit: data.class_path=theirs.Data: a batch holds {held}, and ViTClassifier takes float images"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["dict", *in_full_tier("named")])
def test_labels_of_a_batch_go_by_the_names_of_the_trained_model(own, capsys, kind):
    names = list("abcdefghij")
    results = fit(resolve([*flags_of(kind), *own_module(kind), f"--data.class_names={names}"]))
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


def test_what_holds_no_pair_is_none_and_tensors_are_found_in_any_form():
    images, labels = torch.zeros(2, 1, 4, 4), torch.tensor([1, 0])
    forms = [
        images,
        (images,),
        (labels, images),
        {"image": images},
        {"image": images, "images": images, "label": labels},
    ]
    assert [as_batch(form) for form in (*forms, (images.byte(), labels), (images, labels.float()))] == [None] * 7
    nested = {"views": [images, (images, "a")], "more": {"labels": labels}, "count": 3}
    assert [tuple(part.shape) for part in tensors_in(nested)] == [(2, 1, 4, 4)] * 2 + [(2,)]
