"""One run from a resolved configuration: its folder, training, test, results."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.callbacks import LearningRate, StepSeeds, Stopwatch, TrainingBar
from vit_lightning.checkpoints import (
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
    to_plain,
    to_yaml,
)
from vit_lightning.data import ImageData
from vit_lightning.errors import UserError
from vit_lightning.tracking import MetricsFile, json_number

Results = dict[str, Any]

EPOCH_METRICS = ("train/loss", "train/acc", "val/loss", "val/acc", "val/acc5")
"""What ``results.json`` holds of the epoch of the best checkpoint."""


def fit(config: Namespace) -> Results:
    """Trains, tests the best checkpoint, and leaves all of it in a run folder; returns what ``results.json`` holds."""
    _quiet()
    started = time.time()
    seed_everything(config.seed_everything, verbose=False)
    data, module = _data_and_module(config)
    if config.init_from is not None:
        path = find_checkpoint(config.init_from, "init_from")
        load_network(module.network, read_checkpoint(path), path)
    if config.trainer.fast_dev_run:
        return _fast_dev_run(config, data, module)

    arguments = make_trainer_arguments(config)
    folder = claim_folder(config.out, Path("runs") / config.experiment, f"seed{config.seed_everything}")
    stopwatch = Stopwatch()
    own = [
        StepSeeds(config.seed_everything),
        LearningRate(),
        stopwatch,
        Checkpoints(folder, make_settings(config).checkpoint, to_plain(config)),
    ]
    trainer = _trainer(arguments, folder, own, MetricsFile(folder))
    _write_whole(folder / "config.yaml", to_yaml(config))
    _say(f"{config.experiment}: {_describe(module, data)}")
    trainer.fit(module, datamodule=data)

    folder = trainer.strategy.broadcast(folder)
    best = find_checkpoint(folder)
    checkpoint = read_checkpoint(best)
    results: Results = {
        "seed": config.seed_everything,
        "parameters": _count(module),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "best_step": checkpoint["global_step"],
        "train_seconds": round(stopwatch.seconds, 3),
        "images_per_second": round(stopwatch.images / stopwatch.seconds, 1) if stopwatch.seconds else 0.0,
        **{name: json_number(value) for name, value in checkpoint["metrics"].items() if name in EPOCH_METRICS},
    }
    if config.test:
        load_network(module.network, checkpoint, best)
        trainer.test(module, datamodule=data, verbose=False)
        results |= _logged(trainer, "test/")
    results["seconds"] = round(time.time() - started, 3)
    _write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    _summary(folder, results)
    return results


def evaluate(config: Namespace, verb: str) -> Results:
    """``validate``, ``test`` or ``predict`` with the weights of ``config.ckpt``; leaves a folder with what came out."""
    _quiet()
    seed_everything(config.seed_everything, verbose=False)
    config.trainer.logger = False
    data, module = _data_and_module(config)
    path = find_checkpoint(config.ckpt)
    load_network(module.network, read_checkpoint(path), path)
    run = run_folder_of(path)
    folder = claim_folder(config.out, (Path("runs") / path.stem if run is None else run) / verb, "")
    trainer = _trainer(make_trainer_arguments(config), folder, [], None)
    if verb == "predict":
        batches = trainer.predict(module, datamodule=data) or []
        if trainer.is_global_zero:
            _write_predictions(folder / "predictions.csv", batches, data)
            _say(f"predictions of the test images: {folder / 'predictions.csv'}")
        return {}
    run_verb = trainer.validate if verb == "validate" else trainer.test
    run_verb(module, datamodule=data, verbose=False)
    results = _logged(trainer, "val/" if verb == "validate" else "test/")
    _write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    for name, value in {**results, "weights": path, "results": folder}.items():
        _say(f"{name:<10} {value:.4f}" if isinstance(value, float) else f"{name:<10} {value}")
    return results


def claim_folder(out: Path | None, parent: Path, suffix: str) -> Path:
    """A folder that is this process's alone: ``out``, or a new one in ``parent`` named after the time.

    Made exclusively, so that two runs that start in the same instant never share one. Only rank 0 makes it.
    """
    if not _is_first():
        return out or parent
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"out={out} is there already and not empty (choose a new folder)")
        out.mkdir(parents=True, exist_ok=True)
        return out
    parent.mkdir(parents=True, exist_ok=True)
    name = "-".join(filter(None, [time.strftime("%Y%m%d-%H%M%S"), suffix]))
    for number in range(1000):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise UserError(f"{parent} holds a thousand runs of this second")


def _data_and_module(config: Namespace) -> tuple[ImageData, ViTClassifier]:
    data = make_data(config)
    settings = make_settings(config)
    module = ViTClassifier(
        make_network(config), num_classes=data.num_classes, optimizer=settings.optimizer, loss=settings.loss
    )
    return data, module


def _trainer(arguments: dict[str, Any], folder: Path, own: list[Callback], metrics: MetricsFile | None) -> Trainer:
    """Lightning's Trainer with the page's arguments; the page's callbacks and loggers come beside ours."""
    callbacks = arguments.pop("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    loggers = arguments.pop("logger")
    loggers = loggers if isinstance(loggers, list) else [loggers] if loggers not in (None, True, False) else []
    wants_bar = arguments["enable_progress_bar"] is not False
    if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        own = [*own, TrainingBar()]
    if arguments["enable_checkpointing"] is None and metrics is None:
        arguments["enable_checkpointing"] = False
    try:
        return Trainer(
            **arguments,
            callbacks=[*own, *callbacks],
            logger=[metrics, *loggers] if metrics is not None else False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # our loaders divide the images among ranks, without repeating any
        )
    except Exception as fault:  # Lightning raises a dozen types for arguments that do not fit
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]}") from fault


def _fast_dev_run(config: Namespace, data: ImageData, module: ViTClassifier) -> Results:
    own: list[Callback] = [StepSeeds(config.seed_everything)]
    trainer = _trainer(make_trainer_arguments(config), Path("runs"), own, None)
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
    rows = [
        ("test", "test/acc", "test/loss"),
        ("validation", "val/acc", "val/loss"),
    ]
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
    _write_whole(path, "\n".join(lines) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that is there complete or not at all."""
    if _is_first():
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


def _is_first() -> bool:
    """Whether this is the process that writes; known before Lightning has connected the others."""
    return not _get_rank()


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
