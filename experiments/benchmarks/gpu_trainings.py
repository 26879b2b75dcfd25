"""Items of ``gpu.py`` that train by ``lightning fit``, or load photographs as it does."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu import EXPERIMENTS, REPOSITORY, Missing, Place, Rows, Unfinished
from PIL import Image

from vit_lightning.storage.metrics import read_metrics

SAVING = 30.0
"""Seconds before the end at which a training is told to write its checkpoint."""
FAST = ("--trainer.precision=bf16-mixed", "--compile=true")
GOAL = (
    *FAST,
    "--data.batch_size=1024",
    "--data.val_share=0.02",
    "--data.augment=[{class_path: RandomCrop, padding: 4}, HorizontalFlip, RandAugment, RandomErasing]",
    "--data.mixing=[{class_path: MixUp, alpha: 0.8}, {class_path: CutMix, alpha: 1.0}]",
    *("--optimizer.name=muon", "--optimizer.lr=4e-3", "--optimizer.warmup_epochs=10", "--ema.decay=0.9995"),
    *("--trainer.max_epochs=600", "--trainer.gradient_clip_val=null", "--trainer.check_val_every_n_epoch=20"),
)
"""Augmentation of cifar10_vit_small.yaml and optimizer of cifar10_cpu.yaml for cifar10_vit_tiny.yaml, 49,000 images."""
SMALL = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=4", "--compile=false", "--data.val_share=0.25")
SMALL_VIT = ("--model.emb_size=16", "--model.depth=2", "--model.num_heads=2")
SMALL_PHOTOGRAPHS = ("--data.image_size=32", "--data.batch_size=16", "--data.num_workers=2", "--data.test_share=0.25")


def unpacked(files: Sequence[Path], folder: Path) -> Path:
    """Writes the images of Parquet files as a folder for each split and class, as they are, once; returns it."""
    import pyarrow.parquet

    done = folder / "complete"
    for file in [] if done.is_file() else files:
        table = pyarrow.parquet.read_table(file)
        image, label = (next(n for n in names if n in table.column_names) for names in (("img", "image"), ("label",)))
        split = "test" if "test" in file.name else "train"
        for number, (cell, which) in enumerate(zip(table[image].to_pylist(), table[label].to_pylist(), strict=True)):
            path = folder / split / f"{which:03d}" / f"{file.stem}-{number:05d}.{_suffix(cell['bytes'])}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cell["bytes"])
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
    return folder


def _suffix(data: bytes) -> str:
    return "png" if data.startswith(b"\x89PNG") else "jpg"


def data_of(config: str, folder: Path, runs: Path) -> dict[str, Any]:
    """Returns the data module of a config, for the images in a folder."""
    page = yaml.safe_load((EXPERIMENTS / f"{config}.yaml").read_text())["data"]
    given: dict[str, Any] = {key: value for key, value in page["init_args"].items() if key != "root"}
    if "cifar" not in config:
        return {"class_path": page["class_path"], "init_args": {**given, "root": str(folder)}}
    if files := sorted(folder.glob("**/*.parquet")):
        folder = unpacked(files, runs / config.partition("_")[0])
    if (folder / "train").is_dir():
        whole = {"image_size": 32, "min_area": 1.0, "centre_share": 1.0}
        whole |= {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
        return {"class_path": "ImageFolder", "init_args": {**given, **whole, "root": str(folder)}}
    return {"class_path": page["class_path"], "init_args": {**given, "root": str(folder)}}


def fit(run: Path, place: Place, *flags: str, until: float | None = None) -> subprocess.Popen[bytes]:
    """Runs ``lightning fit`` into a folder, whose log is beside it, and returns its ended process.

    Args:
        run: folder of the run.
        place: its device.
        flags: flags of the command.
        until: seconds after which it is told to end.

    Raises:
        RuntimeError: it ended with an error.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    accelerator = f"--trainer.accelerator={'gpu' if place.on_gpu else 'cpu'}"
    command = [sys.executable, "-m", "vit_lightning", "fit", f"--out={run}", accelerator, "--wandb.mode=disabled"]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    log = run.with_suffix(".log")
    with log.open("a") as out:
        process = subprocess.Popen([*command, *flags], env={**os.environ, "PYTHONPATH": path}, stdout=out, stderr=out)
    try:
        code = process.wait(until)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return process
    if code:
        lines = log.read_text().splitlines()[-15:]
        raise RuntimeError("\n".join([f"lightning fit ended with exit code {code}", *lines]))
    return process


