"""Files of weights: tensors under their names as safetensors, for ``torch.load``, or as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor


def _safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # copies: it refuses tensors that share memory; transformers wants to know whose they are
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, {"format": "pt"})


def _pth(tensors: Mapping[str, Tensor], path: Path) -> None:
    torch.save(dict(tensors), path)


def _npz(tensors: Mapping[str, Tensor], path: Path) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(path, **arrays)


WRITERS: dict[str, Callable[[Mapping[str, Tensor], Path], None]] = {
    ".safetensors": _safetensors,
    ".pth": _pth,
    ".npz": _npz,
}
"""Functions that write tensors to a file, by its suffix."""
