"""Histograms of the weights and the gradients of each layer, written while a run trains."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from vit_lightning.storage.metrics import open_lines
from vit_lightning.storage.wandb_mirror import WandbMirror
from vit_lightning.storage.wandb_values import HISTOGRAMS
from vit_lightning.training.lightning_detours import logged_steps

BINS = 64
"""Bins of a histogram, from the least to the greatest number."""


class Histograms(Callback):
    """Callback that writes histograms of weights and gradients in every n-th step to ``histograms.jsonl`` and W&B.

    Both are those before the optimizer's step, gradients before clipping. Tensors with numbers that are not finite are
    left out, and all tensors under strategies that share them out.

    Args:
        folder: the run folder.
        mirror: W&B.
        every_n_steps: optimizer steps between two of them; 0 for none.
    """

    def __init__(self, folder: Path, mirror: WandbMirror, every_n_steps: int) -> None:
        self.file, self.mirror, self.every_n_steps = folder / HISTOGRAMS, mirror, every_n_steps
        self._last = -1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = logged_steps(trainer)
        if (
            not self.every_n_steps
            or (step + 1) % self.every_n_steps
            or not trainer.is_global_zero
            or step == self._last
        ):
            return
        self._last = step  # a second optimizer has its turn in the same step
        weights = {name.removeprefix("network."): weight for name, weight in pl_module.named_parameters()}
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        tensors = {f"weights/{name}": weight.detach() for name, weight in weights.items() if weight.requires_grad}
        row = {"step": step, **histograms(tensors | {f"gradients/{name}": one for name, one in gradients.items()})}
        try:
            with BufferedWriter(open_lines(self.file)) as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as fault:
            warnings.warn(f"{HISTOGRAMS} lacks step {step}: {fault.strerror}", stacklevel=2)
        self.mirror.log_histograms(row)


@torch.no_grad()
def histograms(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns ``{edges: [low, high], counts: [...]}`` of each tensor; waits twice for the device, not for each."""
    numbers = {name: one.float() for name, one in tensors.items() if type(one.data) is Tensor and one.numel()}
    if not numbers:
        return {}
    ends = torch.stack([torch.stack(one.aminmax()) for one in numbers.values()])
    finite = {
        name: (low, high) if low < high else (low - 0.5, high + 0.5)
        for name, (low, high) in zip(numbers, ends.tolist(), strict=True)
        if abs(low) + abs(high) < float("inf")
    }
    if not finite:
        return {}
    counts = torch.stack([torch.histc(numbers[name], BINS, *ends) for name, ends in finite.items()]).int().tolist()
    return {name: {"edges": ends, "counts": found} for (name, ends), found in zip(finite.items(), counts, strict=True)}
