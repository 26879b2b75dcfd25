"""Equal time: how long a step of each arm takes, timed in turns before the first run, and its steps in that time."""

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from vit_lightning.ablation.claims import create_once
from vit_lightning.ablation.plan import Plan
from vit_lightning.commands.console import quiet
from vit_lightning.commands.module import compile_chosen, make_module
from vit_lightning.commands.session import chosen_matmul, make_trainer, own_faults
from vit_lightning.config.experiment import Experiment
from vit_lightning.training.callbacks import StepSeeds, Stopwatch, training_steps
from vit_lightning.training.lightning_detours import trained_steps

ROUNDS, WARM_UP = 5, 5
"""Times that all arms take turns, and steps of each turn before those that are timed."""
SECONDS = 2.0
"""Training that is timed in a turn."""


class Timed(Exception):
    """End of a training whose steps have been timed."""


class Timer(Callback):
    """Callback that times steps of a training and then ends it; begins with what the whole training would take."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.began, self.seconds = watch, (0.0, 0), math.nan
        self.steps, self.per_epoch, self.batches, self.validations = 0, 1.0, 1, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches, every = int(trainer.num_training_batches), trainer.check_val_every_n_epoch
        self.per_epoch, steps = training_steps(trainer, self.batches)
        self.steps, between = trainer.max_steps if math.isinf(steps) else int(steps), trainer.val_check_batch
        epochs, in_epoch = self.steps / self.per_epoch, self.batches / between if between else 0.0
        self.validations = int(epochs * in_epoch if every is None else int(epochs / every) * int(in_epoch))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trained_steps(trainer) <= min(WARM_UP, self.steps // 2):
            self.began = self._now(trainer), trained_steps(trainer)
        elif self.watch.training_seconds - self.began[0] >= SECONDS:
            self.on_train_end(trainer, trainer.lightning_module)
            raise Timed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = (self._now(trainer) - self.began[0]) / max(1, trained_steps(trainer) - self.began[1])

    def _now(self, trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return self.watch.training_seconds


def time_arms(plan: Plan, bases: Mapping[str, str], path: Path) -> None:
    """Times all arms, and keeps for each the cost of a step and the options with which it takes its baseline's time.

    Args:
        plan: the plan.
        bases: arm whose time each arm gets.
        path: file for it, which the first process writes.
    """
    quiet()
    experiments, timers = plan.experiments, dict[str, list[Timer]]()
    modules = {arm: make_module(experiment) for arm, experiment in experiments.items()}
    for turn in range(ROUNDS):
        for arm in [*experiments][:: (-1) ** turn]:
            timers.setdefault(arm, []).append(_time(experiments[arm], modules[arm], path.parent, is_first=not turn))
    found = {}
    for arm, base in bases.items():
        turns = zip(timers[arm], timers[base], strict=True)
        ratio = statistics.median(one.seconds / other.seconds for one, other in turns)
        own, whole = timers[arm][0], timers[base][0]
        options = _options(own, whole.steps / ratio, whole.validations) if arm != base else {}
        steps = options.get("trainer.max_steps", whole.steps)
        found[arm] = {"base": base, "ratio": ratio, "steps": steps, "base_steps": whole.steps, "options": options}
    create_once(path, json.dumps(found, indent=2) + "\n")


def _time(experiment: Experiment, module: LightningModule, folder: Path, *, is_first: bool) -> Timer:
    """Trains a module for some steps."""
    seed_everything(experiment.seed, verbose=False)
    timer = Timer(Stopwatch())
    off = {"logger": False, "limit_val_batches": 0, "num_sanity_val_steps": 0, "enable_progress_bar": False}
    arguments = experiment.make_trainer_arguments(off)
    own = [StepSeeds(experiment.seed), timer.watch, timer]
    trainer = make_trainer(arguments, folder, own, [])
    if is_first:
        compile_chosen(module, experiment, trainer)
    with contextlib.suppress(Timed), own_faults(None), chosen_matmul(experiment):
        trainer.fit(module, datamodule=experiment.data.for_trainer)
    return timer


def _options(own: Timer, steps: float, validations: int) -> dict[str, Any]:
    """Returns the options of a training of so many steps that ends with a validation, about as many as another has."""
    most = max(1, round(steps))
    if validations < 1:
        return {"trainer.max_epochs": -1, "trainer.max_steps": most}
    counts = range(math.ceil(0.5 * min(validations, most)), math.floor(1.25 * min(validations, most)) + 1)
    count = min(counts, key=lambda n: (abs(n * max(1, round(steps / n)) - steps), abs(n - validations)))
    between = max(1, round(steps / count))
    batches = {
        "trainer.check_val_every_n_epoch": None,
        "trainer.val_check_interval": int(between * own.batches / own.per_epoch),
    }
    return {"trainer.max_epochs": -1, "trainer.max_steps": count * between, **batches}
