"""``lightning fit``, a training on one page: data, network, module, callbacks, Trainer, fit, test, results.

``resume.py`` finds the run that is resumed, ``figures/`` draws its figures, ``console.py`` has what it prints.
"""

import contextlib
import io
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer, seed_everything

from vit_lightning.commands.console import Start, print_summary, quiet, row, say, say_beside_bar, start_lines
from vit_lightning.commands.module import (
    Restored,
    compile_chosen,
    count_parameters,
    load_weights,
    make_module,
    network_of,
    start_weights,
)
from vit_lightning.commands.resume import Resumed, changed_arguments, find_run, parent_of
from vit_lightning.commands.session import (
    Results,
    chosen_matmul,
    logged,
    make_trainer,
    measure_test,
    own_faults,
    training_results,
)
from vit_lightning.commands.summary import in_bytes, training_bytes
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, as_list
from vit_lightning.config.own_files import keep_own_files, use_files
from vit_lightning.data.batches import DamagedImage
from vit_lightning.data.per_image import seeded
from vit_lightning.errors import UserError, counted, reading, refuse
from vit_lightning.figures.curves import draw_curves
from vit_lightning.figures.test_report import report_test
from vit_lightning.figures.validation_pictures import ValidationPictures
from vit_lightning.storage.checkpoint_files import BEST, find_checkpoint, read_checkpoint
from vit_lightning.storage.environment import write_environment
from vit_lightning.storage.folder import is_first, new_folder, write_whole
from vit_lightning.storage.metrics import MetricsFile, write_results
from vit_lightning.storage.wandb_logger import RunLogger, run_id
from vit_lightning.training.callbacks import LearningRate, StepSeeds, Stopwatch, TestPredictions
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.endings import StopOnSignal, Watchdog
from vit_lightning.training.lightning_detours import count_as_trained, logged_steps, wait_at_most
from vit_lightning.training.monitor import FiniteGuard, Monitor
from vit_lightning.training.optim import ConfiguredGroups
from vit_lightning.training.own_state import OwnState
from vit_lightning.training.resources import forward_flops, free_memory, keep_freed_memory, peak_memory_mb

CHECK = "lightning check-data names them all, to be mended or moved away"
MANY_FLOPS = 1e11
"""FLOPs of a batch's forward pass from which its memory is counted, which takes a second: about a GB."""


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
    wandb: RunLogger
    facts: dict[str, Any]
    """Parameters and floating-point operations, as in ``results.json``."""


def fit(experiment: Experiment) -> Results:
    """Trains, tests the best checkpoint, and writes both to a run folder; returns the contents of ``results.json``.

    ``experiment.resume`` decides whether an unfinished run of this config is resumed.
    """
    quiet()
    use_files(experiment.files)
    if experiment.allowed_changes and experiment.resume == "never":
        named = ",".join(experiment.allowed_changes)
        raise UserError(f"allow-config-change={named} is for a run that is resumed: give --resume")
    if experiment.trainer["fast_dev_run"]:
        return try_out(experiment)
    with contextlib.ExitStack() as locks:
        resumed = find_run(experiment, locks)
        if resumed is not None and resumed.results is not None:
            say(f"{resumed.folder} is finished already")
            with reading(resumed.folder):
                print_summary(resumed.folder, resumed.results, experiment.data.further)
            wandb = RunLogger(resumed.folder, run_id(resumed.folder), experiment.settings.wandb, experiment.config, say)
            if wandb.unsent.exists():
                end_in_wandb(wandb, resumed.results)
            return resumed.results
        trainer_arguments = experiment.make_trainer_arguments()  # first, so that a wrong callback leaves no folder
        if resumed is None:
            folder = locks.enter_context(new_folder(experiment.out, parent_of(experiment), f"seed{experiment.seed}"))
            run = make_run(experiment, trainer_arguments, folder)
            write_whole(folder / "config.yaml", experiment.to_yaml())
        else:
            before = None if resumed.restored is None else resumed.restored.checkpoint["config"]
            run = make_run(experiment, trainer_arguments, resumed.folder, before)
        return train_and_test(run, resumed)


