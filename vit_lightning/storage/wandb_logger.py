"""Weights & Biases: Lightning's ``WandbLogger`` for a run folder; no fault of W&B ends a training."""

import contextlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.errors import first_line
from vit_lightning.metric_facts import goal_of, metric_names
from vit_lightning.storage.credentials import masked
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.wandb_artifacts import log_models
from vit_lightning.storage.wandb_sources import has_key, silent_wandb
from vit_lightning.storage.wandb_values import tables, validation_values

PROJECT = "vit_lightning"
STEP = "trainer/global_step"
"""Key of a row for its step, as Lightning has it: W&B's own counts rows."""
START_SECONDS, FINISH_SECONDS = 5.0, 30.0
"""Seconds that W&B's server may take at the start, before the run is offline, and for the last uploads."""
DATA_DIR = "WANDB_DATA_DIR"
PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""Exit codes of a run that a cluster has stopped."""


@dataclass
class WandbConfig:
    """Weights & Biases. What is not given here is that of its environment variable, such as WANDB_ENTITY.

    Args:
        mode: online, offline or disabled; by default WANDB_MODE, else online with an API key and offline without.
        project: W&B project of the run, by default WANDB_PROJECT, else vit_lightning.
        name: name of the run, by default WANDB_NAME, else that of its folder.
        entity: W&B user or team, by default WANDB_ENTITY, else that of the API key.
        group: W&B group of the run, such as the name of an ablation, by default WANDB_RUN_GROUP.
        job_type: W&B job type of the run, such as an arm of an ablation, by default WANDB_JOB_TYPE.
        tags: tags of the run, by default WANDB_TAGS, with commas between them.
        notes: notes on the run, by default WANDB_NOTES.
        code: whether to upload the Python files of the config and what git diff says of the working folder.
        log_model: whether to upload the last and the best checkpoint as versions of the artifact model-ID with these
            aliases, with the config, all paths in them.
    """

    mode: Literal["online", "offline", "disabled"] | None = None
    project: str | None = None
    name: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    code: bool = False
    log_model: bool = False


class RunLogger(WandbLogger):
    """Lightning's ``WandbLogger`` of a run folder, with pictures, tables, results and checkpoints of the run.

    It starts after the first batch, since its import takes as long as some epochs: online with an API key if the server
    answers in seconds, else offline. After a fault of W&B it logs no more, and training goes on.

    Args:
        folder: the run folder, which contains W&B's own.
        run_id: W&B id of the run, the same in each resume.
        config: project, group, mode and so on.
        run_config: the run's config with further facts, as shown by W&B, where keys are masked.
        say: prints a line.
        paused: context of the start, whose seconds are none of training.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        config: WandbConfig,
        run_config: Mapping[str, Any],
        say: Callable[[str], object] = print,
        paused: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._id, self._project, self._save_dir = run_id, "", folder  # which Lightning reads also without wandb
        with contextlib.suppress(ModuleNotFoundError):  # where it is disabled, wandb need not be there
            super().__init__(save_dir=folder, version=run_id, project=project_of(config.project))
        self.folder, self.run_id, self.config, self.run_config = folder, run_id, config, run_config
        self.mode = "disabled"
        self.url = ""
        self.offline_since = ""
        """Why the run is offline, though nobody asked for that."""
        self.fault = ""
        """Error of W&B after which nothing more was logged."""
        self._say, self._paused = say, paused
        self.unsent = folder / "wandb" / "unsent"
        """File that is there until W&B has all of the run."""
        self._data_dir = str(folder.resolve() / "wandb")
        self._has_begun = False
        self._best: dict[str, str] = {}
        """Metrics whose best value of all steps W&B keeps, and whether it is the max or the min."""
        self._wandb: Any = None
        self._experiment: Any = None
        self._log_model = False  # artifacts are ours

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Run of wandb; before the start, after a fault, without W&B one that drops all, as Lightning asks for it."""
        return (not self.fault and self._experiment) or DummyExperiment()

    @rank_zero_only
    def start(self) -> None:
        """Starts the run, unless it has been started, and says where it is; takes about 8 s at most."""
        if self._has_begun or (self.config.mode or os.environ.get("WANDB_MODE")) == "disabled":
            return
        self._has_begun = True
        given, sys.argv = sys.argv, masked("\0".join(sys.argv)).split("\0")  # the command, as W&B shows it
        with self._paused():
            try:
                self._start()
            except Exception as fault:  # training must start without W&B as well
                self.fault = first_line(fault)
            finally:
                sys.argv = given
            self._say(self.hint().partition("; ")[0])

    def _start(self) -> None:
        self._wandb = wandb = silent_wandb()
        mode = self.config.mode or wandb.setup().settings.mode
        if mode == "disabled":
            return
        if mode not in ("offline", "dryrun"):
            try:
                if has_key():
                    self._start_in("online")
                    return
                self.offline_since = "no API key"
            except Exception as fault:  # the server refuses, or is silent
                self.offline_since = first_line(fault)
                with contextlib.suppress(SystemExit):
                    wandb.teardown()  # else "run ID is in use"
        self._start_in("offline")

    def _start_in(self, mode: Literal["online", "offline"]) -> None:
        wandb, given = silent_wandb(), self.config
        os.environ.setdefault(DATA_DIR, self._data_dir)  # of offline tables, else at home
        run = wandb.init(
            dir=self.folder,
            id=self.run_id,
            project=self.name,
            name=given.name or os.environ.get("WANDB_NAME") or self.folder.name,
            entity=given.entity,
            group=given.group,
            job_type=given.job_type,
            tags=given.tags,
            notes=given.notes,
            mode=mode,
            resume="allow",
            reinit="create_new",  # else it would be the run of a WandbLogger of the config, if there is one
            config=masked(self.run_config),
            settings=wandb.Settings(
                silent=True,
                init_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                save_code=given.code,
                disable_code=not given.code,
            ),
        )
        self.unsent.touch()
        chosen = self.run_config.get("checkpoint") or {}
        self._best = {name: (goal_of(name) or "max")[:3] for name in metric_names("val")}
        self._best |= {chosen.get("monitor", "val/acc"): chosen.get("mode", "max")}
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        for name, goal in self._best.items():  # kept in the summary, as val/acc.max
            run.define_metric(name, step_metric=STEP, step_sync=True, summary=goal)
        if given.code:
            run.log_code(str(self.folder))
        self._experiment, self.mode, self.url = run, mode, run.url or ""

    def _try(self, call: Callable[[Any], object], *, ends: bool = False) -> None:
        """Calls what logs to the run or ends it; after a fault of W&B nothing more is logged."""
        self.start()
        if self._experiment is not None and (ends or not self.fault):
            try:
                call(self._experiment)
            except Exception as fault:
                self.fault = self.fault or first_line(fault)

    def _log(self, make: Callable[[Any], Mapping[str, Any]], step: int | None = None) -> None:
        """Logs what a function of the module wandb returns."""
        self._try(lambda run: super(RunLogger, self).log_metrics(make(self._wandb), step))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log(lambda wandb: metrics, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: ``start`` sends the config."""

    def log_validation(self, path: Path) -> None:
        """Logs a validation at its step: the JSON file that ``ValidationPictures`` has written, and its pictures."""
        self._log(lambda wandb: validation_values(wandb, path), read_json(path).get("step"))

    def log_images(self, images: Mapping[str, Path], step: int | None = None) -> None:
        """Logs PNG files by name."""
        self._log(lambda wandb: {name: wandb.Image(str(path)) for name, path in images.items()}, step)

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Logs figures, tables and results of a finished run, and with ``log_model`` its checkpoints."""
        self.log_images({path.stem: path for path in sorted(self.folder.glob("*.png"))}, results["steps"])
        self._log(lambda wandb: tables(wandb, self.folder), results["steps"])
        self.log_summary(results)
        if self.config.log_model:
            self._try(lambda run: log_models(self._wandb, run, self.folder))

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Sets final values of the run, beside the best of all: ``val/acc.best``, ``val/acc.max``."""

        def summarise(run: Any) -> None:
            for name, value in values.items():
                kept = run.summary.get(name)  # not there, if the process was killed before it was sent
                of_rows = {**kept} if isinstance(kept, dict) else {}
                run.summary[name] = {**of_rows, "best": value} if name in self._best else value

        self._try(summarise)

    @rank_zero_only
    def finish(self, exit_code: int = 0, fault: BaseException | None = None) -> None:
        """Ends the run and waits a limited time for the upload; tells W&B why, if a fault ends it.

        W&B starts a run again that was stopped by a cluster, as agents of a sweep do.
        """
        # an agent itself ends a run by SIGTERM, which W&B has stopped and is not to start again
        if self._has_begun and getattr(fault, "code", None) in PREEMPTED["WANDB_SWEEP_ID" in os.environ :]:
            self._try(lambda run: run.mark_preempting())
        if self._experiment is not None:
            self._try(lambda run: run.finish(exit_code), ends=True)
            self._experiment = None
            if not (exit_code or self.fault):
                self.unsent.unlink(missing_ok=True)
        if os.environ.get(DATA_DIR) == self._data_dir:  # of this run alone, not of the next one in this process
            del os.environ[DATA_DIR]

    def hint(self) -> str:
        """Returns a line that says where the run is, how to view it, and how to send what W&B lacks."""
        why, folder = self.offline_since or self.fault, shlex.quote(str(self.folder))
        if self.mode == "online":
            lacking = f"; it lacks some of it ({self.fault}): wandb sync {folder}/wandb/run-*" if self.fault else ""
            return f"W&B         {self.url}{lacking}"
        said = f"W&B         {'offline' if self.mode == 'offline' else 'off'}{f' ({why})' if why else ''}"
        if self.mode == "offline":
            return f"{said}; view: wandb leet {folder}/wandb; send: lightning sync {folder} (or wandb sync)"
        return said if why else ""


def project_of(given: str | None) -> str:
    """Returns the W&B project of a run whose config gives this one."""
    return given or os.environ.get("WANDB_PROJECT") or PROJECT


def run_id(folder: Path) -> str:
    """Returns the run's W&B id: WANDB_RUN_ID, or that in ``environment.json``, or a new random one."""
    known = os.environ.get("WANDB_RUN_ID") or read_json(folder / "environment.json").get("run_id")
    return str(known or secrets.token_hex(4))
