"""Callbacks of a run: seeds of steps, training time, learning rate, test predictions, progress bar."""

import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vit_lightning.data.batches import Batch, as_batch, tensors_in
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import METRICS
from vit_lightning.random_keys import one_key
from vit_lightning.training.lightning_detours import is_of_epoch, log_again, logged_steps, longest_wait, numbers_for_bar


class StepSeeds(Callback):
    """Callback that seeds each step, so that dropout and drop path depend on seed, rank and completed batches alone.

    Epochs are seeded too, for loaders of others that shuffle. No random state has to be stored, and a resumed run draws
    the same numbers as an uninterrupted one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch:  # the order of the first one is that of plain Lightning
            self._seed(trainer, of_epoch=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seed(trainer, of_epoch=False)

    def _seed(self, trainer: Trainer, *, of_epoch: bool) -> None:
        completed = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        key = one_key(self.seed, ~completed if of_epoch else completed, trainer.global_rank)
        seed_torch(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  # for other packages that use it


def seed_torch(key: int) -> None:
    """Seeds torch on the devices in use; ``torch.manual_seed``, which seeds all backends, takes 100 times longer."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)


class Stopwatch(Callback):
    """Callback that counts seconds of training without validation, seconds of the run, and images of all ranks.

    Each rank is taken to have as many images as the first. Checkpoints hold the sums over the processes of a run: a
    killed one loses what came after its last checkpoint.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._earlier, self._began = 0.0, time.perf_counter()
        self.images = 0
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._since == 0.0:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += next((len(part) for part in tensors_in(batch) if part.ndim), 0) * trainer.world_size

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    on_train_epoch_end = on_train_end = on_validation_start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing meanwhile."""
        was_running = self.running
        self._stop()
        yield
        self._since = time.perf_counter() if was_running else 0.0

    def _stop(self) -> None:
        if self._since:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0

    @property
    def running(self) -> bool:
        """Whether time counts now: from the first batch of an epoch to its end or a validation."""
        return self._since > 0.0

    @property
    def training_seconds(self) -> float:
        """Seconds of training until now."""
        return self.seconds + (time.perf_counter() - self._since if self.running else 0.0)

    @property
    def run_seconds(self) -> float:
        """Seconds of this process and of those before it."""
        return self._earlier + time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.training_seconds, "images": self.images, "run_seconds": self.run_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.images = state_dict["seconds"], state_dict["images"]
        self._earlier = state_dict["run_seconds"]


