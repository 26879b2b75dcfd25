"""Cost of what is measured while a run trains: steps with a row of the Monitor, alternating with steps without.

Both kinds of step have Lightning's own row in ``metrics.jsonl`` and an offline W&B run, whose system metrics are on
throughout. Prints milliseconds a row (median of the differences of neighbouring steps, 95 % interval by bootstrap) and
its share of the steps between two rows.

    python experiments/benchmarks/monitoring.py [PAIRS_OF_DIGITS [PAIRS_OF_TI4]]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning import ViT, ViTClassifier
from vit_lightning.storage.metrics import MetricsFile
from vit_lightning.storage.wandb_logger import RunLogger, WandbConfig
from vit_lightning.training.callbacks import Stopwatch
from vit_lightning.training.monitor import Monitor

NETWORKS = {  # network, steps between two rows, pairs of steps
    "digits": (
        {"image_size": 8, "patch_size": 4, "in_channels": 1, "emb_size": 64, "depth": 6, "num_heads": 4},
        10,
        400,
    ),
    "Ti/4": ({"image_size": 32, "patch_size": 4, "emb_size": 192, "depth": 12, "num_heads": 3}, 50, 40),
}


class EverySecondStep(Monitor):
    """Monitor of every second step; keeps the time from the start of a step to the start of the next."""

    seconds: list[float]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step % 2:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:  # type: ignore[override]
        if not trainer.global_step % 2:  # it has been counted by now
            super().on_train_batch_end(trainer, *arguments)


def measure(name: str, pairs: int, accelerator: str = "cpu") -> str:
    """Returns a line about one of the networks."""
    arguments, every, _ = NETWORKS[name]
    network = ViT(num_classes=10, **arguments)
    shape = (arguments.get("in_channels", 3), arguments["image_size"], arguments["image_size"])
    batches = 2 * pairs + 21
    images = TensorDataset(torch.randn(64 * batches, *shape), torch.randint(10, (64 * batches,)))
    with tempfile.TemporaryDirectory() as folder:
        wandb = RunLogger(Path(folder), "cost", WandbConfig(mode="offline"), {})
        wandb.start()
        stopwatch = Stopwatch()
        monitor = EverySecondStep(stopwatch, None, shape)
        monitor.seconds = []
        trainer = Trainer(
            accelerator=accelerator,
            max_epochs=1,
            log_every_n_steps=1,
            logger=[MetricsFile(Path(folder)), wandb],
            callbacks=[stopwatch, monitor],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(ViTClassifier(network), DataLoader(images, batch_size=64))
        wandb.finish()
    steps = np.diff(monitor.seconds)[20:]  # step 20, the first here, has no row
    without, with_row = 1000 * steps[: 2 * pairs].reshape(-1, 2).T
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(with_row - without, (2000, len(without))), axis=1)
    cost, step = float(np.median(with_row - without)), float(np.median(without))
    low, high = np.quantile(medians, (0.025, 0.975))
    share = [100 * value / (every * step) for value in (cost, low, high)]
    return (
        f"{name}: step {step:.1f} ms, a row {cost:.2f} ms ({low:.2f} to {high:.2f}), every {every} steps "
        f"{share[0]:.2f} % ({share[1]:.2f} to {share[2]:.2f} %), {pairs} pairs"
    )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]] or [pairs for _, _, pairs in NETWORKS.values()]
    for name, pairs in zip(NETWORKS, given, strict=False):
        print(measure(name, pairs))
