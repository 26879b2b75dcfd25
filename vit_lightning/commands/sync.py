"""Sends a run to W&B: all of it, or what W&B still lacks."""

from __future__ import annotations

from pathlib import Path

from vit_lightning.commands.console import say
from vit_lightning.commands.resume import read_run_config
from vit_lightning.errors import UserError
from vit_lightning.storage.metrics import read_results
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror, run_id


def sync(folder: Path) -> None:
    """Sends a run's ``metrics.jsonl``, figures and results to W&B, which drops the steps that it already has.

    Raises:
        UserError: the folder holds no run, or W&B cannot be reached.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
    config = read_run_config(folder)  # plain data: no class that it names is imported
    settings = WandbConfig(**{**config.get("wandb", {}), "mode": "online"})
    mirror = WandbMirror(folder, run_id(folder), settings, config)
    mirror.start(otherwise=())
    if mirror.mode == "online":
        mirror.catch_up(folder)
        if results := read_results(folder):
            mirror.log_results(results)
    mirror.finish()
    if mirror.mode != "online" or mirror.reason:
        raise UserError(f"{folder} was not sent: {mirror.reason} (for an API key: wandb login)")
    say(f"{folder} is in W&B as {settings.project}/{mirror.run_id}")
