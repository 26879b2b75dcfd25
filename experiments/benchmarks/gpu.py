"""All that is open for want of a GPU, in order of worth, as far as the minutes go; the next call continues there.

    python experiments/benchmarks/gpu.py --minutes 8 --data FOLDER    CIFAR-10 as Parquet files or train/CLASS/*.jpg
    python experiments/benchmarks/gpu.py --list                       what is done and what is open, and seconds of each
    python experiments/benchmarks/gpu.py --again "Steps of B/16"      what is done once more
    python experiments/benchmarks/gpu.py --device cpu --small         all of it, small, as a proof on any machine

Each item is a process of its own and one JSON file, with rows, hardware, versions and command, in ``--out``, by default
``gpu/`` beside this script, and in ``--runs``, beside the trainings that a later call resumes; ``gpu.md`` has them as
tables. Nothing needs a network; README.md beside this script says what each item answers and what has to be brought.
Exit code 1 if an item has failed; a later call tries it again after all others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu_predictions import NETWORKS, Machine, predict

from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import write_whole

HERE = Path(__file__).resolve().parent
EXPERIMENTS, REPOSITORY = HERE.parent, HERE.parents[1]
Rows = list[dict[str, str]]


class Missing(Exception):
    """Says what an item needs and lacks."""


class Unfinished(Exception):
    """Says how far an item came that the next call resumes."""


@dataclass(frozen=True)
class Place:
    """Where and until when items run; ``folders`` are those of the image sets that were given."""

    device: torch.device
    small: bool
    runs: Path
    end: float
    folders: Mapping[str, Path | None]

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Item:
    """Something to measure.

    Args:
        name: of the item.
        seconds: what it is expected to take on an H100, or what a training needs to get on.
        run: returns its rows, or a dictionary with ``rows`` and more to keep.
    """

    name: str
    seconds: float
    run: Callable[[Place], Rows | dict[str, Any]]

    @property
    def file(self) -> str:
        """Name of its file, without a suffix."""
        return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in self.name.lower())


START = 15.0
"""Seconds in which a process has imported all and the GPU is ready."""
COMPILE = 45.0
"""Seconds in which a step of a network is compiled, forward and backward, without a cache."""


def budget(*networks: str, steps: int = 0, compiled: int = 0, processes: int = 1, more: float = 0.0) -> float:
    """Returns the seconds of an item: processes that start, code that is made, and steps at twice the predicted time.

    Args:
        networks: those of which that many steps are taken.
        steps: steps of each.
        compiled: networks that are compiled one after the other, without a cache.
        processes: processes that start one after the other.
        more: seconds that are limited by the item itself.
    """
    taken = sum(steps * 2 * predict(NETWORKS[name], Machine()).seconds for name in networks)
    return round(START * processes + COMPILE * compiled + taken + more, -1)


def _of(module: str, function: str, **arguments: Any) -> Callable[[Place], Any]:
    """Returns a function of a module that is imported in the item's own process: a missing package fails it alone."""
    return lambda place: getattr(importlib.import_module(module), function)(place, **arguments)


def _trained_configs() -> Iterator[Item]:
    images = {"cifar10": "data", "cifar100": "cifar100", "imagenet": "imagenet"}
    names = [f"cifar10_{name}" for name in ("vit_tiny", "resnet18", "vit_small")]
    names += [f"cifar100_{name}" for name in ("vit_tiny", "vit_small")]
    names += [f"imagenet/{path.stem}" for path in sorted((EXPERIMENTS / "imagenet").glob("*.yaml"))]
    for name in names:
        given = images[name.partition("/")[0].partition("_")[0]]
        yield Item(f"{name}.yaml", 90, _of("gpu_trainings", "train", config=name, images=given))


