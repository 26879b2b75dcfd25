import math
from functools import partial

import pytest
import torch

from vit_lightning.errors import UserError
from vit_lightning.models.attention import RotaryAttention
from vit_lightning.models.heads import ClassTokenAndMeanPool
from vit_lightning.models.layers import BatchNorm
from vit_lightning.models.vit import ViT

ROTARY = partial(RotaryAttention, register_temperature=100.0)
SMALL = {"image_size": 16, "patch_size": 4, "emb_size": 32, "depth": 2, "num_heads": 4, "num_classes": 10}


def small(**options):
    return ViT(**SMALL | options)


def count(network):
    return sum(weight.numel() for weight in network.parameters())


def test_without_a_preset_the_sizes_are_those_of_b16():
    with torch.device("meta"):
        assert [count(ViT()), count(ViT("Ti/16", image_size=384))] == [86_567_656, 5_790_376]


def test_tokens_stand_in_the_order_class_distillation_registers_patches():
    embedding = small(
        distillation_token=True, register_tokens=2, positions="none", initialisation="tutorial"
    ).patch_embedding
    parts = [embedding.class_token, embedding.distillation_token, embedding.register_tokens]
    assert torch.equal(embedding(torch.zeros(1, 3, 16, 16))[:, :4], torch.cat([part.token for part in parts], dim=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (16, 18)}, r"patch_size=4 does not divide image_size=16x18 .*1, 2\)"),
        ({"patch_size": 0}, r"patch_size=0 must be at least 1"),
        ({"image_size": (0, 16)}, r"image_size=0x16 .*must be at least 1"),
        ({"depth": 1_000_000}, r"depth=1000000 must be at most 500"),
        ({"image_size": 8192, "patch_size": 4}, r"image_size=8192 has 4,194,304 patches .*at most 1,048,576"),
        ({"emb_size": 0}, r"emb_size=0 must be at least 1"),
        ({"drop_path": math.nan}, r"drop_path=nan must be at least 0"),
        ({"register_tokens": -1}, r"register_tokens=-1 must be at least 0"),
        ({"attention": ROTARY, "positions": "none", "register_tokens": 2}, r"register_tokens=2 must be a square"),
        ({"attention": ROTARY, "positions": "none", "patch_dropout": 0.1}, r"patch_dropout: RotaryAttention takes all"),
        ({"drop_path": 0.1, "drop_path_schedule": "square"}, r"drop_path_schedule=square must be one of linear, const"),
        ({"distillation_token": True, "pool": "mean"}, r"distillation_token=true needs pool=cls"),
        ({"distillation_token": True, "representation_size": 8}, r"needs representation_size=null"),
        ({"distillation_token": True, "final_norm": "after_pool"}, r"needs final_norm other than after_pool"),
        ({"pool": ClassTokenAndMeanPool, "class_token": False}, r"pool=ClassTokenAndMeanPool needs class_token=true"),
        ({"norm": BatchNorm, "activation_checkpointing": True}, r"BatchNorm would count each batch twice"),
        ({"positions": "sincos2d", "emb_size": 34, "num_heads": 2}, r"emb_size=34 must be a multiple of 4"),
    ],
    ids=str,
)
def test_bad_sizes_are_errors_with_their_values(options, message):
    with pytest.raises(UserError, match=message) as raised:
        small(**options)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize("preset", ["X/16", "Ti", "Ti/", "Ti/0", "Ti/x", "Ti/-16", "ti/16", "Ti16", "/16", ""])
def test_unknown_presets_are_errors_with_the_choices(preset):
    with pytest.raises(UserError, match=r"preset=.* Ti, S, B, L, H, CRATE-T, .*such as Ti/16"):
        ViT(preset)


def test_sizes_beside_a_preset_replace_its_own():
    network = ViT("Ti/16", image_size=8, patch_size=4, depth=1, num_heads=6, num_classes=2)
    assert (network.emb_size, network.depth, network.num_heads, network.patch_size) == (192, 1, 6, (4, 4))
    assert network.patch_embedding.projection.conv.weight.shape == (192, 3, 4, 4)
    assert network.patch_embedding.positions.table.shape == (1, 5, 192)
    assert len(network.encoder) == 1
    assert network.encoder[0].attention.fn.attention.num_heads == 6
