"""Queue of what is open for want of a GPU: items of at most nine minutes, start and compiling counted.

    python experiments/benchmarks/gpu.py --next --data FOLDER      calls that are open: minutes, what to bring, command
    python experiments/benchmarks/gpu.py --data FOLDER             does as many open items as nine minutes allow
    python experiments/benchmarks/gpu.py --device cpu --small      all of it, small, as a proof on any machine

Each item is a process of its own. It is done when its JSON file, with rows, hardware, versions and command, lies in
``gpu/`` beside this script, where ``gpu.md`` has all as tables; without that file it is run again. Trainings that the
minutes cut off are resumed from the folder of ``--runs``, or on another machine from the pieces in that of ``--out``,
with the data in a folder of the same name. Nothing needs a network; README.md beside this script lists what items
answer. Exit code 1 if an item has failed.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import write_whole

HERE = Path(__file__).resolve().parent
EXPERIMENTS, REPOSITORY = HERE.parent, HERE.parents[1]
CARRIED = 64 * 2**20
"""Bytes that a lent machine takes in a call, the repository's files among them."""
Rows = list[dict[str, str]]


class Unfinished(Exception):
    """Says how far an item came that the next call resumes."""


@dataclass(frozen=True)
class Place:
    """Where and until when items run.

    Args:
        device: of the trainings.
        small: whether everything is small, for a trial.
        runs: folder of the trainings.
        end: when the minutes end, by the monotonic clock.
        data: the folder with CIFAR-10 that was given.
        kept: folder for what an item leaves beside its rows, and finds there of an earlier call.
    """

    device: torch.device
    small: bool
    runs: Path
    end: float
    data: Path | None = None
    kept: Path = Path()

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
        seconds: predicted for one H100 or H200, with start and compiling.
        run: returns its rows, or a dictionary with ``rows`` and more to keep.
        data: whether it reads CIFAR-10.
        packages: what it needs that comes neither with torch, torchvision, lightning nor timm.
        gpus: devices that it needs.
    """

    name: str
    seconds: float
    run: Callable[[Place], Rows | dict[str, Any]]
    data: bool = False
    packages: tuple[str, ...] = ()
    gpus: int = 1

    @property
    def file(self) -> str:
        """Name of its file."""
        return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in self.name.lower()) + ".json"


def _of(module: str, function: str, **arguments: Any) -> Callable[[Place], Any]:
    """Returns a function of a module that is imported in the item's own process: a missing package fails it alone."""
    return lambda place: getattr(importlib.import_module(module), function)(place, **arguments)


