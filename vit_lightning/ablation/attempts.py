"""Attempts at runs of an ablation: processes forked from one that has imported and decoded everything.

An attempt starts in hundredths of a second instead of seconds, and images are decoded once for all. The forking process
must not have started computing threads of its own: it keeps to one.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from vit_lightning.ablation.claims import Claim
from vit_lightning.ablation.ledger import Kind, Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.ablation.timing import time_arms
from vit_lightning.commands.fit import fit
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import OwnFault
from vit_lightning.errors import CannotResume, Diverged, UserError
from vit_lightning.report.comparisons import base_of
from vit_lightning.signals import STOP, die_with, obey_parent
from vit_lightning.storage.folder import InUse, read_json, write_whole
from vit_lightning.storage.metrics import read_results
from vit_lightning.training.endings import stacks_of

FORK = multiprocessing.get_context("fork")
GRACE = 30.0
"""Seconds that attempts have to write a checkpoint when they are stopped."""
ASLEEP = 30.0
"""Seconds between two checks of the attempts after which this process must have been stopped, or the machine asleep."""


@dataclass
class Attempt:
    """Process that works on a run now."""

    run: Planned
    claim: Claim
    process: ForkProcess
    device: int
    written: float
    """Time of the last write to its folder, by the clock of the file system."""
    since: float
    """Time when this process noticed that write, by its own clock."""
    stacks: int
    """Bytes of the stacks that earlier attempts have left."""
    hangs: bool = False


@dataclass
class Attempts:
    """Attempts of this process: starts them, watches them, and records in the ledger how they end.

    Args:
        ledger: the ledger of the runs.
        plan: their plan, with the experiments that are run.
        devices: ids of GPUs, one for each attempt at a time; None on a CPU.
        patience: seconds without any write after which an attempt counts as hanging.
    """

    ledger: Ledger
    plan: Plan
    devices: list[str] | None
    patience: float
    running: list[Attempt] = field(default_factory=list)
    _renewed: float = field(default_factory=time.monotonic)

    def begin(self, run: Planned, claim: Claim) -> str | None:
        """Forks an attempt at a claimed run; returns the outcome in words if its options are refused."""
        folder, plan = self.ledger.run_folder(run), self.plan
        try:
            values = self.ledger.choose(run) if run.trial is None else self.ledger.trials[run.trial]
            values = {**values, **self.ledger.timing.get(run.arm, {}).get("options", {})}
            words = plan.arguments(run.arm, run.seed, values, trial=run.trial is not None)
            experiment = plan.experiment(run.arm, run.seed, values, trial=run.trial is not None)
        except UserError as error:  # values of the tuning that this arm does not allow
            return self._failed(run, claim, "configuration", "; ".join(error.problems))
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = next(n for n in range(len(self.running) + 1) if n not in {attempt.device for attempt in self.running})
        visible = None if self.devices is None else self.devices[free % len(self.devices)]
        words = ["fit", *words, f"--out={folder}", "--resume=auto"]
        experiment = replace(experiment, out=folder, resume="auto", allowed_changes=("wandb",))
        process = self._fork(functools.partial(_fit_alone, experiment), words, claim.path, visible)
        written, stacks = _last_written(folder), _size(stacks_of(folder))
        self.running.append(Attempt(run, claim, process, free, written, time.monotonic(), stacks))
        return None

    def _fork(self, task: Callable[[], None], words: list[str], claim: Path, visible: str | None) -> ForkProcess:
        arguments = (task, words, claim, self.ledger.facts["threads"], visible, os.getpid())
        process = FORK.Process(target=_work, args=arguments)
        process.start()
        return process

    def time_arms(self, received: Sequence[int]) -> None:
        """Times the arms in a process of its own where they get equal time, once in an ablation.

        Raises:
            UserError: an arm cannot be trained.
        """
        if not self.plan.compare.equal:
            return
        path, study = self.ledger.folder / "ledger" / "timing.json", self.ledger.study()
        task = functools.partial(time_arms, self.plan, {arm: base_of(study, arm) for arm in study.arms}, path)
        while not self.ledger.timing and not received:
            if (claim := self.ledger.claim_timing()) is None:
                time.sleep(0.5)  # another process times them
                continue
            print("timing steps of all arms in turns ...", flush=True)
            visible = None if self.devices is None else self.devices[0]
            process = self._fork(task, ["ablate", self.plan.file], claim.path, visible)
            while process.is_alive() and not received:
                claim.is_mine()  # renews it
                process.join(0.2)
            if received:
                _kill(process)
            claim.end("done" if self.ledger.timing else "stopped")
            if not received and not self.ledger.timing:
                fault, log = read_json(claim.path.with_suffix(".fault")), claim.path.with_suffix(".log")
                cause = fault.get("cause", f"the process returned {process.exitcode}")
                raise UserError(f"compare.equal=time: steps could not be timed: {cause} ({log})")

    def collect(self) -> list[tuple[Planned, str]]:
        """Returns the runs whose attempts have ended since the last call, each with the outcome in words."""
        ended = [attempt for attempt in self.running if not attempt.process.is_alive()]
        for attempt in ended:
            attempt.process.join()
            self.running.remove(attempt)
        return [(attempt.run, self._outcome(attempt)) for attempt in ended]

    def renew(self) -> None:
        """Renews all claims; kills attempts whose run another process has taken over, and those that hang."""
        now = time.monotonic()
        slept, self._renewed = now - self._renewed > ASLEEP, now
        for attempt in self.running:
            written = _last_written(self.ledger.run_folder(attempt.run))
            if written != attempt.written or slept:  # clocks of file systems are not trusted, and asleep nobody writes
                attempt.written, attempt.since = written, now
            if not attempt.claim.is_mine():
                _kill(attempt.process)
            elif now - attempt.since > self.patience:
                attempt.hangs = True
                _kill(attempt.process)

    def stop(self) -> None:
        """Asks all attempts to write a checkpoint and end, and waits for them."""
        for attempt in self.running:
            attempt.process.terminate()
        until = time.monotonic() + GRACE
        for attempt in self.running:
            attempt.process.join(max(0.0, until - time.monotonic()))
            if attempt.process.is_alive():
                _kill(attempt.process)
                attempt.process.join()
            with contextlib.suppress(OSError):  # a full disk: then the claim is taken over, as from a process that died
                if not self.ledger.end_done(attempt.run, attempt.claim):
                    attempt.claim.end("stopped")
        self.running = []

    def _outcome(self, attempt: Attempt) -> str:
        """Records how an attempt ended: done only with results, whatever its process returned."""
        if not attempt.claim.is_mine():
            return "taken over by another process"
        if self.ledger.end_done(attempt.run, attempt.claim):
            return "done"
        return self._failed(attempt.run, attempt.claim, *self._cause(attempt))

    def _failed(self, run: Planned, claim: Claim, kind: Kind, cause: str) -> str:
        final = self.ledger.end_attempt(run, claim, kind, cause)
        return f"{'failed' if final else 'will be tried again'} ({kind}: {cause})"

    def _cause(self, attempt: Attempt) -> tuple[Kind, str]:
        fault = attempt.claim.path.with_suffix(".fault")
        code = attempt.process.exitcode or 0
        if attempt.hangs:
            return "hang", f"nothing was written for {self.patience / 60:.3g} minutes"
        if results := read_results(self.ledger.run_folder(attempt.run)):
            return "no result", self.ledger.lacking(attempt.run, results)
        if left := read_json(fault):
            return left["kind"], left["cause"]
        stacks = stacks_of(self.ledger.run_folder(attempt.run))
        if code == 1 and _size(stacks) > attempt.stacks:
            return "hang", f"its watchdog has ended it ({stacks.name} in its folder has the stacks)"
        number = -code if code < 0 else code - 128
        if number in {known.value for known in signal.Signals}:  # others are no signal's, such as 255
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            kind: Kind = "stopped" if number in STOP else "killed"
            return kind, f"ended by {signal.Signals(number).name}{memory}"
        return "no result", f"the process returned {code} and left no results.json"


def _kill(process: ForkProcess) -> None:
    """Kills an attempt with its data-loading workers."""
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not made its group yet
        process.kill()


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _last_written(folder: Path) -> float:
    """Returns the time of the last write to a run folder."""
    times = [0.0]
    for path in (*folder.glob("*"), *folder.glob("checkpoints/*")):
        with contextlib.suppress(OSError):  # it was being renamed
            times.append(path.stat().st_mtime)
    return max(times)


def _work(
    task: Callable[[], None], words: list[str], claim: Path, threads: int, visible: str | None, parent: int
) -> None:
    """Runs the process of one attempt, or that of the timing.

    Args:
        task: what it does.
        words: arguments of the equivalent command.
        claim: its claim; beside it the output of the process, and the cause of a fault, are written.
        threads: number of its threads.
        visible: id of its GPU; None on a CPU, or where it may have all.
        parent: process with which it ends; another one will take its run over.
    """
    os.setpgid(0, 0)
    die_with(parent)
    obey_parent()
    output = os.open(claim.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for handle, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(output, handle)
        if isinstance(stream, io.TextIOWrapper):  # the same object, to which W&B listens
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for name in ("WANDB_RUN_ID", "WANDB_NAME"):  # each run has its own
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that the run itself starts
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.set_num_threads(threads)
    sys.argv[1:] = words
    try:
        task()
    except BaseException as fault:
        sys.exit(_report_fault(fault, claim.with_suffix(".fault")))


def _fit_alone(experiment: Experiment) -> None:
    """Trains once the folder is free: a process whose lease has expired may still live and write to it."""
    while True:
        try:
            fit(experiment)
            return
        except InUse:
            if experiment.out and experiment.out.is_dir() and not os.access(experiment.out, os.W_OK):
                raise
            time.sleep(0.5)


def _report_fault(fault: BaseException, path: Path) -> int:
    """Writes the cause for the watching process, and the traceback to the log; returns the exit code."""
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
    if isinstance(fault, CannotResume):
        return "cannot resume"
    if isinstance(fault, UserError) and not isinstance(fault, OwnFault):
        return "configuration"
    memory = ("can't allocate memory", "out of memory", "cannot allocate memory")
    if isinstance(fault, MemoryError) or any(words in str(fault).lower() for words in memory):
        return "out of memory"
    return "error"


def read_images(experiments: Mapping[str, Experiment]) -> None:
    """Reads the images of all arms, once where the data is the same; where that fails, the runs of the arm say why.

    Raises:
        UserError: no arm's data can be read.
    """
    arms = {id(experiment.data): arm for arm, experiment in experiments.items()}
    faults: list[str] = []
    for arm in arms.values():
        data = experiments[arm].data
        try:
            data.setup("fit")
            for tested in (data, *data.further.values()):
                tested.setup("test")
            data.fingerprint()
        except Exception as fault:  # its runs will report the cause; the other arms continue
            faults.append(f"arm {arm}: {' '.join(str(fault).split())[:500] or type(fault).__name__}")
    if faults and len(faults) == len(arms):
        raise UserError(faults)