def train(place: Place, config: str, images: str, flags: Sequence[str] = FAST, goal: str = "") -> Rows:
    """Trains a config, which is told to end shortly before the minutes do, and resumed by a later call.

    Raises:
        Unfinished: it was told to end.
    """
    folder = place.folders[images]
    if place.small:
        folder = folder or drawn_photographs(place.runs / "photographs-60", 60)
        flags = (*flags, *SMALL, *(() if "resnet" in config else SMALL_VIT))
        flags += SMALL_PHOTOGRAPHS if images == "imagenet" else ()
    elif folder is None:
        raise Missing(f"--{images} FOLDER is not given")
    run = place.runs / (config.replace("/", "-") + ("-goal" if goal else ""))
    if not (run / "results.json").is_file():
        place.runs.mkdir(parents=True, exist_ok=True)
        data = run.with_suffix(".yaml")
        data.write_text(yaml.safe_dump({"data": data_of(config, folder, place.runs)}, sort_keys=False))
        configs = (f"--config={EXPERIMENTS / config}.yaml", f"--config={data}")
        if fit(run, place, *configs, *flags, "--resume=auto", until=max(1.0, place.left - SAVING)).returncode:
            rows = read_metrics(run) if (run / "metrics.jsonl").is_file() else []
            step = max((row["step"] for row in rows), default=0)
            raise Unfinished(f"told to end, and kept, at step {step:,}")
    found = json.loads((run / "results.json").read_text())
    low, high = (f"{100 * found[key]:.1f}" for key in ("test/acc_low", "test/acc_high"))
    row = {"config": f"{config}.yaml", "flags": f"`{' '.join(flags)}`"}
    row["test accuracy (95 % of test images), n = 1"] = f"{100 * found['test/acc']:.2f} % ({low} to {high})"
    row |= {"goal": goal, "epochs": str(found["epochs"]), "training": f"{found['train_seconds']:,.0f} s"}
    row["images/s"], row["peak memory"] = f"{found['images_per_second']:,.0f}", f"{found['peak_memory_mb']:,.0f} MB"
    return [row]


def goal(place: Place) -> Rows:
    """Trains Ti/4 on CIFAR-10 from scratch to its end: 600 epochs at a batch of 1,024."""
    return train(place, "cifar10_vit_tiny", "data", GOAL, "95 %")


def faults(place: Place, chosen: str) -> Rows:
    """Runs a part of the row of the fault plan for GPUs: killed, told to end and resumed, bit for bit."""
    test = REPOSITORY / "tests/faults/test_gpu.py"
    if not test.is_file():
        raise Missing("tests/faults is not there")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", str(test)]
    environment = {**os.environ, "VITL_ACCELERATOR": "gpu" if place.on_gpu else "cpu"}
    done = subprocess.run([*command, "-k", chosen], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(last[-30:]))
    return [{"killed, told to end and resumed": chosen.replace("_", " "), "tests": last[-1]}]


