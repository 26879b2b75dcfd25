"""Presets, classifiers of torchvision under the same page, and ``lightning summary``."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import GUIDE
from tensors import write_images
from torch import nn
from torchvision.models import resnet18

from vit_lightning import ISTA, MSSA, CrateBlock, UserError, ViT
from vit_lightning.cli import main
from vit_lightning.commands.summary import kept_bytes, layers_of
from vit_lightning.config.check_network import network_problems
from vit_lightning.config.resolve import resolve
from vit_lightning.models.layers import LayerNorm
from vit_lightning.models.patches import LinearProjection
from vit_lightning.models.presets import PRESETS
from vit_lightning.training.resources import forward_flops

CRATE = {"block": CrateBlock, "attention": MSSA, "feed_forward": ISTA, "final_norm": "after_pool"}
CRATE |= {"patch_projection": partial(LinearProjection, patch_norm=LayerNorm, norm=LayerNorm)}  # as its authors have it
TABLE = re.findall(r"^(\S+/\d+) +([\d,]+) +([\d.]+)$", (GUIDE / "configs.md").read_text(), re.MULTILINE)
"""Presets of the guide, with their published parameters and multiply-adds in G (GMACs)."""


@pytest.mark.parametrize(("name", "parameters", "gmacs"), TABLE)
def test_a_preset_has_the_published_parameters_and_multiply_adds(name, parameters, gmacs):
    with torch.device("meta"):
        vit = ViT(name, image_size=224, num_classes=1000, **(CRATE if name.startswith("CRATE") else {}))
    assert sum(weight.numel() for weight in vit.parameters()) == int(parameters.replace(",", ""))
    found = forward_flops(vit, (3, 224, 224)) / 2e9
    assert found == pytest.approx(float(gmacs), abs=0.005 * float(gmacs) + 0.01)  # both are rounded


def test_all_presets_are_in_the_guide():
    assert {name.partition("/")[0] for name, *_ in TABLE} == {*PRESETS}


def block(n, e, h):
    """Bytes that a block keeps: of two norms, of qkv and attention with its log-sum-exps, of the feed-forward part."""
    norms = 2 * (n * e + 2 * n)
    attention = n * e + 3 * n * e + n * e + h * n
    return 4 * (norms + attention + (1 + 4 + 4) * n * e)


def test_a_summary_counts_what_the_paper_and_the_backward_pass_say():
    vits = [ViT(image_size=32, patch_size=8, emb_size=64, depth=depth, num_heads=2, num_classes=10) for depth in (2, 3)]
    layers, (n, e) = layers_of(vits[1], (3, 32, 32)), (17, 64)
    products = 4 * n * e * e + 2 * n * n * e + 8 * n * e * e  # qkv and projection, attention, feed-forward part
    assert layers.total_flops == 2 * (3 * products + 16 * 192 * e + 10 * e)
    assert layers.total_parameters == sum(weight.numel() for weight in vits[1].parameters())
    fewer, kept = (kept_bytes(vit, (3, 32, 32)) for vit in vits)
    assert kept - fewer == block(n, e, 2)
    assert vits[1].training
    assert not any(module._forward_hooks for module in vits[1].modules())


def test_a_summary_follows_freezing_and_recomputing():
    vit = ViT(image_size=32, patch_size=8, emb_size=64, depth=3, num_heads=2, num_classes=10)
    kept = kept_bytes(vit, (3, 32, 32))
    with torch.no_grad():  # as in a notebook that only looks
        assert kept_bytes(vit, (3, 32, 32)) == kept > 0
    vit.encoder.activation_checkpointing = True
    tokens = 4 * 17 * 64
    assert kept_bytes(vit, (3, 32, 32)) <= kept - 3 * block(17, 64, 2) + 4 * tokens
    vit.encoder.activation_checkpointing = False
    for name, weight in vit.named_parameters():
        weight.requires_grad = name.startswith("head")
    assert kept_bytes(vit, (3, 32, 32)) == tokens  # of which the classifier takes one
    assert layers_of(vit, (3, 32, 32)).trainable_parameters == 650


def test_a_summary_of_another_network():
    with torch.device("meta"):
        network = resnet18()
    layers = layers_of(network, (3, 224, 224))
    assert layers.total_flops == pytest.approx(2 * 1.814e9, rel=1e-3)  # torchvision's table
    assert dict(zip(layers.layer_names, layers.out_sizes, strict=True))["model.layer4"] == [1, 512, 7, 7]

    class Looks(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)) if images.sum().item() else images

    with pytest.raises(UserError, match="Looks cannot be measured without images"):
        layers_of(Looks(12, 3), (3, 2, 2))


def test_the_command_takes_a_config_or_a_trained_model(in_folder, capsys):
    flags = ["--model=timm.create_model", "--model.model_name=vit_tiny_patch16_224", "--model.patch_size=4"]
    assert main(["summary", *flags, "--model.depth=2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"model.blocks.1 .* \[1, 5, 192\]", said)
    assert re.search(r"memory +about [\d.]+ MB for a step of \d+ in ", said)
    Path("model.json").write_text('{"model": {"class_path": "torchvision.models.resnet18", "num_classes": 3}}')
    torch.save(resnet18(num_classes=3).state_dict(), "model.pth")
    assert main(["summary", "--ckpt=model.pth"]) == 2
    assert "ckpt=model.pth does not tell the size of its images: give --image_size" in capsys.readouterr().err
    assert main(["summary", "--ckpt=model.pth", "--image_size=32"]) == 0
    assert re.search(r"layer4 .* \[1, 512, 1, 1\]", capsys.readouterr().out)
    assert main(["export", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--image-size int | [int, int]\n" in said
    assert "usage: lightning export --ckpt=CKPT --out=OUT [--OPTION=VALUE ...]\n" in said


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
