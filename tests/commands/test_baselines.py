"""Classifiers of torchvision under the same page."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensors import write_images
from torchvision.models import resnet18

from vit_lightning.commands.fit import fit
from vit_lightning.config.check_network import network_problems
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.training.resources import forward_flops


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name in ("a", "b", "c"):
        write_images(folder / "train" / name, 14)
    return folder


def flags(images, model, *more):
    return ["--data=ImageFolder", f"--data.root={images}", "--data.image_size=32", f"--model={model}", *more]


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "vit_b_16", "swin_t", "regnet_y_400mf"])
def test_classes_and_image_size_come_from_the_data(images, name):
    experiment = resolve(flags(images, f"torchvision.models.{name}"))
    arguments = experiment.config["model"]["init_args"]
    assert arguments["num_classes"] == 3
    assert arguments.get("image_size", 32) == 32
    with torch.device("meta"):
        network = experiment.make_network() if not name.startswith("regnet") else None
    if network is not None:
        assert network.eval()(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 3)
        assert forward_flops(network, (3, 32, 32)) > 1e7


def test_flops_of_resnet18_are_those_of_its_paper():
    with torch.device("meta"):
        flops = forward_flops(resnet18(), (3, 224, 224))
    assert flops == pytest.approx(2 * 1.814e9, rel=1e-3)  # torchvision's table: 1.814 GFLOPS, of multiply-adds


def test_its_config_resolves_to_itself(images, tmp_path):
    once = resolve(flags(images, "torchvision.models.swin_t", "--model.dropout=0.1")).to_yaml()
    (tmp_path / "page.yaml").write_text(once)
    again = resolve(["--config", str(tmp_path / "page.yaml")])
    assert again.to_yaml().replace("experiment: page", "experiment: run") == once
    assert again.config["model"]["init_args"]["dropout"] == 0.1


def test_a_small_one_trains_and_goes_through_a_checkpoint(images, in_folder):
    fit(
        resolve(
            flags(
                images,
                "torchvision.models.mobilenet_v3_small",
                "--optimizer.name=sgd",
                "--ema.decay=0.9",
                "--trainer.max_epochs=1",
                "--data.batch_size=8",
                "--trainer.accelerator=cpu",
                "--out=run",
            )
        )
    )
    results = json.loads((in_folder / "run/results.json").read_text())
    assert results["flops"] > 0
    assert np.isfinite(results["test/loss"])
    state = read_checkpoint(in_folder / "run/checkpoints/best.ckpt")["state_dict"]
    assert state["network.features.0.1.num_batches_tracked"] == results["best_step"]


def test_features_are_named():
    with torch.device("meta"):
        headless = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
        assert network_problems(headless, (3, 2, 2), 4) == [
            "model: Sequential gives (2, 5) for 2 images of 4 classes (num_classes?)"
        ]
        assert network_problems(torch.nn.Flatten(), (3, 2, 2), 4) == ["model: Flatten has no parameters to train"]


@pytest.mark.parametrize(("message", "said"), [("its metadata is gone", True), ("item() on meta tensors", False)])
def test_only_a_network_that_needs_numbers_is_left_to_the_training(message, said):
    class Raises(torch.nn.Linear):
        def forward(self, images):
            raise RuntimeError(message)

    assert bool(network_problems(Raises(2, 3, device="meta"), (3, 2, 2), 4)) is said
