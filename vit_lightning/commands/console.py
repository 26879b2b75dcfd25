"""Text in the terminal, printed by the first process alone: the lines with which a run begins and ends."""

import errno
import logging
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

import vit_lightning
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import keep_own_files, trust_flag
from vit_lightning.data.base import ImageData
from vit_lightning.data.splits import Split
from vit_lightning.errors import counted
from vit_lightning.metric_facts import Stage, facts_of
from vit_lightning.storage.folder import FULL
from vit_lightning.training.callbacks import training_steps
from vit_lightning.training.classifier import ConfiguredOptimizer
from vit_lightning.training.lightning_detours import trained_steps
from vit_lightning.training.optim import OptimizerConfig
from vit_lightning.training.resources import AUTO


@rank_zero_only
def say(text: str) -> None:
    """Prints a text unless it is empty; at once, so that a log file is never behind."""
    if text:
        try:
            print(text, flush=True)
        except OSError as fault:  # a log on a full disk, or a reader that has gone, ends no training
            if fault.errno not in (*FULL, errno.EPIPE):
                raise


def row(name: str, text: str) -> str:
    """Returns a line of the start or the end of a run."""
    return f"{name:<11} {text}"


def _warning_text(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Returns a warning as Lightning prints it, of our own without the line of code."""
    is_ours = Path(filename).is_relative_to(Path(vit_lightning.__file__).parent)
    return f"warning: {message}\n" if is_ours else f"{filename}:{lineno}: {message}\n"


warnings.formatwarning = _warning_text  # also of what a config is told


def quiet() -> None:
    """Hides messages that Lightning prints at every start, and its advice that does not fit our data loaders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # printed only when the config asks for it
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)
    for message in (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        "Grad strides do not match",  # kernels with one channel under DDP
        ".*`srun` command is available.*",  # on a cluster's login node
        ".*LeafSpec.*",  # Lightning 2.6 with torch 2.15
    ):
        warnings.filterwarnings("ignore", message=message)


def print_summary(folder: Path, results: dict[str, Any], further: Iterable[str]) -> None:
    """Prints metrics, time and the folder of a finished run."""
    best = f"   (best checkpoint, step {results['best_step']:,} of {results['steps']:,})"
    lengths = counted(results["epochs"], "epoch"), counted(results["steps"], "step")
    lines = [
        tested := stage_lines("test", results, further),
        (line := stage_line("val", results)) and line + best,
        row(
            "training",
            f"{', '.join(lengths)}, {results['train_seconds']:.0f} s, "
            f"{results['images_per_second']:,.0f} images/s; in all {results['seconds']:.0f} s",
        ),
        row("run", str(folder)),
        row("test again", f"lightning test --ckpt {shlex.quote(str(folder))}{trust_flag()}") if tested else "",
    ]
    say("\n".join(filter(None, lines)))


def stage_lines(stage: Stage, results: Mapping[str, Any], further: Iterable[str]) -> str:
    """Returns the metrics of a stage, of a test also those of further test sets, each in a line."""
    sets = {f"{stage}/{name}": f"{stage}/{name}/" for name in further}
    own = {name: value for name, value in results.items() if not name.startswith((*sets.values(),))}
    return "\n".join(filter(None, [stage_line(stage, own), *(stage_line(one, results) for one in sets)]))


def stage_line(stage: str, results: Mapping[str, Any]) -> str:
    """Returns the metrics of a stage in one line, with the interval of the accuracy; an empty text without any."""
    starts = f"{stage}/", f"{stage}_"  # a module of the user's may log test_acc
    names = [name for name in results if name.startswith(starts) and not name.endswith(("/acc_low", "/acc_high"))]
    names = [name for name in names if not isinstance(results[name], int)]  # of images
    shown = []
    for name in sorted(names, key=lambda name: name.endswith("/loss")):  # the loss comes last
        value, facts = float(results[name]), facts_of(name)
        label = name[len(stage) + 1 :] if facts is None else facts.label
        low, high = (results.get(f"{name}_{end}") for end in ("low", "high"))
        between = "" if low is None or high is None else f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
        shown.append(f"{label} {f'{100 * value:.2f} %' if facts and facts.percent else f'{value:.4f}'}{between}")
    return row({"val": "validation"}.get(stage, stage), ", ".join(shown)) if shown else ""


SPLIT_WORDS: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}


