"""Names that are not there: what each may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

USUAL_NAMES = {
    "epochs": "max_epochs",
    "steps": "max_steps",
    "gpus": "devices",
    "grad_clip": "gradient_clip_val",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "seed": "seed_everything",
    "bs": "batch_size",
    "workers": "num_workers",
    "heads": "num_heads",
    **dict.fromkeys(("layers", "num_layers"), "depth"),
    **dict.fromkeys(("dim", "embed_dim", "hidden_size"), "emb_size"),
}
"""Names of options in other programs, and ours."""


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns the known names that a wrong one may have meant, the most likely first."""
    lower = {item.lower(): item for item in known}
    usual = USUAL_NAMES.get(name)
    word = usual if usual in lower else name.lower()
    swapped = [item for item in lower if sorted(item) == sorted(word)]
    found = swapped or difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)
    return [lower[item] for item in found]


def meant(name: str, known: Iterable[str]) -> str:
    """Returns a hint in brackets on the known name that a wrong one may have meant; empty where there is none."""
    return "".join(f" (did you mean {item}?)" for item in near(name, known)[:1])


def shown(value: Any) -> str:
    """Returns a value as a problem names it."""
    return "null" if value is None else str(value)


def unknown(name: str, value: Any, prefix: str, known: Collection[str], likely: Sequence[str] | None = None) -> str:
    """Returns the problem of an option that is not there, and whose likely name may be known."""
    if ":" in name:
        return f"{prefix}{name}: written {{key: value}} in a config, with a space, and --key=value as a flag"
    given = "" if isinstance(value, dict | list) else f"={shown(value)}"
    likely = near(name, known, 0.5) if likely is None else likely
    hint = f"did you mean {prefix}{likely[0]}?" if likely else f"choose {', '.join(known)}"
    return f"{prefix}{name}{given}: there is no such option{f' ({hint})' if known else ''}"
