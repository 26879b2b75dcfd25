"""From the arguments of a command line to the experiment that the command gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from vit_lightning.commands.resume import read_run_config
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import read_flags, split_words
from vit_lightning.config.options import Resume
from vit_lightning.config.resolve import resolve
from vit_lightning.limits import refuse


def read_experiment(command: str, arguments: Sequence[str]) -> Experiment:
    """Returns the checked experiment of a command line; for ``fit --resume FOLDER``, that of the run in the folder."""
    if command == "shard":
        flags, words = split_words(arguments)
        if len(words) == 1:
            arguments = _as_arguments([*flags, ("out", words[0])])
    if command == "fit":
        flags = read_flags(arguments)
        given = dict(flags).get("resume", "never")
        if given not in get_args(Resume):
            return read_run(Path(given), _as_arguments([flag for flag in flags if flag[0] != "resume"]))
    return resolve(arguments, command)


def read_run(folder: Path, arguments: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a run, which ``fit`` resumes in the folder of the run.

    Args:
        folder: the run folder.
        arguments: options to change, as ``--key=value``, with ``--allow-config-change`` and ``--trust-config``.

    Raises:
        UserError: the folder holds no run, or the arguments name another config or folder.
    """
    problems = [
        f"{key}={value} beside --resume={folder}: a run is resumed in its own folder with its own config"
        for key, value in read_flags(arguments)
        if key in ("config", "out", "print_config", "init_from")
    ]
    if not (folder / "config.yaml").is_file():
        problems.append(f"resume={folder} is not a run folder with a config.yaml (choose one, or auto, must, never)")
    refuse(problems)
    # the initial weights may be gone by now; they are needed only if the run has no checkpoint yet
    experiment = resolve(["--config", str(folder / "config.yaml"), *arguments, "--init_from=null"])
    config = {**experiment.config, "init_from": read_run_config(folder).get("init_from")}
    return replace(experiment, config=config, out=folder, resume="auto")


def _as_arguments(flags: Sequence[tuple[str, str]]) -> list[str]:
    return [f"--{key}={value}" for key, value in flags]
