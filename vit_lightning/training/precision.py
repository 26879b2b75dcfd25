"""The precision of training: ``trainer.precision: auto`` is bfloat16 where the hardware multiplies it fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

AUTO = "auto"


def auto_precision(accelerator: Any = "auto") -> str:
    """Returns the precision that ``auto`` stands for on this machine: bf16-mixed with fast bfloat16, else 32-true.

    Args:
        accelerator: as Lightning's Trainer takes it.
    """
    return "bf16-mixed" if has_fast_bfloat16(_device_type(accelerator)) else "32-true"


def has_fast_bfloat16(device_type: str) -> bool:
    """Whether products of bfloat16 matrices beat those of float32: on GPUs from Ampere on, and CPUs with instructions.

    On a CPU these are AMX, AVX512-BF16 of AMD, or BF16 of ARM. An Intel CPU with AVX512-BF16 and without AMX was slower
    in bfloat16 (experiments/README.md).
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    try:
        return is_fast_in_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return False


def is_fast_in_bfloat16(cpuinfo: str) -> bool:
    """Whether a processor, as Linux describes it, is one of those of ``has_fast_bfloat16``."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value)
    instructions = set(fields.get("flags", fields.get("features", "")).split())
    if "avx512_bf16" in instructions and "GenuineIntel" not in fields.get("vendor_id", ""):
        return True
    return not {"amx_bf16", "bf16"}.isdisjoint(instructions)


def _device_type(accelerator: Any) -> str:
    """Returns the type of the device that Lightning takes for ``trainer.accelerator``."""
    name = str(accelerator or "auto").lower()
    if name in ("cuda", "gpu", "auto") and torch.cuda.is_available():
        return "cuda"
    if name in ("mps", "gpu", "auto") and torch.backends.mps.is_available():
        return "mps"
    return "cpu" if name in ("cpu", "auto") else name
