"""One run: what it is made of, its training and test, its results."""

from __future__ import annotations

import json
import logging
import resource
import secrets
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.commands.test_report import FIGURES, interval, report_test
from vit_lightning.config.resolve import make_data, make_network, make_settings, to_plain
from vit_lightning.config.teachers import load_teacher
from vit_lightning.data.base import BAD_IMAGES, ImageData
from vit_lightning.errors import UserError
from vit_lightning.figures import curves
from vit_lightning.metric_facts import metric_names
from vit_lightning.storage.checkpoint_files import (
    AtomicCheckpointIO,
    Restored,
    find_checkpoint,
    load_network,
    newest_checkpoint,
    read_checkpoint,
)
from vit_lightning.storage.folder import is_first, log_warnings
from vit_lightning.storage.metrics import MetricsFile, json_number, read_metrics, write_results
from vit_lightning.storage.wandb_mirror import WandbMirror
from vit_lightning.training.callbacks import LearningRate, StepSeeds, Stopwatch, TestPredictions, TrainingBar
from vit_lightning.training.checkpoints import Checkpoints, space_problem
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.distillation import Distillation
from vit_lightning.training.flops import forward_flops
from vit_lightning.training.memory import keep_freed_memory
from vit_lightning.training.stopping import FiniteGuard

Results = dict[str, Any]


@dataclass
class Run:
    """What one run is made of."""

    config: Namespace
    folder: Path
    data: ImageData
    module: ViTClassifier
    trainer: Trainer
    stopwatch: Stopwatch
    predictions: TestPredictions
    metrics: MetricsFile
    mirror: WandbMirror


def prepare(
    config: Namespace, arguments: dict[str, Any], folder: Path, *, begins: bool = True, data: ImageData | None = None
) -> Run:
    """Makes all parts of a run; weights and order follow the seed.

    Args:
        config: the resolved configuration.
        arguments: those of the Trainer; its callbacks and loggers come beside ours.
        folder: the run folder.
        begins: whether the run begins here, and so with the weights of ``config.init_from``.
        data: the data of the configuration, where it has been made already and its images are in memory.
    """
    seed_everything(config.seed_everything, verbose=False)
    data, module = make_data_and_module(config, data)
    if begins and config.init_from is not None:
        path = find_checkpoint(config.init_from, "init_from")
        load_network(module.network, read_checkpoint(path), path)
    settings, page = make_settings(config), to_plain(config)
    stopwatch, predictions, metrics = Stopwatch(), TestPredictions(), MetricsFile(folder)
    guard = FiniteGuard(folder)
    checkpoints = Checkpoints(folder, settings.checkpoint, page, guard)
    weights = sum(weight.numel() * weight.element_size() for weight in module.network.parameters())
    if is_first() and (problem := space_problem(folder, weights, copies=3 + (module.average is not None))):
        raise UserError(problem)
    shape = (data.in_channels, *data.image_size)
    facts = {"parameters": count_parameters(module), "flops": forward_flops(module.network, shape)}
    mirror = WandbMirror(folder, run_id(folder), settings.wandb, {**page, **facts})
    own = [StepSeeds(config.seed_everything), guard, LearningRate(), stopwatch, checkpoints]
    trainer = make_trainer(arguments, folder, own, [metrics, mirror])
    return Run(config, folder, data, module, trainer, stopwatch, predictions, metrics, mirror)


def train_and_test(run: Run, newest: Restored | None = None) -> Results:
    """Trains from the start or from a checkpoint, unless that one is of the end of training; then tests the best."""
    started = time.time()
    say(f"{run.config.experiment}: {_describe(run.module, run.data)}")
    run.mirror.start()
    try:
        with log_warnings(run.folder):
            _train(run, newest)
            results = _test_best(run)
    except BaseException as fault:
        run.mirror.finish(exit_code=1)
        if isinstance(fault, KeyboardInterrupt | SystemExit):
            say(f"stopped; to go on: lightning fit --resume {run.folder}")
        raise
    results["seconds"] = round(time.time() - started, 3)
    results["peak_memory_mb"] = _peak_memory_mb()
    if is_first():
        _draw_and_mirror(run, results)
    write_results(run.folder, results)
    summary(run.folder, results)
    if left_out := sum(map(len, run.data.bad_images.values())):
        say(f"left out    {left_out} damaged images: {run.folder / BAD_IMAGES}")
    say(run.mirror.hint())
    return results


