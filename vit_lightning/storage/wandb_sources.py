"""Artifacts of W&B as files to read."""

from __future__ import annotations

import re
from pathlib import Path

from vit_lightning.errors import UserError, first_line
from vit_lightning.storage.wandb_internals import has_key, import_wandb, set_up

WANDB = "wandb:"
"""Prefix of a source that is an artifact: wandb:ENTITY/PROJECT/ARTIFACT:ALIAS."""


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
    wandb = import_wandb(parent)
    set_up(wandb)
    if not has_key(wandb):
        raise UserError(f"{key}={place} needs an API key of W&B: wandb login")
    try:
        artifact = wandb.Api(timeout=20).artifact(name)
        folder = parent / f"wandb-{re.sub(r'[^0-9a-f]', '', artifact.digest)}"
        artifact.download(root=str(folder))
    except Exception as fault:  # of the server, of sockets, of the disk
        raise UserError(f"{key}={place} cannot be had: {first_line(fault)}") from fault
    files = [path for path in folder.rglob("*") if path.is_file()]
    return files[0] if len(files) == 1 else folder
