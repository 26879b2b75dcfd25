"""Sweep files of W&B."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.storage.folder import write_whole


def write_sweep_file(
    path: Path,
    command: Sequence[str],
    monitor: str,
    mode: str,
    sweep: Mapping[str, Any],
    *,
    comments: str = "",
    problems: Sequence[str] = (),
) -> str:
    """Writes a sweep file whose runs are a command with the options that an agent adds; returns how to start it.

    Args:
        path: the file, which must not be there.
        command: a command of ``lightning`` with its options.
        monitor: metric of the best checkpoint.
        mode: min or max.
        sweep: method, parameters and early end, in W&B's words.
        comments: lines at the beginning of the file.
        problems: what else is wrong, which is told with what is wrong here.

    Raises:
        UserError: there are problems, the file is there, or it cannot be written.
    """
    refuse([*problems, *[f"wandb-sweep={path} is there already (choose a new file)"] * path.exists()])
    about = {"program": "vit_lightning", "command": ["lightning", *command, "${args}"]}
    whole = {**about, "metric": {"name": monitor, "goal": f"{mode}imize"}, **sweep}
    try:
        write_whole(path, comments + yaml.safe_dump(whole, sort_keys=False, default_flow_style=None, width=120))
    except OSError as fault:
        raise UserError(f"wandb-sweep={path} cannot be written: {fault.strerror}") from fault
    return f"wandb sweep {shlex.quote(str(path))}, then wandb agent on any number of machines"
