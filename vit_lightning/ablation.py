"""``lightning ablate``: a plan run to its end, by this process beside others, and its report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from jsonargparse import ArgumentParser
from tqdm import tqdm

from vit_lightning.ablation_plan import Plan, read_plan
from vit_lightning.checks import Key, find_problems
from vit_lightning.config import make_data
from vit_lightning.errors import UserError
from vit_lightning.folder import release, try_hold
from vit_lightning.ledger import Ledger, Planned, add_seeds, open_ledger, read_study, threads_of
from vit_lightning.pages import read_flags
from vit_lightning.run import quiet
from vit_lightning.trials import Start, Trials, shared_data
from vit_lightning.wandb_mirror import import_wandb

SIGN_OF_LIFE = 5.0
"""Seconds between two signs of life of a process."""


@dataclass
class AblateConfig:
    """Arguments of ``lightning ablate``.

    Args:
        file: the plan, a W&B sweep file.
        out: folder of the ablation; runs/ablations/NAME by default. The same command goes on with it.
        dry_run: show the plan and end.
        only: run this arm alone now.
        workers: runs at a time; auto is one for each GPU, or for each CPU core and its threads.
        threads: threads of each run; 1 by default on a CPU. Stays as it was when the ablation began.
        add_seeds: seeds of a second look, which there is one of.
        retry: try runs again that have failed.
        patience: minutes without anything written after which a run counts as hanging.
        launcher: where it runs: local, or slurm (extra ``slurm``).
        trust_config: whether pages may name classes of any package.
    """

    file: Path
    out: Path | None = None
    dry_run: bool = False
    only: str | None = None
    workers: int | Literal["auto"] = "auto"
    threads: int | None = None
    add_seeds: int | None = None
    retry: bool = False
    patience: float = 30.0
    launcher: Literal["local", "slurm"] = "local"
    trust_config: bool = False


def read_arguments(arguments: Sequence[str]) -> AblateConfig:
    """The arguments of the command: a file, and flags.

    Raises:
        UserError: all that is wrong with them.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    rest = arguments[1:] if named else arguments
    given: dict[str, Any] = {key.replace("-", "_"): value for key, value in read_flags(rest)}
    if named:
        given["file"] = arguments[0]
    keys = {name: Key(kind) for name, kind in get_type_hints(AblateConfig).items()}
    problems = [problem.text for problem in find_problems(given, keys)]
    if "file" not in given:
        problems.append("give a plan: lightning ablate experiments/ablations/PLAN.yaml")
    for key in ("workers", "threads", "add_seeds"):
        if str(given.get(key, 1)).lstrip("-").isdigit() and int(given.get(key, 1)) < 1:
            problems.append(f"{key}={given[key]} must be at least 1")
    if problems:
        raise UserError(problems)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--ablate", type=AblateConfig)
    made: AblateConfig = parser.instantiate(parser.parse_object({"ablate": given})).ablate
    return made


def make_ablate_help() -> ArgumentParser:
    """The arguments once more, for reading."""
    parser = ArgumentParser(prog="lightning ablate", usage="lightning ablate FILE [--out DIR] [--dry-run] ...")
    parser.add_class_arguments(AblateConfig)
    return parser


class SomeFailed(UserError):
    """Runs of an ablation have failed; the others are done. Exit code 5."""

    exit_code = 5


def ablate(config: AblateConfig) -> None:
    """Runs what a plan lacks, then writes the report.

    Raises:
        UserError: the plan or its page is wrong.
        SomeFailed: all is over, but some runs have failed.
    """
    torch.set_num_threads(1)  # runs are forked from this process
    quiet()
    plan = read_plan(config.file, trust=config.trust_config)
    if config.only is not None and config.only not in plan.arms:
        raise UserError(f"only={config.only} is no arm (choose {'; '.join(plan.arms)})")
    folder = config.out or Path("runs/ablations") / plan.name
    threads, devices = threads_of(folder, config.threads), _devices(plan)
    workers = _workers(config, devices, threads)
    if config.dry_run:
        print(describe(plan, folder, threads, workers))
        return
    ledger, changed = open_ledger(folder, plan, threads=threads)
    if config.add_seeds is not None:
        add_seeds(ledger, config.add_seeds)
    print(describe(plan, folder, threads, workers, ledger), flush=True)
    for text in changed:
        print(f"since the ablation began: {text}", flush=True)
    _run_all(config, plan, ledger, devices, workers)
    _finish(ledger)