class LearningRate(Callback):
    """Callback that logs ``lr``, the learning rate of the first parameter group, at each logged step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(optimizer.param_groups for optimizer in trainer.optimizers):  # Lightning has put in a mock
            kind = type(pl_module).__name__
            raise UserError(f"module: configure_optimizers of {kind} returns no optimizer, so nothing would be trained")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.optimizers:
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            # on the CPU, since a copy to a GPU would wait for it
            log_again(pl_module, "lr", torch.tensor(trainer.optimizers[0].param_groups[0]["lr"], dtype=dtype))


class TestPredictions(Callback):
    """Callback that collects the predictions for the test images of all ranks.

    ``table`` has columns with a row per image, in the order of the images: index, label, prediction, confidence (the
    probability of the prediction) and loss. Empty where ``test_step`` returns no logits, or of several sets of images.
    """

    __test__ = False  # pytest would take it for a test

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self.table: dict[str, np.ndarray[Any, Any]] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts, self.table = [], {}

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        if (batch := labelled(trainer, outputs, batch, sum(map(len, self._parts)))) is None:
            return
        logits = outputs.detach().float()
        confidence, prediction = logits.softmax(dim=-1).max(dim=-1)
        loss = cross_entropy(logits, batch.labels, reduction="none")
        columns = [batch.indices, batch.labels, prediction, confidence, loss]
        self._parts.append(torch.stack([column.double().cpu() for column in columns], dim=1))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has_one = self._parts and len(trainer.num_test_batches) == 1
        rows = gather(trainer, torch.cat(self._parts) if has_one else torch.empty(0, 5, dtype=torch.float64))
        if not len(rows):
            return
        rows = rows[rows[:, 0].argsort()]
        names, real = ("index", "label", "prediction", "confidence", "loss"), ("confidence", "loss")
        self.table = {
            name: column.numpy().astype(np.float32 if name in real else np.int32)
            for name, column in zip(names, rows.T, strict=True)
        }


def labelled(trainer: Trainer, outputs: Any, batch: Any, before: int) -> Batch | None:
    """Returns ``as_batch`` of a batch with its indices, if a step of validation or test returned its logits; else None.

    Args:
        trainer: the Trainer.
        outputs: what the step returned.
        batch: the batch; one of a loader of others has indices in the order in which Lightning shares images out.
        before: images of this rank that came before.
    """
    found = as_batch(batch) if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 else None
    if found is None or len(outputs) != len(found.labels):
        return None
    known: Any = found.indices
    shared = torch.arange(before, before + len(outputs)) * trainer.world_size + trainer.global_rank
    return found if known is not None else found.replace(indices=shared)


def training_steps(trainer: Trainer, batches: float) -> tuple[float, float]:
    """Returns the optimizer steps of an epoch of so many batches, and of the whole training: inf if it has no end.

    Where a ``GradientAccumulationScheduler`` changes them from epoch to epoch, the first is their mean.
    """

    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scheduler = next((one for one in callbacks if isinstance(one, GradientAccumulationScheduler)), None)

    def steps_of(epoch: int) -> float:
        per_step = scheduler.get_accumulate_grad_batches(epoch) if scheduler else trainer.accumulate_grad_batches
        return batches if math.isinf(batches) else max(1, math.ceil(batches / per_step))

    is_counted = trainer.lightning_module.automatic_optimization  # else max_steps is of each optimizer's steps
    epochs, steps = trainer.max_epochs, trainer.max_steps if is_counted else -1
    by_epochs = math.inf if epochs is None or epochs < 0 else sum(map(steps_of, range(epochs)))
    per_epoch = by_epochs / epochs if epochs and not math.isinf(by_epochs) else steps_of(0)
    return per_epoch, min(by_epochs, math.inf if steps < 0 else steps)


def has_whole_weights(trainer: Trainer) -> bool:
    """Whether each process holds all weights; DeepSpeed, which shards them, is a DDPStrategy to Lightning."""
    strategy = trainer.strategy
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


def is_due(trainer: Trainer, every_n_epochs: int) -> bool:
    """Whether a multiple of n epochs has passed since the last validation, or it is the last of the planned ones."""
    epoch, step = trainer.current_epoch + 1, trainer.check_val_every_n_epoch or 1
    if epoch % every_n_epochs < step or trainer.should_stop or trainer.global_step >= trainer.max_steps > 0:
        return True
    return trainer.max_epochs is not None and epoch + step > trainer.max_epochs > 0


def gather(trainer: Trainer, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks, whose numbers of rows may differ."""
    if trainer.world_size == 1:
        return rows
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, rows)
    return torch.cat(gathered)


