"""The worker loop of an ablation: one process, beside others, on one ledger."""

import contextlib
import itertools
import os
import sys
import time

import torch

from vit_lightning.ablation.attempts import FORK, Attempts, read_images
from vit_lightning.ablation.ledger import Ledger, Planned
from vit_lightning.ablation.plan import Plan
from vit_lightning.commands.summary import step_of, training_bytes
from vit_lightning.errors import UserError, counted, show_time
from vit_lightning.signals import noted
from vit_lightning.training.resources import free_memory

RENEWAL = 5.0
"""Seconds between two renewals of the claims of this process."""
RUNS_PER_GPU = 8
"""Runs at a time at most on one GPU where ``workers`` is auto: the fastest of 1, 2, 4 and 8 (item Workers of
experiments/benchmarks/gpu.py: 58,348 images/s of a ViT-Lite in sum on an H200, 54,353 with 4)."""
CONTEXT = 1e9
"""Bytes that a process takes of a GPU beside those of a step: CUDA's own, images and their batches."""


def devices_of(plan: Plan) -> list[str] | None:
    """Returns the ids of the GPUs that runs are spread over; None on a CPU or with several devices for each run."""
    trainer = next(iter(plan.experiments.values())).trainer
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or trainer["devices"] not in ("auto", 1, "1"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # of which CUDA takes those before the first that there cannot be, such as -1
        named = map(str.strip, visible.split(","))
        return [*itertools.takewhile(lambda number: number and not number.startswith("-"), named)] or None
    count = torch.cuda.device_count()  # by NVML: this process must not start CUDA, its children do
    return [str(number) for number in range(count)] or None


def workers_of(requested: int | str, plan: Plan, threads: int) -> int:
    """Returns the number of runs at a time: as requested, or one for each ``threads`` cores, as many as GPUs hold."""
    if isinstance(requested, int):
        return requested
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (devices := devices_of(plan)) is None:
        return max(1, cores // threads)
    fitting = FORK.Value("q", 0)
    process = FORK.Process(target=lambda: setattr(fitting, "value", fitting_in_memory(plan)))  # which starts CUDA
    process.start()
    process.join()
    return len(devices) * max(1, min(RUNS_PER_GPU, cores // threads // len(devices), int(fitting.value)))


def fitting_in_memory(plan: Plan) -> int:
    """Returns how many runs of a plan's largest arm fit into what is free on each GPU; 0 if an arm cannot be measured.

    A quarter is added to what a step takes at least; compiled, it took 0.3 to 0.5 of that on an H200.
    """
    try:
        taken = [training_bytes(*step_of(experiment)) for experiment in plan.experiments.values()]
        free = min(free_memory(torch.device("cuda", number)) for number in range(torch.cuda.device_count()))
    except (UserError, RuntimeError):  # a module without layers yet, a GPU that is taken
        return 0
    return int(free / (CONTEXT + 1.25 * max(taken))) if all(taken) else 0


def run_all(plan: Plan, ledger: Ledger, workers: int, *, patience: float) -> None:
    """Runs what an ablation lacks, beside other processes, until its comparisons are decided.

    Args:
        plan: of the ablation.
        ledger: of the ablation.
        workers: runs at a time.
        patience: minutes without any write after which a run counts as hanging.
    """
    if not ledger.look().pending:
        return
    devices = devices_of(plan)
    read_images(plan.experiments)
    warm_up(plan)
    attempts = Attempts(ledger, plan, devices, patience=patience * 60)
    received: list[int] = []
    try:
        with noted(received.append):
            attempts.time_arms(received)
            _work_off(ledger, attempts, workers, received)
    except BrokenPipeError:  # what reads this has ended
        raise
    except OSError as fault:
        raise UserError(f"{ledger.folder}: {fault.strerror or fault} (the same command resumes)") from fault
    finally:
        attempts.stop()


def warm_up(plan: Plan) -> None:
    """Imports what runs import late, so that it is done once."""
    import matplotlib.backends.backend_agg
    import matplotlib.pyplot  # noqa: F401

    modes = {experiment.settings.wandb.mode for experiment in plan.experiments.values()}
    if modes != {"disabled"} and (modes != {None} or os.environ.get("WANDB_MODE") != "disabled"):
        with contextlib.suppress(ImportError):
            import wandb.sdk.launch  # noqa: F401  # by wandb.init, which takes two seconds


def _work_off(ledger: Ledger, attempts: Attempts, workers: int, received: list[int]) -> None:
    """Claims and starts the runs that are needed until none is, or a signal comes.

    Runs of other processes are polled: they may decide what is needed.
    """
    progress, renewed, polled = Progress(ledger), 0.0, 0.0
    while not received:
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
            if not (pending := ledger.look().pending) and not own:
                break
            for run in [run for run in pending if run not in own]:
                claim = ledger.claim(run) if len(attempts.running) < workers else None
                if claim is not None and (refused := attempts.begin(run, claim)) is not None:
                    progress.report(run, refused)
        time.sleep(0.02)
    if received:
        print("stopping; the same command resumes", file=sys.stderr, flush=True)
        attempts.stop()
        raise SystemExit(128 + received[0])


class Progress:
    """A line for each run that has finished, with what comes next."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.started, now = ledger, time.monotonic(), ledger.look()
        self.before = len(now.planned) - len(now.pending)

    def report(self, run: Planned, outcome: str) -> None:
        """Prints how a run ended, the arms that are open, the next analysis, the time left until then."""
        results = self.ledger.results(run) or {}
        seconds = f", {results['seconds']:.0f} s" if "seconds" in results else ""
        now, ahead = self.ledger.look(), ""
        total, left, schedule = len(now.planned), len(now.pending), now.schedule
        if left and schedule.next_analysis is not None:
            tuning = any(run.trial is not None for run in now.pending)
            ahead = f"{counted(len(schedule.open), 'arm')} open, next analysis after {schedule.next_analysis} seeds"
            ahead = f"; {'tuning' if tuning else ahead}"
            each = (time.monotonic() - self.started) / max(1, total - left - self.before)
            ahead += f", about {show_time(each * left)} left{'' if tuning else ' until then'}"
        print(f"{total - left} of {total}: {run.name} {outcome}{seconds}{ahead}", flush=True)
