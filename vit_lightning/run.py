"""One run from a resolved configuration: its folder, training, test, results."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.callbacks import LearningRate, StepSeeds, Stopwatch, TestPredictions, TrainingBar
from vit_lightning.checkpoints import (
    LAST,
    Checkpoints,
    find_checkpoint,
    load_network,
    read_checkpoint,
    run_folder_of,
)
from vit_lightning.classifier import ViTClassifier
from vit_lightning.config import (
    make_data,
    make_network,
    make_settings,
    make_trainer_arguments,
    resolve,
    to_plain,
    to_yaml,
)
from vit_lightning.data import ImageData
from vit_lightning.environment import describe_environment
from vit_lightning.errors import UserError
from vit_lightning.figures import curves
from vit_lightning.folder import claim_folder, give_up, is_first, log_warnings, write_whole
from vit_lightning.tracking import MetricsFile, json_number, read_metrics

Results = dict[str, Any]

EPOCH_METRICS = ("train/loss", "train/acc", "val/loss", "val/acc", "val/acc5")
"""What ``results.json`` holds of the epoch of the best checkpoint."""


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


def fit(config: Namespace) -> Results:
    """Trains, tests the best checkpoint, and leaves all of it in a run folder; returns what ``results.json`` holds."""
    _quiet()
    if config.trainer.fast_dev_run:
        return _fast_dev_run(config)
    arguments = make_trainer_arguments(config)
    folder = claim_folder(config.out, Path("runs") / config.experiment, f"seed{config.seed_everything}")
    try:
        run = _prepare(config, arguments, folder)
    except UserError:
        give_up(folder)
        raise
    write_whole(folder / "config.yaml", to_yaml(config))
    write_whole(folder / "environment.json", json.dumps(describe_environment(), indent=2) + "\n")
    return _train_and_test(run)


def resume(folder: Path) -> Results:
    """Goes on with a run in its folder, with its own configuration, from its last checkpoint or else from the start.

    Only tests if training was over, and does nothing if all was done.
    """
    _quiet()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"resume={folder} is no run folder: it holds no config.yaml")
    if (folder / "results.json").is_file():
        results: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        _say(f"{folder}: all was done")
        _summary(folder, results)
        return results
    config = resolve(["--config", str(folder / "config.yaml")])
    run = _prepare(config, make_trainer_arguments(config), folder)
    return _train_and_test(run, folder / LAST if (folder / LAST).is_file() else None)


def _prepare(config: Namespace, arguments: dict[str, Any], folder: Path) -> Run:
    """Makes all parts of a run; weights and order follow the seed."""
    seed_everything(config.seed_everything, verbose=False)
    data, module = _data_and_module(config)
    if config.init_from is not None:
        path = find_checkpoint(config.init_from, "init_from")
        load_network(module.network, read_checkpoint(path), path)
    stopwatch, predictions, metrics = Stopwatch(), TestPredictions(), MetricsFile(folder)
    checkpoints = Checkpoints(folder, make_settings(config).checkpoint, to_plain(config))
    own = [StepSeeds(config.seed_everything), LearningRate(), stopwatch, predictions, checkpoints]
    trainer = _trainer(arguments, folder, own, [metrics])
    return Run(config, folder, data, module, trainer, stopwatch, predictions, metrics)


def _train_and_test(run: Run, last: Path | None = None) -> Results:
    """Trains from the start or from a checkpoint, unless that one is of the end of training; then tests the best."""
    started = time.time()
    _say(f"{run.config.experiment}: {_describe(run.module, run.data)}")
    with log_warnings(run.folder):
        checkpoint = read_checkpoint(last) if last is not None else None
        if checkpoint is None or not checkpoint["finished"]:
            if checkpoint is not None:
                run.metrics.mark_resumed(checkpoint["global_step"])
                _say(f"goes on after {checkpoint['global_step']} steps")
            try:
                run.trainer.fit(run.module, datamodule=run.data, ckpt_path=last, weights_only=True)
            except (KeyboardInterrupt, SystemExit):
                _say(f"stopped; to go on: lightning fit --resume {run.folder}")
                raise
        results = _test_best(run)
    results["seconds"] = round(time.time() - started, 3)
    if is_first():
        curves(read_metrics(run.folder), run.folder.name).savefig(run.folder / "curves.png", dpi=150)
    write_whole(run.folder / "results.json", json.dumps(results, indent=2) + "\n")
    _summary(run.folder, results)
    return results


def _test_best(run: Run) -> Results:
    """The figures of a run that has been trained, and of the test of its best checkpoint unless it is not wanted."""
    run.folder = run.trainer.strategy.broadcast(run.folder)
    best, last = find_checkpoint(run.folder), read_checkpoint(run.folder / LAST)
    checkpoint = read_checkpoint(best)
    watch = last["callbacks"]["Stopwatch"]
    results: Results = {
        "seed": run.config.seed_everything,
        "parameters": _count(run.module),
        "epochs": last["epoch"],
        "steps": last["global_step"],
        "best_step": checkpoint["global_step"],
        "train_seconds": round(watch["seconds"], 3),
        "images_per_second": round(watch["images"] / watch["seconds"], 1) if watch["seconds"] else 0.0,
        **{name: json_number(value) for name, value in checkpoint["metrics"].items() if name in EPOCH_METRICS},
    }
    if run.config.test:
        load_network(run.module.network, checkpoint, best)
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        results |= _logged(run.trainer, "test/")
        if is_first():
            np.savez_compressed(run.folder / "test_predictions.npz", **run.predictions.table)  # type: ignore[arg-type]
    return results


def evaluate(config: Namespace, verb: str) -> Results:
    """``validate``, ``test`` or ``predict`` with the weights of ``config.ckpt``; leaves a folder with what came out."""
    _quiet()
    seed_everything(config.seed_everything, verbose=False)
    config.trainer.logger = False
    arguments = make_trainer_arguments(config)
    data, module = _data_and_module(config)
    path = find_checkpoint(config.ckpt)
    load_network(module.network, read_checkpoint(path), path)
    run = run_folder_of(path)
    folder = claim_folder(config.out, (Path("runs") / path.stem if run is None else run) / verb, "")
    trainer = _trainer(arguments, folder, [], [])
    if verb == "predict":
        batches = trainer.predict(module, datamodule=data) or []
        if trainer.is_global_zero:
            _write_predictions(folder / "predictions.csv", batches, data)
            _say(f"predictions of the test images: {folder / 'predictions.csv'}")
        return {}
    run_verb = trainer.validate if verb == "validate" else trainer.test
    run_verb(module, datamodule=data, verbose=False)
    results = _logged(trainer, "val/" if verb == "validate" else "test/")
    write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    for name, value in {**results, "weights": path, "results": folder}.items():
        _say(f"{name:<10} {value:.4f}" if isinstance(value, float) else f"{name:<10} {value}")
    return results


def _data_and_module(config: Namespace) -> tuple[ImageData, ViTClassifier]:
    data = make_data(config)
    settings = make_settings(config)
    module = ViTClassifier(
        make_network(config), num_classes=data.num_classes, optimizer=settings.optimizer, loss=settings.loss
    )
    return data, module


def _trainer(arguments: dict[str, Any], folder: Path, own: list[Callback], own_loggers: list[Logger]) -> Trainer:
    """Lightning's Trainer with the page's arguments; the page's callbacks and loggers come beside ours."""
    callbacks = _as_list(arguments.pop("callbacks"))
    loggers = [logger for logger in _as_list(arguments.pop("logger")) if not isinstance(logger, bool)]
    wants_bar = arguments["enable_progress_bar"] is not False
    if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        own = [*own, TrainingBar()]
    if not own_loggers:
        arguments["enable_checkpointing"] = False
    try:
        return Trainer(
            **arguments,
            callbacks=[*own, *callbacks],
            logger=[*own_loggers, *loggers] or False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # our loaders divide the images among ranks, without repeating any
        )
    except Exception as fault:  # Lightning raises a dozen types for arguments that do not fit
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]}") from fault


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _fast_dev_run(config: Namespace) -> Results:
    seed_everything(config.seed_everything, verbose=False)
    data, module = _data_and_module(config)
    trainer = _trainer(make_trainer_arguments(config), Path("runs"), [StepSeeds(config.seed_everything)], [])
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    _say("fast_dev_run: training, validation and test work; nothing was saved")
    return _logged(trainer, "")


