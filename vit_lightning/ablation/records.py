"""Records of an ablation that nothing takes back: how each run first ended, what each analysis claimed, what changed.

    ledger/RUN/results.json          the results of a run as it first ended, and a checksum of its test predictions
    ledger/claims/ARM--OTHER-N.json  the claims of a comparison at its analysis of N pairs
    changes.jsonl                    changes of the question and the code, and earlier studies of the arms

Numbers are those of the first result, whatever becomes of the run folder: what differs from it is named beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_lightning.ablation.claims import create_once
from vit_lightning.ablation.plan import slug
from vit_lightning.report.comparisons import ArmComparison, read_predictions
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_results


def first_results(record: Path) -> dict[str, Any]:
    """Returns the results with which a run first ended; empty before that."""
    found: dict[str, Any] = read_json(record / "results.json").get("results", {})
    return found


def keep_first(record: Path, folder: Path, results: dict[str, Any]) -> None:
    """Keeps the results of a run, unless it has ended before.

    Args:
        record: folder of the run in the ledger.
        folder: run folder.
        results: contents of its ``results.json``.
    """
    if not (record / "results.json").exists():
        record.mkdir(parents=True, exist_ok=True)
        create_once(
            record / "results.json", json.dumps({"results": results, "predictions": _digest(folder)}, indent=2) + "\n"
        )


def second_result(record: Path, folder: Path, metric: str) -> str:
    """Describes how the result in a run folder differs from the first one; an empty text where it does not."""
    first, now = read_json(record / "results.json"), read_results(folder)
    if not first or now is None:
        return f"{folder.name} has no results any more: those of the ledger count" if first else ""
    values = first["results"].get(metric), now.get(metric)
    if values[0] != values[1]:
        return f"{folder.name} has a second result: {metric} was {values[0]} at first, which counts, and is {values[1]}"
    same = first["predictions"] == _digest(folder)
    return "" if same else f"{folder.name} has other test predictions than those with which it first ended"


def _digest(folder: Path) -> str:
    """Returns a checksum of a run's test predictions; an empty text without any."""
    arrays = read_predictions(folder) or ()
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() if arrays else ""


def keep_claims(folder: Path, comparisons: Sequence[ArmComparison]) -> None:
    """Keeps the claims of each analysis that has taken place, as they were made first.

    Args:
        folder: folder of the ablation.
        comparisons: its comparisons.
    """
    for one in comparisons:
        for n, claims in _claims(one).items():
            path = folder / "ledger" / "claims" / f"{slug(one.arm)}--{slug(one.other)}-{n:04}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                create_once(path, json.dumps({"arm": one.arm, "other": one.other, "n": n, "claims": claims}) + "\n")


def changed_claims(folder: Path, comparisons: Sequence[ArmComparison]) -> list[str]:
    """Describes the earlier claims that the results would not give any more, the first one of each comparison."""
    now, found = {(one.arm, one.other): _claims(one) for one in comparisons}, {}
    for path in sorted((folder / "ledger" / "claims").glob("*.json")):
        kept = read_json(path)
        pair, n, claims = (str(kept.get("arm")), str(kept.get("other"))), int(kept.get("n", 0)), kept.get("claims")
        later = now.get(pair, {}).get(n)
        if pair in now and later != claims and pair not in found:
            said, instead = (", ".join(names or ()) or "nothing" for names in (claims, later))
            text = f"after {n} pairs {pair[0]} was claimed to be {said} against {pair[1]}, which stands"
            found[pair] = f"{text}; by the results as they are now: {instead}"
    return [*found.values()]


def _claims(one: ArmComparison) -> dict[int, list[str]]:
    """Returns the claims of the analyses of a comparison up to the one behind its numbers, by their pairs."""
    last = -1 if one.analysis is None else one.analysis
    return {
        n: sorted(name for name, made in one.course.claims.items() if made[place])
        for place, n in enumerate(one.course.pairs[: last + 1])
    }


def note_change(folder: Path, text: str) -> None:
    """Notes a change, once."""
    if text not in noted_changes(folder):
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "change": text})
        with (folder / "changes.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # the line before may be torn


def noted_changes(folder: Path) -> list[str]:
    """Returns the changes that were noted, in order."""
    try:
        lines = (folder / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[str] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # empty, or torn
            found.append(json.loads(line)["change"])
    return list(dict.fromkeys(found))


def used_seeds(folder: Path) -> set[int]:
    """Returns the seeds of an ablation's runs that have begun."""
    runs = [*folder.glob("runs/*"), *folder.glob("ledger/*")]
    return {int(found[1]) for run in runs if (found := re.search(r"-seed(\d+)$", run.name))}


def earlier_studies(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Names the ablations beside a new one that have compared its arms on its seeds: alpha is spent there too."""
    found, configs = [], [*facts["configs"].values()]
    for path in sorted(folder.parent.glob("*/ledger.json")):
        theirs = [config for config in read_json(path).get("configs", {}).values() if config in configs]
        used = used_seeds(path.parent)
        if path.parent.name != folder.name and len(theirs) > 1 and used & {*facts["seeds"]}:
            unused = f"seeds: {{first: {max(used) + 1}}} would be unused"
            text = f"a second study of the question: {path.parent} has compared these arms on these seeds"
            found.append(f"{text} ({unused})")
    return found