_steps, _trainings = partial(_of, "gpu_steps"), partial(_of, "gpu_trainings")
FIT = ("docstring-parser",)
PARQUET = (*FIT, "datasets==5.2.0", "dill<0.4.2", "multiprocess<0.70.20")  # by what datasets asks for
GRAPHS: dict[str, Any] = {"trainer.precision": "bf16-mixed", "compile": "reduce-overhead", "wandb.mode": "disabled"}
PUBLISHED: dict[str, Any] = {
    **{**GRAPHS, "data.val_share": 0.0016, "checkpoint.every_n_epochs": 50, "pictures_every_n_epochs": 0},
    "trainer.callbacks": [{"class_path": "compact_transformers.TestCurve", "every_n_epochs": 10}],
}
"""390 whole batches of 128 are an epoch: a smaller one would be compiled for itself."""
GOAL: dict[str, Any] = {
    **{**GRAPHS, "data.batch_size": 1000, "data.val_share": 0.02, "data.mixing_off_epoch": 300},
    "data.augment": [
        {"class_path": "RandomCrop", "padding": 4},
        *({"class_path": name} for name in ("HorizontalFlip", "TimmRandAugment")),
        {"class_path": "RandomErasing", "p": 0.25, "scale": [0.02, 0.4], "fill": "black"},
    ],
    "data.mixing": [{"class_path": name, "alpha": 1.0, "p": 0.25} for name in ("MixUp", "CutMix")],
    **{"optimizer.name": "muon", "optimizer.lr": 4e-3, "optimizer.warmup_epochs": 20, "ema.decay": 0.999},
    **{"trainer.max_epochs": 330, "trainer.gradient_clip_val": None, "trainer.check_val_every_n_epoch": 20},
    **{"checkpoint.every_n_epochs": 50, "pictures_every_n_epochs": 0},
}
"""For cifar10_vit_tiny.yaml: SPT has mixing and erasing, CCT RandAugment, cifar10_cpu.yaml Muon; 49 whole batches."""
SEARCHED: dict[str, Any] = {
    **{**GRAPHS, "data.test_share": 0.1, "data.val_share": 1 / 45},
    **{"checkpoint.every_n_epochs": 50, "pictures_every_n_epochs": 0},
}
"""44 whole batches of 1,000."""
PRETRAINED: dict[str, Any] = {
    **{"wandb.mode": "disabled", "data.batch_size": 1000, "data.val_share": 0.02},
    **{"checkpoint.every_n_epochs": 10, "pictures_every_n_epochs": 0},
}
ITEMS = (
    Item(
        "ViT-Lite and CVT",
        500,
        _trainings("study", plan="compact_transformers", workers=4, options=PUBLISHED),
        True,
        PARQUET,
    ),
    *(
        Item(
            f"Workers, {network}{how}",
            seconds,
            _trainings("workers", network=network, compiled=compiled),
            True,
            PARQUET,
        )
        for how, compiled, seconds in (
            (", graphs", "reduce-overhead", 170),
            ("", "false", 150),
            (", compiled", "true", 250),
        )
        for network in ("small", "ViT-Lite")
    ),
    *(Item(f"Same bits of {name}", 400, _steps("same_bits", network=name)) for name in ("Ti/4", "S/16")),
    *(
        Item(name, 500, _trainings("trainings", config=config, seeds=3, options=PUBLISHED), True, PARQUET)
        for name, config in (("SPT's ViT", "cifar10_spt_vit"), ("CCT", "cifar10_cct"))
    ),
    Item(
        "CIFAR-10, search",
        500,
        _trainings("study", plan="cifar10_95", workers=2, options=SEARCHED, tests=False),
        True,
        PARQUET,
    ),
    Item("CIFAR-10", 520, _trainings("trainings", config="cifar10_vit_tiny", seeds=3, options=GOAL), True, PARQUET),
    Item(
        "MAE",
        500,
        _trainings("pretrained", config="cifar10_mae_36", then="cifar10_mae_36_finetune", seeds=2, options=PRETRAINED),
        True,
        PARQUET,
    ),
    *(
        Item(
            f"MAE, {share} % of the labels",
            530,
            _trainings(
                "study",
                plan=f"pretraining_{share}",
                workers=2,
                options={
                    **{**PRETRAINED, "data.batch_size": 490, "trainer.max_epochs": epochs},
                    **{"trainer.check_val_every_n_epoch": epochs // 10, "model.patch_projection": "conv"},
                },
                config="cifar10_mae_36_finetune",
                encoder="cifar10_mae_36",
            ),
            True,
            PARQUET,
        )
        for share, epochs in ((1, 1500), (10, 300), (100, 60))
    ),
    Item("Forms of B/16", 270, _steps("forms", network="B/16")),
    Item("Augmentation", 200, _steps("augment")),
    Item("Compile and memory", 200, _steps("memory")),
    Item("Monitoring", 80, _steps("monitor"), packages=FIT),
    Item("Ranks", 150, _trainings("ranks"), packages=FIT, gpus=2),
    Item("Machine", 15, _steps("machine")),
    Item("Waits of a step", 40, _steps("waits")),
    Item("Waits of a run", 100, _trainings("waits"), packages=FIT),
    Item("Caches of compiled code", 100, _steps("warm")),
    Item("Kernels of a step", 130, _steps("kernels")),
    *(Item(f"Steps of {name}", 290, _steps("steps", network=name)) for name in ("B/16", "L/16", "S/16", "Ti/4")),
    *(
        Item(f"Resume, {name}", seconds, _trainings("faults", chosen=chosen), packages=FIT)
        for name, seconds, chosen in (
            ("compiled", 150, "deterministic_kernels and compiled"),
            ("bf16", 90, "deterministic_kernels and bf16"),
            ("not deterministic", 90, "without_deterministic"),
            ("float32", 90, "deterministic_kernels and float32"),
        )
    ),
    Item("JPEG", 30, _trainings("photographs")),
    Item("Forms of Ti/4", 270, _steps("forms", network="Ti/4")),
    Item("Attention", 15, _steps("attention")),
)
"""Those that are open come first, in order of worth."""


HOW = (
    "Run these in order, in the root of this repository on a machine with a CUDA GPU, where each finds what it says to "
    "bring. Results go to experiments/benchmarks/gpu and, with what is unfinished, to --out: copy both back here, and "
    "--next leaves out what is done."
)
"""What --next says first."""


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
    except Unfinished as why:
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


def tables(items: Sequence[Item], folder: Path) -> str:
    """Returns the results in a folder as Markdown."""
    text = ["# Measured on a GPU", "", "Written by `python experiments/benchmarks/gpu.py`.", ""]
    for item in items:
        if not (folder / item.file).is_file():
            continue
        entry = json.loads((folder / item.file).read_text())
        columns = list(dict.fromkeys(key for row in entry["rows"] for key in row))
        lines = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in entry["rows"])]
        text += [f"## {item.name}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]
        took = f"{entry['seconds']} s" + (f" (predicted {entry['predicted']:.0f})" if "predicted" in entry else "")
        versions = ", ".join(f"{name} {number}" for name, number in entry["versions"].items())
        text += [f"{entry['hardware']}; {versions}; `{entry['command']}`, {took}, {entry['ended'][:10]}", ""]
    return "\n".join(text)


def calls(items: Sequence[Item], minutes: float, data: Path | None, out: Path | None) -> Iterator[str]:
    """Yields the calls that do items: the minutes by prediction, what to bring, and the command.

    Args:
        items: what is open.
        minutes: of a call; it has all that fit, in their order.
        data: folder with CIFAR-10 as Parquet files.
        out: folder with the pieces of runs that earlier calls have left.
    """
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    own = sum(
        (REPOSITORY / name).stat().st_size for name in tracked.decode().split("\0") if (REPOSITORY / name).is_file()
    )
    left = list(items)
    while left:
        chosen, spent = list[Item](), 0.0
        for item in left:
            if not chosen or (spent + item.seconds <= 60 * minutes and item.gpus == chosen[0].gpus):
                chosen.append(item)
                spent += item.seconds
        left = [item for item in left if item not in chosen]
        reads, packages = any(item.data for item in chosen), sorted({name for item in chosen for name in item.packages})
        gpus = f", {chosen[0].gpus} GPUs" if chosen[0].gpus > 1 else ""
        lines = [f"{spent / 60:.1f} minutes{gpus}; the repository has {own / 1e6:.1f} MB"]
        if packages:
            fetch = ["pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "-d", "wheels"]
            lines.append(f"bring wheels for its Python: {shlex.join([*fetch, *packages])}")
            lines.append("there: pip install --no-deps --no-index wheels/*.whl")
        if reads and data is None:
            lines.append("bring CIFAR-10 as Parquet files (--data FOLDER says how many bytes)")
        elif reads and data is not None:
            loads, free = [list[Path]()], CARRIED - own
            for file in sorted([*data.glob("*.parquet"), *(out.glob("*.tar.*[0-9]") if out else ())]):
                if loads[-1] and sum(other.stat().st_size for other in loads[-1]) + file.stat().st_size > free:
                    loads.append([])
                loads[-1].append(file)
            texts = [", ".join(f"{file} ({file.stat().st_size / 1e6:.1f} MB)" for file in load) for load in loads]
            texts = texts if loads[0] else [f"{data}, a folder of images"]
            lines += [
                f"bring {text}" + (f", load {n} of {len(texts)}" if len(texts) > 1 else "")
                for n, text in enumerate(texts, 1)
            ]
        command = ["python", "experiments/benchmarks/gpu.py", f"--minutes={minutes:g}"]
        command += [f"--data={data or 'FOLDER'}", f"--out={out or 'OUT'}"] if reads else []
        command += ["--only", *(item.name for item in chosen)]
        yield "\n  ".join([*lines, f"PYTHONPATH=. {shlex.join(command)}"])  # where this package is not installed


def main(arguments: Sequence[str] | None = None, items: Sequence[Item] = ITEMS) -> int:
    names = [item.name for item in items]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the call has ended")
    parser.add_argument("--next", action="store_true", help="only print the calls that are open")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="no other items")
    parser.add_argument("--device", help="cuda or cpu; by default cuda where there is one")
    parser.add_argument("--small", action="store_true", help="everything at a size that a CPU does in seconds")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10: Parquet files, or train/CLASS and test/CLASS")
    parser.add_argument(
        "--out", type=Path, help="folder of the new results too, and of runs in pieces, which a later call takes up"
    )
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs/gpu", help="folder of the trainings")
    given = parser.parse_args(arguments)
    if not given.small and given.data is not None and (files := [*given.data.glob("*.parquet")]):
        from pyarrow.parquet import read_metadata

        if (count := sum(read_metadata(file).num_rows for file in files)) != 60_000:  # a load is missing, or two forms
            parser.error(f"--data={given.data} holds {count:,} images: CIFAR-10 has 60,000, in one form")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    end = time.monotonic() + 60 * given.minutes
    # CUDA must not start in this process, whose children use it: the driver's files tell
    gpus = len([*Path("/dev").glob("nvidia[0-9]*")])
    device, runs = torch.device(given.device or ("cuda" if gpus else "cpu")), given.runs.resolve()
    # results of a trial do not stay beside the script
    is_trial = given.small or (device.type == "cpu" and not given.next)
    results = runs / "trial" if is_trial else HERE / "gpu"
    open_items = [item for item in items if item.name in given.only and not (results / item.file).is_file()]
    if given.next:
        open_calls = calls(open_items, given.minutes, given.data, given.out)
        print("\n\n".join([HOW, *open_calls]) if open_items else "nothing is open")
        return 0
    kept = (given.out or runs).resolve()
    kept.mkdir(parents=True, exist_ok=True)
    place = Place(device, given.small, runs, end, given.data and given.data.resolve(), kept)
    command = shlex.join(["python", "experiments/benchmarks/gpu.py", *(arguments or sys.argv[1:])])
    has_failed = False
    for item in open_items:
        if not given.small and item.seconds > place.left:
            print(f"{item.name}: later, wants {item.seconds:.0f} s of the {place.left:.0f} s left")
        elif not given.small and item.data and place.data is None:
            print(f"{item.name}: later, wants --data FOLDER")
        elif place.on_gpu and item.gpus > gpus:
            print(f"{item.name}: later, wants {item.gpus} GPUs")
        else:
            entry = attempt(item, place)
            print(
                f"{item.name}: {entry['status']} after {entry['seconds']} s {entry.get('note', '')}".rstrip(),
                flush=True,
            )
            has_failed |= entry["status"] == "failed"
            if entry.pop("status") != "done":
                continue
            entry |= {"predicted": item.seconds, "command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            for folder in filter(None, (results, given.out)):
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / item.file, json.dumps(entry, indent=2) + "\n")
            write_whole(results / "gpu.md", tables(items, results))
    return int(has_failed)


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules[__name__]  # the items import it by this name
    sys.exit(main())