def start_lines(experiment: Experiment, trainer: Trainer, facts: Mapping[str, Any]) -> str:
    """Returns the lines on model and devices: those of all processes, with the precision as a config names it.

    Args:
        experiment: the experiment.
        trainer: its Trainer.
        facts: numbers of parameters and of trained ones.
    """
    parts = [experiment.config[key] for key in ("module", "model")]
    name = " of ".join(str(part["class_path"]).removeprefix("vit_lightning.") for part in parts if part is not None)
    if named := (parts[1] or {}).get("init_args", {}).get("model_name"):  # of timm
        name += f" {named}"
    number = counted(facts["parameters"], "parameter")
    if "trained_parameters" in facts:
        number = f"{facts['trained_parameters']:,} of {number} trained"
    device = trainer.strategy.root_device
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"CPU, {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else device.type.upper()
    several = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    is_auto = experiment.trainer["precision"] == AUTO
    lines = [
        row("model", f"{name}, {number}"),
        row("device", f"{several}{place}, precision {trainer.precision}{' (auto)' * is_auto}"),
    ]
    if device.type == "cuda" and experiment.trainer["deterministic"] is not True:
        lines.append(row("note", "a GPU resumes bit for bit only with trainer.deterministic=true, which costs speed"))
    return "\n".join(lines)


def say_beside_bar(text: str) -> None:
    """Prints a text while a progress bar may be on the screen."""
    with tqdm.external_write_mode():
        say(text)


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
        if self.experiment.trainer["log_every_n_steps"] is None and (total := _steps(trainer)[1]):
            trainer.log_every_n_steps = min(50, math.ceil(total / 20))  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            data = self.experiment.data
            height, width = data.image_size
            images = f"{data.num_classes} classes, {height}x{width} pixels, {counted(data.in_channels, 'channel')}"
            say(row("data", f"{data.title.rpartition('.')[2]}, {images}"))
            if data.notice:
                say(row("note", data.notice))
            if data.own_loaders:
                say(row("images", _splits(data, test=self.experiment.config["test"])))
            say(row("training", _length(trainer, data)))
            if note := _schedule_note(trainer, pl_module):
                say(row("note", note))
        if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._begin()  # within max_time there would be less time to train

    def on_train_batch_start(self, *args: Any) -> None:
        if self._has_trained:
            self._begin()
        self._has_trained = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if len(sys.modules) != self._imported:  # to look through all takes as long as to write a small checkpoint
            self._imported = len(sys.modules)
            keep_own_files(Path(trainer.default_root_dir))


def _splits(data: ImageData, *, test: bool) -> str:
    """Returns the number of images in each split, and which are cut from the training images."""
    used: list[Split] = ["train", "val", "test"] if test else ["train", "val"]
    sizes = ", ".join(f"{data.image_count(split):,} {SPLIT_WORDS[split]}" for split in used)
    cut = " and ".join(SPLIT_WORDS[split] for split in used if split in data.cut_splits)
    return f"{sizes}{f' ({cut} cut from the training images by split_seed={data.split_seed})' * bool(cut)}"


def _length(trainer: Trainer, data: ImageData) -> str:
    """Returns epochs, steps and batch size; in a resumed run, what is done and what remains."""
    batches, epochs, done = trainer.num_training_batches, trainer.max_epochs or 0, trained_steps(trainer)
    per_epoch, total = (0.0, 0) if math.isinf(batches) else _steps(trainer)  # of unknown length
    parts = [counted(epochs, "epoch")] if math.isinf(batches) and epochs > 0 else [f"max_steps={trainer.max_steps}"]
    parts = [_epochs(total / per_epoch), counted(total, "step")] if total else parts
    if done:
        to_go = f" of {total:,} ({_epochs((total - done) / per_epoch)} left)" if total else ""
        parts = [f"resumes after step {done:,}{to_go}"]
    if data.own_loaders:
        factors = [(trainer.world_size, "devices"), (min(trainer.accumulate_grad_batches, batches), "accumulated")]
        product = "".join(f" x {number} {name}" for number, name in factors if number > 1)
        size = data.batch_size * math.prod(number for number, _ in factors)
        parts.append(f"batch size {data.batch_size}{product}{f' = {size}' * bool(product)}")
    return ", ".join(parts)


def _steps(trainer: Trainer) -> tuple[float, int]:
    """Returns the optimizer steps of an epoch and of the training; 0 where that is not known."""
    per_epoch, total = (0 if math.isinf(n) else n for n in training_steps(trainer, trainer.num_training_batches))
    return per_epoch, int(total)


def _schedule_note(trainer: Trainer, module: LightningModule) -> str:
    """Returns a note where the learning rate only rises; else nothing."""
    per_epoch, total = _steps(trainer)
    config = module.optimizer_config if isinstance(module, ConfiguredOptimizer) else OptimizerConfig()
    if not total or config.count_warmup(total_steps=total, steps_per_epoch=int(per_epoch)) < total:
        return ""
    given = next(name for name in ("warmup_steps", "warmup_fraction", "warmup_epochs") if getattr(config, name))
    text = f"optimizer.{given}={getattr(config, given)} takes all of the training: the learning rate only rises"
    return f"{text}, to {config.lr:g} in the last step (a shorter warm-up, or a longer training, lets it fall)"


def _epochs(number: float) -> str:
    number = round(number, 1)
    return counted(int(number), "epoch") if number == int(number) else f"{number:,} epochs"
