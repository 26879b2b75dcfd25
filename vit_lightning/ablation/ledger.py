"""The ledger of an ablation: a folder that says of each run whether it is done, failed, or whose it is now.

    ledger.json          the plan as it began, with what its runs depend on; made once
    look2.json           the seeds of the second look; made once
    changes.jsonl        what was no longer as it began, each time somebody went on with it
    ledger/RUN/0001.claim   the first process that took the run, and its sign of life: the file's time
    ledger/RUN/0001.end     how that ended, where it lived to say so; 0001.log is what the run said
    runs/RUN/               the run folder

A claim is a new file that only one process can make; the next number takes a run over from a process that is gone. No
lock of the file system is needed, so that processes on several machines can share a ledger. A run is done when its
folder has a whole ``results.json``, whatever its process returned.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vit_lightning
from vit_lightning.ablation.claims import Claim, Leases, create_once, owner, read_json
from vit_lightning.ablation.plan import Plan, slug
from vit_lightning.config.changes import changes_since
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import goal_of
from vit_lightning.report.study import Run, Study
from vit_lightning.storage.environment import PACKAGES
from vit_lightning.storage.metrics import read_metrics, read_results

SILENT_DEATHS = 10
"""Processes that may die in a row with a run that does not come further."""
Kind = Literal[
    "diverged", "configuration", "cannot go on", "out of memory", "hang", "no result", "error", "killed", "in use"
]
ATTEMPTS: dict[Kind, int] = {
    "diverged": 1,
    "configuration": 1,
    "cannot go on": 1,
    "out of memory": 2,
    "hang": 2,
    "no result": 2,
    "error": 2,
    "killed": 6,
    "in use": 6,
}
"""How often a run may end in one way at one step before it counts as failed."""


@dataclass(frozen=True)
class Planned:
    """One run of the plan."""

    arm: str
    seed: int
    look: int

    @property
    def name(self) -> str:
        return f"{slug(self.arm)}-seed{self.seed}"


@dataclass
class Ledger:
    """A ledger that this process works on."""

    folder: Path
    facts: dict[str, Any]
    leases: Leases = field(default_factory=Leases)
    retried: dict[Planned, int] = field(default_factory=dict)
    """Failures that do not count, as this process tries those runs once more: the number of the claim that failed."""

    @property
    def added_seeds(self) -> list[int]:
        return list(read_json(self.folder / "look2.json").get("seeds", []))

    def planned(self) -> list[Planned]:
        """All runs, seed by seed, so that arms come forward together."""
        looks = [(seed, 1) for seed in self.facts["seeds"]] + [(seed, 2) for seed in self.added_seeds]
        return [Planned(arm, seed, look) for seed, look in looks for arm in self.facts["arms"]]

    def run_folder(self, run: Planned) -> Path:
        return self.folder / "runs" / run.name

    def place(self, run: Planned) -> Path:
        return self.folder / "ledger" / run.name

    def results(self, run: Planned) -> dict[str, Any] | None:
        """What a run has left, once it has a number for what is reported."""
        found, report = read_results(self.run_folder(run)), self.facts.get("report")
        return found if found and (report is None or _is_number(found.get(report))) else None

    def failure(self, run: Planned) -> dict[str, Any] | None:
        """How the run failed for good, if it did."""
        last = self._last_claim(run)
        end = read_json(last.with_suffix(".end")) if last is not None else {}
        if last is None or end.get("outcome") != "failed" or int(last.stem) == self.retried.get(run):
            return None
        return end

    def is_over(self, run: Planned) -> bool:
        """Whether a run is done or has failed."""
        return self.results(run) is not None or self.failure(run) is not None

    def try_failed_again(self, runs: Sequence[Planned]) -> None:
        """Takes those of the runs that have failed for missing ones; noted if there was an answer already."""
        last = {run: self._last_claim(run) for run in runs if self.failure(run) is not None}
        every = self.planned()
        if last and all(map(self.is_over, every)) and any(self.results(run) for run in every):
            names = ", ".join(f"{run.name} ({claim.stem})" for run, claim in last.items() if claim is not None)
            look = 2 if self.added_seeds else 1
            text = f"failed runs were tried again after look {look}, which is one look more: {names}"
            _note_change(self.folder, text)
        self.retried = {run: int(claim.stem) for run, claim in last.items() if claim is not None}

    def claim(self, run: Planned) -> Claim | None:
        """Makes the run this process's own; None if another process has it, or it is done or has failed."""
        last = self._last_claim(run)
        if last is not None and not self._has_ended(last):
            return None
        if self.is_over(run):  # asked last: it sees how what was found above has ended
            return None
        number = 1 if last is None else int(last.stem) + 1
        place = self.place(run)
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{number:04}.claim"
        said = {**owner(), "progress": self.progress(run), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if not create_once(path, json.dumps(said) + "\n"):
            return None
        claim = Claim(path, number)
        if self._silent_deaths(run, number) >= SILENT_DEATHS:
            cause = f"its process was killed {SILENT_DEATHS} times in a row, and the run came no further"
            claim.end("failed", kind="killed", cause=cause)
            return None
        return claim

    def _has_ended(self, claim: Path) -> bool:
        """Whether a claim is over; one of another machine that says done waits for its results, which may be late."""
        end = claim.with_suffix(".end")
        if not end.exists():
            return self.leases.is_over(claim)
        far = read_json(claim).get("machine") != owner()["machine"]
        return not far or read_json(end).get("outcome") != "done" or self.leases.is_over(end)

    def settle(self, run: Planned, claim: Claim, kind: Kind, cause: str) -> bool:
        """Writes down that an attempt came to nothing; whether the run has failed for good."""
        progress = self.progress(run)
        ends = [read_json(path) for path in sorted(self.place(run).glob("*.end"), reverse=True)]
        since = itertools.takewhile(lambda end: end.get("outcome") != "failed", ends)  # what failed is tried anew
        alike = 1 + sum((end.get("kind"), end.get("progress")) == (kind, progress) for end in since)
        final = alike >= ATTEMPTS[kind]
        claim.end("failed" if final else "again", kind=kind, cause=cause, progress=progress)
        return final

    def progress(self, run: Planned) -> int:
        """The last step that the run has logged."""
        folder = self.run_folder(run)
        if not (folder / "metrics.jsonl").is_file():
            return 0
        return max((row["step"] or 0 for row in read_metrics(folder)), default=0)

    def _last_claim(self, run: Planned) -> Path | None:
        return max(self.place(run).glob("[0-9]*.claim"), default=None)

    def _silent_deaths(self, run: Planned, number: int) -> int:
        """Claims before this one that nobody ended, in a row, from the same progress on."""
        now, count = self.progress(run), 0
        for earlier in range(number - 1, 0, -1):
            path = self.place(run) / f"{earlier:04}.claim"
            if path.with_suffix(".end").exists() or read_json(path).get("progress") != now:
                break
            count += 1
        return count


def open_ledger(folder: Path, plan: Plan, *, threads: int) -> tuple[Ledger, list[str]]:
    """The ledger of a plan in a folder, made if there is none; and what of the code is not as it was when it began.

    Raises:
        UserError: the folder is the ledger of another plan, or the plan or its page has changed.
    """
    now = _facts(plan, threads)
    path = folder / "ledger.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"out={folder} cannot be made: {fault.strerror}") from fault
    others = [item for item in folder.iterdir() if item.name not in (".lock", ".gitignore") and item.suffix != ".part"]
    if others and not path.exists():  # in this order: a process that starts beside this one makes ledger.json first
        raise UserError(f"out={folder} holds other things than an ablation (choose a new folder)")
    create_once(path, json.dumps(now, indent=2) + "\n")
    began = read_json(path)
    if "arms" not in began:
        raise UserError(f"{path} cannot be read")
    plan_changes, code_changes = _changes(began, now)
    if plan_changes:
        advice = f"the plan is no longer the one that {folder} began with: undo that, or start anew with --out"
        raise UserError([*(f"{folder}: {text}" for text in plan_changes), advice])
    for text in code_changes:
        _note_change(folder, text)
    return Ledger(folder, began), code_changes


def find_ledger(folder: Path) -> Ledger | None:
    """The ledger in a folder, if there is one, as it began."""
    facts = read_json(folder / "ledger.json")
    return Ledger(folder, facts) if "arms" in facts else None


def threads_of(folder: Path, asked: int | None) -> int:
    """Threads of each run: part of the plan, since numbers that are summed in other parts differ in their last digits.

    Raises:
        UserError: the ablation began with another number than is asked for.
    """
    began = read_json(folder / "ledger.json").get("threads")
    if began is not None and asked not in (None, began):
        raise UserError(
            f"threads={asked}: the runs of {folder} have {began}, and all must have the same (leave it out)"
        )
    return began or asked or 1


def add_seeds(ledger: Ledger, count: int) -> None:
    """Plans the second look.

    Raises:
        UserError: there was one with another number of seeds, or the first look is not over.
    """
    added = ledger.added_seeds
    if added:
        if len(added) != count:
            raise UserError(
                f"add-seeds={count}: the second look has {len(added)} seeds already, and there are two at most"
            )
        return
    missing = [run.name for run in ledger.planned() if not ledger.is_over(run)]
    if missing:
        raise UserError(
            f"add-seeds={count}: the first look is not over, {len(missing)} runs are missing ({missing[0]})"
        )
    first = max(ledger.facts["seeds"]) + 1
    create_once(ledger.folder / "look2.json", json.dumps({"seeds": list(range(first, first + count))}) + "\n")


def read_study(folder: Path) -> Study:
    """What an ablation is and what has come of it so far.

    Raises:
        UserError: the folder holds no ablation.
    """
    ledger = find_ledger(folder)
    if ledger is None:
        raise UserError(f"{folder} is no ablation: it holds no ledger.json")
    facts = ledger.facts
    runs = [_run(ledger, run) for arm in facts["arms"] for run in ledger.planned() if run.arm == arm]
    return Study(
        name=facts["name"],
        folder=folder,
        metric=facts["metric"],
        goal=goal_of(facts["report"]),
        report=facts["report"],
        baseline=facts["baseline"],
        smallest_effect=facts["smallest_effect"],
        alpha=facts["alpha"],
        arms=facts["arms"],
        seeds=facts["seeds"],
        added_seeds=ledger.added_seeds,
        runs=runs,
        factors=facts["factors"],
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_PER_RUN = ("seed_everything", "wandb")
"""Keys of a page that differ between the runs of an arm, or change nothing in them."""


def _facts(plan: Plan, threads: int) -> dict[str, Any]:
    """What the ledger keeps of a plan, as plain data."""
    pages = {arm: experiment.config for arm, experiment in plan.experiments.items()}
    facts = {
        **{key: getattr(plan, key) for key in ("name", "file", "page", "flags", "metric", "report", "baseline")},
        **{key: getattr(plan, key) for key in ("smallest_effect", "alpha", "arms", "factors", "seeds")},
        "threads": threads,
        "pages": {arm: {k: v for k, v in page.items() if k not in _PER_RUN} for arm, page in pages.items()},
        "code": _code(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _code() -> dict[str, str]:
    """What training depends on besides the page: sources of this package, versions of others."""
    digest = hashlib.sha256()
    package = Path(vit_lightning.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name not in ("vit-lightning", "wandb")}
    return {"source of vit_lightning": digest.hexdigest()[:16], "python": platform.python_version(), **versions}


_RULES = ("name", "baseline", "metric", "report", "smallest_effect", "alpha", "seeds", "factors")


def _changes(began: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is no longer as it was, of the plan and its page, and of the code."""
    plan = [f"{key} was {began.get(key)}, is {now[key]}" for key in _RULES if began.get(key) != now[key]]
    plan += [f"arm {arm} is new" for arm in now["arms"] if arm not in began["arms"]]
    plan += [f"arm {arm} is gone" for arm in began["arms"] if arm not in now["arms"]]
    for arm, page in now["pages"].items():
        for key, (before, after) in changes_since(began["pages"].get(arm, page), page).items():
            plan.append(f"arm {arm}: {key} was {before}, is {after}")
    code = began["code"]
    return plan, [
        f"{key} was {code.get(key)}, is {now['code'][key]}" for key in now["code"] if code.get(key) != now["code"][key]
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
