"""A callback that writes down what a run trains on, and harms it as the variable VITL_FAULT says.

``VITL_FAULT="rank:step:point:kind"``, several separated by commas; the step counts completed batches, ``*`` is each.
Points: setup, sanity, batch_start, forward, after_backward, after_opt_step, val, ckpt_write (before the file takes its
place), ckpt_done (after it has), best_write and best_done (of best.ckpt alone), epoch_end, train_end, test. Kinds: a
signal (KILL, TERM, INT, STOP), one to the whole process group (GROUP_TERM and so on), one from rank 0 to rank 1
(RANK1_TERM and so on), one in the middle of a write (LATE_TERM and so on: training has gone on, and the file is
complete only when it is waited for), one in a step of ten seconds (SLOW_INT and so on), EXC, NAN, HUGE, SLEEP, HANG,
LOCK (holds Python's lock for ever); FULL (no file can grow beyond 20 kB) and BRIM (beyond 64 bytes)
stand for the disk; LOSE deletes best.ckpt, MOVE moves the run folder. The file ``fault`` has the time. A run
that torchrun or SLURM has started again has no faults.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import threading
import time
import zlib
from pathlib import Path

import torch
from lightning.pytorch import Callback

from vit_lightning.storage import checkpoint_files as checkpoint_io

GRADIENTS = {"NAN": torch.nan, "HUGE": 1e25}
DISKS = {"FULL": 20_000, "BRIM": 64}


class Fault(Callback):
    def __init__(self) -> None:
        faults = [fault.split(":") for fault in os.environ.get("VITL_FAULT", "").split(",") if fault]
        self.faults = {(int(rank), step, point): kind for rank, step, point, kind in faults}
        if any(os.environ.get(f"{launcher}_RESTART_COUNT", "0") != "0" for launcher in ("TORCHELASTIC", "SLURM")):
            self.faults = {}
        self.trainer = None
        self.lines = ""
        self.went_on, self.is_awaited = threading.Event(), threading.Event()

    def setup(self, trainer, pl_module, stage):
        self.trainer, self.module, self.folder = trainer, pl_module, Path(trainer.default_root_dir)
        replace = checkpoint_io.os.replace
        if stage == "fit" and any(point.endswith(("_write", "_done")) for _, _, point in self.faults):

            def replace_after(source, target):
                self.at("ckpt_write", self.saved)
                if Path(target).name == "best.ckpt":
                    self.at("best_write", self.saved)
                replace(source, target)
                if Path(target).name != "previous.ckpt":
                    self.at("ckpt_done", self.saved)
                if Path(target).name == "best.ckpt":
                    self.at("best_done", self.saved)

            plugin = trainer.strategy.checkpoint_io
            finish = plugin.finish

            def finish_after():
                if plugin._writing is not None:
                    self.is_awaited.set()
                finish()

            plugin.finish = finish_after
            checkpoint_io.os = type("os", (), {**vars(os), "replace": staticmethod(replace_after)})
        witness = Path(f"witness{trainer.global_rank}.jsonl")
        if stage == "fit" and witness.exists():
            os.truncate(witness, witness.read_bytes().rfind(b"\n") + 1)  # a kill may leave part of a line
        self.at("setup")

    def at(self, point: str, done: int | None = None) -> None:
        is_writing = done is not None  # in the thread that writes checkpoints
        done = done if is_writing else self._done()
        rank = self.trainer.global_rank
        for step in (str(done), "*"):
            if kind := self.faults.get((rank, step, point)):
                if not is_writing and (finish := getattr(self.trainer.strategy.checkpoint_io, "finish", None)):
                    finish()  # so that it is known which checkpoints there are
                self.do(kind)

    def do(self, kind: str) -> None:
        if kind != "SLEEP":
            with contextlib.suppress(OSError):
                Path("fault").write_text(str(time.monotonic()))  # the same in all processes
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if kind == "EXC":
            raise RuntimeError("injected")
        if kind in ("SLEEP", "HANG"):
            time.sleep(0.01 if kind == "SLEEP" else 1e6)
        elif kind == "LOCK":
            assert -1 in itertools.count()
        elif kind in GRADIENTS:
            for weight in self.module.parameters():
                if weight.grad is not None:
                    weight.grad.fill_(GRADIENTS[kind])
        elif kind == "LOSE":
            (self.folder / "checkpoints/best.ckpt").unlink()
        elif kind == "MOVE":
            self.folder.rename(self.folder.with_name("moved"))
        elif kind in DISKS:
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISKS[kind], hard))
        elif kind.startswith("LATE_"):
            assert self.went_on.wait(60)
            os.kill(os.getpid(), getattr(signal, kind.replace("LATE_", "SIG")))
            assert self.is_awaited.wait(60)
        elif kind.startswith("SLOW_"):
            os.kill(os.getpid(), getattr(signal, kind.replace("SLOW_", "SIG")))
            time.sleep(10.0)
        elif kind.startswith("RANK1_"):
            (second,) = self.trainer.strategy.launcher.procs
            os.kill(second.pid, getattr(signal, kind.replace("RANK1_", "SIG")))
        elif kind.startswith("GROUP_"):
            os.killpg(0, getattr(signal, kind.replace("GROUP_", "SIG")))
        else:
            os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        pixels = [zlib.crc32(image.float().cpu().numpy().tobytes()) for image in batch.images]
        indices = [] if batch.indices is None else batch.indices.tolist()  # of a LightningDataModule of the user's own
        line = json.dumps({"batch": done, "indices": indices, "pixels": pixels})
        self.lines += line + "\n"
        with contextlib.suppress(OSError), Path(f"witness{trainer.global_rank}.jsonl").open("a") as file:
            file.write(self.lines)
            file.flush()
            self.lines = ""
        self.went_on.set()
        self.at("batch_start")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved = self._done()  # the file is written later
        self.went_on.clear()
        self.is_awaited.clear()

    def on_before_backward(self, trainer, pl_module, loss):
        if self.faults.get((trainer.global_rank, str(self._done()), "forward")) == "NAN":
            loss.data.fill_(torch.nan)
        else:
            self.at("forward")

    def _done(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def on_after_backward(self, trainer, pl_module):
        self.at("after_backward")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.at("after_opt_step")

    def on_validation_batch_start(self, *args):
        self.went_on.set()
        self.at("sanity" if self.trainer.sanity_checking else "val")

    def on_test_batch_start(self, *args):
        self.at("test")

    def on_train_epoch_end(self, trainer, pl_module):
        self.at("epoch_end")

    def on_train_end(self, trainer, pl_module):
        self.at("train_end")
