"""Learning rates of Compact Transformers' scripts, ``examples/main.py`` and timm's, and their test of each epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def learning_rate(epoch: int, epochs: int, warmup: int = 5) -> float:
    """Returns the factor of lr in an epoch: 1/5, 1/4, 1/3, 1/2, 1 in the warm-up, then half a cosine.

    The first epoch after the warm-up has a factor of 1 too; the last one of 200 has 0.000065.

    Args:
        epoch: epochs that are completed.
        epochs: epochs of the training.
        warmup: epochs of the warm-up.
    """
    if epoch < warmup:
        return 1.0 / (warmup - epoch)
    return 0.5 * (1.0 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def timm_learning_rate(epoch: int, epochs: int, warmup: int, cooldown: int, first: float, least: float) -> float:
    """Returns the factor of lr in an epoch of timm's training script, whose cosine spans the warm-up too.

    Args:
        epoch: epochs that are completed.
        epochs: epochs of the training.
        warmup: epochs of the linear warm-up.
        cooldown: epochs at the end, at ``least``.
        first: factor in the first epoch.
        least: factor at the end.
    """
    if epoch < warmup:
        return first + (1.0 - first) * epoch / warmup
    progress = min(1.0, epoch / max(1, epochs - cooldown))
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * progress))


class TestCurve(Callback):
    """Callback that logs ``curve/test_acc``, of which the authors report the largest number; here it chooses nothing.

    Args:
        every_n_epochs: epochs between two tests.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        self.every_n_epochs = every_n_epochs

    @torch.inference_mode()
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        count = data.image_count("test")
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        right = torch.zeros((), dtype=torch.int64, device=pl_module.device)
        pl_module.eval()
        for batch in data.plain_batches("test", torch.arange(count)):
            batch = trainer.strategy.batch_to_device(batch)  # normalised by the hooks of the data
            with trainer.precision_plugin.val_step_context():
                right += (pl_module(batch.images).argmax(dim=1) == batch.labels).sum()
        pl_module.train()
        pl_module.log("curve/test_acc", right / count)
