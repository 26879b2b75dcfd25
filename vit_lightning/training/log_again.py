"""Logging in every step without its cost."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric


def log_again(module: LightningModule, name: str, value: Tensor | Metric, *, prog_bar: bool = False) -> None:
    """Logs a metric of the epoch, or a number of the step, as ``module.log`` does.

    That checks and copies so much that it takes as long as a layer of a small network. Here it is called once in each
    epoch, and then its entry gets the new value. Without ``prog_bar`` nothing waits for the device.
    """
    trainer = module._trainer  # none outside of a training
    results: Any = None if trainer is None else trainer._results
    entry = None if results is None else results.get(f"{module._current_fx_name}.{name}")
    if entry is None or entry.has_reset:
        module.log(
            name, value, prog_bar=prog_bar, on_step=isinstance(value, Tensor), on_epoch=isinstance(value, Metric)
        )
    else:
        entry.update(value.detach() if isinstance(value, Tensor) else value, 1)
