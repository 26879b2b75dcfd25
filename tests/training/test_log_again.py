import traceback

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from vit_lightning import Digits, EMAConfig, HorizontalFlip, MixUp, OptimizerConfig, RandomCrop, ViT, ViTClassifier
from vit_lightning.storage.metrics import MetricsFile, json_number, read_metrics
from vit_lightning.training.callbacks import LearningRate, StepSeeds, Stopwatch, TrainingBar
from vit_lightning.training.monitor import Monitor

WAITS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal, torch.ops.aten.masked_select}
"""Operations for whose result the main thread waits on a GPU."""


class Waits(TorchDispatchMode):
    """Operations that wait for the device in steps without a row."""

    def __init__(self) -> None:
        super().__init__()
        self.watched, self.steps, self.found = False, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.watched and function.overloadpacket in WAITS:
            self.found.append(f"{function} at {traceback.extract_stack()[-3]}")
        return function(*args, **(kwargs or {}))


class Watch(Callback):
    """Watches from the beginning of a step without a row to the beginning of the next step."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        logs = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        self.waits.watched = not logs and batch_idx + 1 < trainer.num_training_batches
        self.waits.steps += self.waits.watched


def test_a_step_without_a_row_waits_for_nothing_and_rows_are_those_of_their_steps(tmp_path):
    waits, stopwatch = Waits(), Stopwatch()
    own = [Watch(waits), StepSeeds(0), LearningRate(), stopwatch, Monitor(stopwatch, 1, (1, 8, 8))]
    network = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=1, num_heads=2)
    module = ViTClassifier(network, optimizer=OptimizerConfig(warmup_epochs=1), ema=EMAConfig(decay=0.9))
    kept = []
    step = module.training_step
    module.training_step = lambda batch, batch_idx: kept.append(step(batch, batch_idx)) or kept[-1]
    few = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 1, "log_every_n_steps": 4}
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False}
    logging = {"callbacks": [*own, TrainingBar()], "logger": MetricsFile(tmp_path)}
    trainer = Trainer(gradient_clip_val=1.0, **few, **quiet, **logging)
    with waits:
        trainer.fit(module, Digits(batch_size=20, augment=[RandomCrop(1), HorizontalFlip()], mixing=[MixUp()]))
        assert waits.steps == 8
        assert not waits.found
        waits.watched = True
        torch.ones(1).item()
        assert len(waits.found) == 1
    rows = [row for row in read_metrics(tmp_path) if "train/loss_step" in row]
    assert [row["step"] for row in rows] == [3, 7, 11]
    assert [row["train/loss_step"] for row in rows] == [json_number(kept[row["step"]]) for row in rows]
    (first, second) = (row for row in read_metrics(tmp_path) if "train/loss" in row)
    assert [first["train/loss"], second["train/loss"]] == pytest.approx(
        [float(torch.stack(kept[start : start + 6]).mean()) for start in (0, 6)], rel=1e-6
    )
