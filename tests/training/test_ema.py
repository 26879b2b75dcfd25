"""The average of weights: three figures that Lightning's own callback gets wrong, and what ours makes of them."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from timm.utils import ModelEmaV2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vit_lightning import Digits, EMAConfig, OptimizerConfig, UserError, ViT, ViTClassifier
from vit_lightning.training.ema import WeightAverage

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
SGD = OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant")
LOADER = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1)


class Probe(ViTClassifier):
    """One weight that grows by one in each step, from 0; what a stage sees of it is logged."""

    def __init__(self, **arguments):
        super().__init__(nn.Linear(1, 1, bias=False), num_classes=2, optimizer=SGD, **arguments)
        nn.init.zeros_(self.network.weight)

    def training_step(self, batch, batch_idx):
        return -self.network.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/weight", self.network.weight.sum())

    def test_step(self, batch, batch_idx):
        self.log("test/weight", self.network.weight.sum())

    def on_test_epoch_end(self):
        """Nothing was counted."""


def train(tmp_path, probe, *callbacks, weights_only=False):
    best = ModelCheckpoint(tmp_path, monitor="val/weight", mode="max", save_weights_only=weights_only)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[*callbacks, best], default_root_dir=tmp_path)
    trainer.fit(probe, LOADER, LOADER)
    return trainer, float(trainer.callback_metrics["val/weight"]), best.best_model_path


def outcome_of_test(trainer, probe, **arguments):
    (results,) = trainer.test(probe, LOADER, verbose=False, **arguments)
    return results["test/weight"]


def kept(path):
    return float(torch.load(path, weights_only=True)["state_dict"]["network.weight"])


AVERAGE = 7.0 + 0.5**8  # sum of 0.5 ** (9 - t) t for t = 1 to 8; the average begins with the first weights


@pytest.mark.parametrize("weights_only", [False, True], ids=["all", "weights only"])
def test_ours_validates_tests_and_keeps_one_and_the_same(tmp_path, weights_only):
    probe = Probe(ema=EMAConfig(decay=0.5, warmup=False))
    trainer, validated, path = train(tmp_path, probe, weights_only=weights_only)
    assert validated == kept(path) == AVERAGE
    assert outcome_of_test(trainer, probe) == AVERAGE
    assert outcome_of_test(trainer, probe, ckpt_path="best") == AVERAGE
    fresh = Trainer(**QUIET, enable_checkpointing=False)
    assert outcome_of_test(fresh, Probe(), ckpt_path=path) == AVERAGE
    assert outcome_of_test(fresh, Probe(ema=EMAConfig(decay=0.5)), ckpt_path=path) == AVERAGE


def test_training_continues_with_the_weights_that_were_trained(tmp_path):
    ema = EMAConfig(decay=0.5, warmup=True)
    probe, one = Probe(ema=ema), Probe(ema=ema)
    _, _, path = train(tmp_path, probe)
    trainer = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False)
    trainer.fit(probe, LOADER, LOADER, ckpt_path=path)
    straight = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False)
    straight.fit(one, LOADER, LOADER)
    expected, weight = 0.0, 0.0
    for step in range(1, 17):
        weight += 1.0
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert float(one.network.weight) == float(probe.network.weight) == pytest.approx(expected, rel=1e-6)


def test_training_may_continue_without_an_average(tmp_path):
    _, _, path = train(tmp_path, Probe(ema=EMAConfig(decay=0.5)))
    probe = Probe()
    Trainer(**QUIET, max_epochs=2, enable_checkpointing=False).fit(probe, LOADER, LOADER, ckpt_path=path)
    assert float(probe.network.weight) == 16.0


def test_steps_equal_timm_s_with_batch_norm_and_whole_numbers():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    theirs, ours = ModelEmaV2(network, decay=0.9), WeightAverage(EMAConfig(decay=0.9, warmup=False))
    ours.start(network)
    for step in range(5):
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(torch.randn_like(weight))
        network(torch.randn(6, 3, dtype=torch.float64))
        theirs.update(network)
        ours.update(network)
        assert ours.steps == step + 1
    before = {name: value.clone() for name, value in network.state_dict().items()}
    ours.show(network)
    expected = theirs.module.state_dict()
    # timm's average of the number of batches is cut to a whole number, which makes no sense of it
    assert int(network[1].num_batches_tracked) == 5
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-14)
    ours.hide(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


class Replaced(nn.Module):
    """A buffer that each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.linear = nn.Linear(1, 1)

    def forward(self):
        self.mean = self.mean + 1.0


def test_tensors_that_are_replaced_are_averaged():
    network, average = Replaced(), WeightAverage(EMAConfig(decay=0.5, warmup=False))
    average.start(network)
    for _ in range(3):
        network()
        average.update(network)
    checkpoint = {"state_dict": {f"network.{key}": value for key, value in network.state_dict().items()}}
    average.save(checkpoint)
    assert checkpoint["state_dict"]["network.mean"] == 3.0 - (0.5 + 0.25 + 0.125)  # of 0, 1, 2 and 3


def test_half_precision_is_averaged_in_float32():
    network = nn.Linear(2, 2).bfloat16()
    nn.init.ones_(network.weight)
    average = WeightAverage(EMAConfig(decay=0.999, warmup=False))
    average.start(network)
    nn.init.constant_(network.weight, 2.0)
    for _ in range(1000):
        average.update(network)
    checkpoint = {"state_dict": {f"network.{name}": value for name, value in network.state_dict().items()}}
    average.save(checkpoint)
    assert checkpoint["state_dict"]["network.weight"][0, 0] == pytest.approx(2.0 - 0.999**1000, abs=1e-3)
    assert checkpoint["ema"]["trained"]["weight"].dtype == torch.bfloat16


def test_an_interrupted_validation_leaves_nothing_behind():
    class Interrupted(ViTClassifier):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("injected")

    network = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=1, num_heads=2)
    module = Interrupted(network, ema=EMAConfig(decay=0.9))
    arguments = {"max_epochs": 1, "limit_train_batches": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    with pytest.raises(RuntimeError, match="injected"):
        Trainer(**QUIET, **arguments).fit(module, Digits())
    shown = {name: value.clone() for name, value in network.state_dict().items()}
    module.average.hide(network)
    assert any(not torch.equal(value, shown[name]) for name, value in network.state_dict().items())


def test_a_strategy_that_shards_the_weights_is_refused():
    for kind in (FSDPStrategy, DeepSpeedStrategy):  # made without their packages and devices
        trainer = SimpleNamespace(strategy=object.__new__(kind))
        with pytest.raises(UserError, match=f"ema.decay=0.9 beside {kind.__name__}, which shards the weights"):
            WeightAverage(EMAConfig(decay=0.9)).setup(trainer, None, "fit")
    WeightAverage(EMAConfig(decay=0.9)).setup(SimpleNamespace(strategy=DDPStrategy()), None, "fit")
