"""Weights & Biases as a mirror of a run; training does not depend on it.

``metrics.jsonl`` is the source: ``lightning sync`` sends the rows that W&B lacks. Settings and time limits were tested
with wandb 0.31 and servers that refuse, hang, answer with errors or die (``tests/storage/test_wandb_mirror.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.errors import first_line, one_line
from vit_lightning.storage.checkpoint_files import find_checkpoint
from vit_lightning.storage.console_log import ConsoleLog
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.storage.redaction import Redaction

START_SECONDS = 6.0
"""Seconds that an online start may take before the run is offline."""
FINISH_SECONDS = 10.0
"""Seconds that the upload may take after the last row."""
CLASS_CURVES = 20
"""Largest number of classes whose accuracy has a curve each; of more there is a table."""


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
        log_model: whether to upload the best checkpoint and the config as an artifact, with all paths in them.
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
    def start(self, otherwise: Sequence[str] = ("offline",)) -> None:
        """Starts online if there is a key and the server answers, else offline; takes about 8 s at most.

        Args:
            otherwise: modes to try if it cannot be online; none to send a finished run.
        """
        if (self.config.mode or os.environ.get("WANDB_MODE")) == "disabled":
            self._console.stop()
            return
        try:
            self._wandb = import_wandb(self.folder)
            self._setup()
            mode = self._wandb.setup().settings.mode
            mode = self.config.mode or _MODES.get(mode, mode)
            if mode == "online" and not has_key(self._wandb):
                mode, self.reason = "offline", "no API key"
            self._start_in(["online", *otherwise] if mode == "online" else otherwise, later=not otherwise)
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
        for mode in modes:
            settings = self._settings(environment, later=later)
            place = {"id": self.run_id, "name": self.folder.name, "dir": str(self.folder)}
            try:
                self._run = self._wandb.init(
                    **place, **shown, mode=mode, resume="allow", config=config, settings=settings
                )
            except Exception as fault:
                self.reason = first_line(fault)
                self._with_time_limit(lambda: self._wandb.teardown(1), 1.5)  # else: "run ID is in use"
                self._setup()
            else:
                self.mode, self.url = mode, str(self._run.url or "")
                with contextlib.suppress(Exception):  # training must start without it as well
                    self._send_environment(environment)
                return

    def _setup(self) -> None:
        # silent before the login; the settings of init come too late for that
        self._wandb.setup(self._wandb.Settings(silent=True, x_service_wait=5))

    def _settings(self, environment: Mapping[str, Any], *, later: bool) -> Any:
        code = self._redacted.of(_code(environment))
        return self._wandb.Settings(
            silent=True,
            console="off",  # leaves stdout and stderr alone
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            **{f"x_{kind}_retry_wait_max_seconds": 5 for kind in ("graphql", "file_stream", "file_transfer")},
            x_transaction_log_flush_interval=1.0,  # by default a SIGKILL loses 15 s
            x_disable_meta=True,  # it has user and host; ``_send_environment`` sends the rest
            **dict.fromkeys(("host", "username", "email", "program_relpath", "program_abspath"), ""),
            program="lightning",
            x_disable_stats=later,  # of the machine that sends a finished run
            x_stats_sampling_interval=10.0,
            x_save_requirements=False,
            disable_code=True,
            disable_git=True,  # it takes time, and the URL may hold credentials
            git_commit=code.get("commit"),
            git_remote_url=code.get("remote"),
            save_code=False,
            disable_job_creation=True,
        )

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
        file = Path(self._run.dir) / "wandb-metadata.json"
        file.write_text(json.dumps(self._redacted.of(facts)), encoding="utf-8")
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def _log(self, make: Callable[[], Mapping[str, Any]], step: int | None = None) -> None:
        """Logs a row; W&B merges rows of the same step and ignores rows of earlier steps."""
        self._guarded(lambda: self._run.log(make(), step=step))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._log(lambda: dict(metrics), step)

    def catch_up(self, folder: Path) -> None:
        """Sends the rows of ``metrics.jsonl`` that W&B lacks, for example after a kill."""
        if self.mode != "online" or not (folder / "metrics.jsonl").is_file():
            return
        validations = {read_json(path).get("step"): path for path in (folder / "validation").glob("*.json")}
        for step, row in merged_by_step(read_metrics(folder)):
            self.log_metrics(row, step)
            if step in validations:
                self.log_validation(validations[step])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: ``start`` has sent the config."""

    def log_images(self, images: Mapping[str, Path], step: int | None = None) -> None:
        """Logs PNG files by name."""
        self._log(lambda: {name: self._wandb.Image(str(path)) for name, path in images.items()}, step)

    def log_table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table."""
        self._log(lambda: {name: self._wandb.Table(columns=list(header), data=[list(row) for row in rows])})

    def log_validation(self, path: Path) -> None:
        """Logs a validation at its step: the JSON file that ``ValidationPictures`` has written, and its pictures."""
        facts = read_json(path)
        self._log(lambda: self._validation(facts, path), facts.get("step"))

    def _validation(self, facts: Mapping[str, Any], path: Path) -> dict[str, Any]:
        epoch = path.stem.removeprefix("epoch-")
        others = ("confusion", "attention", "positions")
        pictures = {f"images/{name}": path.with_name(f"{name}-{epoch}.png") for name in others}
        pictures["images/validation"] = path.with_suffix(".png")
        values = {name: self._wandb.Image(str(file)) for name, file in pictures.items() if file.is_file()}
        confidence = facts["confidence"]
        counts = [sum(pair) for pair in zip(confidence["right"], confidence["wrong"], strict=True)]
        values["images/confidence"] = self._wandb.Histogram(np_histogram=(counts, confidence["edges"]))
        ranks = map(float, facts.get("effective_rank", ()))
        values |= {f"effective_rank/{number}": rank for number, rank in enumerate(ranks)}
        classes = list(zip(facts["classes"], facts["class_images"], facts["class_accuracy"], strict=True))
        if len(classes) <= CLASS_CURVES:
            return values | {f"val_class/{name}": accuracy for name, _, accuracy in classes if accuracy is not None}
        return values | {"val_class": self._wandb.Table(columns=["class", "images", "accuracy"], data=classes)}

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Sets final values of the run."""
        self._guarded(lambda: self._run.summary.update(self._redacted.of(values)))

    def log_results(self, results: Mapping[str, Any]) -> None:
        """Sends figures and results of a finished run, and with ``log_model`` its best checkpoint."""
        self.log_images({path.stem: path for path in sorted(self.folder.glob("*.png"))}, step=results["steps"])
        self.log_summary(results)
        if self.config.log_model and self.mode == "online":  # offline, W&B would store a second copy
            self._guarded(self._send_model)

    def _send_model(self) -> None:
        artifact = self._wandb.Artifact(f"{self.folder.name}-best", type="model")
        for file in (find_checkpoint(self.folder), self.folder / "config.yaml"):
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    @rank_zero_only
    def finish(self, exit_code: int = 0, fault: BaseException | None = None) -> None:
        """Ends the run and waits a limited time for the upload."""
        if fault is not None:
            self._guarded(lambda: self._run.write_logs(self._redacted(one_line(fault))))
        self._console.stop()
        if self._wandb is None:
            return
        if self._run is not None:
            run, self._run = self._run, None
            finished = self._with_time_limit(lambda: run.finish(exit_code), FINISH_SECONDS + 5.0)
            if not finished or getattr(run, "_finish_timed_out", False):
                self.reason = "W&B did not answer in time"
        self._with_time_limit(self._wandb.teardown, 5.0)  # else the end of the process could hang
        shutil.rmtree(self.folder / "wandb" / "cache", ignore_errors=True)
        for path in (self.folder / "wandb").glob("*/logs/*.log"):  # W&B's own, which name folders
            with contextlib.suppress(OSError, UnicodeDecodeError):  # one is a link to the cache
                path.write_text(self._redacted(path.read_text(encoding="utf-8")), encoding="utf-8")

    def place(self) -> str:
        """Returns a line that says at the start where the run is."""
        return f"W&B         offline{self._why()}" if self.mode == "offline" else self.hint()

    def hint(self) -> str:
        """Returns a line that says how to view the run, and how to send what W&B lacks."""
        send = f"lightning sync {self.folder}"
        if self.mode == "online":
            lacking = f"; it lacks some of it ({self.reason}): {send}" if self.reason else ""
            return f"W&B         {self.url}{lacking}"
        if self.mode == "offline":
            view = f"wandb leet {self.folder / 'wandb'}"
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

    def _with_time_limit(self, call: Callable[[], object], seconds: float) -> bool:
        """Returns whether ``call``, run in a thread, returned in time; else kills W&B's own process, which ends it."""
        singleton = getattr(self._wandb.sdk.wandb_setup, "_singleton", None)

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


_MODES = {"run": "online", "shared": "online", "dryrun": "offline"}
"""Other names of W&B's modes."""


def merged_by_step(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields one row for each step, in order: W&B drops a row of an earlier step."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if name not in ("step", "time")}
        merged.setdefault(int(row["step"]), {}).update(numbers)
    yield from sorted(merged.items())


def import_wandb(folder: Path) -> Any:
    """Imports wandb so that all its files are in the run folder, and without error reports to W&B."""
    cache = folder / "wandb" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # a report takes 12 s at exit if the server hangs
    os.environ["WANDB_CACHE_DIR"] = os.environ["WANDB_DATA_DIR"] = str(cache)
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
    return wandb


def has_key(wandb: Any) -> bool:
    """Whether an API key is configured (environment, netrc or settings); uses neither network nor prompt."""
    from wandb.sdk.lib import wbauth

    try:
        host = wandb.setup().settings.base_url
        return bool(wbauth.authenticate_session(host=host, source="", prompt=False, update_session=False))
    except Exception:  # an invalid key
        return False
