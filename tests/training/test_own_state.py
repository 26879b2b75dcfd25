"""A run with callbacks and modules of others: killed inside an epoch it ends in the same bits, or it is refused."""

import csv
import json
import warnings
from pathlib import Path

import pytest
import torch
from runs import SMALL, killed_after, logged_rows, same_weights, whole_and_resumed

from vit_lightning.cli import main
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_metrics

RUN = ("fit", *SMALL, "--trainer.max_epochs=3", "--wandb.mode=disabled", "--test=false", "--data.fraction=0.2")
RUN += ("--data.batch_size=40", "--checkpoint.every_n_steps=1", "--trainer.log_every_n_steps=1")

OWN = '''
import copy, random
from collections import deque
import numpy as np
import torch
from lightning.pytorch import Callback

def scale(module, factor):
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(factor)

class Stateless(Callback):
    """Remembers things of many kinds in attributes, and acts on weights by each."""
    def __init__(self):
        self.count, self.recent, self.table, self.means = 0, [], np.zeros(2), {"mean": None}
    def on_train_start(self, trainer, pl_module):
        self.start = [weight.detach().clone() for weight in pl_module.parameters()]
        self.weights = dict(pl_module.named_parameters())
        scale(pl_module, 0.5)
    def on_train_epoch_start(self, trainer, pl_module):
        self.first = True
        pl_module.log("first", 1.0)
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.first:
            scale(pl_module, 0.9)
        self.first = False
    def on_train_batch_end(self, trainer, pl_module, *others):
        self.count += 1
        self.table[self.count % 2] += 1
        self.recent.append(float(next(pl_module.parameters()).sum()))
        self.means["mean"] = np.mean(self.recent[-3:])
        if self.count % 2:
            scale(pl_module, 1 - 1e-3 * (abs(self.means["mean"]) + self.table[0]))
            with torch.no_grad():
                for weight, start in zip(self.weights.values(), self.start):
                    weight.lerp_(start, 0.01)

class Stateful(Callback):
    def __init__(self): self.count = 0
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]
    def on_train_batch_end(self, trainer, pl_module, *others):
        self.count += 1
        scale(pl_module, 1 - 0.01 * (self.count % 3))

class Halving(Callback):
    """Has its arguments in its state; one of them is changed by training."""
    def __init__(self, start: float, every: int): self.start, self.every = start, every
    def state_dict(self): return {"start": self.start, "every": self.every}
    def load_state_dict(self, state): vars(self).update(state)
    def on_train_batch_end(self, trainer, pl_module, *others):
        self.start /= 2
        pl_module.log_dict({"start": self.start, "every": float(self.every)})

class Unfreeze(Callback):
    def on_fit_start(self, trainer, pl_module):
        pl_module.network[1].requires_grad_(False)
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.network[1].requires_grad_(trainer.current_epoch > 0)

class Decay(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.3 + 2 * group["weight_decay"]

class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.draw, self.size, self.layer = random.Random(0), torch.ones(2).shape, torch.nn.ReLU()

class Noisy(Callback):
    def setup(self, trainer, pl_module, stage): pl_module.noise = Noise()

class Opaque(Callback):
    def __init__(self):
        self.draw, self.numbers, self.torchs = random.Random(0), np.random.RandomState(0), torch.Generator()
        self.recent, self.mean = deque(maxlen=3), Mean()
        self.constant, self.plain = (scale, Mean, self.setup), [1.0, {"a": torch.ones(1)}]

class Mean:
    total = 0.0

class Stopping(Callback):
    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop |= trainer.current_epoch == 0

class Other(Callback):
    def on_train_end(self, trainer, pl_module): scale(pl_module, 0.5)
'''


@pytest.fixture
def own(in_folder):
    (in_folder / "own.py").write_text(OWN)


def resumed_equals_whole(*flags: str, kill: int) -> dict:
    whole = whole_and_resumed(*RUN, *flags, kill=kill)
    rows = [[row.get("lr") for row in read_metrics(Path(name)) if "lr" in row] for name in ("whole", "run")]
    assert rows[0] == rows[1]
    return whole


def callbacks(*given: str) -> str:
    return f"--trainer.callbacks=[{', '.join(given)}]"


SWA = "{class_path: StochasticWeightAveraging, swa_lrs: 0.01, swa_epoch_start: 1}"
SCHEDULER = "{class_path: GradientAccumulationScheduler, scheduling: {0: 4, 1: 3, 2: 1}}"


