"""Callbacks that watch training: speed and gradients; loss, gradients and weights that are no longer finite."""

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from vit_lightning.data.batches import tensors_in
from vit_lightning.errors import Diverged
from vit_lightning.training.callbacks import Agreement, Stopwatch, has_whole_weights
from vit_lightning.training.lightning_detours import accumulates, logged_steps
from vit_lightning.training.resources import peak_flops


class Monitor(Callback):
    """Callback that logs a row of measurements at each logged step, and nothing in between.

    Times are means over the steps since the last row, without validation; nothing waits for the GPU that would not wait
    for the loss of the same step. ``optim/grad_norm`` is taken before clipping, and left out for sharded weights and
    with several optimizers. ``speed/mfu`` is three times the FLOPs of a forward pass over the dense peak of a GPU of
    ``resources.PEAK_TFLOPS``.

    Checkpoints hold the last row: a run that resumes before a validation logs that of its step again.

    Args:
        stopwatch: the stopwatch of the run; it comes before this callback.
        flops: FLOPs of a forward pass of one image; None if unknown.
        shape: shape of the images (c, H, W) for which that is so.
    """

    def __init__(self, stopwatch: Stopwatch, flops: int | None, shape: tuple[int, ...]) -> None:
        self.stopwatch, self.flops, self.shape = stopwatch, flops, shape
        self.row: dict[str, Any] = {}
        self._peak: float | None = None
        self._since = (0.0, 0, 0)
        self._gradient: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.flops is not None and all(weight.requires_grad for weight in pl_module.parameters()):
            self._peak = _peak_flops(trainer)
        self._begin(logged_steps(trainer))

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        is_one = len(trainer.optimizers) == 1 and has_whole_weights(trainer)
        if is_one and self._gradient is None and _logs_now(trainer):
            grads = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
            self._gradient = get_total_norm(grads) if grads else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _logs_now(trainer) or accumulates(trainer):
            return
        step = logged_steps(trainer)
        gradient, self._gradient = self._gradient, None
        # it waits for the GPU, so that the times are those of whole steps
        numbers = {} if gradient is None else {"optim/grad_norm": float(gradient)}
        numbers |= self._speed(trainer, step + 1, batch)
        self.row = {"step": step, "epoch": trainer.current_epoch, **numbers}
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, **numbers}, step=step)
        self._begin(step + 1)

    def _speed(self, trainer: Trainer, step: int, batch: Any) -> dict[str, float]:
        began, images, first = self._since
        seconds, steps = self.stopwatch.training_seconds - began, step - first
        if seconds <= 0.0 or steps <= 0:
            return {}
        rate = (self.stopwatch.images - images) / seconds
        speed = {"images_per_second": rate, "step_seconds": seconds / steps}
        if self._peak and self.flops and any(tuple(part.shape[1:]) == self.shape for part in tensors_in(batch)):
            speed["mfu"] = 3 * self.flops * rate / (self._peak * trainer.world_size)
        return {f"speed/{name}": float(f"{value:.4g}") for name, value in speed.items()}

    def _begin(self, step: int) -> None:
        self._since = self.stopwatch.training_seconds, self.stopwatch.images, step

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}


def _logs_now(trainer: Trainer) -> bool:
    every, step = trainer.log_every_n_steps, logged_steps(trainer)  # type: ignore[attr-defined]
    return trainer.is_global_zero and every > 0 and (step + 1) % every == 0


