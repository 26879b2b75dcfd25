"""One run: its parts, its training and test, its results."""

from __future__ import annotations

import io
import json
import resource
import secrets
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Timer
from torch import nn
from tqdm import tqdm

from vit_lightning.commands.console import counted, print_summary, row, say
from vit_lightning.commands.session import (
    Results,
    chosen_matmul,
    compile_chosen,
    load_weights,
    logged,
    make_module,
    make_trainer,
    own_faults,
    start_weights,
)
from vit_lightning.commands.start import Start, device_line, model_line
from vit_lightning.commands.summary import table
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import trust_flag
from vit_lightning.data.bad_images import BAD_IMAGES, DamagedImage
from vit_lightning.errors import UserError
from vit_lightning.figures.curves import curves, save
from vit_lightning.figures.test_report import FIGURES, interval, report_test
from vit_lightning.figures.validation_pictures import ValidationPictures
from vit_lightning.metric_facts import CROSS_ENTROPY, STEP_METRICS, metric_names, with_own
from vit_lightning.storage.checkpoint_files import (
    Restored,
    find_checkpoint,
    newest_checkpoint,
    read_checkpoint,
)
from vit_lightning.storage.folder import full_disk_named, is_first, log_warnings, write_whole
from vit_lightning.storage.metrics import MetricsFile, json_number, read_metrics, write_results
from vit_lightning.storage.wandb_mirror import WandbMirror
from vit_lightning.training.callbacks import EpochMetrics, LearningRate, StepSeeds, Stopwatch, TestPredictions
from vit_lightning.training.checkpoints import Checkpoints, space_problem
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.divergence import FiniteGuard
from vit_lightning.training.flops import forward_flops
from vit_lightning.training.lightning_detours import count_as_trained
from vit_lightning.training.memory import keep_freed_memory
from vit_lightning.training.monitor import Monitor
from vit_lightning.training.precision import AUTO, auto_precision
from vit_lightning.training.probes import Probe
from vit_lightning.training.stop_on_signal import StopOnSignal


@dataclass
class Run:
    """The parts of one run."""

    experiment: Experiment
    folder: Path
    module: LightningModule
    trainer: Trainer
    predictions: TestPredictions
    stopwatch: Stopwatch
    metrics: MetricsFile
    mirror: WandbMirror


def prepare(experiment: Experiment, arguments: Mapping[str, Any], folder: Path, *, begins: bool = True) -> Run:
    """Seeds everything and makes all parts of a run.

    Args:
        experiment: the experiment to run.
        arguments: the Trainer's, made before the folder, so that a wrong callback leaves none.
        folder: the run folder.
        begins: whether the run starts at step 0, and so with the weights of ``init_from``.
    """
    seed_everything(experiment.seed, verbose=False)
    data, module = experiment.data, make_module(experiment, begins=begins)
    if begins:
        start_weights(module, experiment, folder)
    settings, config = experiment.settings, dict(experiment.config)
    predictions, stopwatch, metrics = TestPredictions(), Stopwatch(), MetricsFile(folder)
    guard = FiniteGuard(folder)
    checkpoints = Checkpoints(folder, settings.checkpoint, config, guard)
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    averages = getattr(module, "average", None) is not None
    if is_first() and (problem := space_problem(folder, weights, copies=3 + averages)):
        raise UserError(problem)
    shape = (data.in_channels, *data.image_size)
    facts = {"parameters": count_parameters(module), "flops": forward_flops(network_of(module), shape)}
    mirror = WandbMirror(folder, run_id(folder), settings.wandb, {**config, **facts})
    own = [
        Start(experiment, mirror.begin),  # before the random numbers of a step are seeded
        *(StepSeeds(experiment.seed), guard, LearningRate(), EpochMetrics(), stopwatch),
        *(Monitor(stopwatch, facts["flops"], shape), checkpoints, StopOnSignal(checkpoints)),
        ValidationPictures(data, mirror, config["pictures_every_n_epochs"]),
    ]
    trainer = make_trainer(arguments, folder, own, [metrics, mirror])
    return Run(experiment, folder, module, trainer, predictions, stopwatch, metrics, mirror)


