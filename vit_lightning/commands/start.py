"""The lines with which a run begins: where it writes, what it trains, on what and for how long."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_lightning.commands.console import counted, row, say
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import keep_own_files
from vit_lightning.data.base import ImageData
from vit_lightning.data.splits import Split
from vit_lightning.training.classifier import ViTClassifier

SPLIT_WORDS: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}


def model_line(experiment: Experiment, parameters: int, trained: int) -> str:
    parts = [experiment.config[key] for key in ("module", "model")]
    name = " of ".join(str(part["class_path"]).removeprefix("vit_lightning.") for part in parts if part is not None)
    if named := (parts[1] or {}).get("init_args", {}).get("model_name"):  # of timm
        name += f" {named}"
    number = counted(parameters, "parameter")
    return row(
        "model",
        f"{name}, {number if trained == parameters else f'{trained:,} of {number} trained'}",
    )


def device_line(trainer: Trainer, *, is_auto: bool = False) -> str:
    """Returns the devices of all processes, and the precision as it is named in a config, or as auto chose it."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU, {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else device.type.upper()
    several = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    return row("device", f"{several}{name}, precision {trainer.precision}{' (auto)' * is_auto}")


class Start(Callback):
    """Callback that says before the first step what is trained on, and how many steps there are or remain.

    Only then the images have been counted: by the loaders, so that nothing is read for this alone. Later it keeps the
    files of the user's own that are imported only while training.

    Args:
        experiment: the experiment.
        begin: called when the first batch has been trained, for what need not be there earlier.
    """

    def __init__(self, experiment: Experiment, begin: Callable[[], object]) -> None:
        self.experiment, self._begin = experiment, begin
        self._imported = 0
        self._has_trained = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            data = self.experiment.data
            say(row("data", f"{data.title.rpartition('.')[2]}, {_kind(data)}"))
            if data.notice:
                say(row("note", data.notice))
            if data.own_loaders:
                say(row("images", _splits(data, test=self.experiment.test)))
            say(row("training", _length(trainer, data)))
            if (warmup := _whole_warmup(trainer, pl_module)) is not None:
                say(row("note", warmup))

    def on_train_batch_start(self, *args: Any) -> None:
        if self._has_trained:
            self._begin()
        self._has_trained = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if len(sys.modules) != self._imported:  # to look through all takes as long as to write a small checkpoint
            self._imported = len(sys.modules)
            keep_own_files(Path(trainer.default_root_dir))


def _kind(data: ImageData) -> str:
    height, width = data.image_size
    return f"{data.num_classes} classes, {height}x{width} pixels, {counted(data.in_channels, 'channel')}"


def _splits(data: ImageData, *, test: bool) -> str:
    """Returns the number of images in each split, and which are cut from the training images."""
    used: list[Split] = ["train", "val", "test"] if test else ["train", "val"]
    sizes = ", ".join(f"{data.image_count(split):,} {SPLIT_WORDS[split]}" for split in used)
    cut = " and ".join(SPLIT_WORDS[split] for split in used if split in data.cut_splits)
    return f"{sizes}{f' ({cut} cut from the training images by split_seed={data.split_seed})' * bool(cut)}"


def _length(trainer: Trainer, data: ImageData) -> str:
    """Returns epochs, steps and batch size; in a resumed run, what is done and what remains."""
    batches, epochs, done = trainer.num_training_batches, trainer.max_epochs or 0, trainer.global_step
    parts = [counted(epochs, "epoch")] if epochs > 0 else []  # of unknown length
    if not math.isinf(batches):
        per_epoch, total = _steps(trainer)
        left = total - done
        parts = [_epochs(left / per_epoch), counted(left, "step")] if total else []
    if done:
        parts = [f"resumes after {counted(done, 'step')}: {', '.join(parts)} to go"]
    if data.own_loaders:
        factors = [(trainer.world_size, "devices"), (trainer.accumulate_grad_batches, "accumulated")]
        product = "".join(f" x {number} {name}" for number, name in factors if number > 1)
        size = data.batch_size * math.prod(number for number, _ in factors)
        parts.append(f"batch size {data.batch_size}{product}{f' = {size}' * bool(product)}")
    return ", ".join(parts)


def _steps(trainer: Trainer) -> tuple[int, int]:
    """Returns the optimizer steps of an epoch and of the training; 0 where that is not known."""
    if math.isinf(trainer.num_training_batches):
        return 0, 0
    per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    limits = (per_epoch * (trainer.max_epochs or 0), trainer.max_steps)
    return per_epoch, min((limit for limit in limits if limit > 0), default=0)


def _whole_warmup(trainer: Trainer, module: LightningModule) -> str | None:
    """Returns a note where the learning rate only rises, as in a short trial of a config for longer training."""
    if not isinstance(module, ViTClassifier):
        return None
    config, (per_epoch, total) = module.optimizer_config, _steps(trainer)
    if not total or config.count_warmup(total_steps=total, steps_per_epoch=per_epoch) < total:
        return None
    given = next(name for name in ("warmup_steps", "warmup_fraction", "warmup_epochs") if getattr(config, name))
    return f"optimizer.{given}={getattr(config, given)} is all of the training: the learning rate only rises"


def _epochs(number: float) -> str:
    number = round(number, 1)
    return counted(int(number), "epoch") if number == int(number) else f"{number:,} epochs"
