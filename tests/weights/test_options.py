"""The table of a ViT's options knows all arguments of ViT and of its parts, so that none is lost in a conversion."""

import inspect
from functools import partial

import pytest
import torch

from vit_lightning import ViT
from vit_lightning.models import attention, crate, feed_forward, heads, patches, positions
from vit_lightning.models.layers import LayerNorm, RMSNorm
from vit_lightning.weights.options import ATTENTIONS, FEED_FORWARDS, POOLS, POSITIONS, TRAINING_ALONE, build, describe

SMALL = {"image_size": 16, "patch_size": 4, "emb_size": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
PARTS = {
    "attention": (*ATTENTIONS.values(), attention.SeparateAttention, attention.RotaryAttention),
    "feed_forward": FEED_FORWARDS.values(),
    "positions": (*POSITIONS.values(), positions.SinCos2dPositions),
    "patch_projection": (patches.ConvProjection, patches.LinearProjection, patches.ConvTokenizer),
    "pool": POOLS.values(),
    "norm": (LayerNorm, RMSNorm),
}
OTHER = {
    **{"image_size": 32, "patch_size": 2, "in_channels": 1, "num_classes": 7, "emb_size": 64, "depth": 3},
    **{"num_heads": 2, "class_token": False, "distillation_token": True, "register_tokens": 2, "pool": "mean"},
    **{"positions": "none", "final_norm": "none", "embedding_norm": LayerNorm, "representation_size": 3},
    **{"layer_scale": 0.3, "patch_projection": partial(patches.LinearProjection, patch_norm=LayerNorm)},
    **{"attention": partial(attention.MultiHeadAttention, dim_head=4), "feed_forward": feed_forward.SwiGLU},
    **{"dim_head": 16, "qkv_bias": False, "scale": 0.7, "qk_norm": RMSNorm, "norm": RMSNorm, "projection": False},
    **{"projection_bias": False, "temperature": 99.0, "max_resolution": 5.0, "reference_grid": (3, 3), "centred": True},
    **{"expansion": 3.0, "activation": "relu", "bias": False, "patch_norm": RMSNorm, "form": "mae", "eps": 1e-3},
    **{"step_size": 0.7, "threshold": 0.7, "prefix": True, "hidden": 7, "gate": "heads", "register_temperature": 9.0},
}
"""Another value of each argument than its default."""
NEEDED = {crate.ISTA: {"block": crate.CrateBlock, "attention": crate.MSSA}, "class_token": {"pool": "mean"}}
"""What a part or an argument needs beside it."""


def acts_in_training(name):
    return name in (*TRAINING_ALONE, "std") or "drop" in name


def arguments():
    """Lists the arguments of ViT and of all parts: option of ViT (none for its own arguments), class, name."""
    found = [(None, ViT, name) for name in inspect.signature(ViT).parameters if name not in ("preset", "block")]
    for option, kinds in PARTS.items():
        for kind in kinds:
            parameters = inspect.signature(kind).parameters.values()
            found += [(option, kind, each.name) for each in parameters if each.kind is each.KEYWORD_ONLY]
    return [pytest.param(*case, id=f"{case[1].__name__}-{case[2]}") for case in found if not acts_in_training(case[2])]


def made(option, kind, name, given):
    options = given if option is None else {option: partial(kind, **given)}
    with torch.device("meta"):
        return ViT(**{**SMALL, **NEEDED.get(kind, {}), **NEEDED.get(name, {}), **options})


@pytest.mark.parametrize(("option", "kind", "name"), arguments())
def test_no_argument_is_lost(option, kind, name):
    value = False if kind is heads.AttentionPool and name == "prefix" else OTHER[name]
    other = describe(made(option, kind, name, {name: value}))
    assert other != describe(made(option, kind, name, {}))
    with torch.device("meta"):
        assert describe(build(other)) == other
