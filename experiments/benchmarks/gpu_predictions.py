"""Predicted speed of a training step on a GPU, from its operations, bytes and launches.

    python experiments/benchmarks/gpu_predictions.py [--machine FILE]         the tables of README.md

A step is a list of kernels. One takes the longest of its operations at a rate, its bytes at a bandwidth, and the least
that any kernel takes; the host takes its time for each launch; the step takes the longer of the two sums, or their sum
where the host waits for the device in each step. ``Machine`` holds the constants; ``--machine gpu/machine.json`` takes
those that ``gpu.py`` has measured.

Left out: waits between kernels, caches (a tensor that is read at once may still be in the 50 MB of the second level),
operators that a library picks for odd sizes, and clocks that fall under load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

PEAK = 989.4e12
"""Dense bf16 operations per second of an H100 SXM, by its data sheet."""


@dataclass(frozen=True)
class Machine:
    """Constants of a GPU and its host.

    Args:
        product: operations per second of a product of two bf16 matrices of 8192 x 8192.
        reached: fraction of it that products of a network's sizes reach, if not bound by memory.
        attention: fraction of it that fused attention reaches forward; backward has 2.5 times the operations at three
            quarters of the rate (FlashAttention 2 on an H100: about 350 of 989, arXiv 2407.08608, figure 5).
        bytes_s: bytes per second, read and written.
        least: seconds of the smallest kernel with the gap before it.
        eager: host seconds of an eager operator.
        compiled: host seconds of a launch by compiled code.
        entry: host seconds of an entry to compiled code, forward or backward: guards and autograd.
        replay: host seconds of a CUDA graph.
        jpeg: photographs of 500 x 375 that a core decodes and resizes in a second.
    """

    product: float = 798e12
    reached: float = 0.8
    attention: float = 0.4
    bytes_s: float = 2.7e12
    least: float = 2.5e-6
    eager: float = 6e-6
    compiled: float = 4e-6
    entry: float = 100e-6
    replay: float = 50e-6
    jpeg: float = 450.0


class Network(NamedTuple):
    """Sizes of a ViT with a class token, and of its batch."""

    image: int
    patch: int
    width: int
    depth: int
    heads: int
    batch: int
    classes: int

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    @property
    def weights(self) -> int:
        """Number of parameters, without norms and biases."""
        return self.width * (12 * self.depth * self.width + 3 * self.patch**2 + self.tokens + self.classes)


NETWORKS = {
    "Ti/4": Network(32, 4, 192, 12, 3, 512, 10),
    "S/16": Network(224, 16, 384, 12, 6, 256, 1000),
    "B/16": Network(224, 16, 768, 12, 12, 128, 1000),
    "L/16": Network(224, 16, 1024, 24, 16, 64, 1000),
}


class Kernel(NamedTuple):
    """One launch or several: operations of matrix units, bytes read and written, share of the product's rate."""

    flops: float
    bytes: float
    rate: float
    launches: int = 1

    def seconds(self, machine: Machine) -> float:
        busy = self.flops / (self.rate * machine.product) if self.flops else 0.0
        return max(busy, self.bytes / machine.bytes_s, self.launches * machine.least)


def kernels(network: Network, machine: Machine, *, residual: int = 2, last_alone: bool = True) -> Iterator[Kernel]:
    """Yields the kernels of a compiled training step in bf16, with AdamW in one launch for 60 tensors.

    Args:
        network: the sizes.
        machine: its shares of the product's rate.
        residual: bytes of a number of the residual stream: 2 in bf16, 4 in float32.
        last_alone: whether the last block makes the class token alone.
    """
    all_rows, width = network.batch * network.tokens, network.width

    def product(rows: float, inner: int, outer: int) -> Kernel:
        bytes = 2 * (rows * inner + inner * outer + rows * outer)
        return Kernel(2.0 * rows * inner * outer, bytes, machine.reached)

    def pointwise(numbers: float, bytes: int) -> Kernel:
        return Kernel(0, numbers * bytes, 0)

    def linear(rows: float, inner: int, outer: int, *, image: bool = False) -> Iterator[Kernel]:
        """Yields the product, those of the gradients of input and weight, and the sum for the bias's gradient."""
        for _ in range(2 if image else 3):
            yield product(rows, inner, outer)
        yield pointwise(rows * outer, 2)

    pixels = 3 * network.patch**2
    yield from linear(all_rows, pixels, width, image=True)
    yield pointwise(all_rows * pixels, 4 + 2)  # patches as rows
    yield pointwise(all_rows * width, 2 * (2 + residual))  # positions, and their gradient
    for block in range(network.depth):
        rows = network.batch if last_alone and block == network.depth - 1 else all_rows
        for _ in range(2):  # residual add and norm; of their gradients the sums over tokens too
            yield pointwise(rows * width, 2 + 2 * residual + 2)
            yield pointwise(rows * width, 2 + 3 * residual)
            yield pointwise(rows * width, 2 + residual)
        yield from linear(all_rows, width, 3 * width)
        scores = 4.0 * rows * network.tokens * width
        yield Kernel(scores, 2 * 4 * rows * width, machine.attention)
        yield Kernel(2.5 * scores, 2 * 8 * rows * width, 0.75 * machine.attention, launches=3)
        yield pointwise(all_rows * 3 * width, 2 + 2)  # gradients of queries, keys and values in one tensor
        yield from linear(rows, width, width)
        yield from linear(rows, width, 4 * width)
        yield pointwise(rows * 4 * width, 2 + 2)  # GELU
        yield pointwise(rows * 4 * width, 3 * 2)
        yield from linear(rows, 4 * width, width)
    yield from linear(network.batch, width, network.classes)
    yield Kernel(0, 4 * network.batch * network.classes * 4, 0, launches=6)  # loss
    yield Kernel(0, network.weights * (7 * 4 + 4 + 2 + 2 + 4), 0, launches=8)  # AdamW; casts of weights and gradients


