"""What watches a run: step seeds, time, progress."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vit_lightning.metric_facts import METRICS
from vit_lightning.random_keys import one_key


class StepSeeds(Callback):
    """Makes the randomness of a step (dropout, drop path) a pure function of (seed, rank, completed batches).

    So no random state has to be stored, and a run that goes on draws what it would have drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        completed = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        key = one_key(self.seed, completed, trainer.global_rank)
        seed_torch(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  # for code of others that draws from it


def seed_torch(key: int) -> None:
    """``torch.manual_seed`` for the devices in use; to ask for all there could be takes a hundred times longer."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)


class Stopwatch(Callback):
    """Seconds in training, validation left out, and images trained on, over all ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.images = 0
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._since == 0.0:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[0]) * trainer.world_size

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._since:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "images": self.images}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.images = state_dict["seconds"], state_dict["images"]


class LearningRate(Callback):
    """Logs ``lr``, the rate of the first parameter group, with the steps that are logged."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.log("lr", rate, on_step=True, on_epoch=False)


class TestPredictions(Callback):
    """What the model says of each test image, over all ranks, in the order of the images.

    ``table`` has a row for each image: index, label, prediction, the probability of the prediction, and the loss.
    """

    __test__ = False  # no test, whatever pytest thinks of the name

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self.table: dict[str, np.ndarray[Any, Any]] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits = outputs.detach().float()
        confidence, prediction = logits.softmax(dim=-1).max(dim=-1)
        loss = cross_entropy(logits, batch.labels, reduction="none")
        columns = [batch.indices, batch.labels, prediction, confidence, loss]
        self._parts.append(torch.stack([column.double().cpu() for column in columns], dim=1))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = gather(trainer, torch.cat(self._parts) if self._parts else torch.empty(0, 5, dtype=torch.float64))
        rows = rows[rows[:, 0].argsort()]
        whole = dict.fromkeys(("index", "label", "prediction"), np.int32)
        kinds = {**whole, "confidence": np.float32, "loss": np.float32}
        self.table = {name: rows[:, n].numpy().astype(kind) for n, (name, kind) in enumerate(kinds.items())}


def gather(trainer: Trainer, rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, one after the other, however many each has."""
    if trainer.world_size == 1:
        return rows
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, rows)
    return torch.cat(gathered)


class TrainingBar(ProgressBar):
    """One bar for the whole training: epoch, step, loss, accuracy, time left. Nothing where there is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[Any] | None = None
        self._last_epoch: list[str] = []
        self._enabled = sys.stderr.isatty()

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = sys.stderr.isatty()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        tqdm.write(sep.join(map(str, args)), file=sys.stderr)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        epochs, steps = trainer.max_epochs or 0, trainer.max_steps
        ends = [trainer.num_training_batches * epochs] if epochs > 0 else []
        ends += [steps * trainer.accumulate_grad_batches] if steps > 0 else []
        self._last_epoch = [str(epochs)] if ends and epochs > 0 and ends[0] == min(ends) else []
        self._open(int(min(ends)) if ends else None, initial=progress.completed)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None and self._bar.update():  # true when tqdm has redrawn, at most ten times a second
            self._show(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(int(sum(trainer.num_test_batches)), text="test")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _open(self, total: int | None, *, initial: int = 0, text: str = "") -> None:
        if self._enabled:
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=text,
                dynamic_ncols=True,
                file=sys.stderr,
                bar_format="{desc} {percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt}{postfix}, {remaining} left",
            )

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is None:
            return
        metrics = self.get_metrics(trainer, pl_module)
        shown = [name for name, facts in METRICS.items() if facts.in_bar]
        names = {"train/loss_step": "loss"} | {f"train/{name}": name for name in shown}
        names |= {f"val/{name}": f"val {name}" for name in shown}
        values = [f"{text} {metrics[name]:.3f}" for name, text in names.items() if name in metrics]
        epochs = [f"epoch {trainer.current_epoch + 1}", *self._last_epoch]
        self._bar.set_description_str("/".join(epochs), refresh=False)
        self._bar.set_postfix_str(", ".join(values), refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
