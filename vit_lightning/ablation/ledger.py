"""The ledger of an ablation: a folder that records for each run whether it is done, failed, or who works on it.

    ledger.json             the plan as it began, with what its runs depend on
    ledger/RUN/0001.claim   the first process that took the run; its modification time is renewed while that works
    ledger/RUN/0001.end     the outcome of that attempt, if the process lived to write it; 0001.log is its output
    ledger/RUN/0001.retry   the failure of that attempt is tried again, in all processes
    ledger/timing.json      the steps of each arm that take equal time; claims of those who time are in ledger/timing
    runs/RUN/               the run folder
    tuning/TRIAL/           the run folder of a trial of the tuning; its claims are in ledger/tuning/TRIAL
    ledger/tuning/ARM.json  the values that tuning has chosen, from the first run with them on; ARM-SEED.json where
                            each seed has a tuning of its own

Processes on several machines can share a ledger (``claims.py``). A run is done when its folder has a whole
``results.json``, whatever its process returned. Which runs are needed follows from those that have ended
(``report/comparisons.py``). What the ledger keeps of results and claims: ``records.py``.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import vit_lightning
from vit_lightning.ablation import records, register
from vit_lightning.ablation.claims import Claim, Leases, create_once, last_claim, make_claim, next_claim
from vit_lightning.ablation.plan import Plan, Tune, grid_name, slug
from vit_lightning.config.adapters import recorded_goal
from vit_lightning.config.build import build
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import PER_RUN, changes, flatten
from vit_lightning.config.own_files import digests
from vit_lightning.config.together import Merged
from vit_lightning.errors import UserError, counted, reading
from vit_lightning.report.comparisons import Schedule, make_schedule
from vit_lightning.report.predictions import contradiction
from vit_lightning.report.study import EDITED, Compare, Run, State, Study, Tuning
from vit_lightning.storage.environment import PACKAGES
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_metrics, read_results

SILENT_DEATHS = 10
"""Processes that may die in a row on a run that gets no further."""
MAY_CHANGE = ("disagreement", "max_seeds", "extended")
"""Rules of a comparison that may change: one that the forecast alone depends on, and the number of seeds."""
Results = dict[str, Any] | None
Kind = Literal[
    "diverged", "configuration", "cannot resume", "out of memory", "hang", "no result", "error", "killed", "stopped"
]
ATTEMPTS: dict[Kind, int] = {"out of memory": 2, "hang": 2, "no result": 2, "error": 2, "killed": 6, "stopped": 6}
"""Attempts at a run that may end in one way before it counts as failed; 1 where they would end alike."""


@dataclass(frozen=True)
class Planned:
    """Arm and seed of a planned run, and the values that it tries if it is a trial of the tuning."""

    arm: str
    seed: int
    trial: str | None = None

    @property
    def name(self) -> str:
        return f"{slug(self.arm if self.trial is None else f'{self.arm}, {self.trial}')}-seed{self.seed}"


@dataclass(frozen=True)
class Look:
    """State of an ablation by the runs that had ended at one moment; a later look is another object."""

    ended: dict[Planned, Run]
    """Runs and trials with an outcome."""
    untuned: dict[Planned, Run]
    """Runs that cannot begin, since no trial of their arm has trained: they count as failed."""
    chosen: list[dict[str, dict[str, Any]]]
    """Values of each arm whose tuning has ended, for the seed at each place of the plan; without replicates alike."""
    schedule: Schedule
    """Comparisons, and the seeds that each arm needs for the next analyses."""
    planned: list[Planned]
    """Runs that are needed: all trials, then the runs of the next analyses, seed by seed."""

    @property
    def pending(self) -> list[Planned]:
        """Runs that are needed and had not ended."""
        return [run for run in self.planned if run not in self.ended]


@dataclass
class Ledger:
    """Ledger that this process works on: its files are the state, which each look reads anew."""

    folder: Path
    facts: dict[str, Any]
    leases: Leases = field(default_factory=Leases)
    writes: bool = False
    """Whether first results and claims are kept: not where a study is only read."""
    _last: Look | None = None
    """The last look, from which the next one goes on; only ``look`` and ``retry`` set it."""

    @property
    def tune(self) -> Tune:
        return Tune(**(self.facts["tune"] or {"options": {}, "seeds": []}))

    @property
    def trials(self) -> dict[str, dict[str, Any]]:
        """Values that the tuning tries, by their names in the order of the plan."""
        return {grid_name(values): values for values in self.tune.combinations}

    @property
    def timing(self) -> dict[str, dict[str, Any]]:
        """Cost of a step and options of each arm, with equal time; empty before it has been timed."""
        return read_json(self.folder / "ledger" / "timing.json")

    @property
    def studies(self) -> Path:
        """File in which studies of the same question or arms are entered; by default beside the folder."""
        return Path(self.facts.get("register") or self.folder.parent / register.FILE)

    def run_folder(self, run: Planned) -> Path:
        return self.folder / ("runs" if run.trial is None else "tuning") / run.name

    def claims_folder(self, run: Planned) -> Path:
        return self.folder / "ledger" / ("" if run.trial is None else "tuning") / run.name

    def _relative(self, run: Planned) -> str:
        return str(self.run_folder(run).relative_to(self.folder))

    def _record(self, run: Planned) -> Path:
        return self.claims_folder(run) / "results.json"

    def _choice(self, arm: str, place: int) -> Path:
        anew = f"-seed{self.facts['seeds'][place]}" if self.tune.replicates else ""
        return self.folder / "ledger" / "tuning" / f"{slug(arm)}{anew}.json"

    def look(self) -> Look:
        """Reads which runs have ended, until no further run follows from them."""
        found = self._last
        if found is None or self._is_retried(found):
            found = self._follow({})
        while ended := {run: end for run in found.pending if (end := self._end_of(run))}:
            found = self._follow(found.ended | ended)
        self._last = found
        return found

    def _is_retried(self, last: Look) -> bool:
        """Whether a process has begun to try a run again that had failed."""
        failed = [run for run, end in last.ended.items() if end.state == "failed" and not end.was_edited]
        return any(self.failure(run) is None for run in failed)

    def _end_of(self, run: Planned) -> Run | None:
        """Returns a run with its outcome; None before it has one. Keeps its first results."""
        if failure := self.failure(run):  # it stays one, whatever its folder holds by now
            return self._run(run, "failed", f"{failure['kind']}: {failure['cause']}")
        if (results := self.results(run)) is None:
            return None
        if self.writes:
            self._keep(run, results)
        first = read_json(self._record(run)).get("predictions")
        if wrong := contradiction(self.run_folder(run), results, first):
            return self._run(run, "failed", f"{EDITED}: {wrong}")
        return self._run(run, "done", results=results)

    def _follow(self, ended: dict[Planned, Run]) -> Look:
        """Returns what follows from the runs that have ended, and keeps the claims that are made by them."""
        seeds, replicates = self.facts["seeds"], self.tune.replicates
        chosen = [self._choose(place, ended) for place in range(len(seeds))]
        places = {Planned(arm, seed): place for place, seed in enumerate(seeds) for arm in self.facts["arms"]}
        without = {run: place for run, place in places.items() if run.arm not in chosen[place]}
        causes = {run: self._failed_tuning(run.arm, place, ended) for run, place in without.items()}
        untuned = {run: self._run(run, "failed", cause) for run, cause in causes.items() if cause}
        schedule = make_schedule(self._study([run for run in (ended | untuned).values() if run.tried is None]))
        if self.writes and any(one.course.pairs for one in schedule.comparisons):
            records.keep_claims(self.folder, schedule.comparisons)
        wanted = [run for run, place in places.items() if place < schedule.seeds[run.arm]]
        tuned = [self._trials(run.arm, places[run]) for run in wanted if replicates or places[run] == 0]
        trials = sorted(itertools.chain.from_iterable(tuned), key=lambda run: run.seed)
        return Look(ended, untuned, chosen, schedule, trials + [run for run in wanted if run not in without])

    def _failed_tuning(self, arm: str, place: int, ended: Mapping[Planned, Run]) -> str | None:
        """Says why an arm that has no values cannot be tuned; None while its trials have not all ended."""
        trials = self._trials(arm, place)
        if not all(run in ended for run in trials):
            return None
        ends = {run: self.failure(run) or {} for run in trials if ended[run].state == "failed"}
        failed, end = next(iter(ends.items()))
        kind = "diverged in tuning" if {one.get("kind") for one in ends.values()} == {"diverged"} else "tuning"
        return f"{kind}: a trial of each value failed, such as {self._relative(failed)}: {end.get('cause')}"

    def _run(self, run: Planned, state: State = "missing", cause: str | None = None, results: Results = None) -> Run:
        tried = None if run.trial is None else self.trials[run.trial]
        predictions = read_json(self._record(run)).get("predictions") if results else None
        return Run(run.arm, run.seed, self._relative(run), state, cause, results or {}, tried, predictions)

    def _keep(self, run: Planned, results: dict[str, Any]) -> None:
        if not self._record(run).exists():
            register.enter(self.studies, self.folder, self.facts)
        records.keep(self._record(run), records.result_of(self.run_folder(run), results))

    def _trials(self, arm: str, place: int) -> list[Planned]:
        """Returns the trials that choose the values of an arm, for the seed at a place of the plan."""
        return [Planned(arm, seed, trial) for seed in self.tune.seeds_of(place) for trial in self.trials]

    def _choose(self, place: int, ended: Mapping[Planned, Run]) -> dict[str, dict[str, Any]]:
        """Returns the values of each arm with the best mean over the seeds of the tuning, for the seed at a place.

        Values are left out where a trial has failed, arms where a trial has not ended or all values are left out.
        """
        if self.facts["tune"] is None:
            return {arm: {} for arm in self.facts["arms"]}
        found, sign = {}, {"min": 1, "max": -1}[self.facts["mode"]]
        for arm in self.facts["arms"]:
            trials = self._trials(arm, place)
            if begun := read_json(self._choice(arm, place)):
                found[arm] = begun
            elif all(run in ended for run in trials):
                runs = [ended[run] for run in trials]
                tuning = Tuning(self.facts["metric"], self.facts["mode"], {}, self.tune.seeds, runs, {})
                means = [(sign * tuning.mean(arm, values), n) for n, values in enumerate(self.trials.values())]
                if known := [mean for mean in means if not math.isnan(mean[0])]:
                    found[arm] = [*self.trials.values()][min(known)[1]]  # of equal ones the first
        return found

    def choose(self, run: Planned) -> dict[str, Any]:
        """Returns the values of a tuned arm for one of its runs: in all processes those that the first one chose."""
        place = self.facts["seeds"].index(run.seed)
        if values := self.look().chosen[place][run.arm]:
            records.keep(self._choice(run.arm, place), values)
        return read_json(self._choice(run.arm, place)) or values

    def study(self) -> Study:
        """Returns the ablation with the outcomes of its runs so far."""
        now, facts, tune, arms = self.look(), self.facts, self.facts["tune"], [*self.facts["arms"]]
        outcomes = now.ended | now.untuned
        trials = [outcomes.get(run, self._run(run)) for run in now.planned if run.trial is not None]
        trials.sort(key=lambda trial: arms.index(trial.arm))
        needed = [Planned(arm, seed) for arm, count in now.schedule.seeds.items() for seed in facts["seeds"][:count]]
        tuning = None
        if tune is not None:
            once, anew = ({}, now.chosen) if self.tune.replicates else (now.chosen[0], [])
            tuning = Tuning(facts["metric"], facts["mode"], **tune, trials=trials, chosen=once, choices=anew)
        return dataclasses.replace(self._study([outcomes.get(run, self._run(run)) for run in needed]), tuning=tuning)

    def _study(self, runs: list[Run]) -> Study:
        facts = self.facts
        compare = Compare(**facts["compare"])
        known = recorded_goal(compare.metric, [*facts["configs"].values()])
        return Study(
            **{key: facts[key] for key in ("name", "question", "config", "metric", "baseline", "arms", "seeds")},
            folder=self.folder,
            goal=compare.goal or known or "maximize",
            goals={name: recorded_goal(name, [*facts["configs"].values()]) or "maximize" for name in compare.then},
            compare=compare,
            split_varies=facts["split_varies"],
            runs=runs,
            factors=facts["factors"],
            plan_file=facts["file"],
            timing=self.timing,
        )

    def changes(self) -> list[str]:
        """Describes what has changed since the ablation began: code and question, results, claims."""
        now, found = self.look(), records.noted_changes(self.folder)
        for run in dict.fromkeys([*now.planned, *now.ended]):
            name = f"'{run.arm}' with {f'{run.trial} and ' if run.trial else ''}seed {run.seed}"
            if run in now.ended and now.ended[run].was_edited:
                found.append(f"{name}: {str(now.ended[run].cause).partition(': ')[2]}; the run does not count")
            found += records.lost_result(self._record(run))
            found += records.second_result(self._record(run), self.run_folder(run), self.measured(run), name)
        return found + records.changed_claims(self.folder, now.schedule.comparisons)

    def results(self, run: Planned) -> dict[str, Any] | None:
        """Returns the first results of a run, once they have a finite number for the metric that it is for."""
        found = read_json(self._record(run)).get("results") or read_results(self.run_folder(run))
        return None if self.lacking(run, found or {}) else found

    def lacking(self, run: Planned, results: Mapping[str, Any]) -> str:
        """Says which metrics that a run is for are no finite numbers in its results."""
        names = [self.measured(run), *(self.facts["compare"].get("then", {}) if run.trial is None else ())]
        values = {name: results.get(name, "not measured") for name in names}
        wrong = [name for name, one in values.items() if not (isinstance(one, int | float) and math.isfinite(one))]
        return ", ".join(f"{name} is {values[name]}" for name in wrong)

    def measured(self, run: Planned) -> str:
        """Returns the metric that a run is for: of validation for a trial."""
        metric: str = self.facts["compare"]["metric"] if run.trial is None else self.facts["metric"]
        return metric

    def failure(self, run: Planned) -> dict[str, Any] | None:
        """Returns how the run failed for good; None if it did not."""
        last = last_claim(self.claims_folder(run))
        end = read_json(last.with_suffix(".end")) if last is not None else {}
        if last is None or end.get("outcome") != "failed" or last.with_suffix(".retry").exists():
            return None
        return end

    def has_finished(self, run: Planned) -> bool:
        """Whether a run is done or has failed for good."""
        return self.results(run) is not None or self.failure(run) is not None

    def progress(self, run: Planned) -> int:
        """Returns the last step that the run has logged."""
        try:
            return max((row["step"] or 0 for row in read_metrics(self.run_folder(run))), default=0)
        except OSError:
            return 0

    def claim(self, run: Planned) -> Claim | None:
        """Claims a run for this process; returns None if another process has it or it has finished."""
        path = next_claim(self.claims_folder(run), self.leases)
        if path is None or self.has_finished(run):  # checked last, after the end of the claim before
            return None
        if (claim := make_claim(path, self.progress(run))) is None:
            return None
        if claim.silent_deaths() >= SILENT_DEATHS:
            cause = f"its process was killed {SILENT_DEATHS} times in a row, and the run got no further"
            claim.end("failed", kind="killed", cause=cause)
            return None
        return claim

    def claim_timing(self) -> Claim | None:
        """Claims the timing of the arms; returns None if another process has it or it is there."""
        path = next_claim(self.folder / "ledger" / "timing", self.leases)
        return None if path is None or self.timing else make_claim(path)

    def end_done(self, run: Planned, claim: Claim) -> bool:
        """Records an attempt as done if the run has results, which are kept before; returns whether it has."""
        results = self.results(run)
        if results is not None:
            self._keep(run, results)
            claim.end("done")
        return results is not None

    def end_attempt(self, run: Planned, claim: Claim, kind: Kind, cause: str) -> bool:
        """Records a failed attempt; returns whether the run has failed for good.

        An attempt that was asked to stop, as at a time limit of a cluster, counts only if it got no further.
        """
        counts = kind != "stopped" or self.progress(run) <= read_json(claim.path).get("progress", 0)
        ends = [read_json(path) for path in sorted(self.claims_folder(run).glob("*.end"), reverse=True)]
        since = itertools.takewhile(lambda end: end.get("outcome") != "failed", ends)  # a retry counts from zero
        alike = counts + sum(end.get("kind") == kind and end.get("counts", False) for end in since)
        final = bool(counts) and alike >= ATTEMPTS.get(kind, 1)
        claim.end("failed" if final else "again", kind=kind, cause=cause, counts=counts)
        return final

    def retry(self) -> list[str]:
        """Counts failed runs as missing again, in all processes; returns why others stay as they are.

        Trials are tried again only where an arm's tuning chose nothing: runs with what it chose may have begun.

        Another process may make an analysis without such a run just before it sees the mark. Whoever asked for the mark
        did not know it, as the analysis had lacked a result until then. So the pairs, which in all processes follow the
        seeds in order again, are not chosen by it. Claims that the other process has kept are named if they fall.
        """
        now, kept, diverged = self.look(), list[str](), dict[str, list[str]]()
        failed = {run: end for run in now.planned if (end := self.failure(run))}
        chosen = {run for place, arms in enumerate(now.chosen) for arm in arms for run in self._trials(arm, place)}
        seed_of = {trial: seed for place, seed in enumerate(self.facts["seeds"]) for trial in self.tune.seeds_of(place)}
        for run, end in failed.items():
            last = last_claim(self.claims_folder(run))
            if last is None or run in chosen:
                continue
            if end.get("kind") == "diverged":
                diverged.setdefault(run.arm, []).append(end["cause"])
            elif _is_replaced(now.schedule, run.arm, run.seed if run.trial is None else seed_of[run.seed]):
                kept.append(f"{run.name} is not tried again: a comparison was made with another seed in its place")
            else:
                create_once(last.with_suffix(".retry"), "")
        self._last = None
        why = "diverged, and would do so again: not tried again"
        alike = [f"{counted(len(causes), 'run')} of '{name}' {why} ({causes[0]})" for name, causes in diverged.items()]
        return [*alike, *kept] if failed else ["no run has failed: there is nothing to try again"]


def _is_replaced(schedule: Schedule, arm: str, seed: int) -> bool:
    """Whether an analysis went on without the failed run of an arm with a seed."""
    found = [one for one in schedule.comparisons if arm in one.terms and one.course.pairs]
    return any(seed < [*one.differences][one.course.pairs[-1] - 1] for one in found)


def open_ledger(
    folder: Path, plan: Plan, *, threads: int | None = None, create: bool = True, studies: Path | None = None
) -> tuple[Ledger, list[str]]:
    """Opens the ledger of a plan in a folder, or creates it; returns it with what has changed since it began.

    Args:
        folder: the folder.
        plan: the plan.
        threads: threads of each run, as sums over other chunks differ in their last digits; by default those that the
            ablation began with.
        create: whether anything is written.
        studies: register of the studies of the same question or arms; by default beside the folder.

    Raises:
        UserError: the folder is the ledger of another plan, or the plan or its config has changed.
    """
    path = folder / "ledger.json"
    now = _facts(plan, threads or read_json(path).get("threads", 1))
    if create:
        _create(path, {**now, "id": secrets.token_hex(4)})
    ledger = find_ledger(folder) or Ledger(folder, now)
    before = dict(ledger.facts)
    if studies is not None:
        ledger.facts["register"] = str(studies.absolute())
    if create and not os.access(ledger.studies.parent, os.W_OK):
        raise UserError(f"register={ledger.studies} cannot be written (give another file)")
    began, rules = ledger.facts["compare"], now["compare"]
    found = _changes(ledger, now, plan)
    raised, begun = rules["max_seeds"] > began["max_seeds"], bool(records.used_seeds(folder))
    rules["extended"] = [*began.get("extended", []), *([began["max_seeds"]] if raised and begun else [])]
    found += register.earlier(ledger.studies, folder, {**now, "id": ledger.facts.get("id")})
    if begun and ledger.facts["question"] != now["question"]:
        found.append(f'question was "{ledger.facts["question"]}", is "{now["question"]}"')
    ledger.writes = create
    moved = () if Path(ledger.facts["file"]).is_file() else ("file",)
    ledger.facts |= {key: now[key] for key in ("question", "compare", "seeds", "tune", *moved)}  # no rule has changed
    if create:
        for text in found:
            records.note_change(folder, text)
        if ledger.facts != before:
            part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")  # another process may do so too
            part.write_text(json.dumps(ledger.facts, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
    return ledger, found


def _create(path: Path, facts: dict[str, Any]) -> None:
    """Creates the ledger unless it is there."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"out={folder} cannot be made: {fault.strerror}") from fault
    others = [item for item in folder.iterdir() if item.name not in (".lock", ".gitignore") and item.suffix != ".part"]
    if others and not path.exists():  # in this order: a parallel process creates ledger.json first
        raise UserError(f"out={folder} holds other things than an ablation (choose a new folder)")
    create_once(path, json.dumps(facts, indent=2) + "\n")
    if find_ledger(folder) is None:
        raise UserError(f"{path} cannot be read")