def describe(plan: Plan, folder: Path, threads: int, workers: int, ledger: Ledger | None = None) -> str:
    """The plan as text: arms by seeds, and the keys that each arm changes."""
    seeds = plan.seeds if ledger is None else [*plan.seeds, *ledger.added_seeds]
    width = max(map(len, plan.arms))
    lines = [
        f"{plan.name}: {len(plan.arms)} arms x {len(seeds)} seeds = {len(plan.arms) * len(seeds)} runs of {plan.page}"
    ]
    for arm, overrides in plan.arms.items():
        said = ", ".join(f"{key}={value}" for key, value in overrides.items()) or "the page as it is"
        lines.append(f"  {arm:<{width}}  {said}{'   (baseline)' if arm == plan.baseline else ''}")
    lines += [
        f"  seeds {', '.join(map(str, seeds))}; best checkpoint by {plan.metric}, compared by {plan.report}",
        f"  {workers} at a time, {threads} thread{'s' if threads > 1 else ''} each; in {folder}",
        f"  one alone: OMP_NUM_THREADS={threads} {plan.command(plan.baseline, plan.seeds[0])}",
    ]
    return "\n".join(lines)


def _devices(plan: Plan) -> list[str] | None:
    """Ids of the GPUs that the runs are spread over; None where they take the CPU, or several devices each."""
    trainer = next(iter(plan.configs.values())).trainer
    if trainer.accelerator not in ("auto", "gpu", "cuda") or trainer.devices not in ("auto", 1, "1"):
        return None
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return [number for number in said.split(",") if number] or None
    count = torch.cuda.device_count()  # by NVML: this process must not start CUDA, its children do
    return [str(number) for number in range(count)] or None


def _workers(config: AblateConfig, devices: list[str] | None, threads: int) -> int:
    if isinstance(config.workers, int):
        return config.workers
    if devices is not None:
        return len(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def _run_all(config: AblateConfig, plan: Plan, ledger: Ledger, devices: list[str] | None, workers: int) -> None:
    runs = [run for run in ledger.planned() if config.only in (None, run.arm)]
    if all(_is_over(ledger, run, config.retry) for run in runs):
        return
    data = shared_data(plan.configs, make_data)
    scratch = _warm_up(plan, ledger.folder)

    def start(run: Planned) -> Start:
        return Start(plan.config(run.arm, run.seed), plan.words(run.arm, run.seed), data[run.arm])

    trials = Trials(ledger, start, threads=ledger.facts["threads"], devices=devices, patience=config.patience * 60)
    try:
        with _asked_to_end() as asked:
            _work_off(runs, ledger, trials, workers, retry=config.retry, asked=asked)
    finally:
        trials.stop()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _is_over(ledger: Ledger, run: Planned, retry: bool) -> bool:
    return ledger.results(run) is not None or (not retry and ledger.failure(run) is not None)


def _warm_up(plan: Plan, folder: Path) -> Path | None:
    """Imports what runs import late, so that each does not do it again."""
    import matplotlib.backends.backend_agg
    import matplotlib.pyplot  # noqa: F401

    modes = {config.wandb.mode for config in plan.configs.values()}
    if modes == {"disabled"} or (modes == {None} and os.environ.get("WANDB_MODE") == "disabled"):
        return None
    scratch = folder / f".wandb-{os.getpid()}"
    import_wandb(scratch)
    return scratch


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Collects the signals that ask this process to end."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _work_off(
    runs: list[Planned], ledger: Ledger, trials: Trials, workers: int, *, retry: bool, asked: list[int]
) -> None:
    """Claims and runs what nobody has yet, until all is over; what others have is waited for."""
    open_runs = list(runs)
    again = {run.name for run in runs if retry and ledger.failure(run) is not None}
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
            open_runs = [
                run for run in open_runs if run in mine or run.name in again or not _is_over(ledger, run, False)
            ]
            for run in open_runs:
                if (
                    run not in mine
                    and len(trials.running) < workers
                    and (claim := ledger.claim(run, again=run.name in again))
                ):
                    again.discard(run.name)
                    trials.begin(run, claim)
        progress.show([trial.run for trial in trials.running])
        time.sleep(0.02)
    progress.close()
    if asked:
        print("stopping; the same command goes on", file=sys.stderr, flush=True)
        trials.stop()
        raise SystemExit(128 + asked[0])


class Progress:
    """One bar for all runs, counted in epochs; without a terminal, a line for each run that is over."""

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
        return sum(_is_over(self.ledger, run, False) for run in self.runs)

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


def _finish(ledger: Ledger) -> None:
    """The report, by one process at a time, and what failed."""
    from vit_lightning.report import verdict_lines, write_report  # late: they take a second
    from vit_lightning.wandb_report import log_report

    while (lock := try_hold(ledger.folder)) is None:
        time.sleep(0.2)
    try:
        study = read_study(ledger.folder)
        written = write_report(study)
        mirrored = log_report(study)
    finally:
        release(ledger.folder, lock)
    print("\n".join(filter(None, [*verdict_lines(study), str(written[0]), mirrored])), flush=True)
    failed = [trial for trial in study.trials if trial.state == "failed"]
    if failed:
        raise SomeFailed([f"{trial.folder} failed, {trial.cause}" for trial in failed])
