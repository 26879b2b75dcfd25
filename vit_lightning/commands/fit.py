"""``lightning fit``, a training on one page: data, network, module, callbacks, Trainer, fit, test, results.

``resume.py`` finds the run that is resumed, ``figures/`` draws its figures, ``console.py`` has what it prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Timer
from tqdm import tqdm

from vit_lightning.commands.console import (
    Start,
    device_line,
    model_line,
    note_on_precision,
    print_summary,
    quiet,
    row,
    say,
)
from vit_lightning.commands.module import (
    compile_chosen,
    count_parameters,
    load_weights,
    make_module,
    network_of,
    start_weights,
)
from vit_lightning.commands.resume import find_run, parent_of
from vit_lightning.commands.session import Results, chosen_matmul, logged, make_trainer, own_faults
from vit_lightning.commands.summary import table
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import keep_own_files
from vit_lightning.data.bad_images import BAD_IMAGES, DamagedImage
from vit_lightning.errors import UserError
from vit_lightning.figures.curves import draw_curves
from vit_lightning.figures.test_report import interval, report_test
from vit_lightning.figures.validation_pictures import ValidationPictures
from vit_lightning.metric_facts import CROSS_ENTROPY, STEP_METRICS, metric_names, with_own
from vit_lightning.notation import counted
from vit_lightning.storage.checkpoint_files import Restored, find_checkpoint, newest_checkpoint, read_checkpoint
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import full_disk_named, is_first, log_warnings, new_folder, write_whole
from vit_lightning.storage.metrics import MetricsFile, json_number, write_results
from vit_lightning.storage.wandb_mirror import WandbMirror, run_id
from vit_lightning.training.callbacks import EpochMetrics, LearningRate, StepSeeds, Stopwatch, TestPredictions
from vit_lightning.training.checkpoints import Checkpoints, space_problem
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.divergence import FiniteGuard
from vit_lightning.training.lightning_detours import count_as_trained
from vit_lightning.training.monitor import Monitor
from vit_lightning.training.probes import Probe
from vit_lightning.training.resources import forward_flops, keep_freed_memory
from vit_lightning.training.stop_on_signal import StopOnSignal


@dataclass
class Run:
    """The parts of one training."""

    experiment: Experiment
    folder: Path
    module: LightningModule
    trainer: Trainer
    predictions: TestPredictions
    stopwatch: Stopwatch
    metrics: MetricsFile
    mirror: WandbMirror


def fit(experiment: Experiment) -> Results:
    """Trains, tests the best checkpoint, and writes both to a run folder; returns the contents of ``results.json``.

    ``experiment.resume`` decides whether an unfinished run of this config is resumed.
    """
    quiet()
    experiment.files.use()
    if experiment.allowed_changes and experiment.resume == "never":
        named = ",".join(experiment.allowed_changes)
        raise UserError(f"allow-config-change={named} is for a run that is resumed: give --resume")
    if experiment.trainer["fast_dev_run"]:
        return try_out(experiment)
    with contextlib.ExitStack() as held:
        resumed = find_run(experiment, held)
        if resumed is not None and resumed.results is not None:
            say(f"{resumed.folder} is finished already")
            print_summary(resumed.folder, resumed.results)
            return resumed.results
        arguments = experiment.make_trainer_arguments()  # first, so that a wrong callback leaves no folder
        if resumed is None:
            folder = held.enter_context(new_folder(experiment.out, parent_of(experiment), f"seed{experiment.seed}"))
            run, newest = make_run(experiment, arguments, folder), None
            write_whole(folder / "config.yaml", experiment.to_yaml())
            held.enter_context(_removed_after_mistakes(run))
        else:
            folder, newest = resumed.folder, resumed.newest
            run = make_run(experiment, arguments, folder, begins=newest is None)
            resumed.begin(experiment, run.module)
        keep_own_files(folder)
        _write_environment(run)
        return train_and_test(run, newest)


def make_run(experiment: Experiment, arguments: Mapping[str, Any], folder: Path, *, begins: bool = True) -> Run:
    """Makes all parts of a training: data, network, module, callbacks, loggers, Trainer.

    Args:
        experiment: the experiment to run.
        arguments: the Trainer's.
        folder: the run folder.
        begins: whether the run starts at step 0, and so with the weights of ``init_from``.
    """
    seed_everything(experiment.seed, verbose=False)
    data, settings, config = experiment.data, experiment.settings, dict(experiment.config)
    module = make_module(experiment, begins=begins)  # the network, its loss, optimizer and metrics
    if begins:
        start_weights(module, experiment, folder)
    _refuse_full_disk(module, folder)

    shape = (data.in_channels, *data.image_size)
    facts = {"parameters": count_parameters(module), "flops": forward_flops(network_of(module), shape)}
    metrics = MetricsFile(folder)
    mirror = WandbMirror(folder, run_id(folder), settings.wandb, {**config, **facts})

    predictions, stopwatch, guard = TestPredictions(), Stopwatch(), FiniteGuard(folder)
    checkpoints = Checkpoints(folder, settings.checkpoint, config, guard)
    callbacks = [
        Start(experiment, mirror.begin),  # before the random numbers of a step are seeded
        StepSeeds(experiment.seed),
        guard,
        LearningRate(),
        EpochMetrics(),
        stopwatch,
        Monitor(stopwatch, facts["flops"], shape),
        checkpoints,
        StopOnSignal(checkpoints),
        ValidationPictures(data, mirror, config["pictures_every_n_epochs"]),
    ]
    trainer = make_trainer(arguments, folder, callbacks, [metrics, mirror])
    return Run(experiment, folder, module, trainer, predictions, stopwatch, metrics, mirror)


def train_and_test(run: Run, newest: Restored | None = None) -> Results:
    """Trains from step 0 or from a checkpoint, unless training has finished; then tests the best checkpoint."""
    experiment, folder = run.experiment, run.folder
    run.mirror.listen()
    _say_what_runs(run)
    compile_chosen(run.module, experiment)
    run.mirror.postponed = partial(_start_mirror, run)
    with (
        _ended_in_words(run),
        full_disk_named(folder),
        own_faults(folder),
        log_warnings(folder),
        chosen_matmul(experiment),
    ):
        _train(run, newest)
        run.folder = folder = run.trainer.strategy.broadcast(folder)
        best = find_checkpoint(folder)
        checkpoint = read_checkpoint(best)
        results = _results(run, checkpoint)
        if experiment.test:
            load_weights(run.module, checkpoint, best)
            results |= _test(run, results)
    with full_disk_named(folder):
        run.metrics.complete()
        results |= {"seconds": round(run.stopwatch.run_seconds, 3), "peak_memory_mb": _peak_memory_mb()}
        if is_first():
            draw_curves(experiment, folder, results["best_step"])
            if run.predictions.table:
                say(report_test(folder, run.predictions.table, experiment.data))
            run.mirror.log_results(results)
            for path in sorted(folder.glob("*-profile*.txt")):
                say(path.read_text(encoding="utf-8").strip())
        print_summary(folder, results)
        run.mirror.finish()
        write_results(folder, results)
    if left_out := sum(map(len, experiment.data.bad_images.values())):
        say(row("skipped", f"{counted(left_out, 'damaged image')}: {folder / BAD_IMAGES}"))
    say(run.mirror.hint())
    return results


def _train(run: Run, newest: Restored | None) -> None:
    path, checkpoint, complaints = newest or (None, {}, [])
    for complaint in complaints:
        warnings.warn(f"{complaint}: falling back to {path.name if path else None}", stacklevel=2)
    done = checkpoint.get("global_step", 0)
    # before a validation, the rows of the step that it follows are logged again
    measured = checkpoint.get("callbacks", {}).get("Monitor", {}).get("row")
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


def _test(run: Run, results: Results) -> Results:
    """Tests the module, keeps the predictions, and returns the metrics of the test."""
    run.trainer.callbacks.append(run.predictions)  # type: ignore[attr-defined]
    # metrics.jsonl has the test at the last step, also if a resumed run had nothing left to train
    count_as_trained(run.trainer, epochs=results["epochs"], steps=results["steps"])
    run.trainer.test(run.module, datamodule=run.experiment.data, verbose=False)
    predicted = run.predictions.table
    found = logged(run.trainer, "test") | interval(predicted)
    if predicted:
        found["test_images"] = len(predicted["label"])
        if is_first():
            file = io.BytesIO()  # numpy prints a traceback if it cannot finish a file
            np.savez_compressed(file, **predicted)  # type: ignore[arg-type]
            write_whole(run.folder / "test_predictions.npz", file.getvalue())
    elif type(run.module) is not ViTClassifier:
        say(f"no report of the test images: test_step of {type(run.module).__name__} returns no logits")
    return found


def _results(run: Run, checkpoint: Mapping[str, Any]) -> Results:
    """Returns the results of the training, with the metrics of its best checkpoint."""
    newest = newest_checkpoint(run.folder)  # previous.ckpt, if a kill came between the two renames of a save
    assert newest is not None
    last, experiment = newest.checkpoint, run.experiment
    own = type(run.module) is not ViTClassifier  # which may log metrics of its own
    watch, callbacks = last["callbacks"]["Stopwatch"], run.trainer.callbacks  # type: ignore[attr-defined]
    of_epochs = [
        *(CROSS_ENTROPY, *metric_names("train", "val", table=with_own(experiment.metrics))),
        *(name for callback in callbacks if isinstance(callback, Probe) for name in callback.logs),
    ]
    parameters, trained = count_parameters(run.module), count_parameters(run.module, trained=True)
    return {
        "seed": experiment.seed,
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
            if name in of_epochs or (own and name not in STEP_METRICS)
        },
        **({"train_images": experiment.data.image_count("train")} if experiment.data.own_loaders else {}),
    }


def try_out(experiment: Experiment) -> Results:
    """Trains, validates and tests on a few batches (``trainer.fast_dev_run``), and writes nothing."""
    seed_everything(experiment.seed, verbose=False)
    data, module = experiment.data, make_module(experiment)
    start_weights(module, experiment)
    trainer = make_trainer(experiment.make_trainer_arguments(), Path("runs"), [StepSeeds(experiment.seed)], [])
    compile_chosen(module, experiment)
    with own_faults(None), chosen_matmul(experiment):
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
    say("fast_dev_run: training, validation and test work; nothing was written")
    return logged(trainer, "")


def _say_what_runs(run: Run) -> None:
    experiment, network = run.experiment, network_of(run.module)
    say(row("run", f"{run.folder} (metrics.jsonl grows; curves.png and results.json come at the end)"))
    say(model_line(experiment, count_parameters(run.module), count_parameters(run.module, trained=True)))
    say(device_line(run.trainer, experiment))
    say(note_on_precision(run.trainer, experiment))
    if experiment.trainer["enable_model_summary"]:
        data = experiment.data
        try:
            say(table(network, (data.in_channels, *data.image_size), data.batch_size))
        except UserError as error:  # a network that looks at numbers trains all the same
            say(row("note", str(error)))


def _start_mirror(run: Run) -> None:
    """Starts W&B, whose import takes as long as some epochs, when training has begun; its time does not count."""
    with run.stopwatch.paused():
        run.mirror.start()
        with tqdm.external_write_mode():  # beside the progress bar
            say(run.mirror.place())
        run.mirror.catch_up(run.folder)


@contextlib.contextmanager
def _ended_in_words(run: Run) -> Iterator[None]:
    """Says how to go on after a run has been stopped, and ends its mirror."""
    try:
        yield
    except BaseException as fault:
        if not isinstance(fault, Exception) or type(fault) is UserError:
            run.mirror.postponed = None  # before the first step there is nothing to send
        run.mirror.finish(exit_code=1, fault=fault)
        if isinstance(fault, KeyboardInterrupt | SystemExit):
            say(f"stopped; to resume: lightning fit --resume {run.folder}")
            fault.add_note("printed")
        if isinstance(fault, DamagedImage):
            how = "--data.on_bad_image=skip leaves damaged images out, lightning check-data lists them all"
            fault.problems.append(f"{how}; the run folder is {run.folder}")
        raise


@contextlib.contextmanager
def _removed_after_mistakes(run: Run) -> Iterator[None]:
    """Removes the folder of a new run that a mistake of the user's ends before its first step: nothing names it."""
    try:
        yield
    except UserError as fault:
        is_full = isinstance(fault.__cause__, OSError | RuntimeError)  # a disk, which may have space again
        if type(fault) is UserError and not is_full and not run.trainer.global_step and is_first():
            shutil.rmtree(run.folder, ignore_errors=True)
        raise


def _write_environment(run: Run) -> None:
    path = run.folder / "environment.json"
    if not path.is_file():
        device, precision = run.trainer.strategy.root_device.type, run.trainer.precision
        environment = {
            **{"run_id": run.mirror.run_id, **describe_environment(), "precision": precision},
            "fast_paths": run.experiment.describe_fast_paths(device, precision),
        }
        write_whole(path, json.dumps(environment, indent=2) + "\n")


def _refuse_full_disk(module: LightningModule, folder: Path) -> None:
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    averages = getattr(module, "average", None) is not None
    if is_first() and (problem := space_problem(folder, weights, copies=3 + averages)):
        raise UserError(problem)


def _peak_memory_mb() -> float:
    """Returns the peak memory in 10^6 bytes: of tensors on the GPU, or of the process on a CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return round(torch.cuda.max_memory_allocated() / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