def _train(run: Run, newest: Restored | None) -> None:
    path, checkpoint, complaints = newest or (None, {}, [])
    for complaint in complaints:
        warnings.warn(f"{complaint}: falling back to {path.name if path else None}", stacklevel=2)
    done = checkpoint.get("global_step", 0)
    run.metrics.go_on(done, checkpoint.get("row"))
    run.mirror.catch_up(run.folder)
    if checkpoint.get("finished"):
        return
    if path is not None:
        say(f"goes on after {done} steps")
    if run.trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=path, weights_only=True)


def _draw_and_mirror(run: Run, results: Results) -> None:
    """The figures of a run, in its folder and in W&B."""
    curves(read_metrics(run.folder), run.folder.name).savefig(run.folder / "curves.png", dpi=100)
    if run.predictions.table:
        assert run.module.confusion_matrix is not None
        say(report_test(run.folder, run.predictions.table, run.data, run.module.confusion_matrix))
    mirror_results(run.mirror, results)
    run.mirror.finish()


def mirror_results(mirror: WandbMirror, results: Results) -> None:
    """What a run has when it is over: figures, final values, and the model if it is wanted."""
    images = {name: mirror.folder / f"{name}.png" for name in ("curves", *FIGURES)}
    mirror.log_images({name: path for name, path in images.items() if path.is_file()}, step=results["steps"])
    mirror.log_summary(results)
    if mirror.config.log_model and mirror.mode == "online":  # offline, W&B would keep a second copy of it
        mirror.log_model([find_checkpoint(mirror.folder), mirror.folder / "config.yaml"])


def run_id(folder: Path) -> str:
    """The run's id in W&B: kept in ``environment.json``, drawn where there is none yet."""
    path = folder / "environment.json"
    if path.is_file():
        known: str = json.loads(path.read_text(encoding="utf-8"))["run_id"]
        return known
    return secrets.token_hex(4)


def _test_best(run: Run) -> Results:
    """The figures of a run that has been trained, and of the test of its best checkpoint unless it is not wanted."""
    run.folder = run.trainer.strategy.broadcast(run.folder)
    best, newest = find_checkpoint(run.folder), newest_checkpoint(run.folder)
    assert newest is not None
    last = newest.checkpoint  # the one before where a kill came between its two renames
    checkpoint = read_checkpoint(best)
    watch, epoch_metrics = last["callbacks"]["Stopwatch"], metric_names("train", "val")
    results: Results = {
        "seed": run.config.seed_everything,
        "parameters": count_parameters(run.module),
        "flops": run.mirror.page["flops"],
        "epochs": last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
        "steps": last["global_step"],
        "best_step": checkpoint["global_step"],
        "train_seconds": round(watch["seconds"], 3),
        "images_per_second": round(watch["images"] / watch["seconds"], 1) if watch["seconds"] else 0.0,
        **{name: json_number(value) for name, value in checkpoint["metrics"].items() if name in epoch_metrics},
    }
    if run.config.test:
        load_network(run.module.network, checkpoint, best)
        run.trainer.callbacks.append(run.predictions)  # type: ignore[attr-defined]
        # the row of the test stands at the end of training, also where nothing was trained after a restart
        run.trainer.fit_loop.epoch_progress.current.completed = results["epochs"]
        run.trainer.fit_loop.epoch_loop._batches_that_stepped = results["steps"]
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        results |= logged(run.trainer, "test/") | interval(run.predictions.table)
        if is_first() and run.predictions.table:
            np.savez_compressed(run.folder / "test_predictions.npz", **run.predictions.table)  # type: ignore[arg-type]
    return results


