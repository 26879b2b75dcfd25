"""Speed of training steps and of inference: ours and other libraries' ViTs of the same sizes, interleaved.

python experiments/benchmarks/throughput.py --minutes 16                (S/16, Ti/4 and 17 tokens on a CPU)
python experiments/benchmarks/throughput.py --minutes 16 --resume       (what is left of it after it was killed)
python experiments/benchmarks/throughput.py --table                     (Markdown and figure of what has been measured)
python experiments/benchmarks/throughput.py --shapes b16,l16 --precision bf16 --device cuda --compiled
python experiments/benchmarks/throughput.py --checkout FOLDER --out before.json        (another commit of this package)

All have a class token, learned positions, a GELU MLP of four times the width, and no dropout; parameters are float32,
bf16 is ``torch.autocast``. A training step is forward, cross entropy, backward, and AdamW (fused, no weight decay on
vectors); the batch stays the same. Freed memory is kept by all (``keep_freed_memory``). Equal to ours in all options
are timm, torchvision, transformers and nn.TransformerEncoder; vit-pytorch embeds patches by norm, matrix, norm, and is
measured with its own defaults (heads of width 64, no biases of queries, keys and values) and with those of ours.

Each measurement (a shape, precision and mode) has at least 12 rounds, and begins with its share of the minutes that are
left. After 5, 10, ... rounds a network is dropped once the interval of our speed over its lies above 1.25, unless it is
the fastest equal one; the table then says how many rounds it had.

In a round each network makes some steps in a row, on a CPU as many as ours makes in a tenth of a second: a real loop
finds in the caches what the same network left there, not what another one did.

``--checkout FOLDER`` measures the ViT of another checkout of this package beside ours, in the same process and rounds:
``git worktree add FOLDER COMMIT``. Its speed is ``ours_over_this`` of the rows named "another checkout".

Matrix products are interleaved too: a share of the ceiling is the rate of floating-point operations of a step over
that of a product of two matrices of 2048 x 2048 in the same round. The rows of each measurement are written to
``throughput.json`` beside this file when it ends, from which come the table that is printed and ``throughput.png``.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import (
    Interval,
    Rounds,
    bytes_held,
    combined,
    matrix_product,
    median,
    paired_rounds,
    peak_memory,
    training_step,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from vit_lightning import ViT
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import write_whole
from vit_lightning.training.fast_paths import FastViT, accelerate, first_token
from vit_lightning.training.optim import parameter_groups
from vit_lightning.training.resources import forward_flops, keep_freed_memory

HERE = Path(__file__).parent
RESULTS = HERE / "throughput.json"
LEAST = 12
"""Rounds of each measurement, however long they take."""


class Shape(NamedTuple):
    """Sizes of a network and of its batch; square images and patches, a class token."""

    title: str
    image: int
    patch: int
    width: int
    depth: int
    heads: int
    batch: int
    classes: int = 10

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    def named(self, names: str) -> dict[str, int]:
        """Returns image, patch, width, depth, heads and classes by the names that a library has for them."""
        sizes = (self.image, self.patch, self.width, self.depth, self.heads, self.classes)
        return dict(zip(names.split(), sizes, strict=True))


SHAPES = {
    "s16": Shape("S/16 at 224, batch 8", 224, 16, 384, 12, 6, 8),
    "ti4": Shape("Ti/4 at 32, batch 64", 32, 4, 192, 12, 3, 64),
    "tokens17": Shape("17 tokens, width 64, 6 blocks, batch 128", 16, 4, 64, 6, 4, 128),
    "b16": Shape("B/16 at 224, batch 128", 224, 16, 768, 12, 12, 128, 1000),
    "l16": Shape("L/16 at 224, batch 64", 224, 16, 1024, 24, 16, 64, 1000),
    "tiny": Shape("a tiny network", 8, 4, 16, 2, 2, 4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("training", "inference")


class TorchEncoder(nn.Module):
    """ViT around ``nn.TransformerEncoder``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.token = nn.Parameter(torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        layer = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=1e-6,
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(shape.width, eps=1e-6)
        self.encoder = nn.TransformerEncoder(layer, shape.depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.projection(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


def ours(shape: Shape) -> nn.Module:
    network = ViT(**shape.named("image_size patch_size emb_size depth num_heads num_classes"))
    accelerate(network)
    return network


def timm(shape: Shape, *, fused: bool) -> nn.Module:
    sizes = shape.named("img_size patch_size embed_dim depth num_heads num_classes")
    model = importlib.import_module("timm").models.VisionTransformer(**sizes)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def torchvision(shape: Shape) -> nn.Module:
    sizes = shape.named("image_size patch_size hidden_dim num_layers num_heads num_classes")
    return importlib.import_module("torchvision").models.VisionTransformer(**sizes, mlp_dim=4 * shape.width)


def vit_pytorch(shape: Shape, *, equal: bool) -> nn.Module:
    sizes = shape.named("image_size patch_size dim depth heads num_classes")
    dim_head = shape.width // shape.heads if equal else 64
    model = importlib.import_module("vit_pytorch").ViT(**sizes, mlp_dim=4 * shape.width, dim_head=dim_head)
    for attention, _ in model.transformer.layers if equal else ():
        attention.to_qkv = nn.Linear(shape.width, 3 * shape.width)
    return model


def hugging_face(shape: Shape) -> nn.Module:
    library = importlib.import_module("transformers")
    names = "image_size patch_size hidden_size num_hidden_layers num_attention_heads num_labels"
    return library.ViTForImageClassification(library.ViTConfig(**shape.named(names), intermediate_size=4 * shape.width))


def of_checkout(folder: Path) -> Callable[[Shape], nn.Module]:
    """Returns what makes the ViT of another checkout, whose package is imported beside ours under the same name."""

    def ours_in_use() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == "vit_lightning"]
        return {name: sys.modules.pop(name) for name in names}

    kept = ours_in_use()
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module("vit_lightning")
        if not Path(str(package.__file__)).is_relative_to(folder.resolve()):
            raise SystemExit(f"--checkout {folder}: there is no vit_lightning (found {package.__file__})")
        make, accelerates = package.ViT, hasattr(package, "accelerate")
        swap = package.accelerate if accelerates else lambda network: None  # older ones are fast as they are built
    finally:
        sys.path.pop(0)
        ours_in_use()
        sys.modules.update(kept)

    def network_of(shape: Shape) -> nn.Module:
        network: nn.Module = make(**shape.named("image_size patch_size emb_size depth num_heads num_classes"))
        swap(network)
        return network

    return network_of


OURS, OWN_DEFAULTS, CHECKOUT = "ours", "vit-pytorch, its defaults", "another checkout"
NETWORKS: dict[str, Callable[[Shape], nn.Module]] = {
    OURS: ours,
    "timm": lambda shape: timm(shape, fused=True),
    "timm, not fused": lambda shape: timm(shape, fused=False),
    "torchvision": torchvision,
    "vit-pytorch": lambda shape: vit_pytorch(shape, equal=True),
    OWN_DEFAULTS: lambda shape: vit_pytorch(shape, equal=False),
    "transformers": hugging_face,
    "nn.TransformerEncoder": TorchEncoder,
}


def measure(
    shape: str,
    *,
    precision: str = "fp32",
    mode: str = "training",
    device: str = "cpu",
    compiled: bool = False,
    rounds: int = 200,
    seconds: float | None = None,
    least: int = LEAST,
    calls: int | None = None,
    names: Sequence[str] = tuple(NETWORKS),
) -> list[dict[str, Any]]:
    """Returns a row for each network of ``names``, with ours first, and for each matrix product.

    Args:
        shape: one of ``SHAPES``.
        precision: fp32 or bf16.
        mode: training or inference.
        device: cpu or cuda.
        compiled: whether ``torch.compile`` compiles all networks.
        rounds: rounds, in which each is called once.
        seconds: no round begins after this time, the warm-up not counted.
        least: rounds that are run whatever the time.
        calls: steps in a row of each in a round; by default 10 on CUDA, to fill the queue, and on a CPU as many as ours
            makes in a tenth of a second.
        names: networks to measure; those whose library is missing are left out with a line.
    """
    sizes, place, dtype = SHAPES[shape], torch.device(device), DTYPES[precision]
    torch.manual_seed(0)
    images = torch.randn(sizes.batch, 3, sizes.image, sizes.image, device=place)
    labels = torch.randint(sizes.classes, (sizes.batch,), device=place)
    steps: dict[str, Callable[[], object]] = {}
    memory: dict[str, int | None] = {}
    for name in dict.fromkeys([OURS, *names]):
        try:
            network = NETWORKS[name](sizes).to(place)
        except ImportError as fault:
            print(f"{name} is left out: {fault}", file=sys.stderr)
            continue
        steps[name], held = make_step(network, images, labels, mode=mode, dtype=dtype, compiled=compiled)
        for _ in range(3 if compiled else 1):  # compiles; makes the optimizer's state
            steps[name]()
        network.zero_grad()
        is_countable = not compiled or place.type == "cuda"
        memory[name] = peak_memory(steps[name], place) + held() if is_countable else None
    products = {"2048 x 2048 x 2048": (2048,) * 3} if place.type == "cpu" else {"8192 x 8192 x 8192": (8192,) * 3}
    rows, width = sizes.batch * sizes.tokens, sizes.width
    products[f"{rows} x {width} x {4 * width}"] = (rows, width, 4 * width)
    flops: dict[str, float] = {}
    for name, (n, k, m) in products.items():
        repeats = math.ceil(5e8 / (2 * n * k * m))  # at least some milliseconds
        flops[name] = repeats * 2 * n * k * m
        steps[name] = repeated(matrix_product(n, k, m, dtype, place), repeats)
    if calls is None:
        began = time.perf_counter()
        steps[OURS]()
        calls = 10 if place.type == "cuda" else max(1, round(0.1 / (time.perf_counter() - began)))
    wait = torch.cuda.synchronize if place.type == "cuda" else None
    turns = {"warmup": 1, "calls": calls, "limit_s": seconds, "least": least}
    result = paired_rounds(steps, rounds, **turns, leave_out=clearly_slower, synchronize=wait)
    square = next(iter(products))
    network_flops = dict.fromkeys(steps, step_flops(sizes, mode))
    if not compiled:
        left_out = left_out_flops(ours(sizes), images)
        network_flops[OURS] -= sizes.batch * (3 if mode == "training" else 1) * left_out
    common = {
        **{"shape": shape, "batch": sizes.batch, "precision": precision, "mode": mode, "device": device},
        **{"compiled": compiled, "calls": calls},
    }
    table = []
    for name in steps:
        spent = result.seconds[name]
        common["rounds"] = len(spent)
        if name in products:
            rates = {
                "gflops_median": flops[name] / result.median(name) / 1e9,
                "gflops_best": flops[name] / min(spent) / 1e9,
            }
            table.append({**common, "name": name, "kind": "matrix product", **rounded(rates)})
            continue
        shares = [
            network_flops.get(name, step_flops(sizes, mode)) / flops[square] * ratio
            for ratio in result.ratios(name, square)
        ]
        rates = {
            "images_per_s_median": sizes.batch / result.median(name),
            "images_per_s_best": sizes.batch / min(spent),
        }
        bytes_used = memory[name]
        table.append(
            {
                **{**common, "name": name, "kind": "network", **rounded(rates)},
                "ours_over_this": rounded(result.ratio(OURS, name)._asdict()),
                "share_of_ceiling": rounded(median(shares)._asdict()) if name != OWN_DEFAULTS else None,
                "peak_mb": None if bytes_used is None else round(bytes_used / 1e6, 1),
            }
        )
    return table


def clearly_slower(rounds: Rounds) -> list[str]:
    """Returns the networks than which ours is faster by a quarter and more, but for the fastest equal one."""
    ratios = {name: rounds.ratio(OURS, name) for name in rounds.seconds if name in NETWORKS}
    ratios = {name: ratio for name, ratio in ratios.items() if name not in (OURS, CHECKOUT)}
    most = max(map(len, rounds.seconds.values()))
    there = [name for name in ratios if name != OWN_DEFAULTS and len(rounds.seconds[name]) == most]
    fastest = min(there, key=lambda name: ratios[name].median, default=None)
    return [name for name, ratio in ratios.items() if ratio.low > 1.25 and name != fastest]


def make_step(
    network: nn.Module, images: Tensor, labels: Tensor, *, mode: str, dtype: torch.dtype, compiled: bool
) -> tuple[Callable[[], object], Callable[[], int]]:
    """Returns a step, and a function that gives the bytes of weights and optimizer state."""
    call = torch.compile(network) if compiled else network
    is_training = mode == "training"
    network.train(is_training)
    groups = parameter_groups(network, 0.05)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def forward() -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = call(images)
        logits: Tensor = getattr(output, "logits", output)
        return logits.float()

    def infer() -> None:
        with torch.inference_mode():
            forward()

    train = training_step(lambda: cross_entropy(forward(), labels), optimizer)
    return (train if is_training else infer), partial(bytes_held, network, optimizer)


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def left_out_flops(network: nn.Module, images: Tensor) -> int:
    """Returns those of ``forward_flops`` that a forward pass of such images (b, c, H, W) leaves out.

    They are those of the other tokens, where the last block makes the class token alone.
    """
    if not isinstance(network, FastViT) or not network.reads_class_token_alone(images):
        return 0
    empty: Any = copy.deepcopy(network).to("meta").eval()
    *others, last = empty.encoder
    with torch.no_grad():
        tokens = empty.patch_embedding(torch.empty(1, *images.shape[1:], device="meta"))
        for block in others:
            tokens = block(tokens)
        with FlopCounterMode(display=False) as all_tokens:
            last(tokens)
        with FlopCounterMode(display=False) as first:
            first_token(last, tokens)
    return int(all_tokens.get_total_flops() - first.get_total_flops())


def step_flops(shape: Shape, mode: str) -> float:
    """Returns the floating-point operations of the matrix products of a step; images need no gradient."""
    forward = forward_flops(ours(shape), (3, shape.image, shape.image))
    assert forward is not None
    no_gradient = 2 * 3 * shape.image**2 * shape.width
    return shape.batch * (3.0 * forward - no_gradient if mode == "training" else float(forward))


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def group(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what rows of one measurement have in common."""
    return tuple(row[key] for key in ("device_name", "shape", "precision", "mode", "compiled"))


def describe(device: str) -> dict[str, Any]:
    """Returns hardware, versions, commit and command."""
    about = describe_environment()
    installed = {distribution.name: distribution.version for distribution in distributions()}
    libraries = ("torch", "timm", "torchvision", "vit-pytorch", "transformers")
    return {
        "device_name": about["processor"] if device == "cpu" else about["gpus"][0],
        "cores": about["cores"],
        "threads": about["threads"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: installed.get(name) for name in libraries},
        "date": about["started"][:10],
        "commit": (about["git"]["package"] or about["git"]["working folder"] or {}).get("commit"),
        "command": shlex.join(["python", "experiments/benchmarks/throughput.py", *sys.argv[1:]]),
    }


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.is_file() else []


def merge(rows: list[dict[str, Any]], path: Path = RESULTS) -> None:
    """Puts rows in place of earlier ones of the same device, shape, precision and mode."""
    new = {group(row) for row in rows}
    rows = [row for row in read(path) if group(row) not in new] + rows
    write_whole(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def interval(row: dict[str, Any], key: str = "ours_over_this") -> Interval:
    return Interval(**row[key])


def by_setting(rows: list[dict[str, Any]]) -> dict[tuple[str, str, bool, str], list[dict[str, Any]]]:
    """Returns the rows of each mode, precision, compiled or not, and device, in the order in which they are shown."""
    found: dict[tuple[str, str, bool, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (MODES.index(row["mode"]), [*DTYPES].index(row["precision"]))):
        found.setdefault((row["mode"], row["precision"], row["compiled"], row["device_name"]), []).append(row)
    return found


def mean(rows: Collection[dict[str, Any] | None]) -> Interval | str:
    """Returns the geometric mean of the ratios of a row for each shape; nothing if one is missing."""
    return combined([interval(row) for row in rows if row]) if len(rows) > 1 and all(rows) else ""


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns Markdown: per device, precision and mode the networks, then ours over the fastest equal peer."""
    lines = [
        "Speed of ours over that of the other: median of the rounds (95 % interval); images/s of the best round; peak"
    ]
    lines.append("memory. The last column is the geometric mean of the ratios.")
    for (mode, precision, compiled, device), chosen in by_setting(rows).items():
        shapes = [name for name in SHAPES if any(row["shape"] == name for row in chosen)]
        cells = {(row["name"], row["shape"]): row for row in chosen}
        fastest = [fastest_peer(chosen, shape) for shape in shapes]
        ours_rows = [cells[OURS, shape] for shape in shapes]
        ceilings = [[row for row in chosen if row["shape"] == shape and row["kind"] != "network"] for shape in shapes]
        grid = [["", *(SHAPES[shape].title for shape in shapes), "mean"], ["---"] * (len(shapes) + 2)]
        for name in NETWORKS:
            found = [cells.get((name, shape)) for shape in shapes]
            texts = [network_cell(row, own["rounds"]) if row else "" for row, own in zip(found, ours_rows, strict=True)]
            if any(found):
                grid.append([name, *texts, str(mean(found)) if name != OURS else ""])
        bold = [f"**{interval(row)}**, {row['name']}" if row else "" for row in fastest]
        grid.append(["**ours over the fastest equal one**", *bold, f"**{mean(fastest)}**" if mean(fastest) else ""])
        shares = [f"{100 * row['share_of_ceiling']['median']:.0f} %" for row in ours_rows]
        grid.append(["ours, share of the ceiling", *shares, ""])
        texts = [", ".join(f"{row['name']}: {row['gflops_median']:,.0f}" for row in ceiling) for ceiling in ceilings]
        grid.append(["matrix products, GFLOP/s", *texts, ""])
        grid.append(["rounds", *(str(row["rounds"]) for row in ours_rows), ""])
        lines += [
            "",
            f"**{mode}, {precision}{', compiled' * compiled}** ({device}, {chosen[0]['threads']} threads)",
            "",
        ]
        lines += [f"| {' | '.join(line)} |" for line in grid]
    names = ("device_name", "date", "commit")
    states = dict.fromkeys((*(str(row[name]) for name in names), json.dumps(row["versions"])) for row in rows)
    versions = [
        f"{device}: {date}, commit {commit[:7]}, " + text.translate({ord(c): None for c in '{}"'})
        for device, date, commit, text in states
    ]
    return "\n".join([*lines, "", *versions])


def network_cell(row: dict[str, Any], rounds: int) -> str:
    """Returns ratio, rate and memory of a network, and the number of its rounds if that is not the others'."""
    memory = f", {row['peak_mb']:,.0f} MB" if row["peak_mb"] is not None else ""
    rate = f"{row['images_per_s_best']:,.0f} images/s{memory}"
    fewer = f" ({row['rounds']} rounds)" if row["rounds"] != rounds else ""
    return rate if row["name"] == OURS else f"{interval(row)}; {rate}{fewer}"


def fastest_peer(rows: list[dict[str, Any]], shape: str) -> dict[str, Any] | None:
    """Returns the row of the peer with our options against which our median ratio is the smallest."""
    others = [row for row in rows if row["shape"] == shape and row["kind"] == "network"]
    others = [row for row in others if row["name"] not in (OURS, OWN_DEFAULTS, CHECKOUT)]
    return min(others, key=lambda row: row["ours_over_this"]["median"], default=None)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws ratios of ours to each peer with their intervals, a panel for each mode and precision."""
    import matplotlib.pyplot as plt

    networks = [row for row in rows if row["kind"] == "network" and row["name"] != OURS]
    settings = by_setting(networks)
    shapes = [name for name in SHAPES if any(row["shape"] == name for row in networks)]
    names = [name for name in NETWORKS if any(row["name"] == name for row in networks)][::-1]
    columns = min(2, len(settings))
    lines = math.ceil(len(settings) / columns)
    size = (5.2 * columns + 1.2, 0.4 + 3.4 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, ((mode, precision, compiled, device), chosen) in zip(axes.flat, settings.items(), strict=False):
        for index, shape in enumerate(shapes):
            of_shape = [row for row in chosen if row["shape"] == shape]
            values = [interval(row) for row in of_shape]
            heights = [names.index(row["name"]) + 0.22 * (len(shapes) / 2 - index - 0.5) for row in of_shape]
            errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
            axis.errorbar(
                [v.median for v in values], heights, xerr=errors, fmt="o", ms=4.5, capsize=2, label=SHAPES[shape].title
            )
        axis.axvline(1.0, color="0.5", linewidth=1)
        axis.set_xscale("log")
        ticks = apart(axis.get_xlim())
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
        title = f"{mode}, {precision}{', compiled' * compiled} ({device})"
        here = [shape for shape in shapes if any(row["shape"] == shape for row in chosen)]
        fastest = mean([fastest_peer(chosen, shape) for shape in here])
        axis.set_title(
            f"{title}\ngeometric mean over the fastest equal one: {fastest}" if fastest else title, fontsize=10
        )
    for axis in axes.flat[len(settings) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("speed of ours over that of the other (95 % interval)")
    figure.suptitle("Right of the line ours is faster", fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shapes), fontsize=9)
    figure.savefig(path, dpi=110)


def apart(limits: tuple[float, float]) -> list[float]:
    """Returns ticks within limits whose labels do not meet on a logarithmic axis: 1 first, then rounder ones."""
    space = 0.07 * math.log(limits[1] / limits[0])
    ticks: list[float] = []
    for tick in (1, 2, 4, 8, 16, 1.5, 0.5, 3, 6, 12, 1.2, 0.8, 0.9, 1.1, 0.7, 0.6, 0.95, 1.05):
        if limits[0] <= tick <= limits[1] and all(abs(math.log(tick / other)) >= space for other in ticks):
            ticks.append(tick)
    return sorted(ticks)


def some_of(choices: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Returns the type of an argument that lists some of ``choices``."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(separator) if name.strip()]
        if not chosen or not set(chosen) <= set(choices):
            raise argparse.ArgumentTypeError(f"{text} (choose from {separator.join(choices)})")
        return chosen

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=some_of(SHAPES), default="tokens17,ti4,s16", help=",".join(SHAPES))
    parser.add_argument("--precision", type=some_of(DTYPES), default="fp32,bf16")
    parser.add_argument("--mode", type=some_of(MODES), default="training,inference")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true", help="torch.compile of all networks")
    parser.add_argument("--minutes", type=float, default=16.0, help=f"of all; each has {LEAST} rounds nevertheless")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds of each measurement")
    parser.add_argument(
        "--calls", type=int, help="steps in a row in a round; by default 10 on CUDA, else 0.1 s of ours"
    )
    parser.add_argument(
        "--peers", type=some_of(NETWORKS, ";"), help=f"by default all, or with --checkout none: {';'.join(NETWORKS)}"
    )
    parser.add_argument(
        "--checkout", type=Path, help="folder of another checkout of this package to measure; with --out"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has measured here")
    parser.add_argument("--table", action="store_true", help="measure nothing: print and draw all that --out has")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to which rows are added")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    args.peers = args.peers or ([] if args.checkout else [*NETWORKS])
    if args.checkout:
        if args.out == RESULTS:
            parser.error("--checkout: give --out too, since throughput.json holds the comparison with other libraries")
        NETWORKS[CHECKOUT] = of_checkout(args.checkout)
        args.peers.append(CHECKOUT)
    if args.table and not args.out.is_file():
        parser.error(f"--table: {args.out} is not there")
    shown = read(args.out)
    if not args.table:
        combinations = [
            (shape, precision, mode) for shape in args.shapes for mode in args.mode for precision in args.precision
        ]
        run(combinations, args)
        shown = [row for row in read(args.out) if (row["shape"], row["precision"], row["mode"]) in combinations]
    print(tables(shown))
    draw(read(args.out), args.out.with_suffix(".png"))


def run(combinations: Sequence[tuple[str, str, str]], args: argparse.Namespace) -> None:
    """Measures shapes in precisions and modes; the rows of each are written when it ends."""
    keep_freed_memory()
    facts, end = describe(args.device), time.perf_counter() + 60 * args.minutes
    same = ("device_name", "versions", "commit", "threads", "compiled")
    now = {**facts, "compiled": args.compiled}
    here = [row for row in read(args.out) if all(row[key] == now[key] for key in same)] if args.resume else []
    done = {(row["shape"], row["precision"], row["mode"]) for row in here}
    left = [combination for combination in combinations if combination not in done]
    for number, (shape, precision, mode) in enumerate(left):
        seconds = max(0.0, end - time.perf_counter()) / (len(left) - number)
        print(f"{SHAPES[shape].title}, {precision}, {mode}: {seconds:.0f} s ...", file=sys.stderr, flush=True)
        rows = measure(
            shape,
            precision=precision,
            mode=mode,
            device=args.device,
            compiled=args.compiled,
            rounds=args.rounds,
            seconds=seconds,
            calls=args.calls,
            names=args.peers,
        )
        merge([{**row, **facts} for row in rows], args.out)


if __name__ == "__main__":
    main()
