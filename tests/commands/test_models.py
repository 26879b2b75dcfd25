"""``lightning models`` and ``lightning summary``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from vit_lightning import UserError, ViT
from vit_lightning.cli import main
from vit_lightning.commands.summary import measure, table
from vit_lightning.config.resolve import resolve

GMACS = {  # timm's results/benchmark-infer-amp-nhwc-pt240-cu124-rtx4090.csv, and torchvision's _ops where it has them
    "Ti/16": 1.26,
    "S/16": 4.61,
    "B/16": 17.56,
    "B/32": 4.41,
    "L/16": 61.56,
    "L/32": 15.39,
    "H/14": 167.30,
}
PARAMETERS = {  # torchvision's tables; of CRATE: the closed form of Ma-Lab-Berkeley/CRATE, model/crate.py
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "CRATE-T/16": 6_090_856,
    "CRATE-S/16": 13_116_328,
    "CRATE-B/16": 22_796_008,
    "CRATE-L/16": 77_641_192,
}


def test_presets_have_the_published_parameters_and_multiply_adds(capsys):
    assert main(["models"]) == 0
    rows = {
        words[0]: words for line in capsys.readouterr().out.splitlines() if "/" in (words := line.split() or [""])[0]
    }
    assert {name: int(rows[name][4].replace(",", "")) for name in rows} == PARAMETERS
    for name, gmacs in GMACS.items():
        assert float(rows[name][5]) == pytest.approx(gmacs, abs=0.005 * gmacs + 0.01), name  # both are rounded
        assert float(rows[name][6]) == pytest.approx(2 * float(rows[name][5]), abs=0.02)


@pytest.mark.full
def test_multiply_adds_of_a_preset_at_another_size_are_those_of_timm(capsys):
    assert main(["models", "--image_size=384"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {words[0]: float(words[5]) for words in rows if words and "/" in words[0] and len(words) > 6}
    assert "H/14" not in found  # 14 does not divide 384
    for name, gmacs in {"Ti/16": 4.70, "S/16": 15.52, "B/16": 55.54, "B/32": 13.06, "L/16": 191.21}.items():
        assert found[name] == pytest.approx(gmacs, abs=0.005 * gmacs + 0.01), name


def block(n, e, h):
    """Bytes that a block keeps: of two norms, of qkv and attention with its log-sum-exps, of the feed-forward part."""
    norms = 2 * (n * e + 2 * n)
    attention = n * e + 3 * n * e + n * e + h * n
    return 4 * (norms + attention + (1 + 4 + 4) * n * e)


def test_a_summary_counts_what_the_paper_and_the_backward_pass_say():
    vit = ViT(image_size=32, patch_size=8, emb_size=64, depth=3, num_heads=2, num_classes=10)
    layer = measure(vit, (3, 32, 32))
    encoder = layer.inside[1]
    n, e = 17, 64
    products = 4 * n * e * e + 2 * n * n * e + 8 * n * e * e  # qkv and projection, attention, feed-forward part
    assert [inside.multiply_adds for inside in encoder.inside] == 3 * [products]
    assert layer.multiply_adds == 3 * products + 16 * 192 * e + 10 * e
    assert [inside.kept for inside in encoder.inside] == 3 * [block(n, e, 2)]
    assert layer.parameters == sum(weight.numel() for weight in vit.parameters())
    text = table(vit, (3, 32, 32), batch_size=8)
    assert "0 to 2, each" in text
    assert f"{encoder.inside[0].parameters:,}" in text
    assert "for a batch of 8" in text
    assert vit.training
    assert not any(module._forward_hooks for module in vit.modules())


def test_a_summary_follows_freezing_and_recomputing():
    vit = ViT(image_size=32, patch_size=8, emb_size=64, depth=3, num_heads=2, num_classes=10)
    kept = measure(vit, (3, 32, 32)).kept
    with torch.no_grad():  # as in a notebook that only looks
        assert measure(vit, (3, 32, 32)).kept == kept > 0
    vit.encoder.activation_checkpointing = True
    tokens = 4 * 17 * 64
    assert measure(vit, (3, 32, 32)).kept <= kept - 3 * block(17, 64, 2) + 4 * tokens
    vit.encoder.activation_checkpointing = False
    for name, weight in vit.named_parameters():
        weight.requires_grad = name.startswith("head")
    assert measure(vit, (3, 32, 32)).kept == tokens  # of which the classifier takes one
    assert "650 of them trained" in table(vit, (3, 32, 32), batch_size=1)


def test_a_summary_of_another_network(capsys):
    with torch.device("meta"):
        network = resnet18()
    layer = measure(network, (3, 224, 224))
    assert layer.multiply_adds == pytest.approx(1.814e9, rel=1e-3)  # torchvision's table
    assert {name.name: name.shape for name in layer.inside}["layer4"] == (512, 7, 7)

    class Looks(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)) if images.sum().item() else images

    with pytest.raises(UserError, match="Looks cannot be measured without images"):
        table(Looks(12, 3), (3, 2, 2), 1)


def test_the_command_takes_a_config_or_a_trained_model(in_folder, capsys):
    pytest.importorskip("timm")
    flags = ["--model=timm.create_model", "--model.model_name=vit_tiny_patch16_224", "--model.patch_size=4"]
    assert main(["summary", *flags, "--model.depth=2", "--levels=2"]) == 0
    said = capsys.readouterr().out
    assert "0 to 1, each" in said
    assert "for an image 1x8x8" in said
    assert main(["summary", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--levels int" in said
    assert "--image-size int | [int, int]\n" in said
    assert main(["convert", "--help"]) == 0
    assert "usage: lightning convert SOURCE DST --to=TO [--OPTION=VALUE ...]\n" in capsys.readouterr().out


def test_sizes_of_crate_stand_beside_its_parts():
    parts = ["--model.block=CrateBlock", "--model.attention=MSSA", "--model.feed_forward=ISTA"]
    assert resolve(["--model.preset=CRATE-T/4", *parts]).make_network().emb_size == 384
