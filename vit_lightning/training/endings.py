"""Ends of a training before its time: by a signal, after a checkpoint, or by a watchdog where it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from vit_lightning.companion import ASLEEP, HANGS, activity, tell
from vit_lightning.notation import show_time
from vit_lightning.signals import end_at_once, end_process, is_launched, noted, process_stat
from vit_lightning.storage.folder import is_first
from vit_lightning.training.callbacks import Agreement
from vit_lightning.training.checkpoints import Checkpoints
from vit_lightning.training.lightning_detours import (
    awaited_worker,
    call_after_batches,
    call_around_connection,
    end_other_ranks,
    frames_of_threads,
    further_ranks,
)

FIRST = 3.0
"""Times the limit that a first batch has, at most; less than ranks wait for one another."""
ANSWER = 4.0
"""Seconds that other ranks, or the companions of those that hold Python's lock, and workers have to show stacks."""
REPORT = 10.0
"""Seconds that a report takes, at most."""
LATE = 1.0
"""Seconds by which this thread is late only if it cannot run, since another one holds Python's lock."""

SAVES = ("storage/checkpoint_files.py", "training/checkpoints.py", "connectors/checkpoint_connector.py")
COMPILES = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""Files whose functions, if their name has ``compile`` in it, make code; others run it."""
CALLBACK = "trainer/call.py", "_call_callback_hooks"
WORKER = "torch/utils/data/dataloader.py", "_try_get_data"
AGREEMENT = "training/callbacks.py", "_wait"
BACKWARD = "torch/autograd/graph.py"
OTHERS = "waits for the other ranks"


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


class Watchdog(Callback):
    """Callback that ends a run in which no batch ends for long, with the exit code 75.

    ``hang-rank0-PID.txt`` in the run folder, one for each rank, and stderr have the stacks of what waits. Time does not
    count while a rank compiles or saves, and while the process or the machine is stopped. The first batch of training,
    of validation and of the test, with all that comes before it, has ``FIRST`` times as long; a run of slow steps has
    twice its longest pause. Ranks tell each other by files in the run folder, which works however they wait. The
    companion of the process ends it where the thread of the watch cannot run, since another one holds Python's lock.

    Args:
        folder: the run folder.
        minutes: without progress after which the run is ended; 0 for no watchdog.
        clock: seconds.
    """

    def __init__(self, folder: Path, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.limit, self._clock = folder, 60.0 * minutes, clock
        self.pause = min(self.limit / 20, 2.0)
        self.rank, self.ranks = 0, 1
        self._main = threading.get_ident()
        self._stopped: threading.Event | None = None
        self._stacks: Any = None
        self._asks_workers = False
        self._begun: set[str] = set()  # loops of which a batch has ended
        self._batches, self._is_first = 0, True  # batches that have ended; whether a loop's first one is awaited
        self._state: dict[str, Any] = {  # of this rank, for the others
            "goes_on": 0,
            "looks": 0,
            "batches": 0,
            "is_first": True,
            "report": "",
        }
        self._all: list[dict[str, Any]] = []  # the states of all ranks that this one has seen
        self._looked = self._since = clock()
        self._longest = 0.0
        self._left = math.inf  # seconds until the run hangs
        self._makes_or_saves = False

    def watch_connection(self, trainer: Trainer) -> None:
        """Ends the run where the ranks do not connect, for as long as a first batch may take."""
        if self.limit == 0.0 or trainer.num_devices * trainer.num_nodes == 1:
            return
        connected = threading.Event()

        def begin() -> None:  # also before the test, when they have
            threading.Thread(target=self._connects, args=(trainer, connected), daemon=True, name="connection").start()

        call_around_connection(trainer, begin, connected.set)

    def _connects(self, trainer: Trainer, connected: threading.Event) -> None:
        others = {0: os.getppid()} if is_launched() else further_ranks(trainer)
        looked = since = self._clock()
        while not connected.wait(self.pause):
            now = self._clock()
            if now - looked > self.pause + ASLEEP:
                since = now
            looked = now
            if now - since > FIRST * self.limit:
                try:
                    self._report_others(others, now - since)
                finally:
                    end_at_once(HANGS)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.limit == 0.0:
            return
        self.folder = trainer.strategy.broadcast(self.folder)
        self.rank, self.ranks, self._main = trainer.global_rank, trainer.world_size, threading.get_ident()
        self._state_file(self.rank).unlink(missing_ok=True)  # of a run that was killed
        trainer.strategy.barrier()
        self._state |= {"pid": os.getpid(), "started": _started(os.getpid()), "host": platform.node()}
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        if signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):  # else it is the user's
            faulthandler.register(signal.SIGUSR2, self._stacks)  # data-loading workers inherit it and the file
            self._asks_workers = True
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, args=(self._stopped, self._stacks), daemon=True, name="watchdog").start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._stopped is not None and not self._stopped.is_set():
            if self._asks_workers:
                faulthandler.unregister(signal.SIGUSR2)
            self._stopped.set()
            self._state_file(self.rank).unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended("training")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended("validation")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended("test")

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self.begins("validation")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        self.begins("training")

    def on_test_start(self, *args: Any, **kwargs: Any) -> None:
        self.begins("test")

    def begins(self, loop: str) -> None:
        """Notes that a loop begins, which may be the first time in this process."""
        self._is_first = loop not in self._begun

    def ended(self, loop: str) -> None:
        """Notes that a batch of a loop has ended."""
        self._begun.add(loop)
        self._batches += 1
        self._is_first = False

    def _watch(self, stopped: threading.Event, stacks: IO[bytes]) -> None:
        try:
            while not stopped.wait(self.pause):
                hangs = self.hangs()
                if hangs and not stopped.is_set():
                    tell(**self._facts(REPORT + 2.0 * self.pause))
                    try:
                        self._report()
                    finally:
                        end_at_once(HANGS)
                tell(**self._facts(max(0.0, self._left) + self.pause + LATE))
        finally:
            tell(seconds=None)
            stacks.close()

    def _facts(self, seconds: float) -> dict[str, Any]:
        """Returns what the companion of this process needs to report a hang, so many seconds from now."""
        own = next(state for state in self._all if state["rank"] == self.rank)
        return {
            "seconds": None if self._makes_or_saves else seconds,
            "path": str(self._report_file(own).absolute()),
            "rank": self.rank,
            "text": f"{self._cause(self._looked - self._since + seconds)}\n  rank {self.rank} (process {own['pid']}): ",
            "hint": self._hint if self.rank == 0 else "",
            "stacks": self._stacks.fileno() if self._asks_workers else None,
        }

    def hangs(self) -> bool:
        """Looks once, as the thread does after each pause, and returns whether the run hangs."""
        now, before, state = self._clock(), self._all, self._state
        has_slept, self._looked = now - self._looked > self.pause + ASLEEP, now
        has_ended, was_first = state["batches"] != self._batches, state["is_first"]
        # those of threads that go on change while they are read, and Python 3.11 was seen to crash in a thread so
        frames = {} if has_ended else frames_of_threads()
        state |= {"looks": state["looks"] + 1, "batches": self._batches, "is_first": self._is_first}
        state["place"] = place(frames.get(self._main))
        self._makes_or_saves = makes_or_saves(frames, self._main)
        if has_ended or self._makes_or_saves:
            state["goes_on"] += 1
        self._all = self._exchange(now)
        if has_slept or [other["goes_on"] for other in before] != [other["goes_on"] for other in self._all]:
            if has_ended and not (was_first or has_slept):
                self._longest = max(self._longest, now - self._since)
            self._since = now
        self._left = self.patience - (now - self._since)
        return self._left < 0.0 or any(other["report"] for other in self._all)

    @property
    def patience(self) -> float:
        """Seconds without progress after which the run hangs."""
        first = FIRST * self.limit if any(state["is_first"] for state in self._all) else 0.0
        return max(self.limit, 2.0 * self._longest, first)

    def _exchange(self, now: float) -> list[dict[str, Any]]:
        """Writes the state of this rank and returns those of all, with the time when each was last seen to change."""
        self._write_state()
        known = {state["rank"]: state for state in self._all}
        for rank in range(self.ranks):
            with contextlib.suppress(OSError, ValueError):  # not there, or just being written
                state = json.loads(self._state_file(rank).read_text(encoding="utf-8"))
                if state["looks"] != known.get(rank, {}).get("looks"):
                    known[rank] = {**state, "rank": rank, "seen": now}
        known[self.rank] = {**self._state, "rank": self.rank, "seen": now}  # a full disk does not take the file
        return [known[rank] for rank in sorted(known)]

    def _write_state(self) -> None:
        if self.ranks > 1:
            with contextlib.suppress(OSError):
                self._state_file(self.rank).write_text(json.dumps(self._state), encoding="utf-8")

    def _state_file(self, rank: int) -> Path:
        return self.folder / f".rank{rank}.json"

    def _report_file(self, state: dict[str, Any]) -> Path:
        return self.folder / f"hang-rank{state['rank']}-{state['pid']}.txt"

    def _report(self) -> None:
        """Shows what stands still, waits for the other ranks to do so, and kills those that cannot."""
        silent = [state for state in self._all if self._looked - state["seen"] > self.limit / 2]
        text = next((state["report"] for state in self._all if state["report"]), "") or self._text(silent)
        self._state["report"] = text  # by which the other ranks end too, also one that is frozen and goes on now
        self._write_state()
        frozen = [s for s in silent if s["host"] == platform.node() and _started(s["pid"]) == s["started"] != ""]
        for state in frozen:
            os.kill(state["pid"], signal.SIGCONT)
        stacks = self._all_stacks()
        own = next(state for state in self._all if state["rank"] == self.rank)
        with contextlib.suppress(OSError):
            self._report_file(own).write_text(f"{text}\n{stacks}", encoding="utf-8")
        until = time.monotonic() + ANSWER + self.pause
        while time.monotonic() < until and not all(self._report_file(state).is_file() for state in self._all):
            time.sleep(0.1)
        hint = f"lightning: hangs: {text}{self._hint}" if self.rank == 0 else ""
        print(f"stacks of rank {self.rank}:\n{stacks}{hint}", end="", file=sys.stderr, flush=True)
        for state in frozen:
            if not self._report_file(state).is_file():
                os.kill(state["pid"], signal.SIGKILL)
        self._state_file(self.rank).unlink(missing_ok=True)

    def _report_others(self, others: dict[int, int], seconds: float) -> None:
        """Names the ranks that have not connected, and kills those that are frozen."""
        lines = [f"  rank {rank} (process {pid}): {activity(pid)}" for rank, pid in others.items()]
        lines.sort(key=lambda line: not line.endswith("frozen"))
        lines = lines or ["  the others, which another program has started"]
        text = "\n".join([f"the ranks have not connected for {show_time(seconds)}:", *lines, ""])
        hint = ""
        if is_first():  # the others do not know the folder yet
            hint = self._hint
            with contextlib.suppress(OSError):
                (self.folder / f"hang-rank0-{os.getpid()}.txt").write_text(text, encoding="utf-8")
        print(f"lightning: hangs: {text}{hint}", end="", file=sys.stderr, flush=True)
        for pid in others.values():
            if activity(pid) == "frozen":
                os.kill(pid, signal.SIGKILL)

    def _text(self, silent: list[dict[str, Any]]) -> str:
        for state in silent:
            state["place"] = "the whole process stands still"
        waiting = [state for state in self._all if state["place"] == OTHERS or BACKWARD in state["place"]]
        order = sorted(self._all, key=lambda state: (state not in silent, state in waiting, state["batches"]))
        lines = [f"  rank {state['rank']} (process {state['pid']}): {state['place']}" for state in order]
        return "\n".join([self._cause(self._looked - self._since), *lines, ""])

    def _cause(self, seconds: float) -> str:
        passed = f"{show_time(seconds)}, over {show_time(self.patience)}"
        return f"no batch has ended for {passed}; what most likely hangs comes first:"

    @property
    def _hint(self) -> str:
        return f"to resume: lightning fit --resume {self.folder}\n"

    def _all_stacks(self) -> str:
        """Returns the stacks of this process, and of those data-loading workers that are not frozen."""
        workers = multiprocessing.active_children() if self._asks_workers else []
        faulthandler.dump_traceback(self._stacks)
        for worker in workers:
            os.write(self._stacks.fileno(), f"\nprocess {worker.pid}, {worker.name}, {activity(worker.pid)}\n".encode())
            with contextlib.suppress(OSError):
                os.kill(worker.pid or 0, signal.SIGUSR2)
            time.sleep(min(0.2, ANSWER / len(workers)))
        self._stacks.seek(0)
        return str(self._stacks.read().decode(errors="replace"))


def place(frame: FrameType | None) -> str:
    """Returns what a thread does, by its innermost frame: a callback, a worker or a rank that it waits for, a line."""
    for outer in _outwards(frame):
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if "/torch/distributed/" in file or (file.endswith(AGREEMENT[0]) and name == AGREEMENT[1]):
            return OTHERS
        if file.endswith(WORKER[0]) and name == WORKER[1]:
            return f"waits for {_awaited(outer.f_locals['self'])}"
        if file.endswith(CALLBACK[0]) and name == CALLBACK[1] and "callback" in outer.f_locals:  # not before the first
            return f"callback {type(outer.f_locals['callback']).__name__}.{outer.f_locals['hook_name']}"
    if frame is None:
        return "nothing"
    return f"main loop, {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"


def makes_or_saves(frames: dict[int, FrameType], main: int) -> bool:
    """Whether some thread compiles, such as that of a backward pass, or the main thread saves and waits for no rank."""
    for ident, frame in frames.items():
        for outer in _outwards(frame):
            file = outer.f_code.co_filename
            if file.endswith(COMPILES) and "compile" in outer.f_code.co_name:
                return True
            if ident == main and file.endswith(SAVES):
                return place(frame) != OTHERS
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited(loader: Any) -> str:
    """Returns the data-loading worker whose batch is next; at the start of an epoch those that are frozen, or all."""
    number, processes = awaited_worker(loader)
    frozen = [number for number, pid in processes.items() if activity(pid) != "running"]
    numbers = (frozen or list(processes)) if number is None else [number]
    return ", ".join(f"DataLoader worker {n} (process {processes[n]}, {activity(processes[n])})" for n in numbers)


def _started(pid: int) -> str:
    """Returns when a process of this machine was started; empty if there is none, or not on Linux."""
    return "".join(process_stat(pid)[19:20])
