"""``lightning fit``: a new run, or one that is resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from vit_lightning.commands.console import counted, print_summary, quiet, say
from vit_lightning.commands.resume import (
    new_run_hint,
    note_changes,
    noted_changes,
    read_run_config,
    refuse_changes,
    remove_partial_files,
    unfinished_run,
)
from vit_lightning.commands.run import Run, network_of, prepare, train_and_test
from vit_lightning.commands.session import (
    Results,
    chosen_matmul,
    compile_chosen,
    logged,
    make_module,
    make_trainer,
    own_faults,
    start_weights,
)
from vit_lightning.config.changes import changes_since
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import changed_files, keep_own_files
from vit_lightning.errors import CannotResume, UserError
from vit_lightning.storage.checkpoint_files import BEST, LAST, network_weights, newest_checkpoint, read_checkpoint
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import hold, is_first, new_folder, release, write_whole
from vit_lightning.storage.metrics import read_metrics, read_results
from vit_lightning.training.callbacks import StepSeeds
from vit_lightning.training.classifier import ViTClassifier


def fit(experiment: Experiment) -> Results:
    """Trains, tests the best checkpoint, and writes both to a run folder; returns the contents of ``results.json``.

    ``experiment.resume`` decides whether an unfinished run of this config is resumed.
    """
    quiet()
    experiment.imports.allow()
    if experiment.allowed_changes and experiment.resume == "never":
        named = ",".join(experiment.allowed_changes)
        raise UserError(f"allow-config-change={named} is for a run that is resumed: give --resume")
    if experiment.trainer["fast_dev_run"]:
        return _fast_dev_run(experiment)
    with contextlib.ExitStack() as held:
        if experiment.resume != "never" and (folder := _find_run(experiment, held)) is not None:
            return _continue(folder, experiment)
    arguments = experiment.make_trainer_arguments()
    with new_folder(experiment.out, _parent(experiment), f"seed{experiment.seed}") as folder:
        run = prepare(experiment, arguments, folder)
        write_whole(folder / "config.yaml", experiment.to_yaml())
        keep_own_files(folder)
        _write_environment(run)
        try:
            return train_and_test(run)
        except UserError as fault:
            is_full = isinstance(fault.__cause__, OSError | RuntimeError)  # a disk, which may have space again
            if type(fault) is UserError and not is_full and not run.trainer.global_step and is_first():
                shutil.rmtree(folder, ignore_errors=True)  # nothing has been trained, and nothing names it
            raise


RESUMED = "VIT_LIGHTNING_RESUMED"
"""Environment variable in which the first process tells the other ranks which run is resumed."""


def _find_run(experiment: Experiment, held: contextlib.ExitStack) -> Path | None:
    """Returns the run to resume, if there is one, locked for this process."""
    out, parent = experiment.out, _parent(experiment)
    given = out if out is not None and (out / "config.yaml").is_file() else None
    if not is_first():
        found = os.environ.get(RESUMED, given or "")  # a cluster may start all ranks without this variable
        return Path(found) if found else None
    folder = given
    if given is not None:
        held.enter_context(hold(given, "resume"))
    elif out is None:
        must = experiment.resume == "must"
        if unfinished := unfinished_run(parent, experiment.config, experiment.allowed_changes, must=must):
            folder = unfinished[0]
            held.callback(release, *unfinished)
    elif experiment.resume == "must":
        raise CannotResume(f"resume=must: out={out} is no run folder")
    os.environ[RESUMED] = "" if folder is None else str(folder)
    return folder


def _write_environment(run: Run) -> None:
    path = run.folder / "environment.json"
    if not path.is_file():
        device, precision = run.trainer.strategy.root_device.type, run.trainer.precision
        environment = {
            **{"run_id": run.mirror.run_id, **describe_environment(), "precision": precision},
            "fast_paths": run.experiment.describe_fast_paths(device, precision),
        }
        write_whole(path, json.dumps(environment, indent=2) + "\n")


def _parent(experiment: Experiment) -> Path:
    return Path("runs") / experiment.name


def _continue(folder: Path, experiment: Experiment) -> Results:
    """Trains from the newest readable checkpoint; a trained run is only tested, a finished one left alone."""
    written, given = read_run_config(folder), experiment.config
    results = read_results(folder)
    if results is not None:
        return _finished(folder, results, changes_since(written, given) | changed_files(folder))
    newest, files = newest_checkpoint(folder), changed_files(folder)
    changed = changes_since(written if newest is None else newest.checkpoint["config"], given) | files
    new = changes_since(written, given) | files
    # a change that config.yaml notes was allowed then, even if the run was killed before its next checkpoint
    noted = {key for key in changed if key not in new and key in noted_changes(folder / "config.yaml")}
    trained = newest is not None and newest.checkpoint["finished"]
    refuse_changes(changed, [*experiment.allowed_changes, *noted], folder, trained=trained)
    if trained and new:
        return _finished(folder, {}, new)
    if newest is None:
        _check_start(folder, experiment)
    elif (folder / BEST).is_file():
        read_checkpoint(folder / BEST)  # finds damage now, not after the training
    if newest is not None:
        _check_epochs(folder, newest.checkpoint, experiment.trainer["max_epochs"])
    run = prepare(experiment, experiment.make_trainer_arguments(), folder, begins=newest is None)
    if newest is not None:
        prefix = "network." if isinstance(run.module, ViTClassifier) else ""
        network_weights(network_of(run.module), newest.checkpoint, newest.path, prefix)
    remove_partial_files(folder)
    keep_own_files(folder)
    _write_environment(run)
    if new:
        step = 0 if newest is None else newest.checkpoint["global_step"]
        write_whole(folder / "config.yaml", note_changes(experiment.to_yaml(), folder / "config.yaml", new, step))
    return train_and_test(run, newest)


def _finished(folder: Path, results: Results, changed: Mapping[str, object]) -> Results:
    if changed:
        raise UserError(f"{folder} is finished: {', '.join(changed)} cannot change ({new_run_hint(folder)})")
    say(f"{folder} is finished already")
    print_summary(folder, results)
    return results


def _check_start(folder: Path, experiment: Experiment) -> None:
    """Says that a run without a checkpoint starts again.

    Raises:
        CannotResume: the run has lost its checkpoints, or ``resume=must``.
    """
    had = (folder / "metrics.jsonl").is_file() and any("train/acc" in row for row in read_metrics(folder))
    if had or experiment.resume == "must":
        why = f"{folder / LAST} and its other checkpoints are gone" if had else "it has no checkpoint yet"
        raise CannotResume(f"{folder} cannot be resumed: {why}; nothing was changed (leave out resume for a new run)")
    say(f"{folder} was stopped before its first checkpoint and starts again at step 0")


def _check_epochs(folder: Path, checkpoint: Mapping[str, Any], wanted: int | None) -> None:
    """Refuses to resume a run that has trained for more epochs than it is to have."""
    done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if wanted is not None and 0 <= wanted < done:
        raise UserError(f"trainer.max_epochs={wanted}, but {folder} has trained {counted(done, 'epoch')} already")


def _fast_dev_run(experiment: Experiment) -> Results:
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
