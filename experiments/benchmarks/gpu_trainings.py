"""Items of ``gpu.py`` that train by ``lightning fit``, or load photographs as it does."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu import EXPERIMENTS, REPOSITORY, Place, Rows, Unfinished
from PIL import Image

from vit_lightning.storage.metrics import read_metrics

SAVING = 20.0
"""Seconds before the end at which a training is told to write its checkpoint."""
PIECE = 15 * 2**20
"""Bytes of a file that a lent machine gives back."""
FAST = ("--trainer.precision=bf16-mixed", "--compile=true")
SMALL = (
    *("--trainer.max_epochs=2", "--trainer.limit_train_batches=4", "--compile=false", "--data.val_share=0.25"),
    *("--model.emb_size=16", "--model.depth=2", "--model.num_heads=2"),
)


def data_of(config: str, folder: Path) -> dict[str, Any]:
    """Returns the data module of a config for CIFAR-10 in a folder: Parquet files, read as they are, or images."""
    page = yaml.safe_load((EXPERIMENTS / f"{config}.yaml").read_text())["data"]["init_args"]
    given = {key: value for key, value in page.items() if key != "root"}
    whole = {"image_size": 32, "min_area": 1.0, "centre_share": 1.0}
    whole |= {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
    file = next(folder.glob("*.parquet"), None)
    if file is None:
        return {"class_path": "ImageFolder", "init_args": {**whole, **given, "root": str(folder)}}
    from pyarrow.parquet import read_schema

    column = next(name for name in ("image", "img") if name in read_schema(file).names)
    return {
        "class_path": "HuggingFaceSet",
        "init_args": {**whole, **given, "path": str(folder), "image_column": column},
    }


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


def flags_of(options: dict[str, Any]) -> list[str]:
    """Returns options as flags of ``lightning fit``."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def images_of(place: Place) -> Path:
    """Returns the folder with CIFAR-10, of a small trial that with a few drawn photographs in its place."""
    return place.data or drawn_photographs(place.runs / "photographs-60", 60)


def take_up(folder: Path, place: Place) -> None:
    """Goes on with the runs of an earlier call whose pieces were brought back, unless their folder is still here."""
    pieces = sorted(place.kept.glob(f"{folder.name}.tar.[0-9]*"), key=lambda piece: int(piece.suffix[1:]))
    if pieces and not folder.is_dir():
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as tar:
            tar.extractall(folder, filter="data")


