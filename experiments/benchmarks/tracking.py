"""Cost of all that a run measures and sends while it trains: with and without, in turn, in one training of the digits.

    OMP_NUM_THREADS=1 python experiments/benchmarks/tracking.py [TURNS]

Steps in turn have nothing but Lightning's row in ``metrics.jsonl``, or a row of the Monitor too, both in W&B
(offline). Ends of epochs, from the start of their validation to the first batch of the next epoch, in turn have
nothing; their rows in W&B; also pictures. They come in random order. Epochs are short, so that there are many ends,
and none writes a best checkpoint, which only some would. Prints the processor time of each, with all threads of the
process (median of the differences within a turn, 95 % interval by bootstrap over them), and what a run of
``digits.yaml`` has of them. W&B's own process is not in it, nor are the start and the end of a run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_lightning.commands.fit import make_run
from vit_lightning.config.resolve import resolve
from vit_lightning.figures.validation_pictures import ValidationPictures
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.monitor import Monitor

OF_STEP, OF_END = ("nothing", "row"), ("nothing", "rows in W&B", "pictures")
EPOCHS, STEPS = 120, 21
"""Epochs of ``digits.yaml``, and steps of each."""
PICTURES = EPOCHS.bit_length() + 1
"""Epochs with pictures: 1, 2, 4, 8, ..., and the last."""
STEPS_HERE = 6
"""Steps of an epoch of the benchmark."""
EVERY = {"as in digits.yaml": 10, "by default": 50}
"""Steps between two rows."""

Found = dict[str, np.ndarray[Any, Any]]
"""Seconds (n,) by kind; the values at a position belong together."""


class Turns(Callback):
    """Callback that gives each step and each end of an epoch its kind, and keeps its processor time."""

    def __init__(self, wandb: Any) -> None:
        self.draw = np.random.default_rng(0)
        self.next: dict[tuple[str, ...], list[str]] = {OF_STEP: [], OF_END: []}
        self.kind, self.since = "nothing", 0.0
        self.seconds: dict[tuple[str, ...], list[tuple[str, float]]] = {OF_STEP: [], OF_END: []}
        self.kinds = OF_STEP
        self.log_metrics = wandb.log_metrics
        wandb.log_metrics = lambda *given, **named: self.kind != "nothing" and self.log_metrics(*given, **named)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        of = {type(callback): callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
        self.monitor, self.pictures = of[Monitor], of[ValidationPictures]
        of[Checkpoints]._save_best = lambda trainer: None  # else some ends would write a file, and others none

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin(OF_STEP)
        for name in ("on_before_optimizer_step", "on_train_batch_end"):
            method = getattr(Monitor, name).__get__(self.monitor) if self.kind == "row" else lambda *_: None
            setattr(self.monitor, name, method)
        self.since = time.process_time()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._begin(OF_END)
        self.pictures.every_n_epochs = int(self.kind == "pictures")
        self.since = time.process_time()

    def _begin(self, kinds: tuple[str, ...]) -> None:
        """Keeps the time of what ends here, and draws the kind of what begins."""
        if self.since:
            self.seconds[self.kinds].append((self.kind, time.process_time() - self.since))
        self.kinds = kinds
        if not self.next[kinds]:
            self.next[kinds] = self.draw.permutation(kinds).tolist()
        self.kind = self.next[kinds].pop()

    def found(self, kinds: tuple[str, ...]) -> Found:
        """Returns the seconds of whole turns, but for the first ones, which warm up."""
        whole = self.seconds[kinds][len(kinds) : len(self.seconds[kinds]) // len(kinds) * len(kinds)]
        return {kind: np.array([seconds for name, seconds in whole if name == kind]) for kind in kinds}


def measure(turns_of: int) -> tuple[Found, Found]:
    """Returns the processor time of steps and of ends of epochs."""
    flags = [
        "--config=digits",
        "--trainer.accelerator=cpu",
        "--wandb.mode=offline",
        "--trainer.enable_progress_bar=false",
    ]
    lengths = {"max_epochs": 3 * turns_of + 4, "limit_train_batches": STEPS_HERE, "log_every_n_steps": 1}
    experiment = resolve([*flags, *(f"--trainer.{name}={value}" for name, value in lengths.items())])
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(experiment, experiment.make_trainer_arguments(), Path(folder))
        run.wandb.start()
        turns = Turns(run.wandb)
        run.trainer.callbacks.insert(0, turns)  # type: ignore[attr-defined]
        run.trainer.fit(run.module, datamodule=experiment.data)
        run.wandb.finish()
    return turns.found(OF_STEP), turns.found(OF_END)


def cost(found: Found, kind: str, base: str = "nothing") -> float:
    """Returns the median of the differences of two kinds in seconds."""
    return float(np.median(found[kind] - found[base]))


def share(steps: Found, ends: Found, every: int) -> float:
    """Returns what all defaults cost a run, as a share of the run without."""
    count = EPOCHS * STEPS
    defaults = count / every * cost(steps, "row") + EPOCHS * cost(ends, "rows in W&B")
    defaults += PICTURES * cost(ends, "pictures", "rows in W&B")
    run = EPOCHS * (STEPS * np.median(steps["nothing"]) + np.median(ends["nothing"]))
    return float(defaults / run)


def drawn(found: Found, draw: np.random.Generator) -> Found:
    """Returns as many turns, drawn with replacement."""
    number = len(found["nothing"])
    chosen = draw.integers(0, number, number)
    return {kind: seconds[chosen] for kind, seconds in found.items()}


if __name__ == "__main__":
    both = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    draw = np.random.default_rng(0)
    again = [tuple(drawn(found, draw) for found in both) for _ in range(2000)]
    for number, (name, kinds) in enumerate({"step": OF_STEP, "end of an epoch": OF_END}.items()):
        found = both[number]
        print(f"{name}: {1000 * np.median(found['nothing']):.1f} ms, {len(found['nothing'])} turns")
        for kind in kinds[1:]:
            low, high = np.quantile([cost(part[number], kind) for part in again], (0.025, 0.975))
            print(f"  {kind}: {1000 * cost(found, kind):.2f} ms more ({1000 * low:.2f} to {1000 * high:.2f})")
    for name, every in EVERY.items():
        low, high = np.quantile([share(*part, every) for part in again], (0.025, 0.975))
        found_share = 100 * share(*both, every)
        print(f"a row in {every} steps ({name}): {found_share:.2f} % ({100 * low:.2f} to {100 * high:.2f} %)")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
