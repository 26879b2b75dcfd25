"""The watchdog of a run, with a clock of the test's own: what it ends, and what it never ends."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning.config.options import ConfigOptions
from vit_lightning.data.batches import WorkerLoader
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO
from vit_lightning.training import endings
from vit_lightning.training.endings import Watchdog
from vit_lightning.training.lightning_detours import longest_wait, wait_at_most


class Watched:
    """A watchdog of 30 minutes that looks whenever time passes."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.now = 0.0
        self.dog = Watchdog(folder, 30.0, clock=lambda: self.now)
        self.dog.rank, self.dog.ranks = rank, ranks
        self.dog._state |= {"pid": 100 + rank, "started": "", "host": ""}

    def hangs(self, minutes: float) -> float | None:
        """Returns the minutes after which the run counts as hanging, within so many."""
        for seconds in range(0, round(60 * minutes), 2):
            self.now += 2.0
            if self.dog.hangs():
                return seconds / 60
        return None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    """A run that has trained a batch."""
    found = Watched(tmp_path)
    found.dog.ended("training")
    return found


def test_a_run_without_progress_is_ended(watched):
    assert watched.hangs(14) is None
    watched.dog.ended("training")
    assert watched.hangs(60) == pytest.approx(30.0, abs=0.2)


def test_the_first_batch_of_each_loop_has_three_times_as_long(watched, tmp_path):
    assert Watched(tmp_path).hangs(600) == pytest.approx(90.0, abs=0.2), "set-up and the first batch"
    watched.dog.on_validation_start()
    assert watched.hangs(89) is None
    watched.dog.ended("validation")
    assert watched.hangs(29) is None, "which is no slow step"
    watched.dog.on_validation_end()
    watched.dog.on_validation_start()
    assert watched.hangs(60) == pytest.approx(1.0, abs=0.2), "a second validation is watched from its start"


def test_slow_steps_are_no_hang(watched):
    for _ in range(3):
        assert watched.hangs(25) is None
        watched.dog.ended("training")
    assert watched.hangs(49) is None
    assert watched.hangs(5) is not None


@pytest.mark.parametrize("hours", [0.1, 12])
def test_a_machine_that_was_suspended_has_all_its_time_again(watched, hours):
    assert watched.hangs(25) is None
    watched.now += 3600 * hours
    assert watched.hangs(29) is None
    assert watched.hangs(5) is not None


def test_compiling_is_no_hang(watched):
    compiling: list[float | None] = []
    running: list[float | None] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiling.append(watched.hangs(60))

        def run(*values: Any) -> Any:
            running.append(watched.hangs(60))
            return module.forward(*values)

        return run

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert compiling == [None]
    assert running == [pytest.approx(30.0, abs=0.2)], "code that has been compiled can hang"


def test_saving_is_no_hang(watched, tmp_path):
    found: list[float | None] = []
    plugin = AtomicCheckpointIO()
    writing = SimpleNamespace(result=lambda: found.append(watched.hangs(60)), done=lambda: True)
    plugin._writing = tmp_path / "last.ckpt", 0, writing
    plugin.finish()
    assert found == [None]


def two_ranks(folder: Path) -> tuple[Watched, Watched]:
    ranks = Watched(folder, 0, 2), Watched(folder, 1, 2)
    for watched in ranks:
        watched.dog.ended("training")
        watched.dog.hangs()
    return ranks


def test_ranks_wait_for_one_that_compiles_or_saves_or_has_its_first_batch(tmp_path, monkeypatch):
    first, second = two_ranks(tmp_path)
    saving = [second]
    looking = [first]
    monkeypatch.setattr(endings, "makes_or_saves", lambda *_: looking == saving)
    for _ in range(40):
        for looking[0] in (second, first):
            assert looking[0].hangs(3) is None
    saving.clear()
    second.dog.begins("validation")
    for _ in range(25):
        assert (second.hangs(3), first.hangs(3)) == (None, None)
    second.dog.ended("validation")
    found = [(second.hangs(3), first.hangs(3)) for _ in range(12)]
    assert found[8] == (None, None)
    assert None not in found[-1]


def test_a_rank_ends_by_the_report_of_another(tmp_path):
    first, second = two_ranks(tmp_path)
    second.dog._state["report"] = "no batch has ended"
    assert second.hangs(1) == 0.0
    assert first.hangs(1) == 0.0


def test_a_full_disk_is_no_hang(tmp_path, monkeypatch):
    first, _ = two_ranks(tmp_path)
    monkeypatch.setattr(Watchdog, "_write_state", lambda dog: None)
    for _ in range(5):
        assert first.hangs(20) is None
        first.dog.ended("training")


