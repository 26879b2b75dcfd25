"""The worker loop of an ablation: one process, beside others, on one ledger."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from vit_lightning.ablation.attempts import Attempts, with_shared_data
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.commands.console import counted
from vit_lightning.errors import UserError
from vit_lightning.signals import STOP, handled
from vit_lightning.storage.wandb_mirror import import_wandb

RENEWAL = 5.0
"""Seconds between two renewals of the claims of this process."""


def devices_of(plan: Plan) -> list[str] | None:
    """Returns the ids of the GPUs that runs are spread over; None on a CPU or with several devices for each run."""
    trainer = next(iter(plan.experiments.values())).trainer
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or trainer["devices"] not in ("auto", 1, "1"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [number for number in visible.split(",") if number] or None
    count = torch.cuda.device_count()  # by NVML: this process must not start CUDA, its children do
    return [str(number) for number in range(count)] or None


def workers_of(requested: int | str, devices: list[str] | None, threads: int) -> int:
    """Returns the number of runs at a time: as requested, or one for each GPU or each ``threads`` cores."""
    if isinstance(requested, int):
        return requested
    if devices is not None:
        return len(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


@dataclass(frozen=True)
class WorkOptions:
    """Options of the worker loop.

    Args:
        workers: runs at a time, or auto.
        only: arm to run; None for all.
        patience: minutes without any write after which a run counts as hanging.
    """

    workers: int | str = "auto"
    only: str | None = None
    patience: float = 30.0

    def runs(self, ledger: Ledger) -> list[Planned]:
        return [run for run in ledger.planned() if self.only in (None, run.arm)]


def run_all(plan: Plan, ledger: Ledger, options: WorkOptions, signals: Sequence[int] = STOP) -> None:
    """Runs what an ablation lacks, beside other processes; returns when all runs have finished.

    Args:
        plan: of the ablation.
        ledger: of the ablation.
        options: number of runs at a time, arm, patience.
        signals: that ask this process to end; none where a launcher handles them.
    """
    runs, devices = options.runs(ledger), devices_of(plan)
    if all(ledger.has_finished(run) for run in runs):
        print(f"{counted(len(runs), 'run')} had finished: nothing is trained", flush=True)
        return
    missing = {run.arm for run in runs if not ledger.has_finished(run)}
    shared = with_shared_data({arm: item for arm, item in plan.experiments.items() if arm in missing})
    plan = replace(plan, experiments={**plan.experiments, **shared})
    scratch = warm_up(plan, ledger.folder)
    attempts = Attempts(ledger, plan, devices, patience=options.patience * 60)
    received: list[int] = []
    try:
        with handled(lambda number, frame: received.append(number), signals):
            _work_off(runs, ledger, attempts, workers_of(options.workers, devices, ledger.facts["threads"]), received)
    except BrokenPipeError:  # what reads this has ended
        raise
    except OSError as fault:
        raise UserError(f"{ledger.folder}: {fault.strerror or fault} (the same command resumes)") from fault
    finally:
        attempts.stop()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def warm_up(plan: Plan, folder: Path) -> Path | None:
    """Imports what runs import late, so that it is done once; returns W&B's scratch folder, None without W&B."""
    import matplotlib.backends.backend_agg
    import matplotlib.pyplot  # noqa: F401

    modes = {experiment.settings.wandb.mode for experiment in plan.experiments.values()}
    if modes == {"disabled"} or (modes == {None} and os.environ.get("WANDB_MODE") == "disabled"):
        return None
    for left in folder.glob(f".wandb-{platform.node()}-*"):  # of processes that were killed
        if Path("/proc").exists() and not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    scratch = folder / f".wandb-{platform.node()}-{os.getpid()}"
    import_wandb(scratch)
    with contextlib.suppress(ImportError):
        importlib.import_module("wandb.sdk.launch")  # two seconds, which wandb.init would take in every run
    return scratch


def _work_off(runs: list[Planned], ledger: Ledger, attempts: Attempts, workers: int, received: list[int]) -> None:
    """Claims and starts pending runs until every run has finished or a signal comes; polls runs of other processes."""
    pending = list(runs)
    progress, renewed, polled = Progress(ledger, runs), 0.0, 0.0
    while pending and not received:
        for run, outcome in attempts.collect():
            progress.report(run, outcome)
            polled = 0.0
        now = time.monotonic()
        if now - renewed > RENEWAL:
            attempts.renew()
            renewed = now
        if now - polled > (0.5 if len(attempts.running) < workers else 5.0):
            polled = now
            own = {attempt.run for attempt in attempts.running}
            pending = [run for run in pending if run in own or not ledger.has_finished(run)]
            for run in pending:
                if run not in own and len(attempts.running) < workers and (claim := ledger.claim(run)) is not None:
                    attempts.begin(run, claim)
        progress.show([attempt.run for attempt in attempts.running])
        time.sleep(0.02)
    progress.close()
    if received:
        print("stopping; the same command resumes", file=sys.stderr, flush=True)
        attempts.stop()
        raise SystemExit(128 + received[0])


class Progress:
    """One bar for all runs; without a terminal, a line for each run that has finished."""

    def __init__(self, ledger: Ledger, runs: list[Planned]) -> None:
        self.ledger, self.runs = ledger, runs
        self.started, self._shown = time.monotonic(), 0.0
        self.before = sum(map(ledger.has_finished, runs))
        layout = "{percentage:3.0f}% |{bar}| {postfix}"
        self._bar = tqdm(total=len(runs), initial=self.before, disable=None, dynamic_ncols=True, bar_format=layout)

    def report(self, run: Planned, outcome: str) -> None:
        """Prints how a run ended."""
        results = self.ledger.results(run) or {}
        seconds = f", {results['seconds']:.0f} s" if "seconds" in results else ""
        finished, left = self._count()
        text = f"{finished} of {len(self.runs)}: {run.name} {outcome}{seconds}{left and f'; about {left} left'}"
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def show(self, running: list[Planned]) -> None:
        """Redraws the bar, twice a second."""
        if self._bar.disable or time.monotonic() - self._shown < 0.5:
            return
        self._shown = time.monotonic()
        self._bar.n, left = self._count()
        names = ", ".join(run.name for run in running)
        self._bar.set_postfix_str(
            f"{self._bar.n} of {len(self.runs)} runs, now {names}{left and f', about {left} left'}"
        )

    def _count(self) -> tuple[int, str]:
        """Returns the number of finished runs, and the time left at the rate of those that this process saw finish."""
        finished = sum(map(self.ledger.has_finished, self.runs))
        seen = finished - self.before
        if seen < 1 or finished == len(self.runs):
            return finished, ""
        seconds = (time.monotonic() - self.started) / seen * (len(self.runs) - finished)
        return finished, f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"

    def close(self) -> None:
        self._bar.close()
