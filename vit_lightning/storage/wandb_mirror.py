"""Weights & Biases as a mirror of a run: it may be away, slow or dead, and training does not notice.

``metrics.jsonl`` is the truth; what W&B lacks is sent from there (``run.py: sync``). The settings and bounds come from
trials with wandb 0.31 against servers that refuse, hang, answer with errors or die (``tests/test_wandb_mirror.py``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.errors import first_line
from vit_lightning.storage.metrics import read_metrics

START_SECONDS = 6.0
"""How long an online start may take before the run goes offline."""
FINISH_SECONDS = 10.0
"""How long the upload may take after the last row."""


@dataclass
class WandbConfig:
    """Weights & Biases.

    Args:
        mode: online, offline or disabled; when not given, WANDB_MODE, else online if there is a key.
        project: project that the run belongs to.
        entity: user or team; the key's own by default.
        group: group of the run, such as the ablation that it is a part of.
        job_type: kind of the run, such as the arm of an ablation.
        tags: tags of the run.
        notes: notes on the run.
        log_model: whether the best checkpoint and the configuration go up as an artifact.
    """

    mode: Literal["online", "offline", "disabled"] | None = None
    project: str = "vit_lightning"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    log_model: bool = False


class WandbMirror(Logger):
    """Lightning logger that mirrors a run. After any fault of W&B it is silent; nothing of it raises or hangs.

    Args:
        folder: the run folder; its name is the run's, and W&B's own folder lies in it.
        run_id: the same over all restarts of the run.
        config: project, group, mode and so on.
        page: the resolved configuration, with what else describes the run.
    """

    def __init__(self, folder: Path, run_id: str, config: WandbConfig, page: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.run_id, self.config, self.page = folder, run_id, config, page
        self.mode = "disabled"
        self.reason = ""
        self._wandb: Any = None
        self._run: Any = None

    @property
    def name(self) -> str:
        return self.config.project

    @property
    def version(self) -> str:
        return self.run_id

    @property
    def is_live(self) -> bool:
        """Whether W&B has taken everything until now."""
        return self._run is not None

    @rank_zero_only
    def start(self, otherwise: Sequence[str] = ("offline",)) -> None:
        """Online if a key is found and the server answers, else offline; after about 8 s at most.

        Args:
            otherwise: modes to be in where it cannot be online; none for a run that is only sent.
        """
        wanted = self.config.mode or _MODES.get(os.environ.get("WANDB_MODE", ""))
        if wanted == "disabled":
            return
        try:
            self._wandb = import_wandb(self.folder)
            self._setup()
            wanted = wanted or _MODES.get(self._wandb.setup().settings.mode, "online")
            if wanted == "online" and not has_key(self._wandb):
                wanted, self.reason = "offline", "no API key"
            self._start_in(["online", *otherwise] if wanted == "online" else otherwise)
        except Exception as fault:  # W&B must never be the reason that training does not start
            self.reason = first_line(fault)

    def _start_in(self, modes: Sequence[str]) -> None:
        for mode in modes:
            try:
                self._run = self._wandb.init(
                    id=self.run_id,
                    name=self.folder.name,
                    dir=str(self.folder),
                    mode=mode,
                    resume="allow",
                    project=self.config.project,
                    entity=self.config.entity,
                    group=self.config.group,
                    job_type=self.config.job_type,
                    tags=self.config.tags,
                    notes=self.config.notes,
                    config=dict(self.page),
                    settings=self._settings(),
                )
            except Exception as fault:
                self.reason = first_line(fault)
                self._bounded(lambda: self._wandb.teardown(1), 1.5)  # else: "run ID is in use"
                self._setup()
            else:
                self.mode = mode
                return

    def _setup(self) -> None:
        # silent before anything logs in; the settings of init alone come too late for that
        self._wandb.setup(self._wandb.Settings(silent=True, x_service_wait=5))

    def _settings(self) -> Any:
        return self._wandb.Settings(
            silent=True,
            console="off",  # does not touch what the run prints
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            x_graphql_retry_wait_max_seconds=5,
            x_file_stream_retry_wait_max_seconds=5,
            x_file_transfer_retry_wait_max_seconds=5,
            x_transaction_log_flush_interval=1.0,  # by default a SIGKILL loses 15 s
            x_disable_machine_info=True,  # no command line, user and host in its files
            x_save_requirements=False,
            disable_code=True,
            disable_git=True,
            save_code=False,
            disable_job_creation=True,
        )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row; rows of the same step become one, rows of a step that W&B has are left out."""
        self._guarded(lambda: self._run.log(dict(metrics), step=step))

    @rank_zero_only
    def catch_up(self, folder: Path) -> None:
        """Sends the rows of ``metrics.jsonl`` that W&B lacks, such as those that a kill kept from it."""
        if self.mode != "online" or not (folder / "metrics.jsonl").is_file():
            return
        for step, row in merged_by_step(read_metrics(folder)):
            self.log_metrics(row, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the whole page goes up once, at the start."""

    @rank_zero_only
    def log_images(self, images: Mapping[str, Path], step: int | None = None) -> None:
        """PNG files, by name."""
        self._guarded(
            lambda: self._run.log({name: self._wandb.Image(str(path)) for name, path in images.items()}, step=step)
        )

    @rank_zero_only
    def log_table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, by name."""
        self._guarded(
            lambda: self._run.log({name: self._wandb.Table(columns=list(header), data=[list(row) for row in rows])})
        )

    @rank_zero_only
    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Final values."""
        self._guarded(lambda: self._run.summary.update(dict(values)))

    @rank_zero_only
    def log_model(self, files: Sequence[Path]) -> None:
        """Files as an artifact of kind model."""

        def send() -> None:
            artifact = self._wandb.Artifact(f"{self.folder.name}-best", type="model")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)

        self._guarded(send)

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """Ends the run and waits a bounded time for the upload."""
        if self._wandb is None:
            return
        if self._run is not None:
            run, self._run = self._run, None
            finished = self._bounded(lambda: run.finish(exit_code), FINISH_SECONDS + 5.0)
            if not finished or getattr(run, "_finish_timed_out", False):
                self.reason = "W&B did not answer in time"
        self._bounded(self._wandb.teardown, 5.0)  # here, not when the process ends
        shutil.rmtree(self.folder / "wandb" / "cache", ignore_errors=True)

    def hint(self) -> str:
        """Where the run can be seen, in one line."""
        if self.mode == "online":
            return f"W&B         {self._run.url}" if self._run is not None else ""
        if self.mode == "offline":
            why = f" ({self.reason})" if self.reason else ""
            look, send = f"wandb leet {self.folder / 'wandb'}", f"lightning sync {self.folder}"
            return f"W&B         offline{why}; look: {look}; send: {send} (or wandb sync)"
        return f"W&B         off ({self.reason})" if self.reason else ""

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._run is None:
            return
        try:
            call()
        except Exception as fault:  # W&B's own process is gone: nothing more can be mirrored
            self.reason, self._run = first_line(fault), None

    def _bounded(self, call: Callable[[], object], seconds: float) -> bool:
        """Runs ``call`` in a thread; if it does not return in time, ends W&B's own process, which frees it.

        Returns whether it did.
        """
        singleton = getattr(self._wandb.sdk.wandb_setup, "_singleton", None)

        def work() -> None:
            with contextlib.suppress(BaseException):  # teardown ends in SystemExit
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


_MODES = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def merged_by_step(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """One row for each step, in order: W&B drops a second row of a step that is over."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if name not in ("step", "time")}
        merged.setdefault(int(row["step"]), {}).update(numbers)
    yield from sorted(merged.items())


def import_wandb(folder: Path) -> Any:
    """Imports wandb late and so that what it writes stays in the run folder, and it reports nothing of itself."""
    cache = folder / "wandb" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # sent to the same server, it takes 12 s at exit if that one hangs
    os.environ["WANDB_CACHE_DIR"] = os.environ["WANDB_DATA_DIR"] = str(cache)
    before = tempfile.tempdir
    tempfile.tempdir = str(cache)  # the import makes two folders, which a SIGKILL leaves behind
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    with contextlib.suppress(
        AttributeError
    ):  # where images lie until they are sent: made once, for the first run alone
        media = wandb.sdk.data_types._private.MEDIA_TMP
        media.name = str(cache / "media")
        Path(media.name).mkdir(exist_ok=True)
    return wandb


def has_key(wandb: Any) -> bool:
    """Whether a key is configured: environment, netrc or settings; without network and without asking."""
    from wandb.sdk.lib import wbauth

    try:
        host = wandb.setup().settings.base_url
        return bool(wbauth.authenticate_session(host=host, source="", prompt=False, update_session=False))
    except Exception:  # a key that is none
        return False
