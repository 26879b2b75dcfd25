"""All that is open for want of a GPU, in order of worth, as far as the minutes go; the next call continues there.

    python experiments/benchmarks/gpu.py --minutes 8 --data FOLDER    CIFAR-10 as Parquet files or train/CLASS/*.jpg
    python experiments/benchmarks/gpu.py --list                       what is done and what is open
    python experiments/benchmarks/gpu.py --device cpu --small         all of it, small, as a proof on any machine

Results are kept in ``gpu.json`` and, as tables, ``gpu.md``: in ``--out``, by default beside this script, and in
``--runs``, beside the trainings that a later call resumes. README.md beside this script says which open row each item
fills, and how to bring packages to a machine without a network. Exit code 1 if an item has failed; a later call tries
it again after all others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import statistics
import subprocess
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
import yaml
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from vit_lightning import HorizontalFlip, ImageData, RandomCrop, ViT
from vit_lightning.commands.measuring import paired_rounds
from vit_lightning.data.images import Images
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.metrics import read_metrics
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.compiled import compile_module

HERE = Path(__file__).resolve().parent
EXPERIMENTS, REPOSITORY = HERE.parent, HERE.parents[1]
SAVING = 30.0
"""Seconds before the end at which a training is told to write its checkpoint."""
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

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Item:
    """Something to measure. ``seconds``: what it is expected to take on an H100, or what a training needs to get on."""

    name: str
    seconds: float
    run: Callable[[Place], Rows]


# ---- what is measured


def training_step(
    network: nn.Module, images: Callable[[], tuple[Tensor, Tensor]], place: Place
) -> Callable[[], object]:
    """Returns one step in bf16 with fused AdamW on what ``images`` returns."""
    network.to(place.device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        pixels, labels = images()
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = F.cross_entropy(network(pixels), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def throughput(place: Place, shape: str, compile: bool, goal: str = "") -> Rows:
    """Training steps in bf16, ours and other libraries' interleaved, and their share of the matrix rate."""
    from throughput import NETWORKS, SHAPES, measure

    names = ("timm",) if place.small else ("timm", "torchvision") if compile else tuple(NETWORKS)
    shape = "tiny" if place.small else shape
    measured = measure(
        shape,
        precision="bf16",
        mode="training",
        device=place.device.type,
        compiled=compile,
        rounds=3 if place.small else 50,
        seconds=30.0,
        least=3,
        calls=1 if place.small else 10,
        names=names,
    )
    rows = []
    for row in measured:
        line = {f"{SHAPES[shape].title}, bf16{', compiled' * compile}": row["name"]}
        if row["kind"] == "network":
            line["images/s"] = f"{row['images_per_s_median']:,.0f}"
            line["ours is times as fast"] = "{median:.3f} ({low:.3f} to {high:.3f})".format(**row["ours_over_this"])
            if row["share_of_ceiling"]:
                line["share of the matrix rate"] = f"{100 * row['share_of_ceiling']['median']:.1f} %"
            line["rounds"] = str(row["rounds"])
            line["peak memory"] = f"{row['peak_mb'] / 1000:.2f} GB" if row["peak_mb"] else ""
            line["goal"] = goal if row["name"] == "ours" else "1.15" if goal and row["name"] == "timm" else ""
        else:
            line["images/s"] = f"{row['gflops_median'] / 1000:,.3f} TFLOP/s"
        rows.append(line)
    return rows


def compiled(network: ViT, batch: int) -> ViT:
    """Compiles a network as the option ``compile`` does."""
    compile_module(ViTClassifier(network), batch)
    return network


