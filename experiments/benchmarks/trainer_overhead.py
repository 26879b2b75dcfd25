"""The whole Trainer of ``lightning fit`` beside the bare step: how much of the step's speed a run keeps.

    python experiments/benchmarks/trainer_overhead.py [--seconds 80] [--threads 2] [--profile]

A real run (our data module, metrics, bar in a terminal, metrics.jsonl, offline W&B, step seeds, stopwatch, monitor,
divergence guard, checkpoints) and a bare step (forward, loss, backward, optimizer on a ready batch) of a network of the
same sizes are interleaved in one process: where a batch of the run begins, its first callback takes one bare step. A
round is the time from the end of one bare step to the beginning of the next, all of the Trainer's loop with all rows,
ends of epochs and checkpoints, beside the mean of the two bare steps. Every second batch comes from the data module: it
is loaded from memory, cropped, flipped and normalised within its round. The others are ready, as the bare step's is, so
that these rounds have the Trainer's own cost alone. Validations, beside which last.ckpt is written, are left out of the
rounds: after each of them comes bare inference of as many batches.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import json
import os
import pstats
import pty
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from measuring import BesideTrainer, Step, median, training_step
from PIL import Image

from vit_lightning import ViT
from vit_lightning.commands.console import quiet
from vit_lightning.commands.fit import make_run
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import Batch
from vit_lightning.storage.environment import describe_environment
from vit_lightning.training.optim import OptimizerConfig, optimizer_and_schedule
from vit_lightning.training.resources import keep_freed_memory

BATCH, BATCHES_OF_VALIDATION, CLASSES, SIDE = 128, 10, 10, 16
BATCHES_OF_EPOCH = 51
"""Odd, so that ends of epochs, rows and checkpoints fall to rounds of both kinds."""
TRAINER, BARE = "Trainer", "bare step"
READY, LOADED = "Trainer on ready batches", "Trainer with loading and augmentation"
WARM_UP = 20
"""Rounds that do not count."""
CONFIG = """
model: {patch_size: 4, emb_size: 64, depth: 6, num_heads: 4}
data:
  class_path: vit_lightning.ImageFolder
  init_args:
    root: images
    image_size: 16
    min_area: 1.0
    centre_share: 1.0
    batch_size: 128
    augment:
      - {class_path: vit_lightning.RandomCrop, init_args: {padding: 2}}
      - {class_path: vit_lightning.HorizontalFlip}
