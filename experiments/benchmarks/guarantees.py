"""What a step costs with all that makes a run exact and safe, against a plain Lightning run of the same model.

python experiments/benchmarks/guarantees.py [--rounds 300] [--steps 4] [--threads 1]

Two processes train the model of experiments/digits.yaml, one with everything that ``lightning fit`` adds (order and
augmentation from hashes, seeds for each step, the check for numbers that are not finite, checkpoints, signals, rows on
disk at once), one with Lightning's own (shuffling DataLoader, global random numbers, CSVLogger). Only one of them runs
at any moment: in each round both take ``--steps`` steps, in an order drawn anew. Writing checkpoints is timed apart.
Processor time is what counts on a machine that has other work too; set OMP_WAIT_POLICY=PASSIVE with more threads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning.commands.console import quiet
from vit_lightning.commands.fit import make_run
from vit_lightning.commands.module import make_module
from vit_lightning.config.resolve import resolve
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.training.callbacks import LearningRate, Stopwatch

PAGE = Path(__file__).parents[1] / "digits.yaml"
WARMUP = 30


class Baton(Callback):
    """Trains only when it is told to, and tells how long its steps took, and the checkpoints among them."""

    def __init__(self, parent: Connection, steps: int) -> None:
        self.parent, self.steps = parent, steps
        self.left = 0
        self.saving, self.started = np.zeros(2), np.zeros(2)

    def on_train_start(self, trainer, pl_module):
        save = trainer.save_checkpoint

        def timed(*arguments, **keywords):
            began = np.array([time.perf_counter(), time.process_time()])
            save(*arguments, **keywords)
            self.saving = self.saving + np.array([time.perf_counter(), time.process_time()]) - began

        trainer.save_checkpoint = timed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.left == 0:
            if self.started.any():
                now = np.array([time.perf_counter(), time.process_time()])
                self.parent.send((now - self.started, self.saving))
            if self.parent.recv() == "stop":
                trainer.should_stop = True
                raise SystemExit
            self.left, self.saving = self.steps, np.zeros(2)
            self.started = np.array([time.perf_counter(), time.process_time()])
        self.left -= 1


class PlainDigits(ImageData):
    """The same images and augmentation with an order and random numbers from torch's global state."""

    def __init__(self, data: ImageData) -> None:
        super().__init__(batch_size=data.batch_size, num_workers=0, split_seed=0, augment=data.augment)
        self.data, self.mean, self.std = data, data.mean, data.std
        self.in_channels = data.in_channels

    image_size = property(lambda self: self.data.image_size)
    class_names = property(lambda self: self.data.class_names)

    def make_dataset(self, split):
        return self.data.dataset(split)

    def train_dataloader(self):
        images = self.dataset("train")
        dataset = TensorDataset(images.images, images.labels, torch.arange(len(images.labels)))
        return DataLoader(dataset, self.batch_size, shuffle=True, collate_fn=_collate)


def _collate(rows):
    images, labels, indices = (torch.stack(column) for column in zip(*rows, strict=True))
    return Batch(images, labels, indices, torch.randint(2**62, (len(rows),)))


def train(guaranteed: bool, parent: Connection, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    quiet()
    flags = ["--trainer.max_epochs=100000", "--trainer.limit_val_batches=0", "--wandb.mode=disabled"]
    experiment = resolve(["--config", str(PAGE), *flags, "--trainer.enable_progress_bar=false"])
    baton = Baton(parent, steps)
    with tempfile.TemporaryDirectory() as place:
        if guaranteed:
            run = make_run(experiment, experiment.make_trainer_arguments({"callbacks": [baton]}), Path(place))
            trainer, module, data = run.trainer, run.module, experiment.data
        else:
            module, data = make_module(experiment), PlainDigits(experiment.data)
            trainer = Trainer(
                max_epochs=100_000,
                limit_val_batches=0,
                callbacks=[LearningRate(), Stopwatch(), baton],
                logger=CSVLogger(place),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                gradient_clip_val=experiment.trainer["gradient_clip_val"],
            )
        trainer.fit(module, datamodule=data)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 300), ("steps", 4), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    context, draw = multiprocessing.get_context("spawn"), random.Random(0)
    ends, processes = {}, []
    for guaranteed in (True, False):
        ends[guaranteed], child = context.Pipe()
        processes.append(context.Process(target=train, args=(guaranteed, child, asked.steps, asked.threads)))
        processes[-1].start()
    seconds: dict[bool, list[np.ndarray]] = {True: [], False: []}
    saving: list[np.ndarray] = []
    for number in range(WARMUP + asked.rounds):
        for guaranteed in draw.sample([True, False], 2):
            ends[guaranteed].send("go")
            total, saved = ends[guaranteed].recv()
            if number >= WARMUP:
                seconds[guaranteed].append((total - saved) / asked.steps)
                saving += [saved] if saved.any() else []
    for end in ends.values():
        end.send("stop")
    for process in processes:
        process.join()
    report(seconds, saving, asked)


def report(seconds: dict[bool, list[np.ndarray]], saving: list[np.ndarray], asked: argparse.Namespace) -> None:
    own, plain = 1e3 * np.array(seconds[True]), 1e3 * np.array(seconds[False])
    picks = np.random.default_rng(0).integers(0, len(own), (10_000, len(own)))
    print(f"{asked.rounds} rounds of {asked.steps} steps each, threads: {asked.threads}, torch {torch.__version__}")
    for kind, name in enumerate(("wall clock", "processor time")):
        a, b = own[:, kind], plain[:, kind]
        low, high = np.quantile(np.median((a / b)[picks], axis=1), [0.025, 0.975])
        saved = 1e3 * np.median(np.array(saving)[:, kind]) if saving else 0.0
        print(
            f"{name}: a step {np.median(a):.3f} ms with, {np.median(b):.3f} ms without; ratio (median of rounds) "
            f"{np.median(a / b):.4f}, 95 % {low:.4f} to {high:.4f} (bootstrap); a checkpoint {saved:.1f} ms, apart"
        )


if __name__ == "__main__":
    main()