def memory(place: Place) -> Rows:
    """Compile and activation checkpointing: speed and peak memory of a training step."""
    small = {"image_size": 32, "emb_size": 32, "depth": 2, "num_heads": 2}
    sizes, batch, rounds = (small, 4, 3) if place.small else ({"image_size": 224}, 128, 15)
    images = torch.randn(batch, 3, sizes["image_size"], sizes["image_size"], device=place.device)
    labels = torch.arange(batch, device=place.device)
    steps, peaks = {}, {}
    for name in ("plain", "checkpointing", "compiled", "compiled, checkpointing"):
        before = torch.cuda.memory_allocated()
        network = ViT("B/16", **sizes, activation_checkpointing="checkpointing" in name)
        step = training_step(
            compiled(network, batch) if "compiled" in name else network, lambda: (images, labels), place
        )
        for _ in range(2):
            step()
        torch.cuda.reset_peak_memory_stats() if place.device.type == "cuda" else None
        step()
        steps[name], peaks[name] = step, torch.cuda.max_memory_allocated() - before
    times = paired_rounds(steps, rounds, synchronize=place.synchronize, limit_s=60)
    return [
        {
            "B/16 at 224, bf16, batches of 128": name,
            "images/s": f"{batch / times.median(name):,.0f}",
            "times as fast as plain": str(times.ratio(name, "plain")),
            "peak memory": f"{peaks[name] / 1e9:.2f} GB",
        }
        for name in steps
    ]


class Drawn(ImageData):
    """As many random images of CIFAR's size as fill whole batches."""

    image_size = (32, 32)
    class_names = [str(number) for number in range(10)]  # noqa: RUF012
    in_channels = 3
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def make_dataset(self, split: Any) -> Images:
        draw = torch.Generator().manual_seed(0)
        count = self.batch_size * (2 if self.batch_size < 64 else 97)
        images = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return Images(images, torch.arange(count) % 10)