def make_data_and_module(
    config: Namespace, data: ImageData | None = None, kind: type[ViTClassifier] = ViTClassifier
) -> tuple[ImageData, ViTClassifier]:
    data = make_data(config) if data is None else data
    settings, network = make_settings(config), make_network(config)
    chosen = settings.distillation
    module = kind(
        network,
        num_classes=data.num_classes,
        optimizer=settings.optimizer,
        loss=settings.loss,
        ema=settings.ema,
        distillation=Distillation(chosen, load_teacher(chosen.teacher, data)) if chosen.teacher else None,
    )
    return data, module


def make_trainer(arguments: dict[str, Any], folder: Path, own: list[Callback], own_loggers: list[Logger]) -> Trainer:
    """Lightning's Trainer with the page's arguments; the page's callbacks and loggers come beside ours."""
    callbacks = _as_list(arguments.pop("callbacks"))
    loggers = [logger for logger in _as_list(arguments.pop("logger")) if not isinstance(logger, bool)]
    wants_bar = arguments["enable_progress_bar"] is not False
    if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        own = [*own, TrainingBar()]
    if not own_loggers:  # nothing is trained: nothing to save
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    plugins = _as_list(arguments.pop("plugins"))
    if any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        raise UserError("trainer.plugins: how checkpoints are written is not for the page, they carry a checksum")
    plugins = [*plugins, AtomicCheckpointIO()]
    try:
        trainer = Trainer(
            **arguments,
            plugins=plugins,
            enable_checkpointing=bool(own_loggers),
            callbacks=[*own, *callbacks],
            logger=[*own_loggers, *loggers] or False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # our loaders divide the images among ranks, without repeating any
        )
        # of a run that ends by steps, Lightning would end an epoch twice that ends with the checkpoint it goes on from
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
        return trainer
    except Exception as fault:  # Lightning raises a dozen types for arguments that do not fit
        named = ("accelerator", "devices", "strategy", "precision")
        asked = ", ".join(f"{name}={arguments[name]}" for name in named if arguments[name] is not None)
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]} (trainer has {asked})") from fault


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def logged(trainer: Trainer, prefix: str) -> Results:
    return {name: json_number(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}


def count_parameters(module: ViTClassifier) -> int:
    return sum(weight.numel() for weight in module.network.parameters())


def _peak_memory_mb() -> float:
    """The most memory that the run has had, in 10^6 bytes: tensors on the GPU, or the process on a CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return round(torch.cuda.max_memory_allocated() / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def _describe(module: ViTClassifier, data: ImageData) -> str:
    height, width = data.image_size
    return (
        f"{type(module.network).__name__} with {count_parameters(module):,} parameters on {type(data).__name__}, "
        f"{data.num_classes} classes, images {data.in_channels}x{height}x{width}"
    )


def summary(folder: Path, results: Results) -> None:
    rows = [("test", "test/acc", "test/loss"), ("validation", "val/acc", "val/loss")]
    lines = [
        f"{name:<11} accuracy {100 * float(results[acc]):6.2f} %   loss {float(results[loss]):.4f}"
        + _limits(results, acc)
        for name, acc, loss in rows
        if acc in results
    ]
    lines += [
        f"{'training':<11} {results['epochs']} epochs, {results['steps']} steps, {results['train_seconds']:.0f} s, "
        f"{results['images_per_second']:,.0f} images/s; in all {results['seconds']:.0f} s",
        f"{'run':<11} {folder}",
        f"{'test again':<11} lightning test --ckpt {folder}",
    ]
    say("\n".join(lines))


def _limits(results: Results, accuracy: str) -> str:
    """The limits of an accuracy, where they are known."""
    low, high = (results.get(f"{accuracy}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"   95 % interval {100 * low:.1f} to {100 * high:.1f} %"


@rank_zero_only
def say(text: str) -> None:
    if text:
        print(text, file=sys.stdout, flush=True)


def quiet() -> None:
    """Leaves out what Lightning tells every user at every start, and advice that does not fit our loaders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # kernels with one channel under DDP
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # on a cluster's login node
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 with torch 2.15
