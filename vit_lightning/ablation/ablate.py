"""``lightning ablate``: shows a plan, runs it to its end, and writes its report."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser

from vit_lightning.ablation.ledger import Ledger, add_seeds, find_ledger, open_ledger, read_study, threads_of
from vit_lightning.ablation.plan import Plan, read_plan
from vit_lightning.ablation.slurm import submit
from vit_lightning.ablation.workers import WorkOptions, devices_of, run_all, workers_of
from vit_lightning.commands.console import counted, quiet
from vit_lightning.config.check_options import find_problems
from vit_lightning.config.files import parse_yaml, split_words
from vit_lightning.config.help import explained, options_of
from vit_lightning.errors import UserError
from vit_lightning.report.sequential import FIRST as LEAST_PAIRS
from vit_lightning.report.study import Run
from vit_lightning.report.wording import unit_of
from vit_lightning.storage.folder import release, try_hold


@dataclass
class AblateConfig:
    """Arguments of ``lightning ablate``.

    Args:
        file: the plan, a W&B sweep file.
        out: folder of the ablation; runs/ablations/NAME by default. The same command resumes it.
        dry_run: show the plan and exit.
        only: run this arm alone now.
        workers: runs at a time; auto is one for each GPU, or for each CPU core and its threads.
        threads: threads of each run; 1 by default on a CPU. Fixed when the ablation begins.
        add_seeds: seeds to add for the second and last analysis.
        retry: try failed runs again.
        patience: minutes without any write after which a run counts as hanging.
        launcher: where it runs: local, or slurm, as jobs that work on the same ledger (extra ``slurm``).
        slurm: settings of each SLURM job, as submitit names them, such as {timeout_min: 600, slurm_partition: gpu,
            gpus_per_node: 1, cpus_per_task: 4}; workers is then the number of jobs.
        trust_config: whether configs may name classes of any package.
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
    slurm: dict[str, Any] | None = None
    trust_config: bool = False


