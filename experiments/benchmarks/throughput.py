"""Speed of a training step and of inference: ours and other libraries' ViTs of the same sizes, in turns in one process.

python experiments/benchmarks/throughput.py --shapes s16,ti4,tokens17 --precision fp32,bf16 --mode training,inference
python experiments/benchmarks/throughput.py --shapes b16,l16 --precision bf16 --device cuda --compiled
python experiments/benchmarks/throughput.py --shapes=                        (draws what has been measured once more)

All have a class token, learned positions, a GELU MLP of four times the width, and no dropout; parameters are float32,
bf16 is ``torch.autocast``. A training step is forward, cross entropy, backward, and AdamW (fused, no weight decay on
vectors); the batch stays the same. Freed memory is kept by all (``keep_freed_memory``). Equal to ours in all options
are timm, torchvision, transformers and nn.TransformerEncoder; vit-pytorch embeds patches by norm, matrix, norm, and is
measured with its own defaults (heads of width 64, no biases of queries, keys and values) and with those of ours.

Matrix products take turns too: a share of the ceiling is the rate of floating-point operations of a step over that of
a product of two matrices of 2048 x 2048 in the same round. Rows are merged into ``throughput.json`` beside this file,
from which come the table that is printed and ``throughput.png``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vit_lightning import ViT
from vit_lightning.storage.environment import describe_environment
from vit_lightning.training.flops import forward_flops
from vit_lightning.training.memory import keep_freed_memory, peak_memory
from vit_lightning.training.optim import parameter_groups
from vit_lightning.training.rounds import Interval, combined, matrix_product, median, paired_rounds

HERE = Path(__file__).parent
RESULTS, FIGURE = HERE / "throughput.json", HERE / "throughput.png"


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


SHAPES = {
    "s16": Shape("S/16 at 224, batch 8", 224, 16, 384, 12, 6, 8),
    "ti4": Shape("Ti/4 at 32, batch 64", 32, 4, 192, 12, 3, 64),
    "tokens17": Shape("17 tokens, width 64, 6 blocks, batch 128", 16, 4, 64, 6, 4, 128),
    "b16": Shape("B/16 at 224, batch 128", 224, 16, 768, 12, 12, 128, 1000),
    "l16": Shape("L/16 at 224, batch 64", 224, 16, 1024, 24, 16, 64, 1000),
    "tiny": Shape("a tiny network", 8, 4, 16, 2, 2, 4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    return ViT(
        image_size=shape.image,
        patch_size=shape.patch,
        emb_size=shape.width,
        depth=shape.depth,
        num_heads=shape.heads,
        num_classes=shape.classes,
    )


def timm(shape: Shape, *, fused: bool) -> nn.Module:
    model = importlib.import_module("timm").models.VisionTransformer(
        img_size=shape.image,
        patch_size=shape.patch,
        embed_dim=shape.width,
        depth=shape.depth,
        num_heads=shape.heads,
        num_classes=shape.classes,
    )
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def torchvision(shape: Shape) -> nn.Module:
    return importlib.import_module("torchvision").models.VisionTransformer(
        image_size=shape.image,
        patch_size=shape.patch,
        num_layers=shape.depth,
        num_heads=shape.heads,
        hidden_dim=shape.width,
        mlp_dim=4 * shape.width,
        num_classes=shape.classes,
    )


def vit_pytorch(shape: Shape, *, equal: bool) -> nn.Module:
    model = importlib.import_module("vit_pytorch").ViT(
        image_size=shape.image,
        patch_size=shape.patch,
        num_classes=shape.classes,
        dim=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        mlp_dim=4 * shape.width,
        dim_head=shape.width // shape.heads if equal else 64,
    )
    for attention, _ in model.transformer.layers if equal else ():
        attention.to_qkv = nn.Linear(shape.width, 3 * shape.width)
    return model


def hugging_face(shape: Shape) -> nn.Module:
    library = importlib.import_module("transformers")
    sizes = {"hidden_size": shape.width, "num_hidden_layers": shape.depth, "num_attention_heads": shape.heads}
    images = {"image_size": shape.image, "patch_size": shape.patch, "num_labels": shape.classes}
    config = library.ViTConfig(**sizes, **images, intermediate_size=4 * shape.width)
    return library.ViTForImageClassification(config)


OURS, OWN_DEFAULTS = "ours", "vit-pytorch, its defaults"
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
    calls: int = 1,
    batch: int | None = None,
    names: Sequence[str] = tuple(NETWORKS),
) -> list[dict[str, Any]]:
    """Returns a row for each network of ``names``, with ours first, and for each matrix product.

    Args:
        shape: one of ``SHAPES``.
        precision: fp32 or bf16.
        mode: training or inference.
        device: cpu or cuda.
        compiled: whether ``torch.compile`` compiles all networks.
        rounds: rounds in which all take turns once.
        seconds: no round begins after this time, the warm-up not counted.
        calls: steps in a row of each in a round; on CUDA enough to fill the queue, as 10.
        batch: images in a batch, by default the shape's.
        names: networks to measure; those whose library is missing are left out with a line.
    """
    sizes = SHAPES[shape] if batch is None else SHAPES[shape]._replace(batch=batch)
    place, dtype = torch.device(device), DTYPES[precision]
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
    wait = torch.cuda.synchronize if place.type == "cuda" else None
    result = paired_rounds(steps, rounds, warmup=1, calls=calls, limit_s=seconds, synchronize=wait)
    square = next(iter(products))
    network_flops = step_flops(sizes, mode)
    common = {
        **{"shape": shape, "batch": sizes.batch, "precision": precision, "mode": mode, "device": device},
        **{"compiled": compiled, "rounds": len(result.seconds[OURS]), "calls": calls},
    }
    table = []
    for name in steps:
        spent = result.seconds[name]
        if name in products:
            rates = {
                "gflops_median": flops[name] / result.median(name) / 1e9,
                "gflops_best": flops[name] / min(spent) / 1e9,
            }
            table.append({**common, "name": name, "kind": "matrix product", **rounded(rates)})
            continue
        shares = [network_flops / flops[square] * ratio for ratio in result.ratios(name, square)]
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

    def train() -> None:
        optimizer.zero_grad()
        cross_entropy(forward(), labels).backward()
        optimizer.step()

    def infer() -> None:
        with torch.inference_mode():
            forward()

    def held() -> int:
        state = [value for values in optimizer.state.values() for value in values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*network.parameters(), *state))

    return (train if is_training else infer), held


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


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


def merge(rows: list[dict[str, Any]], path: Path = RESULTS) -> list[dict[str, Any]]:
    """Puts rows in place of earlier ones of the same device, shape, precision and mode, with hardware and versions."""
    known = json.loads(path.read_text()) if path.is_file() else []
    about = describe_environment()
    installed = {distribution.name: distribution.version for distribution in distributions()}
    libraries = {name: installed.get(name) for name in ("torch", "timm", "torchvision", "vit-pytorch", "transformers")}
    facts = {
        "device_name": about["processor"] if rows[0]["device"] == "cpu" else about["gpus"][0],
        **{
            "cores": about["cores"],
            "threads": about["threads"],
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        **{"versions": libraries, "date": about["started"][:10]},
        "commit": (about["git"]["package"] or {}).get("commit"),
        "command": shlex.join(["python", "experiments/benchmarks/throughput.py", *sys.argv[1:]]),
    }
    rows = [{**row, **facts} for row in rows]
    new = {group(row) for row in rows}
    rows = [row for row in known if group(row) not in new] + rows
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return rows


def interval(row: dict[str, Any], key: str = "ours_over_this") -> Interval:
    return Interval(**row[key])


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns Markdown: per device, precision and mode the networks, then ours over the fastest equal peer."""
    lines: list[str] = []
    settings = dict.fromkeys((row["device_name"], row["compiled"], row["mode"], row["precision"]) for row in rows)
    for setting in settings:
        device, compiled, mode, precision = setting
        chosen = [
            row for row in rows if (row["device_name"], row["compiled"], row["mode"], row["precision"]) == setting
        ]
        shapes = [name for name in SHAPES if any(row["shape"] == name for row in chosen)]
        lines += ["", f"**{mode}, {precision}{', compiled' * compiled}** ({device})", ""]
        lines += ["| | " + " | ".join(SHAPES[name].title for name in shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
        cells = {(row["name"], row["shape"]): row for row in chosen}
        for name in NETWORKS:
            texts = [network_cell(cells[name, shape]) if (name, shape) in cells else "" for shape in shapes]
            if any(texts):
                lines.append(f"| {name} | {' | '.join(texts)} |")
        fastest = {shape: fastest_peer(chosen, shape) for shape in shapes}
        lines.append(
            "| **ours over the fastest equal one** | "
            + " | ".join(f"**{interval(row)}**, {row['name']}" if row else "" for row in fastest.values())
            + " |"
        )
        shares = [interval(cells[OURS, shape], "share_of_ceiling") for shape in shapes]
        lines.append(
            f"| ours, share of the ceiling | {' | '.join(f'{100 * share.median:.0f} %' for share in shares)} |"
        )
        ceilings = [[row for row in chosen if row["shape"] == shape and row["kind"] != "network"] for shape in shapes]
        texts = [", ".join(f"{row['name']}: {row['gflops_median']:,.0f}" for row in ceiling) for ceiling in ceilings]
        lines.append(f"| matrix products, GFLOP/s | {' | '.join(texts)} |")
        lines.append(f"| rounds | {' | '.join(str(cells[OURS, shape]['rounds']) for shape in shapes)} |")
        if len(shapes) > 1 and all(fastest.values()):
            mean = combined([interval(row) for row in fastest.values() if row])
            lines += ["", f"Geometric mean of ours over the fastest equal one: **{mean}**"]
    return "\n".join(lines[1:])


def network_cell(row: dict[str, Any]) -> str:
    memory = f", {row['peak_mb']:,.0f} MB" if row["peak_mb"] is not None else ""
    rate = f"{row['images_per_s_best']:,.0f} images/s{memory}"
    return rate if row["name"] == OURS else f"{interval(row)}; {rate}"


def fastest_peer(rows: list[dict[str, Any]], shape: str) -> dict[str, Any] | None:
    """Returns the row of the peer with our options against which our median ratio is the smallest."""
    others = [row for row in rows if row["shape"] == shape and row["kind"] == "network"]
    others = [row for row in others if row["name"] not in (OURS, OWN_DEFAULTS)]
    return min(others, key=lambda row: row["ours_over_this"]["median"], default=None)


def draw(rows: list[dict[str, Any]], path: Path = FIGURE) -> None:
    """Draws ratios of ours to each peer with their intervals, a panel for each mode and precision."""
    import matplotlib.pyplot as plt

    networks = [row for row in rows if row["kind"] == "network" and row["name"] != OURS]
    settings = list(
        dict.fromkeys((row["mode"], row["precision"], row["compiled"], row["device_name"]) for row in networks)
    )
    shapes = [name for name in SHAPES if any(row["shape"] == name for row in networks)]
    names = [name for name in NETWORKS if any(row["name"] == name for row in networks)][::-1]
    columns = min(2, len(settings))
    size = (5.2 * columns + 1.2, 0.4 + 3.0 * math.ceil(len(settings) / columns))
    figure, axes = plt.subplots(
        math.ceil(len(settings) / columns), columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, setting in zip(axes.flat, settings, strict=False):
        for index, shape in enumerate(shapes):
            chosen = [
                row
                for row in networks
                if (row["mode"], row["precision"], row["compiled"], row["device_name"]) == setting
                and row["shape"] == shape
            ]
            values = [interval(row) for row in chosen]
            heights = [names.index(row["name"]) + 0.22 * (len(shapes) / 2 - index - 0.5) for row in chosen]
            errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
            axis.errorbar(
                [v.median for v in values], heights, xerr=errors, fmt="o", ms=4.5, capsize=2, label=SHAPES[shape].title
            )
        axis.axvline(1.0, color="0.5", linewidth=1)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [t for t in (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16) if low <= t <= high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
        axis.set_title(f"{setting[0]}, {setting[1]}{', compiled' * setting[2]}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("speed of ours over that of the other (95 % interval)")
    devices = ", ".join(dict.fromkeys(row["device_name"] for row in networks))
    figure.suptitle(f"Right of the line ours is faster   ({devices})", fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shapes), fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="s16,ti4,tokens17", help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--mode", default="training,inference")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds of each measurement")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the rounds of each measurement")
    parser.add_argument("--calls", type=int, help="steps in a row in a round; by default 1, on CUDA 10")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--peers", help=f"some of {'; '.join(NETWORKS)}, separated by semicolons; by default all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to which rows are added")
    args = parser.parse_args()
    keep_freed_memory()
    names = tuple(NETWORKS) if args.peers is None else tuple(filter(None, args.peers.split(";")))
    combinations = [
        (shape, precision, mode)
        for mode in args.mode.split(",")
        for precision in args.precision.split(",")
        for shape in filter(None, args.shapes.split(","))
    ]
    for shape, precision, mode in combinations:
        print(f"{SHAPES[shape].title}, {precision}, {mode} ...", file=sys.stderr, flush=True)
        rows = measure(
            shape,
            precision=precision,
            mode=mode,
            device=args.device,
            compiled=args.compiled,
            rounds=args.rounds,
            seconds=args.seconds,
            calls=args.calls or (10 if args.device == "cuda" else 1),
            batch=args.batch,
            names=names,
        )
        merge(rows, args.out)
    rows = json.loads(args.out.read_text())
    measured = set(combinations)
    print(tables([row for row in rows if not measured or (row["shape"], row["precision"], row["mode"]) in measured]))
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