def test_attributes_of_a_callback_and_an_epoch_s_accumulation_survive_a_kill(own):
    """Seven batches an epoch, of which the last group has fewer: 2 + 3 + 7 steps, and the cosine ends at 0."""
    whole = resumed_equals_whole(callbacks("own.Stateless", SCHEDULER), kill=4)
    assert whole["global_step"] == 12
    assert whole["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_a_stop_that_waits_for_min_epochs_survives_a_kill(own):
    """PL#21857."""
    whole = resumed_equals_whole(callbacks("own.Stopping"), "--trainer.min_epochs=2", kill=10)
    assert whole["global_step"] == 14


def test_a_patience_that_a_resumed_run_is_given_holds(in_folder):
    """cookiecutter-pyml#58: that of the checkpoint was used, and config.yaml had the new one."""
    stopping = "{class_path: EarlyStopping, monitor: val/loss, min_delta: 9, patience: %d}"
    with killed_after(4):
        main([*RUN, callbacks(stopping % 5), "--trainer.max_epochs=4", "--out=run"])
    given = [callbacks(stopping % 1), "--allow-config-change=trainer.callbacks"]
    assert main(["fit", "--resume=run", *given]) == 0
    assert json.loads(Path("run/results.json").read_text())["steps"] == 14


def test_an_argument_of_a_callback_that_a_resumed_run_is_given_holds(own):
    """That in the callback's own state was used; what training has changed of another argument stays."""
    halving, held = "{class_path: own.Halving, start: 1, every: %d}", {"start": 2**-5, "every": 3.0}
    with killed_after(4):
        main([*RUN, callbacks(halving % 2), "--out=run"])
    given = [callbacks(halving % 3), "--allow-config-change=trainer.callbacks"]
    assert main(["fit", "--resume=run", *given]) == 0
    rows = [{name: row[name] for name in held} for row in logged_rows(Path("run")) if "start" in row]
    assert rows[3:5] == [{"start": 2**-4, "every": 2.0}, held]


def test_weights_averaged_by_lightning_survive_a_kill_and_are_those_that_are_kept(own):
    """PL#6074, PL#11665."""
    whole = resumed_equals_whole(callbacks(SWA), kill=17)
    average = whole["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    names = [name for name in average if name.startswith("network.")]
    assert all(torch.equal(whole["state_dict"][name], average[name]) for name in names)
    assert not Path("whole/checkpoints/best.ckpt").exists()
    results = json.loads(Path("whole/results.json").read_text())
    assert results["best_step"] == 21
    assert "val/acc" not in results, "it is that of other weights"


@pytest.mark.full
@pytest.mark.parametrize("kill", [3, 10, 17])
@pytest.mark.parametrize(
    "given",
    [
        (SWA,),
        (SCHEDULER,),
        ("{class_path: GradientAccumulationScheduler, scheduling: {1: 2}}", "own.Stateful"),
        ("EMAWeightAveraging",),
        ("WeightAveraging",),
        ("Timer", "LearningRateMonitor", "{class_path: EarlyStopping, monitor: val/acc, mode: max}", "ModelCheckpoint"),
        ("own.Stateful",),
        ("own.Stateless",),
        ("own.Unfreeze",),
        ("own.Decay",),
    ],
    ids=lambda given: given[0][:60],
)
def test_a_run_with_callbacks_ends_in_the_same_bits(own, given, kill):
    if "Gradient" in given[0]:
        kill = kill // 2
    resumed_equals_whole(callbacks(*given), kill=kill)


@pytest.mark.parametrize("name", ["ModelPruning", "LearningRateFinder", "BatchSizeFinder"])
def test_what_no_resume_can_repeat_is_refused_before_the_start(in_folder, capfd, name):
    arguments = ", pruning_fn: l1_unstructured, amount: 0.1" if name == "ModelPruning" else ""
    assert main([*RUN, callbacks(f"{{class_path: {name}{arguments}}}")]) == 2
    assert f"trainer.callbacks.{name}: " in capfd.readouterr().err
    assert not Path("runs").exists()


def test_what_a_callback_changes_at_the_end_is_kept_and_tested(own):
    assert main([*RUN, callbacks("own.Other"), "--out=Other"]) == 0
    assert not Path("Other/checkpoints/best.ckpt").exists()
    assert main([*RUN, "--out=plain"]) == 0
    plain, halved = (read_checkpoint(Path(name, "checkpoints/last.ckpt"))["state_dict"] for name in ("plain", "Other"))
    name = "network.head.linear.weight"
    assert torch.equal(halved[name], plain[name] * 0.5)
    assert Path("plain/checkpoints/best.ckpt").exists()


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Opaque", ["draw", "mean", "numbers", "recent", "torchs"]),
        ("Stateful", []),
        ("Noisy", ["Noise.draw"]),
    ],
)
def test_attributes_that_no_checkpoint_holds_are_named_before_the_first_step(own, name, attributes):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main([*RUN, callbacks(f"own.{name}"), "--trainer.max_steps=1"]) == 0
    texts = [str(one.message) for one in said if ": in no checkpoint: " in str(one.message)]
    assert [text.partition(": ")[0] for text in texts] == [
        text for text in [", ".join(one if "." in one else f"{name}.{one}" for one in attributes)] if text
    ]


