"""Checkpoints as artifacts of W&B."""

from pathlib import Path
from typing import Any

import yaml

from vit_lightning.storage.checkpoint_files import BEST, LAST, read_checkpoint
from vit_lightning.storage.credentials import masked

UPLOAD_SECONDS = 900
"""Seconds that the upload of a checkpoint may take."""


def log_models(wandb: Any, run: Any, folder: Path) -> None:
    """Logs the last and the best checkpoint of a run folder as versions of one artifact.

    A version has the checkpoint at its place in a run folder, and ``config.yaml`` without keys: it can be used as one.
    """
    versions: list[Any] = []
    for alias, place in (("last", LAST), ("best", BEST)):
        if not (folder / place).is_file():
            continue
        checkpoint = read_checkpoint(folder / place)
        facts = {
            "seed": checkpoint["config"].get("seed_everything"),
            "step": checkpoint["global_step"],
            "metrics": {name: float(value) for name, value in checkpoint["metrics"].items()},
            "fingerprint": checkpoint["images"],
        }
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=facts)
        artifact.add_file(str(folder / place), name=str(place), policy="immutable")
        with artifact.new_file("config.yaml") as file:
            yaml.safe_dump(masked(checkpoint["config"]), file, sort_keys=False)
        versions.append(run.log_artifact(artifact, aliases=[alias]))
    if run.offline:
        return
    for version in versions:
        version.wait(UPLOAD_SECONDS)
