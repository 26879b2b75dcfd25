"""What the host waits for and launches in each step of a whole training on a GPU, counted on a machine without one.

python experiments/benchmarks/trainer_counts.py [FLAGS of lightning fit]

The training of ``lightning fit`` with its Trainer, callbacks and loggers, on the device that ``gpu_counts.py``
pretends. Counted are its crossings and eager launches, from the first callback of a step to that of the next, in steps
without a row of numbers, with one, and at the end of an epoch, validation included. Writing a checkpoint is left out,
and so are workers, W&B and mixed precision. Without flags it trains a small ViT on digits, with averaged weights.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_counts
import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from vit_lightning.commands.fit import make_run
from vit_lightning.config.resolve import resolve

DIGITS = (
    f"--config={gpu_counts.EXPERIMENTS / 'digits.yaml'}",
    *("--model.patch_size=4", "--model.emb_size=16", "--model.depth=1", "--model.num_heads=2", "--ema.decay=0.9"),
    *("--trainer.max_epochs=2", "--trainer.log_every_n_steps=4", "--trainer.gradient_clip_val=1"),
    "--optimizer.warmup_epochs=0",
)


class Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Takes any device."""


class Event:
    """An event of CUDA that has happened."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Steps(Callback):
    """Gives each kind of step a counter of its own."""

    def __init__(self, counter: gpu_counts.Counter) -> None:
        self.counter = counter
        self.steps: collections.Counter[str] = collections.Counter()
        self.crossings: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.launches: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_last = batch_idx + 1 == trainer.num_training_batches
        has_row = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        kind = "end of an epoch" if is_last else "with a row" if has_row else "without a row"
        self.steps[kind] += 1
        self.counter.crossings, self.counter.operators = self.crossings[kind], self.launches[kind]


def pretend_more(counter: gpu_counts.Counter) -> None:
    """Replaces what a Trainer asks of CUDA besides operators."""
    to = gpu_counts.OnDevice.to

    def copied(self: gpu_counts.OnDevice, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        made = to(self, *args, **kwargs)
        return made.clone() if copy and made is self else made

    def synchronize(*args: Any) -> None:
        counter.crossings[f"{gpu_counts.place()} synchronize"] += 1

    gpu_counts.OnDevice.to = copied  # type: ignore[method-assign]
    torch.cuda.Event, torch.cuda.synchronize = Event, synchronize  # type: ignore[misc, assignment]
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
    torch.cuda.mem_get_info = lambda device=None: (2**36, 2**36)
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign, assignment]


def count(flags: list[str], folder: Path) -> Steps:
    """Trains as flags say, and returns what each kind of step has waited for."""
    counter = gpu_counts.Counter()
    gpu_counts.pretend_device()
    pretend_more(counter)
    experiment, steps = resolve(flags), Steps(counter)
    strategy = SingleDeviceStrategy(gpu_counts.DEVICE, accelerator=Accelerator())
    replaced = {"strategy": strategy, "accelerator": "auto", "devices": 1, "precision": "32-true"}
    run = make_run(experiment, {**experiment.make_trainer_arguments(), **replaced}, folder)
    run.trainer.callbacks.insert(0, steps)  # type: ignore[attr-defined]
    run.trainer.save_checkpoint = lambda path: None  # type: ignore[method-assign, assignment, misc]
    with counter:
        run.trainer.fit(run.module, datamodule=experiment.data)
    return steps


def main() -> None:
    os.environ["WANDB_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as folder:
        found = count(sys.argv[1:] or list(DIGITS), Path(folder))
    print("\n| steps | number | crossings of a step | launches of a step |\n|---|---|---|---|")
    for kind, number in found.steps.items():
        crossings, launches = found.crossings[kind].total(), found.launches[kind].total()
        print(f"| {kind} | {number} | {crossings / number:.1f} | {launches / number:.1f} |")
    for kind, crossings in found.crossings.items():
        print(f"\n{kind}:")
        for place, number in crossings.most_common():
            print(f"    {number} {place}")


if __name__ == "__main__":
    main()
