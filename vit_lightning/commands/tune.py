"""``lightning lr-find`` and ``scale-batch``: Lightning's Tuner on a page; only a folder under runs/ is written."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from vit_lightning.commands.console import quiet, say
from vit_lightning.commands.figures import rate_search
from vit_lightning.commands.run import make_module, make_trainer
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.options import BatchSizeSearchOptions, LearningRateSearchOptions
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import is_first, new_folder, write_whole
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.ema import EMAConfig

SMOOTHED = 1 / 40
"""Width of the bell (its deviation) that smooths the losses, as a share of the steps."""


class RateSearch(ViTClassifier):
    """Trains while Lightning's Tuner raises the rate; writes down what was really done in each step.

    The Tuner gives all parameter groups one rate. Here each keeps its share of ``optimizer.lr``, as in training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shares: list[float] = []
        self.rates: list[float] = []
        self.group_rates: list[list[float]] = []
        self.step_losses: list[float] = []
        self._batch_losses: list[float] = []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        configured: Any = super().configure_optimizers()
        optimizer: Optimizer = configured["optimizer"]
        self.shares = [group["initial_lr"] / self.optimizer_config.lr for group in optimizer.param_groups]
        asked: list[float] = []

        def share(optimizer: Optimizer, *_: Any) -> None:
            asked[:] = [group["lr"] for group in optimizer.param_groups]
            for group, part in zip(optimizer.param_groups, self.shares, strict=True):
                group["lr"] *= part

        def restore(optimizer: Optimizer, *_: Any) -> None:
            self.rates.append(asked[0])
            self.group_rates.append([group["lr"] for group in optimizer.param_groups])
            self.step_losses.append(float(np.mean(self._batch_losses)))
            self._batch_losses.clear()
            for group, rate in zip(optimizer.param_groups, asked, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(share)
        optimizer.register_step_post_hook(restore)
        return {"optimizer": optimizer, "lr_scheduler": configured["lr_scheduler"]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._batch_losses.append(float(loss.detach()))
        return loss


class BatchSearch(ViTClassifier):
    """Writes down with which batch sizes training was begun, and with which it came to its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begun: list[int] = []
        self.done: list[int] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        self.begun.append(self.trainer.datamodule.batch_size)  # type: ignore[attr-defined]

    def on_train_end(self) -> None:
        self.done.append(self.trainer.datamodule.batch_size)  # type: ignore[attr-defined]


def find_rate(experiment: Experiment) -> dict[str, Any]:
    """Draws the loss over a rate that grows from step to step, and suggests a rate (Smith 2017).

    The callbacks and loggers of the page are left out.

    Raises:
        UserError: of a page on which this cannot work, or of losses that never fall.
    """
    options, lr = experiment.options, experiment.settings.optimizer.lr
    assert isinstance(options, LearningRateSearchOptions)
    if lr <= 0.0:
        raise UserError(f"optimizer.lr={lr} must be above 0: the rate of each group is a share of it")
    with new_folder(experiment.out, Path("runs") / "lr-find", experiment.name) as folder:
        # as our bars: nothing without a terminal
        lr_finder.tqdm = functools.partial(tqdm, disable=None, leave=False)  # type: ignore[attr-defined,assignment]
        data, module, trainer = _make(experiment, RateSearch, folder, steps=options.steps)
        _tune(
            lambda: Tuner(trainer).lr_find(
                module,
                datamodule=data,
                min_lr=options.min_lr,
                max_lr=options.max_lr,
                num_training=options.steps,
                update_attr=False,
            )
        )
        # not what Lightning wrote down: with accumulated gradients it misses the last step of each epoch
        rates, losses = module.rates, module.step_losses
        smoothed = smooth(losses)
        suggestion = suggest(rates, smoothed)
        results = {
            "suggestion": suggestion,
            "page": lr,
            "batch_size": data.batch_size * trainer.accumulate_grad_batches * trainer.world_size,
            "rates": rates,
            "losses": [_number(loss) for loss in losses],
            "smoothed_losses": [_number(loss) for loss in smoothed],
            "group_shares": module.shares,
            "group_rates": module.group_rates,
        }
        write_whole(folder / "rates.json", json.dumps(results, indent=2) + "\n")
        if is_first():
            drawn = rate_search(rates, losses, smoothed, suggestion, lr)
            drawn.savefig(folder / "rates.png", dpi=100)
    say(f"loss over rate: {folder / 'rates.png'}")
    if suggestion is None:
        raise UserError(
            f"the loss never falls between min_lr={options.min_lr} and max_lr={options.max_lr} in {len(rates)} steps: "
            "no rate is suggested (give others, or more steps)"
        )
    say(f"where the loss falls fastest: --optimizer.lr={suggestion:.2g}    (the page has {lr:g})")
    return results


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the smoothed loss falls fastest over the rate's logarithm; None if it falls by less than 1 %.

    Not Lightning's own suggestion: that one takes the slope over the rate itself, so that noise at the lowest rates
    wins, of losses whose running mean begins at half of the first one and lags behind.
    """
    x, y = np.log(np.asarray(rates, dtype=float)), np.asarray(losses, dtype=float)
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(y) < 3 or y.min() > 0.99 * y[0]:
        return None
    slope = np.gradient(y, x)[: int(np.argmin(y)) + 1]
    return float(np.exp(x[int(np.argmin(slope))]))


def smooth(losses: Sequence[float]) -> list[float]:
    """Means with the weights of a bell around each step; nan where that step's loss or a near one is no number."""
    steps, values = np.arange(len(losses)), np.asarray(losses, dtype=float)
    width = max(0.5, SMOOTHED * len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    weights[weights < 1e-3] = 0.0
    known = np.isfinite(values)
    means = weights[:, known] @ values[known] / weights[:, known].sum(axis=1).clip(1e-9)
    smoothed: list[float] = np.where(weights[:, ~known].sum(axis=1) > 0, math.nan, means).tolist()
    return smoothed


def scale_batch(experiment: Experiment) -> dict[str, Any]:
    """Doubles the batch size of a page until the memory, or the data, ends; says the largest that trained.

    Raises:
        UserError: of a page on which this cannot work, or if not even one image fits.
    """
    options = experiment.options
    assert isinstance(options, BatchSizeSearchOptions)
    with new_folder(experiment.out, Path("runs") / "scale-batch", experiment.name) as folder:
        data, module, trainer = _make(experiment, BatchSearch, folder, steps=options.steps)
        first, limit = data.batch_size, options.max_batch_size
        if first > limit:
            raise UserError(f"max_batch_size={limit} must not be below data.batch_size={first}, which is tried first")
        with contextlib.suppress(ZeroDivisionError):  # when one image is too many, a batch of none is tried
            _tune(
                lambda: Tuner(trainer).scale_batch_size(
                    module,
                    datamodule=data,
                    steps_per_trial=options.steps,
                    init_val=first,
                    # Lightning does not try the last size that it allows
                    max_val=limit + 1,
                )
            )
        failed = sorted({*module.begun} - {*module.done})
        if not module.done:
            raise UserError(f"the memory does not hold a batch of {min(failed, default=first)}: the model is too large")
        best, images = max(module.done), len(data.dataset("train"))  # type: ignore[arg-type]
        why = "memory" if failed else "data" if best >= images else "max_batch_size"
        results = {
            "batch_size": best,
            "page": first,
            "ended_by": why,
            "trained": sorted({*module.done}),
            "failed": failed,
        }
        write_whole(folder / "batch_sizes.json", json.dumps(results, indent=2) + "\n")
    ends = {
        "memory": f"{min(failed, default=0)} is too much for the memory",
        "data": f"there are {images} training images",
        "max_batch_size": f"max_batch_size={limit} allows no further doubling",
    }
    say(f"largest batch: --data.batch_size={best}    ({ends[why]}; the page has {first})")
    say(f"another batch size wants another rate: lightning lr-find ...    {folder / 'batch_sizes.json'}")
    return results


def _make(experiment: Experiment, kind: type[Any], folder: Path, *, steps: int) -> tuple[ImageData, Any, Trainer]:
    """Data, module and trainer of a page for a search of so many steps, in which nothing is validated or logged."""
    if experiment.trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: there is nothing to find in a trial run (leave it out)")
    quiet()
    seed_everything(experiment.seed, verbose=False)
    replaced = {
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
    arguments = experiment.make_trainer_arguments(replaced)
    # the average begins in a hook that the Tuner does not wait for; a learning rate is found without it
    without = replace(experiment, settings=experiment.settings._replace(ema=EMAConfig()))
    return experiment.data, make_module(without, kind), make_trainer(arguments, folder, [], [])


def _tune(search: Callable[[], Any]) -> Any:
    try:
        return search()
    except UserError:
        raise
    except (MisconfigurationException, ValueError) as fault:
        raise UserError(f"Lightning's Tuner cannot work on this page: {' '.join(str(fault).split())}") from fault


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