class Pictures(Dataset[Any]):
    """The same images as timm takes them."""

    def __init__(self, images: Images) -> None:
        self.images, self.labels = images.images.permute(0, 2, 3, 1).numpy(), images.labels.tolist()
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        assert self.transform is not None
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def with_data(place: Place) -> Rows:
    """Ti/4 at 32 pixels with its data: images/s of whole epochs, so that no loader works in the turn of another."""
    import timm
    from timm.data import create_loader

    batch, sizes = (8, {"depth": 1}) if place.small else (512, {})
    data = Drawn(batch_size=batch, num_workers=0, augment=[RandomCrop(padding=4), HorizontalFlip()])
    dataset = data.dataset("train")
    assert isinstance(dataset, Images)
    pictures = Pictures(dataset)
    dataset.move_to(place.device)
    cores = len(os.sched_getaffinity(0))

    def ours() -> Iterator[tuple[Tensor, Tensor]]:
        for number, drawn in enumerate(data.train_dataloader()):
            made = data.model_input(drawn, number)
            yield made.images, made.labels

    def theirs(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in loader:
            yield pixels.to(place.device), labels.to(place.device)

    def epoch(network: nn.Module, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> Callable[[], object]:
        current: list[tuple[Tensor, Tensor]] = []
        step = training_step(network, lambda: current[-1], place)

        def run() -> None:
            for made in batches():
                current[:] = [made]
                step()

        return run

    def timm_epoch(workers: int, compile: bool) -> Callable[[], object]:
        network: Any = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, global_pool="avg", **sizes
        )
        loader = create_loader(
            *(pictures, (3, 32, 32), batch),
            is_training=True,
            use_prefetcher=place.device.type == "cuda",
            scale=(1.0, 1.0),
            ratio=(1.0, 1.0),
            color_jitter=None,
            num_workers=workers,
            persistent_workers=True,
        )
        return epoch(torch.compile(network) if compile else network, partial(theirs, loader))

    network = ViT("Ti/4", image_size=32, num_classes=10, pool="mean", **sizes)
    epochs = {
        "ours, compiled": epoch(compiled(network, batch), ours),
        "timm, 4 workers (its default)": timm_epoch(4 if not place.small else 1, False),
    }
    if not place.small:
        epochs[f"timm, {cores} workers"] = timm_epoch(cores, False)
        epochs[f"timm compiled, {cores} workers"] = timm_epoch(cores, True)
    times = paired_rounds(epochs, 5, warmup=1, synchronize=place.synchronize, limit_s=60)
    return [
        {
            f"Ti/4 at 32 pixels, bf16, batches of {batch}, padded crop and flip": name,
            "images/s": f"{len(dataset) / times.median(name):,.0f}",
            "ours is times as fast": str(times.ratio("ours, compiled", name)),
            "goal": "" if name.startswith("ours") else "3.0",
        }
        for name in epochs
    ]


def augment(place: Place) -> Rows:
    """Augmentation of whole batches on the device, against torchvision's image by image."""
    from augmentation import compare, pairs

    rows = []
    for name in list(pairs(1))[: 2 if place.small else None]:
        row = {"milliseconds of a batch, ours and torchvision's": name}
        for count, size in ((4, 16),) if place.small else ((128, 32), (64, 224)):
            images = torch.randint(0, 256, (count, 3, size, size), device=place.device).byte()
            times = [statistics.median(values) for values in compare(*pairs(size)[name], images, 5)]
            row[f"{count} of {size} x {size}"] = f"{1e3 * times[0]:.2f}, {1e3 * times[1]:.1f}"
        rows.append(row)
    return rows


def monitor(place: Place) -> Rows:
    """Cost of what is measured while a run trains."""
    from monitoring import measure

    accelerator, pairs = "gpu" if place.device.type == "cuda" else "cpu", 5 if place.small else 200
    names = ("digits",) if place.small else ("digits", "Ti/4")
    return [{"cost of a row of speed, norms and memory": measure(name, pairs, accelerator)} for name in names]


def faults(place: Place) -> Rows:
    """Row of the fault plan for GPUs."""
    test = REPOSITORY / "tests/faults/test_gpu.py"
    if not test.is_file():
        raise Missing("tests/faults is not there")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", str(test)]
    environment = {**os.environ, "VITL_ACCELERATOR": "gpu" if place.device.type == "cuda" else "cpu"}
    chosen = ["-k", "many_times and float32"] if place.small else []
    done = subprocess.run([*command, *chosen], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(last[-30:]))
    return [{"killed and told to end, float32, bf16 and compiled, deterministic kernels and not": last[-1]}]


# ---- trainings

FAST = ("--trainer.precision=bf16-mixed", "--compile=true")
RECIPE = (
    *FAST,
    "--data.batch_size=512",
    "--data.augment=[{class_path: RandomCrop, padding: 4}, HorizontalFlip, RandAugment, RandomErasing]",
    "--data.mixing=[{class_path: MixUp, alpha: 0.8}, {class_path: CutMix, alpha: 1.0}]",
    *("--optimizer.name=muon", "--optimizer.lr=4e-3", "--optimizer.warmup_epochs=5", "--ema.decay=0.999"),
    *("--trainer.max_epochs=300", "--trainer.gradient_clip_val=null", "--trainer.check_val_every_n_epoch=5"),
)
"""Augmentation of cifar10_vit_small.yaml and optimizer of cifar10_cpu.yaml for cifar10_vit_tiny.yaml."""
SMALL = ("--trainer.max_epochs=5", "--compile=false")
SMALL_VIT = ("--model.emb_size=16", "--model.depth=2", "--model.num_heads=2")


def data_of(config: str, folder: Path | None) -> dict[str, Any]:
    """Returns the data module of a config, for the images in a folder; without one for the digits."""
    page = yaml.safe_load((EXPERIMENTS / f"{config}.yaml").read_text())["data"]
    own: dict[str, Any] = {key: value for key, value in page["init_args"].items() if key != "root"}
    sizes = {"image_size": 32, "min_area": 1.0, "centre_share": 1.0, "mean": list(Drawn.mean), "std": list(Drawn.std)}
    if folder is None:
        return {"class_path": "Digits", "init_args": own}
    if "cifar" in config and (files := sorted(folder.glob("**/*.parquet"))):
        from pyarrow.parquet import read_schema

        column = next(name for name in ("img", "image") if name in read_schema(files[0]).names)
        source = {"path": str(folder), "image_column": column, "num_workers": 0}
        return {"class_path": "HuggingFaceSet", "init_args": {**own, **sizes, **source}}
    if "cifar" in config and (folder / "train").is_dir():
        return {"class_path": "ImageFolder", "init_args": {**own, **sizes, "root": str(folder)}}
    return {"class_path": page["class_path"], "init_args": {**own, "root": str(folder)}}


def train(place: Place, config: str, images: str, flags: Sequence[str] = FAST, goal: str = "") -> Rows:
    """Trains a config by ``lightning fit``, which is told to end shortly before the minutes do, and resumed later.

    Raises:
        Unfinished: it was told to end.
    """
    folder = place.folders[images]
    if folder is None and not (place.small and goal):
        raise Missing(f"--{images} FOLDER is not given")
    if place.small:
        flags = (*flags, *SMALL, *(() if "resnet" in config else SMALL_VIT))
    place.runs.mkdir(parents=True, exist_ok=True)
    run = place.runs / (config.replace("/", "-") + ("-goal" if goal else ""))
    data, log = run.with_suffix(".yaml"), run.with_suffix(".log")
    data.write_text(yaml.safe_dump({"data": data_of(config, folder)}, sort_keys=False))
    configs = (f"--config={EXPERIMENTS / config}.yaml", f"--config={data}")
    command = [sys.executable, "-m", "vit_lightning", "fit", *configs, f"--out={run}"]
    accelerator = f"--trainer.accelerator={'gpu' if place.device.type == 'cuda' else 'cpu'}"
    command += [*flags, accelerator, "--wandb.mode=disabled", "--resume=auto"]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if not (run / "results.json").is_file():
        with log.open("a") as out:
            environment = {**os.environ, "PYTHONPATH": path}
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            code = process.wait(max(1.0, place.left - SAVING))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            rows = read_metrics(run) if (run / "metrics.jsonl").is_file() else []
            step = max((row["step"] for row in rows), default=0)
            raise Unfinished(f"told to end, and kept, at step {step:,}") from None
        if code:
            lines = log.read_text().splitlines()[-15:]
            raise RuntimeError("\n".join([f"lightning fit ended with exit code {code}", *lines]))
    found = json.loads((run / "results.json").read_text())
    low, high = (f"{100 * found[key]:.1f}" for key in ("test/acc_low", "test/acc_high"))
    row = {"config": f"{config}.yaml", "flags": f"`{' '.join(flags)}`"}
    row["test accuracy (95 % of test images), n = 1"] = f"{100 * found['test/acc']:.2f} % ({low} to {high})"
    row |= {"goal": goal, "epochs": str(found["epochs"]), "training": f"{found['train_seconds']:,.0f} s"}
    row["images/s"], row["peak memory"] = f"{found['images_per_second']:,.0f}", f"{found['peak_memory_mb']:,.0f} MB"
    return [row]


ITEMS = (
    Item("B/16 compiled", 120, partial(throughput, shape="b16", compile=True, goal="55 %")),
    Item("L/16 compiled", 150, partial(throughput, shape="l16", compile=True, goal="60 %")),
    Item("Ti/4 with its data", 120, with_data),
    Item("CIFAR-10", 90, partial(train, config="cifar10_vit_tiny", images="data", flags=RECIPE, goal="95 %")),
    Item("Compile and memory", 90, memory),
    Item("B/16", 60, partial(throughput, shape="b16", compile=False)),
    Item("L/16", 60, partial(throughput, shape="l16", compile=False)),
    Item("Faults", 240, faults),
    Item("Augmentation", 30, augment),
    Item("Monitoring", 60, monitor),
    *(
        Item(f"{config}.yaml", 90, partial(train, config=config, images=images))
        for config, images in (
            *((f"cifar10_{name}", "data") for name in ("vit_tiny", "resnet18", "vit_small")),
            *((f"cifar100_{name}", "cifar100") for name in ("vit_tiny", "vit_small")),
            *((f"imagenet/{path.stem}", "imagenet") for path in sorted((EXPERIMENTS / "imagenet").glob("*.yaml"))),
        )
    ),
)


# ---- one call


def _attempt(item: Item, place: Place, answers: Connection) -> None:
    os.setsid()  # so that it ends with all that it started
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        rows, found = item.run(place), describe_environment()
        hardware = ", ".join(found["gpus"]) if place.device.type == "cuda" else found["processor"]
        commit = (found["git"]["package"] or found["git"]["working folder"] or {}).get("commit", "unknown")
        versions = {"commit": commit[:7], "python": found["python"], **found["packages"]}
        with contextlib.suppress(PackageNotFoundError):
            versions |= {"timm": version("timm")}
        result = {"status": "done", "rows": rows, "hardware": hardware, "versions": versions}
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


def read_state(files: Sequence[Path]) -> dict[str, Any]:
    """Returns what was found before, of several copies: what is done, else the last attempt."""
    known: dict[str, Any] = {}
    for file in filter(Path.is_file, files):
        for name, entry in json.loads(file.read_text()).items():
            old = known.get(name, {"status": "open", "ended": ""})
            known[name] = max(old, entry, key=lambda e: (e["status"] == "done", e["ended"]))
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


def keep(state: Mapping[str, Any], items: Sequence[Item], places: Sequence[Path]) -> None:
    """Writes the results as JSON and as tables."""
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place.with_suffix(".json"), json.dumps(state, indent=2) + "\n")
        write_whole(place.with_suffix(".md"), tables(state, items))


