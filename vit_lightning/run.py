"""One run from a resolved configuration: its folder, training, test, results."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.callbacks import LearningRate, StepSeeds, Stopwatch, TestPredictions, TrainingBar
from vit_lightning.checkpoints import (
    LAST,
    AtomicCheckpointIO,
    Checkpoints,
    find_checkpoint,
    load_network,
    read_checkpoint,
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
from vit_lightning.figures import confusion, curves, image_grid
from vit_lightning.flops import forward_flops
from vit_lightning.folder import claim_folder, give_up, is_first, log_warnings, settle, write_whole
from vit_lightning.sampling import Request
from vit_lightning.tracking import MetricsFile, json_number, read_metrics
from vit_lightning.wandb_mirror import WandbMirror, merged_by_step

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
    mirror: WandbMirror


def fit(config: Namespace) -> Results:
    """Trains, tests the best checkpoint, and leaves all of it in a run folder; returns what ``results.json`` holds."""
    quiet()
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
    environment = {"run_id": run.mirror.run_id, **describe_environment()}
    write_whole(folder / "environment.json", json.dumps(environment, indent=2) + "\n")
    settle(folder)
    return _train_and_test(run)


def resume(folder: Path) -> Results:
    """Goes on with a run in its folder, with its own configuration, from its last checkpoint or else from the start.

    Only tests if training was over, and does nothing if all was done.
    """
    quiet()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"resume={folder} is no run folder: it holds no config.yaml")
    if (folder / "results.json").is_file():
        results: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        say(f"{folder}: all was done")
        _summary(folder, results)
        return results
    last = folder / LAST if (folder / LAST).is_file() else None
    # the first weights of long ago are only needed for a start from nothing
    config = resolve(["--config", str(folder / "config.yaml"), *([] if last is None else ["--init_from=null"])])
    run = _prepare(config, make_trainer_arguments(config), folder)
    return _train_and_test(run, last)


def _prepare(config: Namespace, arguments: dict[str, Any], folder: Path) -> Run:
    """Makes all parts of a run; weights and order follow the seed."""
    seed_everything(config.seed_everything, verbose=False)
    data, module = make_data_and_module(config)
    if config.init_from is not None:
        path = find_checkpoint(config.init_from, "init_from")
        load_network(module.network, read_checkpoint(path), path)
    settings, page = make_settings(config), to_plain(config)
    stopwatch, predictions, metrics = Stopwatch(), TestPredictions(), MetricsFile(folder)
    checkpoints = Checkpoints(folder, settings.checkpoint, page)
    shape = (data.in_channels, *data.image_size)
    facts = {"parameters": count_parameters(module), "flops": forward_flops(module.network, shape)}
    mirror = WandbMirror(folder, run_id(folder), settings.wandb, {**page, **facts})
    own = [StepSeeds(config.seed_everything), LearningRate(), stopwatch, predictions, checkpoints]
    trainer = make_trainer(arguments, folder, own, [metrics, mirror])
    return Run(config, folder, data, module, trainer, stopwatch, predictions, metrics, mirror)


def _train_and_test(run: Run, last: Path | None = None) -> Results:
    """Trains from the start or from a checkpoint, unless that one is of the end of training; then tests the best."""
    started = time.time()
    say(f"{run.config.experiment}: {_describe(run.module, run.data)}")
    run.mirror.start()
    try:
        with log_warnings(run.folder):
            _train(run, last)
            results = _test_best(run)
    except BaseException as fault:
        run.mirror.finish(exit_code=1)
        if isinstance(fault, KeyboardInterrupt | SystemExit):
            say(f"stopped; to go on: lightning fit --resume {run.folder}")
        raise
    results["seconds"] = round(time.time() - started, 3)
    if is_first():
        _draw_and_mirror(run, results)
    write_whole(run.folder / "results.json", json.dumps(results, indent=2) + "\n")
    _summary(run.folder, results)
    say(run.mirror.hint())
    return results


def _train(run: Run, last: Path | None) -> None:
    checkpoint = read_checkpoint(last) if last is not None else None
    if checkpoint is not None and checkpoint.get("finished"):
        return
    done = 0 if checkpoint is None else checkpoint["global_step"]
    if (run.folder / "metrics.jsonl").is_file():
        run.metrics.mark_resumed(done)
    if checkpoint is not None:
        say(f"goes on after {done} steps")
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=last, weights_only=True)


def _draw_and_mirror(run: Run, results: Results) -> None:
    """The figures of a run, in its folder and in W&B."""
    drawn = {"curves": curves(read_metrics(run.folder), run.folder.name)}
    if run.predictions.table:
        names = run.data.class_names
        table = run.predictions.table
        assert run.module.confusion_matrix is not None
        drawn["confusion"] = confusion(run.module.confusion_matrix.cpu().numpy(), names)
        shown = Request(table["index"][:32].tolist(), None)
        labels, predictions = table["label"][:32], table["prediction"][:32]
        drawn["test_images"] = image_grid(
            run.data.dataset("test").__getitems__(shown).images.numpy(),  # type: ignore[attr-defined]
            [names[p] if p == t else f"{names[p]} ({names[t]})" for p, t in zip(predictions, labels, strict=True)],
            (predictions != labels).tolist(),
        )
    for name, figure in drawn.items():
        figure.savefig(run.folder / f"{name}.png", dpi=100)
    _mirror_results(run.mirror, results)
    run.mirror.finish()


def _mirror_results(mirror: WandbMirror, results: Results) -> None:
    """What a run has when it is over: figures, final values, and the model if it is wanted."""
    images = {name: mirror.folder / f"{name}.png" for name in ("curves", "confusion", "test_images")}
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


def sync(folder: Path) -> None:
    """Sends a run to W&B, or what W&B lacks of it, from ``metrics.jsonl``; W&B leaves out the steps that it has."""
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is no run folder: it holds no metrics.jsonl")
    config = resolve(["--config", str(folder / "config.yaml")])
    path = folder / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = replace(make_settings(config).wandb, mode="online")
    mirror = WandbMirror(folder, run_id(folder), settings, to_plain(config))
    mirror.start()
    if mirror.mode == "online":
        for step, row in merged_by_step(read_metrics(folder)):
            mirror.log_metrics(row, step)
        if results:
            _mirror_results(mirror, results)
    mirror.finish()
    if mirror.mode != "online" or mirror.reason:
        raise UserError(f"{folder} was not sent: {mirror.reason} (for a key: wandb login)")
    say(f"{folder} is in W&B as {settings.project}/{mirror.run_id}")


def _test_best(run: Run) -> Results:
    """The figures of a run that has been trained, and of the test of its best checkpoint unless it is not wanted."""
    run.folder = run.trainer.strategy.broadcast(run.folder)
    best, last = find_checkpoint(run.folder), read_checkpoint(run.folder / LAST)
    checkpoint = read_checkpoint(best)
    watch = last["callbacks"]["Stopwatch"]
    results: Results = {
        "seed": run.config.seed_everything,
        "parameters": count_parameters(run.module),
        "flops": run.mirror.page["flops"],
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
        results |= logged(run.trainer, "test/")
        if is_first() and run.predictions.table:
            np.savez_compressed(run.folder / "test_predictions.npz", **run.predictions.table)  # type: ignore[arg-type]
    return results


def make_data_and_module(config: Namespace) -> tuple[ImageData, ViTClassifier]:
    data = make_data(config)
    settings = make_settings(config)
    module = ViTClassifier(
        make_network(config), num_classes=data.num_classes, optimizer=settings.optimizer, loss=settings.loss
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
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins = [*plugins, AtomicCheckpointIO()]
    try:
        return Trainer(
            **arguments,
            plugins=plugins,
            enable_checkpointing=bool(own_loggers),
            callbacks=[*own, *callbacks],
            logger=[*own_loggers, *loggers] or False,
            default_root_dir=folder,
            use_distributed_sampler=False,  # our loaders divide the images among ranks, without repeating any
        )
    except Exception as fault:  # Lightning raises a dozen types for arguments that do not fit
        named = ("accelerator", "devices", "strategy", "precision")
        asked = ", ".join(f"{name}={arguments[name]}" for name in named if arguments[name] is not None)
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]} (trainer has {asked})") from fault


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _fast_dev_run(config: Namespace) -> Results:
    seed_everything(config.seed_everything, verbose=False)
    data, module = make_data_and_module(config)
    trainer = make_trainer(make_trainer_arguments(config), Path("runs"), [StepSeeds(config.seed_everything)], [])
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    say("fast_dev_run: training, validation and test work; nothing was saved")
    return logged(trainer, "")


def logged(trainer: Trainer, prefix: str) -> Results:
    return {name: json_number(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}


def count_parameters(module: ViTClassifier) -> int:
    return sum(weight.numel() for weight in module.network.parameters())


def _describe(module: ViTClassifier, data: ImageData) -> str:
    height, width = data.image_size
    return (
        f"{type(module.network).__name__} with {count_parameters(module):,} parameters on {type(data).__name__}, "
        f"{data.num_classes} classes, images {data.in_channels}x{height}x{width}"
    )


def _summary(folder: Path, results: Results) -> None:
    rows = [("test", "test/acc", "test/loss"), ("validation", "val/acc", "val/loss")]
    lines = [
        f"{name:<11} accuracy {100 * float(results[acc]):6.2f} %   loss {float(results[loss]):.4f}"
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
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 with torch 2.15
