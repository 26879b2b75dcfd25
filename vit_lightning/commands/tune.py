"""``lightning lr-find`` and ``lightning scale-batch``: Lightning's Tuner on a config; both write to one folder only."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from vit_lightning.commands.console import say
from vit_lightning.commands.module import make_module, start_weights
from vit_lightning.commands.session import make_trainer, session
from vit_lightning.config.experiment import Experiment
from vit_lightning.errors import UserError
from vit_lightning.figures.curves import rate_search, save
from vit_lightning.limits import at_least, refuse
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.ema import EMAConfig
from vit_lightning.training.lightning_detours import draw_search_in_terminals_alone

SMOOTHING = 1 / 40
"""Standard deviation of the Gaussian that smooths the losses, as a fraction of the number of steps."""


class RateSearch(ViTClassifier):
    """Classifier that trains while Lightning's Tuner raises the learning rate, and records each step.

    The Tuner gives one learning rate to all parameter groups. Here each group keeps its factor on ``optimizer.lr``
    (layer decay, Muon), as in training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factors: list[float] = []
        self.rates: list[float] = []
        self.group_rates: list[list[float]] = []
        self.step_losses: list[float] = []
        self._batch_losses: list[float] = []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        configured: Any = super().configure_optimizers()
        optimizer: Optimizer = configured["optimizer"]
        self.factors = [group["initial_lr"] / self.optimizer_config.lr for group in optimizer.param_groups]
        given: list[float] = []

        def apply_factors(optimizer: Optimizer, *_: Any) -> None:
            given[:] = [group["lr"] for group in optimizer.param_groups]
            for group, factor in zip(optimizer.param_groups, self.factors, strict=True):
                group["lr"] *= factor

        def record_and_restore(optimizer: Optimizer, *_: Any) -> None:
            self.rates.append(given[0])
            self.group_rates.append([group["lr"] for group in optimizer.param_groups])
            self.step_losses.append(float(np.mean(self._batch_losses)))
            self._batch_losses.clear()
            for group, rate in zip(optimizer.param_groups, given, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(apply_factors)
        optimizer.register_step_post_hook(record_and_restore)
        return {"optimizer": optimizer, "lr_scheduler": configured["lr_scheduler"]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._batch_losses.append(float(loss.detach()))
        return loss


class BatchSearch(ViTClassifier):
    """Classifier that records with which batch sizes training started, and with which it finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.started: list[int] = []
        self.finished: list[int] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        self.started.append(self.trainer.datamodule.batch_size)  # type: ignore[attr-defined]

    def on_train_end(self) -> None:
        self.finished.append(self.trainer.datamodule.batch_size)  # type: ignore[attr-defined]


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
        draw_search_in_terminals_alone()
        module, trainer = _prepare(experiment, RateSearch, folder, steps)
        with _tuner_errors():
            Tuner(trainer).lr_find(
                module,
                datamodule=experiment.data,
                min_lr=min_lr,
                max_lr=max_lr,
                num_training=steps,
                update_attr=False,
            )
        # not what the Tuner records: with accumulated gradients it misses the last step of each epoch
        rates, losses = module.rates, module.step_losses
        smoothed = smooth(losses)
        suggestion = suggest(rates, smoothed)
        results = {
            "suggestion": suggestion,
            "page": lr,
            "batch_size": experiment.data.batch_size * trainer.accumulate_grad_batches * trainer.world_size,
            "rates": rates,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "smoothed_losses": [loss if math.isfinite(loss) else None for loss in smoothed],
            "group_shares": module.factors,
            "group_rates": module.group_rates,
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
    steps, values = np.arange(len(losses)), np.asarray(losses, dtype=float)
    width = max(0.5, SMOOTHING * len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    weights[weights < 1e-3] = 0.0
    known = np.isfinite(values)
    means = weights[:, known] @ values[known] / weights[:, known].sum(axis=1).clip(1e-9)
    smoothed: list[float] = np.where(weights[:, ~known].sum(axis=1) > 0, math.nan, means).tolist()
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
        module, trainer = _prepare(experiment, BatchSearch, folder, steps)
        # if one image does not fit, the Tuner tries a batch of none
        with _tuner_errors(), contextlib.suppress(ZeroDivisionError):
            Tuner(trainer).scale_batch_size(
                module,
                datamodule=data,
                steps_per_trial=steps,
                init_val=first,
                max_val=limit + 1,  # the Tuner does not try max_val itself
            )
        trained = sorted({*module.finished})
        failed = sorted({*module.started} - {*module.finished})
        if not trained:
            raise UserError(f"a batch of {min(failed, default=first)} does not fit in memory: the model is too large")
        best, images = trained[-1], len(data.dataset("train"))  # type: ignore[arg-type]
        if failed:
            end, reason = "memory", f"{failed[0]} does not fit in memory"
        elif best >= images:
            end, reason = "data", f"there are {images} training images"
        else:
            end, reason = "max_batch_size", f"max_batch_size={limit} allows no further doubling"
        results = {"batch_size": best, "page": first, "ended_by": end, "trained": trained, "failed": failed}
        write_whole(folder / "batch_sizes.json", json.dumps(results, indent=2) + "\n")
    say(f"largest batch: --data.batch_size={best}    ({reason}; the config has {first})")
    say(f"another batch size needs another learning rate: lightning lr-find ...    {folder / 'batch_sizes.json'}")
    return results


def _prepare(experiment: Experiment, kind: type[Any], folder: Path, steps: int) -> tuple[Any, Trainer]:
    """Returns module and Trainer for a search of ``steps`` steps, without validation and logging."""
    if experiment.trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: nothing can be searched in so few steps (leave it out)")
    # the EMA starts in a hook that the Tuner does not wait for, and a learning rate is found without it
    without_ema = replace(experiment, settings=experiment.settings._replace(ema=EMAConfig()))
    trainer = make_trainer(experiment.make_trainer_arguments(plain_steps(steps)), folder, [], [])
    module = make_module(without_ema, kind)
    start_weights(module, experiment)
    return module, trainer


def plain_steps(steps: int) -> dict[str, Any]:
    """Returns arguments of the Trainer for some training steps, without validation and logging."""
    return {
        "callbacks": None,
        "logger": False,
        "max_epochs": -1,
        "max_steps": steps,
        "max_time": None,
        "min_epochs": None,
        "min_steps": None,
        "num_sanity_val_steps": 0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 10**9,
        "log_every_n_steps": 10**9,
        "enable_progress_bar": False,
    }


@contextlib.contextmanager
def _tuner_errors() -> Iterator[None]:
    """Turns errors of Lightning's Tuner into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (MisconfigurationException, ValueError) as fault:
        raise UserError(f"Lightning's Tuner cannot work on this config: {' '.join(str(fault).split())}") from fault
