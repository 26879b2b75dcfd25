"""Callback that measures training while it runs: speed, gradient and update norms, memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from vit_lightning.data.batches import tensors_in
from vit_lightning.training.callbacks import Stopwatch, has_whole_weights
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