def _changes(ledger: Ledger, now: dict[str, Any], plan: Plan) -> list[str]:
    """Returns the changes of code since an ablation began; more seeds than before are none.

    Raises:
        UserError: the plan or its config has changed.
    """
    began = ledger.facts
    found = [f"arm {arm} is new" for arm in now["arms"] if arm not in began["arms"]]
    found += [f"arm {arm} is gone" for arm in began["arms"] if arm not in now["arms"]]
    pairs = [("", _rules(began), _rules(now))]
    for arm, experiment in plan.experiments.items():
        before, config = began["configs"].get(arm, now["configs"][arm]), now["configs"][arm]
        pairs.append((f"arm {arm}: ", _as_now(before, experiment) if changes(before, config) else before, config))
    for place, first, second in pairs:
        found += [f"{place}{key} was {old}, is {value}" for key, (old, value) in changes(first, second).items()]
    most, least = (facts["compare"]["max_seeds"] for facts in (now, began))
    found += [f"compare.max_seeds was {least}, is {most}: it can be raised alone"] if most < least else []
    if found:
        seed = register.unused_seed(ledger.studies)
        unused = f"another question has its own --out and unused seeds, such as {{first: {seed}}}"
        advice = f"the plan differs from the one that {ledger.folder} began with: undo that ({unused})"
        raise UserError([*(f"{ledger.folder}: {text}" for text in found), advice])
    code = {key: (began["code"].get(key, value), value) for key, value in now["code"].items()}
    return [f"{key} was {before}, is {after}" for key, (before, after) in code.items() if before != after]


