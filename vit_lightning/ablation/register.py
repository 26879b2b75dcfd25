"""The register of the studies in a folder: whoever asks again is named, with what all claims so far may err together.

    studies.jsonl   a line for each study at its first result: its folder, question, arms, seeds and alpha

Two studies ask the same if they share their question, or an arm: its model and its images, whatever else differs.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_lightning.ablation import records
from vit_lightning.storage.folder import read_json

FILE = "studies.jsonl"
IMAGES = ("class_path", "root", "path", "name")
"""Options of ``data`` that say which images an arm has."""


def entries(path: Path) -> list[dict[str, Any]]:
    """Returns the studies of a register, in the order in which they began; a torn line is none."""
    return [one for one in records.read_lines(path) if "study" in one]


def enter(path: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    """Enters a study that has a result, unless it is there."""
    if not _place(entries(path), folder, facts):
        entry = {"study": str(folder.resolve()), "id": facts.get("id"), "question": facts["question"]}
        entry |= {"arms": _arms(facts), "last_seed": facts["seeds"][-1], "alpha": facts["compare"].get("alpha", 0.05)}
        records.add_line(path, entry)


def earlier(path: Path, folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Names the studies before this one that ask the same, and the error of all their claims together."""
    known = entries(path)
    own, question, before = _place(known, folder, facts), facts["question"], dict[tuple[str, str], float]()
    copied = [one["study"] for one in known if _is_a_copy(one, folder, facts)]
    for one in known[: own - 1] if own else known:
        if {*_arms(facts)} & {*one["arms"]} or (question and question == one["question"]):
            before[one["study"], str(one["id"])] = one["alpha"]
    found = [f"a copy of {Path(place).name}, which goes on by itself: claims of both count" for place in copied]
    if before:
        names = ", ".join(Path(place).name for place, _ in before)
        error = min(1.0, sum(before.values()) + facts["compare"].get("alpha", 0.05))
        which = "a second study" if len(before) == 1 else f"study {len(before) + 1}"
        text = f"{which} of the question or of an arm ({names} before it)"
        found.append(f"{text}: any claim of all of them is false with a probability of up to {100 * error:.3g} %")
    return found


def unused_seed(path: Path) -> int:
    """Returns a seed above all those of the studies in a register, also where their maximum was raised since."""
    ends = [read_json(Path(one["study"], "ledger.json")).get("seeds") or [one["last_seed"]] for one in entries(path)]
    return 1 + max((seeds[-1] for seeds in ends), default=-1)


def _place(known: list[dict[str, Any]], folder: Path, facts: Mapping[str, Any]) -> int:
    """Returns the place of a study among those of a register, from 1 on; 0 where it is not among them."""
    same = [one["id"] == facts.get("id") and not _is_a_copy(one, folder, facts) for one in known]
    return same.index(True) + 1 if True in same else 0


def _is_a_copy(one: Mapping[str, Any], folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a study has the id of another one in a folder that is still there; one that was moved has not."""
    there = one["study"] == str(folder.resolve()) or not Path(one["study"], "ledger.json").is_file()
    return one["id"] == facts.get("id") and not there


def _arms(facts: Mapping[str, Any]) -> list[str]:
    """Returns a checksum of the model and the images of each arm."""
    found = []
    for config in facts["configs"].values():
        data = config.get("data") or {}
        images = {**data, **(data.get("init_args") or {})}
        kept = [config.get("model"), *(images.get(name) for name in IMAGES)]
        found.append(hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16])
    return sorted({*found})
