"""The module wandb, its key, and artifacts of W&B as files to read."""

import os
import re
from pathlib import Path
from typing import Any

from vit_lightning.errors import UserError, first_line

WANDB = "wandb:"
"""Prefix of a source that is an artifact: wandb:ENTITY/PROJECT/ARTIFACT:ALIAS."""


def silent_wandb() -> Any:
    """Imports wandb, silent before the login too: the settings of init come too late for that."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a report takes 12 s at exit if the server hangs
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    return wandb


def has_key() -> bool:
    """Whether an API key is configured (environment, netrc or settings); uses neither network nor prompt."""
    wandb = silent_wandb()
    if wandb.run is not None:  # of a WandbLogger of the config: beside it login does nothing
        return not wandb.run.offline
    return bool(wandb.login(prompt=False, verify=False))


def artifact_path(place: str, key: str, parent: Path) -> Path:
    """Returns the folder with the files of an artifact, or its only file.

    Args:
        place: wandb:ENTITY/PROJECT/ARTIFACT:ALIAS.
        key: option that errors name.
        parent: folder for downloads; there the folder has the digest of the files as its name.

    Raises:
        UserError: there is none, or no API key.
    """
    name = place.removeprefix(WANDB)
    if re.fullmatch(r"[^/:\s]+/[^/:\s]+/[^/:\s]+:[^/:\s]+", name) is None:
        raise UserError(
            f"{key}={place} must be {WANDB}ENTITY/PROJECT/ARTIFACT:ALIAS, such as {WANDB}me/digits/model-1:best"
        )
    try:
        artifact = silent_wandb().Api(timeout=20).artifact(name)
        folder = parent / f"wandb-{re.sub(r'[^0-9a-f]', '', artifact.digest)}"
        artifact.download(root=str(folder))
    except Exception as fault:  # no key; of the server, of sockets, of the disk
        raise UserError(f"{key}={place} cannot be had: {first_line(fault)}") from fault
    files = [path for path in folder.rglob("*") if path.is_file()]
    return files[0] if len(files) == 1 else folder
