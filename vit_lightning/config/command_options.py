"""Keys that one verb alone has; they are no part of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class VerbKey:
    """A key of one verb."""

    kind: Any
    default: Any
    text: str


VERB_KEYS: dict[str, dict[str, VerbKey]] = {
    "predict": {
        "top_k": VerbKey(int, 5, "classes that are said of each image that is named, the likeliest first"),
        "format": VerbKey(Literal["csv", "json"], "csv", "kind of the file with what is said of images that are named"),
    },
    "lr-find": {
        "min_lr": VerbKey(float, 1e-7, "rate of the first step"),
        "max_lr": VerbKey(float, 1.0, "rate of the last step"),
        "steps": VerbKey(int, 100, "optimizer steps from the one to the other"),
    },
    "scale-batch": {
        "max_batch_size": VerbKey(int, 8192, "size that is not gone beyond"),
        "steps": VerbKey(int, 3, "optimizer steps that each size is tried for"),
    },
}


WORDS = {"predict": "[IMAGES_OR_FOLDER ...] "}
"""What may stand behind a verb without a flag."""


def verb_key_problems(verb: str, given: dict[str, Any]) -> list[str]:
    """Values of a verb's own keys that cannot be."""
    least = {"top_k": 1, "max_batch_size": 1, "steps": 20 if verb == "lr-find" else 1}
    problems = [
        f"{name}={given[name]} must be at least {low}" for name, low in least.items() if given.get(name, low) < low
    ]
    if verb == "lr-find" and not 0.0 < given["min_lr"] < given["max_lr"] < float("inf"):
        problems.append(
            f"min_lr={given['min_lr']}, max_lr={given['max_lr']} must be above 0, the first below the second"
        )
    return problems