def image_flops(network: Network) -> float:
    """Returns the operations of products in a training step of one image, the whole last block counted."""
    machine = Machine()
    return sum(kernel.flops for kernel in kernels(network, machine, last_alone=False)) / network.batch - (
        network.depth * 0.5 * 4.0 * network.tokens**2 * network.width  # fused attention makes its scores again
    )


class Prediction(NamedTuple):
    """Predicted step.

    Args:
        device: seconds of the device.
        host: seconds of the host.
        seconds: of the step.
        launches: kernels.
        bytes: read and written.
    """

    device: float
    host: float
    seconds: float
    launches: int
    bytes: float


GRAPH, WHOLE, BLOCKS, EAGER = "CUDA graph", "compiled whole", "compiled by blocks", "eager"
EAGER_STEP = {"forward": 374, "backward": 389, "optimizer": 12}
"""Operators of a ViT of 12 blocks, by ``gpu_counts.py``."""
COUNTED = {BLOCKS: (50.5, 60), WHOLE: (37, 33), GRAPH: (37, 33)}
"""Kernels of a block, both ways, and all others, counted in Inductor's code (Ti/4), and by ``gpu_counts.py``."""


def predict(
    network: Network,
    machine: Machine,
    *,
    how: str = WHOLE,
    data: int = 32,
    passes: int = 20,
    waits: bool = False,
    last_alone: bool = True,
) -> Prediction:
    """Predicts a step.

    Args:
        network: the sizes.
        machine: the constants.
        how: CUDA graph, compiled whole, compiled by blocks, or eager.
        data: launches from the loader's batch to the network: eager ones, but for a graph or a whole network compiled.
        passes: how often they read and write the pixels of a batch, as bytes.
        waits: whether the host waits for the device in each step.
        last_alone: whether the last block makes the class token alone.
    """
    made = list(kernels(network, machine, last_alone=last_alone))
    device = sum(kernel.seconds(machine) for kernel in made)
    launches = sum(kernel.launches for kernel in made)
    pixels = 3 * network.image**2 * network.batch
    device += data * machine.least + passes * 2 * pixels / machine.bytes_s
    if how == EAGER:
        depth = network.depth / 12
        operators = round(depth * (EAGER_STEP["forward"] + EAGER_STEP["backward"])) + EAGER_STEP["optimizer"]
        # casts of weights, and what compiled code does within other kernels: each reads and writes its tensor
        alone = operators - launches
        device += alone * (machine.least + 2 * 2 * network.batch * network.tokens * network.width / machine.bytes_s / 3)
        launches = operators
        host = launches * machine.eager
    else:
        of_block, others = COUNTED[how]
        small = round(of_block * network.depth) + others - launches  # casts of weights, sums in two stages
        device += small * machine.least
        launches += small
        entries = {BLOCKS: 2 * network.depth, WHOLE: 2, GRAPH: 0}[how]
        host = entries * machine.entry + launches * machine.compiled if how != GRAPH else 2 * machine.replay
    host += data * (machine.compiled if how in (WHOLE, GRAPH) else machine.eager)
    seconds = host + device if waits else max(host, device)
    return Prediction(device, host, seconds, launches + data, sum(kernel.bytes for kernel in made))


CASES = {
    "before": {"how": BLOCKS, "data": 2350, "waits": True, "last_alone": False},
    "now": {"how": WHOLE, "data": 32},
    "now, graphs": {"how": GRAPH, "data": 32},
}
"""Steps that are predicted: launches of the data as counted for cifar10_vit_small, now 21 compiled and 11 of mixing."""


COLUMNS = (
    *("network, batch", "GFLOP an image", "GB a step", "", "launches", "host", "device", "images/s"),
    *("of 989 TFLOP/s", "of the product", "bound by"),
)


def table(machine: Machine) -> list[str]:
    """Returns the predictions as Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    # a small batch is what CUDA graphs are for
    for name, network in (NETWORKS | {"Ti/4, as its config": NETWORKS["Ti/4"]._replace(batch=128)}).items():
        flops = image_flops(network)
        for case, given in CASES.items():
            found = predict(network, machine, **given)
            rate = network.batch / found.seconds
            bound = "launches" if found.host > found.device else "the device"
            cells = [f"{name}, {network.batch}", f"{flops / 1e9:.3g}", f"{found.bytes / 1e9:.3g}", case]
            cells += [f"{found.launches:,}", f"{1e3 * found.host:.1f} ms", f"{1e3 * found.device:.1f} ms"]
            cells += [f"{float(f'{rate:.2g}'):,.0f}", f"{100 * flops * rate / PEAK:.0f} %"]
            cells += [f"{100 * flops * rate / machine.product:.0f} %"]
            lines.append([*cells, "both, in turn" if given.get("waits") else bound])
    return ["| " + " | ".join(line) + " |" for line in lines]


def read_machine(path: Path) -> Machine:
    """Returns the constants, those that ``gpu.py`` has measured in place of the assumed ones."""
    found = json.loads(path.read_text())["constants"]
    return replace(Machine(), **{field.name: found[field.name] for field in fields(Machine) if field.name in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="machine.json of gpu.py; by default the constants are assumed")
    given = parser.parse_args()
    machine = read_machine(given.machine) if given.machine else Machine()
    print("\n".join(table(machine)))


if __name__ == "__main__":
    main()
