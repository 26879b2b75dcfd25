"""Parts that commands share: a seeded session with a folder for its results, the LightningModule, the Trainer."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from vit_lightning.commands.console import counted, quiet, row, say
from vit_lightning.config.build import data_facts
from vit_lightning.config.experiment import Experiment, network_in_file
from vit_lightning.config.files import as_list
from vit_lightning.config.options import TrainedOptions
from vit_lightning.config.own_files import OwnFault, own_traceback
from vit_lightning.config.own_module import class_of, make_own
from vit_lightning.config.trust import KNOWN_PACKAGES, Imports
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import with_our_workers
from vit_lightning.errors import UserError, one_line
from vit_lightning.storage.checkpoint_files import (
    AtomicCheckpointIO,
    find_checkpoint,
    load_network,
    read_checkpoint,
    run_folder_of,
)
from vit_lightning.storage.folder import is_first, new_folder, write_whole
from vit_lightning.storage.metrics import json_number
from vit_lightning.training.callbacks import TrainingBar
from vit_lightning.training.classifier import ViTClassifier, classify
from vit_lightning.training.compiled import compile_module
from vit_lightning.training.distillation import Distillation, Teacher
from vit_lightning.training.freeze import head_state
from vit_lightning.training.lightning_detours import (
    change_loaders,
    end_each_epoch_once,
    leave_signals_to_us,
    predict_with,
    profile_nothing,
    start_ranks_without_signals,
)
from vit_lightning.training.precision import AUTO, auto_precision
from vit_lightning.weights.init_from import open_initial_weights, with_resized_positions
from vit_lightning.weights.sources import open_teacher

Results = dict[str, Any]


@contextlib.contextmanager
def session(experiment: Experiment, command: str) -> Iterator[Path]:
    """Seeds everything and gives a new folder for the results of a command; an empty one is removed at the end.

    It is ``out``, or a folder named after the time: RUN/COMMAND/TIME with a trained model, else runs/COMMAND/TIME-NAME.
    """
    quiet()
    seed_everything(experiment.seed, verbose=False)
    parent, suffix = Path("runs") / command, experiment.name
    if isinstance(experiment.options, TrainedOptions):
        path = find_checkpoint(experiment.options.ckpt)
        parent, suffix = (run_folder_of(path) or Path("runs") / path.stem) / command, ""
    with new_folder(experiment.out, parent, suffix) as folder, own_faults(folder), chosen_matmul(experiment):
        yield folder


@contextlib.contextmanager
def chosen_matmul(experiment: Experiment) -> Iterator[None]:
    """Sets the precision of float32 products for a while, where the config has one."""
    chosen = experiment.config.get("matmul_precision")  # checkpoints of earlier versions lack it
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
    """
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        if type(fault).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise UserError(f"compile=true: torch cannot compile it: {one_line(fault)} (give compile=false)") from fault
        text = own_traceback(fault)
        if text is None:
            raise
        if folder is not None and folder.is_dir():
            log = folder / ("error.log" if is_first() else f"error-rank{_get_rank()}.log")
            with contextlib.suppress(OSError):  # a full disk
                log.write_text("".join(traceback.format_exception(fault)), encoding="utf-8")
                text += f"\nwhole traceback: {log}"
        raise OwnFault(text) from fault


def make_module(
    experiment: Experiment, search: type[ViTClassifier] | None = None, *, begins: bool = False
) -> LightningModule:
    """Returns the LightningModule of an experiment, with new random weights.

    Args:
        experiment: the experiment.
        search: a subclass of ViTClassifier to train with in place of it; a class of the user's own is then mixed in.
        begins: whether training begins, and so with the weights that ``model`` names, of timm or torchvision.
    """
    experiment.imports.allow()
    settings, data, kind = experiment.settings, experiment.data, class_of(experiment.config)
    if search is not None:
        if not issubclass(kind, ViTClassifier):
            raise UserError(f"module.class_path={kind.__name__} is no ViTClassifier: only these can be searched")
        kind = search if kind is ViTClassifier else type(kind.__name__, (search, kind), {})
    chosen = settings.distillation
    tell = (lambda text: say(row("weights", text))) if begins else None
    available = {
        **data_facts(data),
        "network": experiment.make_network(tell) if experiment.config["model"] is not None else None,
        "optimizer": settings.optimizer,
        "loss": settings.loss,
        "ema": settings.ema,
        "metrics": experiment.metrics,
        "distillation": None,
    }
    if chosen.teacher:
        available["distillation"] = Distillation(chosen, load_teacher(chosen.teacher, data, experiment.imports))
    module = make_own(experiment.config, available, kind)
    predict_with(module, classify)
    return module


def load_teacher(place: str, data: ImageData, imports: Imports = KNOWN_PACKAGES) -> Teacher:
    """Returns the teacher for the student's data, and warns of what was assumed about it."""
    make, key = partial(network_in_file, imports=imports), "distillation.teacher"
    shape = (data.in_channels, *data.image_size)
    source = open_teacher(place, shape, data.num_classes, make_network=make, trust=imports.trust, key=key)
    for note in source.notes:
        warnings.warn(f"{key}={place}: {note}", stacklevel=2)
    return Teacher(source.network, normalised=(source.view["mean"], source.view["std"]), images=(data.mean, data.std))


