"""Parts of wandb that are private or not documented, as they are in wandb 0.31: this file alone names them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

START_SECONDS = 6.0
"""Seconds that an online start may take before the run is offline."""
FINISH_SECONDS = {"online": 10.0, "offline": 60.0}
"""Seconds that a table and the end of a run may take: for W&B's server, or on a busy machine for its own process."""
TIMESTAMP = "_timestamp"
"""Key of a row for its time, in seconds since 1970; without it, that of the call that sends it."""
MODES = {"run": "online", "shared": "online", "dryrun": "offline"}
"""Other names of W&B's modes."""


def import_wandb(folder: Path) -> Any:
    """Imports wandb so that all its files are in the run folder, and without error reports to W&B."""
    cache = folder / "wandb" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # a report takes 12 s at exit if the server hangs
    os.environ["WANDB_CACHE_DIR"] = os.environ["WANDB_DATA_DIR"] = str(cache)
    if not cache.absolute().is_relative_to(Path.cwd()):  # artifacts would tell W&B where it lies
        os.environ["WANDB_DATA_DIR"] = staging = tempfile.mkdtemp(prefix="wandb-")
        atexit.register(shutil.rmtree, staging, ignore_errors=True)
    before = tempfile.tempdir
    tempfile.tempdir = str(cache)  # the import makes two folders, which a SIGKILL would leave
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    # wandb adds this one only where its logger has none, such as that of ``log_warnings``, taken away before the end
    logging.getLogger("wandb").addHandler(logging.NullHandler())  # else Python prints what it logs then to stderr
    with contextlib.suppress(AttributeError):  # the folder of unsent images, which wandb makes for the first run only
        media = wandb.sdk.data_types._private.MEDIA_TMP
        media.name = str(cache / "media")
        Path(media.name).mkdir(exist_ok=True)
    if wandb.Artifact._add_local_file is not _add_local_file:
        _add_with_place.append(wandb.Artifact._add_local_file)
        setattr(wandb.Artifact, "_add_local_file", _add_local_file)  # noqa: B010
    return wandb


_add_with_place: list[Callable[..., Any]] = []


def _add_local_file(*arguments: Any, **named: Any) -> Any:
    """Adds a file to an artifact, as wandb does, by a relative path: W&B gets the path too."""
    entry = _add_with_place[0](*arguments, **named)
    if entry.local_path is not None and Path(entry.local_path).is_relative_to(Path.cwd()):
        entry.local_path = os.path.relpath(entry.local_path)
    return entry


def import_late_parts() -> None:
    """Imports what ``wandb.init`` would import in every run, which takes two seconds."""
    with contextlib.suppress(ImportError):
        importlib.import_module("wandb.sdk.launch")


def clear_cache(folder: Path, *, offline: bool) -> None:
    """Removes what wandb needs no more of its cache in a run folder: all but the files of offline artifacts."""
    cache = folder / "wandb" / "cache"
    kept = cache / "artifacts" / "staging"
    if not offline or not kept.is_dir() or not any(kept.iterdir()):
        shutil.rmtree(cache, ignore_errors=True)
        return
    for path in (*cache.iterdir(), *kept.parent.iterdir()):
        if path not in (kept.parent, kept):
            shutil.rmtree(path, ignore_errors=True)


def has_key(wandb: Any) -> bool:
    """Whether an API key is configured (environment, netrc or settings); uses neither network nor prompt."""
    from wandb.sdk.lib import wbauth

    try:
        host = wandb.setup().settings.base_url
        return bool(wbauth.authenticate_session(host=host, source="", prompt=False, update_session=False))
    except Exception:  # an invalid key
        return False


def set_up(wandb: Any) -> None:
    """Begins W&B's own process, silent before the login: the settings of init come too late for that."""
    wandb.setup(wandb.Settings(silent=True, x_service_wait=5))


def run_settings(wandb: Any, mode: str, code: Mapping[str, Any], *, later: bool) -> Any:
    """Returns the settings of a run.

    Args:
        wandb: the module.
        mode: online or offline.
        code: commit and remote of the code.
        later: whether a finished run is sent, so that the machine is not measured.
    """
    return wandb.Settings(
        silent=True,
        console="off",  # leaves stdout and stderr alone
        reinit="create_new",  # else it would be the run of a WandbLogger of the config, if there is one
        init_timeout=START_SECONDS,
        finish_timeout=FINISH_SECONDS[mode],
        **{f"x_{kind}_retry_wait_max_seconds": 5 for kind in ("graphql", "file_stream", "file_transfer")},
        x_transaction_log_flush_interval=1.0,  # by default a SIGKILL loses 15 s
        x_disable_meta=True,  # it has user and host; the mirror sends the rest
        **dict.fromkeys(("host", "username", "email", "program_relpath", "program_abspath"), ""),
        program="lightning",
        x_disable_stats=later,
        x_stats_sampling_interval=10.0,
        x_save_requirements=False,
        disable_code=True,
        disable_git=True,  # it takes time, and the URL may hold credentials
        git_commit=code.get("commit"),
        git_remote_url=code.get("remote"),
        save_code=False,
        disable_job_creation=True,
    )


def finished_in_time(run: Any) -> bool:
    """Whether a run that was finished has sent everything."""
    return not getattr(run, "_finish_timed_out", False)


def call_in_time(wandb: Any, call: Callable[[], object], seconds: float) -> bool:
    """Returns whether ``call``, run in a thread, returned in time; else kills W&B's own process, which ends it."""
    singleton = getattr(wandb.sdk.wandb_setup, "_singleton", None)

    def work() -> None:
        with contextlib.suppress(BaseException):  # teardown raises SystemExit
            call()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        process = getattr(getattr(singleton, "_connection", None), "_proc", None)
        if process is not None:
            process._process.kill()
        thread.join(2.0)
        return False
    return True