class Agreement:
    """Agreement of all ranks on the largest of their numbers, for which no step waits: each gets that of the last one.

    The numbers are reduced on the host, beside the training; a collective of the device would wait for all its work.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._begun: tuple[torch.Tensor, Any] | None = None

    def largest(self, trainer: Trainer, number: int, *, now: bool = False) -> int:
        """Returns the largest number of the call before, at first 0, or of this one; all ranks call it at once.

        Args:
            trainer: the Trainer; if it has one rank alone, its own number is returned.
            number: the number of this rank, at least 0.
            now: whether to wait for the largest number of this call.
        """
        if trainer.world_size == 1:
            return number
        if self._group is None:
            self._group = torch.distributed.new_group(timeout=longest_wait(trainer), backend="gloo")
        before, largest = self._wait(), torch.tensor(number, device="cpu")
        work = torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        self._begun = largest, work
        return self._wait() if now else before

    def _wait(self) -> int:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].wait()
        return int(begun[0]) if begun is not None else 0


_OF_STEPS = ("train/loss_step", *(f"train/{name}" for name in METRICS))
"""What ViTClassifier logs for the bar, and the line of an epoch shows in another way or not at all."""


class TrainingBar(TQDMProgressBar):
    """Lightning's progress bar, in a terminal alone and drawn four times a second at most, and one line an epoch.

    Args:
        monitor: name of a metric that the line shows, beside those that a module of the user's logs with
            ``prog_bar=True``.
    """

    def __init__(self, monitor: str = "") -> None:
        super().__init__()
        self._monitor, self._of_validation = monitor, dict[str, float]()
        self._validated, self._drawn = False, 0.0
        self._since = 0.0, 0, 0.0, 0  # time, steps, and seconds and images of the stopwatch at the end of an epoch

    @property
    def is_enabled(self) -> bool:
        return super().is_enabled and sys.stdout.isatty()

    def _should_update(self, current: int, total: float) -> bool:
        """Whether the bar is drawn, for which the numbers in it are read from the device."""
        is_due = self.is_enabled and (time.monotonic() - self._drawn > 0.25 or current == total)
        self._drawn = time.monotonic() if is_due else self._drawn
        return is_due

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        found = super().get_metrics(trainer, pl_module)
        loss = trainer.callback_metrics.get("train/loss_step")
        return found if loss is None else found | {"train/loss_step": float(loss)}

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        self._since = _progress(args[0])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._validated = not trainer.sanity_checking
        self._of_validation = numbers_for_bar(trainer, self._monitor)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        metrics = trainer.callback_metrics  # on every rank, since metrics are summed over them
        if self._enabled:
            # a log on a full disk, or a reader that has gone, must not end training
            with contextlib.suppress(OSError), tqdm.external_write_mode():
                print(self._text(trainer, metrics), flush=True)
        self._since, self._validated = _progress(trainer), False

    def _text(self, trainer: Trainer, metrics: Mapping[str, Any]) -> str:
        """Returns the line of an epoch: losses, validation, images per second of training, time left."""
        per_epoch, total = training_steps(trainer, trainer.num_training_batches)
        number, last = trainer.current_epoch + 1, trainer.max_epochs or 0
        parts = [f"epoch {number:{len(str(last))}}/{last}" if total == last * per_epoch else f"epoch {number}"]
        names = {"train/loss": ("train", METRICS["loss"]), "val/loss": ("val", METRICS["loss"])}
        names |= {f"val/{name}": ("val", facts) for name, facts in METRICS.items() if facts.in_bar}
        for name, (stage, facts) in names.items():
            if name in metrics and (stage == "train" or self._validated):  # else of an earlier epoch
                value = float(metrics[name])
                of = " of the last batch" * (stage == "train" and not is_of_epoch(trainer, name))
                parts.append(
                    f"{stage} {facts.label}{of} {f'{100 * value:6.2f} %' if facts.percent else f'{value:.4f}'}"
                )
        own = numbers_for_bar(trainer, self._monitor) | (self._of_validation if self._validated else {})
        parts += [f"{name} {own[name]:.4f}" for name in sorted(own) if name not in (*names, *_OF_STEPS)]
        since, (now, steps, seconds, images) = self._since, _progress(trainer)
        if images > since[3]:
            parts.append(f"{(images - since[3]) / (seconds - since[2]):,.0f} images/s")
        if since[1] < steps < total < math.inf:
            parts.append(f"{tqdm.format_interval((now - since[0]) / (steps - since[1]) * (total - steps))} left")
        return "  ".join(parts)


def _progress(trainer: Trainer) -> tuple[float, int, float, int]:
    """Returns the time, steps, and seconds and images of training by the Trainer's ``Stopwatch``, zeros without it."""
    watches: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    watch = next((one for one in watches if isinstance(one, Stopwatch)), None)
    counted = (watch.training_seconds, watch.images) if watch else (0.0, 0)
    return time.monotonic(), logged_steps(trainer), *counted
