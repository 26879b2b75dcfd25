"""The runs of an ablation as processes of their own, forked from one that has imported and decoded everything.

A run starts in hundredths of a second instead of seconds, and images are decoded once for all. The process that forks
must not have started threads of its own that compute: it keeps to one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from vit_lightning.ablation.claims import Claim, read_json
from vit_lightning.ablation.ledger import Kind, Ledger, Planned
from vit_lightning.commands.fit import fit
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.base import ImageData
from vit_lightning.errors import CannotResume, Diverged, UserError
from vit_lightning.signals import obey_parent
from vit_lightning.storage.folder import InUse, release, try_hold, write_whole
from vit_lightning.storage.metrics import read_results

FORK = multiprocessing.get_context("fork")
GRACE = 30.0
"""Seconds that runs have to write a checkpoint when they are asked to end."""
ASLEEP = 30.0
"""Seconds between two looks at the runs after which this process must have been stopped, or the machine asleep."""


@dataclass
class Trial:
    """A run that goes on now."""

    run: Planned
    claim: Claim
    process: ForkProcess
    device: int
    written: float
    """When its folder was last written to, by the clock of the file system."""
    since: float
    """When this process saw that, by its own."""
    hangs: bool = False


@dataclass(frozen=True)
class Start:
    """What one run needs, made before it is forked."""

    experiment: Experiment
    words: list[str]
    """Arguments of the command that it stands for."""


class Trials:
    """Starts runs, watches them, and writes down how they end.

    Args:
        ledger: whose runs they are.
        start: what each run needs.
        threads: threads that each run computes with.
        devices: ids of GPUs, one for each run at a time; None on a CPU.
        patience: seconds without anything written after which a run counts as hanging.
    """

    def __init__(
        self,
        ledger: Ledger,
        start: Callable[[Planned], Start],
        *,
        threads: int,
        devices: list[str] | None,
        patience: float,
    ) -> None:
        self.ledger, self._start, self.threads, self.patience = ledger, start, threads, patience
        self.devices = devices
        self.running: list[Trial] = []
        self._renewed = time.monotonic()

    def begin(self, run: Planned, claim: Claim) -> None:
        """Forks a run that has been claimed."""
        folder = self.ledger.run_folder(run)
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = next(n for n in range(len(self.running) + 1) if n not in {trial.device for trial in self.running})
        visible = None if self.devices is None else self.devices[free % len(self.devices)]
        arguments = (self._start(run), folder, claim.path, self.threads, visible, os.getpid())
        process = FORK.Process(target=_work, args=arguments)
        process.start()
        self.running.append(Trial(run, claim, process, free, _last_written(folder), time.monotonic()))

    def settle(self) -> list[tuple[Planned, str]]:
        """Runs that have ended since the last time, with a word on how."""
        over = []
        for trial in list(self.running):
            if trial.process.is_alive():
                continue
            trial.process.join()
            self.running.remove(trial)
            over.append((trial.run, self._outcome(trial)))
        return over

    def renew(self) -> None:
        """Signs of life for all runs; ends a run that another process has taken over, or that hangs."""
        now = time.monotonic()
        slept, self._renewed = now - self._renewed > ASLEEP, now
        for trial in self.running:
            written = _last_written(self.ledger.run_folder(trial.run))
            if written != trial.written or slept:  # clocks of file systems are not trusted, and asleep nobody writes
                trial.written, trial.since = written, now
            if not trial.claim.is_mine():
                _kill(trial.process)
            elif now - trial.since > self.patience:
                trial.hangs = True
                _kill(trial.process)

    def stop(self) -> None:
        """Asks all runs to write a checkpoint and end, and waits for them."""
        for trial in self.running:
            trial.process.terminate()
        until = time.monotonic() + GRACE
        for trial in self.running:
            trial.process.join(max(0.0, until - time.monotonic()))
            if trial.process.is_alive():
                _kill(trial.process)
                trial.process.join()
            done = self.ledger.results(trial.run) is not None
            with contextlib.suppress(OSError):  # a full disk: then the claim is taken over, as from a process that died
                trial.claim.end("done" if done else "stopped")
        self.running = []

    def _outcome(self, trial: Trial) -> str:
        """Writes down how a run ended: done only with its results, whatever its process returned."""
        if not trial.claim.is_mine():
            return "taken over by another process"
        if self.ledger.results(trial.run) is not None:
            trial.claim.end("done")
            return "done"
        kind, cause = self._cause(trial)
        final = self.ledger.settle(trial.run, trial.claim, kind, cause)
        return f"{'failed' if final else 'will be tried again'} ({kind}: {cause})"

    def _cause(self, trial: Trial) -> tuple[Kind, str]:
        fault = trial.claim.path.with_suffix(".fault")
        code = trial.process.exitcode or 0
        if trial.hangs:
            return "hang", f"nothing was written for {self.patience / 60:.3g} minutes"
        if results := read_results(self.ledger.run_folder(trial.run)):
            report = self.ledger.facts["report"]
            return "no result", f"{report} is {results.get(report, 'not measured')}"
        if said := read_json(fault):
            return said["kind"], said["cause"]
        if code < 0:
            name = signal.Signals(-code).name
            memory = " (out of memory?)" if name == "SIGKILL" else ""
            return "killed", f"ended by {name}{memory}"
        if code - 128 in {number.value for number in signal.Signals}:  # others are no signal's, such as 255
            return "killed", f"ended by {signal.Signals(code - 128).name}"
        return "no result", f"the process returned {code} and left no results.json"


def _kill(process: ForkProcess) -> None:
    """Ends a run at once, with its loading workers."""
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not made its group yet
        process.kill()


def _last_written(folder: Path) -> float:
    """When anything in a run folder was last written."""
    paths = [*folder.glob("*"), *folder.glob("checkpoints/*")]
    times = [0.0]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # it was on its way to another name
            continue
    return max(times)


def _work(start: Start, folder: Path, claim: Path, threads: int, visible: str | None, parent: int) -> None:
    """The process of one run."""
    os.setpgid(0, 0)
    _die_with(parent)
    obey_parent()
    log = os.open(claim.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for handle, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(log, handle)
        setattr(sys, name, open(handle, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that the run itself starts
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.set_num_threads(threads)
    sys.argv = [sys.argv[0], "fit", *start.words, f"--out={folder}", "--resume=auto"]
    experiment = replace(start.experiment, out=folder, resume="auto", allowed_changes=("wandb",))
    try:
        _wait_for(folder)
        fit(experiment)
    except BaseException as fault:
        code = _said(fault, claim.with_suffix(".fault"))
        sys.exit(code)


def _wait_for(folder: Path) -> None:
    """Waits while another process still has the run folder: one that lives, though its lease was over."""
    folder.mkdir(parents=True, exist_ok=True)
    while os.access(folder, os.W_OK):
        lock = try_hold(folder)
        if lock is not None:
            release(folder, lock)
            return
        time.sleep(0.5)


def _die_with(parent: int) -> None:
    """A run ends with the process that watches it: another one will take both over."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)


