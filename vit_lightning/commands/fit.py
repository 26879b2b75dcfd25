"""The verbs that train: a new run, a run that goes on, a run sent to W&B."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import seed_everything

from vit_lightning.commands.resume import changed_page, read_run_page, refuse_changes, remarked, sweep, unfinished_run
from vit_lightning.commands.run import (
    Results,
    Run,
    logged,
    make_data_and_module,
    make_trainer,
    mirror_results,
    prepare,
    quiet,
    run_id,
    say,
    summary,
    train_and_test,
)
from vit_lightning.config.changes import changes
from vit_lightning.config.resolve import make_trainer_arguments, resolve, to_plain, to_yaml
from vit_lightning.data.base import ImageData
from vit_lightning.errors import CannotResume, UserError
from vit_lightning.storage.checkpoint_files import BEST, LAST, network_weights, newest_checkpoint, read_checkpoint
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import hold, is_first, new_folder, release, write_whole
from vit_lightning.storage.metrics import read_metrics, read_results
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror
from vit_lightning.training.callbacks import StepSeeds


def fit(config: Namespace, allowed: Sequence[str] = (), data: ImageData | None = None) -> Results:
    """Trains, tests the best checkpoint, and leaves all of it in a run folder; returns what ``results.json`` holds.

    Args:
        config: ``config.resume`` says whether a run of this page that is not over goes on instead.
        allowed: keys that may differ from those of a run that goes on.
        data: the data of the configuration, where it has been made already and its images are in memory.
    """
    quiet()
    if config.trainer.fast_dev_run:
        return _fast_dev_run(config)
    with contextlib.ExitStack() as held:
        if config.resume != "never" and (folder := _find_run(config, allowed, held)) is not None:
            return _go_on(folder, config, allowed, data)
    arguments = make_trainer_arguments(config)
    with new_folder(config.out, _parent(config), f"seed{config.seed_everything}") as folder:
        run = prepare(config, arguments, folder, data=data)
        write_whole(folder / "config.yaml", to_yaml(config))
        _write_environment(run)
        return train_and_test(run)


GOES_ON = "VIT_LIGHTNING_GOES_ON"
"""Variable in which the first process tells those that it starts which run goes on."""


def _find_run(config: Namespace, allowed: Sequence[str], held: contextlib.ExitStack) -> Path | None:
    """The run that goes on, held by this process, if there is one."""
    if not is_first():
        found = os.environ.get(GOES_ON, "")
        return Path(found) if found else None
    folder: Path | None = None
    if config.out is not None and (config.out / "config.yaml").is_file():
        folder = config.out
        held.enter_context(hold(config.out, "out"))
    elif config.out is None and (unfinished := unfinished_run(_parent(config), to_plain(config), allowed)) is not None:
        folder = unfinished[0]
        held.callback(release, *unfinished)
    if folder is None and config.resume == "must":
        place = _parent(config) if config.out is None else config.out
        raise CannotResume(f"resume=must: {place} holds no run of this page that is not over and not in use")
    os.environ[GOES_ON] = "" if folder is None else str(folder)
    return folder


def _write_environment(run: Run) -> None:
    path = run.folder / "environment.json"
    if not path.is_file():
        environment = {"run_id": run.mirror.run_id, **describe_environment()}
        write_whole(path, json.dumps(environment, indent=2) + "\n")


def _parent(config: Namespace) -> Path:
    return Path("runs") / str(config.experiment)


def resume(folder: Path, flags: Sequence[str] = (), allowed: Sequence[str] = (), trust: bool = False) -> Results:
    """Goes on with a run in its folder from its newest checkpoint, with its own page.

    Args:
        folder: the run folder.
        flags: ``--key=value``, for keys that are to change.
        allowed: keys that may change.
        trust: whether the page may name classes of any package.
    """
    quiet()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"resume={folder} is no run folder: it holds no config.yaml (choose one, or auto, must, never)")
    # its first weights are of long ago: they need not be there any more unless it starts again
    arguments = ["--config", str(folder / "config.yaml"), *flags, "--init_from=null"]
    config = resolve(arguments, trust=trust)
    config.init_from = read_run_page(folder).get("init_from")
    with hold(folder, "resume"):
        return _go_on(folder, config, allowed)


def _go_on(folder: Path, config: Namespace, allowed: Sequence[str], data: ImageData | None = None) -> Results:
    """Trains on from the newest checkpoint that can be read; only tests if training was over; else does nothing."""
    written, page = read_run_page(folder), to_plain(config)
    results = read_results(folder)
    if results is not None:
        return _all_done(folder, results, changes(written, page))
    newest = newest_checkpoint(folder)
    changed = changes(written if newest is None else newest.checkpoint["page"], page)
    new = changes(written, page)
    # a change that a kill kept from the checkpoints was allowed when the page was written
    said = {key for key in changed if key not in new and key in remarked(folder / "config.yaml")}
    refuse_changes(changed, [*allowed, *said], folder)
    if newest is not None and newest.checkpoint["finished"] and new:
        return _all_done(folder, {}, new)
    if newest is None:
        _refuse_silent_start(folder, config)
    elif (folder / BEST).is_file():
        read_checkpoint(folder / BEST)  # damaged, it would be found when training is over
    run = prepare(config, make_trainer_arguments(config), folder, begins=newest is None, data=data)
    if newest is not None:
        network_weights(run.module.network, newest.checkpoint, newest.path)
    sweep(folder)
    _write_environment(run)
    if new:
        step = 0 if newest is None else newest.checkpoint["global_step"]
        write_whole(folder / "config.yaml", changed_page(to_yaml(config), folder / "config.yaml", new, step))
    return train_and_test(run, newest)


def _all_done(folder: Path, results: Results, changed: Mapping[str, object]) -> Results:
    if changed:
        raise UserError(f"{folder} is over: {', '.join(changed)} cannot change (its weights: --init_from={folder})")
    say(f"{folder}: all was done")
    summary(folder, results)
    return results


def _refuse_silent_start(folder: Path, config: Namespace) -> None:
    """A run without any checkpoint starts again, and says so; not if it had some, or a checkpoint is a must."""
    had = (folder / "metrics.jsonl").is_file() and any("train/acc" in row for row in read_metrics(folder))
    if had or config.resume == "must":
        why = f"{folder / LAST} and the others are gone" if had else "it has no checkpoint yet"
        raise CannotResume(f"{folder} cannot go on: {why}, nothing was changed (without resume a new run starts)")
    say(f"{folder} was stopped before its first checkpoint: starts again from its beginning")


def _fast_dev_run(config: Namespace) -> Results:
    seed_everything(config.seed_everything, verbose=False)
    data, module = make_data_and_module(config)
    trainer = make_trainer(make_trainer_arguments(config), Path("runs"), [StepSeeds(config.seed_everything)], [])
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    say("fast_dev_run: training, validation and test work; nothing was saved")
    return logged(trainer, "")


def sync(folder: Path) -> None:
    """Sends a run to W&B, or what W&B lacks of it, from ``metrics.jsonl``; W&B leaves out the steps that it has."""
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is no run folder: it holds no metrics.jsonl")
    page = read_run_page(folder)  # plain data: nothing that it names is imported
    results = read_results(folder)
    settings = WandbConfig(**{**page.get("wandb", {}), "mode": "online"})
    mirror = WandbMirror(folder, run_id(folder), settings, page)
    mirror.start(otherwise=())
    if mirror.mode == "online":
        mirror.catch_up(folder)
        if results:
            mirror_results(mirror, results)
    mirror.finish()
    if mirror.mode != "online" or mirror.reason:
        raise UserError(f"{folder} was not sent: {mirror.reason} (for a key: wandb login)")
    say(f"{folder} is in W&B as {settings.project}/{mirror.run_id}")
