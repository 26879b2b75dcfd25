"""Callback that writes checkpoints, and their contents besides Lightning's state."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from vit_lightning.errors import UserError, at_least, refuse
from vit_lightning.metric_facts import STEP_METRICS, goal_of
from vit_lightning.storage.checkpoint_files import BEST, LAST, AtomicCheckpointIO
from vit_lightning.storage.folder import is_first
from vit_lightning.training import lightning_detours as detours
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.monitor import FiniteGuard


@dataclass
class CheckpointConfig:
    """Checkpoints: last.ckpt is written before each validation, and at these intervals; best.ckpt after a validation.

    Args:
        monitor: logged metric by which best.ckpt is chosen.
        mode: whether higher (max) or lower (min) values of monitor are better; needed for a metric of a
            LightningModule of your own that is no accuracy and no loss by its name.
        every_n_epochs: epochs after which last.ckpt is written again; more than 1 where epochs take seconds.
        every_n_steps: optimizer steps after which last.ckpt is written again.
    """

    monitor: str = "val/acc"
    mode: Literal["max", "min"] | None = None
    every_n_epochs: int = 1
    every_n_steps: int | None = None

    def __post_init__(self) -> None:
        refuse(at_least(1, every_n_epochs=self.every_n_epochs, every_n_steps=self.every_n_steps))
        if self.mode is None and (goal := goal_of(self.monitor)):
            self.mode = "max" if goal == "maximize" else "min"


class Checkpoints(Checkpoint):
    """Callback that keeps ``last.ckpt``, the newest state, and ``best.ckpt``, the best by a validation metric.

    Lightning's ModelCheckpoint also writes in the last batch of an epoch and during accumulation, and a run resumed
    from there repeats or skips batches (PyTorch Lightning issues 19815, 20550, 21938). Here it is written at
    the end of the accumulation, of the epoch, or before a validation, which a resumed run then begins with. It is not
    written again after a validation: that would double the writes of each epoch, and a kill in the next epoch costs at
    most a second validation.

    Files are written while training continues. The next file, the choice of a best one, the end of training and that of
    the process by a signal wait for the one before.

    Args:
        folder: the run folder; the files go to ``checkpoints`` in it.
        settings: intervals and metric.
        config: the run's config as plain data, stored in each file, so that a file can be used without the folder.
        guard: checks before each file that all numbers are finite.
    """

    def __init__(self, folder: Path, settings: CheckpointConfig, config: Mapping[str, Any], guard: FiniteGuard) -> None:
        self.last, self.best = folder / LAST, folder / BEST
        if settings.mode is None:
            better = f"whether higher (max) or lower (min) values of {settings.monitor} are better"
            raise UserError(f"checkpoint.mode is missing: {better}")
        self.settings, self.config, self.guard = settings, config, guard
        self.best_score: float | None = None
        self.best_step = 0
        self._saved_step = -1
        self._validated_step = -1
        self._due = False
        self._writing: Path | None = None  # not yet known to be written
        self._finished = False
        self._norms: tuple[Any, list[Tensor]] = -1, []  # of the weights in the last file, and its step and mode
        self._is_measured = True  # else the metrics are of weights that have changed since
        self._resumed = False
        self._before_validation = False
        self._begins_with_validation = False
        self._complete: Callable[[], object] = lambda: None  # nothing is written before the fit
        self._max_steps: int | None = None  # kept until the validation with which a resumed run begins

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        detours.call_after_training(trainer, lambda: self._end(trainer))
        self._complete = trainer.strategy.checkpoint_io.teardown  # which waits for the file that is being written
        if self._begins_with_validation:  # Lightning would not even begin if max_steps have been trained
            loop = trainer.fit_loop.epoch_loop
            self._max_steps, loop.max_steps = loop.max_steps, -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._begins_with_validation and not detours.validates_now(trainer):
            hint = "resume it with its own val_check_interval, check_val_every_n_epoch and limit_val_batches"
            text = "the run resumes before a validation, which the changed options leave out"
            raise UserError(f"trainer: {text} ({hint})")
        if not self._resumed:  # finds now what cannot be written or loaded again
            trial = self.last.with_name(".trial.ckpt")
            try:
                self._begin(trainer, trial)
                self.finish(trainer)
            finally:
                trainer.strategy.checkpoint_io.teardown()  # a signal may have ended the wait, but not the writing
                trial.unlink(missing_ok=True)
        detours.call_after_batches(trainer, lambda: self._end_batch(trainer))

    def _end_batch(self, trainer: Trainer) -> None:
        every_n_steps = self.settings.every_n_steps or math.inf
        self._due |= detours.trained_steps(trainer) - max(0, self._saved_step) >= every_n_steps
        if self._due or detours.validates_now(trainer):
            self.save_if_possible(trainer)

    def save_if_possible(self, trainer: Trainer) -> bool:
        """Writes ``last.ckpt`` after a batch if training can resume from here; returns whether it could."""
        possible = _can_resume_here(trainer)
        if possible:
            self._before_validation = detours.validates_now(trainer)
            self.save_last(trainer)
            self._before_validation = False
        return possible

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._max_steps is not None and not trainer.sanity_checking:
            loop = trainer.fit_loop.epoch_loop
            loop.max_steps, self._max_steps = self._max_steps, None
            loop.val_loop.batch_progress.total.reset_on_restart()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validated_step = detours.trained_steps(trainer)
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # else the end of the epoch saves
            self._save_best(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        of_one = len(trainer.num_sanity_val_batches) == 1  # of several loaders it has no numbers
        if of_one and self.settings.monitor.startswith("val"):  # others are logged in training
            self._refuse_unknown(trainer, ", or --trainer.num_sanity_val_steps=0 if the sanity check logs less")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_step == detours.trained_steps(trainer):  # else the score is that of older weights
            self._save_best(trainer)
        if (trainer.current_epoch + 1) % self.settings.every_n_epochs == 0:
            self.save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished = True

    @property
    def best_model_path(self) -> str:
        """Path of best.ckpt, whole; empty without one. A Trainer's ``checkpoint_callback`` is asked for it."""
        self._complete()
        return "" if self.best_score is None else str(self.best)

    def _end(self, trainer: Trainer) -> None:
        self._begin_last(trainer)
        self.finish(trainer)
        self._check_best(trainer)

    def _measure(self, trainer: Trainer, weights: list[Tensor]) -> None:
        """Forgets the best checkpoint if hooks of the end of training have changed what a checkpoint holds."""
        (last, before), norms = self._norms, [weight.detach().norm() for weight in weights]
        modes = [group.get("train_mode") for one in trainer.optimizers for group in one.param_groups]  # of ScheduleFree
        self._norms = (detours.trained_steps(trainer), modes), norms
        changed = self._finished and last == self._norms[0] and not all(map(torch.equal, before, norms))
        if self._finished and trainer.strategy.broadcast(changed and self.best_score is not None):
            self._is_measured = False
            text = "a callback or the module has changed the weights at the end of training: these are kept and tested"
            warnings.warn(f"{text}, not the best before, of step {self.best_step}", stacklevel=2)
            self.best_score, self.best_step = None, 0
            if is_first():
                self.best.unlink(missing_ok=True)

    def save_last(self, trainer: Trainer) -> None:
        """Writes ``last.ckpt``, unless it is that of this step."""
        if not self.has_last(trainer):
            self._begin_last(trainer)

    def _begin_last(self, trainer: Trainer) -> None:
        self.finish(trainer)
        self._saved_step, self._due = detours.trained_steps(trainer), False
        self._begin(trainer, self.last)

    def has_last(self, trainer: Trainer) -> bool:
        """Whether ``last.ckpt`` is that of this step."""
        if self._writing == self.last:
            self.finish(trainer)
        return self._saved_step == detours.trained_steps(trainer)

    def _save_best(self, trainer: Trainer) -> None:
        self.finish(trainer)
        if self.settings.monitor not in trainer.callback_metrics:
            if self.best_score is None and detours.epoch_ends(trainer):
                self._refuse_unknown(trainer)
            return
        self._check_best(trainer)
        score = float(trainer.callback_metrics[self.settings.monitor])
        sign = -1.0 if self.settings.mode == "min" else 1.0
        if math.isnan(score) or (self.best_score is not None and sign * score <= sign * self.best_score):
            return
        self.best_score, self.best_step = score, detours.trained_steps(trainer)
        self._begin(trainer, self.best)

    def _refuse_unknown(self, trainer: Trainer, more: str = "") -> None:
        """Refuses a monitored metric that a module of the user's does not log: no check of the config knows them."""
        monitor, known = self.settings.monitor, {*trainer.callback_metrics} - {*STEP_METRICS}
        if type(trainer.lightning_module) is not ViTClassifier and monitor not in known:
            choices = f"choose {', '.join(sorted(known))}" if known else "give validation_step a self.log of it"
            raise UserError(f"checkpoint.monitor={monitor} is not logged ({choices}{more})")

    def _begin(self, trainer: Trainer, path: Path) -> None:
        """Begins to write a file, after the one before."""
        self.guard.check_all(trainer)
        folder = self.last.parent.parent
        if is_first() and self._saved_step >= 0 and not folder.is_dir():
            raise UserError(f"{folder} was moved or deleted while it trained (lightning fit --resume=ITS_NEW_PLACE)")
        plugin = vars(trainer.strategy.checkpoint_io)
        plugin["in_background"] = True
        try:
            trainer.save_checkpoint(path)
        finally:
            plugin["in_background"] = False  # who else saves, such as a ModelCheckpoint, then has the file
        self._writing = path

    def finish(self, trainer: Trainer) -> None:
        """Waits until the file that was begun is complete. All ranks call it at once.

        Raises:
            UserError: the disk does not take it.
        """
        if self._writing is not None:
            self._writing = None
            plugin = trainer.strategy.checkpoint_io
            if isinstance(plugin, AtomicCheckpointIO):
                plugin.finish()
            trainer.strategy.barrier()  # only the first rank writes

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"config": self.config, "global_step": detours.trained_steps(trainer)}
        names = checkpoint["state_dict"].keys() & dict(pl_module.named_parameters())
        self._measure(trainer, [checkpoint["state_dict"][name] for name in sorted(names)])
        checkpoint["callbacks"][self.state_key] = self.state_dict()
        # callbacks that stop early do not stop a resumed run again
        checkpoint["finished"] = self._finished or detours.stops_early(trainer)
        checkpoint["between_steps"] = not detours.accumulates(trainer)
        # inside an epoch, Lightning still has the training metrics of the previous one
        stages = ("val", "train") if detours.epoch_ends(trainer) else ("val",)
        metrics = {name: float(number) for name, number in trainer.callback_metrics.items() if self._is_measured}
        checkpoint["metrics"] = {name: number for name, number in metrics.items() if name.startswith(stages)}
        checkpoint["row"] = detours.row_to_come(trainer)
        checkpoint["before_validation"] = self._before_validation
        if self._before_validation:
            _count_as_in_validation(checkpoint["loops"]["fit_loop"])
        checkpoint["ranks"] = trainer.world_size
        data = detours.data_of(trainer)
        checkpoint |= {"images": data.fingerprint(), "test_view": data.test_view()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to resume with another number of devices or other images."""
        self._resumed = True
        self._begins_with_validation = checkpoint.get("before_validation", False)
        problems = []
        if checkpoint["ranks"] != trainer.world_size:
            problems.append(
                f"trainer.devices: {trainer.world_size} devices in all, where the run has {checkpoint['ranks']}: "
                "its batches would differ (give the same number)"
            )
        if checkpoint["images"] != detours.data_of(trainer).fingerprint():
            problems.append("data: the training or validation images are no longer those with which the run began")
        refuse(problems)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]
        self._check_best(None)

    def _check_best(self, trainer: Trainer | None) -> None:
        """Warns if the best checkpoint is gone, and forgets it; all ranks of a trainer follow the first."""
        is_there = self.best_score is None or self.best.is_file()
        if trainer is not None:
            is_there = bool(trainer.strategy.broadcast(is_there))
        if not is_there:
            text = "is missing: the best checkpoint is chosen among later validations, or else the last is tested"
            warnings.warn(f"{self.best} {text}", stacklevel=2)
            self.best_score, self.best_step = None, 0


def _can_resume_here(trainer: Trainer) -> bool:
    """Whether training can resume after this batch: no gradients are accumulated, and something follows in the epoch.

    That is a batch, or a validation with which a resumed run can begin.
    """
    if detours.accumulates(trainer):
        return False
    if detours.validates_now(trainer):
        return detours.can_validate_again(trainer)
    return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def _count_as_in_validation(loops: dict[str, Any]) -> None:
    """Changes Lightning's counters after a batch to those of a validation that has begun, with which a run resumes.

    With the counters of the batch, it would take the validation that follows for done.
    """
    for counts in (loops["epoch_loop.batch_progress"][which] for which in ("total", "current")):
        counts["completed"] = counts["processed"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts in (validation["total"], validation["current"]):
        counts.update(ready=1, started=1, processed=0, completed=0)
