"""Records of an ablation that nothing takes back: how each run first ended, what each analysis claimed, what changed.

    ledger/RUN/results.json          the results of a run as it first ended, and a checksum of its test predictions
    ledger/claims/ARM--OTHER-N.json  the claims of a comparison at its analysis of N pairs
    changes.jsonl                    changes of the question and the code, and earlier studies of question or arms

Numbers are those of the first result, whatever becomes of the run folder: what differs from it is named beside it.
"""

import contextlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_lightning.ablation.claims import create_once, last_claim
from vit_lightning.ablation.plan import slug
from vit_lightning.report.comparisons import ArmComparison
from vit_lightning.report.predictions import checksum, read_predictions
from vit_lightning.report.units import unit_of
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_results


def keep(path: Path, content: dict[str, Any]) -> None:
    """Keeps a record, unless there is one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        create_once(path, json.dumps(content, indent=2) + "\n")


def result_of(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of the result of a run."""
    return {"results": results, "predictions": checksum(read_predictions(folder))}


def second_result(record: Path, folder: Path, metric: str, name: str) -> list[str]:
    """Describes how the result in a run folder differs from the first one of the named run, where it does."""
    first, now = read_json(record), result_of(folder, read_results(folder) or {})
    before, after = (one.get("results", {}).get(metric) for one in (first, now))
    if not first or (before, first["predictions"]) == (after, now["predictions"]):
        return []
    unit = unit_of(metric)
    was, found = (unit.value(float("nan") if value is None else value) + unit.sign for value in (before, after))
    again = f"ended at {found}{' with other predictions, or has none now,' * (was == found)} when run again"
    lost = "was edited, or is damaged" if (folder / "results.json").exists() else "is gone"
    return [f"{name} {lost if after is None else again}; its first result, {was}, counts"]


def lost_result(record: Path) -> list[str]:
    """Describes that a run was done before its last attempt, or is without a record, where that is so."""
    done = [path for path in sorted(record.parent.glob("*.end")) if read_json(path).get("outcome") == "done"]
    last = last_claim(record.parent)
    if not done or (record.exists() and last is not None and last.stem == done[0].stem):
        return []
    return [f"{record.parent.name} was done in attempt {int(done[0].stem)}, whose result is lost"]


def keep_claims(folder: Path, comparisons: Sequence[ArmComparison]) -> None:
    """Keeps the claims of each analysis that has taken place, as they were made first."""
    for (metric, arm, other, n), claims in _claims(comparisons).items():
        further = "" if metric == comparisons[0].metric else f"{slug(metric)}--"
        path = folder / "ledger" / "claims" / f"{further}{slug(arm)}--{slug(other)}-{n:04}.json"
        keep(path, {"metric": metric, "arm": arm, "other": other, "n": n, "claims": claims})


def changed_claims(folder: Path, comparisons: Sequence[ArmComparison]) -> list[str]:
    """Describes the earlier claims that the results would not give any more, the first one of each comparison."""
    now, found = _claims(comparisons), dict[tuple[Any, ...], str]()
    for path in sorted((folder / "ledger" / "claims").glob("*.json")):
        kept = {"metric": comparisons[0].metric, **read_json(path)} if comparisons else {}
        metric, arm, other, n, claims = (kept.get(key) for key in ("metric", "arm", "other", "n", "claims"))
        if claims is not None and now.get((metric, arm, other, n)) != claims:
            said, instead = (", ".join(names or ()) for names in (claims, now.get((metric, arm, other, n))))
            stands = f"'{arm}' was claimed to be {said} against '{other}', which stands"
            text = stands if said else f"nothing was claimed of '{arm}' against '{other}'"
            by = "" if metric == comparisons[0].metric else f" by {metric}"
            text = f"after {n} pairs {text}{by}; by the results as they are now: {instead or 'nothing'}"
            found.setdefault((metric, arm, other), text)
    return [*found.values()]


def _claims(comparisons: Sequence[ArmComparison]) -> dict[tuple[Any, ...], list[str]]:
    """Returns the claims of all analyses up to those behind the numbers, by metric, arm, other arm and pairs."""
    return {
        (one.metric, one.arm, one.other, n): sorted(name for name, made in one.course.claims.items() if made[place])
        for one in comparisons
        if one.analysis is not None
        for place, n in enumerate(one.course.pairs[: one.analysis + 1])
    }


def note_change(folder: Path, text: str) -> None:
    """Notes a change, once."""
    if text not in noted_changes(folder):
        add_line(folder / "changes.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "change": text})


def noted_changes(folder: Path) -> list[str]:
    """Returns the changes that were noted, in order."""
    return list(dict.fromkeys(one["change"] for one in read_lines(folder / "changes.jsonl") if "change" in one))


def add_line(path: Path, content: dict[str, Any]) -> None:
    """Adds a line to a file of JSON, which other processes may write too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(content)}\n")  # the line before may be torn


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of JSON in order; a torn line is none."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


def used_seeds(folder: Path) -> set[int]:
    """Returns the seeds of an ablation's runs that have begun."""
    runs = [*folder.glob("runs/*"), *folder.glob("ledger/*")]
    return {int(found[1]) for run in runs if (found := re.search(r"-seed(\d+)$", run.name))}
