"""Text in the terminal: printed by the first process alone, without Lightning's routine messages."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from vit_lightning.config.own_files import trust_flag
from vit_lightning.metric_facts import Stage, facts_of
from vit_lightning.storage.folder import FULL


@rank_zero_only
def say(text: str) -> None:
    """Prints a text unless it is empty; at once, so that a log file is never behind."""
    if text:
        try:
            print(text, flush=True)
        except OSError as fault:  # a log on a full disk, or a reader that has gone, ends no training
            if fault.errno not in (*FULL, errno.EPIPE):
                raise


def row(name: str, text: str) -> str:
    """Returns a line of the start or the end of a run."""
    return f"{name:<11} {text}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quiet() -> None:
    """Hides messages that Lightning prints at every start, and its advice that does not fit our data loaders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # printed only when the config asks for it
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)
    for message in (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        "Grad strides do not match",  # kernels with one channel under DDP
        ".*`srun` command is available.*",  # on a cluster's login node
        ".*LeafSpec.*",  # Lightning 2.6 with torch 2.15
    ):
        warnings.filterwarnings("ignore", message=message)


def print_summary(folder: Path, results: dict[str, Any]) -> None:
    """Prints metrics, time and the folder of a finished run."""
    best = f"   (best checkpoint, step {results['best_step']:,} of {results['steps']:,})"
    lengths = counted(results["epochs"], "epoch"), counted(results["steps"], "step")
    lines = [
        stage_line("test", results),
        (line := stage_line("val", results)) and line + best,
        row(
            "training",
            f"{', '.join(lengths)}, {results['train_seconds']:.0f} s, "
            f"{results['images_per_second']:,.0f} images/s; in all {results['seconds']:.0f} s",
        ),
        row("run", str(folder)),
        row("test again", f"lightning test --ckpt {folder}{trust_flag()}"),
    ]
    say("\n".join(filter(None, lines)))


def stage_line(stage: Stage, results: Mapping[str, Any]) -> str:
    """Returns the metrics of a stage in one line, with the interval of the accuracy; an empty text without any."""
    names = [name for name in results if name.startswith(f"{stage}/") and not name.endswith(("/acc_low", "/acc_high"))]
    shown = []
    for name in sorted(names, key=lambda name: name.endswith("/loss")):  # the loss comes last
        value, facts = float(results[name]), facts_of(name)
        label = name.removeprefix(f"{stage}/") if facts is None else facts.label
        low, high = (results.get(f"{name}_{end}") for end in ("low", "high"))
        between = "" if low is None or high is None else f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
        shown.append(f"{label} {f'{100 * value:.2f} %' if facts and facts.percent else f'{value:.4f}'}{between}")
    return row({"val": "validation"}.get(stage, stage), ", ".join(shown)) if shown else ""
