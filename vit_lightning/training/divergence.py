"""Stops training whose numbers are no longer finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from vit_lightning.errors import Diverged


@dataclass
class _Step:
    """What one optimizer step is made of."""

    number: int
    losses: list[Tensor]
    indices: list[Tensor]
    rate: float
    total: Tensor
    """Sum of the losses; on its way from a GPU."""
    arrived: Any = None
    """Event after which it can be read."""

    def images(self, batches: Iterable[int]) -> list[int]:
        return [index for number in batches for index in self.indices[number].tolist()]


class FiniteGuard(Callback):
    """Stops a run within one step after loss or gradients are no longer finite.

    Only losses are looked at in each step, for a gradient that is not finite makes the loss of the next step so: the
    weights then tell which of the two steps it was. On a GPU a loss is judged one step later, so that training does not
    wait for it; there both steps are named. A checkpoint is written only after a look at everything that it holds.

    Args:
        folder: the run folder; ``diverged.json`` in it names steps and the images of their batches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._losses: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._before: _Step | None = None
        self._waiting: _Step | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._indices = [], []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        indices = getattr(batch, "indices", None)  # loaders of the user's own need not say which images they are
        self._indices.append(torch.empty(0, dtype=torch.int64) if indices is None else indices)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        total = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
        rate = optimizer.param_groups[0]["lr"]
        step = _Step(trainer.global_step, self._losses, self._indices, rate, total)
        self._losses, self._indices = [], []
        if not total.is_cuda:
            self._judge(step, trainer)
            return
        step.total = total.to("cpu", non_blocking=True)
        step.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        step.arrived.record()
        waiting, self._waiting = self._waiting, step
        if waiting is not None:
            self._judge(waiting, trainer)

    def settle(self, trainer: Trainer) -> None:
        """Before a checkpoint: judges what has not been judged yet, and all numbers that the checkpoint would hold."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._judge(waiting, trainer)
        module = trainer.lightning_module
        if not _all_finite([*module.parameters(), *module.buffers()]):
            self._stop([self._before], "weights are no longer finite", trainer)
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        numbers = (value for state in states for value in state.values() if isinstance(value, Tensor))
        if not _all_finite(numbers):
            self._stop([self._before], "the optimizer's averages are no longer finite", trainer)

    def _judge(self, step: _Step, trainer: Trainer) -> None:
        if step.arrived is not None:
            step.arrived.synchronize()
        if math.isfinite(step.total.item()):
            self._before = step
            return
        if step.arrived is not None:
            self._stop([self._before, step], "a loss is not finite", trainer)
        if _all_finite(trainer.lightning_module.parameters()):
            bad = [loss for loss in map(float, step.losses) if not math.isfinite(loss)]
            self._stop([step], f"loss is {bad[0]}", trainer)
        self._stop([self._before], "gradients are not finite", trainer)

    def _stop(self, suspects: list[_Step | None], what: str, trainer: Trainer) -> None:
        steps = [step for step in suspects if step is not None]
        facts = []
        for step in steps:
            bad = [number for number, loss in enumerate(step.losses) if not math.isfinite(float(loss))]
            losses = [str(float(loss)) for loss in step.losses]
            images = step.images(bad or range(len(losses)))
            facts.append({"step": step.number, "losses": losses, "rate": step.rate, "indices": images})
        path = self.folder / ("diverged.json" if trainer.is_global_zero else f"diverged-rank{trainer.global_rank}.json")
        if self.folder.is_dir():
            path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        first = facts[-1]["indices"] if facts else []
        assert isinstance(first, list)
        shown = ", ".join(map(str, first[:12])) + (", ..." if len(first) > 12 else "")
        raise Diverged(
            f"training diverged in step {' or '.join(str(step.number) for step in steps)} (the first is 0): {what}, "
            f"at rate {steps[-1].rate if steps else 0.0:.3g}; images {shown} (all in {path}); "
            "the checkpoints are from before it"
        )


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all floating numbers are finite; the largest of them cannot overflow, as a sum of squares could."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not floating or bool(torch.isfinite(nn.utils.get_total_norm(floating, norm_type=math.inf)))
