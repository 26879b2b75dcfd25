from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import yaml
from runs import REPOSITORY
from sklearn.metrics import f1_score, recall_score, roc_auc_score
from tensors import write_images
from torchmetrics.classification import MulticlassF1Score

from vit_lightning import ImageFolder
from vit_lightning.config.experiment import Experiment, make_data
from vit_lightning.config.resolve import resolve

DIGITS = str(REPOSITORY / "experiments" / "digits.yaml")
FIT = ["--model.patch_size=4", "--model.emb_size=16", "--model.depth=1", "--model.num_heads=2"]


def write_config(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def arguments(experiment: Experiment) -> dict[str, Any]:
    """Arguments of the network."""
    given: dict[str, Any] = experiment.config["model"]["init_args"]
    return given


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_images(tmp_path / "images" / "train" / name, 4)
    return tmp_path / "images"


def test_what_the_model_needs_to_know_flows_from_the_data(images):
    model = arguments(resolve(FIT))
    assert (model["image_size"], model["in_channels"], model["num_classes"]) == (8, 1, 10)
    flags = ["--data=ImageFolder", f"--data.root={images}", "--data.image_size=[16, 24]", "--model.patch_size=8"]
    experiment = resolve(flags)
    network = experiment.make_network()
    assert (network.image_size, network.in_channels, network.num_classes) == ((16, 24), 3, 3)
    assert isinstance(experiment.data, ImageFolder)


def test_a_resolved_configuration_is_a_page_that_resolves_to_itself(tmp_path):
    once = resolve(["--config", DIGITS, "--model.positions=sincos2d", "--trainer.max_epochs=5"]).to_yaml()
    again = resolve(["--config", write_config(tmp_path, "config.yaml", once)])
    assert again.to_yaml() == once
    assert again.config == yaml.safe_load(once)
    assert again.name == "digits"


def test_groups_with_nothing_under_them_say_nothing(tmp_path):
    text = "model:\ntrainer:\ndata:\noptimizer:\n"
    experiment = resolve(["--config", DIGITS, "--config", write_config(tmp_path, "digits.yaml", text)])
    assert experiment.to_yaml() == resolve(["--config", DIGITS]).to_yaml()


def test_what_is_made_of_a_config_leaves_it_as_it_is():
    callbacks = '--trainer.callbacks=[{"class_path": "EarlyStopping", "monitor": "val/loss"}]'
    experiment = resolve([*FIT, callbacks, '--data.augment=[{"class_path": "RandomCrop", "padding": 1}]'])
    before = experiment.to_yaml()
    experiment.make_trainer_arguments()
    experiment.make_network()
    make_data(experiment.config)
    assert experiment.to_yaml() == before


def test_a_class_has_its_own_defaults_not_those_of_the_default_class(in_folder):
    assert resolve(["--data=CIFAR10", "--model.patch_size=4"]).data.batch_size == 128  # that of Digits is 64


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("F1Score", torchmetrics.F1Score(task="multiclass", num_classes=10)),
        ("{class_path: torchmetrics.Accuracy, task: multiclass}", torchmetrics.Accuracy("multiclass", num_classes=10)),
        ("torchmetrics.classification.Precision", torchmetrics.Precision(task="multiclass", num_classes=10)),
        ("AUROC", torchmetrics.AUROC(task="multiclass", num_classes=10)),
        ("{class_path: F1Score, average: macro}", MulticlassF1Score(10, average="macro")),
        ("MulticlassF1Score", MulticlassF1Score(10)),
    ],
)
def test_a_metric_averages_as_its_class_of_torchmetrics_does(given, expected):
    (metric,) = resolve(["--config=digits", f"--metrics=[{given}]"]).metrics.values()
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    logits = torch.rand(200, 10, generator=draw) + (labels % 10 < 7)[:, None] * torch.eye(10)[labels]
    for one in (metric, expected):
        one.update(logits.softmax(dim=1), labels)
    assert float(metric.compute()) == pytest.approx(float(expected.compute()), abs=1e-7)
    macro, micro = MulticlassF1Score(10, average="macro"), MulticlassF1Score(10, average="micro")
    assert float(macro(logits, labels)) != pytest.approx(float(micro(logits, labels)), abs=1e-3)


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ("{class_path: torchmetrics.F1Score, task: binary}", "binary_f1_score", f1_score),
        ("torchmetrics.classification.BinaryRecall", "binary_recall", recall_score),
        ("{class_path: AUROC, task: binary}", "binary_auroc", roc_auc_score),
        ("AUROC", "auroc", roc_auc_score),
    ],
)
def test_a_metric_of_two_classes_is_that_of_the_second(tmp_path, given, name, expected):
    """As sklearn has it (torchmetrics#746, #1208): without binary the F1 score is the accuracy."""
    for label in ("healthy", "ill"):
        write_images(tmp_path / label, 10)
    data = ["--data=ImageFolder", f"--data.root={tmp_path}", "--data.image_size=8"]
    found = resolve([*data, *FIT, f"--metrics=[{given}]"]).metrics
    draw = torch.Generator().manual_seed(0)
    labels = (torch.rand(200, generator=draw) < 0.3).long()
    ill = 0.7 * torch.rand(200, generator=draw) + 0.3 * labels
    both = [found[name].clone(), found[name]]
    for metric in both:
        metric.update(torch.stack([1 - ill, ill], dim=1), labels)
    right = expected(labels, ill if "auroc" in name else ill > 0.5)
    assert [float(metric.compute()) for metric in both] == pytest.approx([right, right], abs=1e-6)
    assert right != pytest.approx(float(((ill > 0.5) == labels).float().mean()), abs=0.01)
