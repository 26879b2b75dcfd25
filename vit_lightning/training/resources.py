"""Resources of a network on a machine: floating-point operations, memory, and the precision that is fast there."""

import contextlib
import copy
import ctypes
import math
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(network: nn.Module, shape: tuple[int, int, int]) -> int | None:
    """Returns the floating-point operations of a forward pass of one image (c, H, W); a multiply-add counts as two.

    torch counts them on the meta device. None for a network that cannot run there.
    """
    try:
        empty = copy.deepcopy(network).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            empty(torch.empty(1, *shape, device="meta"))
    except Exception:  # a network of the user may raise anything
        return None
    return int(counter.get_total_flops())


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # M_... of glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory; returns whether it does, which is false on systems without glibc.

    By default glibc maps each large block of memory and unmaps it when it is freed. Each step of training allocates the
    same blocks again, and the kernel has to clear each page of them at its first use.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _LARGEST), mallopt(_TOP_PAD, 64 * 2**20)])


def peak_memory_mb() -> float:
    """Returns the peak memory in 10^6 bytes: of tensors on the GPU, or of the process on a CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return round(torch.cuda.max_memory_allocated() / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def free_memory(device: torch.device) -> float:
    """Returns the bytes that are free on a GPU, or on this machine for its processes; infinity if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        found += [1024.0 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])]
        group = Path("/sys/fs/cgroup")  # of a container or a job; "max" is no limit
        found += [int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())]
    return min(found)


AUTO = "auto"


def auto_precision(accelerator: Any = "auto") -> str:
    """Returns the precision that ``auto`` stands for on this machine: bf16-mixed with fast bfloat16, else 32-true.

    Args:
        accelerator: as Lightning's Trainer takes it.
    """
    return "bf16-mixed" if has_fast_bfloat16(device_type(accelerator)) else "32-true"


def has_fast_bfloat16(device_type: str) -> bool:
    """Whether products of bfloat16 matrices beat those of float32: on GPUs from Ampere on, and CPUs with instructions.

    On a CPU these are AMX, or AVX512-BF16 of AMD. An Intel CPU with AVX512-BF16 and without AMX was slower in bfloat16:
    products of 2,048 square matrices ran at 164 GFLOP/s, and at 294 in float32 (2 threads).
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or torch.cpu._is_amx_tile_supported():
        return device_type == "cpu"
    return torch.cpu._is_avx512_bf16_supported() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()


def device_type(accelerator: Any) -> str:
    """Returns the type of the device that Lightning takes for ``trainer.accelerator``."""
    name = str(accelerator or "auto").lower()
    if name in ("cuda", "gpu", "auto") and torch.cuda.is_available():
        return "cuda"
    if name in ("mps", "gpu", "auto") and torch.backends.mps.is_available():
        return "mps"
    return "cpu" if name in ("cpu", "auto") else name


_SXM = {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}
_NVL = {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "GB200": {"bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0},  # Blackwell data sheet: 5 PFLOPS with sparsity
    "B200": {"bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0},  # the same, HGX B200: 4.5 PFLOPS
    "GH200": _SXM,  # GH200 data sheet: 990 without sparsity
    "H200 NVL": _NVL,  # H200 data sheet: 1,671 with sparsity
    "H200": _SXM,  # the same: 1,979
    "H100 NVL": _NVL,  # www.nvidia.com/en-us/data-center/h100: 1,671 with sparsity
    "H100 PCIe": {"bf16": 756.5, "tf32": 378.0, "fp32": 51.0},  # H100 data sheet of 2022: 1,513 with sparsity
    "H100 80GB HBM3": _SXM,  # H100 page: 1,979; more digits in the H100 architecture white paper
    "A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5},  # A100 data sheet: 312 without sparsity
    "L40S": {"bf16": 362.05, "tf32": 183.0, "fp32": 91.6},  # resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    "RTX 4090": {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6},  # Ada white paper, appendix A, table 2: sums in float32
}
"""Peaks of NVIDIA's GPUs in 10^12 FLOPs per second by the sheets named, for dense matrices: half of the sparse ones.

Products of float16 are as fast as those of bfloat16. The first name that a device's own name contains holds.
"""
_OTHER_DEVICES = ("MIG", "Laptop", "4090 D")


def peak_flops(device: str, precision: str, matmul_precision: str) -> float | None:
    """Returns the dense peak of a GPU in FLOPs per second; None for one that the table does not have.

    Args:
        device: name of the GPU, as CUDA has it.
        precision: of training, as Lightning has it.
        matmul_precision: of products of float32 matrices, as torch has it.
    """
    name = next((name for name in PEAK_TFLOPS if name in device), None)
    kinds = {"16": "bf16", "bf16": "bf16", "32": "fp32" if matmul_precision == "highest" else "tf32"}
    kind = kinds.get(precision.split("-")[0])
    if name is None or kind is None or any(other in device for other in _OTHER_DEVICES):
        return None
    return 1e12 * PEAK_TFLOPS[name][kind]
