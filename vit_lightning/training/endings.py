"""Ends of a training before its time: by a signal, after a checkpoint, or by a watchdog where it hangs."""

import contextlib
import faulthandler
import math
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from vit_lightning.signals import end_process, is_launched, noted
from vit_lightning.storage.folder import is_first
from vit_lightning.training.callbacks import Agreement
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.lightning_detours import call_after_batches, end_other_ranks

FIRST = 3.0
"""Times the limit that a first batch has; less than ranks wait for one another."""
LATER = 5.0
"""Seconds by which further ranks end later: Lightning kills the first one, without its stacks, where one has ended."""
ARMED = 1.0
"""Seconds in which the watchdog is armed once at most, which takes a quarter of a millisecond."""


class StopOnSignal(Checkpoint):
    """Callback that writes a checkpoint and ends the process after SIGTERM, SIGUSR1 or Ctrl-C.

    The handler only notes the signal, and all ranks agree after a batch, or where there are several after the next one,
    so that none waits for another. Lightning's handler communicates with other ranks, which hangs, and ends with exit
    code 0; here it is 128 + the signal's number. A second signal waits for no step. A subclass of Checkpoint, since
    these run last.

    Args:
        checkpoints: the callback listed before this one, which writes ``last.ckpt``.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._received, self._ranks = 0, Agreement()
        self._installed = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._installed.enter_context(noted(self._note))
        call_after_batches(trainer, lambda: self._end_batch(trainer))

    def _note(self, number: int) -> None:
        if number == signal.SIGINT and not self._received and is_first():
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr, flush=True)
        self._received = self._received or number

    def _end_batch(self, trainer: Trainer) -> None:
        if self._agreed(trainer) and self.checkpoints.save_if_possible(trainer):
            self._exit(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        is_in_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        # it is written before a validation, unless the time has asked for that
        if is_in_training and self._agreed(trainer) and self.checkpoints.has_last(trainer):
            self._exit(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed(trainer, now=True):
            self.checkpoints.save_last(trainer)
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


class Watchdog(Callback):
    """Callback to end a run in which no batch ends for long, with exit code 1 and the stacks of all threads in a file.

    It is ``hang-rank0.txt`` in the run folder, one for each rank. The first batch of training, of a validation and of
    the test, with all that comes before it, has ``FIRST`` times as long. What ends the process is a thread of C, which
    needs no lock of Python's.

    Args:
        folder: the run folder.
        minutes: without a finished batch after which the run is ended; 0 for no watchdog.
    """

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.limit = folder, 60.0 * minutes
        self._stacks: IO[bytes] | None = None
        self._armed = -math.inf

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.limit:
            self.folder = trainer.strategy.broadcast(self.folder)
            self._stacks = stacks_of(self.folder, trainer.global_rank).open("ab")
            self._arm(FIRST)

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        self._arm(FIRST)

    on_validation_start = on_test_start = on_train_start

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() - self._armed > ARMED:
            self._arm()

    on_validation_batch_end = on_test_batch_end = on_train_batch_end

    def _arm(self, times: float = 1.0) -> None:
        if self._stacks is not None:
            seconds = times * self.limit + LATER * is_launched()
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)
            self._armed = time.monotonic() if times == 1.0 else -math.inf  # a first batch that ends is noted

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            is_empty = not self._stacks.tell()
            self._stacks.close()
            if is_empty:  # else they are of an earlier process of the run
                Path(self._stacks.name).unlink(missing_ok=True)
            self._stacks = None

    on_exception = teardown


def stacks_of(folder: Path, rank: int = 0) -> Path:
    """Returns the file with the stacks of a rank that has hung; there is none, or an empty one, if it has not."""
    return folder / f"hang-rank{rank}.txt"
