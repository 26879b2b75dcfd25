"""Real processes that run the ``lightning`` command, to be killed, and what is left of their runs."""

import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from runs import logged_rows

HERE = Path(__file__).parent

FLAGS = (
    *("--model.patch_size=4", "--model.emb_size=16", "--model.depth=2", "--model.num_heads=2"),
    *("--model.emb_dropout=0.1", "--model.drop_path=0.2", "--model.attention.dropout=0.1"),
    *("--data.batch_size=162", "--trainer.max_epochs=4"),
    '--data.augment=[{"class_path": "RandomCrop", "padding": 1}, {"class_path": "RandomAffine"}]',
    *("--optimizer.warmup_epochs=1", "--optimizer.weight_decay=0.1", "--trainer.accelerator=cpu", "--out=run"),
    *("--trainer.log_every_n_steps=1", "--checkpoint.every_n_steps=1", "--pictures_every_n_epochs=0"),
    *("--checkpoint.monitor=val/loss", "--checkpoint.mode=min"),  # falls, whatever torch
    "--trainer.callbacks=[{'class_path': 'fault.Fault'}]",
)
"""Four epochs of eight batches of digits, with everything random that there is: 32 steps in about a second."""


def start(
    folder: Path, *arguments: str, fault: str = "", call: Callable[..., None] = processes.command, **environment: str
) -> BaseProcess:
    """Starts the command in ``folder``; its output is appended to ``log.txt`` there."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "VITL_FAULT": fault, **environment}
    log = folder / "log.txt"
    return processes.start(call, *arguments, folder=folder, environment=environment, out=log, err=log)


def command(folder: Path, *arguments: str, fault: str = "", **environment: str) -> int:
    """The exit code of the command; negative after a signal."""
    process = start(folder, *arguments, fault=fault, **environment)
    process.join(600)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def fit(folder: Path, *flags: str, fault: str = "", **environment: str) -> int:
    return command(folder, "fit", *FLAGS, *flags, fault=fault, **environment)


def resume(folder: Path, *flags: str, fault: str = "", **environment: str) -> int:
    return command(folder, "fit", "--resume=run", *flags, fault=fault, **environment)


def in_group(*arguments: str) -> None:
    """Runs the command as the first of a process group, which starts the second rank."""
    os.setsid()
    processes.command(*arguments)


def setting(workers: int, ranks: int) -> tuple[str, ...]:
    flags = ("--checkpoint.every_n_steps=null", f"--data.num_workers={workers}")
    if ranks == 1:
        return flags
    return (*flags, "--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=81")


def begin(folder: Path, *flags: str, fault: str = "") -> BaseProcess:
    arguments = (*flags,) if flags[0] == "fit" else ("fit", *FLAGS, *flags)
    return start(folder, *arguments, fault=fault, call=in_group, PYTHONPATH=os.pathsep.join(sys.path))


def ended(process: BaseProcess, seconds: float) -> int:
    """The exit code as a shell has it."""
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        pytest.fail(f"it has not ended in {seconds} s")
    return 128 - process.exitcode if process.exitcode < 0 else process.exitcode


def punish(folder: Path, *flags: str, seed: int, kills: int, apart: tuple[float, float]) -> int:
    """Starts the same command again and again, and kills it at random moments from outside, workers not included.

    Returns the kills that came while it ran; then lets it end.
    """
    draw, count = random.Random(seed), 0
    while count < kills:
        process = start(folder, "fit", *FLAGS, "--resume=auto", *flags, fault="0:*:batch_start:SLEEP")
        process.join(draw.uniform(*apart))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        count += 1
    assert command(folder, "fit", *FLAGS, "--resume=auto", *flags) == 0, log(folder)[-2000:]
    return count


def orphans(folder: Path) -> list[int]:
    """Processes that have the folder as their working folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.resolve() == folder.resolve():
                found.append(int(link.parent.name))
    return found


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def outcome(folder: Path) -> dict[str, Any]:
    """All that must not depend on whether a run was killed."""
    from vit_lightning.storage.checkpoint_files import read_checkpoint

    run = folder / "run"
    last = read_checkpoint(run / "checkpoints/last.ckpt")
    callbacks = {name: state for name, state in last["callbacks"].items() if name not in ("Stopwatch", "Monitor")}
    # what the last validation counted, which the next one begins anew
    loops = {k: v for k, v in last["loops"]["fit_loop"].items() if not k.startswith("epoch_loop.val_loop")}
    predictions = {}  # of a module that gives logits
    if (run / "test_predictions.npz").is_file():
        with np.load(run / "test_predictions.npz") as arrays:
            predictions = {name: arrays[name].tolist() for name in arrays}
    return {
        "weights": last["state_dict"],
        "average": last.get("ema"),
        "optimizer": last["optimizer_states"],
        "schedule": last["lr_schedulers"],
        "steps": last["global_step"],
        "loops": loops,
        "callbacks": callbacks,
        "best": read_checkpoint(run / "checkpoints/best.ckpt")["state_dict"],
        "rows": logged_rows(run),
        "results": results(folder),
        "predictions": predictions,
        "batches": batches(folder),
    }


def results(folder: Path) -> dict[str, Any]:
    """What ``results.json`` says but for what the machine has to do with."""
    said = json.loads((folder / "run" / "results.json").read_text())
    apart = ("seconds", "train_seconds", "images_per_second", "peak_memory_mb", "sha256")
    return {name: value for name, value in said.items() if name not in apart}


def batches(folder: Path, rank: int = 0) -> list[tuple[list[int], list[int]]]:
    """Images of each batch, as the last process that trained on it saw them, with a checksum of each one's pixels."""
    lines = (folder / f"witness{rank}.jsonl").read_text().splitlines()
    seen = {row["batch"]: (row["indices"], row["pixels"]) for row in map(json.loads, lines)}
    assert sorted(seen) == list(range(len(seen)))
    return [seen[number] for number in sorted(seen)]


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two outcomes differ, at zero tolerance."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if torch.equal(first, second) and first.dtype == second.dtype else [path]
    if isinstance(first, dict) and isinstance(second, dict):
        missing = [f"{path}.{key} on one side" for key in first.keys() ^ second.keys()]
        return missing + [
            d for key in first.keys() & second.keys() for d in differences(first[key], second[key], f"{path}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return [f"{path}: {len(first)} against {len(second)}"]
        return [
            d for n, (a, b) in enumerate(zip(first, second, strict=True)) for d in differences(a, b, f"{path}[{n}]")
        ]
    return [] if first == second else [f"{path}: {first} against {second}"]