_steps, _trainings = partial(_of, "gpu_steps"), partial(_of, "gpu_trainings")
ITEMS = (
    Item("Machine", budget(more=20), _steps("machine")),
    Item("Waits of a step", budget(processes=3, more=60), _steps("waits")),
    Item("Waits of a run", budget(compiled=1, more=30), _trainings("waits")),
    Item("Caches of compiled code", budget(compiled=3), _steps("warm")),
    Item("Kernels of a step", budget(*NETWORKS, steps=40, compiled=2), _steps("kernels")),
    *(
        Item(f"Steps of {name}", budget(compiled=1, more=55), _steps("steps", network=name))
        for name in ("B/16", "L/16", "S/16", "Ti/4")
    ),
    Item("Same bits", budget("Ti/4", "Ti/4", "S/16", "S/16", steps=150, compiled=4), _steps("same_bits")),
    *(
        Item(f"Resume, {name}", budget(processes=processes, compiled=compiled), _trainings("faults", chosen=chosen))
        for name, processes, compiled, chosen in (
            ("compiled", 6, 2, "deterministic_kernels and compiled"),
            ("bf16", 13, 0, "deterministic_kernels and bf16"),
            ("not deterministic", 6, 0, "without_deterministic"),
            ("float32", 13, 0, "deterministic_kernels and float32"),
        )
    ),
    Item("Ranks", budget(processes=6, compiled=1), _trainings("ranks")),
    Item("JPEG", budget(processes=3, more=60), _trainings("photographs")),
    Item("CIFAR-10", 120, _trainings("goal")),
    *(
        Item(f"Forms of {name}", budget(compiled=4, more=45), _steps("forms", network=name))
        for name in ("Ti/4", "B/16")
    ),
    Item("Attention", budget(more=30), _steps("attention")),
    Item("Augmentation", budget(compiled=3, more=60), _steps("augment")),
    Item("Compile and memory", budget("B/16", steps=300, compiled=2), _steps("memory")),
    Item("Monitoring", budget(more=60), _steps("monitor")),
    *_trained_configs(),
)


# ---- one call


def _attempt(item: Item, place: Place, answers: Connection) -> None:
    os.setsid()  # so that it ends with all that it started
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        found = item.run(place)
        about = describe_environment()
        hardware = ", ".join(about["gpus"]) if place.on_gpu else about["processor"]
        commit = (about["git"]["package"] or about["git"]["working folder"] or {}).get("commit", "unknown")
        versions = {"commit": commit[:7], "python": about["python"], **about["packages"]}
        with contextlib.suppress(PackageNotFoundError):
            versions |= {"timm": version("timm")}
        result = {"status": "done", **(found if isinstance(found, dict) else {"rows": found})}
        result |= {"hardware": f"{hardware}, {about['cores']} cores", "versions": versions}
    except (Missing, Unfinished) as why:
        result = {"status": "open", "note": str(why)}
    except BaseException as fault:
        traceback.print_exc()
        result = {"status": "failed", "note": f"{type(fault).__name__}: {fault}"}
    answers.send(result)


def attempt(item: Item, place: Place) -> dict[str, Any]:
    """Runs an item in a process of its own, which is ended with the minutes."""
    context, began, left = multiprocessing.get_context("fork"), time.monotonic(), place.left
    answer, answers = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(item, place, answers))
    process.start()
    answers.close()
    result = {"status": "failed", "note": f"needs more than the {left:.0f} s that were left"}
    try:
        if answer.poll(max(0.0, left)):
            result = answer.recv()
    except EOFError:
        process.join()
        result["note"] = f"its process ended with {process.exitcode}"
    finally:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
        process.join()
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def read_state(items: Sequence[Item], folders: Sequence[Path]) -> dict[str, Any]:
    """Returns what was found before, of several copies: what is done, else the last attempt."""
    known: dict[str, Any] = {}
    for item in items:
        files = [folder / f"{item.file}.json" for folder in folders]
        if copies := [json.loads(file.read_text()) for file in files if file.is_file()]:
            known[item.name] = max(copies, key=lambda copy: (copy["status"] == "done", copy["ended"]))
    return known


