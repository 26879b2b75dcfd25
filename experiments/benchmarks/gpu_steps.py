"""Items of ``gpu.py`` that need torch and timm alone: steps of networks, their kernels and waits, single operators."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu import REPOSITORY, Place, Rows
from gpu_predictions import NETWORKS, Machine, Network, image_flops, predict
from measuring import matrix_product, median, paired_rounds
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from vit_lightning import ViT, accelerate
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.compiled import REPLAYS, compile_module
from vit_lightning.training.optim import OptimizerConfig, optimizer_and_schedule, parameter_groups
from vit_lightning.training.resources import peak_flops

SMALL = Network(8, 4, 16, 2, 2, 4, 10)
BATCHES = {"Ti/4": (128, 1024), "S/16": (64, 256)}
"""Two sizes of batch each."""
Step = Callable[[], object]


def sizes_of(name: str, place: Place) -> Network:
    return SMALL if place.small else NETWORKS[name]


# ---- training steps


def _batch(network: Network, place: Place) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(network.batch, 3, network.image, network.image, generator=draw)
    labels = torch.randint(network.classes, (network.batch,), generator=draw)
    return images.to(place.device), labels.to(place.device)


def _vit(network: Network, **options: Any) -> ViT:
    sizes = {"image_size": network.image, "patch_size": network.patch, "emb_size": network.width}
    made = ViT(**sizes, depth=network.depth, num_heads=network.heads, num_classes=network.classes, **options)
    accelerate(made)
    return made


def our_step(
    network: Network,
    place: Place,
    *,
    compiled: bool = True,
    compiled_for: str = "",
    replays: bool = False,
    **options: Any,
) -> Step:
    """Returns a step as a run has it, without a Trainer: bf16, AdamW, the module compiled by ``compile_module``.

    Args:
        network: the sizes.
        place: its device.
        compiled: whether it is compiled.
        compiled_for: type of device for whose way it is compiled; empty for its own.
        replays: whether a GPU replays CUDA graphs.
        options: options of the ViT.
    """
    torch.manual_seed(0)
    module = ViTClassifier(_vit(network, **options), optimizer=OptimizerConfig(lr=1e-4)).to(place.device).train()
    if compiled:
        device = torch.device(compiled_for or place.device)
        compile_module(module, network.batch, device, replays=replays)
    optimizer, _ = optimizer_and_schedule(module.network, module.optimizer_config, total_steps=1000, steps_per_epoch=10)
    batch = _batch(network, place)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = module.step(batch, "train").loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step.module = module  # type: ignore[attr-defined]
    return step


def timm_step(network: Network, place: Place, *, compiled: bool = True) -> Step:
    """Returns a step of timm's network with the same optimizer; network and loss are compiled whole."""
    from timm.models import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": network.image, "patch_size": network.patch, "embed_dim": network.width}
    model = VisionTransformer(**sizes, depth=network.depth, num_heads=network.heads, num_classes=network.classes).to(
        place.device
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.05), lr=1e-4, fused=True)
    images, labels = _batch(network, place)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    call = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = call(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


OWNERS: dict[str, Callable[..., Step]] = {"ours": our_step, "timm": timm_step}


def warm(place: Place) -> Rows:
    """Compiles all networks, as many at a time as half the cores: others find the code in Inductor's cache."""
    names = ["B/16"] if place.small else ["B/16", "Ti/4", "S/16", "L/16"]
    program = "import sys, gpu, gpu_steps; print(gpu_steps.warm_alone(*sys.argv[1:]))"

    def run(task: tuple[str, str]) -> dict[str, str]:
        began = time.monotonic()
        given = [*task, str(place.device), str(int(place.small))]
        paths = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command, environment = [sys.executable, "-c", program, *given], {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        seconds = f"{time.monotonic() - began:.0f}"
        return {"network": " ".join(task), "first two steps": done.stdout.split()[-1], "process": f"{seconds} s"}

    with ThreadPoolExecutor(max(3, len(os.sched_getaffinity(0)) // 2)) as pool:
        return list(pool.map(run, [(owner, name) for name in names for owner in OWNERS]))


def warm_alone(owner: str, name: str, device: str, small: str) -> str:
    """Returns the seconds that two steps take in this process."""
    place, began = Place(torch.device(device), bool(int(small)), Path(), 0.0), time.monotonic()
    step = OWNERS[owner](sizes_of(name, place), place)
    step(), step(), place.synchronize()
    return f"{time.monotonic() - began:.0f}s"


def steps(place: Place, network: str) -> Rows:
    """Ours against timm's, both compiled, interleaved with a product of two matrices of 8192 x 8192."""
    sizes, side = sizes_of(network, place), 256 if place.small else 8192
    made: dict[str, Step] = {name: make(sizes, place) for name, make in OWNERS.items()}
    peaks = {name: _peak(step, place) for name, step in made.items()}
    product = matrix_product(side, side, side, torch.bfloat16, place.device)
    calls, rounds = (1, 3) if place.small else (10, 40)
    turns = {"calls": calls, "limit_s": 25.0, "synchronize": place.synchronize}
    times = paired_rounds({**made, "product": product}, rounds, **turns)
    rate = 2.0 * side**3 / times.median("product")
    flops, peak = sizes.batch * image_flops(sizes), _peak_flops(place)
    predicted = sizes.batch / predict(sizes, Machine(), how="compiled whole").seconds
    rows = []
    for name in made:
        reached = flops / times.median(name)
        row = {f"{network} at {sizes.image}, bf16, batch {sizes.batch}, compiled": name}
        row["images/s"] = f"{sizes.batch / times.median(name):,.0f}"
        row["predicted for ours"] = f"{predicted:,.0f}" if name == "ours" else ""
        row["ours is times as fast"] = str(times.ratio("ours", name))
        row["TFLOP/s"] = f"{reached / 1e12:,.3g}"
        row["of the peak"] = f"{100 * reached / peak:.1f} % of {peak / 1e12:.1f}" if peak else ""
        row["of the product"] = f"{100 * reached / rate:.1f} % of {rate / 1e12:,.3g}"
        row["peak memory"], row["rounds"] = f"{peaks[name] / 1e9:.2f} GB", str(len(times.seconds[name]))
        rows.append(row)
    return rows


def _peak_flops(place: Place) -> float | None:
    return peak_flops(torch.cuda.get_device_name(), "bf16-mixed", "high") if place.on_gpu else None


def _peak(step: Step, place: Place) -> int:
    """Returns the bytes at the peak of a warm step, with all that other networks hold."""
    for _ in range(3):
        step()
    if not place.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    place.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def kernels(place: Place) -> dict[str, Any]:
    """Kernels of a step by the profiler: their number, and the milliseconds of each kind."""
    names = ["Ti/4"] if place.small else ["Ti/4", "S/16", "B/16"]
    rows, found = [], {}
    made = {name: {owner: make(sizes_of(name, place), place) for owner, make in OWNERS.items()} for name in names}
    for step in (step for steps_of in made.values() for step in steps_of.values()):
        for _ in range(4):
            step()
    for name, steps_of in made.items():
        for owner, step in steps_of.items():
            host, whole = _host_and_whole(step, place)
            activity = ProfilerActivity.CUDA if place.on_gpu else ProfilerActivity.CPU
            with profile(activities=[activity]) as profiler:
                for _ in range(3):
                    step()
                place.synchronize()
            kinds: Counter[str] = Counter()
            launches: Counter[str] = Counter()
            kind = DeviceType.CUDA if place.on_gpu else DeviceType.CPU  # not the calls that launch them
            for event in (event for event in profiler.key_averages() if event.device_type == kind):
                spent = event.self_device_time_total if place.on_gpu else event.self_cpu_time_total
                kinds[_kind(event.key)] += spent / 3e3
                launches[event.key] += event.count / 3
            found[f"{owner}, {name}"] = dict(launches.most_common(60))
            row = {"a step": f"{owner}, {name}", "kernels": f"{sum(launches.values()):,.0f}"}
            row["predicted kernels"] = (
                f"{predict(sizes_of(name, place), Machine()).launches}" if owner == "ours" else ""
            )
            row["a step, ms"], row["of it the host's, ms"] = f"{1e3 * whole:.2f}", f"{1e3 * host:.2f}"
            row["kernels, ms"] = f"{sum(kinds.values()):.2f}"
            rows.append({**row, **{f"{kind}, ms": f"{kinds[kind]:.2f}" for kind in (*KINDS, "others")}})
    return {"rows": rows, "kernels": found}


def _host_and_whole(step: Step, place: Place) -> tuple[float, float]:
    """Returns the seconds of a step until the host has launched it and until the device has ended it."""
    hosts, wholes = [], []
    for _ in range(10):
        began = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - began)
        place.synchronize()
        wholes.append(time.perf_counter() - began)
    return median(hosts).median, median(wholes).median


KINDS = {
    "products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "mm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "compiled": ("triton",),
    "optimizer": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy"),
}
"""Parts of the names of kernels."""


def _kind(name: str) -> str:
    kinds = ("attention", "optimizer", *KINDS)  # their names may hold those of others
    return next((kind for kind in kinds if any(part in name.lower() for part in KINDS[kind])), "others")


FORMS = {"as the option compile": "", "by blocks": "cpu", REPLAYS: ""}
"""Type of device for whose way a module is compiled, by default its own; the last is the option's own value."""


def forms(place: Place, network: str) -> Rows:
    """Ours compiled in several ways, interleaved."""
    made = {}
    for name, device in FORMS.items():
        replays = name == REPLAYS and place.on_gpu
        with mock.patch("torch._dynamo.reset"):  # what one form has compiled stays when the next one is
            made[name] = our_step(sizes_of(network, place), place, compiled_for=device, replays=replays)
            for _ in range(4):
                made[name]()
    turns = {"limit_s": 30.0, "synchronize": place.synchronize}
    times = paired_rounds(made, 3 if place.small else 30, calls=1 if place.small else 10, **turns)
    batch, first = sizes_of(network, place).batch, next(iter(made))
    return [
        {f"{network}, batch {batch}": name, "images/s": f"{batch / times.median(name):,.0f}"}
        | {"times as fast as the option": str(times.ratio(name, first))}
        for name in made
    ]


def memory(place: Place) -> Rows:
    """Compile and activation checkpointing: speed and peak memory of a training step."""
    sizes = sizes_of("B/16", place)
    made, peaks = {}, {}
    for name in ("plain", "checkpointing", "compiled", "compiled, checkpointing"):
        options = {"activation_checkpointing": "checkpointing" in name}
        made[name] = our_step(sizes, place, compiled="compiled" in name, **options)
        peaks[name] = _peak(made[name], place)
    times = paired_rounds(made, 3 if place.small else 15, synchronize=place.synchronize, limit_s=60)
    return [
        {
            f"B/16 at {sizes.image}, bf16, batch {sizes.batch}": name,
            "images/s": f"{sizes.batch / times.median(name):,.0f}",
            "times as fast as plain": str(times.ratio(name, "plain")),
            "bytes of a step at its peak": f"{peaks[name] / 1e9:.2f} GB",
        }
        for name in made
    ]


def same_bits(place: Place, network: str) -> Rows:
    """Whether 20 steps give the same bits twice, with deterministic kernels and without, at two sizes of batch.

    What deterministic kernels cost is measured by steps of both in turn.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as Lightning sets it, here for both

    def turned(step: Step, exact: bool) -> Step:
        def run() -> None:
            torch.use_deterministic_algorithms(exact)
            torch.backends.cudnn.deterministic = exact
            step()

        return run

    rows, count = [], 5 if place.small else 20
    batches = BATCHES[network][: 1 if place.small else None]
    for batch, is_compiled in itertools.product(batches, (False, True)):
        sizes, kinds = sizes_of(network, place)._replace(batch=batch // 64 if place.small else batch), {}
        torch._dynamo.reset()
        for exact in (False, True):
            weights = []
            for _ in range(2):
                with mock.patch("torch._dynamo.reset"):  # what the other kind has compiled stays
                    made: Any = our_step(sizes, place, compiled=is_compiled)
                kinds[exact] = turned(made, exact)
                for _ in range(count):
                    kinds[exact]()
                place.synchronize()
                weights.append([weight.detach().clone() for weight in made.module.parameters()])
            apart = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
            row = {f"{count} steps twice": f"{network}, batch {sizes.batch}{', compiled' * is_compiled}"}
            row |= {"deterministic": str(exact), "same bits": "yes" if apart == 0.0 else "no"}
            rows.append({**row, "largest difference of a weight": f"{apart:.1e}"})
        steps = {str(exact): step for exact, step in kinds.items()}
        turns = {"calls": 1 if place.small else 10, "limit_s": 20.0, "synchronize": place.synchronize}
        times = paired_rounds(steps, 3 if place.small else 20, **turns)
        for row in rows[-2:]:
            row["ms a step"] = f"{1e3 * times.median(row['deterministic']):.2f}"
            row["times as long"] = str(times.ratio("False", row["deterministic"]))
    torch.use_deterministic_algorithms(False)
    return rows


# ---- waits


@contextlib.contextmanager
def waits_by_place(place: Place) -> Iterator[Counter[str]]:
    """Counts where the host waits for the device, by torch's warnings: line of the package and that which waits."""
    found: Counter[str] = Counter()

    def line(frame: traceback.FrameSummary) -> str:
        text = linecache.getline(frame.filename, frame.lineno or 0).strip()
        return f"{Path(frame.filename).name}:{frame.lineno} {text}"

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack()[:-1] if "warnings.py" not in frame.filename]
        frames = [frame for frame in frames if frame.name != "show_and_write"]  # of a run, which logs warnings
        if any("/_dynamo/convert_frame" in frame.filename for frame in frames):
            found["while code is compiled"] += 1
            return
        ours = [frame for frame in frames if "/vit_lightning/" in frame.filename]
        places = [frames[-1]] if not ours or ours[-1] is frames[-1] else [ours[-1], frames[-1]]
        found[" > ".join(map(line, places))] += 1

    mode = torch.cuda.get_sync_debug_mode() if place.on_gpu else 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if place.on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if place.on_gpu:
                torch.cuda.set_sync_debug_mode(mode)


def waits(place: Place) -> Rows:
    """Waits of a training step of each config for GPUs, without the Trainer."""
    import gpu_counts

    gpu_counts.classifier.log_again = lambda *args, **kwargs: None  # type: ignore[assignment]  # without a Trainer
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in gpu_counts.CONFIGS.items():
            experiment = gpu_counts.read_config(path, Path(folder), small=place.small)
            put = partial(Tensor.to, device=place.device)
            options = {"device": place.device, "autocast": place.device.type}
            parts = gpu_counts.step_parts(experiment, 4 if place.small else 64, put, **options)
            for part in [*parts.values()] * 2:  # the first steps fill caches
                part()
            row = {"a step of": name}
            where: Counter[str] = Counter()
            for part_name, part in parts.items():
                with waits_by_place(place) as found:
                    part()
                row[part_name] = str(found.total())
                where += found
            rows.append({**row, "where": "; ".join(f"{count} {text}" for text, count in where.most_common(6))})
    return rows


# ---- constants and single operators


def machine(place: Place) -> dict[str, Any]:
    """Constants of ``gpu_predictions.Machine``, as they are here."""
    side, count = (256, 50) if place.small else (8192, 1000)
    device, wait = place.device, place.synchronize

    def seconds(run: Step, calls: int) -> float:
        run(), run(), wait()
        spent = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(calls):
                run()
            wait()
            spent.append((time.perf_counter() - began) / calls)
        return sorted(spent)[2]

    def host_seconds(run: Step, calls: int) -> float:
        run(), run(), wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        spent = time.perf_counter() - began
        wait()
        return spent / calls

    assumed, found = Machine(), dict[str, float]()
    found["product"] = 2.0 * side**3 / seconds(matrix_product(side, side, side, torch.bfloat16, device), 10)
    rates = []
    for name in ("S/16", "B/16", "L/16"):
        network = sizes_of(name, place)
        rows, width = network.batch * network.tokens, network.width
        product = matrix_product(rows, width, 4 * width, torch.bfloat16, device)
        rates.append(2.0 * rows * width * 4 * width / seconds(product, 10) / found["product"])
    found["reached"] = sorted(rates)[1]
    network = sizes_of("B/16", place)
    heads = network.batch, network.heads, network.tokens, network.width // network.heads
    queries, keys, values = torch.randn(3, *heads, device=device, dtype=torch.bfloat16)
    scores = 4.0 * network.batch * network.tokens**2 * network.width
    spent = seconds(lambda: F.scaled_dot_product_attention(queries, keys, values), 10)
    found["attention"] = scores / spent / found["product"]
    large, other = torch.empty(2, side * side, device=device)
    found["bytes_s"] = 2 * large.nbytes / seconds(lambda: large.copy_(other), 10)
    few = torch.zeros(16, device=device)
    found["eager"] = host_seconds(lambda: few.add_(1.0), count)
    compiled = torch.compile(lambda x: x * 2.0 + 1.0)
    found["entry"] = host_seconds(lambda: compiled(few), count)
    found["least"] = assumed.least
    if place.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                few.add_(1.0)
        found["least"] = seconds(graph.replay, 20) / 100
        found["replay"] = host_seconds(graph.replay, 20)
    rows = [
        {"constant": name, "assumed": f"{getattr(assumed, name):.3g}", "here": f"{value:.3g}"}
        for name, value in found.items()
    ]
    return {"rows": rows, "constants": found}


def attention(place: Place) -> Rows:
    """Forward and backward of attention by each of torch's backends, at the sizes of the networks."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if place.on_gpu:
        backends |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    rows = []
    for name in NETWORKS:
        network = sizes_of(name, place)
        width = network.width // network.heads
        # as the network has them: parts of one tensor (b, n, 3, h, d)
        packed = torch.randn(
            network.batch, network.tokens, 3, network.heads, width, device=place.device, dtype=torch.bfloat16
        ).requires_grad_()
        row = {"milliseconds, forward and backward": f"{name}, batch {network.batch}"}
        for backend_name, backend in {"chosen": None, **backends}.items():

            def run(packed: Tensor = packed, backend: Any = backend) -> None:
                with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                    queries, keys, values = packed.permute(2, 0, 3, 1, 4)
                    F.scaled_dot_product_attention(queries, keys, values).sum().backward()

            try:
                times = paired_rounds({"run": run}, 5 if place.small else 20, synchronize=place.synchronize)
                row[backend_name] = f"{1e3 * times.median('run'):.3f}"
            except RuntimeError as fault:
                row[backend_name] = f"refused ({str(fault).splitlines()[0][:60]})"
        rows.append(row)
    return rows


def augment(place: Place) -> Rows:
    """Augmentation of whole batches on the device, against torchvision's image by image."""
    from augmentation import compare, pairs

    rows = []
    for name in list(pairs(1))[: 2 if place.small else None]:
        row = {"milliseconds of a batch, ours and torchvision's": name}
        for count, size in ((4, 16),) if place.small else ((512, 32), (256, 224)):
            images = torch.randint(0, 256, (count, 3, size, size), device=place.device).byte()
            ours, theirs = (median(values).median for values in compare(*pairs(size)[name], images, 5))
            row[f"{count} of {size} x {size}"] = f"{1e3 * ours:.2f}, {1e3 * theirs:.1f}"
        rows.append(row)
    return rows


def monitor(place: Place) -> Rows:
    """Cost of what is measured while a run trains."""
    from monitoring import measure

    accelerator, pairs = "gpu" if place.on_gpu else "cpu", 5 if place.small else 200
    names = ("digits",) if place.small else ("digits", "Ti/4")
    return [{"cost of a row of speed, norms and memory": measure(name, pairs, accelerator)} for name in names]