def load_trained(experiment: Experiment) -> tuple[LightningModule, Path]:
    """Returns the LightningModule with the weights of ``ckpt``, and the checkpoint file that they come from."""
    assert isinstance(experiment.options, TrainedOptions)
    path = find_checkpoint(experiment.options.ckpt)
    module, checkpoint = make_module(experiment), read_checkpoint(path)
    if isinstance(module, ViTClassifier):
        given = experiment.data.image_size, experiment.resize_positions
        checkpoint, changed = with_resized_positions(checkpoint, module.network, *given)
        if changed:
            say(row("image size", changed))
    load_weights(module, checkpoint, path)
    return module, path


def start_weights(module: LightningModule, experiment: Experiment, folder: Path | None = None) -> None:
    """Loads the weights of ``init_from`` into a module; tells how, also in ``init_from.json`` in a folder."""
    if experiment.init_from is None:
        return
    if not isinstance(module, ViTClassifier):
        path = find_checkpoint(experiment.init_from, "init_from")
        head = head_state(module) if experiment.config["reset_head"] else {}
        load_weights(module, read_checkpoint(path), path)
        module.load_state_dict(head, strict=False)
        return
    method = experiment.resize_positions
    make, trust = partial(network_in_file, imports=experiment.imports), experiment.imports.trust
    initial, data = open_initial_weights(experiment.init_from, make, trust=trust), experiment.data
    facts = {name: getattr(data, name, None) for name in ("mean", "std", "class_names")}
    first = initial.fitted(module.network, method, **facts)
    if experiment.config["reset_head"]:
        first = first.with_new_head(module.network, "new head (reset_head)")
    experiment.imports.allow()
    if str(experiment.trainer["precision"]).startswith("64"):
        module.network.double()  # Lightning converts only later
    first.adapted.load(module.network)
    for text in (first.sentence(), *first.notes):
        say(row("weights", text))
    if folder is not None and is_first():
        write_whole(folder / "init_from.json", first.to_json(method))


def load_weights(module: LightningModule, checkpoint: dict[str, Any], path: Path) -> None:
    """Loads the weights of a checkpoint into a module of the same architecture; metrics keep their own counts."""
    if not isinstance(module, ViTClassifier):
        load_network(module, checkpoint, path, prefix="")
        return
    load_network(module.network, checkpoint, path)
    if type(module) is not ViTClassifier:
        state = checkpoint["state_dict"]
        others = ("network.", "train_metrics.", "val_metrics.", "test_metrics.")
        own = {name: state[name] for name in module.state_dict() if name in state and not name.startswith(others)}
        module.load_state_dict(own, strict=False)


def compile_chosen(module: LightningModule, experiment: Experiment) -> None:
    """Compiles the network of a module in place, where the config says so."""
    if experiment.compile:
        parts = compile_module(module, getattr(experiment.data, "batch_size", None))
        several = f"one code for all {len(parts)} blocks, " if len(parts) > 1 else ""
        say(row("compile", f"{several}made in the first steps and the first validation, which take a minute each"))


def began_precision(folder: Path) -> str | None:
    """Returns the precision with which the run of a folder began; None for a new run, or one of an earlier version."""
    path = folder / "environment.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found.get("precision") if isinstance(found, dict) else None


def make_trainer(arguments: Mapping[str, Any], folder: Path, own: list[Callback], own_loggers: list[Logger]) -> Trainer:
    """Returns Lightning's Trainer with the config's arguments; its callbacks and loggers are added to ours.

    Args:
        arguments: arguments of the Trainer, from the config.
        folder: the run folder.
        own: our callbacks.
        own_loggers: our loggers; without any, nothing is trained and no checkpoints are written.

    Raises:
        UserError: the arguments do not fit together, or do not fit this machine.
    """
    callbacks = as_list(arguments["callbacks"])
    loggers = [logger for logger in as_list(arguments["logger"]) if not isinstance(logger, bool)]
    wants_bar = arguments["enable_progress_bar"] is not False
    if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        own = [*own, TrainingBar()]
    if not own_loggers:
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    plugins, precision = as_list(arguments["plugins"]), arguments["precision"]
    if precision == AUTO:
        precision = began_precision(folder) or auto_precision(arguments["accelerator"])
    if any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        raise UserError(
            "trainer.plugins: a CheckpointIO cannot be given, since our own writes checksums (leave it out)"
        )
    trainer = _made_trainer(
        {
            **arguments,
            "precision": precision,
            "enable_model_summary": False,  # ours is printed at the start of a run
            "plugins": [*plugins, AtomicCheckpointIO()],
            "enable_checkpointing": bool(own_loggers),
            "callbacks": [*own, *callbacks],
            "logger": [*own_loggers, *loggers] or False,
            "default_root_dir": folder,
        }
    )
    end_each_epoch_once(trainer)
    leave_signals_to_us(trainer)
    start_ranks_without_signals(trainer)
    change_loaders(trainer, with_our_workers)
    profile_nothing(trainer)
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if arguments["profiler"] and profiler.filename is None:
        profiler.filename = "profile"  # fit-profile.txt in the run folder; else only in Lightning's log
    cores = len(os.sched_getaffinity(0))
    if trainer.strategy.root_device.type == "cpu" and trainer.num_devices > cores:
        given = f"trainer.devices={trainer.num_devices}"
        say(f"{given}: more processes than the {counted(cores, 'core')} of this machine")
    return trainer


def _made_trainer(arguments: Mapping[str, Any]) -> Trainer:
    try:
        return Trainer(**arguments)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as fault:
        named = ("accelerator", "devices", "strategy", "precision")
        given = ", ".join(f"{name}={arguments[name]}" for name in named if arguments[name] is not None)
        raise UserError(f"trainer: {' '.join(str(fault).split())[:400]} (given: {given})") from fault


def logged(trainer: Trainer, prefix: str) -> Results:
    return {name: json_number(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
