"""The run that ``fit`` resumes: which one, from which checkpoint, and what may have changed since it began."""

import contextlib
import itertools
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger

from vit_lightning.classes import differences
from vit_lightning.commands.console import say
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import as_list, changes, flatten, read_flags
from vit_lightning.config.options import Resume
from vit_lightning.config.own_files import changed_files
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import CannotResume, Diverged, UserError, counted, reading, refuse
from vit_lightning.storage.checkpoint_files import (
    BEST,
    LAST,
    PREVIOUS,
    Restored,
    network_weights,
    newest_checkpoint,
    newest_run,
    read_checkpoint,
    run_folder_of,
)
from vit_lightning.storage.folder import hold, is_first, read_json, release, try_hold, write_whole
from vit_lightning.storage.metrics import read_metrics, read_results, resume_rows
from vit_lightning.storage.parsing import parse_yaml
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.own_state import by_kind

RESUMED = "VIT_LIGHTNING_RESUMED"
"""Environment variable in which the first process tells the other ranks which run is resumed."""

DIVERGED = "diverged.json"
NEVER = [f"data.{name}" for name in ("class_path", "batch_size", "split_seed", "fraction", "shots", "repetitions")]
NEVER += [f"trainer.{name}" for name in ("accumulate_grad_batches", "devices", "num_nodes")]
NEVER += ["seed_everything", "trainer.limit_train_batches", "trainer.overfit_batches"]
"""Options that decide which images form a batch or step; they never change within a run."""
LEFT_OVER = (".*.part", ".trial.ckpt", "diverged*.json", "error.log", "error-rank*.log")
"""Files of a run that a resume removes."""


def read_experiment(command: str, arguments: Sequence[str]) -> Experiment:
    """Returns the checked experiment of a command line; for ``fit --resume FOLDER``, that of the run in the folder."""
    if command == "fit":
        flags = read_flags(arguments)
        given = dict(flags).get("resume", "never")
        if given not in get_args(Resume):
            return read_run(Path(given), [f"--{key}={value}" for key, value in flags if key != "resume"])
    return resolve(arguments, command)


