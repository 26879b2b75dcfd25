"""Cost of the pictures of validations: epochs with them, alternating with epochs without, in one training.

Processor time of the process, with an offline W&B run; of W&B's own process, which copies the files, it is not part.
Prints milliseconds for the pictures of an epoch (median of the differences of neighbouring epochs, 95 % interval by
bootstrap) and their share of a run that has them ten times. Epochs of Ti/4 are short ones of 128 random images, whose
time is scaled to the images of a run.

    python experiments/benchmarks/pictures_cost.py [PAIRS_OF_DIGITS [PAIRS_OF_TI4]]
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from vit_lightning import Digits, ImageData, ImageFolder, RandomAffine, ViT, ViTClassifier
from vit_lightning.figures.validation_pictures import PICTURES, ValidationPictures
from vit_lightning.storage.metrics import MetricsFile
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror

DIGITS = {"image_size": 8, "patch_size": 4, "in_channels": 1, "emb_size": 64, "depth": 6, "num_heads": 4}
TI4 = {"image_size": 32, "patch_size": 4, "emb_size": 192, "depth": 12, "num_heads": 3}
RUNS = {"digits": (DIGITS, 120 * 1294, 60), "Ti/4": (TI4, 200 * 45_000, 12)}
"""Network, training images of all epochs of digits.yaml and cifar10_vit_tiny.yaml, pairs of epochs."""


class EverySecondEpoch(ValidationPictures):
    """Pictures of every second epoch."""

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.current_epoch % 2 == 1


class Clock(Callback):
    """Processor time at the start of each epoch and at the end of the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time())


def data_of(name: str, folder: Path) -> ImageData:
    """Returns the digits, or random images of 32 pixels: 128 for training and 64 for validation."""
    if name == "digits":
        return Digits(batch_size=64, augment=[RandomAffine(degrees=10, scale=(0.9, 1.1), translate=0.1)])
    random = np.random.default_rng(0)
    for split, images in {"train": 128, "val": 64, "test": 10}.items():
        for number in range(images):
            file = folder / split / str(number % 10) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
    return ImageFolder(root=folder, image_size=32, min_area=1.0, centre_share=1.0, num_workers=0, batch_size=64)


def measure(name: str, pairs: int) -> str:
    """Returns a line about one of the runs."""
    arguments, images, _ = RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = data_of(name, folder / "images")
        mode = "offline" if find_spec("wandb") else "disabled"
        mirror = WandbMirror(folder, "cost", WandbConfig(mode=mode), {})
        mirror.start()
        clock = Clock()
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2 * pairs + 2,
            logger=[MetricsFile(folder), mirror],
            callbacks=[clock, EverySecondEpoch(data, mirror)],
            default_root_dir=folder,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(ViTClassifier(ViT(num_classes=10, **arguments)), data)
        mirror.finish()
    without, with_pictures = 1000 * np.diff(clock.seconds)[2:].reshape(-1, 2).T
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(with_pictures - without, (2000, pairs)), axis=1)
    cost, epoch = float(np.median(with_pictures - without)), float(np.median(without))
    low, high = np.quantile(medians, (0.025, 0.975))
    run = epoch * images / data.image_count("train")
    share = [100 * PICTURES * value / run for value in (cost, low, high)]
    return (
        f"{name}: epoch {epoch:.0f} ms, its pictures {cost:.1f} ms ({low:.1f} to {high:.1f}), {PICTURES} of them in a "
        f"run {share[0]:.3f} % ({share[1]:.3f} to {share[2]:.3f} %), {pairs} pairs, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]] or [pairs for _, _, pairs in RUNS.values()]
    for name, pairs in zip(RUNS, given, strict=False):
        print(measure(name, pairs), flush=True)
