"""Parts that commands share: a seeded session with a folder for its results, the LightningModule, the Trainer."""

import contextlib
import functools
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import as_list
from vit_lightning.config.own_files import OwnFault, own_traceback
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import shield_workers
from vit_lightning.errors import UserError, one_line
from vit_lightning.figures.test_report import Table, interval, other_accuracy
from vit_lightning.metric_facts import STEP_METRICS
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, newest_checkpoint, run_folder_of
from vit_lightning.storage.folder import is_first, new_folder, read_json
from vit_lightning.storage.metrics import MetricsFile, json_number
from vit_lightning.training.callbacks import TestPredictions, TrainingBar
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.lightning_detours import logged_by, take_detours
from vit_lightning.training.resources import AUTO, auto_precision

Results = dict[str, Any]
Measured = tuple[Results, dict[str, Table]]
"""Metrics of tests, and the predictions of each test set by name."""
MODEL_CHECKPOINTS = "model_checkpoints"
"""Folder in a run folder with what a ModelCheckpoint of the config writes, unless it has a folder of its own."""


@contextlib.contextmanager
def session(experiment: Experiment, command: str) -> Iterator[Path]:
    """Seeds everything and gives a new folder for the results of a command; an empty one is removed at the end.

    It is ``out``, or a folder named after the time: RUN/COMMAND/TIME with the model of a
    run, runs/FILE/COMMAND/TIME with that of a file, else runs/COMMAND/TIME-NAME.
    """
    quiet()
    seed_everything(experiment.seed, verbose=False)
    parent, suffix = Path("runs") / command, experiment.name
    if experiment.trained is not None:
        path = experiment.trained.path
        parent, suffix = (run_folder_of(path) or Path("runs") / path.stem) / command, ""
    with new_folder(experiment.out, parent, suffix) as folder, own_faults(folder), chosen_matmul(experiment):
        yield folder


