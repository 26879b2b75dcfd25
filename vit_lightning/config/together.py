"""Values of a config that have the right types, but cannot work."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from vit_lightning.config.files import as_list
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import Part
from vit_lightning.metric_facts import Goal, goal_of
from vit_lightning.storage.redaction import secrets_of_environment
from vit_lightning.training.checkpoints import CheckpointConfig
from vit_lightning.training.compiled import REPLAYS, changed_steps
from vit_lightning.training.ema import EMAConfig
from vit_lightning.training.image_sizes import ProgressiveImageSize
from vit_lightning.training.probes import Probe


def secret_problems(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Returns the values that hold a secret of the environment, which would be written to the run's files."""
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in secret_problems(item, (*path, str(name)))]
    if isinstance(value, list):
        return [text for number, item in enumerate(value) for text in secret_problems(item, (*path, str(number)))]
    return [
        f"{'.'.join(path)} holds the value of {name}: no secret belongs in a config, W&B reads it from the environment"
        for name, text in secrets_of_environment().items()
        if text in str(value)
    ]


_AT_LEAST: dict[str, float] = {
    "max_epochs": 1,
    "max_steps": 1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_nodes": 1,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "gradient_clip_val": 0,
    "limit_train_batches": 1e-9,
}


def trainer_problems(trainer: Mapping[str, Any]) -> list[str]:
    """Returns arguments of the Trainer that are out of range."""
    endless = ("max_epochs", "max_steps")
    problems = []
    if trainer.get("devices") in (0, "0") or trainer.get("devices") == []:
        problems.append(f"trainer.devices={trainer['devices']} must be at least 1 (or auto, or -1 for all)")
    for name, least in _AT_LEAST.items():
        value = trainer.get(name)
        if value is None or (name in endless and value == -1):
            continue
        if not math.isfinite(value) or value < least:
            rule = f"at least {least}" if least == int(least) else "above 0"
            problems.append(f"trainer.{name}={value} must be {rule}{' (or -1 for no end)' * (name in endless)}")
    if (longest := trainer.get("max_time")) is not None and not re.search("[1-9]", str(longest)):
        problems.append(f"trainer.max_time={longest} must be a time above 0 (days:hours:minutes:seconds)")
    algorithm = trainer.get("gradient_clip_algorithm")
    if algorithm not in (None, "norm", "value"):
        problems.append(f"trainer.gradient_clip_algorithm={algorithm} must be one of norm, value")
    elif algorithm is not None and trainer.get("gradient_clip_val") is None:
        problems.append(f"trainer.gradient_clip_algorithm={algorithm} does nothing without trainer.gradient_clip_val")
    return problems


def compiler_problems() -> list[str]:
    """Returns what ``torch.compile`` lacks on this machine."""
    if sys.platform == "win32":  # found by torch in its own way
        return []
    compiler = shlex.split(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))[0]
    missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler} is not there; CXX can name another)"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("the headers of Python (python3-dev)")
    text = f"compile=true needs {' and '.join(missing)} (install what is missing, or give compile=false)"
    return [text] if missing else []


_REPLAYS_WITH: dict[str, tuple[Any, ...]] = {"accelerator": ("auto", "gpu", "cuda"), "strategy": ("auto",)}
_REPLAYS_WITH |= dict.fromkeys(("num_nodes", "accumulate_grad_batches"), (1,))
_REPLAYS_WITHOUT = (GradientAccumulationScheduler, StochasticWeightAveraging, ProgressiveImageSize)


def replay_problems(trainer: Part, module: Part) -> list[str]:
    """Returns what CUDA graphs cannot train with: all batches of a shape share memory, also that of gradients."""
    given = {name: value for name, value in trainer.arguments.items() if value is not None}
    found = [name for name, values in _REPLAYS_WITH.items() if name in given and given[name] not in values]
    devices = given.get("devices")
    found += ["devices"] if (len(devices) if isinstance(devices, list) else devices) in range(2, 10**6) else []
    texts = [f"trainer.{name}={getattr(given[name], 'name', given[name])}" for name in found]
    kinds = [part.target for part in callbacks_of(trainer) if issubclass(part.target, _REPLAYS_WITHOUT)]
    texts += [f"trainer.callbacks.{kind.__name__}" for kind in kinds]
    texts += [f"{module.name}.{name}" for name in changed_steps(module.target)]
    rule = "CUDA graphs need one GPU, a ViTClassifier's steps, images of one size and gradients of one batch"
    return [f"compile={REPLAYS} beside {', '.join(texts)}: {rule} (give compile=true)"] if texts else []


