"""The sweep file of a training, ``lightning fit --wandb-sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vit_lightning.commands.console import say
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import options_of, read_flags
from vit_lightning.limits import problems_of
from vit_lightning.storage.wandb_sweeps import write_sweep_file

SWEEP = """\
# A sweep of W&B: wandb sweep {path}, then wandb agent on any number of machines.
# method: bayes, random or grid. parameters: any options of lightning fit, in W&B's words.
# early_terminate ends runs that are behind; their checkpoints stay: lightning fit --resume RUN goes on with one.
"""
"""Comments of a sweep file."""


def write_sweep(experiment: Experiment, path: Path, words: Sequence[str]) -> None:
    """Writes a sweep file of W&B whose runs are a command with other learning rates and weight decays.

    It is a beginning, to be changed: Bayesian search by the metric of the best checkpoint, and Hyperband, which ends
    runs after a ninth and a third of the validations.

    Args:
        experiment: the experiment.
        path: the file, which must not be there.
        words: the command line, without the program.

    Raises:
        UserError: the file is there or cannot be written, or the runs would have one folder.
    """
    chosen, flags = experiment.settings.checkpoint, [*read_flags(words[1:])]
    given, options = dict(flags), options_of(experiment.config)
    rates = {key: options.get(key) for key in ("optimizer.lr", "optimizer.weight_decay")}
    tracked = experiment.settings.wandb.mode
    problems = problems_of(
        ("out", given.get("out"), "out" not in given, "left out: each run of a sweep has a folder of its own"),
        ("resume", given.get("resume"), given.get("resume") in (None, "auto", "never"), "auto or never"),
        ("wandb.mode", tracked, tracked not in ("disabled", "offline"), "online: W&B searches by what runs send it"),
    )
    kept = [f"--{key}={value}" for key, value in flags if key not in ("wandb-sweep", "wandb_sweep", *rates)]
    command = ["fit", *kept, *["--resume=auto"] * ("resume" not in given)]
    validations = (experiment.trainer["max_epochs"] or 0) // (experiment.trainer["check_val_every_n_epoch"] or 1)
    parameters = {
        key: {"distribution": "log_uniform_values", "min": value / 10, "max": value * 10}
        for key, value in rates.items()
        if isinstance(value, float | int) and value > 0
    }
    early = {"type": "hyperband", "min_iter": max(1, validations // 9), "eta": 3}
    sweep = {"method": "bayes", "parameters": parameters, "early_terminate": early}
    comments = SWEEP.format(path=path)
    how = write_sweep_file(path, command, chosen.monitor, str(chosen.mode), sweep, comments=comments, problems=problems)
    say(f"{path}: change its parameters, then {how}")
