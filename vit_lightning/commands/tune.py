"""Short trainings, ``lightning lr-find``, ``scale-batch`` and ``fast_dev_run``, and the sweep file of a training.

Lightning's Tuner gives one learning rate to all parameter groups, records no losses of accumulated batches and writes
checkpoints between its trials.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from scipy.ndimage import gaussian_filter1d

from vit_lightning.commands.console import say
from vit_lightning.commands.module import compile_chosen, make_module, start_weights
from vit_lightning.commands.session import (
    Results,
    chosen_matmul,
    logged,
    make_trainer,
    own_faults,
    plain_training,
    session,
)
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import options_of, read_flags
from vit_lightning.errors import UserError
from vit_lightning.figures.curves import rate_search, save
from vit_lightning.limits import at_least, problems_of, refuse
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.storage.wandb_sweeps import write_sweep_file
from vit_lightning.training.callbacks import StepSeeds
from vit_lightning.training.classifier import ViTClassifier

SMOOTHING = 1 / 40
"""Standard deviation of the Gaussian that smooths the losses, as a fraction of the number of steps."""
DIVERGED = 4.0
"""Multiple of the lowest loss above which three steps in a row end the search."""


class RateSearch(Callback):
    """Callback that gives each step its learning rate, and records the loss of the step.

    Each parameter group keeps its factor on ``optimizer.lr`` (layer decay, Muon), as in training.

    Args:
        rates: learning rate of each step, in place of the schedule.
        lr: learning rate of the config.
    """

    def __init__(self, rates: Sequence[float], lr: float) -> None:
        self.rates, self.lr = rates, lr
        self.factors: list[float] = []
        self.losses: list[float] = []
        self._of_batches: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.lr_scheduler_configs = []
        self.factors = [group["initial_lr"] / self.lr for group in trainer.optimizers[0].param_groups]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for group, factor in zip(trainer.optimizers[0].param_groups, self.factors, strict=True):
            group["lr"] = factor * self.rates[trainer.global_step]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._of_batches.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)  # Lightning divides by it
        if trainer.global_step > len(self.losses):
            self.losses.append(float(np.mean(self._of_batches)))
            self._of_batches.clear()
            trainer.should_stop = min(self.losses[-3:]) > DIVERGED * min(self.losses)


def find_learning_rate(
    experiment: Experiment, *, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100
) -> dict[str, Any]:
    """Trains while the learning rate grows from step to step, draws the losses and suggests a rate (Smith 2017).

    Callbacks and loggers of the config are left out.

    Args:
        min_lr: learning rate of the first step.
        max_lr: learning rate of the last step.
        steps: number of optimizer steps.

    Raises:
        UserError: the config cannot be searched, or the loss never falls.
    """
    lr, problems = experiment.settings.optimizer.lr, at_least(20, steps=steps)
    if not 0.0 < min_lr < max_lr < math.inf:
        problems.append(f"min_lr={min_lr}, max_lr={max_lr} must be above 0, the first below the second")
    if lr <= 0.0:
        problems.append(f"optimizer.lr={lr} must be above 0, since the rates of parameter groups are relative to it")
    refuse(problems)
    with session(experiment, "lr-find") as folder:
        module = _first_module(experiment)
        if not isinstance(module, ViTClassifier):
            kind = type(module).__name__
            raise UserError(f"module.class_path={kind} is no ViTClassifier: its learning rates cannot be searched")
        search = RateSearch(np.geomspace(min_lr, max_lr, steps).tolist(), lr)
        trainer = _trainer(experiment, folder, steps, search)
        trainer.fit(module, datamodule=experiment.data)
        losses = search.losses
        rates, smoothed = search.rates[: len(losses)], smooth(losses)
        suggestion = suggest(rates, smoothed)
        results = {
            "suggestion": suggestion,
            "config": lr,
            "batch_size": experiment.data.batch_size * trainer.accumulate_grad_batches * trainer.world_size,
            "rates": rates,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "smoothed_losses": [loss if math.isfinite(loss) else None for loss in smoothed],
            "group_factors": search.factors,
            "group_rates": np.outer(rates, search.factors).tolist(),
        }
        write_whole(folder / "rates.json", json.dumps(results, indent=2) + "\n")
        if is_first():
            save(rate_search(rates, losses, smoothed, suggestion, lr), folder / "rates.png")
    say(f"loss over learning rate: {folder / 'rates.png'}")
    if suggestion is None:
        raise UserError(
            f"the loss never falls between min_lr={min_lr} and max_lr={max_lr} in {len(rates)} steps: "
            "no learning rate is suggested (try a wider range, or more steps)"
        )
    say(f"the loss falls fastest at --optimizer.lr={suggestion:.2g}    (the config has {lr:g})")
    return results


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the rate at which the smoothed loss falls fastest over log(rate); None if it falls by less than 1 %.

    Lightning's own suggestion takes the slope over the rate itself, so that noise at the lowest rates wins, and its
    running mean of the losses starts at half of the first loss and lags behind.
    """
    x, y = np.log(np.asarray(rates, dtype=float)), np.asarray(losses, dtype=float)
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(y) < 3 or y.min() > 0.99 * y[0]:
        return None
    slope = np.gradient(y, x)[: int(np.argmin(y)) + 1]
    return float(np.exp(x[int(np.argmin(slope))]))


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns Gaussian means around each step; nan where the loss of the step or of a near one is not finite."""
    values = np.where(np.isfinite(losses), losses, np.nan)
    near = partial(gaussian_filter1d, sigma=max(0.5, SMOOTHING * len(values)), mode="constant", truncate=3.7)
    smoothed: list[float] = (near(values) / near(np.ones(len(values)))).tolist()
    return smoothed


def scale_batch(experiment: Experiment, *, max_batch_size: int = 8192, steps: int = 3) -> dict[str, Any]:
    """Doubles the batch size until memory or data run out, and prints the largest one that trained.

    Args:
        max_batch_size: largest batch size that is tried.
        steps: optimizer steps with each batch size.

    Raises:
        UserError: the config cannot be searched, or not even one image fits in memory.
    """
    data = experiment.data
    refuse(at_least(1, max_batch_size=max_batch_size, steps=steps))
    if not data.own_loaders:
        raise UserError(f"data.{data.title}: the batch size of a LightningDataModule is its own")
    first, limit = data.batch_size, max_batch_size
    if first > limit:
        raise UserError(f"max_batch_size={limit} must not be below data.batch_size={first}, which is tried first")
    with session(experiment, "scale-batch") as folder:
        module, size = _first_module(experiment), first
        trained, failed = list[int](), list[int]()
        while size and not (trained and failed):
            data.batch_size = size
            fits = _fits(experiment, module, folder, steps)
            (trained if fits else failed).append(size)
            if fits and (size >= len(data.dataset("train")) or 2 * size > limit):  # type: ignore[arg-type]
                break
            size = 2 * size if fits else size // 2
        if not trained:
            raise UserError(f"a batch of {failed[-1]} does not fit in memory: the model is too large")
        best, images = trained[-1], len(data.dataset("train"))  # type: ignore[arg-type]
        if failed:
            end, reason = "memory", f"{failed[-1]} does not fit in memory"
        elif best >= images:
            end, reason = "data", f"there are {images} training images"
        else:
            end, reason = "max_batch_size", f"max_batch_size={limit} allows no further doubling"
        results = {"batch_size": best, "config": first, "ended_by": end, "trained": trained, "failed": failed}
        write_whole(folder / "batch_sizes.json", json.dumps(results, indent=2) + "\n")
    say(f"largest batch: --data.batch_size={best}    ({reason}; the config has {first})")
    say(f"another batch size needs another learning rate: lightning lr-find ...    {folder / 'batch_sizes.json'}")
    return results


def try_out(experiment: Experiment) -> Results:
    """Trains, validates and, with ``test``, tests on a few batches (``trainer.fast_dev_run``), and writes nothing."""
    seed_everything(experiment.seed, verbose=False)
    data, module = experiment.data, make_module(experiment)
    start_weights(module, experiment)
    trainer = make_trainer(experiment.make_trainer_arguments(), Path("runs"), [StepSeeds(experiment.seed)], [])
    compile_chosen(module, experiment, trainer)
    with own_faults(None), chosen_matmul(experiment):
        trainer.fit(module, datamodule=data)
        if experiment.test:
            trainer.test(module, datamodule=data, verbose=False)
    tried = "training, validation and test" if experiment.test else "training and validation"
    say(f"fast_dev_run: {tried} work; nothing was written")
    return logged(trainer, "")


SWEEP = """\
# A sweep of W&B: wandb sweep {path}, then wandb agent on any number of machines.
# method: bayes, random or grid. parameters: any options of lightning fit, in W&B's words.
# early_terminate ends runs that are behind; their checkpoints stay: lightning fit --resume RUN goes on with one.
"""
"""Comments of a sweep file."""


def write_sweep(experiment: Experiment, path: Path, words: Sequence[str]) -> None:
    """Writes a sweep file of W&B whose runs are a command with other learning rates and weight decays.

    It is a beginning, to be changed: Bayesian search by the metric of the best checkpoint, and Hyperband, which ends
    runs after a ninth and a third of the validations.

    Args:
        experiment: the experiment.
        path: the file, which must not be there.
        words: the command line, without the program.

    Raises:
        UserError: the file is there or cannot be written, or the runs would have one folder.
    """
    chosen, flags = experiment.settings.checkpoint, [*read_flags(words[1:])]
    given, options = dict(flags), options_of(experiment.config)
    rates = {key: options.get(key) for key in ("optimizer.lr", "optimizer.weight_decay")}
    tracked = experiment.settings.wandb.mode
    problems = problems_of(
        ("out", given.get("out"), "out" not in given, "left out: each run of a sweep has a folder of its own"),
        ("resume", given.get("resume"), given.get("resume") in (None, "auto", "never"), "auto or never"),
        ("wandb.mode", tracked, tracked not in ("disabled", "offline"), "online: W&B searches by what runs send it"),
    )
    kept = [f"--{key}={value}" for key, value in flags if key not in ("wandb-sweep", "wandb_sweep", *rates)]
    command = ["fit", *kept, *["--resume=auto"] * ("resume" not in given)]
    validations = (experiment.trainer["max_epochs"] or 0) // (experiment.trainer["check_val_every_n_epoch"] or 1)
    parameters = {
        key: {"distribution": "log_uniform_values", "min": value / 10, "max": value * 10}
        for key, value in rates.items()
        if isinstance(value, float | int) and value > 0
    }
    early = {"type": "hyperband", "min_iter": max(1, validations // 9), "eta": 3}
    sweep = {"method": "bayes", "parameters": parameters, "early_terminate": early}
    comments = SWEEP.format(path=path)
    how = write_sweep_file(path, command, chosen.monitor, str(chosen.mode), sweep, comments=comments, problems=problems)
    say(f"{path}: change its parameters, then {how}")


def _fits(experiment: Experiment, module: LightningModule, folder: Path, steps: int) -> bool:
    """Trains for some steps and returns whether the memory was enough."""
    trainer = _trainer(experiment, folder, steps)
    if trainer.world_size > 1:
        raise UserError("trainer.devices: the batch size of distributed training is that of one device: give 1")
    try:
        trainer.fit(module, datamodule=experiment.data)
    except RuntimeError as fault:
        if not is_oom_error(fault):
            raise
        return False
    finally:
        module.zero_grad()
        garbage_collection_cuda()
    return True


def _first_module(experiment: Experiment) -> LightningModule:
    if experiment.trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: nothing can be searched in so few steps (leave it out)")
    module = make_module(experiment)
    start_weights(module, experiment)
    return module


def _trainer(experiment: Experiment, folder: Path, steps: int, *callbacks: Callback) -> Trainer:
    return make_trainer(experiment.make_trainer_arguments(plain_training(steps)), folder, [*callbacks], [])
