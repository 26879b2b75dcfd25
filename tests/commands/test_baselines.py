"""Classifiers of torchvision under the same page."""

import pytest
import torch
from tensors import write_images

from vit_lightning.config.check_network import network_problems
from vit_lightning.config.resolve import resolve
from vit_lightning.training.resources import forward_flops


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name in ("a", "b", "c"):
        write_images(folder / "train" / name, 14)
    return folder


def flags(images, model):
    return ["--data=ImageFolder", f"--data.root={images}", "--data.image_size=32", f"--model={model}"]


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "vit_b_16", "swin_t"])
def test_classes_and_image_size_come_from_the_data(images, name):
    experiment = resolve(flags(images, f"torchvision.models.{name}"))
    arguments = experiment.config["model"]["init_args"]
    assert (arguments["num_classes"], arguments.get("image_size", 32)) == (3, 32)
    with torch.device("meta"):
        network = experiment.make_network().eval()
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 3)
    assert forward_flops(network, (3, 32, 32)) > 1e7


def test_outputs_that_are_not_the_classes_and_a_network_without_parameters_are_named():
    with torch.device("meta"):
        headless = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
        assert network_problems(headless, (3, 2, 2), 4) == [
            "model: Sequential gives (2, 5) for 2 images of 4 classes (num_classes?)"
        ]
        assert network_problems(torch.nn.Flatten(), (3, 2, 2), 4) == ["model: Flatten has no parameters to train"]
