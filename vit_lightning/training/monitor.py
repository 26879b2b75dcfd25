"""Callbacks that watch training: speed, norms and memory; loss, gradients and weights that are no longer finite."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from vit_lightning.data.batches import tensors_in
from vit_lightning.errors import Diverged
from vit_lightning.training.callbacks import Agreement, Stopwatch, has_whole_weights
from vit_lightning.training.lightning_detours import accumulates, call_around_fetches, logged_steps
from vit_lightning.training.resources import peak_flops


class Monitor(Callback):
    """Callback that logs a row of measurements at each logged step, and nothing in between.

    Times are means over the steps since the last row, without validation; nothing waits for the GPU that would not wait
    for the loss of the same step. ``optim/grad_norm`` is taken before clipping; ``optim/update_norm`` is that of the
    change of the weights. Both are left out for sharded weights and with several optimizers. ``speed/mfu`` is three
    times the FLOPs of a forward pass over the dense peak of a GPU of ``resources.PEAK_TFLOPS``.

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
        self._fetching = self._data_seconds = 0.0
        self._since = (0.0, 0, 0, 0.0, 0.0)
        self._gradient: Tensor | None = None
        self._before: tuple[list[Tensor], list[Tensor]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def begin() -> None:
            self._fetching = time.perf_counter()

        def end() -> None:
            if self.stopwatch.running:  # else the first batch of an epoch, or the first after a validation
                self._data_seconds += time.perf_counter() - self._fetching

        call_around_fetches(trainer, begin, end)
        if self.flops is not None and all(weight.requires_grad for weight in pl_module.parameters()):
            self._peak = _peak_flops(trainer)
        self._begin(logged_steps(trainer))

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not _logs_now(trainer) or self._before is not None or len(trainer.optimizers) != 1:
            return
        if not has_whole_weights(trainer):
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        if weights:
            self._gradient = get_total_norm([weight.grad for weight in weights])
            self._before = weights, [weight.clone() for weight in weights]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _logs_now(trainer) or accumulates(trainer):
            return
        step = logged_steps(trainer)
        numbers = self._norms()  # these wait for the GPU, so that the times are those of whole steps
        numbers |= self._speed(trainer, step + 1, batch) | self._system()
        self.row = {"step": step, "epoch": trainer.current_epoch, **numbers}
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, **numbers}, step=step)
        self._begin(step + 1)

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        if self._before is None or self._gradient is None:
            return {}
        after, before = self._before
        torch._foreach_sub_(before, after)
        norms = torch.stack([self._gradient.float(), get_total_norm(before).float()]).tolist()
        self._before = self._gradient = None
        return dict(zip(("optim/grad_norm", "optim/update_norm"), norms, strict=True))

    def _speed(self, trainer: Trainer, step: int, batch: Any) -> dict[str, float]:
        began, images, first, _, _ = self._since
        seconds, steps = self.stopwatch.training_seconds - began, step - first
        if seconds <= 0.0 or steps <= 0:
            return {}
        rate = (self.stopwatch.images - images) / seconds
        speed = {"images_per_second": rate, "step_seconds": seconds / steps, "data_seconds": self._data_seconds / steps}
        if (
            self._peak is not None
            and self.flops is not None
            and any(tuple(part.shape[1:]) == self.shape for part in tensors_in(batch))
        ):
            speed["mfu"] = 3 * self.flops * rate / (self._peak * trainer.world_size)
        return {f"speed/{name}": _rounded(value) for name, value in speed.items()}

    def _system(self) -> dict[str, float]:
        clock, cpu = self._since[3:]
        numbers = {"system/cpu_percent": 100.0 * (time.process_time() - cpu) / (time.perf_counter() - clock)}
        if (resident := _resident_mb()) is not None:
            numbers["system/memory_mb"] = resident
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            numbers["system/gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 1e6
        return {name: _rounded(value) for name, value in numbers.items()}

    def _begin(self, step: int) -> None:
        watch = self.stopwatch
        self._since = watch.training_seconds, watch.images, step, time.perf_counter(), time.process_time()
        self._data_seconds = 0.0

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
    name, matmul = torch.cuda.get_device_name(device), torch.get_float32_matmul_precision()
    return peak_flops(name, str(trainer.precision), matmul)


def _resident_mb() -> float | None:
    """Returns the resident memory of this process in 10^6 bytes; None on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


SMALLEST_SCALE = 2.0**-20
"""Scale of a loss in float16 that 36 steps in a row with gradients that are not finite leave of the first, 65536."""


@dataclass
class _Step:
    """One optimizer step with its accumulated batches."""

    number: int
    losses: list[Tensor]
    indices: list[Tensor]
    lr: float
    total: Tensor
    """Sum of the losses, copied asynchronously from a GPU."""
    scale: Tensor | None = None
    """Scale of the loss in float16, copied in the same way."""
    copied: Any = None
    """CUDA event of the copies; None on CPU."""


_Fault = tuple[list[_Step | None], str]
"""Steps that may have led to numbers that are not finite, and which numbers these are."""


class FiniteGuard(Callback):
    """Callback that stops a run within one step after loss or gradients are no longer finite.

    Each step checks its losses only: after a gradient that is not finite, the loss of the next step is not finite
    either, and the weights tell which of the two steps it was. On a GPU a loss is checked one step later, so that
    training does not wait for it; there both steps are named. Before a checkpoint all of its numbers are checked. Ranks
    stop together, a step later: one that stopped by itself would leave the others waiting for it.

    Args:
        folder: the run folder; ``diverged.json`` in it lists the steps and the images of their batches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._losses: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._before: _Step | None = None
        self._waiting: _Step | None = None
        self._fault: _Fault | None = None
        self._ranks = Agreement()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._indices = [], []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        indices = getattr(batch, "indices", None)  # batches of a loader of the user may lack them
        self._indices.append(torch.empty(0, dtype=torch.int64) if indices is None else indices)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._losses:  # another optimizer of a module of the user's own has had them
            return
        total = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
        lr = optimizer.param_groups[0]["lr"]
        step = _Step(trainer.global_step, self._losses, self._indices, lr, total, _scale(trainer, total))
        self._losses, self._indices = [], []
        if not total.is_cuda:
            self._stop_if_any(self._fault_of(step, trainer), trainer)
            return
        step.total = total.to("cpu", non_blocking=True)
        step.scale = None if step.scale is None else step.scale.to("cpu", non_blocking=True)
        step.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        step.copied.record()
        self._stop_if_any(self._fault_of_waiting(trainer, waiting=step), trainer)

    def check_all(self, trainer: Trainer) -> None:
        """Checks the steps not checked yet, and all numbers that a checkpoint would hold; all ranks call it at once."""
        fault = self._fault_of_waiting(trainer, waiting=None) or self._fault_of_state(trainer)
        self._stop_if_any(fault, trainer, now=True)

    def _fault_of_state(self, trainer: Trainer) -> _Fault | None:
        module = trainer.lightning_module
        if not _all_finite([*module.parameters(), *module.buffers()]):
            return [self._before], "weights are no longer finite"
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        numbers = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return None if _all_finite(numbers) else ([self._before], "the optimizer's averages are no longer finite")

    def _fault_of_waiting(self, trainer: Trainer, *, waiting: _Step | None) -> _Fault | None:
        step, self._waiting = self._waiting, waiting
        return None if step is None else self._fault_of(step, trainer)

    def _fault_of(self, step: _Step, trainer: Trainer) -> _Fault | None:
        if step.copied is not None:
            step.copied.synchronize()
        if step.scale is not None and step.scale.item() < SMALLEST_SCALE:
            return [step], f"gradients in float16 are not finite at a scale of {SMALLEST_SCALE}"
        if math.isfinite(step.total.item()):
            self._before = step
            return None
        if step.copied is not None:
            return [self._before, step], "a loss is not finite"
        if _all_finite(trainer.lightning_module.parameters()):
            bad = [loss for loss in map(float, step.losses) if not math.isfinite(loss)]
            return [step], f"loss is {bad[0]}"
        return [self._before], "gradients are not finite"

    def _stop_if_any(self, fault: _Fault | None, trainer: Trainer, *, now: bool = False) -> None:
        """Stops all ranks after a fault of one of them; ``now`` waits for what the others say of this step."""
        self._fault = self._fault or fault
        if self._ranks.largest(trainer, int(self._fault is not None), now=now):
            self._stop(*(self._fault or ([self._before], "a loss of another rank is not finite")), trainer)

    def _stop(self, suspects: list[_Step | None], what: str, trainer: Trainer) -> None:
        steps = [step for step in suspects if step is not None]
        facts = []
        for step in steps:
            bad = [number for number, loss in enumerate(step.losses) if not math.isfinite(float(loss))]
            losses = [str(float(loss)) for loss in step.losses]
            images = [index for number in bad or range(len(losses)) for index in step.indices[number].tolist()]
            facts.append({"step": step.number, "losses": losses, "rate": step.lr, "indices": images})
        path = self.folder / ("diverged.json" if trainer.is_global_zero else f"diverged-rank{trainer.global_rank}.json")
        if self.folder.is_dir():
            with contextlib.suppress(OSError):  # a full disk does not hide the message
                path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        older = any((self.folder / "checkpoints").glob("*.ckpt"))
        raise Diverged(
            f"training diverged in step {' or '.join(str(step.number) for step in steps)} (the first is 0): {what}, "
            f"at learning rate {steps[-1].lr if steps else 0.0:.3g}: lower it (optimizer.lr) or clip gradients "
            f"(trainer.gradient_clip_val=1); the images of the step are in {path}"
            + ("; the checkpoints are older and finite" if older else "")
        )


def _scale(trainer: Trainer, total: Tensor) -> Tensor | None:
    """Returns the scale of the loss in float16, without waiting for the device; None in other precisions."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.scale(torch.ones_like(total))


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all floating-point numbers are finite, by their maximum norm, which cannot overflow."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not floating or bool(torch.isfinite(nn.utils.get_total_norm(floating, norm_type=math.inf)))