def train_and_test(run: Run, newest: Restored | None = None) -> Results:
    """Trains from step 0 or from a checkpoint, unless training has finished; then tests the best checkpoint."""
    run.mirror.listen()
    say(row("run", f"{run.folder} (metrics.jsonl grows; curves.png and results.json come at the end)"))
    say(model_line(run.experiment, count_parameters(run.module), count_parameters(run.module, trained=True)))
    is_auto = run.experiment.trainer["precision"] == AUTO
    say(device_line(run.trainer, is_auto=is_auto))
    if is_auto and run.trainer.precision != auto_precision(run.experiment.trainer["accelerator"]):
        say(row("note", f"the run began with precision {run.trainer.precision}; this machine is faster with another"))
    compile_chosen(run.module, run.experiment)
    if run.experiment.trainer["enable_model_summary"]:
        data = run.experiment.data
        try:
            say(table(network_of(run.module), (data.in_channels, *data.image_size), data.batch_size))
        except UserError as error:  # a network that looks at numbers trains all the same
            say(row("note", str(error)))
    run.mirror.postponed = partial(_start_mirror, run)
    matmul = chosen_matmul(run.experiment)
    try:
        with full_disk_named(run.folder), own_faults(run.folder), log_warnings(run.folder), matmul:
            _train(run, newest)
            results = _test_best(run)
    except BaseException as fault:
        if not isinstance(fault, Exception) or type(fault) is UserError:
            run.mirror.postponed = None  # before the first step there is nothing to send
        run.mirror.finish(exit_code=1, fault=fault)
        if isinstance(fault, KeyboardInterrupt | SystemExit):
            say(f"stopped; to resume: lightning fit --resume {run.folder}{trust_flag()}")
            fault.add_note("printed")
        if isinstance(fault, DamagedImage):
            how = "--data.on_bad_image=skip leaves damaged images out, lightning check-data lists them all"
            fault.problems.append(f"{how}; the run folder is {run.folder}")
        raise
    with full_disk_named(run.folder):
        run.metrics.complete()
        results["seconds"] = round(run.stopwatch.run_seconds, 3)
        results["peak_memory_mb"] = _peak_memory_mb()
        if is_first():
            _draw_and_mirror(run, results)
            for path in sorted(run.folder.glob("*-profile*.txt")):
                say(path.read_text(encoding="utf-8").strip())
        print_summary(run.folder, results)
        run.mirror.finish()
        write_results(run.folder, results)
    if left_out := sum(map(len, run.experiment.data.bad_images.values())):
        say(row("skipped", f"{counted(left_out, 'damaged image')}: {run.folder / BAD_IMAGES}"))
    say(run.mirror.hint())
    return results


def _train(run: Run, newest: Restored | None) -> None:
    path, checkpoint, complaints = newest or (None, {}, [])
    for complaint in complaints:
        warnings.warn(f"{complaint}: falling back to {path.name if path else None}", stacklevel=2)
    done = checkpoint.get("global_step", 0)
    # before a validation, the rows of the step that it follows are logged again
    measured = checkpoint.get("callbacks", {}).get("Monitor", {}).get("row")  # earlier versions lack it
    run.metrics.resume(done - checkpoint.get("before_validation", False), measured, checkpoint.get("row"))
    if checkpoint.get("finished"):
        say(row("training", f"finished after {counted(done, 'step')}: only the test remains"))
        run.stopwatch.load_state_dict(checkpoint["callbacks"]["Stopwatch"])
        return
    if run.trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    if any(isinstance(callback, Timer) for callback in run.trainer.callbacks):  # type: ignore[attr-defined]
        run.mirror.begin()  # within max_time there would be less time to train
    run.trainer.fit(run.module, datamodule=run.experiment.data, ckpt_path=path, weights_only=True)


def _start_mirror(run: Run) -> None:
    """Starts W&B, whose import takes as long as some epochs, when training has begun; its time does not count."""
    with run.stopwatch.paused():
        run.mirror.start()
        with tqdm.external_write_mode():  # beside the progress bar
            say(run.mirror.place())
        run.mirror.catch_up(run.folder)


def _draw_and_mirror(run: Run, results: Results) -> None:
    """Draws the figures of a run and sends them with its results to W&B."""
    rows, best_step = read_metrics(run.folder), results["best_step"]
    objective, mixed = _objective(run.experiment), bool(run.experiment.data.mixing)
    drawn = curves(rows, run.folder.name, objective=objective, mixed=mixed, best_step=best_step)
    save(drawn, run.folder / "curves.png")
    if run.predictions.table:
        say(report_test(run.folder, run.predictions.table, run.experiment.data))
    mirror_results(run.mirror, results)


def _objective(experiment: Experiment) -> str:
    """Returns in words what distinguishes the training loss from plain cross entropy; empty if nothing does."""
    loss, distillation = experiment.settings.loss, experiment.settings.distillation
    parts = [
        {"ce": "", "bce": "binary cross entropy"}.get(loss.name, loss.name),
        f"label smoothing {loss.label_smoothing:g}" * (loss.label_smoothing > 0.0),
        "mixed images" * bool(experiment.data.mixing),
        "distillation" * (distillation.teacher is not None),
        f"as {own['class_path']} has it" if (own := experiment.config.get("module")) else "",
    ]
    return ", ".join(filter(None, parts))


