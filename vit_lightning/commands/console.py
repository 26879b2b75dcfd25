"""Text in the terminal: printed by the first process alone, without Lightning's routine messages."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def say(text: str) -> None:
    """Prints a text unless it is empty; at once, so that a log file is never behind."""
    if text:
        print(text, flush=True)


def quiet() -> None:
    """Hides messages that Lightning prints at every start, and its advice that does not fit our data loaders."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        "Grad strides do not match",  # kernels with one channel under DDP
        ".*`srun` command is available.*",  # on a cluster's login node
        ".*LeafSpec.*",  # Lightning 2.6 with torch 2.15
    ):
        warnings.filterwarnings("ignore", message=message)


def print_summary(folder: Path, results: dict[str, Any]) -> None:
    """Prints accuracy, loss, time and the folder of a finished run."""
    rows = [("test", "test/acc", "test/loss"), ("validation", "val/acc", "val/loss")]
    lines = [
        f"{name:<11} accuracy {100 * float(results[acc]):6.2f} %   loss {float(results[loss]):.4f}"
        + _interval(results, acc)
        for name, acc, loss in rows
        if acc in results
    ]
    lines += [
        f"{'training':<11} {results['epochs']} epochs, {results['steps']} steps, {results['train_seconds']:.0f} s, "
        f"{results['images_per_second']:,.0f} images/s; total {results['seconds']:.0f} s",
        f"{'run':<11} {folder}",
        f"{'test again':<11} lightning test --ckpt {folder}",
    ]
    say("\n".join(lines))


def _interval(results: dict[str, Any], accuracy: str) -> str:
    low, high = (results.get(f"{accuracy}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"   95 % interval {100 * low:.1f} to {100 * high:.1f} %"