LOGGING = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD
from torchmetrics import Accuracy

class Logging(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.average = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)
        self.right = Accuracy("multiclass", num_classes=10)
    def training_step(self, batch, batch_idx):
        images, labels = batch[0].flatten(1), batch[1]
        logits = self.layer(images)
        loss = nn.functional.cross_entropy(logits + self.average(images), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.right(logits.softmax(1), labels)
        self.log("train/right", self.right, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("train/first", loss, on_step=False, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        logits = self.layer(batch[0].flatten(1))
        self.log("val/acc", (logits.argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))
    def configure_optimizers(self): return SGD(self.layer.parameters(), 0.1)

class Following(Logging):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(10, 64), persistent=False)  # as of solo-learn#252
    def on_train_batch_end(self, *others):
        with torch.no_grad():
            self.queue.lerp_(self.layer.weight, 0.5)
            self.average.weight.lerp_(self.queue, 0.1)
"""


LATE = """
class Late(Logging):
    def __init__(self):
        super().__init__()
        self.layer = self.average = None
    def make(self):
        if self.layer is None:
            self.layer, self.average = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)
    def test_step(self, batch, batch_idx):
        right = self.layer(batch[0].flatten(1)).argmax(1) == batch[1]
        self.log("test/acc", right.float().mean(), batch_size=len(right))

class InSetup(Late):
    def setup(self, stage): self.make()

class Configured(Late):
    def configure_model(self): self.make()

class Partial(Late):
    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.make()
    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "average" not in name}

class Filled(Configured):
    def on_save_checkpoint(self, checkpoint):
        for name in ("average.weight", "average.bias"):
            del checkpoint["state_dict"][name]
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {**self.state_dict(), **checkpoint["state_dict"]}
"""


@pytest.mark.parametrize(
    "name", ["InSetup", "Partial", *(pytest.param(name, marks=pytest.mark.full) for name in ("Configured", "Filled"))]
)
def test_layers_that_are_made_late_and_a_part_of_the_weights_are_restored_as_in_lightning(in_folder, name):
    """PL#5410, PL#19281, PL#18829: they could be trained, but neither tested nor resumed."""
    (in_folder / "late.py").write_text(LOGGING + LATE)
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--test"))] + [f"--module=late.{name}"]
    whole_and_resumed(*flags, kill=4)
    assert main(["test", "--ckpt=run", "--trust", "--out=again"]) == 0
    found = {json.loads(Path(name, "results.json").read_text())["test/acc"] for name in ("whole", "run", "again")}
    assert len(found) == 1
    assert min(found) > 0.5  # a network of other weights has 0.1