def tables(state: Mapping[str, Any], items: Sequence[Item]) -> str:
    """Returns all results as Markdown."""
    text = ["# Measured on a GPU", "", "Written by `python experiments/benchmarks/gpu.py`.", ""]
    for item in items:
        entry = state.get(item.name, {"status": "open"})
        text += [f"## {item.name}", ""]
        if entry["status"] == "done":
            columns = list(dict.fromkeys(key for row in entry["rows"] for key in row))
            lines = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in entry["rows"])]
            text += ["| " + " | ".join(line) + " |" for line in lines]
            text += ["", f"{entry['hardware']}; {', '.join(f'{k} {v}' for k, v in entry['versions'].items())}; "]
            text[-1] += f"`{entry['command']}`, {entry['seconds']} s, {entry['ended'][:10]}"
        else:
            note = entry.get("note", "").splitlines()
            text += ["Open" + (f" ({entry['status']}: {note[-1]})" if note else "") + "."]
        text.append("")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None, items: Sequence[Item] = ITEMS) -> int:
    names = [item.name for item in items]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the call has ended")
    parser.add_argument("--list", action="store_true", help="only say what is done and what is open")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="no other items")
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="NAME", help="also if they are done")
    parser.add_argument("--device", help="cuda or cpu; by default cuda where there is one")
    parser.add_argument("--small", action="store_true", help="everything at a size that a CPU does in seconds")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10: Parquet files, or train/CLASS and test/CLASS")
    parser.add_argument("--cifar100", type=Path, help="folder with CIFAR-100, likewise")
    parser.add_argument("--imagenet", type=Path, help="folder with train/CLASS/*.JPEG and test/CLASS/*.JPEG")
    parser.add_argument("--out", type=Path, help="folder of the results; by default gpu/ beside this script")
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs/gpu", help="folder of the trainings")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    end = time.monotonic() + 60 * given.minutes
    # CUDA must not start in this process, whose children use it: the driver's files tell
    there = any(Path("/dev").glob("nvidia[0-9]*"))
    device = torch.device(given.device or ("cuda" if there else "cpu"))
    runs = given.runs.resolve()
    name = "gpu" if device.type == "cuda" and not given.small else "gpu_trial"
    # results of a trial do not stay beside the script
    out = given.out.resolve() if given.out else HERE / name if name == "gpu" else runs / name
    kept = [out, runs / name]
    state = read_state(items, [HERE / name, *kept])
    sets = {"data": given.data, "cifar100": given.cifar100, "imagenet": given.imagenet}
    place = Place(device, given.small, runs, end, {k: v and v.resolve() for k, v in sets.items()})
    command = shlex.join(["python", "experiments/benchmarks/gpu.py", *(arguments or sys.argv[1:])])
    chosen = [item for item in items if item.name in (*given.only, *given.again)]
    for item in sorted(chosen, key=lambda item: state.get(item.name, {}).get("status") == "failed"):
        entry = state.get(item.name, {"status": "open"})
        spent = entry["seconds"] if entry["status"] == "failed" else 0
        needed = 0 if given.small else min(max(item.seconds, spent), 54 * given.minutes)
        is_done = entry["status"] == "done" and item.name not in given.again
        if given.list:
            print(f"{item.name}: {entry['status']}, {item.seconds:.0f} s {entry.get('note', '')}".rstrip())
        elif is_done:
            print(f"{item.name}: done")
        elif needed > place.left:
            print(f"{item.name}: later, wants {needed:.0f} s of the {place.left:.0f} s left")
        else:
            entry = {**attempt(item, place), "command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            state[item.name] = entry
            for folder in kept:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / f"{item.file}.json", json.dumps(entry, indent=2) + "\n")
                write_whole(folder / "gpu.md", tables(state, items))
            print(
                f"{item.name}: {entry['status']} after {entry['seconds']} s {entry.get('note', '')}".rstrip(),
                flush=True,
            )
    if not given.list:
        print(tables(state, items))
    return int(any(state.get(item.name, {}).get("status") == "failed" for item in chosen))


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules[__name__]  # the items import it by this name
    sys.exit(main())
