"""The forecast of an ablation before its runs: what it can show by its test images, its time by a few timed steps."""

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

from vit_lightning.ablation.attempts import FORK, begin_process, read_images
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.commands.module import make_module
from vit_lightning.commands.session import make_trainer, plain_training
from vit_lightning.config.experiment import Experiment
from vit_lightning.notation import counted, show_time
from vit_lightning.report.forecast import assumed_spread, forecast_sentences, measured_spread
from vit_lightning.training.resources import keep_freed_memory

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
    experiments, study = plan.experiments, ledger.study()
    read_images(experiments)
    spread = measured_spread(study) or assumed_spread(plan.compare, count_test_images(experiments[plan.baseline]))
    seconds = {arm: ledger.expected_seconds(Planned(arm, plan.seeds[0])) for arm in plan.arms}
    if timed and None in seconds.values():
        ledger.forecast = seconds = time_arms(experiments, ledger.facts["threads"], workers, devices)
    known = [value for value in seconds.values() if value is not None]
    each = sum(known) / len(known) / workers if known else None
    if spread is None:
        lines = [f"what {plan.compare.metric} can show is said after three pairs of runs"]
        lines += [f"a run takes about {show_time(each * workers)}"] if each is not None else []
    else:
        lines = forecast_sentences(study, spread, each)
    tuning = [] if study.tuning is None else [trial for trial in study.tuning.trials if trial.state == "missing"]
    if plan.tune.replicates:
        trials = len(plan.tune.seeds) * len(plan.tune.combinations)
        runs = (1 + trials) * len(plan.arms) * plan.compare.max_seeds
        time = "" if each is None else f", about {show_time(each * runs)}"
        lines.append(
            f"each of these runs is tuned anew by {counted(trials, 'trial')}: at most {runs} runs in all{time}"
        )
    elif tuning and each is not None:
        lines.append(f"tuning before that: {counted(len(tuning), 'run')}, {show_time(each * len(tuning))}")
    if timed and (untimed := [arm for arm, value in seconds.items() if value is None]):
        lines.append(
            f"no time for {', '.join(untimed)}: a few steps failed or took more than {PATIENCE:.0f} s, or the training "
            "has no known length (the command of one alone, above, shows it)"
        )
    return [f"  {line}" for line in lines]


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
    found: dict[str, float | None] = dict.fromkeys(experiments)
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
            with contextlib.suppress(EOFError):
                if receiver.poll(max(0.0, until - time.monotonic())):
                    found[arm] = receiver.recv()
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
    return found


def _time(experiment: Experiment, threads: int, visible: str | None, parent: int, sender: Connection) -> None:
    """Runs the process that times an arm, and sends the expected seconds of a run."""
    begin_process(parent, os.open(os.devnull, os.O_WRONLY), threads, visible)
    steps, own = Steps(), experiment.trainer
    arguments = {**plain_training(-1), "max_epochs": own["max_epochs"], "max_steps": own["max_steps"]}
    if own["devices"] != "auto":
        arguments |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(experiment.make_trainer_arguments(arguments), Path(folder), [steps], [])
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        trainer.fit(make_module(experiment), datamodule=experiment.data)
    began, first, *_ = steps.times
    step = statistics.median(later - end for end, later in itertools.pairwise(steps.times[WARM_UP:]))
    sender.send(seconds_of_run(experiment, first - began - step, step, steps.batches, steps.epochs))


def seconds_of_run(experiment: Experiment, start: float, step: float, batches: float, epochs: float) -> float | None:
    """Returns the seconds of a run; an image of validation or test takes a third of one of training.

    Args:
        experiment: its experiment.
        start: seconds before the first step.
        step: seconds of a training batch.
        batches, epochs: of the whole training, on one device; infinite where only its loaders know.
    """
    trainer, data, images = experiment.trainer, experiment.data, 0.0
    if data.own_loaders:
        passes = epochs / (trainer["check_val_every_n_epoch"] or 1)
        images = data.image_count("val") * passes + data.image_count("test")
    ranks = math.prod(n for n in (trainer["devices"], trainer["num_nodes"]) if isinstance(n, int) and n > 0)
    seconds = start + step * (batches + images / data.batch_size / 3) / ranks
    return seconds if math.isfinite(seconds) else None


class Steps(Callback):
    """Callback that times steps after the first ones, and ends training after a moment."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        """Time when it was made, and those of the ends of steps."""
        self.batches = self.epochs = math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = float(trainer.estimated_stepping_batches * trainer.accumulate_grad_batches)
        self.epochs = self.batches / trainer.num_training_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        timed = self.times[WARM_UP:]
        trainer.should_stop |= len(timed) > MOST or (len(timed) > 1 and timed[-1] - timed[0] > MOMENT)