def main(arguments: Sequence[str] | None = None, items: Sequence[Item] = ITEMS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the call has ended")
    parser.add_argument("--list", action="store_true", help="only say what is done and what is open")
    parser.add_argument("--device", help="cuda or cpu; by default cuda where there is one")
    parser.add_argument("--small", action="store_true", help="everything at a size that a CPU does in seconds")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10: Parquet files, or train/CLASS and test/CLASS")
    parser.add_argument("--cifar100", type=Path, help="folder with CIFAR-100, likewise")
    parser.add_argument("--imagenet", type=Path, help="folder with train/CLASS/*.JPEG and test/CLASS/*.JPEG")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md; by default beside this script")
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs/gpu", help="folder of the trainings")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    end = time.monotonic() + 60 * given.minutes
    # CUDA must not start in this process, whose children use it: the driver's files tell
    there = any(Path("/dev").glob("nvidia[0-9]*"))
    device = torch.device(given.device or ("cuda" if there else "cpu"))
    name = "gpu" if device.type == "cuda" and not given.small else "gpu_trial"
    runs = given.runs.resolve()
    kept = [given.out.resolve() if given.out else HERE if name == "gpu" else runs, runs]
    state = read_state([folder / f"{name}.json" for folder in (HERE, *kept)])
    sets = {"data": given.data, "cifar100": given.cifar100, "imagenet": given.imagenet}
    place = Place(device, given.small, runs, end, {k: v and v.resolve() for k, v in sets.items()})
    said = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "experiments/benchmarks/gpu.py", *said])
    for item in sorted(items, key=lambda item: state.get(item.name, {}).get("status") == "failed"):
        entry = state.get(item.name, {"status": "open"})
        spent = entry["seconds"] if entry["status"] == "failed" else 0
        needed = 0 if given.small else min(max(item.seconds, spent), 54 * given.minutes)
        if entry["status"] == "done" or given.list:
            print(f"{item.name}: {entry['status']} {entry.get('note', '')}".rstrip())
        elif needed > place.left:
            print(f"{item.name}: later, wants {needed:.0f} s of the {place.left:.0f} s left")
        else:
            entry = {**attempt(item, place), "command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            state[item.name] = entry
            keep(state, items, [folder / name for folder in kept])
            spent = f"{entry['status']} after {entry['seconds']} s"
            print(f"{item.name}: {spent} {entry.get('note', '')}".rstrip(), flush=True)
    if not given.list:
        print(tables(state, items))
    return int(any(state.get(item.name, {}).get("status") == "failed" for item in items))


if __name__ == "__main__":
    sys.exit(main())