@contextlib.contextmanager
def chosen_matmul(experiment: Experiment) -> Iterator[None]:
    """Sets the precision of float32 products for a while, where the config has one."""
    chosen = experiment.config["matmul_precision"]
    if chosen is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def own_faults(folder: Path | None) -> Iterator[None]:
    """Shows an error of the user's own code by its lines in their files; ``error.log`` has the whole traceback.

    Args:
        folder: the run folder; None where nothing is written.

    Raises:
        OwnFault: in place of the error.
        UserError: a mistake in the config that Lightning met.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        if isinstance(fault, AttributeError) and fault.obj is None and fault.name == "experiment":
            why = "validate, test and predict have no logger; fit has in its test"
            raise UserError(f"self.logger.experiment: {why} (ask `if self.logger` before it)") from fault
        if isinstance(fault, AttributeError) and isinstance(fault.obj, MetricsFile):  # the first, which is self.logger
            name = f"self.logger.{fault.name}"
            instead = "give the one your code calls: --trainer.logger=CSVLogger --trainer.logger.save_dir=logs"
            raise UserError(f"{name}: the config has no logger of Lightning ({instead})") from fault
        if type(fault).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise UserError(f"compile=true: torch cannot compile it: {one_line(fault)} (give compile=false)") from fault
        text = own_traceback(fault)
        if text is None:
            if isinstance(fault, RuntimeError) and str(fault).startswith("Error(s) in loading state_dict"):
                raise UserError(f"the checkpoint is of another architecture: {one_line(fault)[:300]}") from fault
            if (refusal := _refused_by_lightning(fault)) is not None:
                raise UserError(refusal) from fault  # a mistake that only the training shows
            raise
        if folder is not None and folder.is_dir():
            log = folder / ("error.log" if is_first() else f"error-rank{_get_rank()}.log")
            with contextlib.suppress(OSError):  # a full disk
                log.write_text("".join(traceback.format_exception(fault)), encoding="utf-8")
                text += f"\nwhole traceback: {log}"
        raise OwnFault(text) from fault


def _refused_by_lightning(fault: Exception) -> str | None:
    """Returns what Lightning refuses, or one of its callbacks fails on, in one line; None for a fault of ours."""
    places = list(traceback.walk_tb(fault.__traceback__))
    names = [str(frame.f_globals.get("__name__")) for frame, _ in places]
    refuses = isinstance(fault, ValueError | TypeError | RuntimeError) and names[-1].startswith("lightning.pytorch.")
    if refuses or isinstance(fault, MisconfigurationException):
        return " ".join(str(fault).split())
    kinds = [type(frame.f_locals.get("self")) for frame, _ in places]
    callback = next(
        (kind for kind in kinds if issubclass(kind, Callback) and kind.__module__.startswith("lightning.")), None
    )
    if callback is None or names[-1].startswith("vit_lightning."):
        return None
    return f"trainer.callbacks.{callback.__name__}: {one_line(fault)}"


def make_trainer(arguments: Mapping[str, Any], folder: Path, own: list[Callback], own_loggers: list[Logger]) -> Trainer:
    """Returns Lightning's Trainer with the config's arguments; ours come before its callbacks and after its loggers.

    So ``self.logger`` and ``trainer.log_dir`` of the user's code are those of the logger that the config names.

    Args:
        arguments: arguments of the Trainer, from the config.
        folder: the run folder.
        own: our callbacks.
        own_loggers: our loggers; without any, no checkpoints are written.

    Raises:
        UserError: the arguments do not fit together, or do not fit this machine.
    """
    callbacks = as_list(arguments["callbacks"])
    loggers = [logger for logger in as_list(arguments["logger"]) if not isinstance(logger, bool)]
    wants_bar = arguments["enable_progress_bar"] is not False
    if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        monitor = next((each.settings.monitor for each in own if isinstance(each, Checkpoints)), "")
        own = [*own, TrainingBar(monitor)]
    if not own_loggers:
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder.resolve() / MODEL_CHECKPOINTS)  # else among ours
    plugins, precision = as_list(arguments["plugins"]), arguments["precision"]
    if precision == AUTO:
        began = read_json(folder / "environment.json").get("precision")  # of a run that is resumed
        precision = began or auto_precision(arguments["accelerator"])
    if any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        raise UserError(
            "trainer.plugins: a CheckpointIO cannot be given, since our own writes checksums (leave it out)"
        )
    arguments = {
        **arguments,
        "precision": precision,
        "plugins": [*plugins, AtomicCheckpointIO()],
        "enable_checkpointing": bool(own_loggers),
        "callbacks": [*own, *callbacks],
        "logger": [*loggers, *own_loggers] or False,
        "default_root_dir": folder,
    }
    try:
        trainer = Trainer(**arguments)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as fault:
        named = ["accelerator", "devices", "strategy", "precision"]
        named += [name for name, value in arguments.items() if isinstance(value, str) and value in str(fault)]
        given = ", ".join(f"{name}={arguments[name]}" for name in dict.fromkeys(named) if arguments[name] is not None)
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]} (given: {given})") from fault
    take_detours(trainer, shield_workers)
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if arguments["profiler"]:
        profiler.dirpath = profiler.dirpath or folder  # else that of the first logger
        profiler.filename = profiler.filename or "profile"  # else only in Lightning's log
    return trainer


def training_results(
    experiment: Experiment, facts: Mapping[str, Any], folder: Path, best: Mapping[str, Any]
) -> Results:
    """Returns the results of a training, with the metrics of its best checkpoint.

    Args:
        experiment: the experiment.
        facts: parameters and floating-point operations.
        folder: the run folder.
        best: the best checkpoint.
    """
    newest = newest_checkpoint(folder)  # previous.ckpt, if a kill came between the two renames of a save
    assert newest is not None
    last = newest.checkpoint
    watch, metrics = last["callbacks"]["Stopwatch"], best["metrics"]
    return {
        "seed": experiment.seed,
        **facts,
        "epochs": last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
        "steps": last["global_step"],
        "best_step": best["global_step"],
        "train_seconds": round(watch["seconds"], 3),
        "images_per_second": round(watch["images"] / watch["seconds"], 1) if watch["seconds"] else 0.0,
        **{name: json_number(value) for name, value in metrics.items() if name not in STEP_METRICS},
        **({"train_images": experiment.data.image_count("train")} if experiment.data.own_loaders else {}),
    }


def measure_test(trainer: Trainer, module: LightningModule, data: ImageData, predictions: TestPredictions) -> Measured:
    """Tests a module on the test images, then on each further test set; returns the metrics and tables of predictions.

    Those of a further set are called ``test/NAME/acc``, its table by its name; that of the test images has none.
    """
    results, tables = Results(), dict[str, Any]()
    for name, images in {"": data, **data.further}.items():
        rename = functools.partial(re.sub, r"^test[/_]", f"test/{name}/") if name else str
        with logged_by(trainer, rename):
            trainer.test(module, datamodule=images.for_trainer, verbose=False)
        tables[name] = predictions.table
        averages = {f"test/{chosen}" for chosen in getattr(module, "metric_table", ())} - {"test/acc"}
        shares = {key: value for key, value in trainer.callback_metrics.items() if key not in averages}
        if wrong := other_accuracy(predictions.table, shares):
            say(row("warning", wrong))
        found = logged(trainer, "test") | ({} if wrong else interval(predictions.table))
        found |= {"test_images": len(predictions.table["label"])} if predictions.table else {}
        results |= {rename(key): value for key, value in found.items()}
    if not tables[""] and not type(module).__module__.startswith("vit_lightning."):
        why = f"test_step of {type(module).__name__} returns no logits, or batches are no (images, labels)"
        why = f"there are {loaders} test loaders" if (loaders := len(trainer.num_test_batches)) > 1 else why
        unheld = "what it logs is held against no predictions (tensors are averaged over batches by their sizes)"
        say(row("note", f"no report of the test images, and {unheld}: {why}"))
    return results, tables


def logged(trainer: Trainer, prefix: str) -> Results:
    return {name: json_number(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
