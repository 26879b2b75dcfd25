"""Checkpoints in a program of one's own: those of a plain Trainer and of runs are loaded without saying of what."""

import os
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from runs import SMALL
from tensors import Payload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning import (
    Digits,
    EMAConfig,
    LossConfig,
    MultiHeadAttention,
    RMSNorm,
    SwiGLU,
    UserError,
    ViT,
    ViTClassifier,
    load,
)
from vit_lightning.cli import main

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
SIZES = {"image_size": 8, "patch_size": 4, "in_channels": 1, "emb_size": 24, "depth": 2}
IMAGES = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(**more) -> ViT:
    """A ViT of which tensors do not tell heads, norms, activation and positions."""
    parts = {"norm": lambda size: RMSNorm(size, eps=1e-5), "positions": "sincos2d", "pool": "mean"}
    attention = lambda emb_size, num_heads: MultiHeadAttention(emb_size, num_heads, dim_head=6)  # noqa: E731
    parts |= {"attention": attention, "feed_forward": SwiGLU, "num_classes": 4, "num_heads": 3}
    return ViT(**SIZES, **{**parts, **more})


def trained(module: ViTClassifier, **arguments) -> Trainer:
    """A plain Trainer, after two steps."""
    trainer = Trainer(**QUIET, max_steps=2, limit_train_batches=2, enable_checkpointing=False, **arguments)
    trainer.fit(module, DataLoader(TensorDataset(IMAGES, torch.arange(20) % 4), batch_size=10))
    return trainer


@pytest.mark.parametrize("given", [{}, {"loss": LossConfig(label_smoothing=0.1)}, {"ema": EMAConfig(decay=0.5)}])
def test_a_checkpoint_of_a_plain_trainer_tells_its_network(in_folder, given):
    module = ViTClassifier(vit(), **given)
    trainer = trained(module)
    for weights_only in (False, True):
        trainer.save_checkpoint("plain.ckpt", weights_only=weights_only)
        loaded = ViTClassifier.load_from_checkpoint("plain.ckpt")
        assert loaded.network.encoder[0].attention.fn.attention.num_heads == 3
        state = torch.load("plain.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(value, state[f"network.{name}"]) for name, value in loaded.network.state_dict().items())
        if "ema" not in given:
            assert torch.equal(loaded.eval()(IMAGES), module.eval()(IMAGES))
        assert torch.equal(load("plain.ckpt").network(IMAGES), loaded.eval()(IMAGES))
        batches = Trainer(**QUIET).predict(loaded, DataLoader(IMAGES, batch_size=7))
        expected = loaded.eval()(IMAGES).softmax(dim=1)
        torch.testing.assert_close(torch.cat([batch["probabilities"] for batch in batches]), expected)


def test_classes_and_preprocessing_come_along_where_the_data_tells_them(in_folder):
    trainer = Trainer(**QUIET, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(ViTClassifier(vit(num_classes=10)), Digits())
    trainer.save_checkpoint("plain.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="plain.ckpt")  # nothing is assumed
        model = load("plain.ckpt")
    assert (model.class_names, model.mean) == ([str(digit) for digit in range(10)], list(Digits().mean))
    assert len(model.predict((IMAGES[:2] * 50).clamp(0, 255).byte())) == 2


@pytest.mark.parametrize("flags", [(), pytest.param(("--lora.rank=2",), marks=pytest.mark.full)])
def test_the_checkpoint_of_a_run_needs_no_arguments(results, flags):
    run = "run" if flags else "out"
    assert not flags or main(["fit", *SMALL, *flags, "--out=run"]) == 0
    loaded = ViTClassifier.load_from_checkpoint(f"{run}/checkpoints/best.ckpt")
    assert torch.equal(loaded.eval()(IMAGES), load(run).network(IMAGES))
    (found,) = Trainer(**QUIET).validate(loaded, Digits(), verbose=False)
    before = torch.load(f"{run}/checkpoints/best.ckpt", weights_only=True)
    assert found["val/loss"] == pytest.approx(before["metrics"]["val/loss"], rel=1e-5)
    assert "model" in before["config"]


class Net(nn.Sequential):
    """A network of the user's own, which a checkpoint does not describe."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4))


def test_a_network_that_a_checkpoint_does_not_tell_is_given(in_folder):
    module = ViTClassifier(Net())
    trained(module).save_checkpoint("plain.ckpt")
    with pytest.raises(UserError, match=r"plain.ckpt(.|\n)*or give the network: load_from_checkpoint\(..., network"):
        ViTClassifier.load_from_checkpoint("plain.ckpt")
    loaded = ViTClassifier.load_from_checkpoint("plain.ckpt", network=Net())
    assert torch.equal(loaded.eval()(IMAGES), module.eval()(IMAGES))


@pytest.mark.parametrize("network", [None, vit])
def test_a_checkpoint_runs_nothing(in_folder, network):
    trained(ViTClassifier(vit())).save_checkpoint("plain.ckpt")
    contents = torch.load("plain.ckpt", weights_only=True)
    given = {} if network is None else {"network": network()}
    torch.save({**contents, "hyper_parameters": {"bomb": Payload("harmed")}}, "evil.ckpt")
    with pytest.raises(Exception, match=r"more than tensors|[Ww]eights.only"):
        ViTClassifier.load_from_checkpoint("evil.ckpt", **given)
    assert sorted(os.listdir()) == ["evil.ckpt", "plain.ckpt"]
