"""``lightning ablate``: shows a plan, runs it until its comparisons are decided, and writes its report."""

import statistics
import sys
import time
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

import torch

from vit_lightning.ablation.ledger import Ledger, open_ledger
from vit_lightning.ablation.plan import Plan, read_plan
from vit_lightning.ablation.workers import devices_of, run_all, workers_of
from vit_lightning.commands.console import quiet
from vit_lightning.config.files import word
from vit_lightning.errors import UserError, at_least, counted, problems_of, reading, refuse
from vit_lightning.report.comparisons import design_of
from vit_lightning.report.forecast import forecast_sentences
from vit_lightning.report.study import Run, written
from vit_lightning.report.wording import at_the_end
from vit_lightning.storage.folder import release, try_hold


@dataclass
class AblateConfig:
    """Arguments of ``lightning ablate``.

    Args:
        plan: the plan.
        out: folder of the ablation; runs/ablations/NAME by default. The same command resumes it.
        dry_run: show the plan and exit.
        workers: runs at a time; auto is one for each CPU core and its threads, of a GPU at most 8 and as
            many as its memory holds.
        threads: threads of each run; 1 by default. Fixed when the ablation begins.
        retry: try failed runs again, but for those that diverged or that another seed has replaced in a comparison.
        patience: minutes without any write after which a run counts as hanging.
        register: file in which studies of a question or an arm are entered, so that one that asks again is named;
            studies.jsonl beside the folder by default.
    """

    plan: Path
    _: KW_ONLY
    out: Path | None = None
    dry_run: bool = False
    workers: int | Literal["auto"] = "auto"
    threads: int | None = None
    retry: bool = False
    patience: float = 30.0
    register: Path | None = None

    def __post_init__(self) -> None:
        workers = None if self.workers == "auto" else self.workers
        patience = problems_of(("patience", f"{self.patience:g}", self.patience > 0, "above 0 minutes"))
        refuse(at_least(1, workers=workers, threads=self.threads), patience)


class SomeFailed(UserError):
    """Error for failed runs in an ablation of which no other run is left to do. Exit code 5."""

    exit_code = 5


def ablate(config: AblateConfig) -> None:
    """Runs what the comparisons of a plan need, analysis after analysis, then writes the report.

    Raises:
        UserError: the plan or its config is wrong.
        SomeFailed: no more runs are needed, but some failed.
    """
    if sys.stderr.isatty():
        print("reading the plan, its config and data ...", file=sys.stderr, flush=True)  # takes seconds
    torch.set_num_threads(1)  # runs are forked from this process
    quiet()
    plan = read_plan(config.plan)
    folder = config.out or Path("runs/ablations") / plan.name
    with reading(folder):
        create, register = not config.dry_run, config.register
        ledger, changed = open_ledger(folder, plan, threads=config.threads, create=create, studies=register)
        workers = workers_of(config.workers, plan, ledger.facts["threads"])
        description = describe(plan, config, ledger, workers)
    print(description, flush=True)
    left = ledger.retry() if config.retry and not config.dry_run else []
    for text in [*(f"changed: {text}" for text in changed), *left]:
        print(f"  {text}", flush=True)
    if (now := ledger.look()).pending:
        print("\n".join(f"  {line}" for line in forecast(plan, ledger, workers)), flush=True)
    else:
        print(f"  {at_the_end(ledger.study(), now.schedule.comparisons)}", flush=True)
    if config.dry_run:
        return
    run_all(plan, ledger, workers, patience=config.patience)
    _finish(ledger.folder)