def _as_now(config: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Returns a config with the options that are newer at their defaults: a long study meets new versions."""
    try:
        completed = build(Merged(flatten(config), []), "summary", files=experiment.files)
    except UserError:  # it has options that are gone
        return config
    return _lasting(completed)


def find_ledger(folder: Path) -> Ledger | None:
    """Returns the ledger in a folder; None if there is none.

    Raises:
        UserError: an earlier version began it, with options that are gone.
    """
    facts = read_json(folder / "ledger.json")
    if gone := sorted({*facts.get("compare", {})} - {known.name for known in dataclasses.fields(Compare)}):
        options = f"its compare options {', '.join(gone)} are gone"
        raise UserError(f"{folder} is the ledger of an earlier version: {options} (go on with that version)")
    return Ledger(folder, facts) if "arms" in facts else None


def read_study(folder: Path) -> Study:
    """Reads an ablation with the outcomes of its runs so far.

    Raises:
        UserError: the folder holds no ablation.
    """
    with reading(folder):
        ledger = find_ledger(folder)
        if ledger is None:
            raise UserError(f"{folder} is no ablation: it holds no ledger.json")
        return dataclasses.replace(ledger.study(), plan_changed=ledger.changes())


def _facts(plan: Plan, threads: int) -> dict[str, Any]:
    """Returns the facts of a plan that the ledger keeps, as plain data."""
    facts = {
        **{key: getattr(plan, key) for key in ("name", "question", "file", "flags", "baseline", "arms", "factors")},
        "config": ", ".join(plan.config_files),
        "seeds": plan.seeds,
        "split_varies": plan.split_varies,
        "metric": plan.checkpoint.monitor,
        "mode": plan.checkpoint.mode,
        "compare": dataclasses.asdict(plan.compare),
        "tune": dataclasses.asdict(plan.tune) if plan.tune.seeds else None,
        "threads": threads,
        "configs": {arm: _lasting(experiment) for arm, experiment in plan.experiments.items()},
        "code": _code(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _lasting(experiment: Experiment) -> dict[str, Any]:
    """Returns the config of an arm without what identifies a run, as JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(experiment.config)))
    return {key: value for key, value in plain.items() if key not in PER_RUN}


def _code() -> dict[str, str]:
    """Returns what training depends on besides the config: sources of this package, versions of others, own files."""
    digest = hashlib.sha256()
    package = Path(vit_lightning.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name not in ("vit-lightning", "wandb")}
    own = {f"file {name}": digest for name, digest in digests().items()}
    return {"source of vit_lightning": digest.hexdigest()[:16], "python": platform.python_version()} | versions | own


def _rules(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the rules of a plan as a config has them: all must stay as they were before the first run."""
    tune = facts["tune"] or {"seeds": []}
    compare = dataclasses.asdict(Compare(**facts["compare"]))  # newer rules at their defaults, in a ledger without them
    return {
        "baseline": facts["baseline"],
        "threads": facts["threads"],
        "checkpoint": {"monitor": facts["metric"]},
        "seeds": {"first": facts["seeds"][0], "split": "varies" if facts["split_varies"] else "fixed"},
        "compare": {key: value for key, value in compare.items() if key not in MAY_CHANGE},
        "tune": {**tune, "replicates": bool(tune.get("replicates"))},
    }
