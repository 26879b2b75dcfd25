"""An ablation on a SLURM cluster: an array of jobs that all work on one ledger, in a shared folder.

A job that is pre-empted or out of time lets its runs write a checkpoint and is queued again (submitit); a killed job
leaves claims that others take over. SLURM alone knows nothing about a run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vit_lightning.ablation.ledger import Ledger, open_ledger
from vit_lightning.ablation.plan import read_plan
from vit_lightning.ablation.workers import Progress, WorkOptions, run_all
from vit_lightning.errors import UserError

MOST_JOBS = 64
REQUEUES = 1000
"""Times that SLURM may end a job early and queue it again."""


@dataclass(frozen=True)
class Job:
    """Callable of one job: works on a ledger until no run is needed."""

    file: Path
    folder: Path
    options: WorkOptions

    def __call__(self, number: int) -> None:
        import torch

        torch.set_num_threads(1)
        plan = read_plan(self.file)
        ledger, _ = open_ledger(self.folder, plan)
        run_all(plan, ledger, self.options, launched=True)  # submitit ignores SIGTERM, which comes first

    def checkpoint(self, number: int) -> Any:
        """Returns what submitit queues again when SLURM ends the job early; runs write checkpoints as the job ends."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


def submit(file: Path, ledger: Ledger, options: WorkOptions, settings: Mapping[str, Any]) -> None:
    """Submits the jobs and shows their progress until no run is needed.

    Args:
        file: the plan.
        ledger: its ledger, on a file system that the jobs share.
        options: ``workers`` is the number of jobs; auto submits one for each run that is needed
            now, at most ``MOST_JOBS``; no more than runs are needed.
        settings: of each job, as submitit names them.

    Raises:
        UserError: submitit or SLURM is missing, or the jobs ended before the runs did.
    """
    try:
        import submitit
    except ImportError as fault:
        raise UserError("launcher=slurm needs submitit: pip install 'vit-lightning[slurm]'") from fault
    missing = ledger.pending()
    if not missing:
        return
    logs = ledger.folder / "slurm"
    count = options.workers if isinstance(options.workers, int) else min(len(missing), MOST_JOBS)
    each = replace(options, workers="auto")
    job = Job(file.absolute(), ledger.folder.absolute(), each)
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster="slurm", slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**{"name": ledger.facts["name"], "timeout_min": 60, **settings})
        jobs = executor.map_array(job, list(range(min(count, len(missing)))))
    except Exception as fault:  # of many kinds, for settings that submitit or SLURM refuses
        raise UserError(f"slurm: {' '.join(str(fault).split())[:400]}") from fault
    array = jobs[0].job_id.partition("_")[0]
    print(f"{len(jobs)} jobs in SLURM, {array}; they continue without this process", flush=True)
    _watch(ledger, array, logs)


def _watch(ledger: Ledger, array: str, logs: Path) -> None:
    """Reports runs as they finish, until none is needed."""
    progress, gone, pending = Progress(ledger), 0, ledger.pending()
    while pending:
        before, pending = pending, ledger.pending()
        for run in [run for run in before if run not in pending]:
            progress.report(run, "done" if ledger.results(run) is not None else "failed")
        gone = 0 if _is_queued(array) else gone + 1
        if gone > 3 and pending:
            progress.close()
            raise UserError(f"all SLURM jobs have ended, but not all runs: see {logs}; the same command submits more")
        progress.show([])
        sys.stdout.flush()
        time.sleep(2.0)
    progress.close()


def _is_queued(array: str) -> bool:
    """Whether jobs of an array wait or run, by the queue: many clusters keep no accounts."""
    answer = subprocess.run(["squeue", "-h", "-j", array, "-o", "%i"], capture_output=True, text=True)
    forgotten = "Invalid job id" in answer.stderr  # some time after its end
    return not forgotten and (answer.returncode != 0 or bool(answer.stdout.strip()))
