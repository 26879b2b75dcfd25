"""The run to resume, and the options that may have changed since it began."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.commands.console import say
from vit_lightning.config.changes import changes_since
from vit_lightning.config.own_files import changed_files
from vit_lightning.errors import CannotResume, UserError
from vit_lightning.limits import refuse
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
"""Options that decide which images form a batch; they never change within a run."""


def refuse_changes(
    changed: Mapping[str, tuple[Any, Any]], allowed: Sequence[str], folder: Path, *, trained: bool = False
) -> None:
    """Checks that a run is resumed with its own options, except for those allowed by name.

    Args:
        changed: values by option, in the run and now.
        allowed: options that may change.
        folder: the run folder.
        trained: whether only its test is left, for which nothing may change.

    Raises:
        UserError: names every other change.
    """
    problems = []
    for key, (before, after) in changed.items():
        change = f"{key}={after}, but {folder} has {before}"
        if key in NEVER:
            problems.append(f"{change}: it decides which images form a batch and cannot change within a run")
        elif key.endswith(".py") and not _is_allowed(key, allowed):
            problems.append(
                f"{key} has changed: {folder / key} is a copy of what the run began with (to resume with the copy: "
                f"--resume {folder}; with the new file: --allow-config-change {key})"
            )
        elif not _is_allowed(key, allowed):
            how = f"to change it: --allow-config-change {key}"
            problems.append(f"{change} ({f'its training has finished; {new_run_hint(folder)}' if trained else how})")
    refuse(problems)


def new_run_hint(folder: Path) -> str:
    return f"for a new run from its weights: --init_from={folder}"


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether an option or a group that holds it is named."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def note_changes(text: str, path: Path, changed: Mapping[str, tuple[Any, Any]], step: int) -> str:
    """Returns the new text of a run's ``config.yaml``, with earlier values as comments at its top."""
    comments = re.match(r"(#[^\n]*\n)*", path.read_text(encoding="utf-8"))
    added = "".join(f"# {key} was {before} until step {step}\n" for key, (before, _) in changed.items())
    return f"{comments.group() if comments else ''}{added}{text}"


def noted_changes(path: Path) -> set[str]:
    """Returns the options that the comments of a run's ``config.yaml`` list as changed."""
    return set(re.findall(r"^# (\S+) was ", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def read_run_config(folder: Path) -> dict[str, Any]:
    """Returns the ``config.yaml`` of a run as plain data."""
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise UserError(f"{path} cannot be read: {' '.join(str(fault).split())}") from fault
    return config if isinstance(config, dict) else {}


def unfinished_run(
    parent: Path, config: Mapping[str, Any], allowed: Sequence[str], *, must: bool
) -> tuple[Path, int] | None:
    """Returns the newest run of a config that is neither finished nor in use, and the lock that now holds it.

    Unfinished runs with other options are passed over; up to three of them are printed.

    Raises:
        CannotResume: there is none, and there ``must`` be one.
    """
    passed_over: list[str] = []
    for folder in _newest_first(parent):
        try:
            changed = changes_since(read_run_config(folder), config) | changed_files(folder)
        except UserError:  # its config is damaged, so that it cannot be the same one
            continue
        if any(key in NEVER or not _is_allowed(key, allowed) for key in changed):
            passed_over.append(f"{folder} is unfinished, but differs in {', '.join(changed)}")
            continue
        lock = try_hold(folder)
        if lock is None:
            continue
        if read_results(folder) is None:
            return folder, lock
        release(folder, lock)
    if must:
        others = "".join(f"; {text}" for text in passed_over[:1])
        raise CannotResume(f"resume=must: {parent} holds no unfinished run of this config that is not in use{others}")
    say("\n".join(f"resume: {text}" for text in passed_over[:3]))
    return None


def _newest_first(parent: Path) -> Iterator[Path]:
    configs = [path for path in parent.glob("*/config.yaml") if read_results(path.parent) is None]
    yield from (path.parent for path in sorted(configs, key=lambda path: path.stat().st_mtime_ns, reverse=True))


def remove_partial_files(folder: Path) -> None:
    """Removes what a killed process left of a write, and the reports of a divergence before the resume."""
    for parent in (folder, folder / "checkpoints", folder / "validation"):
        for path in [*parent.glob(".*.part"), *parent.glob(".trial.ckpt"), *parent.glob("diverged*.json")]:
            path.unlink(missing_ok=True)
