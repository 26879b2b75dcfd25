import contextlib
import fcntl
import os
import random
import re
import struct
import termios

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from vit_lightning import Digits, ViT, ViTClassifier
from vit_lightning.training.callbacks import StepSeeds, Stopwatch, TestPredictions, TrainingBar, training_steps
from vit_lightning.training.lightning_detours import log_over_ranks


class Draws(ViTClassifier):
    def __init__(self) -> None:
        super().__init__(
            ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=8, depth=1, num_heads=1)
        )
        self.drawn: list[tuple[float, float, float]] = []

    def training_step(self, batch, batch_idx):
        self.drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
        return super().training_step(batch, batch_idx)


def fit(*callbacks, data=None, **arguments):
    module = Draws()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    run = Trainer(accelerator="cpu", callbacks=[*callbacks], **{**quiet, "max_epochs": 1, **arguments})
    log_over_ranks(run)
    run.fit(module, datamodule=data or Digits(batch_size=200))
    return run, module


def test_randomness_of_a_step_follows_seed_and_step_alone():
    draws = []
    for seed in (1, 1, 2):
        seed_everything(random.randrange(1000), verbose=False)
        draws.append(fit(StepSeeds(seed), enable_progress_bar=False)[1].drawn)
    first, again, other = draws
    assert first == again
    assert len(set(first)) == 7
    assert not set(first) & set(other)


def test_stopwatch_counts_images_and_leaves_validation_out():
    watch = Stopwatch()
    fit(watch, enable_progress_bar=False, max_epochs=2)
    assert watch.images == 2 * 1294
    assert 0 < watch.seconds < 60
    resumed = Stopwatch()
    resumed.load_state_dict(watch.state_dict())
    assert (resumed.seconds, resumed.images) == (watch.seconds, watch.images)


def test_a_terminal_gets_lightning_s_bar_and_a_line_of_each_epoch(monkeypatch):
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 200, 0, 0))
    with open(slave, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        fit(Stopwatch(), TrainingBar(), max_epochs=2)
    parts = []
    with contextlib.suppress(OSError):  # all has been read, of a terminal that is closed
        while part := os.read(master, 1 << 16):
            parts.append(part)
    os.close(master)
    drawn = re.split(r"[\r\n]+", b"".join(parts).decode())
    bar = r"Epoch 1: 100%\|.*\| 7/7 \[.*, val/acc=0\.\d+, train/acc=0\.\d+, train/loss_step=\d\.\d+\]"
    assert any(re.search(bar, text) for text in drawn), drawn
    assert sum("epoch 1/2  train loss" in text for text in drawn) == 1


def test_without_a_terminal_each_epoch_has_a_line(capsys):
    fit(Stopwatch(), TrainingBar(), max_epochs=2)
    out, err = capsys.readouterr()
    assert "\r" not in out + err, "no bar in a log"
    first, last = (line for line in out.splitlines() if line.startswith("epoch"))
    number = r"[\d.,]+"
    shown = rf"train loss {number}  val loss {number}  val accuracy +{number} %  {number} images/s"
    assert re.fullmatch(rf"epoch 1/2  {shown}  \d+:\d\d left", first)
    assert re.fullmatch(rf"epoch 2/2  {shown}", last)


class Constant(LightningModule):
    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return torch.eye(3)[batch[1]]


@pytest.mark.filterwarnings("ignore")
def test_of_several_test_loaders_there_is_no_one_table():
    """PL#10494: an interval of images of both would stand beside the accuracy of each."""
    loader = DataLoader(TensorDataset(torch.ones(6, 3, 2, 2), torch.arange(6) % 3), 4)
    for loaders, images in ([loader], 6), ([loader, loader], 0):
        predictions = TestPredictions()
        trainer = Trainer(accelerator="cpu", callbacks=[predictions], logger=False, enable_progress_bar=False)
        trainer.test(Constant(), loaders, verbose=False)
        assert len(predictions.table.get("label", ())) == images


@pytest.mark.parametrize(("kept", "resets", "right"), [(1, False, False), (1, True, True), (2, False, True)])
@pytest.mark.filterwarnings("ignore:.*workers")
def test_a_metric_that_counts_several_loaders_together_is_said(recwarn, kept, resets, right):
    """PL#18282: Lightning gives the second loader the number of both."""

    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = torch.nn.ModuleList(Accuracy("multiclass", num_classes=3) for _ in range(kept))

        def test_step(self, batch, batch_idx, dataloader_idx=0):
            metric = self.metrics[min(dataloader_idx, kept - 1)]
            if resets and batch_idx == 0:
                metric.reset()
            metric(batch[0], batch[1])
            self.log("test/acc", metric)

    labels = torch.arange(6) % 3
    loaders = [DataLoader(TensorDataset(labels, (labels + shift) % 3), 3) for shift in (0, 1)]
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    log_over_ranks(trainer)
    for _ in range(2):
        found = trainer.test(Own(), loaders, verbose=False)
    assert [one[f"test/acc/dataloader_idx_{place}"] for place, one in enumerate(found)] == [1.0, 0.0 if right else 0.5]
    said = [str(one.message) for one in recwarn if "one Metric is logged for several loaders" in str(one.message)]
    assert [text.partition(":")[0] for text in said] == ([] if right else ["test/acc"])


@pytest.mark.parametrize(("begins", "said"), [(5, 1), (0, 0)])
def test_an_average_of_nothing_that_is_measured_is_said(recwarn, begins, said):
    """PL#21724: the untrained weights are measured; here in two of three validations."""
    fit(EMAWeightAveraging(update_starting_at_step=begins), max_epochs=3, limit_train_batches=2, limit_val_batches=1)
    found = [str(one.message) for one in recwarn if "it has averaged nothing yet" in str(one.message)]
    assert [text.partition(":")[0] for text in found] == ["trainer.callbacks.EMAWeightAveraging"] * said


def test_steps_of_a_module_that_steps_by_hand_are_those_of_its_epochs():
    """PL#17958: max_steps counts each of its optimizers."""
    module = LightningModule()
    module.automatic_optimization = False
    for epochs, expected in (-1, (10, float("inf"))), (3, (10, 30)):
        trainer = Trainer(accelerator="cpu", max_epochs=epochs, max_steps=40, logger=False, enable_checkpointing=False)
        trainer.strategy.connect(module)
        assert training_steps(trainer, 10) == expected
