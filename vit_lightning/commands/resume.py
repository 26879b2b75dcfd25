"""Which run to go on with, and what may have changed since it began."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.config.changes import changes
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import release, try_hold
from vit_lightning.storage.metrics import read_results

NEVER = (
    "seed_everything",
    "data.class_path",
    "data.batch_size",
    "data.split_seed",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.limit_train_batches",
    "trainer.overfit_batches",
)
"""Keys that say which images make up which batch; with others it would be another run."""


def refuse_changes(changed: Mapping[str, tuple[Any, Any]], allowed: Sequence[str], folder: Path) -> None:
    """A run goes on as it began, but for what is allowed by name.

    Raises:
        UserError: names every other change.
    """
    problems = []
    for key, (before, after) in changed.items():
        said = f"{key}={after} where {folder} has {before}"
        if key in NEVER:
            problems.append(f"{said}: it says which images make up a batch and cannot change within a run")
        elif not _is_allowed(key, allowed):
            problems.append(f"{said} (to change it: --allow-config-change {key})")
    if problems:
        raise UserError(problems)


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether a key or a group that it belongs to is named."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def changed_page(text: str, path: Path, changed: Mapping[str, tuple[Any, Any]], step: int) -> str:
    """A run's page with its new values, and what it had before as remarks at its top."""
    remarks = re.match(r"(#[^\n]*\n)*", path.read_text(encoding="utf-8"))
    said = "".join(f"# {key} was {before} until step {step}\n" for key, (before, _) in changed.items())
    return f"{remarks.group() if remarks else ''}{said}{text}"


def remarked(path: Path) -> set[str]:
    """Keys that the remarks at the top of a run's page say to have been changed."""
    return set(re.findall(r"^# (\S+) was ", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def read_run_page(folder: Path) -> dict[str, Any]:
    """The page that a run began with, as plain data."""
    path = folder / "config.yaml"
    try:
        page = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise UserError(f"{path} cannot be read: {' '.join(str(fault).split())}") from fault
    return page if isinstance(page, dict) else {}


def unfinished_run(parent: Path, page: Mapping[str, Any], allowed: Sequence[str]) -> tuple[Path, int] | None:
    """The newest run of a page that is not over and that no live process holds, now held by this one."""
    passed_over: list[str] = []
    for folder in _newest_first(parent):
        try:
            changed = changes(read_run_page(folder), page)
        except UserError:  # not the one that is looked for
            continue
        if any(key in NEVER or not _is_allowed(key, allowed) for key in changed):
            passed_over.append(f"{folder} is not over, but differs in {', '.join(changed)}")
            continue
        lock = try_hold(folder)
        if lock is None:
            continue
        if read_results(folder) is None:
            return folder, lock
        release(folder, lock)
    for text in passed_over[:3]:
        print(f"resume: {text}", flush=True)
    return None


def _newest_first(parent: Path) -> Iterator[Path]:
    pages = [path for path in parent.glob("*/config.yaml") if read_results(path.parent) is None]
    yield from (path.parent for path in sorted(pages, key=lambda path: path.stat().st_mtime_ns, reverse=True))


def sweep(folder: Path) -> None:
    """Takes away what a kill has left in the middle of a write."""
    for place in (folder, folder / "checkpoints"):
        for path in [*place.glob(".*.part"), *place.glob(".trial.ckpt"), *place.glob("diverged*.json")]:
            path.unlink(missing_ok=True)
