"""Inductor's code for a GPU, made on a machine without one, and how often it launches a kernel.

python experiments/benchmarks/gpu_code.py [--only NAME ...] [--images 64] [--save FOLDER]

Dynamo and Inductor run as they would, on tensors without values that say that they lie on an H100; Triton's code is
written but not compiled. Of a config it is the whole transform of a training batch up to mixing, at the config's size.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from gpu_counts import AUGMENTATIONS, CONFIGS, read_config
from torch import Tensor
from torch._inductor import compile_fx, graph
from torch._inductor import config as inductor
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from triton.backends.compiler import GPUTarget

from vit_lightning import constants

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=80 * 2**30,
)
LAUNCHES = re.compile(r"^ +(?:\w+ = )?(\w+\.run|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(", re.MULTILINE)
"""Calls of kernels in the wrapper that Inductor writes: Triton's, products by libraries, and torch's own operators."""


def code_of(run: Callable[..., Any], *tensors: Tensor, **options: Any) -> list[str]:
    """Returns the code of each graph of a function of tensors; an error if it is not one graph.

    Args:
        run: the function.
        tensors: its arguments; their values do not matter.
        options: settings of Inductor.
    """
    written: list[str] = []

    def write(lowered: graph.GraphLowering) -> Any:
        code, _ = lowered.codegen()
        written.append(code.value)  # type: ignore[attr-defined]
        raise Written

    def compile_(module: Any, inputs: Any) -> Any:
        with pretended_device(), mock.patch.object(graph.GraphLowering, "compile_to_module", write):
            return compile_fx.compile_fx(module, inputs)

    torch._dynamo.reset()
    settings = inductor.patch(
        {"fx_graph_cache": False, "compile_threads": 1, "joint_graph_constant_folding": False} | options
    )

    def made(device: torch.device, make: Callable[..., Tensor], *given: Any) -> Tensor:
        with unset_fake_temporarily():
            values = make(*given)
        return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)

    made_there = mock.patch.multiple(constants, _MADE={}, _made=made)
    with settings, mock.patch("torch.cuda._lazy_init"), made_there:
        with FakeTensorMode():
            there = [
                torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="cuda") for part in tensors
            ]
            run(*there)  # makes constants
        try:
            torch.compile(run, backend=compile_, fullgraph=True, dynamic=False)(*there)
        except Exception:
            if not written:
                raise
    return written


class Written(Exception):
    """The code is there; what would follow needs a GPU."""


def launches(code: str) -> list[str]:
    """Returns what the code calls, a name for each launch."""
    return LAUNCHES.findall(code)


@contextmanager
def pretended_device() -> Iterator[None]:
    """Lets Inductor take this machine for one with an H100; patterns that need values of constants are left out."""
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": H100.shared_memory_per_block_optin}
        ),
    )
    replaced: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda device=None: H100,
        "torch.cuda.get_device_capability": lambda device=None: (H100.major, H100.minor),
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch._dynamo.device_interface.CudaInterface.get_device_properties": lambda device=None: H100,
        "torch.cuda.get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda state: None,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        for module, name in ((pad_mm, "_pad_mm"), (fuse_attention, "_sfdp"), (misc_patterns, "_misc_patterns")):
            stack.enter_context(mock.patch.object(module, f"{name}_init"))
        previous = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver)
        try:
            yield
        finally:
            triton.runtime.driver._active = previous


def changes_of(name: str, folder: Path) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Returns an augmentation, or all that a config compiles beside its network, and the size of its images."""
    if name in AUGMENTATIONS:
        change = AUGMENTATIONS[name]()
        return lambda images, keys: change(images, keys), (32, 32)
    data = read_config(CONFIGS[name], folder).data
    return lambda images, keys: data.transform._augmented(images, keys, 0), tuple(data.image_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*AUGMENTATIONS, *CONFIGS], default=[*AUGMENTATIONS, *CONFIGS])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--save", type=Path, help="folder for the code")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {given.images} images\n")
    print("| augmentation or config | pixels | compiled launches |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            change, size = changes_of(name, Path(folder))
            batch = torch.empty(given.images, 3, *size, dtype=torch.uint8)
            code = "\n".join(code_of(change, batch, torch.empty(given.images, dtype=torch.int64)))
            print(f"| {name} | {size[0]} | {len(launches(code))} |", flush=True)
            if given.save is not None:
                (given.save / f"{name}.py").write_text(code)


if __name__ == "__main__":
    main()
