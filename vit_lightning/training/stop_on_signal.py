"""Stops training on a signal, after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from vit_lightning.signals import end_process, noted
from vit_lightning.storage.folder import is_first
from vit_lightning.training.callbacks import Agreement
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.lightning_detours import end_other_ranks


class StopOnSignal(Checkpoint):
    """Callback that writes a checkpoint and ends the process after SIGTERM, SIGUSR1 or Ctrl-C.

    The handler only notes the signal, and all ranks agree after a batch, or where there are several after the next one,
    so that none waits for another. Lightning's handler communicates with other ranks, which hangs, and ends with exit
    code 0; here it is 128 + the signal's number. A second signal waits for no step. A subclass of Checkpoint, since
    these run last, when the state of a batch is complete.

    Args:
        checkpoints: the callback listed before this one, which writes ``last.ckpt``.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._received, self._ranks = 0, Agreement()
        self._installed = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._installed.enter_context(noted(self._note))

    def _note(self, number: int) -> None:
        if number == signal.SIGINT and not self._received and is_first():
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr, flush=True)
        self._received = self._received or number

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._agreed(trainer) and self.checkpoints.save_if_possible(trainer):
            self._exit(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._agreed(trainer):
            self._exit(trainer)  # last.ckpt is that of before the validation

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed(trainer, now=True):
            self._exit(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._installed.close()
        if self._agreed(trainer, now=True):
            self._exit(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._installed.close()
        if isinstance(exception, SystemExit):
            end_other_ranks(trainer)

    def _agreed(self, trainer: Trainer, *, now: bool = False) -> bool:
        """Whether some rank has received a signal; all ranks have to call this at once."""
        number = self._ranks.largest(trainer, self._received, now=now)
        self._received = number or self._received
        return number != 0

    def _exit(self, trainer: Trainer) -> None:
        self.checkpoints.finish(trainer)
        end_process(self._received)