def _said(fault: BaseException, path: Path) -> int:
    """Leaves the cause of an end for the process that watches, and its traceback in the log; the exit code."""
    if isinstance(fault, SystemExit):
        return fault.code if isinstance(fault.code, int) else 1
    code = fault.exit_code if isinstance(fault, UserError) else 1
    if isinstance(fault, UserError):
        print(fault, file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    text = " ".join(str(fault).split())[:500] or type(fault).__name__
    write_whole(path, json.dumps({"kind": _kind(fault), "cause": text}) + "\n")
    return code


def _kind(fault: BaseException) -> Kind:
    if isinstance(fault, Diverged):
        return "diverged"
    if isinstance(fault, InUse):
        return "in use"
    if isinstance(fault, CannotResume):
        return "cannot go on"
    if isinstance(fault, UserError):
        return "configuration"
    memory = ("can't allocate memory", "out of memory", "cannot allocate memory")
    if isinstance(fault, MemoryError) or any(words in str(fault).lower() for words in memory):
        return "out of memory"
    return "error"


def with_shared_data(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Returns the experiment of each arm with its images read; arms of the same data share one data module.

    Where the data cannot be read, the arm keeps its own data module.

    Raises:
        UserError: no arm's data can be read.
    """
    read: dict[str, ImageData | None] = {}
    shared: dict[str, Experiment] = {}
    faults: list[str] = []
    for arm, experiment in experiments.items():
        key = repr(experiment.config["data"])
        if key not in read:
            read[key] = data = experiment.data
            try:
                data.setup("fit")
                data.setup("test")
                data.fingerprint()
            except Exception as fault:  # its runs will say why, and the other arms go on
                read[key] = None
                faults.append(f"arm {arm}: {' '.join(str(fault).split())[:500] or type(fault).__name__}")
        shared[arm] = replace(experiment, data=read[key] or experiment.data)
    if faults and not any(read.values()):
        raise UserError(faults)
    return shared
