"""Kernels that ``torch.compile`` launches in a training step on a GPU, counted on a machine without one.

python experiments/benchmarks/compiled_counts.py [--only NAME ...] [--depth 12] [--apart] [--kernels]

Dynamo traces fake tensors that lie on ``cuda``, under its autocast; then Inductor writes Triton code for a pretended
H100, forward and backward, which is read instead of run. Counted are its kernels, products and attention included
(flash attention, one each way), and Dynamo's graphs and graph breaks. Needs triton, but neither a GPU nor a driver.

Autograd cannot run on fake tensors of a device that is not there: the backward graph is derived with the same operators
on a CPU, and its device is changed before Inductor gets it. Shapes are fixed.
"""

from __future__ import annotations

import argparse
import collections
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from gpu_code import launches, pretended_device
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from vit_lightning import LossConfig, ViT, ViTClassifier
from vit_lightning.training.compiled import compile_module, gpu_options
from vit_lightning.training.fast_paths import accelerate

DEVICE = torch.device("cuda", 0)
NETWORKS: dict[str, dict[str, Any]] = {
    "Ti/4 at 32": {"preset": "Ti/4", "image_size": 32, "num_classes": 10, "drop_path": 0.1},
    "B/16 at 224": {"preset": "B/16", "image_size": 224, "drop_path": 0.1},
}
IMAGES = 128


class Kernels:
    """Kernels of the code that Inductor wrote, a Counter for each graph: forward, backward, and so on."""

    def __init__(self) -> None:
        self.graphs: list[collections.Counter[str]] = []

    @property
    def launches(self) -> list[int]:
        return [graph.total() for graph in self.graphs]

    def backend(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Returns the graph as it is, after its code has been counted: a backend of ``torch.compile``."""
        for part in graph.graph.nodes:
            if part.target is torch.nn.functional.scaled_dot_product_attention:
                part.target = _flash_attention
        graph.recompile()
        mode: Any = detect_fake_mode(inputs)
        with mode:
            traced = make_fx(graph, tracing_mode="fake")(*inputs)  # autocast has become casts
            _move(traced, torch.device("cpu"))
            on_cpu = [_like(part, torch.device("cpu")) for part in inputs]
            with torch._C._DisableAutocast(), functorch.patch(force_non_lazy_backward_lowering=True):
                compile_fx.compile_fx(traced, on_cpu, inner_compile=self._count)
        return graph.forward

    def _count(self, graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        mode: Any = detect_fake_mode(inputs)
        _move(graph, DEVICE)
        with mode, torch.no_grad():
            there = [_like(part, DEVICE) for part in inputs]
            FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
        written: list[str] = []

        def keep_code(lowered: GraphLowering) -> Any:
            written.append(lowered.codegen()[0].value)
            raise _Written

        with mock.patch.object(GraphLowering, "_compile_to_module", keep_code), writing():
            try:
                compile_fx.compile_fx_inner(graph, there, **options)
            except Exception:  # whatever torch makes of _Written
                if not written:
                    raise
        self.graphs.append(collections.Counter(launches(written[0])))
        return _never_called


class _Written(Exception):
    """Signal that the code is written, and need not be compiled."""


def _never_called(args: list[Any]) -> Any:
    raise AssertionError("the code is for a GPU that is not there")


_never_called._boxed_call = True  # type: ignore[attr-defined]


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, **kwargs: Any) -> Tensor:
    half = (part.to(torch.bfloat16) for part in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*half, scale=scale)[0]
    return out


def _move(graph: GraphModule, device: torch.device) -> None:
    """Changes the device of what a graph makes."""
    for part in graph.graph.nodes:
        part.args, part.kwargs = node.map_aggregate(
            (part.args, part.kwargs), lambda value: device if isinstance(value, torch.device) else value
        )
    graph.recompile()


def _like(value: Any, device: torch.device) -> Any:
    """Returns a new tensor on a device in place of another; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.requires_grad_(value.requires_grad)


@contextmanager
def writing() -> Iterator[None]:
    """Lets Inductor write code for an H100."""
    kept = mock.patch.object(FakeTensorMode, "avoid_device_init", True), mock.patch("torch.cuda._lazy_init")
    with pretended_device(), kept[0], kept[1], inductor.patch(fx_graph_cache=False):
        yield


def autocast() -> torch.autocast:
    """Returns autocast in bf16 as on a GPU."""
    with writing():
        return torch.autocast("cuda", torch.bfloat16)


def to_device(module: nn.Module, mode: FakeTensorMode) -> None:
    """Puts fake tensors on the GPU in place of the parameters and buffers of a module."""
    with mode:
        for part in module.modules():
            for name, value in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(_like(value.detach(), DEVICE), requires_grad=value.requires_grad))
            for name, value in part.named_buffers(recurse=False):
                setattr(part, name, _like(value, DEVICE))


def count_step(settings: dict[str, Any], compile: Callable[[ViTClassifier, Any], None]) -> Kernels:
    """Counts a training step of a ViT; ``compile`` gets the module and a backend."""
    torch._dynamo.reset()
    counters.clear()
    module, kernels, mode = ViTClassifier(ViT(**settings), loss=LossConfig()), Kernels(), FakeTensorMode()
    mode.allow_non_fake_inputs = True
    accelerate(module.network)
    to_device(module.train(), mode)
    compile(module, kernels.backend)
    with mode, autocast():
        images = torch.empty(IMAGES, 3, *module.network.image_size, device=DEVICE)
        module.step((images, torch.empty(IMAGES, dtype=torch.long, device=DEVICE)), "train")
    return kernels


def compile_blocks(module: ViTClassifier, backend: Any) -> None:
    torch._dynamo.config.recompile_limit = 64
    for block in module.network.encoder:  # type: ignore[union-attr]
        block.compile(backend=backend, dynamic=False)


def compile_whole(module: ViTClassifier, backend: Any) -> None:
    compile_module(module, IMAGES, DEVICE, backend=backend)


WAYS: dict[str, Callable[[ViTClassifier, Any], None]] = {"blocks": compile_blocks, "whole": compile_whole}
"""``whole`` is what the option ``compile`` does on a GPU, ``blocks`` what it does on a CPU but for fixed shapes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--depth", type=int, help="number of blocks, fewer of which are counted sooner")
    parser.add_argument("--apart", action="store_true", help="each cast of a weight or gradient as a kernel of its own")
    parser.add_argument("--combo", action="store_true", help="Inductor's combo_kernels, which joins small kernels")
    parser.add_argument("--kernels", action="store_true", help="names of the kernels")
    given = parser.parse_args()
    inductor.combo_kernels = given.combo
    print(f"torch {torch.__version__}, {IMAGES} images\n")
    print("| network | compiled | forward | backward | casts alone | graphs | breaks |\n|---|---|---|---|---|---|---|")
    for name in given.only:
        settings = NETWORKS[name] | ({"depth": given.depth} if given.depth else {})
        for way in given.ways:
            with inductor.patch({} if given.apart else gpu_options()):
                kernels = count_step(settings, WAYS[way])
            graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            both = (sum(kernels.launches[each::2]) for each in (0, 1))
            casts = sum(
                number
                for graph in kernels.graphs
                for kernel, number in graph.items()
                if re.fullmatch(r"triton_poi_fused__to_copy_\d+\.run", kernel)
            )
            print(f"| {name} | {way} | {' | '.join(map(str, both))} | {casts} | {graphs} | {breaks} |", flush=True)
            if given.kernels:
                for graph in kernels.graphs:
                    print("".join(f"    {number} {kernel}\n" for kernel, number in graph.items()))


if __name__ == "__main__":
    main()