def try_out(experiment: Experiment) -> Results:
    """Trains, validates and, with ``test``, tests on a few batches (``trainer.fast_dev_run``), and writes nothing."""
    seed_everything(experiment.seed, verbose=False)
    data, module = experiment.data, make_module(experiment)
    start_weights(module, experiment)
    trainer = make_trainer(experiment.make_trainer_arguments(), Path("runs"), [StepSeeds(experiment.seed)], [])
    compile_chosen(module, experiment, trainer)
    with own_faults(None), chosen_matmul(experiment):
        trainer.fit(module, datamodule=data.for_trainer)
        if experiment.config["test"]:
            measure_test(trainer, module, data, TestPredictions())
    tried = "training, validation and test" if experiment.config["test"] else "training and validation"
    say(f"fast_dev_run: {tried} work; nothing was written")
    return logged(trainer, "")


def make_run(experiment: Experiment, trainer_arguments: Config, folder: Path, before: Config | None = None) -> Run:
    """Makes all parts of a training: data, network, module, callbacks, loggers, Trainer.

    Args:
        experiment: the experiment to run.
        trainer_arguments: arguments of Lightning's Trainer, from the config.
        folder: the run folder.
        before: config of the checkpoint from which it resumes; None where it starts at step 0, and so with the weights
            of ``init_from``.
    """
    seed_everything(experiment.seed, verbose=False)
    data, settings, config = experiment.data, experiment.settings, experiment.config
    module = make_module(experiment)  # the network, its loss, optimizer and metrics
    if before is None:
        start_weights(module, experiment, folder)

    shape = (data.in_channels, *data.image_size)
    facts = {**count_parameters(module), "flops": forward_flops(module, shape)}
    metrics = MetricsFile(folder)

    predictions, stopwatch, guard = TestPredictions(), Stopwatch(), FiniteGuard(folder)
    shown = {**config, **facts}
    wandb = RunLogger(folder, run_id(folder), settings.wandb, shown, say_beside_bar, stopwatch.paused)
    checkpoints = Checkpoints(folder, settings.checkpoint, config, guard)
    callbacks = [
        Start(experiment, wandb.start),  # before the random numbers of a step are seeded
        # before the user's callbacks are set up
        OwnState(as_list(trainer_arguments.get("callbacks")), changed_arguments(before or config, config)),
        *([] if isinstance(module, ViTClassifier) else [ConfiguredGroups()]),
        StepSeeds(experiment.seed),
        guard,
        LearningRate(),
        stopwatch,
        Watchdog(folder, config["watchdog_minutes"]),
        Monitor(stopwatch, facts["flops"], shape),
        checkpoints,
        StopOnSignal(checkpoints),
        ValidationPictures(data, wandb, config["pictures_every_n_epochs"]),
    ]
    trainer = make_trainer(trainer_arguments, folder, callbacks, [metrics, wandb])
    wait_at_most(trainer, 4 * config["watchdog_minutes"])
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    return Run(experiment, folder, module, trainer, predictions, stopwatch, metrics, wandb, facts)


def train_and_test(run: Run, resumed: Resumed | None = None) -> Results:
    """Trains from step 0 or from a checkpoint, unless training has finished; then tests the best checkpoint."""
    experiment, data, module, trainer, folder = run.experiment, run.experiment.data, run.module, run.trainer, run.folder
    with _ended_in_words(run, is_new=resumed is None), own_faults(folder), chosen_matmul(experiment):
        path, checkpoint = (None, {}) if resumed is None else resumed.begin(experiment, module, trainer.loggers)
        keep_own_files(folder)
        write_environment(folder, run_id=run.wandb.run_id, precision=trainer.precision)
        say(row("run", f"{folder} (metrics.jsonl grows; curves.png and results.json come at the end)"))
        say(start_lines(experiment, trainer, run.facts))
        if not compile_chosen(module, experiment, trainer):
            say(_memory_note(run))
        had_best = False
        if checkpoint.get("finished"):
            say(row("training", f"finished after {counted(checkpoint['global_step'], 'step')}: only the test remains"))
            with reading(path or folder):
                run.stopwatch.load_state_dict(checkpoint["callbacks"]["Stopwatch"])
                had_best = checkpoint["callbacks"]["Checkpoints"]["best_score"] is not None
            if had_best and not (folder / BEST).is_file():
                say(row("", f"{folder / BEST} is missing: the last checkpoint is tested in its place"))
        else:
            for logger in trainer.loggers:  # ours have it already
                logger.log_hyperparams(dict(experiment.config))
            with seeded():  # a setup() that draws a split draws the same for the test
                trainer.fit(module, datamodule=data.for_trainer, ckpt_path=path, weights_only=True)
        run.folder = folder = trainer.strategy.broadcast(folder)
        best = find_checkpoint(folder)
        checkpoint = read_checkpoint(best)
        if experiment.config["test"] and not had_best and not (folder / BEST).is_file():
            say(row("note", "no validation chose a best checkpoint: the weights of the last step are tested"))
        with reading(folder):
            results = training_results(experiment, run.facts, folder, checkpoint)
        if experiment.config["test"]:
            if isinstance(module, ViTClassifier):
                load_weights(module, checkpoint, best)
            else:
                trainer.callbacks.append(Restored(checkpoint, best))  # type: ignore[attr-defined]
            results |= _test(run, results)
    results |= {"seconds": round(run.stopwatch.run_seconds, 3), "peak_memory_mb": peak_memory_mb()}
    if is_first():
        draw_curves(experiment, folder, results["best_step"])
        if run.predictions.table:
            say(report_test(folder, run.predictions.table, data))
        for path in sorted(folder.glob("*-profile*.txt")):
            say(path.read_text(encoding="utf-8").strip())
    write_results(folder, results)
    print_summary(folder, results, data.further)
    end_in_wandb(run.wandb, results)
    return results