RATES = """
from torch.optim import lr_scheduler as schedules

class Rated(Logging):
    def __init__(self, lr: float = 0.1, every: int = 5, kind: str = ""):
        super().__init__()
        self.lr, self.every, self.kind = lr, every, kind
    def configure_optimizers(self):
        sgd = SGD(self.layer.parameters(), self.lr)
        sgd.param_groups[0]["counted"] = torch.zeros(2)
        makers = {
            "step": lambda: schedules.StepLR(sgd, self.every, 0.5),
            "warm": lambda: schedules.LambdaLR(sgd, lambda step: min(1, (step + 1) / self.every)),
            "late": lambda: schedules.LambdaLR(sgd, lambda step: float(step >= self.every)),
            "rising": lambda: schedules.LinearLR(sgd, self.every / 10, total_iters=3),
            "two": lambda: schedules.SequentialLR(
                sgd, [schedules.ConstantLR(sgd, 0.5, 10), schedules.StepLR(sgd, 1, 0.5)], [self.every]
            ),
        }
        return [sgd], [{"scheduler": makers[self.kind](), "interval": "step"}] if self.kind else []
    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["counted"] += 1
"""


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("", {"lr": 0.02}, [0.02] * 5),
        ("step", {"every": 3}, [0.1, 0.1, 0.05, 0.05, 0.05]),
        *(
            pytest.param(*given, marks=pytest.mark.full)
            for given in (
                ("step", {"lr": 0.02}, [0.02, 0.01, 0.01, 0.01, 0.01]),
                ("late", {"every": 0}, [0.1] * 5),
                ("late", {"every": 3}, [0.1] * 5),
                ("rising", {"every": 1}, [0.1] * 5),
                ("warm", {"lr": 0.02}, [0.02, 0.02, 0.02, 0.02, 0.02]),
                ("two", {"lr": 0.02}, [0.01, 0.02, 0.01, 0.005, 0.0025]),
            )
        ),
    ],
)
def test_a_rate_or_schedule_that_a_resumed_module_is_given_holds(in_folder, kind, change, expected):
    """PL#12118, PL#4044, PL#19865: those of the checkpoint were used, and config.yaml had the new ones."""
    (in_folder / "rated.py").write_text(LOGGING + RATES)
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--trainer.max_epochs"))]
    with killed_after(4):
        main([*flags, "--trainer.max_steps=9", f"--module={{class_path: rated.Rated, kind: '{kind}'}}", "--out=run"])
    given = [f"--module.{name}={value}" for name, value in change.items()]
    assert main(["fit", "--resume=run", *given, "--allow-config-change=module"]) == 0
    rates = {row["step"]: row["lr"] for row in read_metrics("run") if "lr" in row}
    assert [rates[step] for step in range(4, 9)] == pytest.approx(expected)
    [group] = read_checkpoint(Path("run/checkpoints/last.ckpt"))["optimizer_states"][0]["param_groups"]
    assert group["counted"].tolist() == [9, 9], "what an optimizer has made of its groups stays"


WEIGHTED = """
class Weighted(Logging):
    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(torch.full([10], weight))
"""


def test_buffers_that_the_checkpoint_restores_are_named_where_options_of_the_module_change(in_folder):
    """Weights of classes are a buffer of the loss, and Lightning restores them with the weights."""
    (in_folder / "weighted.py").write_text(LOGGING + WEIGHTED)
    flags = [flag for flag in RUN if not flag.startswith("--model")]
    with killed_after(4):
        main([*flags, "--module=weighted.Weighted", "--out=run"])
    with pytest.warns(UserWarning, match="^criterion.weight: as in the checkpoint, whatever the options of the module"):
        assert main(["fit", "--resume=run", "--module.weight=2", "--allow-config-change=module.weight"]) == 0


BY_HAND = """
import os, signal
from lightning.pytorch import Callback

class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if os.environ.get("STOP") and (trainer.current_epoch, batch_idx) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)

class ByHand(Logging):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
"""


def test_gradients_accumulated_by_hand_survive_a_kill(in_folder, monkeypatch):
    """OneTrainer#1465: inside a group of three batches, where no step is due for a checkpoint."""
    (in_folder / "by_hand.py").write_text(LOGGING + BY_HAND)
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--checkpoint"))]
    flags += ["--module=by_hand.ByHand", "--trainer.callbacks=by_hand.Stop"]
    assert main([*flags, "--out=whole"]) == 0
    monkeypatch.setenv("STOP", "1")
    with pytest.raises(SystemExit, match="143"):
        main([*flags, "--out=run"])
    monkeypatch.delenv("STOP")
    assert main(["fit", "--resume=run"]) == 0
    assert same_weights("whole", "run")["global_step"] == 6


