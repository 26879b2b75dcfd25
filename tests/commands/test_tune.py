from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import REPOSITORY, SMALL

from vit_lightning import UserError, ViTClassifier
from vit_lightning.cli import main
from vit_lightning.commands.tune import find_learning_rate, scale_batch, smooth, suggest
from vit_lightning.config.resolve import resolve


def test_the_rate_of_each_group_really_varies_and_nothing_else_is_left(in_folder, monkeypatch, capsys):
    seen: list[tuple[list[float], float]] = []

    def watch(self, optimizer):  # called within the optimizer's step, when its rates are those it steps with
        weights = self.network.head.linear.weight.abs().sum().item()
        seen.append(([group["lr"] for group in optimizer.param_groups], weights))

    monkeypatch.setattr(ViTClassifier, "on_before_optimizer_step", watch)
    config = Path("mine.yaml")
    config.write_text(
        "trainer:\n  max_epochs: 1\n  accelerator: cpu\n"
        "  callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/loss}}]\n"
    )
    before = config.read_bytes()
    flags = ["--config=mine.yaml", *SMALL[:4], "--steps=40", "--min_lr=1e-6", "--max_lr=1.0"]
    assert main(["lr-find", *flags]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (folder,) = Path("runs/lr-find").iterdir()
    assert {path.name for path in folder.iterdir()} == {"rates.json", "rates.png"}
    assert sorted(path.name for path in in_folder.iterdir()) == ["mine.yaml", "runs"]
    assert config.read_bytes() == before
    results = json.loads((folder / "rates.json").read_text())
    assert len(seen) == len(results["rates"]) == len(results["losses"]) == 40
    assert np.array([rates for rates, _ in seen]) == pytest.approx(np.array(results["group_rates"]))
    assert all(len(set(rates)) == 1 for rates, _ in seen)  # of this config, whose groups differ in their decay alone
    assert [rates[0] for rates, _ in seen] == pytest.approx(results["rates"])
    assert seen[0][0][0] == pytest.approx(1e-6)
    assert seen[-1][0][0] == pytest.approx(1.0)
    steps = np.diff(np.log([rates[0] for rates, _ in seen[1:]]))
    assert steps == pytest.approx(steps.mean())
    moved = np.abs(np.diff([weights for _, weights in seen]))
    assert moved[-5:].mean() > 1e3 * moved[:5].mean()  # the weights go as far as the rates say
    assert f"--optimizer.lr={results['suggestion']:.2g}" in said.out
    assert 1e-4 < results["suggestion"] < 0.3
    with Image.open(folder / "rates.png") as picture:
        assert picture.size == (900, 600)


def test_groups_keep_their_factors_on_the_rate(in_folder):
    flags = ["--trainer.accumulate_grad_batches=2", "--model.depth=2"]
    flags += ["--optimizer.layer_decay=0.5", "--optimizer.name=muon", "--ema.decay=0.9"]
    results = find_learning_rate(resolve([*SMALL, *flags], "lr-find"), steps=30, min_lr=1e-5)
    factors = results["group_factors"]
    assert {round(factor, 6) for factor in factors} == {1.0, 0.5, 0.25, 0.125}  # head, two blocks, embedding
    rates = np.array(results["group_rates"])
    assert rates.shape == (30, len(factors))
    assert rates == pytest.approx(np.outer(results["rates"], factors))
    assert results["batch_size"] == 128


def test_the_suggestion_is_where_the_loss_falls_fastest():
    x = np.linspace(math.log(1e-7), 0.0, 100)
    losses = 2.0 - 1.0 / (1.0 + np.exp(-2.0 * (x - math.log(1e-3)))) + np.exp(3.0 * (x + 1.0))
    assert suggest(np.exp(x).tolist(), losses.tolist()) == pytest.approx(1e-3, rel=0.1)
    noise = losses + np.random.default_rng(0).normal(0.0, 0.02, 100)
    noise[97:] = math.nan
    assert suggest(np.exp(x).tolist(), smooth(noise.tolist())) == pytest.approx(1e-3, rel=0.5)
    assert suggest(np.exp(x).tolist(), (2.0 + x**2)[::-1].tolist()) is None
    assert suggest([0.1, 0.2], [1.0, 0.5]) is None
    assert smooth([3.0] * 50) == pytest.approx([3.0] * 50)


def test_no_rate_is_suggested_where_none_lowers_the_loss(in_folder, capsys):
    assert main(["lr-find", *SMALL, "--min_lr=1e-12", "--max_lr=1e-10", "--steps=20"]) == 2
    assert "no learning rate is suggested" in capsys.readouterr().err


def test_the_batch_grows_until_the_data_ends_or_the_limit_is_reached(in_folder):
    results = scale_batch(resolve([*SMALL, "--data.batch_size=200"], "scale-batch"))
    assert results == {
        "batch_size": 1600,
        "config": 200,
        "ended_by": "data",
        "trained": [200, 400, 800, 1600],
        "failed": [],
    }
    flags = ["--data.batch_size=100", "--out=out"]
    results = scale_batch(resolve([*SMALL, *flags], "scale-batch"), max_batch_size=400)
    assert (results["batch_size"], results["ended_by"], results["trained"]) == (400, "max_batch_size", [100, 200, 400])
    assert json.loads(Path("out/batch_sizes.json").read_text()) == results
    assert sorted(path.name for path in Path("out").iterdir()) == ["batch_sizes.json"]


@pytest.mark.parametrize(
    ("holds", "first", "best"), [pytest.param(300, 100, 200, marks=pytest.mark.full), (30, 100, 25), (0, 4, None)]
)
def test_the_batch_is_the_largest_that_the_memory_holds(in_folder, monkeypatch, holds, first, best):
    step = ViTClassifier.training_step

    def small_memory(self, batch, batch_idx):
        if len(batch.images) > holds:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ViTClassifier, "training_step", small_memory)
    config = resolve([*SMALL, f"--data.batch_size={first}"], "scale-batch")
    if best is None:
        with pytest.raises(UserError, match="a batch of 1 does not fit in memory"):
            scale_batch(config)
        return
    results = scale_batch(config)
    assert (results["batch_size"], results["ended_by"]) == (best, "memory")


def test_a_config_of_the_project_is_searched(in_folder):
    config = resolve([f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}", "--trainer.accelerator=cpu"], "lr-find")
    assert 3e-4 < find_learning_rate(config)["suggestion"] < 1e-2
