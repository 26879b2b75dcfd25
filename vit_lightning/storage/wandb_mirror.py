"""Weights & Biases as a mirror of a run; training does not depend on it.

``metrics.jsonl`` is the source: ``lightning sync`` sends the rows that W&B lacks. Settings and time limits were tested
with wandb 0.31 and servers that refuse, hang, answer with errors or die (``tests/storage/test_wandb_mirror.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.errors import Diverged, first_line, one_line
from vit_lightning.metric_facts import RAW_ACCURACY, goal_of, metric_names
from vit_lightning.storage import wandb_internals as internals
from vit_lightning.storage.console_log import ConsoleLog
from vit_lightning.storage.folder import is_plain, read_json
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.redaction import Redaction
from vit_lightning.storage.wandb_artifacts import log_models
from vit_lightning.storage.wandb_values import picture, tables, validation_values

UPLOAD_SECONDS = 900.0
"""Seconds that the upload of checkpoints may take."""
WAIT_SECONDS = 1.5
"""Seconds after which a start that waits for W&B's server says so."""
PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""Exit codes of a run that a cluster has stopped."""
DIFF = "diff.patch"
"""File of a run folder with what git diff said of the working folder, where W&B is to have it."""


@dataclass
class WandbConfig:
    """Weights & Biases.

    Args:
        mode: online, offline or disabled; by default WANDB_MODE, else online with an API key and offline without.
        project: W&B project of the run.
        entity: W&B user or team, by default that of the API key.
        group: W&B group of the run, such as the name of an ablation.
        job_type: W&B job type of the run, such as an arm of an ablation.
        tags: tags of the run.
        notes: notes on the run.
        code: whether to upload the Python files of the config and what git diff says of the working folder.
        log_model: whether to upload the last and the best checkpoint as versions of the artifact model-ID with these
            aliases, with the config, all paths in them; online the run also uses an artifact with what identifies the
            data, so that W&B draws where a model comes from.
        registry: collection of W&B's registry to which the best checkpoint is linked with log_model, such as
            model/digits.
    """

    mode: Literal["online", "offline", "disabled"] | None = None
    project: str = "vit_lightning"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    code: bool = False
    log_model: bool = False
    registry: str | None = None


class WandbMirror(Logger):
    """Lightning logger that mirrors a run. It neither raises nor hangs, and after an error of W&B it logs no more.

    It starts on rank 0 alone; where it has not started, what is logged is dropped.
    Config, command, git remote and console are sent without keys, home folder, names of user and machine.

    Args:
        folder: the run folder, which names the run and contains W&B's own folder.
        run_id: W&B id of the run, the same in each resume.
        config: project, group, mode and so on.
        run_config: the run's config with further facts, as shown by W&B.
    """

    def __init__(self, folder: Path, run_id: str, config: WandbConfig, run_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.run_id, self.config, self.run_config = folder, run_id, config, run_config
        self.mode = "disabled"
        self.reason = ""
        self.url = ""
        self.postponed: Callable[[], object] | None = None
        """Function that calls ``start`` later: before anything is sent, or with ``begin``."""
        self._wandb: Any = None
        self._run: Any = None
        self._kept: dict[str, Any] = {}
        self._step: int | None = None
        self._console = ConsoleLog()
        self._redacted = Redaction()

    @property
    def name(self) -> str:
        return self.config.project

    @property
    def version(self) -> str:
        return self.run_id

    @property
    def is_live(self) -> bool:
        """Whether W&B has accepted everything so far."""
        return self._run is not None

    @rank_zero_only
    def listen(self) -> None:
        """Begins to copy what is printed, for W&B's logs."""
        self._console.start()

    @rank_zero_only
    def begin(self) -> None:
        """Starts now, if that was postponed."""
        start, self.postponed = self.postponed, None
        if start is not None:
            start()

    @rank_zero_only
    def start(self, otherwise: Sequence[str] = ("offline",), say: Callable[[str], object] = print) -> None:
        """Starts online if there is a key and the server answers, else offline; takes about 8 s at most.

        Args:
            otherwise: modes to try if it cannot be online; none to send a finished run.
            say: prints that it waits for the server, from a thread.
        """
        if (self.config.mode or os.environ.get("WANDB_MODE")) == "disabled":
            self._console.stop()
            return
        try:
            self._wandb = internals.import_wandb(self.folder)
            internals.set_up(self._wandb)
            mode = self._wandb.setup().settings.mode
            mode = self.config.mode or internals.MODES.get(mode, mode)
            if mode == "online" and not internals.has_key(self._wandb):
                mode, self.reason = "offline", "no API key"
            modes = ["online", *otherwise] if mode == "online" else otherwise
            text = f"W&B         waiting for its server, {internals.START_SECONDS:g} s at most"
            waiting = threading.Timer(WAIT_SECONDS, say, [text])
            if mode == "online":
                waiting.start()
            try:
                self._start_in(modes, later=not otherwise)
            finally:
                waiting.cancel()
        except Exception as fault:  # training must start without W&B as well
            self.reason = first_line(fault)
        if self._run is None:
            self._console.stop()
        else:
            self._console.send_to(lambda line: self._guarded(lambda: self._run.write_logs(self._redacted(line))))

    def _start_in(self, modes: Sequence[str], *, later: bool) -> None:
        environment = read_json(self.folder / "environment.json")
        config = self._redacted.of({**self.run_config, "versions": environment.get("packages", {})})
        given = self._redacted.of(vars(self.config))
        shown = {name: given[name] for name in ("project", "entity", "group", "job_type", "tags", "notes")}
        code = self._redacted.of(_code(environment))
        for mode in modes:
            settings = internals.run_settings(self._wandb, mode, code, later=later)
            place = {"id": self.run_id, "name": self.folder.name, "dir": str(self.folder)}
            try:
                self._run = self._wandb.init(
                    **place, **shown, mode=mode, resume="allow", config=config, settings=settings
                )
            except Exception as fault:
                self.reason = first_line(fault)
                internals.call_in_time(self._wandb, lambda: self._wandb.teardown(1), 1.5)  # else: "run ID is in use"
                internals.set_up(self._wandb)
            else:
                self.mode, self.url = mode, str(self._run.url or "")
                with contextlib.suppress(Exception):  # training must start without it as well
                    self._send_environment(environment)
                    self._define_best()
                    self._send_code()
                return

    def _define_best(self) -> None:
        """Keeps the best value of each validation metric in the summary, as ``val/acc.max``."""
        checkpoint = self.run_config.get("checkpoint") or {}
        best = {name: (goal_of(name) or "max")[:3] for name in (*metric_names("val"), RAW_ACCURACY)}
        for name, kind in (best | {checkpoint.get("monitor", "val/acc"): checkpoint.get("mode", "max")}).items():
            self._run.define_metric(name, summary=kind)

    def _send_code(self) -> None:
        """Sends the Python files of the run folder, and the diff of the working folder, where that was asked for."""
        if not self.config.code:
            return
        with tempfile.TemporaryDirectory() as copies:
            for file in self.folder.rglob("*.py"):
                copy = Path(copies, file.relative_to(self.folder))
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(self._redacted(file.read_text(encoding="utf-8")), encoding="utf-8")
            self._run.log_code(copies, f"source-{self.run_id}", include_fn=lambda path: path.endswith(".py"))
        if (self.folder / DIFF).is_file():
            self._save(DIFF, self._redacted((self.folder / DIFF).read_text(encoding="utf-8")))

    def _save(self, name: str, text: str) -> None:
        """Sends a text as a file of the run."""
        file = Path(self._run.dir) / name
        file.write_text(text, encoding="utf-8")
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def _send_environment(self, environment: Mapping[str, Any]) -> None:
        """Sends versions, command, commit and hardware in the file of which W&B shows those of a run."""
        program, *arguments = shlex.split(environment.get("command", "lightning"))
        code, cores, gpus = _code(environment), environment.get("cores"), environment.get("gpus") or []
        facts = {
            "os": environment.get("system"),
            "python": environment.get("python"),
            "program": program,
            "args": [self._redacted(argument) for argument in arguments],
            "root": environment.get("folder"),
            "git": {"commit": code.get("commit"), "remote": code.get("remote")},
            "cpu": {"model": environment.get("processor"), "count": cores},
            "cpu_count": cores,
            "gpu": gpus[0] if gpus else None,
            "gpu_count": len(gpus),
            "gpu_nvidia": [{"name": name} for name in gpus],
            "cudaVersion": environment.get("cuda"),
        }
        self._save("wandb-metadata.json", json.dumps(self._redacted.of(facts)))

    def _log(self, make: Callable[[], Mapping[str, Any]], step: int | None = None) -> None:
        """Logs a row; W&B merges rows of the same step and ignores rows of earlier steps."""
        self._guarded(lambda: self._keep(make(), step))

    def _keep(self, row: Mapping[str, Any], step: int | None) -> None:
        """Keeps a row until one of another step comes, as W&B does: a call of it takes as long as a layer."""
        if step not in (None, self._step):
            self._send(commit=True)
            self._step = step
        self._kept |= {**row, internals.TIMESTAMP: time.time()}
        if step is None:
            self._send()

    def _send(self, *, commit: bool | None = None) -> None:
        """Sends what is kept of a step; with ``commit`` nothing more of that step comes."""
        row, self._kept = self._kept, {}
        if row:
            self._run.log(row, step=self._step, commit=commit)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log(lambda: dict(metrics), step)

    def catch_up(self, folder: Path) -> None:
        """Sends the rows of ``metrics.jsonl`` that W&B lacks, for example after a kill."""
        if self.mode == "online" and (folder / "metrics.jsonl").is_file():
            self._guarded(lambda: self._catch_up(folder))

    def _catch_up(self, folder: Path) -> None:
        rows = dict(merged_by_step(read_metrics(folder)))
        files = {path: read_json(path) for path in (folder / "validation").glob("*.json")}
        validations = {
            facts["step"]: path
            for path, facts in files.items()
            if isinstance(facts.get("step"), int) and "confidence" in facts  # else it is damaged
        }
        for step in sorted({*rows, *validations}):
            if step in rows:
                self.log_metrics(rows[step], step)
            if step in validations:
                self.log_validation(validations[step])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: ``start`` has sent the config."""

    def log_images(self, images: Mapping[str, Path], step: int | None = None) -> None:
        """Logs PNG files by name."""
        self._log(lambda: {name: picture(self._wandb, path) for name, path in images.items()}, step)

    def log_table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table, for which wandb waits for the server."""
        given = {"columns": list(header), "data": [list(row) for row in rows]}
        self._in_time(lambda: self._run.log({name: self._wandb.Table(**given)}))

    def log_tables(self, step: int | None = None) -> None:
        """Logs tables and interactive plots of all validations, at the end: wandb waits for the server with each."""
        self._in_time(lambda: self._run.log(tables(self._wandb, self.folder), step=step))

    def log_validation(self, path: Path) -> None:
        """Logs a validation at its step: the JSON file that ``ValidationPictures`` has written, and its pictures."""
        self._log(lambda: validation_values(self._wandb, path), read_json(path).get("step"))

    def alert(self, title: str, text: str, level: Literal["INFO", "WARN", "ERROR"] = "INFO") -> None:
        """Sends an alert, which W&B hands on by e-mail or Slack to those who want it."""
        self._guarded(lambda: self._run.alert(self._redacted(title)[:63], self._redacted(text), level))

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Sets final values of the run."""
        self._guarded(lambda: self._run.summary.update(self._redacted.of(values)))

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Sends figures, tables and results of a finished run, and with ``log_model`` its checkpoints."""
        self.log_images({path.stem: path for path in sorted(self.folder.glob("*.png"))}, step=results["steps"])
        self.log_tables(results["steps"])
        self._guarded(lambda: self._summarise(results))
        if self.config.log_model:
            models = partial(log_models, self._wandb, self._run, self.folder, self._redacted, self.config.registry)
            self._in_time(models, UPLOAD_SECONDS)

    def _summarise(self, results: Mapping[str, Any]) -> None:
        """Sets results; those of the best checkpoint beside the best of all: ``val/acc.best``, ``val/acc.max``."""
        for name, value in self._redacted.of(results).items():
            kept = self._run.summary.get(name)
            self._run.summary[name] = {**kept, "best": value} if isinstance(kept, dict) else value

    def _in_time(self, call: Callable[[], object], seconds: float = 0.0) -> None:
        """Calls what waits for W&B's server, for a limited time; by default that of the end of a run."""
        self._guarded(self._send)
        if self._run is not None:
            seconds = seconds or internals.FINISH_SECONDS[self.mode]
            if not internals.call_in_time(self._wandb, lambda: self._guarded(call), seconds):
                self.reason, self._run = "W&B did not answer in time", None

    @rank_zero_only
    def finish(self, exit_code: int = 0, fault: BaseException | None = None) -> None:
        """Ends the run and waits a limited time for the upload."""
        if fault is not None:
            self._tell_of(fault)
        self._console.stop()
        if self._wandb is None:
            return
        if self._run is not None:
            self._guarded(self._send)
        if self._run is not None:
            run, self._run = self._run, None
            finished = internals.call_in_time(
                self._wandb, lambda: run.finish(exit_code), internals.FINISH_SECONDS[self.mode] + 5.0
            )
            if not finished or not internals.finished_in_time(run):
                self.reason = "W&B did not answer in time"
        internals.call_in_time(self._wandb, self._wandb.teardown, 5.0)  # else the end of the process could hang
        internals.clear_cache(self.folder, offline=self.mode == "offline")
        logs = (self.folder / "wandb").glob("*/logs/*.log")  # W&B's own, which name folders
        for path in [log for log in logs if is_plain(log, self.folder)]:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                path.write_text(self._redacted(path.read_text(encoding="utf-8")), encoding="utf-8")

    def _tell_of(self, fault: BaseException) -> None:
        """Sends why a run ends; W&B starts a run again that was stopped by a cluster, as agents of a sweep do."""
        text = one_line(fault)
        self._guarded(lambda: self._run.write_logs(self._redacted(text)))
        if isinstance(fault, Exception):
            how = "diverged" if isinstance(fault, Diverged) else "failed"
            self.alert(f"{self.folder.name} {how}", text, "ERROR")
        # an agent itself ends a run by SIGTERM, which W&B has stopped and is not to start again
        elif getattr(fault, "code", None) in PREEMPTED[bool(run_of_agent()) :]:
            self._guarded(lambda: self._run.mark_preempting())

    def place(self) -> str:
        """Returns a line that says at the start where the run is."""
        return f"W&B         offline{self._why()}" if self.mode == "offline" else self.hint()

    def hint(self) -> str:
        """Returns a line that says how to view the run, and how to send what W&B lacks."""
        send = f"lightning sync {shlex.quote(str(self.folder))}"
        if self.mode == "online":
            lacking = f"; it lacks some of it ({self.reason}): {send}" if self.reason else ""
            return f"W&B         {self.url}{lacking}"
        if self.mode == "offline":
            view = f"wandb leet {shlex.quote(str(self.folder / 'wandb'))}"
            return f"W&B         offline{self._why()}; view: {view}; send: {send} (or wandb sync)"
        return f"W&B         off{self._why()}" if self.reason else ""

    def _why(self) -> str:
        return f" ({self.reason})" if self.reason else ""

    def _guarded(self, call: Callable[[], object]) -> None:
        self.begin()
        if self._run is None:
            return
        try:
            call()
        except Exception as fault:  # W&B's own process has died: nothing more can be sent
            self.reason, self._run = first_line(fault), None


def run_id(folder: Path) -> str:
    """Returns the run's W&B id from ``environment.json``, or a new random one."""
    return str(read_json(folder / "environment.json").get("run_id") or secrets.token_hex(4))


def run_of_agent() -> dict[str, str]:
    """Returns id, project and entity that W&B's agent gives a run it starts: wandb takes no others there.

    It is empty without an agent.
    """
    if "WANDB_SWEEP_ID" not in os.environ:
        return {}
    return {
        name: given for name in ("run_id", "project", "entity") if (given := os.environ.get(f"WANDB_{name.upper()}"))
    }


def _code(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns commit and remote of the code: of the working folder, or else of this package."""
    git = environment.get("git", {})
    return git.get("working folder") or git.get("package") or {}


def merged_by_step(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields one row for each step, in order: W&B drops a row of an earlier step."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if name not in ("step", "time")}
        merged.setdefault(int(row["step"]), {}).update(numbers)
    yield from sorted(merged.items())