def _logged(trainer: Trainer, prefix: str) -> Results:
    return {name: json_number(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}


def _count(module: ViTClassifier) -> int:
    return sum(weight.numel() for weight in module.network.parameters())


def _describe(module: ViTClassifier, data: ImageData) -> str:
    height, width = data.image_size
    return (
        f"{type(module.network).__name__} with {_count(module):,} parameters on {type(data).__name__}, "
        f"{data.num_classes} classes, images {data.in_channels}x{height}x{width}"
    )


def _summary(folder: Path, results: Results) -> None:
    rows = [("test", "test/acc", "test/loss"), ("validation", "val/acc", "val/loss")]
    lines = [
        f"{name:<11} accuracy {100 * results[acc]:6.2f} %   loss {results[loss]:.4f}"
        for name, acc, loss in rows
        if acc in results
    ]
    lines += [
        f"{'training':<11} {results['epochs']} epochs, {results['steps']} steps, {results['train_seconds']:.0f} s, "
        f"{results['images_per_second']:,.0f} images/s; in all {results['seconds']:.0f} s",
        f"{'run':<11} {folder}",
        f"{'test again':<11} lightning test --ckpt {folder}",
    ]
    _say("\n".join(lines))


def _write_predictions(path: Path, batches: list[Any], data: ImageData) -> None:
    names = data.class_names
    order = torch.cat([batch["indices"] for batch in batches]).argsort()
    probabilities = torch.cat([batch["probabilities"] for batch in batches])[order]
    labels = torch.cat([batch["labels"] for batch in batches])[order]
    lines = ["index,label,prediction,probability"]
    for index, (label, row) in enumerate(zip(labels.tolist(), probabilities, strict=True)):
        top = int(row.argmax())
        lines.append(f"{index},{names[label]},{names[top]},{float(row[top]):.6f}")
    write_whole(path, "\n".join(lines) + "\n")


@rank_zero_only
def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)


def _quiet() -> None:
    """Leaves out what Lightning tells every user at every start, and advice that does not fit our loaders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # kernels with one channel under DDP
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 with torch 2.15
