"""What ends a training before its end: numbers that are no longer finite, and signals."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from vit_lightning.errors import Diverged
from vit_lightning.folder import write_whole


@dataclass
class _Step:
    """What one optimizer step is made of."""

    number: int
    losses: list[Tensor]
    indices: list[Tensor]
    rate: float
    verdict: Tensor
    """Zero if losses and gradients are finite; on its way from a GPU."""
    arrived: Any = None
    """Event after which it can be read."""


class FiniteGuard(Callback):
    """Stops a run whose losses or gradients are no longer finite, before the optimizer uses them.

    On a GPU the figures of a step are judged in the next one, so that training does not wait for them; a checkpoint
    does.

    Args:
        folder: the run folder; ``diverged.json`` in it names the step and the images of its batches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._losses: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._waiting: _Step | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        indices = getattr(batch, "indices", None)  # loaders of the user's own need not say which images they are
        self._indices.append(torch.empty(0, dtype=torch.int64) if indices is None else indices)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # zero, but for a loss that is not finite
        verdict = (self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()).float() * 0.0
        if getattr(trainer.precision_plugin, "scaler", None) is None:  # else infinite gradients are a matter of course
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            if gradients := [p.grad for p in parameters if p.grad is not None]:
                verdict = verdict + _any_not_finite(gradients)
        rate = optimizer.param_groups[0]["lr"]
        step = _Step(trainer.global_step, self._losses, self._indices, rate, verdict)
        self._losses, self._indices = [], []
        if verdict.is_cuda:
            step.verdict = verdict.to("cpu", non_blocking=True)
            step.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.arrived.record()
            step, self._waiting = self._waiting, step  # type: ignore[assignment]
        if step is not None:
            self._judge(step, trainer)

    def settle(self, trainer: Trainer) -> None:
        """Judges what has not been judged yet, and the weights themselves; before a checkpoint is written."""
        if self._waiting is not None:
            step, self._waiting = self._waiting, None
            self._judge(step, trainer)
        weights = [weight for weight in trainer.lightning_module.parameters() if weight.is_floating_point()]
        if weights and not torch.isfinite(nn.utils.get_total_norm(weights, norm_type=math.inf)):
            text = f"training diverged: after {trainer.global_step} steps weights are no longer finite"
            raise Diverged(f"{text} (a lower optimizer.lr? trainer.gradient_clip_val?)")

    def _judge(self, step: _Step, trainer: Trainer) -> None:
        if step.arrived is not None:
            step.arrived.synchronize()
        if step.verdict.item() == 0.0:
            return
        losses = [float(loss) for loss in step.losses]
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        indices = [index for number in (bad or range(len(losses))) for index in step.indices[number].tolist()]
        what = f"loss is {losses[bad[0]]}" if bad else f"gradients are not finite, at a loss of {losses[-1]:.4g}"
        facts = {"step": step.number, "epoch": trainer.current_epoch, "lr": step.rate, "indices": indices}
        figures = {"losses": [str(loss) for loss in losses]}
        if self.folder.is_dir():
            write_whole(self.folder / "diverged.json", json.dumps({**facts, **figures}, indent=2) + "\n")
        shown = ", ".join(map(str, indices[:12])) + (", ..." if len(indices) > 12 else "")
        raise Diverged(
            f"training diverged in step {step.number} (the first is 0): {what}, at rate {step.rate:.3g}; images "
            f"{shown} (all {len(indices)} in {self.folder / 'diverged.json'}); the checkpoints are from before it"
        )


def _any_not_finite(gradients: list[Tensor]) -> Tensor:
    """One if a number of the gradients is not finite, else zero.

    What a GradScaler asks with, at a scale of one: a third of the time of their norm, and it cannot overflow.
    """
    device = gradients[0].device
    found, one = torch.zeros((), device=device), torch.ones((), device=device)
    for dtype in {gradient.dtype for gradient in gradients}:
        of_type = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(of_type, found, one)
    return found


class StopSignals(Callback):
    """Ends training where it can go on from when the process is asked to end: SIGTERM, SIGUSR1, or Ctrl-C.

    The handler only takes a note, and all ranks agree on it after a batch; Lightning's own talks to the other ranks
    from inside the handler, which hangs, and lets the process end with exit code 0. Here it is 128 + the signal's.

    Args:
        save: writes the last checkpoint if this is a moment to go on from, and says whether it did.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, save: Callable[[Trainer], bool]) -> None:
        self.save = save
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():  # elsewhere Python takes no signals
            return
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr, flush=True)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._agreed(trainer) and self.save(trainer):
            self._stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed(trainer):  # the epoch's checkpoint has been written
            self._stop()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._before and self._agreed(trainer):  # in training, that is
            self._stop()  # nothing can be written here: training goes on from the last checkpoint

    def _agreed(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return self._received != 0
        flag = torch.tensor(self._received, device=trainer.strategy.root_device)
        self._received = int(trainer.strategy.reduce(flag, reduce_op="max"))
        return self._received != 0

    def _stop(self) -> None:
        raise SystemExit(128 + self._received)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
