"""Neighbours of the features in validation, which leave the training as it is."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from runs import SMALL
from sklearn.neighbors import KNeighborsClassifier
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning import Digits, EMAConfig, KNNProbe, RandomCrop, UserError, ViT, ViTClassifier
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.training.probes import Features

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def drawn(count: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    centres = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
    return Features(centres[labels] + 2.0 * torch.randn(count, 8, generator=generator), labels)


def test_neighbours_are_those_of_scikit_learn():
    train, val = drawn(300, 0), drawn(400, 1)
    accuracies = []
    for k in (1, 7, 300):
        known = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp(-distance / 0.1))
        accuracies.append(known.fit(train.vectors, train.labels).score(val.vectors, val.labels))
        assert KNNProbe(k, 0.1).measure(train, val, 5) == pytest.approx(accuracies[-1], abs=1e-9)


class Kept(KNNProbe):
    """Keeps what it is given."""

    def measure(self, train, val, classes):
        self.given = train, val
        return super().measure(train, val, classes)


class Seen(Callback):
    """Keeps in which validations there is a new value."""

    def __init__(self) -> None:
        self.values: list[bool] = []

    def on_validation_end(self, trainer, pl_module):
        self.values.append("val/knn_acc" in trainer.callback_metrics)


def test_features_are_those_before_the_classifier_of_images_without_augmentation():
    seed_everything(0, verbose=False)
    data = Digits(augment=[RandomCrop(padding=2)])
    vit = ViT(
        image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=1, num_heads=2, drop_path=0.5
    )
    module, probe, seen = ViTClassifier(vit, ema=EMAConfig(decay=0.5)), Kept(every_n_epochs=2, train_images=90), Seen()
    trainer = Trainer(accelerator="cpu", max_epochs=3, limit_train_batches=1, callbacks=[probe, seen], **QUIET)
    trainer.fit(module, data)
    assert seen.values == [False, False, True, True]  # of the sanity check and of three epochs
    train, val = probe.given
    assert (len(train.labels), len(val.labels)) == (90, 143)
    assert not vit.head.linear._forward_pre_hooks
    with torch.no_grad():  # the network keeps the average of its weights, which was validated
        for features, split in ((train, "train"), (val, "val")):
            images = data.dataset(split)
            tokens = vit.eval().forward_features(data.transform.normalise(images.images))[:, 0]
            away = torch.cdist(features.vectors, tokens, compute_mode="donot_use_mm_for_euclid_dist")
            distance, nearest = away.min(dim=1)
            assert distance.max() < 1e-4
            assert torch.equal(images.labels[nearest], features.labels)
            assert nearest.unique().numel() == len(nearest)


def test_a_run_is_the_same_with_a_probe_and_chooses_by_it(results, in_folder):
    flags = ["--trainer.callbacks=[KNNProbe]", "--checkpoint.monitor=val/knn_acc", "--test=false", "--out=probed"]
    probed = fit(resolve([*SMALL, *flags]))
    assert 0.3 < probed["val/knn_acc"] <= 1.0
    (row,) = (row for row in read_metrics(in_folder / "probed") if "val/acc" in row)
    assert row["val/knn_acc"] == pytest.approx(probed["val/knn_acc"])
    states = [read_checkpoint(in_folder / name / "checkpoints/last.ckpt") for name in ("out", "probed")]
    for name, value in states[0]["state_dict"].items():
        assert torch.equal(value, states[1]["state_dict"][name])
    assert states[0]["metrics"].items() <= states[1]["metrics"].items()


def test_what_cannot_be_probed_is_said():
    loader = DataLoader(TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)))
    vit = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=2, emb_size=16, depth=1, num_heads=2)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[KNNProbe()], **QUIET)
    with pytest.raises(UserError, match="KNNProbe needs data with our own loaders"):
        trainer.fit(ViTClassifier(vit), loader, loader)
    with pytest.raises(UserError, match="every_n_epochs=0 must be at least 1"):
        KNNProbe(every_n_epochs=0)