def give_back(folder: Path, place: Place) -> None:
    """Writes runs as FOLDER.tar.0, FOLDER.tar.1, ..., with the checkpoints of those that have not ended."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"):
            is_spare = path.name == "previous.ckpt" or (path.parents[1] / "results.json").is_file()
            if path.suffix != ".ckpt" or not is_spare:
                tar.add(path, path.relative_to(folder))
    for piece in place.kept.glob(f"{folder.name}.tar.[0-9]*"):
        piece.unlink()
    content = file.getvalue()
    for number, start in enumerate(range(0, len(content), PIECE)):
        (place.kept / f"{folder.name}.tar.{number}").write_bytes(content[start : start + PIECE])


def ended(folder: Path) -> Rows:
    """Returns a row for each run that has ended: tested after its last epoch, and the best of its curve of tests."""
    rows = []
    for run in sorted(file.parent for file in folder.glob("runs/*/results.json")):
        found = json.loads((run / "results.json").read_text())
        row = {"run": run.name}
        if "test/acc" in found:
            low, high = (f"{100 * found[key]:.1f}" for key in ("test/acc_low", "test/acc_high"))
            row["test accuracy (95 %)"] = f"{100 * found['test/acc']:.2f} % ({low} to {high})"
        curve = [row["curve/test_acc"] for row in read_metrics(run) if "curve/test_acc" in row]
        row["best of its tests"] = f"{100 * max(curve):.2f} % of {len(curve)}" if curve else ""
        row |= {"epochs": str(found["epochs"]), "training": f"{found['train_seconds']:,.0f} s"}
        row["images/s"] = f"{found['images_per_second']:,.0f}"
        rows.append({**row, "peak memory": f"{found['peak_memory_mb']:,.0f} MB"})
    return rows


def trainings(place: Place, config: str, seeds: int, options: dict[str, Any]) -> Rows:
    """Trains a config with some seeds, all at a time, as far as the minutes go; a later call resumes them.

    Args:
        place: its device.
        config: name of the config.
        seeds: number of trainings, from seed 0 on.
        options: options of all of them beside those of the config.

    Raises:
        Unfinished: they were told to end.
    """
    folder = place.runs / config
    take_up(folder, place)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.yaml"
    data.write_text(yaml.safe_dump({"data": data_of(config, images_of(place))}, sort_keys=False))
    flags = flags_of(options)
    given = [f"--config={EXPERIMENTS / config}.yaml", f"--config={data}", *flags, *(SMALL if place.small else ())]
    runs = [(folder / f"runs/{seed}", f"--seed_everything={seed}") for seed in range(seeds)]
    left = [run for run in runs if not (run[0] / "results.json").is_file()]
    until = max(1.0, place.left - SAVING)
    try:
        with ThreadPoolExecutor(seeds) as pool:
            done = pool.map(lambda run: fit(run[0], place, *given, run[1], "--resume=auto", until=until), left)
            codes = [process.returncode for process in done]
    finally:
        give_back(folder, place)
    rows = ended(folder)
    if any(codes):
        steps = [max((row["step"] for row in read_metrics(run)), default=0) for run, _ in left if run.is_dir()]
        raise Unfinished(f"{len(rows)} have ended, others were told to at steps {steps}\n{yaml.safe_dump(rows)}")
    return [{**row, "flags": f"`{' '.join(flags)}`"} for row in rows]


def pretrained(place: Place, config: str, then: str, seeds: int, options: dict[str, Any]) -> Rows:
    """Trains a config without labels, then a config from its encoder with some seeds, as ``trainings`` does.

    Between two machines goes the folder of the encoder in place of the run, once that has ended.

    Raises:
        Unfinished: one of the trainings was told to end.
    """
    encoder, rows = place.kept / f"{config}-encoder", place.kept / f"{config}.yaml"
    if not encoder.is_dir():
        rows.write_text(yaml.safe_dump(trainings(place, config, 1, options)))
        given = [f"--ckpt={place.runs / config / 'runs/0'}", f"--out={encoder}"]
        subprocess.run([sys.executable, "-m", "vit_lightning", "export", *given], cwd=REPOSITORY, check=True)
        for piece in place.kept.glob(f"{config}.tar.[0-9]*"):
            piece.unlink()
    start = {"init_from": str(encoder), "reset_head": True}
    return [*yaml.safe_load(rows.read_text()), *trainings(place, then, seeds, {**options, **start})]


NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("cifar10_small", {}),
    "ViT-Lite": ("cifar10_vit_lite", {"trainer.precision": "bf16-mixed"}),
}
"""Config of a network, and options beside it: the setting of the studies, and ViT-Lite-7/4 as published."""


def workers(place: Place, network: str, compiled: str) -> Rows:
    """Images/s of several trainings at a time on one GPU in sum, forked as by ``lightning ablate --workers N``.

    Args:
        place: its device.
        network: key of ``NETWORKS``.
        compiled: value of the option ``compile``, which a CPU's trial leaves out.
    """
    from vit_lightning.ablation.attempts import Attempts, read_images
    from vit_lightning.ablation.ledger import Planned, open_ledger
    from vit_lightning.ablation.plan import read_plan
    from vit_lightning.ablation.workers import devices_of, warm_up
    from vit_lightning.commands.console import quiet

    folder = place.runs / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config, own = NETWORKS[network]
    options: dict[str, Any] = {**own, "trainer.max_epochs": 10_000, "wandb.mode": "disabled"}
    options["trainer.check_val_every_n_epoch"] = 10_000
    options["trainer.accelerator"] = "gpu" if place.on_gpu else "cpu"
    options |= {"compile": compiled == "true" or compiled} if place.on_gpu and compiled != "false" else {}
    options |= {"trainer.log_every_n_steps": 1, "data.val_share": 0.25, "data.batch_size": 8} if place.small else {}
    options |= {"model.emb_size": 16, "model.depth": 2} if place.small else {}
    (folder / "data.yaml").write_text(yaml.safe_dump({"data": data_of(config, images_of(place))}))
    plan_file = {"config": [str(EXPERIMENTS / f"{config}.yaml"), str(folder / "data.yaml")], "fixed": options}
    plan_file |= {"arms": {"one": {}, "other": {"model.pool": "mean"}}, "baseline": "one"}  # of which one is run
    plan_file["compare"] = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 40}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan_file))
    torch.set_num_threads(1)  # trainings are forked from this process
    quiet()
    plan = read_plan(folder / "plan.yaml")
    ledger, _ = open_ledger(folder / "runs", plan, threads=1)
    read_images({"one": plan.experiments["one"]})
    warm_up(plan)
    attempts = Attempts(ledger, plan, devices_of(plan), patience=600.0)
    rows, sums = Rows(), list[float]()
    batch = plan.experiments["one"].data.batch_size

    def steps() -> dict[int, list[tuple[float, int]]]:
        """Returns time and number of the steps that have been logged, of each training that runs."""
        if ended := attempts.collect():
            raise RuntimeError(f"{ended[0][0].name}: {ended[0][1]}")
        files = {attempt.run.seed: ledger.run_folder(attempt.run) for attempt in attempts.running}
        logged = {seed: read_metrics(run) if (run / "metrics.jsonl").is_file() else [] for seed, run in files.items()}
        name = "speed/step_seconds"
        return {seed: [(row["time"], row["step"]) for row in found if name in row] for seed, found in logged.items()}

    try:
        for count in (1, 2) if place.small else (1, 2, 4, 8):
            if sums and not place.small and place.left < 45.0:
                break
            for seed in range(len(attempts.running), count):
                run = Planned("one", seed)
                claim = ledger.claim(run)
                assert claim is not None
                attempts.begin(run, claim)
            while min(map(len, steps().values())) < 3:  # code is compiled, and others wait for the processor
                time.sleep(0.2)
            since, seen = time.time(), []
            while time.time() < since + (2.0 if place.small else 15.0) or min(map(len, seen)) < 3:
                time.sleep(1.0)
                seen = [[step for step in found if step[0] >= since] for found in steps().values()]
            rates = [batch * (last[1] - first[1]) / (last[0] - first[0]) for first, *_, last in seen]
            sums.append(sum(rates))
            row = {f"{network}, batch {batch}, compile={compiled}": f"{count} at a time"}
            row |= {"images/s in sum": f"{sums[-1]:,.0f}", "times one alone": f"{sums[-1] / sums[0]:.2f}"}
            rows.append({**row, "of each": f"{min(rates):,.0f} to {max(rates):,.0f}"})
    finally:
        attempts.stop()
    return rows


def study(
    place: Place,
    plan: str,
    workers: int,
    options: dict[str, Any],
    config: str = "",
    encoder: str = "",
    tests: bool = True,
) -> Rows:
    """Runs a plan of ``experiments/ablations`` as far as the minutes go; its runs are kept beside the other results.

    It goes on from those that are committed, but with another config, which is another study; PLAN.tar.xz has those
    that have ended, from which ``lightning ablate`` goes on anywhere.

    Args:
        place: its device.
        plan: name of the plan.
        workers: trainings at a time.
        options: options of all runs beside those of the plan.
        config: name of the config in place of that of the plan.
        encoder: name of the config whose encoder, as ``pretrained`` has left it, its arm "pre-trained" starts from.
        tests: whether it sees the test images; else a part of the training images stands for them, ``data.test_share``.

    Raises:
        RuntimeError: the plan was refused.
        Unfinished: its comparisons are not decided yet.
    """
    sys.path.insert(0, str(EXPERIMENTS / "ablations"))
    from archive import archive

    folder, page = place.runs / plan, yaml.safe_load((EXPERIMENTS / f"ablations/{plan}.yaml").read_text())
    take_up(folder, place)
    place.runs.mkdir(parents=True, exist_ok=True)
    kept = EXPERIMENTS / f"ablations/{plan}/runs.tar.xz"
    if not (config or folder.is_dir()) and kept.is_file():
        shutil.unpack_archive(kept, folder, filter="data")
    data, file = place.runs / "data.yaml", place.runs / f"{plan}.yaml"
    page["config"] = [str(EXPERIMENTS / f"{config}.yaml")] if config else page["config"]
    if encoder:
        start = {"init_from": str(place.kept / f"{encoder}-encoder"), "reset_head": True}
        page["arms"] = {"from scratch": {"init_from": None}, "pre-trained": start}
    images = images_of(place)
    if not tests:
        images = place.runs / "training"
        images.mkdir(exist_ok=True)
        for part in images_of(place).glob("*train*"):
            (images / part.name).unlink(missing_ok=True)
            (images / part.name).symlink_to(part)
    given = data_of(Path(page["config"][0]).stem, images)
    data.write_text(yaml.safe_dump({"data": given}))
    page["config"], page["fixed"] = [*page["config"], str(data)], {**page.get("fixed", {}), **options}
    if place.small:
        page["fixed"] |= {name: yaml.safe_load(value) for name, value in (flag[2:].split("=") for flag in SMALL)}
        page["fixed"] |= {"trainer.precision": "32-true", "data.batch_size": 8, "trainer.accelerator": "cpu"}
        page["compare"]["max_seeds"] = 6
        page["fixed"]["trainer.check_val_every_n_epoch"] = 1
        page |= {"tune": {**page["tune"], "seeds": [1000]}} if "tune" in page else {}
        for callback in page["fixed"].get("trainer.callbacks", ()):
            callback["every_n_epochs"] = 1
    file.write_text(yaml.safe_dump(page, sort_keys=False))
    command = [sys.executable, "-m", "vit_lightning", "ablate", str(file), f"--out={folder}", f"--workers={workers}"]
    with folder.with_suffix(".log").open("a") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out)
    try:
        process.wait(max(1.0, place.left - SAVING))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    last = (folder.with_suffix(".log").read_text().splitlines() or [""])[-1]
    if process.returncode == 2:
        raise RuntimeError(last)
    give_back(folder, place)  # first: a call that is killed while it compresses loses no run
    archive(folder, place.kept / f"{plan}.unfinished")
    (place.kept / f"{plan}.unfinished").replace(place.kept / f"{plan}.tar.xz")
    rows = ended(folder)
    if process.returncode:
        raise Unfinished(f"{len(rows)} runs have ended; {last}\n{yaml.safe_dump(rows)}")
    return [{**row, "flags": f"`{' '.join(flags_of(options))}`"} for row in rows]


def faults(place: Place, chosen: str) -> Rows:
    """Runs a part of the row of the fault plan for GPUs: killed, told to end and resumed, bit for bit."""
    test = REPOSITORY / "tests/faults/test_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", str(test)]
    environment = {**os.environ, "VITL_ACCELERATOR": "gpu" if place.on_gpu else "cpu"}
    done = subprocess.run([*command, "-k", chosen], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(last[-30:]))
    return [{"killed, told to end and resumed": chosen.replace("_", " "), "tests": last[-1]}]


def ranks(place: Place) -> Rows:
    """Trains on one and on two devices with the same batch in all, which see the same images."""
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
