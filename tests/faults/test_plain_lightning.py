"""What Lightning does by itself, without this package: one test for each of its faults that is worked around here.

Each asserts what one would want and fails today. One that passes after an upgrade tells that a detour can go.
"""

import contextlib
import csv
import functools
import http.server
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

SAMPLES, BATCHES, EPOCHS = 16, 8, 3


def wanted(reason: str, raises: type[BaseException] = AssertionError) -> Any:
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)


class Module(LightningModule):
    """A linear layer, and the samples that it has seen, batch for batch."""

    def __init__(self, dropout: float = 0.0, **others: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 3))
        self.seen: list[list[int]] = []
        self.numbers: list[float] = []

    def training_step(self, batch, batch_idx):
        indices, images, labels = batch
        self.seen.append(indices.tolist())
        self.log("batch", float(batch_idx), on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(self.network(images), labels)

    def on_train_epoch_end(self):
        self.numbers.append(float(self.trainer.callback_metrics["batch"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stopped(Exception):
    pass


class StopBefore(Callback):
    """Ends the process, as good as; what has been written by then is written."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.batch_progress.total.completed == self.batch:
            raise Stopped


def samples(*, alike: bool = False) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(SAMPLES, 4, generator=draw), torch.arange(SAMPLES) % 3
    if alike:  # where only something else than the order of the samples is to make a difference
        images, labels = images[:1].expand(SAMPLES, 4), labels[:1].expand(SAMPLES)
    return TensorDataset(torch.arange(SAMPLES), images, labels)


def loader(*, alike: bool = False, **arguments: Any) -> DataLoader:
    return DataLoader(samples(alike=alike), batch_size=SAMPLES // BATCHES, **arguments)


def train(
    folder: Path,
    data: DataLoader,
    *,
    stop: int | None = None,
    resume: str | Path | None = None,
    module: Module | None = None,
    callbacks: tuple[Callback, ...] = (),
    per_epoch: bool = False,
    **arguments: Any,
) -> tuple[Trainer, Module]:
    """A process of its own, as good as: trains until it is stopped, and keeps ``last.ckpt``."""
    seed_everything(1, verbose=False)
    module = module or Module()
    every = {"every_n_epochs": 1} if per_epoch else {"every_n_train_steps": 1}
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=-1, **every), StopBefore(stop), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "max_epochs": EPOCHS, **arguments},
    )
    if stop is None:
        trainer.fit(module, data, ckpt_path=resume)
    else:
        with contextlib.suppress(Stopped):
            trainer.fit(module, data, ckpt_path=resume)
            raise RuntimeError("it was not stopped")
    return trainer, module


def train_in_parts(folder: Path, data: Any, *stops: int, **arguments: Any) -> tuple[Trainer, list[Module]]:
    """Stopped before each of these batches, and resumed."""
    modules = []
    for number, stop in enumerate([*stops, None]):
        resume = folder / "last.ckpt" if number else None
        trainer, module = train(folder, data(), stop=stop, resume=resume, **arguments)
        modules.append(module)
    return trainer, modules


def same_weights(first: Module, second: Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


shuffled = functools.partial(loader, shuffle=True)
alike = functools.partial(loader, alike=True)


def by_epoch(**arguments: Any) -> DataLoader:
    """Shuffled by a sampler that is told the epoch."""
    return loader(sampler=DistributedSampler(samples(), num_replicas=1, rank=0, seed=3), **arguments)


class EpochFactor(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


@wanted("on_train_epoch_start is not called where a run resumes inside an epoch")
def test_an_epoch_s_start_is_told_to_a_run_that_resumes_inside_it(tmp_path):
    counted = {"callbacks": (EpochFactor(),), "max_epochs": 2}
    whole = train(tmp_path / "whole", loader(alike=True), **counted)[0]
    resumed = train_in_parts(tmp_path, alike, BATCHES + 3, **counted)[0]
    assert resumed.global_step == whole.global_step


@wanted("DataLoader's state is none of the checkpoint's: the epoch begins again, with other samples")
def test_a_shuffled_epoch_goes_on_where_it_was(tmp_path):
    _, (before, after) = train_in_parts(tmp_path, shuffled, 3)
    seen = [index for batch in before.seen + after.seen[: BATCHES - 3] for index in batch]
    assert sorted(seen) == list(range(SAMPLES))


@wanted("the global generator begins again: each epoch after a restart has the order of the first")
def test_the_epoch_after_a_restart_has_its_own_order(tmp_path):
    _, (before, after) = train_in_parts(tmp_path, shuffled, BATCHES, per_epoch=True)
    assert len(before.seen) == BATCHES
    assert after.seen[:BATCHES] != before.seen


@wanted("issue 21938: with workers, the sampler's epoch is set after its order has been drawn")
def test_a_sampler_is_told_the_epoch_that_goes_on(tmp_path):
    workers = functools.partial(by_epoch, num_workers=1)
    _, whole = train(tmp_path / "whole", workers())
    _, (before, after) = train_in_parts(tmp_path / "parts", workers, BATCHES, per_epoch=True)
    assert before.seen == whole.seen[:BATCHES]
    assert after.seen == whole.seen[BATCHES:]


@wanted("no issue known, akin to 19815: the checkpoint of an epoch's last batch does not know that the epoch is over")
def test_two_stops_around_the_end_of_an_epoch_add_no_steps(tmp_path):
    trainer, _ = train_in_parts(tmp_path, alike, BATCHES, BATCHES + 1)
    assert trainer.global_step == BATCHES * EPOCHS


@wanted(
    "no issue known: after a restart ModelCheckpoint writes in mid-accumulation, and gradients are in no checkpoint"
)
def test_two_stops_lose_no_accumulated_gradients(tmp_path):
    _, whole = train(tmp_path / "whole", alike(), accumulate_grad_batches=2)
    _, modules = train_in_parts(tmp_path / "parts", alike, 4, 5, accumulate_grad_batches=2)
    assert same_weights(modules[-1], whole)


@wanted("metrics of the epoch that was interrupted are not in the checkpoint")
def test_a_metric_is_that_of_the_whole_epoch(tmp_path):
    _, (_, after) = train_in_parts(tmp_path, alike, 3)
    assert after.numbers[0] == (BATCHES - 1) / 2


class Counts(Module):
    def on_train_batch_end(self, *others):
        self.network[1].bias.data += 1.0


@wanted("the module's hook of a batch's end comes after the checkpoint of that batch")
def test_what_a_module_does_at_the_end_of_a_batch_is_in_the_checkpoint(tmp_path):
    _, whole = train(tmp_path / "whole", alike(), module=Counts())
    train(tmp_path / "parts", alike(), module=Counts(), stop=3)
    _, after = train(tmp_path / "parts", alike(), module=Counts(), resume=tmp_path / "parts/last.ckpt")
    assert same_weights(after, whole)


@wanted("the state of random number generators is not in the checkpoint")
def test_dropout_goes_on(tmp_path):
    _, whole = train(tmp_path / "whole", alike(), module=Module(dropout=0.5))
    train(tmp_path / "parts", alike(), module=Module(dropout=0.5), stop=3)
    _, after = train(tmp_path / "parts", alike(), module=Module(dropout=0.5), resume=tmp_path / "parts/last.ckpt")
    assert same_weights(after, whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_stop_without_dropout_changes_no_weights(tmp_path, accumulate):
    # so that the tests above fail because of what they say
    _, whole = train(tmp_path / "whole", alike(), accumulate_grad_batches=accumulate)
    _, modules = train_in_parts(tmp_path / "parts", alike, 4, accumulate_grad_batches=accumulate)
    assert same_weights(modules[-1], whole)


class Follows(Module):
    def configure_optimizers(self):
        sgd = super().configure_optimizers()
        return [sgd], [{"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0), "monitor": "batch"}]


@wanted("a rate that follows a metric has no step at the end of the epoch in which a run resumes")
def test_a_rate_that_follows_a_metric_does_so_after_a_restart(tmp_path):
    whole, _ = train(tmp_path / "whole", alike(), module=Follows())
    train(tmp_path / "parts", alike(), module=Follows(), stop=BATCHES + 3)
    after, _ = train(tmp_path / "parts", alike(), module=Follows(), resume=tmp_path / "parts/last.ckpt")
    assert after.optimizers[0].param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"]


@wanted("a checkpoint has no checksum that is looked at")
def test_one_flipped_bit_is_found(tmp_path):
    train(tmp_path, alike(), stop=3)
    path = tmp_path / "last.ckpt"
    weight = torch.load(path, weights_only=True)["state_dict"]["network.1.weight"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(weight)] ^= 1
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None, "the zip file's own checksums would tell"
    try:
        trainer, _ = train(tmp_path, alike(), resume=path)
    except (RuntimeError, ValueError, OSError):
        return
    assert trainer.global_step != BATCHES * EPOCHS, "trained on from it"


@wanted("a warning, and training begins anew")
def test_a_last_checkpoint_that_is_missing_is_an_error(tmp_path):
    try:
        trainer, _ = train(tmp_path, alike(), resume="last")
    except (ValueError, OSError):
        return
    assert trainer.global_step == 0


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@wanted("what comes from an address is unpickled with weights_only=False")
def test_an_address_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    train(tmp_path, alike(), stop=3)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    (tmp_path / "web").mkdir()
    torch.save({**checkpoint, "extra": Payload(tmp_path / "marker")}, tmp_path / "web/evil.ckpt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "web")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        with contextlib.suppress(pickle.UnpicklingError):
            train(tmp_path, alike(), resume=f"http://127.0.0.1:{web.server_port}/evil.ckpt")
        web.shutdown()
    assert not (tmp_path / "marker").exists()


def in_a_process(folder: Path, function: str, **environment: str) -> int:
    """The exit code of a function of this file."""
    code = f"import test_plain_lightning as tests, pathlib; tests.{function}(pathlib.Path({str(folder)!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        timeout=120,
    ).returncode


def save_and_die(folder: Path) -> None:
    """Saves a checkpoint twice over, and is killed in the middle of its second way to its place."""
    trainer, _ = train(folder / "run", alike(), max_epochs=1)
    trainer.save_checkpoint(folder / "a.ckpt")
    send = os.sendfile

    def send_some(target, source, offset, count):
        send(target, source, offset, 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    os.sendfile = send_some
    trainer.save_checkpoint(folder / "a.ckpt")


@wanted("issue 21253: it is written in the folder for temporary files, and copied over the old one")
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_it(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    temporary = other / f"test-{os.getpid()}"
    temporary.mkdir()
    try:
        code = in_a_process(tmp_path, "save_and_die", TMPDIR=str(temporary))
    finally:
        for path in temporary.iterdir():
            path.unlink()
        temporary.rmdir()
    if code != -signal.SIGKILL:
        pytest.fail("it was not killed")
    with contextlib.suppress(RuntimeError, EOFError, pickle.UnpicklingError):
        torch.load(tmp_path / "a.ckpt", weights_only=True)
        return
    raise AssertionError("it cannot be read")


class EndIt(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def be_terminated(folder: Path) -> None:
    train(folder, alike(), callbacks=(EndIt(),))
    (folder / "finished").touch()


@wanted("issue 19916: after SIGTERM the exit code is 0")
def test_a_run_that_is_terminated_does_not_look_finished(tmp_path):
    code = in_a_process(tmp_path, "be_terminated")
    if (tmp_path / "finished").exists():
        pytest.fail("it took no notice")
    assert code != 0


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@wanted("DDP sends all buffers before each forward pass")
def test_a_buffer_that_never_changes_is_sent_once(one_rank, monkeypatch):
    module, sent = nn.Linear(4, 3), []
    module.register_buffer("table", torch.zeros(3), persistent=False)
    parallel = nn.parallel.DistributedDataParallel(module)
    monkeypatch.setattr(parallel, "_sync_buffers", lambda: sent.append(1))
    parallel(torch.zeros(2, 4))
    assert not sent


@wanted("each batch of several ranks broadcasts whether a signal has come, and waits for the answer")
def test_no_step_of_several_ranks_waits_for_another_rank(tmp_path, one_rank, monkeypatch):
    calls, broadcast = [], torch.distributed.broadcast
    monkeypatch.setattr("torch.distributed.broadcast", lambda *args, **given: calls.append(broadcast(*args, **given)))
    monkeypatch.setattr(Trainer, "world_size", 2)
    train(tmp_path, alike(), max_epochs=1)
    assert len(calls) < BATCHES


class Bad(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.global_step == 3 else loss


@wanted("training goes on to its end")
def test_a_loss_that_is_no_number_ends_training(tmp_path):
    with contextlib.suppress(ValueError, RuntimeError, FloatingPointError):
        train(tmp_path, alike(), module=Bad())
    weights = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@wanted("it is saved without a word, and refused when it is loaded", raises=pickle.UnpicklingError)
def test_a_checkpoint_that_is_saved_can_be_loaded(tmp_path):
    train(tmp_path, alike(), module=Module(place=tmp_path), stop=3)
    train(tmp_path, alike(), module=Module(place=tmp_path), resume=tmp_path / "last.ckpt")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs/metrics.csv").open() as file:
        return list(csv.DictReader(file))


def log_into(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="logs", flush_logs_every_n_steps=1)


@wanted("pull request 19446: CSVLogger deletes the file of before")
def test_a_log_keeps_the_rows_of_before(tmp_path):
    train(tmp_path, alike(), stop=BATCHES, per_epoch=True, logger=log_into(tmp_path), log_every_n_steps=1)
    before = rows(tmp_path)
    if not before:
        pytest.fail("nothing was logged")
    resumed = {"resume": tmp_path / "last.ckpt", "per_epoch": True, "log_every_n_steps": 1}
    train(tmp_path, alike(), logger=log_into(tmp_path), **resumed)
    assert rows(tmp_path)[: len(before)] == before


class Full(Callback):
    """The disk is full for one step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 if trainer.global_step == 3 else hard, hard))


@wanted("a save that fails ends training", raises=OSError)
def test_a_disk_that_is_full_for_a_while_does_not_end_training(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        train(tmp_path, alike(), callbacks=(Full(),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@wanted("with max_steps, the end of the epoch that is over comes once more, and counts as a step later")
def test_the_steps_of_a_log_are_right_after_the_end_of_an_epoch(tmp_path):
    both = {"per_epoch": True, "max_epochs": -1, "max_steps": BATCHES * EPOCHS, "log_every_n_steps": 1}
    train(tmp_path / "whole", alike(), logger=log_into(tmp_path / "whole"), **both)
    train(tmp_path / "parts", alike(), logger=log_into(tmp_path / "parts/1"), stop=BATCHES, **both)
    resume = tmp_path / "parts/last.ckpt"
    train(tmp_path / "parts", alike(), logger=log_into(tmp_path / "parts/2"), resume=resume, **both)
    parts = rows(tmp_path / "parts/1") + rows(tmp_path / "parts/2")
    assert [(row["epoch"], row["step"]) for row in parts] == [
        (row["epoch"], row["step"]) for row in rows(tmp_path / "whole")
    ]


class Counting(PassThroughProfiler):
    """A profiler that does nothing, as Lightning's own, and counts its calls."""

    calls = 0

    @contextlib.contextmanager
    def profile(self, action_name):
        self.calls += 1
        yield


@wanted("a new context of the profiler that does nothing is entered dozens of times in a step")
def test_no_profiler_is_called_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.trainer.setup.PassThroughProfiler", Counting)
    trainer, _ = train(tmp_path, alike(), max_epochs=1)
    assert trainer.profiler.calls < BATCHES


class SignalToGroup(Callback):
    """Ends all processes of the group in the third step, as a terminal, ``timeout`` and Slurm do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            code = f"import os; os.killpg({os.getpgrp()}, {signal.SIGTERM:d})"  # torch's workers note who sent it
            subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
            time.sleep(2.0)


def be_terminated_with_the_workers(folder: Path) -> None:
    os.setpgid(0, 0)
    assert os.getpgrp() == os.getpid()
    data = loader(alike=True, num_workers=1, persistent_workers=True)
    try:
        train(folder, data, callbacks=(SignalToGroup(),))
    except RuntimeError as fault:
        (folder / "killed").write_text(str(fault))
    except BaseException:
        (folder / "terminated").touch()
        raise


@wanted("torch's workers die of a signal to the group, and with them the step that was to be finished")
def test_a_signal_to_the_group_leaves_the_workers_to_the_main_process(tmp_path):
    in_a_process(tmp_path, "be_terminated_with_the_workers")
    if not any((tmp_path / name).exists() for name in ("killed", "terminated")):
        pytest.fail("it was not terminated")
    assert not (tmp_path / "killed").exists()


def start_a_rank(folder: Path) -> None:
    """Starts a further rank, which gets a signal at once, while it would still import."""
    sys.argv = [str(folder / "rank.py")]
    (folder / "rank.py").write_text("import time; time.sleep(0.5)")
    launcher: Any = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False).strategy
    launcher._configure_launcher()
    launcher.launcher._call_children_scripts()
    (rank,) = launcher.launcher.procs
    rank.send_signal(signal.SIGTERM)
    (folder / "code").write_text(str(rank.wait()))


@wanted("a signal during the imports of a further rank ends it")
def test_a_further_rank_outlives_a_signal_while_it_imports(tmp_path):
    if in_a_process(tmp_path, "start_a_rank"):
        pytest.fail("it was not started")
    assert (tmp_path / "code").read_text() != str(-signal.SIGTERM)


@wanted("predict_step passes (images, labels) to forward", raises=TypeError)
def test_labels_are_no_input_of_a_prediction(tmp_path):
    class Network(Module):
        def forward(self, images):
            return self.network(images)

    images = DataLoader([(image, label) for _, image, label in samples()], batch_size=4)
    predictions = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).predict(Network(), images)
    assert predictions[0].shape == (4, 3)


@wanted("a test after the training of another process is logged at step 0")
def test_a_test_is_logged_at_the_step_of_its_checkpoint(tmp_path):
    class Tested(Module):
        def test_step(self, batch, batch_idx):
            self.log("tested", 1.0)

    train(tmp_path, alike(), module=Tested())
    trainer = Trainer(accelerator="cpu", logger=log_into(tmp_path), enable_progress_bar=False)
    trainer.test(Tested(), alike(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert rows(tmp_path)[-1]["step"] == str(EPOCHS * BATCHES)


@wanted("it looks for keys that are not there", raises=KeyError)
def test_a_checkpoint_with_other_contents_is_named(tmp_path):
    trainer = Trainer(max_epochs=1, logger=False, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(Module(), DataLoader(samples(), 2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    contents = torch.load(tmp_path / "x.ckpt", weights_only=True)
    del contents["loops"]["fit_loop"]["epoch_progress"]["current"]
    torch.save(contents, tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match=r"x\.ckpt"):
        Trainer(max_epochs=2, logger=False, default_root_dir=tmp_path).fit(
            Module(), DataLoader(samples(), 2), ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


@wanted("an average that has not begun is the weights from before training, and measured and kept as such")
def test_no_average_is_kept_before_there_is_one(tmp_path):
    average = EMAWeightAveraging(update_starting_at_step=99)
    ends = [train(tmp_path / str(len(given)), alike(), callbacks=given)[1] for given in ((), (average,))]
    assert same_weights(*ends)


@wanted("without sync_dist each rank keeps the number of its own samples")
def test_a_number_of_an_epoch_is_that_of_all_ranks(tmp_path, monkeypatch):
    reduced = []
    monkeypatch.setattr(
        SingleDeviceStrategy, "reduce", lambda self, tensor, **_: reduced.append(tensor.dtype) or tensor
    )
    monkeypatch.setattr(_AcceleratorConnector, "is_distributed", True)
    train(tmp_path, loader(), max_epochs=1, use_distributed_sampler=False)
    assert torch.float32 in reduced