def read_arguments(arguments: Sequence[str]) -> AblateConfig:
    """Reads the arguments of the command: a file, and flags.

    Raises:
        UserError: all that is wrong with them.
    """
    flags, words = split_words(arguments)
    files = [value for name, value in flags if name == "config"] + words
    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags if name != "config"}
    if files:
        given["file"] = files.pop(0)
    if "slurm" in given:
        given["slurm"] = parse_yaml(given["slurm"], f"slurm={given['slurm']}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AblateConfig)
    found, valid = find_problems(given, parser)
    config = AblateConfig(**vars(parser.parse_object({"file": "", **valid})))
    problems = [problem.text for problem in found]
    problems += [f"{word}: unexpected argument (options are given as --key=value)" for word in files]
    if "file" not in given:
        problems.append("give a plan: lightning ablate experiments/ablations/PLAN.yaml")
    for key in ("workers", "threads", "add_seeds"):
        number = getattr(config, key)
        if isinstance(number, int) and number < 1:
            problems.append(f"{key}={number} must be at least 1")
    if not config.patience > 0:
        problems.append(f"patience={given['patience']} must be above 0 minutes")
    if problems:
        raise UserError(problems)
    return config


class SomeFailed(UserError):
    """Error for failed runs in an ablation whose others are done. Exit code 5."""

    exit_code = 5


def main(arguments: Sequence[str]) -> None:
    """Runs ``lightning ablate`` with the arguments of the command line."""
    if {"-h", "--help"} & {*arguments}:
        print("usage: lightning ablate PLAN.yaml [--OPTION=VALUE ...]\n")
        print("\n".join(explained(option) for option in options_of(__name__, "AblateConfig") if option.name != "file"))
        return
    if sys.stderr.isatty():
        print("reading the plan, its config and data ...", file=sys.stderr, flush=True)  # takes seconds
    ablate(read_arguments(arguments))


def ablate(config: AblateConfig) -> None:
    """Runs what a plan lacks, then writes the report.

    Raises:
        UserError: the plan or its config is wrong.
        SomeFailed: all runs have finished, but some failed.
    """
    torch.set_num_threads(1)  # runs are forked from this process
    quiet()
    plan = read_plan(config.file, trust=config.trust_config)
    if config.only is not None and config.only not in plan.arms:
        raise UserError(f"only={config.only} is no arm (choose {'; '.join(plan.arms)})")
    folder = config.out or Path("runs/ablations") / plan.name
    threads = threads_of(folder, config.threads)
    workers = workers_of(config.workers, devices_of(plan), threads)
    if config.dry_run:
        print(describe(plan, config, folder, threads, workers))
        return
    ledger, changed = open_ledger(folder, plan, threads=threads)
    if config.add_seeds is not None:
        add_seeds(ledger, config.add_seeds)
    print(describe(plan, config, folder, threads, workers), flush=True)
    for text in changed:
        print(f"since the ablation began: {text}", flush=True)
    options = WorkOptions(config.workers, config.only, config.patience)
    if config.retry:
        ledger.retry(options.runs(ledger))
    if config.launcher == "slurm":
        submit(config.file, ledger, options, config.slurm or {}, trust=config.trust_config)
    else:
        run_all(plan, ledger, options)
    _finish(ledger)


def describe(plan: Plan, config: AblateConfig, folder: Path, threads: int, workers: int) -> str:
    """Describes the plan: arms by seeds, the keys that each arm changes, the rules, and what is done already."""
    ledger = find_ledger(folder)
    seeds = [*plan.seeds, *(ledger.added_seeds if ledger else [])]
    if config.add_seeds is not None and len(seeds) == len(plan.seeds):
        seeds += range(max(seeds) + 1, max(seeds) + 1 + config.add_seeds)
    states = Counter(run.state for run in (read_study(folder).runs if ledger else []))
    width, unit = max(map(len, plan.arms)), unit_of(plan.report)
    again = "are tried again" if config.retry else "failed (--retry tries them again)"
    begun = f", {states['done']} are done" if states["done"] else ""
    begun += f", {states['failed']} {again}" if states["failed"] else ""
    count = counted(len(plan.arms) * len(seeds), "run")
    product = f"{counted(len(plan.arms), 'arm')} x {counted(len(seeds), 'seed')} = {count}"
    lines = [f"{plan.name}: {product} of {plan.config_file}{begun}"]
    for arm, overrides in plan.arms.items():
        changed = ", ".join(f"{key}={value}" for key, value in overrides.items()) or "the config as it is"
        lines.append(f"  {arm:<{width}}  {changed}{'   (baseline)' if arm == plan.baseline else ''}")
    few = f"; below {LEAST_PAIRS} seeds nothing is claimed" if len(seeds) < LEAST_PAIRS else ""
    alone = config.only or plan.baseline
    lines += [
        f"  seeds {', '.join(map(str, seeds))}; best checkpoint by {plan.metric}{few}",
        f"  compared by {plan.report}; smallest effect {unit.plain(plan.smallest_effect)}, alpha {plan.alpha:g}",
        f"  {workers} at a time, {threads} thread{'s' if threads > 1 else ''} each; in {folder}",
        *([f"  now only {config.only}: {counted(len(seeds), 'run')}"] if config.only else []),
        f"  one alone: OMP_NUM_THREADS={threads} {plan.command(alone, plan.seeds[0])}",
    ]
    return "\n".join(lines)


def _finish(ledger: Ledger) -> None:
    """Writes the report, one process at a time, and names the runs that failed."""
    from vit_lightning.report.report import make_report
    from vit_lightning.report.wandb_report import log_report
    from vit_lightning.report.write import write_report  # late: they take a second

    until = time.monotonic() + 60.0  # where locks do not work, or a process sleeps, the report is written all the same
    while (lock := try_hold(ledger.folder)) is None and time.monotonic() < until:
        time.sleep(0.2)
    try:
        report = make_report(read_study(ledger.folder))
        written = write_report(report)
        mirrored = log_report(report)
    finally:
        if lock is not None:
            release(ledger.folder, lock)
    print("\n".join(filter(None, [*report.lines, str(written[0]), mirrored])), flush=True)
    failed: dict[tuple[str, str], list[Run]] = {}
    for run in report.study.runs:
        if run.state == "failed":
            failed.setdefault((run.arm, str(run.cause).partition(":")[0]), []).append(run)
    if failed:
        each = [(arm, len(runs), runs[0]) for (arm, _), runs in failed.items()]
        raise SomeFailed([f"{arm}: {n} failed, such as {first.folder}: {first.cause}" for arm, n, first in each])
