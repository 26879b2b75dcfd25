"""An ablation on a SLURM cluster: an array of jobs that all work on the ledger, in a folder that they share.

A job that is pre-empted, or out of time, lets its runs write a checkpoint and is queued again (submitit); one that is
killed leaves claims that are taken over. Nothing about a run is known to SLURM alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_lightning.ablation.ledger import Ledger, Planned, open_ledger
from vit_lightning.ablation.plan import read_plan
from vit_lightning.ablation.workers import How, Progress, run_all
from vit_lightning.errors import UserError

MOST_JOBS = 64
REQUEUES = 1000
"""How often SLURM may end a job early before it is not queued again."""


@dataclass(frozen=True)
class Job:
    """What one job does: works on a ledger until all is over."""

    file: Path
    folder: Path
    threads: int
    how: How
    retried: dict[Planned, int]
    trust: bool

    def __call__(self, number: int) -> None:
        import torch

        torch.set_num_threads(1)
        plan = read_plan(self.file, trust=self.trust)
        ledger, _ = open_ledger(self.folder, plan, threads=self.threads)
        ledger.retried = self.retried  # as they were at submission: what fails in these jobs stays failed
        run_all(plan, ledger, self.how, signals=())  # submitit ignores SIGTERM, which comes before its own signal

    def checkpoint(self, number: int) -> Any:
        """What submitit queues again when SLURM ends the job early: the same. Its end lets runs write checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


def submit(file: Path, ledger: Ledger, how: How, options: Mapping[str, Any], *, trust: bool) -> None:
    """Submits the jobs, and shows what comes of them until all runs are over.

    Args:
        file: the plan.
        ledger: its ledger, on a file system that the jobs share.
        how: ``workers`` is the number of jobs; auto gives one to each run.
        options: what submitit tells SLURM of each job.
        trust: whether pages may name classes of any package.

    Raises:
        UserError: submitit or SLURM is not there, or the jobs ended before the runs did.
    """
    try:
        import submitit
    except ImportError as fault:
        raise UserError("launcher=slurm needs submitit: pip install 'vit-lightning[slurm]'") from fault
    runs = how.runs(ledger)
    missing = [run for run in runs if not ledger.is_over(run)]
    if not missing:
        print(f"all {len(runs)} runs were over already: nothing is submitted", flush=True)
        return
    logs = ledger.folder / "slurm"
    count = how.workers if isinstance(how.workers, int) else min(len(missing), MOST_JOBS)
    each = How("auto", how.only, how.patience)
    job = Job(file.absolute(), ledger.folder.absolute(), ledger.facts["threads"], each, ledger.retried, trust)
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster="slurm", slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**{"name": ledger.facts["name"], "timeout_min": 60, **options})
        jobs = executor.map_array(job, list(range(min(count, len(missing)))))
    except Exception as fault:  # of many kinds, for options that submitit does not know or SLURM does not take
        raise UserError(f"slurm: {' '.join(str(fault).split())[:400]}") from fault
    array = jobs[0].job_id.partition("_")[0]
    print(f"{len(jobs)} jobs in SLURM, {array}; they go on without this process", flush=True)
    _watch(ledger, runs, array, logs)


def _watch(ledger: Ledger, runs: list[Planned], array: str, logs: Path) -> None:
    """Says what is over, until all is."""
    progress, told = Progress(ledger, runs), {run for run in runs if ledger.is_over(run)}
    gone = 0
    while len(told) < len(runs):
        for run in runs:
            if run not in told and ledger.is_over(run):
                told.add(run)
                progress.say(run, "done" if ledger.results(run) is not None else "failed")
        gone = 0 if _is_queued(array) else gone + 1
        if gone > 3 and not all(map(ledger.is_over, runs)):
            progress.close()
            raise UserError(f"all jobs of SLURM are over, but not the runs: see {logs}; the same command submits more")
        progress.show([])
        sys.stdout.flush()
        time.sleep(2.0)
    progress.close()


def _is_queued(array: str) -> bool:
    """Whether SLURM has jobs of an array that wait or run; asked of the queue, since many clusters keep no accounts."""
    answer = subprocess.run(["squeue", "-h", "-j", array, "-o", "%i"], capture_output=True, text=True)
    forgotten = "Invalid job id" in answer.stderr  # some time after its end
    return not forgotten and (answer.returncode != 0 or bool(answer.stdout.strip()))
