"""The ledger of an ablation: a folder that records for each run whether it is done, failed, or who works on it.

    ledger.json             the plan as it began, with what its runs depend on; created once
    look2.json              the seeds of the second analysis; created once
    changes.jsonl           changes of code since the ablation began
    ledger/RUN/0001.claim   the first process that took the run; its modification time is renewed while that works
    ledger/RUN/0001.end     the outcome of that attempt, if the process lived to write it; 0001.log is its output
    runs/RUN/               the run folder

Processes on several machines can share a ledger (``claims.py``). A run is done when its folder has a whole
``results.json``, whatever its process returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vit_lightning
from vit_lightning.ablation.claims import Claim, Leases, create_once, owner
from vit_lightning.ablation.plan import Plan, slug
from vit_lightning.config.changes import changes_since
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.own_files import digests
from vit_lightning.config.own_metrics import recorded_goal
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import goal_of
from vit_lightning.report.study import Run, Study
from vit_lightning.storage.environment import PACKAGES
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_metrics, read_results

SILENT_DEATHS = 10
"""Processes that may die in a row on a run that makes no progress."""
Kind = Literal["diverged", "configuration", "cannot resume", "out of memory", "hang", "no result", "error", "killed"]
ATTEMPTS: dict[Kind, int] = {"out of memory": 2, "hang": 2, "no result": 2, "error": 2, "killed": 6}
"""Attempts at a run that may end in one way at one step before it counts as failed; 1 where they would end alike."""


@dataclass(frozen=True)
class Planned:
    """Arm and seed of a planned run."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{slug(self.arm)}-seed{self.seed}"