def describe(plan: Plan, config: AblateConfig, ledger: Ledger, workers: int) -> str:
    """Describes the plan: arms and what each changes, analyses, tuning, rules, and what is done already."""
    compare, threads = plan.compare, ledger.facts["threads"]
    states = Counter(run.state for run in ledger.study().runs)
    width = max(map(len, plan.arms))
    again = f"failed: those that did not diverge are tried again{'' if config.retry else ' with --retry'}"
    begun = f", {counted(states['done'], 'run')} done" if states["done"] else ""
    begun += f", {states['failed']} {again}" if states["failed"] else ""
    lines = [f"{plan.name}: {counted(len(plan.arms), 'arm')} of {', '.join(plan.config_files)}{begun}"]
    lines += [f"  {plan.question}"] if plan.question else []
    lines += [f"  all with {written(plan.fixed)}"] if plan.fixed else []
    named = plan.baseline if compare.arms == "baseline" else None
    for arm, options in plan.arms.items():
        changed = written(options) or "the config as it is"
        lines.append(f"  {arm:<{width}}  {changed}{'   (baseline)' if arm == named else ''}")
    if plan.tune.seeds:
        tried = ", ".join(f"{key}={', '.join(map(word, values))}" for key, values in plan.tune.options.items())
        count, chosen_by = len(plan.tune.combinations) * len(plan.tune.seeds), plan.checkpoint.monitor
        seeds = ", ".join(map(str, plan.tune.seeds))
        when = "tuned anew before each run" if plan.tune.replicates else "each arm is tuned first"
        lines.append(f"  {when}: {tried}, with seeds {seeds}: {counted(count, 'trial')}, chosen by {chosen_by}")
    analyses = design_of(compare, 1).analyses
    few = ", ".join(map(str, analyses if len(analyses) < 5 else [*analyses[:3], "...", analyses[-1]]))
    versus = {"baseline": "with the baseline", "pairs": "with each other"}[compare.arms]
    earlier = ledger.facts["compare"]["extended"]
    split = ", each with a split of its own" if plan.split_varies else ""
    until = "" if compare.until == "equivalent" else f" (better, worse or {compare.until})"
    chosen = ledger.look().chosen[0].get(plan.baseline, {})
    devices = devices_of(plan) if config.workers == "auto" else None
    spread = f" on {counted(len(devices), 'GPU')}, as cores, memory and speed allow" if devices else ""
    lines += [
        f"  analyses after {few} seeds from {plan.seeds[0]} on{split}, until decided{until}",
        *([f"  raised from at most {', '.join(map(str, earlier))} seeds: alpha is not spent again"] if earlier else []),
        "  a seed of which a run fails is replaced by the next: at most half as many more than an analysis has",
        f"  compared {versus} by {compare.metric} of the best checkpoint by {plan.checkpoint.monitor}",
        *(["  arms train for the time of their baseline, timed before the first run"] if compare.equal else []),
        *([f"  better or worse arms also by {', then '.join(compare.then)}"] if compare.then else []),
        f"  smallest effect {compare.shown_effect}, alpha {compare.alpha:g}",
        f"  {workers} at a time{spread}, {threads} thread{'s' if threads > 1 else ''} each; in {ledger.folder}",
        f"  one alone: OMP_NUM_THREADS={threads} {plan.command(plan.baseline, plan.seeds[0], chosen)}",
    ]
    return "\n".join(lines)


def forecast(plan: Plan, ledger: Ledger, workers: int) -> list[str]:
    """Describes what an ablation can show, its runs and, by those that have ended, its time."""
    study = ledger.study()
    ended = [*study.done, *(study.tuning.trials if study.tuning else ())]
    seconds = [run.results["seconds"] for run in ended if "seconds" in run.results]
    each = statistics.fmean(seconds) / workers if seconds else None
    data = plan.experiments[plan.baseline].data
    data = data.further.get(plan.compare.test_set, data)
    lines = forecast_sentences(study, data.image_count("test") if data.own_loaders else None, each)
    if plan.tune.replicates:
        trials = len(plan.tune.seeds) * len(plan.tune.combinations)
        runs = (1 + trials) * len(plan.arms) * plan.compare.max_seeds
        lines.append(f"each of these runs is tuned anew by {counted(trials, 'trial')}: at most {runs} runs in all")
    elif study.tuning is not None and (left := sum(trial.state == "missing" for trial in study.tuning.trials)):
        lines.append(f"tuning before that: {counted(left, 'run')}")
    return lines


def _finish(folder: Path) -> None:
    """Writes the report, one process at a time, and names the runs that failed."""
    from vit_lightning.ablation.publish import publish  # late: it takes a second

    until = time.monotonic() + 60.0  # where locks do not work, or a process sleeps, the report is written all the same
    while (lock := try_hold(folder)) is None and time.monotonic() < until:
        time.sleep(0.2)
    try:
        report = publish(folder)
    finally:
        if lock is not None:
            release(folder, lock)
    failed: dict[tuple[str, str], list[Run]] = {}
    for run in report.study.runs:
        if run.state == "failed":
            failed.setdefault((run.arm, str(run.cause).partition(":")[0]), []).append(run)
    if failed:
        alike = [(runs[0], len(runs)) for runs in failed.values()]
        raise SomeFailed([f"{run.arm}: {n} failed, such as {run.folder}: {run.cause}" for run, n in alike])
