"""The runs of an ablation worked off: one process beside others on the same ledger."""

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

from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.ablation.trials import Start, Trials, with_shared_data
from vit_lightning.errors import UserError
from vit_lightning.signals import STOP, handled
from vit_lightning.storage.wandb_mirror import import_wandb

SIGN_OF_LIFE = 5.0
"""Seconds between two signs of life of a process."""


def devices_of(plan: Plan) -> list[str] | None:
    """Ids of the GPUs that the runs are spread over; None where they take the CPU, or several devices each."""
    trainer = next(iter(plan.experiments.values())).trainer
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or trainer["devices"] not in ("auto", 1, "1"):
        return None
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return [number for number in said.split(",") if number] or None
    count = torch.cuda.device_count()  # by NVML: this process must not start CUDA, its children do
    return [str(number) for number in range(count)] or None


def workers_of(asked: int | str, devices: list[str] | None, threads: int) -> int:
    """Runs at a time: those asked for, or one for each GPU, or for each core and its threads."""
    if isinstance(asked, int):
        return asked
    if devices is not None:
        return len(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


@dataclass(frozen=True)
class How:
    """How the runs of an ablation are worked off.

    Args:
        workers: runs at a time, or auto.
        only: the arm that is run; None for all.
        patience: minutes without anything written after which a run counts as hanging.
    """

    workers: int | str = "auto"
    only: str | None = None
    patience: float = 30.0

    def runs(self, ledger: Ledger) -> list[Planned]:
        return [run for run in ledger.planned() if self.only in (None, run.arm)]


def run_all(plan: Plan, ledger: Ledger, how: How, signals: Sequence[int] = STOP) -> None:
    """Runs what an ablation lacks, in this process and beside others; ends when all is over.

    Args:
        plan: what is run.
        ledger: where it is written down.
        how: how many at a time, and which.
        signals: those that ask this process to end; none where a launcher handles them.
    """
    runs, threads, devices = how.runs(ledger), ledger.facts["threads"], devices_of(plan)
    if all(ledger.is_over(run) for run in runs):
        print(f"all {len(runs)} runs were over already: nothing is trained", flush=True)
        return
    missing = {run.arm for run in runs if not ledger.is_over(run)}
    shared = with_shared_data({arm: item for arm, item in plan.experiments.items() if arm in missing})
    plan = replace(plan, experiments={**plan.experiments, **shared})
    scratch = warm_up(plan, ledger.folder)

    def start(run: Planned) -> Start:
        return Start(plan.experiment(run.arm, run.seed), plan.arguments(run.arm, run.seed))

    trials = Trials(ledger, start, threads=threads, devices=devices, patience=how.patience * 60)
    asked: list[int] = []
    try:
        with handled(lambda number, frame: asked.append(number), signals):
            _work_off(runs, ledger, trials, workers_of(how.workers, devices, threads), asked)
    except BrokenPipeError:  # what reads this has ended
        raise
    except OSError as fault:
        raise UserError(f"{ledger.folder}: {fault.strerror or fault} (the same command goes on)") from fault
    finally:
        trials.stop()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def warm_up(plan: Plan, folder: Path) -> Path | None:
    """Imports what runs import late, so that each does not do it again."""
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


def _work_off(runs: list[Planned], ledger: Ledger, trials: Trials, workers: int, asked: list[int]) -> None:
    """Claims and runs what nobody has yet, until all is over; what others have is waited for."""
    open_runs = list(runs)
    progress, signed, looked = Progress(ledger, runs), 0.0, 0.0
    while open_runs and not asked:
        for run, word in trials.settle():
            progress.say(run, word)
            looked = 0.0
        now = time.monotonic()
        if now - signed > SIGN_OF_LIFE:
            trials.renew()
            signed = now
        if now - looked > (0.5 if len(trials.running) < workers else 5.0):
            looked = now
            mine = {trial.run for trial in trials.running}
            open_runs = [run for run in open_runs if run in mine or not ledger.is_over(run)]
            for run in open_runs:
                if run in mine or len(trials.running) >= workers:
                    continue
                claim = ledger.claim(run)
                if claim is not None:
                    trials.begin(run, claim)
        progress.show([trial.run for trial in trials.running])
        time.sleep(0.02)
    progress.close()
    if asked:
        print("stopping; the same command goes on", file=sys.stderr, flush=True)
        trials.stop()
        raise SystemExit(128 + asked[0])


class Progress:
    """One bar for all runs; without a terminal, a line for each run that is over."""

    def __init__(self, ledger: Ledger, runs: list[Planned]) -> None:
        self.ledger, self.runs = ledger, runs
        self.started = time.monotonic()
        self.before = self._over()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=len(runs),
            initial=self.before,
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not terminal,
            bar_format="{percentage:3.0f}% |{bar}| {postfix}",
        )
        self._shown = 0.0

    def _over(self) -> int:
        return sum(map(self.ledger.is_over, self.runs))

    def say(self, run: Planned, word: str) -> None:
        results = self.ledger.results(run) or {}
        numbers = [f"{results['seconds']:.0f} s"] if "seconds" in results else []
        over = self._over()
        left = self._left(over)
        text = f"{over} of {len(self.runs)}: {run.name} {', '.join([word, *numbers])}{left and f'; about {left} left'}"
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def show(self, running: list[Planned]) -> None:
        """Draws the bar anew, twice a second."""
        if self._bar.disable or time.monotonic() - self._shown < 0.5:
            return
        self._shown = time.monotonic()
        over = self._over()
        self._bar.n = over
        left = self._left(over)
        names = ", ".join(run.name for run in running)
        self._bar.set_postfix_str(f"{over} of {len(self.runs)} runs, now {names}{left and f', about {left} left'}")

    def _left(self, over: int) -> str:
        """Time that the others will take, from those that are over."""
        done = over - self.before
        if done < 1 or over == len(self.runs):
            return ""
        seconds = (time.monotonic() - self.started) / done * (len(self.runs) - over)
        return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"

    def close(self) -> None:
        self._bar.close()