def read_run(folder: Path, arguments: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a run, which ``fit`` resumes in the folder of the run.

    Args:
        folder: the run folder.
        arguments: options to change, as ``--key=value``, with ``--allow-config-change``.

    Raises:
        UserError: the folder holds no run, or the arguments name another config or folder.
    """
    problems = [
        f"{key}={value} beside --resume={folder}: a run is resumed in its own folder with its own config"
        for key, value in read_flags(arguments)
        if key in ("config", "out", "print_config", "init_from")
    ]
    if not (folder / "config.yaml").is_file():
        run = run_folder_of(folder)
        choices = newest_run(folder) or f" ({f'did you mean {run}?' if run else 'choose one, or auto, never'})"
        problems.append(f"resume={folder} is not a run folder with a config.yaml{choices}")
    refuse(problems)
    # the initial weights may be gone by now; they are needed only if the run has no checkpoint yet
    has_begun = any((folder / name).is_file() for name in (BEST, LAST, PREVIOUS, "results.json"))
    source = ["--init_from=null"] if has_begun else []
    experiment = resolve(["--config", str(folder / "config.yaml"), *arguments, *source, "--resume=auto"])
    config = {**experiment.config, "init_from": read_run_config(folder).get("init_from")}
    return replace(experiment, config=config, out=folder)


Changes = Mapping[str, tuple[Any, Any]]
"""Values by option, before and now."""


@dataclass(frozen=True)
class Resumed:
    """A run that may be resumed by this experiment."""

    folder: Path
    restored: Restored | None = None
    """Checkpoint from which training resumes; None where it begins again at step 0."""
    changes: Changes | None = None
    """Options and files that have changed since the run began, and that ``config.yaml`` does not tell yet."""
    results: dict[str, Any] | None = None
    """Results of a finished run."""

    def begin(
        self, experiment: Experiment, module: LightningModule, loggers: Sequence[Logger]
    ) -> tuple[Path | None, dict[str, Any]]:
        """Checks that the checkpoint fits the network, clears what a killed process left, and notes the changes.

        Returns:
            path and contents of the checkpoint; None and an empty one without any.
        """
        path, checkpoint, complaints = self.restored or (None, {}, [])
        if path is not None and isinstance(module, ViTClassifier):  # Lightning restores those of the user
            network_weights(module.network, checkpoint, path)
        for complaint in complaints:
            warnings.warn(f"{complaint}: falling back to {path.name if path else None}", stacklevel=2)
        remove_partial_files(self.folder)
        done = checkpoint.get("global_step", 0)
        if self.changes:
            config = self.folder / "config.yaml"
            write_whole(config, note_changes(experiment.to_yaml(), config, self.changes, done))
        if any(key.partition(".")[0] == "module" for key in self.changes or ()):
            kept = checkpoint.get("state_dict", {})
            counted_by_training = re.compile(r"(.*\.)?(running_mean|running_var|num_batches_tracked)")
            made = {name: one for name, one in module.named_buffers() if not counted_by_training.fullmatch(name)}
            held = [name for name in made.keys() & kept.keys() if not made[name].equal(kept[name].to(made[name].dtype))]
            if held:
                text = "as in the checkpoint, whatever the options of the module"
                warnings.warn(f"{', '.join(sorted(held))}: {text}", stacklevel=2)
        with reading(path or self.folder):
            # before a validation, the rows of the step that it follows are logged again
            measured = checkpoint.get("callbacks", {}).get("Monitor", {}).get("row")
            resume_rows(loggers, done - checkpoint.get("before_validation", False), measured, checkpoint.get("row"))
        return path, checkpoint


def find_run(experiment: Experiment, locks: contextlib.ExitStack) -> Resumed | None:
    """Returns the run to resume, locked by ``locks``; None for a new run.

    Raises:
        UserError: it is in use, or was begun with other options, or trained for longer than is now asked for.
        CannotResume: none of its checkpoints can be read.
    """
    if experiment.resume == "never" or (folder := _find_folder(experiment, locks)) is None:
        return None
    with reading(folder):
        return _read_resumed(folder, experiment)


def _read_resumed(folder: Path, experiment: Experiment) -> Resumed:
    written, given, files = read_run_config(folder), experiment.config, changed_files(folder)
    new, results, restored = changes(written, given) | files, read_results(folder), None
    trained = results is not None
    if not trained:
        restored = newest_checkpoint(folder)
        changed = changes(written if restored is None else restored.checkpoint["config"], given) | files
        # a change that config.yaml notes was allowed then, even if the run was killed before its next checkpoint
        noted = {key for key in changed if key not in new and key in noted_changes(folder / "config.yaml")}
        trained = restored is not None and restored.checkpoint["finished"]
        data, view = experiment.data, (None if restored is None else restored.checkpoint.get("test_view")) or {}
        if names := view.get("class_names"):
            refuse(differences(data.place, data.class_names, str(folder), names, "they never change within a run"))
        refuse_changes(changed, [*experiment.allowed_changes, *noted], folder, trained=trained)
    if trained and new:
        raise UserError(f"{folder} is finished: {', '.join(new)} cannot change ({new_run_hint(folder)})")
    if results is not None:
        return Resumed(folder, results=results)
    if (folder / DIVERGED).is_file() and not new:
        raise Diverged(
            f"{folder} diverged, and resumed as it is it would do so again (change what it needs, such as "
            f"--optimizer.lr=... --allow-config-change optimizer.lr, or delete {folder / DIVERGED} to try it as it is)"
        )
    if restored is None:
        _check_start(folder)
        return Resumed(folder, changes=new)
    if (folder / BEST).is_file():  # finds damage now, not after the training
        try:
            read_checkpoint(folder / BEST)
        except UserError as fault:
            later = " (once it is deleted, the run resumes, and tests a later best or else its last weights)"
            raise UserError(f"{fault}{later * (not isinstance(fault.__cause__, OSError))}") from fault
    done = restored.checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    wanted = experiment.trainer["max_epochs"]
    if wanted is not None and 0 <= wanted < done:
        raise UserError(f"trainer.max_epochs={wanted}, but {folder} has trained {counted(done, 'epoch')} already")
    return Resumed(folder, restored, new)


def parent_of(experiment: Experiment) -> Path:
    """Returns the folder of the runs of an experiment."""
    return Path("runs") / experiment.name


def _find_folder(experiment: Experiment, locks: contextlib.ExitStack) -> Path | None:
    """Returns the folder of the run to resume, if there is one, locked for this process."""
    out, parent = experiment.out, parent_of(experiment)
    given = out if out is not None and (out / "config.yaml").is_file() else None
    started = [os.environ.get(name, "1") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]  # by torchrun, by srun
    if out is None and started != ["1", "1"] and RESUMED not in os.environ:
        raise UserError(
            f"resume={experiment.resume}: give --out=FOLDER too, since a launcher starts each rank by itself, and the "
            "first cannot tell the others which run it has found"
        )
    if not is_first():
        found = os.environ.get(RESUMED, given or "")  # a cluster may start all ranks without this variable
        return Path(found) if found else None
    folder = given
    if given is not None:
        locks.enter_context(hold(given, "resume"))
    elif out is None and (unfinished := unfinished_run(parent, experiment.config, experiment.allowed_changes)):
        folder = unfinished[0]
        locks.callback(release, *unfinished)
    os.environ[RESUMED] = "" if folder is None else str(folder)
    return folder


def _check_start(folder: Path) -> None:
    """Says that a run without a checkpoint starts again.

    Raises:
        CannotResume: the run has lost its checkpoints.
    """
    if (folder / "metrics.jsonl").is_file() and any("train/acc" in row for row in read_metrics(folder)):
        why = f"{folder / LAST} and its other checkpoints are gone"
        new = "for a new run leave out resume, and give no or another out"
        raise CannotResume(f"{folder} cannot be resumed: {why}; nothing was changed ({new})")
    say(f"{folder} was stopped before its first checkpoint and starts again at step 0")


def refuse_changes(changed: Changes, allowed: Sequence[str], folder: Path, *, trained: bool = False) -> None:
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
            problems.append(f"{change}: it decides which images form a batch or step, and cannot change within a run")
        elif key.endswith(".py") and not _is_allowed(key, allowed):
            problems.append(
                f"{key} has changed: {folder / key} is a copy of what the run began with (to resume with the copy: "
                f"--resume {folder}; with the new file: --allow-config-change {key})"
            )
        elif not _is_allowed(key, allowed):
            how = f"to change it: --allow-config-change {key}"
            problems.append(f"{change} ({f'its training has finished; {new_run_hint(folder)}' if trained else how})")
    refuse(problems)


def changed_arguments(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[set[str]]:
    """Returns the arguments, as patience, of each callback that differ from those of its class in its place before."""
    lists = (as_list(flatten(config["trainer"]["callbacks"])) for config in (before, now))
    first, second = (by_kind([(one["class_path"], one) for one in given]) for given in lists)
    pairs = [(first.get(name, {}), one) for name, one in second.items()]  # a new one has none before
    return [{key for key in {**old, **new} if old.get(key) != new.get(key)} for old, new in pairs]


def new_run_hint(folder: Path) -> str:
    return f"for a new run from its weights: --init_from={folder}"


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether an option or a group that holds it is named."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def note_changes(text: str, path: Path, changed: Changes, step: int) -> str:
    """Returns the new text of a run's ``config.yaml``, with earlier values as comments at its top, a line each."""
    comments = re.match(r"(#[^\n]*\n)*", path.read_text(encoding="utf-8"))
    noted = "".join(f"# {key} was {' '.join(str(a).split())} until step {step}\n" for key, (a, _) in changed.items())
    return f"{comments.group() if comments else ''}{noted}{text}"


def noted_changes(path: Path) -> set[str]:
    """Returns the options that the comments of a run's ``config.yaml`` list as changed."""
    return set(re.findall(r"^# (\S+) was ", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def read_run_config(folder: Path) -> dict[str, Any]:
    """Returns the ``config.yaml`` of a run as plain data."""
    path = folder / "config.yaml"
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{path} cannot be read: {' '.join(str(fault).split())}") from fault
    return config if isinstance(config, dict) else {}


def unfinished_run(parent: Path, config: Mapping[str, Any], allowed: Sequence[str]) -> tuple[Path, int] | None:
    """Returns the newest run of a config that is neither finished nor in use, and the lock that now holds it.

    Unfinished runs with other options are passed over, and those of other trials of a sweep, which may have the same
    options; up to three are printed.
    """
    passed_over: list[str] = []
    configs = [path for path in parent.glob("*/config.yaml") if read_results(path.parent) is None]
    trial = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
    for folder in (path.parent for path in sorted(configs, key=lambda path: path.stat().st_mtime_ns, reverse=True)):
        if trial and read_json(folder / "environment.json").get("run_id", trial) != trial:
            passed_over.append(f"{folder} is unfinished, but of another trial of the sweep")
            continue
        try:
            changed = changes(read_run_config(folder), config) | changed_files(folder)
        except UserError:  # its config is damaged, so that it cannot be the same one
            continue
        if any(key in NEVER or not _is_allowed(key, allowed) for key in changed):
            passed_over.append(f"{folder} is unfinished, but differs in {', '.join(changed)}")
            continue
        if (lock := try_hold(folder)) is None:
            continue
        if read_results(folder) is None:
            return folder, lock
        release(folder, lock)
    say("\n".join(f"resume: {text}" for text in passed_over[:3]))
    return None


def remove_partial_files(folder: Path) -> None:
    """Removes what a killed process left of a write, and the reports of a divergence or an error before the resume."""
    for parent in (folder, folder / "checkpoints", folder / "validation"):
        for path in itertools.chain.from_iterable(map(parent.glob, LEFT_OVER)):
            path.unlink(missing_ok=True)
