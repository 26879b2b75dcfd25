"""One row of the table is all that a new metric takes."""

import pytest
import torch
from lightning.pytorch import Trainer
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from vit_lightning import Digits, ViT, ViTClassifier
from vit_lightning.metric_facts import METRICS, Accuracy, MetricFacts, goal_of, metric_names
from vit_lightning.report.units import unit_of


def test_a_metric_is_added_by_one_row(monkeypatch):
    facts = {"goal": "maximize", "label": "macro F1", "percent": True, "stages": ("val", "test")}
    row = MetricFacts(lambda classes: MulticlassF1Score(classes, average="macro"), **facts)
    monkeypatch.setitem(METRICS, "f1", row)
    network = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=1, num_heads=2)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (results,) = trainer.test(ViTClassifier(network), Digits(), verbose=False)
    assert 0.0 <= results["test/f1"] <= 1.0
    assert [name for name in metric_names("train", "val", "test") if name.endswith("/f1")] == ["val/f1", "test/f1"]
    assert unit_of("test/f1") == unit_of("test/acc")


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("test/acc", "maximize"),
        ("test/ece", "minimize"),
        ("test/shifted/ece", "minimize"),
        ("val_accuracy", "maximize"),
        ("val_loss/dataloader_idx_0", "minimize"),
        ("val_neg_log_loss", None),
        ("mine", None),
    ],
)
def test_direction_comes_from_the_table_or_from_a_name_that_tells(name, goal):
    assert goal_of(name) == goal


def test_top_5_needs_more_than_five_classes():
    assert metric_names("val", classes=5) == ["val/loss", "val/acc"]
    assert metric_names("val", classes=6) == ["val/loss", "val/acc", "val/acc5"]


@pytest.mark.parametrize("classes", [2, 10])
def test_accuracy_counts_as_torchmetrics_does(classes):
    ours, theirs = Accuracy(), MulticlassAccuracy(classes, average="micro", validate_args=False)
    draw = torch.Generator().manual_seed(0)
    for images in (7, 1, 64):
        # of three levels, so that classes are tied; -100 is a label without a class
        probabilities = torch.randint(3, (images, classes), generator=draw).float()
        labels = torch.randint(classes, (images,), generator=draw).masked_fill(probabilities[:, 0] == 2, -100)
        for metric in (ours, theirs):
            metric.update(probabilities, labels)
    assert ours.compute() == theirs.compute()


def test_an_accuracy_of_one_hot_labels_is_refused_and_not_that_of_other_images():
    """As many images as classes: each label would be compared with all predictions, 300 % right."""
    with pytest.raises(AssertionError, match=r"labels have shape \(4, 4\), not \(b,\)"):
        Accuracy().update(torch.eye(4), torch.eye(4))
