"""Files that a run can go on from and that others can load: when they are written, how they are found and read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from vit_lightning.errors import UserError

BEST, LAST = Path("checkpoints/best.ckpt"), Path("checkpoints/last.ckpt")


@dataclass
class CheckpointConfig:
    """When checkpoints are written, besides the end of each epoch.

    Args:
        monitor: validation metric that tells the best checkpoint.
        mode: whether more (max) or less (min) of it is better.
        every_n_steps: optimizer steps after which last.ckpt falls due.
        every_minutes: minutes after which it falls due.
    """

    monitor: str = "val/acc"
    mode: Literal["max", "min"] = "max"
    every_n_steps: int | None = None
    every_minutes: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.every_n_steps is not None and self.every_n_steps < 1:
            problems.append(f"every_n_steps={self.every_n_steps} must be at least 1")
        if self.every_minutes is not None and not self.every_minutes >= 0.0:
            problems.append(f"every_minutes={self.every_minutes} must be at least 0")
        if problems:
            raise UserError(problems)


class Checkpoints(Checkpoint):
    """Keeps ``last.ckpt``, the newest state, and ``best.ckpt``, the best by a validation metric.

    Not Lightning's ModelCheckpoint: that one also writes in the last batch of an epoch and in mid-accumulation, and a
    run that goes on from there repeats or skips what it must not (PyTorch Lightning issues 19815, 20550, 21938). Here a
    file that falls due at such a moment is written at the end of the epoch or of the accumulation.

    Args:
        folder: the run folder; the two files go to ``checkpoints`` in it.
        config: when they are written.
        page: the run's configuration as plain data; goes into each file, so that it can be used without the folder.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, page: dict[str, Any]) -> None:
        self.last, self.best = folder / LAST, folder / BEST
        self.config, self.page = config, page
        self.best_score: float | None = None
        self.best_step = 0
        self._saved_step = -1
        self._validated_step = -1
        self._saved_time = time.monotonic()
        self._due = False
        self._finished = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_time = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        minutes = (time.monotonic() - self._saved_time) / 60.0
        every_minutes, every_n_steps = self.config.every_minutes, self.config.every_n_steps
        if every_minutes is not None and trainer.strategy.broadcast(minutes >= every_minutes):
            self._due = True
        if every_n_steps is not None and trainer.global_step - max(0, self._saved_step) >= every_n_steps:
            self._due = True
        # where validation comes now, the file is written after it: a run that goes on would not validate again
        if self._due and _between_steps(trainer) and not _validates_now(trainer):
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validated_step = trainer.global_step
        if _between_steps(trainer):
            self._save_best(trainer)
            if self._due:
                self._save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_step == trainer.global_step:  # else the score is that of other weights
            self._save_best(trainer)
        self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished = True
        self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        self._saved_step, self._saved_time, self._due = trainer.global_step, time.monotonic(), False
        trainer.save_checkpoint(self.last)

    def _save_best(self, trainer: Trainer) -> None:
        if self.config.monitor not in trainer.callback_metrics:
            return
        score = float(trainer.callback_metrics[self.config.monitor])
        sign = 1.0 if self.config.mode == "max" else -1.0
        if self.best_score is None or sign * score > sign * self.best_score:
            self.best_score, self.best_step = score, trainer.global_step
            trainer.save_checkpoint(self.best)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["page"] = self.page
        checkpoint["finished"] = self._finished
        checkpoint["metrics"] = {name: float(number) for name, number in trainer.callback_metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]


def _between_steps(trainer: Trainer) -> bool:
    """Whether the state is one that training can go on from: no gradients accumulated, not in an epoch's last batch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return not progress.is_last_batch and not trainer.fit_loop._should_accumulate()


def _validates_now(trainer: Trainer) -> bool:
    """Whether validation follows the batch that has just been trained on."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and then puts it there, so that it is complete or absent.

    Lightning's own goes through the temporary folder of the machine, and is cut short if that lies on another disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)


def find_checkpoint(place: Path, key: str = "ckpt") -> Path:
    """The file to load for a run folder (its best checkpoint, or its last if it has no best) or a file."""
    if place.is_dir():
        found = [place / name for name in (BEST, LAST) if (place / name).is_file()]
        if not found:
            raise UserError(f"{key}={place}: the folder holds neither {BEST} nor {LAST}")
        return found[0]
    if not place.is_file():
        raise UserError(f"{key}={place} is neither a run folder nor a file")
    return place


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint file lies in, if it lies in one."""
    folder = checkpoint.absolute().parent.parent
    if not (folder / "config.yaml").is_file():
        return None
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint; only tensors and plain data are read, nothing in it can run."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as fault:  # torch raises a dozen types for damaged files
        raise UserError(
            f"{path} cannot be read as a checkpoint of tensors and plain data ({_first_line(fault)})"
        ) from fault
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UserError(f"{path} is no Lightning checkpoint: it has no state_dict")
    return checkpoint


def network_weights(network: nn.Module, checkpoint: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint for a network, which must be of the same architecture."""
    prefix = "network."
    weights: dict[str, Tensor] = {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
    own = network.state_dict()
    problems = [
        *(f"it lacks {name}" for name in own if name not in weights),
        *(f"it has {name}, which the model lacks" for name in weights if name not in own),
        *(
            f"it has {name} as {_shape(weights[name])}, the model as {_shape(own[name])}"
            for name in own
            if name in weights and weights[name].shape != own[name].shape
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 3} more differences)" if len(problems) > 3 else ""
        raise UserError(f"{path} is of another architecture than the model: {'; '.join(problems[:3])}{more}")
    return weights


def load_network(network: nn.Module, checkpoint: dict[str, Any], path: Path) -> None:
    """Puts the weights of a checkpoint into a network of the same architecture."""
    network.load_state_dict(network_weights(network, checkpoint, path))


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _first_line(fault: Exception) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0][:200]
