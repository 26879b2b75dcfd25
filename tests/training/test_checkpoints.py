import contextlib
import copy
import math
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision

from vit_lightning import Digits, UserError, ViT, ViTClassifier
from vit_lightning.data.wrapped import WrappedDataModule
from vit_lightning.errors import Diverged
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, load_network, read_checkpoint
from vit_lightning.training.callbacks import StepSeeds
from vit_lightning.training.checkpoints import CheckpointConfig, Checkpoints
from vit_lightning.training.monitor import FiniteGuard


def network(**arguments) -> ViT:
    sizes = {"image_size": 8, "patch_size": 4, "in_channels": 1, "num_classes": 10, "emb_size": 8, "depth": 1}
    return ViT(**{**sizes, "num_heads": 1, "emb_dropout": 0.1, **arguments})


def fit(folder, *callbacks, config=None, resume=None, **arguments):
    seed_everything(3, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    guard = FiniteGuard(folder)
    checkpoints = Checkpoints(folder, config or CheckpointConfig(), {"seed_everything": 3}, guard)
    run = Trainer(
        accelerator="cpu",
        callbacks=[guard, checkpoints, StepSeeds(3), *callbacks],
        plugins=AtomicCheckpointIO(),
        **{**quiet, "max_epochs": 3, **arguments},
    )
    module = ViTClassifier(network())
    run.fit(module, datamodule=Digits(batch_size=200), ckpt_path=resume, weights_only=True)
    return run, module, checkpoints


class Scores(Callback):
    """Puts chosen validation accuracies in place of the measured ones."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("chosen", self.scores[trainer.current_epoch])


class Asks(Callback):
    """Loads the best checkpoint at the end, as projects do that have a ModelCheckpoint (torchgeo#1642)."""

    def on_fit_start(self, trainer, pl_module):
        assert trainer.checkpoint_callback.best_model_path == ""

    def on_train_end(self, trainer, pl_module):
        self.step = read_checkpoint(Path(trainer.checkpoint_callback.best_model_path))["global_step"]


@pytest.mark.parametrize(("mode", "best_step"), [("max", 14), ("min", 7)])
def test_best_is_the_first_best_and_last_the_end(tmp_path, mode, best_step):
    fit(tmp_path, asks := Asks(), Scores(0.1, 0.3, 0.3), config=CheckpointConfig(monitor="chosen", mode=mode))
    assert read_checkpoint(tmp_path / "checkpoints/best.ckpt")["global_step"] == asks.step == best_step
    assert read_checkpoint(tmp_path / "checkpoints/last.ckpt")["global_step"] == 21


class Writes(Callback):
    """Remembers after which batches of an epoch checkpoints are written."""

    def __init__(self) -> None:
        self.moments: list[int] = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.moments.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def test_last_is_written_at_the_end_of_some_epochs_alone(tmp_path):
    writes = Writes()
    config = CheckpointConfig(every_n_epochs=2, monitor="none", mode="max")
    fit(tmp_path, writes, config=config, max_epochs=5, limit_val_batches=0)
    assert writes.moments == [0, 7, 7, 7]  # the trial, two epochs, the end


def test_the_best_checkpoint_holds_the_weights_that_were_measured(tmp_path):
    class Measured(Callback):
        def __init__(self) -> None:
            self.weights: dict[int, torch.Tensor] = {}

        def on_validation_end(self, trainer, pl_module):
            self.weights[trainer.global_step] = pl_module.network.head.linear.weight.detach().clone()

    measured = Measured()
    arguments = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    _, _, kept = fit(tmp_path, measured, config=CheckpointConfig(monitor="val/loss", mode="min"), **arguments)
    best = read_checkpoint(tmp_path / "checkpoints/best.ckpt")
    assert sorted(measured.weights) == [5, 10, 15, 20]
    assert best["global_step"] == kept.best_step == 20
    assert torch.equal(best["state_dict"]["network.head.linear.weight"], measured.weights[20])


class Half(BoringModel):
    """A module whose gradients are multiplied, so that they may be infinite where its loss is finite."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient * factor)


@pytest.mark.parametrize("factor", [float("inf"), 1.0])
def test_gradients_in_half_precision_that_are_never_finite_stop_a_run_without_checkpoints(tmp_path, factor):
    half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=60, plugins=[half], callbacks=[FiniteGuard(tmp_path)], **quiet)
    stops = pytest.raises(Diverged, match="gradients in float16 are not finite")
    with stops if math.isinf(factor) else contextlib.nullcontext():
        trainer.fit(Half(factor))
    assert trainer.global_step == (37 if math.isinf(factor) else 60)


def test_what_a_gpu_copies_is_the_file_as_it_was_when_it_was_saved(tmp_path, monkeypatch):
    """The host goes on while copies are under way, here until ``done`` is set."""
    done, weights = threading.Event(), torch.arange(12.0).view(3, 4)
    moments = torch.ones(3, dtype=torch.bfloat16)
    state = OrderedDict(weight=weights, tied=weights[1:, ::2], none=torch.empty(0))
    numbers = [1, {"m": moments}]
    checkpoint = {"state_dict": state, "epoch": 3, "seeds": (torch.tensor(5), None), "numbers": numbers}
    before = copy.deepcopy(checkpoint)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    event = SimpleNamespace(record=lambda: None, synchronize=done.wait)
    monkeypatch.setattr("torch.cuda.Event", lambda: event)
    disk = AtomicCheckpointIO()
    disk.in_background = True
    disk.save_checkpoint(checkpoint, tmp_path / "copied.ckpt")
    weights.zero_(), moments.zero_(), numbers.append(2)
    assert not (tmp_path / "copied.ckpt").exists()
    done.set()
    disk.finish()
    found = read_checkpoint(tmp_path / "copied.ckpt")
    assert [*found["state_dict"]] == [*state]
    torch.testing.assert_close(found["state_dict"], before["state_dict"], rtol=0, atol=0)
    assert found["seeds"] == before["seeds"]
    assert str(found["numbers"]) == str(before["numbers"])


class OfTwoLoaders(BoringModel):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/acc", float(dataloader_idx))

    def val_dataloader(self):
        return [self.train_dataloader()] * 2


@pytest.mark.filterwarnings("ignore")
def test_of_what_several_loaders_log_one_is_chosen(tmp_path):
    def fit(monitor):
        guard = FiniteGuard(tmp_path)
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(monitor=monitor), {}, guard)
        trainer = Trainer(
            accelerator="cpu", callbacks=[guard, checkpoints], plugins=AtomicCheckpointIO(), max_epochs=1, logger=False
        )
        module = OfTwoLoaders()
        trainer.fit(module, datamodule=WrappedDataModule(module=module, num_classes=10, image_size=8, in_channels=1))
        return checkpoints.best_score

    assert fit("val/acc/dataloader_idx_1") == 1.0
    with pytest.raises(UserError, match="choose val/acc/dataloader_idx_0, val/acc/dataloader_idx_1"):
        fit("val/acc")


def test_a_checkpoint_of_another_architecture_names_the_difference(tmp_path):
    weights = {f"network.{name}": value for name, value in network().state_dict().items()}
    with pytest.raises(UserError, match="another architecture"):
        load_network(network(depth=2, emb_size=16), {"state_dict": weights}, tmp_path)