wandb: {mode: offline}
pictures_every_n_epochs: 0
trainer: {accelerator: cpu, log_every_n_steps: 51, max_epochs: 1000}
"""


def write_images(root: Path) -> None:
    """Writes random images to train on and for validation."""
    draw = np.random.default_rng(0)
    for split, count in (
        ("train", BATCH * BATCHES_OF_EPOCH),
        ("val", BATCH * BATCHES_OF_VALIDATION),
        ("test", CLASSES),
    ):
        for label in range(CLASSES):
            (root / split / str(label)).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / str(number % CLASSES) / f"{number}.bmp")


class EverySecondReady:
    """Batches of a training loader, of which every second one is replaced by one that is ready."""

    def __init__(self, data: Any) -> None:
        self.loader = data.train_dataloader()
        batch = data.model_input(next(iter(self.loader)), 0)
        self.count = 0
        self.ready = batch.images, batch.labels  # as from a loader of the user's own: passed on as it is

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        loaded = iter(self.loader)
        for _ in range(len(self)):
            self.count += 1
            yield self.ready if self.count % 2 else next(loaded)


class TakesTurns(BesideTrainer):
    """Callback that takes a bare step at the beginning of each batch, and keeps the seconds of both."""

    def __init__(self, seconds: float, profiler: cProfile.Profile | None) -> None:
        until = time.monotonic() + seconds
        super().__init__(TRAINER, self._make_step, lambda rounds: time.monotonic() > until)
        self.network = ViT(image_size=SIDE, patch_size=4, emb_size=64, depth=6, num_heads=4, num_classes=CLASSES)
        self.profiler = profiler
        self.is_ready: list[bool] = []
        self.pass_of_trainer: list[float] = []
        self.pass_alone: list[float] = []

    def _make_step(self, trainer: Trainer, batch: Any) -> dict[str, Step]:
        images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))
        optimizer, _ = optimizer_and_schedule(
            self.network, OptimizerConfig(), total_steps=10_000, steps_per_epoch=BATCHES_OF_EPOCH
        )
        return {BARE: training_step(lambda: F.cross_entropy(self.network(images), labels), optimizer)}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.profiler is not None:
            self.profiler.disable()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if len(self.rounds.seconds[TRAINER]) > len(self.is_ready):
            self.is_ready.append(not isinstance(batch, Batch))
        if self.profiler is not None and len(self.is_ready) > WARM_UP:
            self.profiler.enable()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.pass_of_trainer.append(time.perf_counter() - self._began)
        batches = torch.randn(BATCHES_OF_VALIDATION, BATCH, 3, SIDE, SIDE)
        self.network.eval()
        began = time.perf_counter()
        with torch.inference_mode():
            for images in batches:
                self.network(images)
        now = time.perf_counter()
        self.network.train()
        self.pass_alone.append(now - began)
        self.left += now - self._began


def in_a_terminal() -> None:
    """Makes stderr a terminal, of which another process reads what is written; errors still go to the first one."""
    sys.excepthook = lambda *fault: traceback.print_exception(*fault, file=sys.__stderr__)
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    sys.stderr = os.fdopen(writing, "w")
    subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80.0, help="how long it trains; the start comes before it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    git = describe_environment()["git"]
    commit = (git["package"] or git["working folder"] or {}).get("commit")
    torch.set_num_threads(args.threads)
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_images(Path("images"))
        Path("c.yaml").write_text(CONFIG, encoding="utf-8")
        os.environ.pop("WANDB_MODE", None)
        experiment = resolve(["--config=c.yaml"])
        keep_freed_memory()
        Path("run").mkdir()
        run = make_run(experiment, experiment.make_trainer_arguments(), Path("run"))
        batches = EverySecondReady(experiment.data)
        experiment.data.train_dataloader = lambda: batches  # type: ignore
        in_a_terminal()
        turns = TakesTurns(args.seconds, cProfile.Profile() if args.profile else None)
        run.trainer.callbacks.insert(0, turns)  # type: ignore[attr-defined]
        run.wandb.start()
        run.trainer.fit(run.module, datamodule=experiment.data)
        run.wandb.finish()
        os.chdir("/")
    if turns.profiler is not None:
        turns.profiler.disable()
        print(f"{len(turns.is_ready) - WARM_UP} steps")
        pstats.Stats(turns.profiler, stream=sys.stdout).sort_stats("tottime").print_stats(70)
        pstats.Stats(turns.profiler, stream=sys.stdout).sort_stats("cumtime").print_stats(110)
        return
    if {*turns.is_ready[WARM_UP:]} != {True, False}:
        raise SystemExit(f"{len(turns.is_ready)} rounds in {args.seconds:g} s: give more --seconds")
    seconds = turns.rounds.seconds
    of_trainer, bare = np.array(seconds[TRAINER][WARM_UP:]), np.array(seconds[BARE][WARM_UP - 1 :])
    alone, is_ready = (bare[:-1] + bare[1:]) / 2, np.array(turns.is_ready[WARM_UP:])
    passes = [bare / whole for bare, whole in zip(turns.pass_alone, turns.pass_of_trainer, strict=True)]
    table = {
        READY: compare(of_trainer[is_ready], alone[is_ready]),
        LOADED: compare(of_trainer[~is_ready], alone[~is_ready]),
        "threads": args.threads,
        "validation, ms": 1000 * float(np.median(turns.pass_of_trainer)),
        "the same batches alone, ms": 1000 * float(np.median(turns.pass_alone)),
        "validation, passes": len(passes),
        "validation, median of the passes": list(median(passes)),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "commit": commit,
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "experiments/benchmarks/trainer_overhead.py", *sys.argv[1:]]),
    }
    print(json.dumps(table, indent=2))
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    args.out.write_text(json.dumps(known | {processor(): table}, indent=2) + "\n", encoding="utf-8")


def compare(of_trainer: Any, alone: Any) -> dict[str, Any]:
    """Returns the speed of the Trainer, over that of the bare steps of the same rounds."""
    return {
        "rounds": len(alone),
        "bare step, ms": 1000 * float(np.median(alone)),
        "step of the Trainer, ms": 1000 * float(np.median(of_trainer)),
        "speed, median of the rounds": list(median(alone / of_trainer)),
        "speed, all rounds together": float(alone.sum() / of_trainer.sum()),
    }


def processor() -> str:
    """Returns the name of the processor and the number of its cores for this process."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
