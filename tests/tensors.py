"""Random tensors, weights and images, all from seeds, a counter of operators, and code in a file."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Module = TypeVar("Module", bound=nn.Module)


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Returns normal numbers, drawn in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Returns numbers from 0 to 1, such as pixels, drawn in float64."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomise(module: Module, *, scale: float = 0.5, seed: int = 0) -> Module:
    """Draws all parameters from a normal distribution, in float64, and leaves them in their own type."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return module


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        is_view = returns and all(part.alias_info is not None and not part.alias_info.is_write for part in returns)
        if func.namespace == "aten" and not is_view:
            self.counts[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], Any]) -> Counter[str]:
    """Returns how often each operator of torch that is no view runs in a call: launches, on a GPU."""
    with _Operators() as mode:
        run()
    return mode.counts


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path | str) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def write_images(folder: Path, count: int, *, size: tuple[int, int] = (20, 14), seed: int = 0) -> None:
    """``count`` JPEG files of random pixels (width, height)."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for number in range(count):
        pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg")


def write_parquet(path: Path, folder: Path) -> None:
    """The images of class folders as a table, class names in its metadata."""
    import datasets

    names = sorted(place.name for place in folder.iterdir())
    files = [(file, label) for label, name in enumerate(names) for file in sorted((folder / name).iterdir())]
    images = [{"bytes": file.read_bytes(), "path": file.name} for file, _ in files]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    table = datasets.Dataset.from_dict({"image": images, "label": [label for _, label in files]}, features=features)
    path.parent.mkdir(exist_ok=True)
    table.to_parquet(str(path))