def end_in_wandb(wandb: RunLogger, results: Results) -> None:
    """Sends the results of a finished run to W&B, and ends it there."""
    wandb.log_results(results)
    wandb.finish()
    say(wandb.hint())


def _memory_note(run: Run) -> str:
    """Says that a batch will not fit into the memory that is free, as it is counted; else nothing.

    Raises:
        UserError: it takes more than ten times of it.
    """
    data, trainer, flops = run.experiment.data, run.trainer, run.facts["flops"] or 0
    device = trainer.strategy.root_device
    if flops * data.batch_size < MANY_FLOPS:
        return ""
    given = network_of(run.module), (data.in_channels, *data.image_size), data.batch_size, str(trainer.precision)
    ranks = trainer.num_devices if device.type == "cpu" else 1
    taken, free = ranks * training_bytes(*given), free_memory(device)
    text = f"a step takes about {in_bytes(taken)} of memory with AdamW, and {in_bytes(int(min(free, taken)))} are free"
    text += " (give a smaller data.batch_size or data.image_size)"
    refuse([text] if taken > 10 * free else [])  # it would take all of the machine
    return row("note", text) if taken > free else ""


def _test(run: Run, results: Results) -> Results:
    """Tests the module, keeps the predictions, and returns the metrics of the test."""
    run.trainer.callbacks.append(run.predictions)  # type: ignore[attr-defined]
    # metrics.jsonl has the test at the last step, also if a resumed run had nothing left to train
    count_as_trained(run.trainer, epochs=results["epochs"], steps=results["steps"])
    found, tables = measure_test(run.trainer, run.module, run.experiment.data, run.predictions)
    run.predictions.table = tables[""]
    for name, table in tables.items() if is_first() else ():
        if table:
            file = io.BytesIO()  # numpy prints a traceback if it cannot finish a file
            np.savez_compressed(file, **table)  # type: ignore[arg-type]
            write_whole(run.folder / f"test_predictions{name and '-'}{name}.npz", file.getvalue())
    return found


@contextlib.contextmanager
def _ended_in_words(run: Run, *, is_new: bool) -> Iterator[None]:
    """Says how to go on after a run has been stopped, and ends its run in W&B.

    Removes the folder of a new run that a mistake of the user's ends before its first step: nothing names it.
    """
    try:
        yield
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt | SystemExit):  # before an upload that may take all the time there is
            say(f"stopped; to resume: lightning fit --resume {shlex.quote(str(run.folder))}")
            fault.add_note("printed")
        run.wandb.finish(exit_code=1, fault=fault)
        if isinstance(fault, DamagedImage):
            fault.problems.append(f"{CHECK}; the run folder is {run.folder}")
        is_full = isinstance(fault.__cause__, OSError | RuntimeError)  # a disk, which may have space again
        is_mistake = type(fault) is UserError and not is_full and not logged_steps(run.trainer)
        if is_new and is_mistake and is_first():
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