def test_a_rank_that_stands_still_is_named_before_those_that_wait(tmp_path, capsys):
    first, _ = two_ranks(tmp_path)
    (tmp_path / "hang-rank1-101.txt").touch()
    assert first.hangs(60) is not None
    first.dog._all[0]["place"] = endings.OTHERS
    with (tmp_path / "stacks").open("w+b") as first.dog._stacks:
        first.dog._report()
    said = capsys.readouterr().err
    assert "no batch has ended for 30 min" in said
    frozen, waiting = said.index("rank 1 (process 101): the whole process"), said.index("rank 0 (process 100): waits")
    assert frozen < waiting
    report = (tmp_path / "hang-rank0-100.txt").read_text()
    assert "test_a_rank_that_stands_still" in report, "the stack of the main thread"


class Looks(Callback):
    """Asks where the main thread is, wherever it is called."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(endings.place(inspect.currentframe()))


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.found: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found.append(endings.place(inspect.currentframe()))
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_place_is_named(tmp_path):
    looks, module = Looks(), Plain()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=1, callbacks=[looks], default_root_dir=tmp_path, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(2, 1)), 2))
    assert looks.found == ["callback Looks.on_train_batch_end"]
    assert module.found[0].startswith("main loop, training_step (")


class Downloads(LightningDataModule):
    """Data that are fetched and prepared for as long as it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bool] = {}

    def look(self, name: str) -> None:
        self.found[name] = "watchdog" in {thread.name for thread in threading.enumerate()}

    def prepare_data(self) -> None:
        self.look("download")

    def setup(self, stage: str) -> None:
        self.look("set-up")

    def train_dataloader(self) -> Any:
        self.look("loader")
        return DataLoader(TensorDataset(torch.ones(2, 1)), 2)


def test_downloads_are_before_the_watch(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    data = Downloads()
    Trainer(max_steps=1, callbacks=[Watchdog(tmp_path, 30.0)], default_root_dir=tmp_path, **quiet).fit(Plain(), data)
    assert data.found == {"download": False, "set-up": False, "loader": True}


class Sleeps(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(60.0 * (index == 1))
        return index


def test_a_worker_that_sleeps_is_named_with_its_stack(tmp_path):
    found: list[tuple[str, str]] = []
    dog = Watchdog(tmp_path, 30.0)
    strategy = SimpleNamespace(broadcast=lambda value: value, barrier=lambda: None)
    dog.setup(SimpleNamespace(strategy=strategy, global_rank=0, world_size=1), None, "fit")
    batches = iter(WorkerLoader(Sleeps(), num_workers=1))
    next(batches)
    main = threading.get_ident()
    looking = threading.Thread(target=lambda: (time.sleep(0.3), found.append(look()), batches._workers[0].kill()))

    def look() -> tuple[str, str]:
        return endings.place(sys._current_frames()[main]), dog._all_stacks()

    looking.start()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(batches)
    looking.join()
    dog.teardown(None, None, "fit")
    place, stacks = found[0]
    assert place == f"waits for DataLoader worker 0 (process {batches._workers[0].pid}, running)"
    assert "__getitem__" in stacks


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_are_watched_while_they_connect(tmp_path, fails):
    watched: list[bool] = []

    def is_watched() -> bool:
        return "connection" in {thread.name for thread in threading.enumerate()}

    def connect() -> None:
        watched.append(is_watched())
        if fails:
            raise RuntimeError("another rank has ended")

    strategy = SimpleNamespace(setup_environment=connect, launcher=None)
    Watchdog(tmp_path, 30.0).watch_connection(SimpleNamespace(strategy=strategy, num_devices=2, num_nodes=1))
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        strategy.setup_environment()
    time.sleep(0.1)
    assert watched == [True]
    assert not is_watched()


def test_ranks_have_a_time_limit_of_four_times_that_of_the_watchdog():
    trainer = SimpleNamespace(strategy=DDPStrategy())
    wait_at_most(trainer, 4 * 30.0)
    assert longest_wait(trainer) == timedelta(hours=2)
    trainer = SimpleNamespace(strategy=DDPStrategy(timeout=timedelta(minutes=5)))
    wait_at_most(trainer, 4 * 30.0)
    assert longest_wait(trainer) == timedelta(minutes=5), "the user's own"


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_minutes_of_the_watchdog(minutes):
    with pytest.raises(UserError, match="watchdog_minutes="):
        ConfigOptions(watchdog_minutes=minutes)


def test_a_look_before_the_first_callback_of_a_hook_does_not_end_the_watch():
    """Lightning's loop over callbacks has no callback yet."""
    names: dict[str, Any] = {}
    file, function = endings.CALLBACK
    exec(compile(f"import sys\ndef {function}(): return sys._getframe()", f"/lightning/{file}", "exec"), names)
    assert endings.place(names[function]()).startswith(f"main loop, {function}")