def _peak_flops(trainer: Trainer) -> float | None:
    """Returns the peak FLOPs per second of the device at the precision of training; None if it is not known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), str(trainer.precision), torch.get_float32_matmul_precision())


SMALLEST_SCALE = 2.0**-20
"""Scale of a loss in float16 that 36 steps in a row with gradients that are not finite leave of the first, 65536."""


class _Step(NamedTuple):
    """One optimizer step."""

    number: int
    lr: float
    numbers: Tensor
    """Sum of the losses of its batches, in float16 also their scale; copied asynchronously from a GPU."""
    copied: Any = None
    """CUDA event of the copy; None on CPU."""


class FiniteGuard(Callback):
    """Callback that stops a run within one step after loss or gradients are no longer finite.

    Each step checks its losses only: after a gradient that is not finite, the loss of the next step is not finite
    either, and the weights tell which of the two steps it was. On a GPU a loss is checked one step later, so that
    training does not wait for it; there both steps are named. Before a checkpoint all of its numbers are checked. Ranks
    stop together, a step later: one that stopped by itself would leave the others waiting for it.

    Args:
        folder: the run folder; ``diverged.json`` in it names the step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._losses: list[Tensor] = []
        self._before = _Step(0, 0.0, torch.zeros(()))
        self._waiting: _Step | None = None
        self._fault: str | None = None
        self._ranks = Agreement()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._losses:  # another optimizer of a module of the user's own has had them
            return
        numbers = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
        self._losses = []
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            numbers = torch.stack([numbers, scaler.scale(torch.ones_like(numbers))])
        copied: Any = None
        if numbers.is_cuda:
            numbers, copied = numbers.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        step: _Step | None = _Step(trainer.global_step, optimizer.param_groups[0]["lr"], numbers, copied)
        if copied is not None:
            step, self._waiting = self._waiting, step
        self._stop_if_any(self._fault_of(step, trainer), trainer)

    def check_all(self, trainer: Trainer) -> None:
        """Checks the steps not checked yet, and all numbers that a checkpoint would hold; all ranks call it at once."""
        step, self._waiting = self._waiting, None
        self._stop_if_any(self._fault_of(step, trainer) or self._fault_of_state(trainer), trainer, now=True)

    def _fault_of_state(self, trainer: Trainer) -> str | None:
        module = trainer.lightning_module
        if not _all_finite([*module.parameters(), *module.buffers()]):
            return self._said("weights are no longer finite")
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        numbers = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return None if _all_finite(numbers) else self._said("the optimizer's averages are no longer finite")

    def _fault_of(self, step: _Step | None, trainer: Trainer) -> str | None:
        if step is None:
            return None
        if step.copied is not None:
            step.copied.synchronize()
        total, *scales = step.numbers.view(-1).tolist()
        is_small, before = min(scales, default=1.0) < SMALLEST_SCALE, self._before
        if is_small or (not math.isfinite(total) and _all_finite(trainer.lightning_module.parameters())):
            self._before = step
            scaled = f"gradients in float16 are not finite at a scale of {SMALLEST_SCALE}"
            return self._said(scaled if is_small else f"loss is {total}")
        if math.isfinite(total):
            self._before = step
            return None
        if step.copied is not None:
            return self._said("a loss is not finite", f"{before.number} or {step.number}")
        return self._said("gradients are not finite")

    def _said(self, what: str, steps: str = "") -> str:
        """Returns what is not finite since the step before, or some steps, and its learning rate."""
        where = f"training diverged in step {steps or self._before.number} (the first is 0)"
        return f"{where}: {what}, at learning rate {self._before.lr:.3g}"

    def _stop_if_any(self, fault: str | None, trainer: Trainer, *, now: bool = False) -> None:
        """Stops all ranks after a fault of one of them; ``now`` waits for what the others say of this step."""
        self._fault = self._fault or fault
        if not self._ranks.largest(trainer, int(self._fault is not None), now=now):
            return
        text = self._fault or self._said("a loss of another rank is not finite")
        if trainer.is_global_zero and self.folder.is_dir():
            with contextlib.suppress(OSError):  # a full disk does not hide the message
                (self.folder / "diverged.json").write_text(json.dumps({"error": text}) + "\n", encoding="utf-8")
        older = "; the checkpoints are older and finite" * any((self.folder / "checkpoints").glob("*.ckpt"))
        raise Diverged(f"{text}: lower it (optimizer.lr) or clip gradients (trainer.gradient_clip_val=1){older}")


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all floating-point numbers are finite, by their maximum norm, which cannot overflow."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not floating or bool(torch.isfinite(nn.utils.get_total_norm(floating, norm_type=math.inf)))
