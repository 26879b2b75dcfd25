"""The forecast of an ablation: what it can show by the number of its test images, and its time by a few timed steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_lightning.ablation.attempts import FORK, with_shared_data
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.commands.console import counted
from vit_lightning.commands.module import make_module
from vit_lightning.commands.session import make_trainer
from vit_lightning.commands.tune import plain_steps
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.splits import Split
from vit_lightning.report.forecast import (
    Spread,
    assumed_spread,
    forecast_sentences,
    known_accuracy,
    make_outlook,
    measured_spread,
)
from vit_lightning.report.study import Study
from vit_lightning.report.wording import show_time
from vit_lightning.signals import die_with, obey_parent
from vit_lightning.training.memory import keep_freed_memory

WARM_UP, MOST, MOMENT = 2, 20, 0.5
"""Steps that are not timed, most steps, and seconds after which no further one is."""
PATIENCE = 60.0
"""Seconds that the timing of an arm may take."""


def forecast_lines(plan: Plan, ledger: Ledger, workers: int, devices: list[str] | None, *, timed: bool) -> list[str]:
    """Describes what an ablation can show, its runs and its time.

    Args:
        plan: its plan.
        ledger: its ledger, which may not have begun.
        workers: runs at a time.
        devices: ids of GPUs that runs are spread over; None on a CPU.
        timed: whether steps of arms that have not run yet are timed, as where they are going to run on this machine.
    """
    shared = with_shared_data(plan.experiments)
    study = ledger.study()
    spread = spread_of(study, shared[plan.baseline])
    seconds = {arm: ledger.expected_seconds(Planned(arm, plan.seeds[0])) for arm in plan.arms}
    if timed and None in seconds.values():
        seconds |= time_arms(shared, ledger.facts["threads"], workers, devices)
        ledger.forecast = seconds
    known = [value for value in seconds.values() if value is not None]
    each = sum(known) / len(known) / workers if known else None
    if spread is None:
        lines = [f"what {plan.compare.metric} can show is said after three pairs of runs"]
        lines += [f"a run takes about {show_time(each * workers)}"] if each is not None else []
    else:
        lines = forecast_sentences(make_outlook(plan.compare, len(plan.arms), spread), each)
    tuning = [] if study.tuning is None else [trial for trial in study.tuning.trials if trial.state == "missing"]
    if tuning and each is not None:
        lines.append(f"tuning before that: {counted(len(tuning), 'run')}, {show_time(each * len(tuning))}")
    return [f"  {line}" for line in lines]


def spread_of(study: Study, experiment: Experiment) -> Spread | None:
    """Returns the spread of differences by the pairs of runs so far, else as the plan assumes it."""
    return measured_spread(study) or assumed_spread(study.compare, count_test_images(experiment), known_accuracy(study))


def count_test_images(experiment: Experiment) -> int | None:
    """Returns the number of images that a run is tested on; None if only its loaders know."""
    data, limit = experiment.data, experiment.trainer["limit_test_batches"]
    if not data.own_loaders:
        return None
    count = data.image_count("test")
    if limit is None:
        return count
    batches = limit if isinstance(limit, int) else math.floor(limit * math.ceil(count / data.batch_size))
    return min(count, batches * data.batch_size)


def time_arms(
    experiments: Mapping[str, Experiment], threads: int, workers: int, devices: list[str] | None
) -> dict[str, float | None]:
    """Returns the expected seconds of a run of each arm, by a few steps beside as many others as runs will have.

    Each arm has a process of its own, as this one must start no threads and no CUDA. None where timing fails; then runs
    will fail too, and say why.
    """
    found: dict[str, float | None] = {}
    arms = list(experiments)
    for first in range(0, len(arms), workers):
        timed = []
        for place, arm in enumerate(arms[first : first + workers]):
            receiver, sender = FORK.Pipe(duplex=False)
            visible = None if devices is None else devices[place % len(devices)]
            process = FORK.Process(target=_time, args=(experiments[arm], threads, visible, os.getpid(), sender))
            process.start()
            sender.close()
            timed.append((arm, process, receiver))
        until = time.monotonic() + PATIENCE
        for arm, process, receiver in timed:
            found[arm] = None
            with contextlib.suppress(EOFError):
                if receiver.poll(max(0.0, until - time.monotonic())):
                    found[arm] = _seconds_of_run(experiments[arm], *receiver.recv())
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
    return found


def _seconds_of_run(experiment: Experiment, start: float, step: float, batches: float) -> float | None:
    """Returns the seconds of a run; an image of validation or test takes a third of one of training.

    Args:
        experiment: its experiment.
        start: seconds before the first step.
        step: seconds of a training batch.
        batches: training batches of an epoch, on one device.
    """
    trainer, data = experiment.trainer, experiment.data
    ranks = math.prod(n for n in (trainer["devices"], trainer["num_nodes"]) if isinstance(n, int) and n > 0)
    epochs = trainer["max_epochs"] if trainer["max_epochs"] is not None else 1000  # Lightning's default
    ends = [batches / ranks * epochs] if epochs > 0 else []
    ends += [trainer["max_steps"] * trainer["accumulate_grad_batches"]] if trainer["max_steps"] > 0 else []
    total = min(ends, default=math.inf)
    if not math.isfinite(total):
        return None
    others = 0.0
    if data.own_loaders:
        passes = total * ranks / batches / (trainer["check_val_every_n_epoch"] or 1)
        splits: list[tuple[Split, float]] = [("val", passes), ("test", 1.0)]
        others = sum(data.image_count(split) * number for split, number in splits) / data.batch_size / ranks / 3
    return start + step * (total + others)


def _time(experiment: Experiment, threads: int, visible: str | None, parent: int, sender: Connection) -> None:
    """Trains a few steps in a process of its own; sends seconds before the first, of each, and batches of an epoch."""
    die_with(parent)
    obey_parent()
    quiet = os.open(os.devnull, os.O_WRONLY)
    for handle in (1, 2):
        os.dup2(quiet, handle)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.set_num_threads(threads)
    steps = Steps()
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"} if experiment.trainer["devices"] != "auto" else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = experiment.make_trainer_arguments({**plain_steps(WARM_UP + MOST), **alone})
        trainer, module = make_trainer(arguments, Path(folder), [steps], []), make_module(experiment)
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        trainer.fit(module, datamodule=experiment.data)
    sender.send((steps.ends[0] - steps.began - steps.step, steps.step, steps.batches))


class Steps(Callback):
    """Callback that times steps, and ends training after a moment."""

    def __init__(self) -> None:
        self.began, self.batches = time.perf_counter(), 0.0
        self.ends: list[float] = []

    @property
    def step(self) -> float:
        """Median seconds of a step after the first ones."""
        return statistics.median(later - end for end, later in itertools.pairwise(self.ends[WARM_UP - 1 :]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = float(trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) > WARM_UP + 1 and self.ends[-1] - self.ends[WARM_UP - 1] > MOMENT:
            trainer.should_stop = True