def average_problems(trainer: Part, ema: EMAConfig | None) -> list[str]:
    """Returns callbacks that average the weights beside ``ema``."""
    if ema is None or ema.decay is None:
        return []
    names = [name for part in callbacks_of(trainer) if (name := part.target.__name__).endswith("WeightAveraging")]
    return [f"ema.decay={ema.decay} beside trainer.callbacks.{name}: give one of the two" for name in names]


def callbacks_of(trainer: Part) -> list[Part]:
    """Returns the callbacks of the config."""
    return [callback for callback in as_list(trainer.arguments.get("callbacks")) if isinstance(callback, Part)]


def with_mode(checkpoint: Part, known: Mapping[str, Goal | None]) -> Part:
    """Returns the options of checkpoints with the mode of their metric, where none is given and it is known."""
    given = checkpoint.arguments
    monitor = given.get("monitor", CheckpointConfig.monitor)
    goal = known.get(monitor) or goal_of(monitor)
    filled = {**given, "mode": goal[:3]} if goal and given.get("mode") is None else given
    return replace(checkpoint, arguments=filled)


def monitor_problems(trainer: Part, checkpoint: CheckpointConfig | None, known: Iterable[str]) -> list[str]:
    """Returns monitored metrics that nothing logs.

    Args:
        trainer: the Trainer with its callbacks; those of others may log anything.
        checkpoint: the options of checkpoints, None where they are wrong.
        known: metrics that the module logs; none of a module of the user's, which may log anything.
    """
    callbacks = callbacks_of(trainer)
    if not known or not all(callback.name.startswith(("lightning.", "vit_lightning.")) for callback in callbacks):
        return []
    probes = [name for callback in callbacks if issubclass(callback.target, Probe) for name in callback.target.logs]
    logged = [*known, *probes]
    return [
        f"{key}.monitor={metric} is not logged (choose {', '.join(logged)})"
        for key, metric, _ in _monitors(trainer, checkpoint)
        if metric not in logged
    ]


def mode_problems(trainer: Part, checkpoint: CheckpointConfig | None, known: Mapping[str, Goal | None]) -> list[str]:
    """Returns modes of monitored metrics by which the worst value would count as the best.

    Args:
        trainer: the Trainer with its callbacks; arguments of those of others mean what they say.
        checkpoint: the options of checkpoints, None where they are wrong.
        known: metrics that the module logs, with their goals; none of a module of the user's.
    """
    problems = []
    for key, metric, mode in _monitors(trainer, checkpoint):
        if known and metric not in known:
            continue
        goal = known.get(metric) or goal_of(metric)
        if goal and mode in {"max", "min"} - {goal[:3]}:
            better = f"{'lower' if mode == 'max' else 'higher'} values of {metric} are better"
            problems.append(f"{key}.mode={mode}: {better} (give mode={goal[:3]})")
        elif not (goal or mode):
            better = f"whether higher (max) or lower (min) values of {metric} are better"
            problems.append(f"{key}.mode is missing: {better}")
    return problems


def _monitors(trainer: Part, checkpoint: CheckpointConfig | None) -> list[tuple[str, str, Any]]:
    """Returns keys, metrics and modes of what checkpoints and Lightning's callbacks monitor."""
    found = [("checkpoint", checkpoint.monitor, checkpoint.mode)] if checkpoint else []
    for callback in callbacks_of(trainer):
        metric, option = callback.arguments.get("monitor"), signature_of(callback.target).options.get("mode")
        if callback.name.startswith("lightning.") and metric is not None:
            mode = callback.arguments.get("mode", option and option.default)
            found.append((f"trainer.callbacks.{callback.target.__name__}", metric, mode))
    return found