@pytest.mark.parametrize("kill", [4, 7, *(pytest.param(kill, marks=pytest.mark.full) for kill in (2, 3, 9))])
def test_numbers_of_an_epoch_and_files_of_loggers_are_whole_after_a_kill(in_folder, kill):
    """Inside an epoch, before a validation inside it, and before that at its end, of seven batches."""
    (in_folder / "logging_parts.py").write_text(LOGGING)
    flags = [flag for flag in RUN if "model" not in flag]
    flags += ["--module=logging_parts.Following", "--trainer.val_check_interval=0.5", "--trainer.max_epochs=2"]

    def train(name: str) -> None:
        loggers = [f"{{class_path: CSVLogger, save_dir: {name}-{k}, name: null, version: {k}}}" for k in ("0", "null")]
        main([*flags, f"--trainer.logger=[{', '.join(loggers)}]", f"--out={name}"])

    train("whole")
    with killed_after(kill):
        train("run")
    assert main(["fit", "--resume=run"]) == 0
    same_weights("whole", "run")
    assert logged_rows(Path("run")) == logged_rows(Path("whole"))
    names = {name for row in logged_rows(Path("whole")) for name in row}
    assert {"train/loss_epoch", "train/most", "train/right", "train/first"} <= names
    rows = {}
    for name in ("run-0", "run-null", "whole-0"):
        lines = [row for path in sorted(Path(name).rglob("*.csv")) for row in csv.DictReader(path.open(newline=""))]
        rows[name] = [{k: float(v) for k, v in row.items() if v and not k.startswith("speed/")} for row in lines]
    both = rows.pop("run-null")  # in a file for each process
    assert rows["run-0"] == [row for k, row in enumerate(both) if row not in both[:k]] == rows["whole-0"]
    [begun] = [
        row["step"] for row in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines()) if "resumed" in row
    ]
    assert all(row["step"] >= begun for k, row in enumerate(both) if row in both[:k]), "only what is trained again"


STREAM = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for number in range(40):
            yield torch.randn(1, 8, 8, generator=draw), number % 10

class Streams(LightningDataModule):
    num_classes = 10
    def train_dataloader(self): return DataLoader(Stream(), 10)
    def val_dataloader(self): return DataLoader(Stream(), 10)
"""


def test_a_run_on_batches_of_unknown_number_resumes_inside_an_epoch(in_folder, capfd):
    """PL#19764: from the first batch, as in Lightning, which the run says before."""
    (in_folder / "streams.py").write_text(LOGGING + STREAM)
    flags = [flag for flag in RUN if not flag.startswith(("--data", "--model"))]
    with killed_after(6):
        main([*flags, "--module=streams.Logging", "--data.class_path=streams.Streams", "--out=run"])
    assert "a run that is resumed inside an epoch is not bit-identical" in capfd.readouterr().out
    assert main(["fit", "--resume=run"]) == 0
    assert "training    resumes after step " in capfd.readouterr().out
    assert read_checkpoint(Path("run/checkpoints/last.ckpt"))["epoch"] == 3


OLD = """
from torch import nn
from torch.optim import SGD
from lightning.pytorch import LightningModule

class Old(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])
    def training_epoch_end(self, outputs): pass
    def configure_optimizers(self): return SGD(self.parameters(), 0.1)
"""


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--module=old.Old",), "Support for `training_epoch_end` has been removed"),
        ((callbacks("BackboneFinetuning"), *SMALL), "trainer.callbacks.BackboneFinetuning: AttributeError"),
    ],
)
def test_what_lightning_refuses_is_one_line(in_folder, capfd, flags, text):
    """PL#14755."""
    (in_folder / "old.py").write_text(OLD)
    few = ("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--wandb.mode=disabled", "--test=false")
    assert main(["fit", *few, *flags]) == 2
    err = capfd.readouterr().err
    assert text in err
    assert "Traceback" not in err


LAST = """
import os, signal
from lightning.pytorch.callbacks import LambdaCallback

def stop_in_last_batch():
    def stop(trainer, *others):
        if os.environ.get("STOP") and trainer.current_epoch == 1 and trainer.is_last_batch:
            os.kill(os.getpid(), signal.SIGTERM)
    return LambdaCallback(on_train_batch_end=stop)
"""


def test_a_signal_in_the_last_batch_of_an_epoch_has_its_checkpoint(in_folder, monkeypatch):
    """Where neither a validation nor a checkpoint is due; the callback is made by a function."""
    (in_folder / "last.py").write_text(LAST)
    flags = (*RUN, "--trainer.callbacks=last.stop_in_last_batch", "--trainer.check_val_every_n_epoch=3")
    flags += ("--checkpoint.every_n_steps=null", "--checkpoint.every_n_epochs=10")
    assert main([*flags, "--out=whole"]) == 0
    monkeypatch.setenv("STOP", "1")
    with pytest.raises(SystemExit, match="143"):
        main([*flags, "--out=run"])
    whole, run = (read_checkpoint(Path(name, "checkpoints/last.ckpt")) for name in ("whole", "run"))
    assert run["global_step"] == whole["global_step"] * 2 / 3
    monkeypatch.delenv("STOP")
    assert main(["fit", "--resume=run"]) == 0
    same_weights("whole", "run")