def ranks(place: Place) -> Rows:
    """Trains on one and on two devices with the same batch in all, which see the same images.

    Raises:
        Missing: there are no two GPUs.
    """
    if place.on_gpu and torch.cuda.device_count() < 2:
        raise Missing("there is one GPU")
    rows = []
    common = ["--config=digits", "--trainer.max_epochs=3", "--optimizer.warmup_epochs=0"]
    common += [f"--compile={'false' if place.small else 'true'}"]
    for devices in (1, 2):
        run = place.runs / f"ranks-{devices}"
        fit(run, place, *common, f"--trainer.devices={devices}", f"--data.batch_size={64 // devices}", "--resume=auto")
        found = json.loads((run / "results.json").read_text())
        losses = [row["train/loss"] for row in read_metrics(run) if "train/loss" in row]
        row = {"devices": str(devices), "training loss of each epoch": ", ".join(f"{loss:.5f}" for loss in losses)}
        rows.append({**row, "images/s": f"{found['images_per_second']:,.0f}"})
    return rows


def waits(place: Place) -> Rows:
    """Where the host waits for the device in a whole run: the Trainer's loop, logging, checkpoints and validation."""
    from gpu_steps import waits_by_place

    from vit_lightning.cli import main

    epochs = 2 if place.small else 4
    flags = [f"--out={place.runs / 'waits'}", f"--trainer.max_epochs={epochs}", "--wandb.mode=disabled"]
    flags += [
        "--ema.decay=0.99",
        "--optimizer.warmup_epochs=0",
        f"--trainer.accelerator={'gpu' if place.on_gpu else 'cpu'}",
    ]
    flags += FAST if place.on_gpu else []
    shutil.rmtree(place.runs / "waits", ignore_errors=True)
    with waits_by_place(place) as found:
        if code := main(["fit", "--config=digits", *flags]):
            raise RuntimeError(f"lightning fit ended with exit code {code}")
    steps = json.loads((place.runs / "waits" / "results.json").read_text())["steps"]
    rows = [
        {f"a run of {steps} steps, {epochs} epochs": text, "waits": str(count), "a step": f"{count / steps:.3f}"}
        for text, count in found.most_common(30)
    ]
    return rows or [{f"a run of {steps} steps, {epochs} epochs": "nowhere", "waits": "0", "a step": "0"}]


# ---- photographs


def photographs(place: Place) -> Rows:
    """Images/s of JPEG files of 500 x 375, decoded, cropped and resized: by workers, or by the device."""
    from vit_lightning import ImageFolder

    class Photographs(ImageFolder):
        _device = place.device  # outside of a Trainer it would be the CPU

    cores, small = len(os.sched_getaffinity(0)), place.small
    count = 60 if small else 2000
    files = drawn_photographs(place.runs / f"photographs-{count}", count)
    sizes = {"batch_size": 4 if small else 256, "image_size": 32 if small else 224, "min_area": 0.08}
    rows = []
    for interpolation in ("fast_bicubic", "device_bicubic"):
        for workers in (1,) if small else (1, 4, cores // 2, cores):
            data = Photographs(root=files, **sizes, num_workers=workers, interpolation=interpolation)
            for _ in range(2):  # workers start in the first epoch
                began, read = time.perf_counter(), 0
                for batch in data.train_dataloader():
                    read += len(batch.to(place.device).images)
                place.synchronize()
                rate = read / (time.perf_counter() - began)
            row = {"500 x 375 to 224 x 224": f"data.interpolation={interpolation}"}
            rows.append({**row, "workers": f"{workers} of {cores} cores", "images/s": f"{rate:,.0f}"})
    return rows


def drawn_photographs(folder: Path, count: int) -> Path:
    """Writes pictures of about 100 kB, as large as photographs compress, in two classes; returns their folder."""
    draw, pictures = torch.Generator().manual_seed(0), list[bytes]()
    for _ in range(min(count, 40)):
        coarse = torch.rand(1, 3, 12, 16, generator=draw)
        picture = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")[0]
        picture += 0.085 * torch.randn(picture.shape, generator=draw)
        pixels = (255 * picture).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=88)
        pictures.append(file.getvalue())
    for number in range(count):
        path = folder / "train" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[number % len(pictures)])
    return folder