def mirror_results(mirror: WandbMirror, results: Results) -> None:
    """Sends figures and results of a finished run to W&B, and with ``wandb.log_model`` its best checkpoint."""
    images = {name: mirror.folder / f"{name}.png" for name in ("curves", *FIGURES)}
    mirror.log_images({name: path for name, path in images.items() if path.is_file()}, step=results["steps"])
    mirror.log_summary(results)
    if mirror.config.log_model and mirror.mode == "online":  # offline, W&B would store a second copy
        mirror.log_model([find_checkpoint(mirror.folder), mirror.folder / "config.yaml"])


def run_id(folder: Path) -> str:
    """Returns the run's W&B id from ``environment.json``, or a new random one."""
    path = folder / "environment.json"
    if path.is_file():
        known: str = json.loads(path.read_text(encoding="utf-8"))["run_id"]
        return known
    return secrets.token_hex(4)


def _test_best(run: Run) -> Results:
    """Returns the results of a trained run; tests its best checkpoint unless the config has ``test: false``."""
    run.folder = run.trainer.strategy.broadcast(run.folder)
    best, newest = find_checkpoint(run.folder), newest_checkpoint(run.folder)
    assert newest is not None
    last = newest.checkpoint  # or previous.ckpt, if a kill came between the two renames of a save
    checkpoint = read_checkpoint(best)
    own = type(run.module) is not ViTClassifier  # which may log metrics of its own
    watch, callbacks = last["callbacks"]["Stopwatch"], run.trainer.callbacks  # type: ignore[attr-defined]
    epoch_metrics = [
        *(CROSS_ENTROPY, *metric_names("train", "val", table=with_own(run.experiment.metrics))),
        *(name for callback in callbacks if isinstance(callback, Probe) for name in callback.logs),
    ]
    parameters, trained = count_parameters(run.module), count_parameters(run.module, trained=True)
    results: Results = {
        "seed": run.experiment.seed,
        "parameters": parameters,
        **({"trained_parameters": trained} if trained != parameters else {}),
        "flops": run.mirror.run_config["flops"],
        "epochs": last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
        "steps": last["global_step"],
        "best_step": checkpoint["global_step"],
        "train_seconds": round(watch["seconds"], 3),
        "images_per_second": round(watch["images"] / watch["seconds"], 1) if watch["seconds"] else 0.0,
        **{
            name: json_number(value)
            for name, value in checkpoint["metrics"].items()
            if name in epoch_metrics or (own and name not in STEP_METRICS)
        },
    }
    if run.experiment.data.own_loaders:
        results["train_images"] = run.experiment.data.image_count("train")
    if run.experiment.test:
        load_weights(run.module, checkpoint, best)
        run.trainer.callbacks.append(run.predictions)  # type: ignore[attr-defined]
        # metrics.jsonl has the test at the last step, also if a resumed run had nothing left to train
        count_as_trained(run.trainer, epochs=results["epochs"], steps=results["steps"])
        run.trainer.test(run.module, datamodule=run.experiment.data, verbose=False)
        results |= logged(run.trainer, "test") | interval(run.predictions.table)
        if own and not run.predictions.table:
            say(f"no report of the test images: test_step of {type(run.module).__name__} returns no logits")
        if run.predictions.table:
            results["test_images"] = len(run.predictions.table["label"])
        if is_first() and run.predictions.table:
            table = io.BytesIO()  # numpy prints a traceback if it cannot finish a file
            np.savez_compressed(table, **run.predictions.table)  # type: ignore[arg-type]
            write_whole(run.folder / "test_predictions.npz", table.getvalue())
    return results


def network_of(module: LightningModule) -> nn.Module:
    """Returns what makes logits from images: the network of a classifier, or a module of the user's own itself."""
    return module.network if isinstance(module, ViTClassifier) else module


def count_parameters(module: LightningModule, *, trained: bool = False) -> int:
    """Returns the number of parameters, or of those that are not frozen."""
    counted = network_of(module) if type(module) is ViTClassifier else module
    return sum(weight.numel() for weight in counted.parameters() if weight.requires_grad or not trained)


def _peak_memory_mb() -> float:
    """Returns the peak memory in 10^6 bytes: of tensors on the GPU, or of the process on a CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return round(torch.cuda.max_memory_allocated() / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