@dataclass
class Ledger:
    """Ledger that this process works on."""

    folder: Path
    facts: dict[str, Any]
    leases: Leases = field(default_factory=Leases)
    retried: dict[Planned, int] = field(default_factory=dict)
    """Failures that this process retries and therefore ignores: the number of the claim that failed."""

    @property
    def added_seeds(self) -> list[int]:
        return list(read_json(self.folder / "look2.json").get("seeds", []))

    def planned(self) -> list[Planned]:
        """Returns all runs, seed by seed, so that arms advance together."""
        return [Planned(arm, seed) for seed in (*self.facts["seeds"], *self.added_seeds) for arm in self.facts["arms"]]

    def run_folder(self, run: Planned) -> Path:
        return self.folder / "runs" / run.name

    def claims_folder(self, run: Planned) -> Path:
        return self.folder / "ledger" / run.name

    def results(self, run: Planned) -> dict[str, Any] | None:
        """Returns the results of a run, once they have a finite number for the reported metric."""
        found, report = read_results(self.run_folder(run)), self.facts.get("report")
        if not found or report is None:
            return found or None
        value = found.get(report)
        return found if isinstance(value, int | float) and math.isfinite(value) else None

    def failure(self, run: Planned) -> dict[str, Any] | None:
        """Returns how the run failed for good; None if it did not."""
        last = self._last_claim(run)
        end = read_json(last.with_suffix(".end")) if last is not None else {}
        if last is None or end.get("outcome") != "failed" or int(last.stem) == self.retried.get(run):
            return None
        return end

    def has_finished(self, run: Planned) -> bool:
        """Whether a run is done or has failed for good."""
        return self.results(run) is not None or self.failure(run) is not None

    def retry(self, runs: Sequence[Planned]) -> None:
        """Counts failed runs as missing again; noted as a change if the analysis had been complete."""
        last = {run: self._last_claim(run) for run in runs if self.failure(run) is not None}
        every = self.planned()
        if last and all(map(self.has_finished, every)) and any(self.results(run) for run in every):
            names = ", ".join(f"{run.name} ({claim.stem})" for run, claim in last.items() if claim is not None)
            number = 2 if self.added_seeds else 1
            text = f"failed runs were tried again after analysis {number}, which makes one more analysis: {names}"
            _note_change(self.folder, text)
        self.retried = {run: int(claim.stem) for run, claim in last.items() if claim is not None}

    def claim(self, run: Planned) -> Claim | None:
        """Claims a run for this process; returns None if another process has it or it has finished."""
        last = self._last_claim(run)
        if last is not None and not self._has_ended(last):
            return None
        if self.has_finished(run):  # checked last, after the end of the claim found above
            return None
        number = 1 if last is None else int(last.stem) + 1
        path = self.claims_folder(run) / f"{number:04}.claim"
        path.parent.mkdir(parents=True, exist_ok=True)
        claimant = {**owner(), "progress": self.progress(run), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if not create_once(path, json.dumps(claimant) + "\n"):
            return None
        claim = Claim(path, number)
        if self._silent_deaths(run, number) >= SILENT_DEATHS:
            cause = f"its process was killed {SILENT_DEATHS} times in a row, and the run made no progress"
            claim.end("failed", kind="killed", cause=cause)
            return None
        return claim

    def _has_ended(self, claim: Path) -> bool:
        """Whether a claim has ended; "done" from another machine must wait for its results (NFS may lag)."""
        end = claim.with_suffix(".end")
        if not end.exists():
            return self.leases.has_expired(claim)
        is_remote = read_json(claim).get("machine") != owner()["machine"]
        return not is_remote or read_json(end).get("outcome") != "done" or self.leases.has_expired(end)

    def end_attempt(self, run: Planned, claim: Claim, kind: Kind, cause: str) -> bool:
        """Records a failed attempt; returns whether the run has failed for good."""
        progress = self.progress(run)
        ends = [read_json(path) for path in sorted(self.claims_folder(run).glob("*.end"), reverse=True)]
        since = itertools.takewhile(lambda end: end.get("outcome") != "failed", ends)  # a retry counts from zero
        alike = 1 + sum((end.get("kind"), end.get("progress")) == (kind, progress) for end in since)
        final = alike >= ATTEMPTS.get(kind, 1)
        claim.end("failed" if final else "again", kind=kind, cause=cause, progress=progress)
        return final

    def progress(self, run: Planned) -> int:
        """Returns the last step that the run has logged."""
        folder = self.run_folder(run)
        if not (folder / "metrics.jsonl").is_file():
            return 0
        return max((row["step"] or 0 for row in read_metrics(folder)), default=0)

    def _last_claim(self, run: Planned) -> Path | None:
        return max(self.claims_folder(run).glob("[0-9]*.claim"), default=None)

    def _silent_deaths(self, run: Planned, number: int) -> int:
        """Counts the claims before this one that have no end, in a row, all at the same progress."""
        now, count = self.progress(run), 0
        for earlier in range(number - 1, 0, -1):
            path = self.claims_folder(run) / f"{earlier:04}.claim"
            if path.with_suffix(".end").exists() or read_json(path).get("progress") != now:
                break
            count += 1
        return count


def open_ledger(folder: Path, plan: Plan, *, threads: int) -> tuple[Ledger, list[str]]:
    """Opens the ledger of a plan in a folder, or creates it; returns it with the changes of code since it began.

    Raises:
        UserError: the folder is the ledger of another plan, or the plan or its config has changed.
    """
    now = _facts(plan, threads)
    path = folder / "ledger.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"out={folder} cannot be made: {fault.strerror}") from fault
    others = [item for item in folder.iterdir() if item.name not in (".lock", ".gitignore") and item.suffix != ".part"]
    if others and not path.exists():  # in this order: a parallel process creates ledger.json first
        raise UserError(f"out={folder} holds other things than an ablation (choose a new folder)")
    create_once(path, json.dumps(now, indent=2) + "\n")
    ledger = find_ledger(folder)
    if ledger is None:
        raise UserError(f"{path} cannot be read")
    plan_changes, code_changes = _changes(ledger.facts, now, plan.experiments)
    if plan_changes:
        advice = f"the plan differs from the one that {folder} began with: undo that, or choose another --out"
        raise UserError([*(f"{folder}: {text}" for text in plan_changes), advice])
    for text in code_changes:
        _note_change(folder, text)
    return ledger, code_changes


def find_ledger(folder: Path) -> Ledger | None:
    """Returns the ledger in a folder; None if there is none."""
    facts = read_json(folder / "ledger.json")
    return Ledger(folder, facts) if "arms" in facts else None


def threads_of(folder: Path, requested: int | None) -> int:
    """Returns the threads of each run: part of the plan, as sums over other chunks differ in their last digits.

    Raises:
        UserError: the ablation began with another number.
    """
    began = read_json(folder / "ledger.json").get("threads")
    if began is not None and requested not in (None, began):
        raise UserError(f"threads={requested}: runs of {folder} have {began}; all must have the same (leave it out)")
    return began or requested or 1


def add_seeds(ledger: Ledger, count: int) -> None:
    """Plans the second analysis.

    Raises:
        UserError: it has another number of seeds already, or runs of the first analysis have not finished.
    """
    key, added = f"add-seeds={count}", ledger.added_seeds
    if added and len(added) != count:
        raise UserError(f"{key}: the second and last analysis has {len(added)} added seeds already")
    missing = [run.name for run in ledger.planned() if not ledger.has_finished(run)]
    if missing and not added:
        raise UserError(f"{key}: {len(missing)} runs of the first analysis have not finished ({missing[0]})")
    first = max(ledger.facts["seeds"]) + 1
    create_once(ledger.folder / "look2.json", json.dumps({"seeds": list(range(first, first + count))}) + "\n")


def read_study(folder: Path) -> Study:
    """Reads an ablation with the outcomes of its runs so far.

    Raises:
        UserError: the folder holds no ablation.
    """
    ledger = find_ledger(folder)
    if ledger is None:
        raise UserError(f"{folder} is no ablation: it holds no ledger.json")
    facts = ledger.facts
    planned = ledger.planned()
    return Study(
        **{key: facts[key] for key in (*_RULES, "arms")},
        folder=folder,
        goal=recorded_goal(facts["report"], [*facts["pages"].values()]) or goal_of(facts["report"]),
        added_seeds=ledger.added_seeds,
        runs=[_run(ledger, run) for arm in facts["arms"] for run in planned if run.arm == arm],
        plan_changed=_noted_changes(folder),
        plan_file=facts["file"],
    )


def _run(ledger: Ledger, run: Planned) -> Run:
    results, failure = ledger.results(run), ledger.failure(run)
    return Run(
        arm=run.arm,
        seed=run.seed,
        folder=str(ledger.run_folder(run).relative_to(ledger.folder)),
        state="done" if results is not None else "failed" if failure is not None else "missing",
        cause=None if results is not None or failure is None else f"{failure['kind']}: {failure['cause']}",
        results=results or {},
    )


_PER_RUN = ("seed_everything", "wandb")
"""Keys of a config that differ between the runs of an arm, or change nothing in them."""


def _facts(plan: Plan, threads: int) -> dict[str, Any]:
    """Returns the facts of a plan that the ledger keeps, as plain data."""
    pages = {arm: experiment.config for arm, experiment in plan.experiments.items()}
    facts = {
        **{key: getattr(plan, key) for key in ("name", "file", "flags", "metric", "report", "baseline")},
        **{key: getattr(plan, key) for key in ("smallest_effect", "alpha", "arms", "factors", "seeds")},
        "page": plan.config_file,
        "threads": threads,
        "pages": {arm: {k: v for k, v in page.items() if k not in _PER_RUN} for arm, page in pages.items()},
        "code": _code(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _code() -> dict[str, str]:
    """Returns what training depends on besides the config: sources of this package, versions of others, own files."""
    digest = hashlib.sha256()
    package = Path(vit_lightning.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name not in ("vit-lightning", "wandb")}
    own = {f"file {name}": digest for name, digest in digests().items()}
    return {"source of vit_lightning": digest.hexdigest()[:16], "python": platform.python_version()} | versions | own


_RULES = ("name", "baseline", "metric", "report", "smallest_effect", "alpha", "seeds", "factors")


def _changes(
    began: dict[str, Any], now: dict[str, Any], experiments: Mapping[str, Experiment]
) -> tuple[list[str], list[str]]:
    """Returns the changes of the plan and its config, and those of the code."""
    plan = [f"{key} was {began.get(key)}, is {now[key]}" for key in _RULES if began.get(key) != now[key]]
    plan += [f"arm {arm} is new" for arm in now["arms"] if arm not in began["arms"]]
    plan += [f"arm {arm} is gone" for arm in began["arms"] if arm not in now["arms"]]
    for arm, page in now["pages"].items():
        experiments[arm].imports.allow()
        for key, (before, after) in changes_since(began["pages"].get(arm, page), page).items():
            plan.append(f"arm {arm}: {key} was {before}, is {after}")
    before, after = began["code"], now["code"]
    return plan, [
        f"{key} was {before[key]}, is {after[key]}" for key in after if before.get(key, after[key]) != after[key]
    ]


def _note_change(folder: Path, text: str) -> None:
    if text not in _noted_changes(folder):
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "change": text})
        with (folder / "changes.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # the line before may be torn


def _noted_changes(folder: Path) -> list[str]:
    try:
        lines = (folder / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[str] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # empty, or torn
            found.append(json.loads(line)["change"])
    return list(dict.fromkeys(found))
