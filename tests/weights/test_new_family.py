"""A new family is its tables and a name in FAMILIES: the two examples of how to write one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vit_lightning import ViT
from vit_lightning.sizes import side
from vit_lightning.weights import FAMILIES, from_reference, to_reference
from vit_lightning.weights.family_timm import TIMM
from vit_lightning.weights.fields import Field, size
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.identify import identify
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD
from vit_lightning.weights.tables import Family

OURS = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 5}

RENAMED = replace(
    TIMM,
    name="renamed",
    names=lambda options, layout: {**TIMM.names(options, layout), "norm": "final_norm", "head.linear": "classifier"},
)

OWN = Family(
    name="own",
    fields=(
        Field("image", 224, "image_size", size, side),
        Field("patch", 16, "patch_size", size, side),
        Field("width", ..., "emb_size"),
        Field("layers", ..., "depth"),
        Field("heads", ..., "num_heads"),
        Field("mlp", ..., "hidden"),
        Field("classes", 1000, "num_classes"),
    ),
    names=lambda options, layout: {
        "patch_embedding.projection.conv": "patches",
        "patch_embedding.class_token.token": "cls",
        "patch_embedding.positions.table": "pos",
        f"{ATTENTION}.norm": "layers.*.ln1",
        f"{ATTENTION}.attention": "layers.*.attn",
        f"{FEED_FORWARD}.norm": "layers.*.ln2",
        f"{FEED_FORWARD}.feed_forward": "layers.*.mlp",
        "norm": "ln",
        "head.linear": "fc",
    },
)


@pytest.mark.parametrize(
    ("family", "name", "config"),
    [
        (RENAMED, "classifier.weight", {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}),
        (OWN, "layers.1.attn.qkv.bias", {"image": 8, "patch": 4, "width": 16, "layers": 2, "heads": 2, "mlp": 64}),
    ],
    ids=["renamed", "own"],
)
def test_a_family_is_its_tables(family, name, config, monkeypatch):
    monkeypatch.setitem(FAMILIES, family.name, family)
    torch.manual_seed(0)
    vit = ViT(**OURS).eval()
    with torch.no_grad():
        for weight in vit.parameters():
            weight.copy_(torch.randn(weight.shape))
    state, written = to_reference(vit, family=family.name)
    assert name in state
    assert written.items() >= config.items()
    heads = next(name for name, value in written.items() if name in ("heads", "num_heads"))
    found = identify(WeightsFile("weights", None, state), {heads: 2})
    assert found.family == family.name
    again = from_reference(state, family=family.name, config=found.config).eval()
    batch = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(batch), vit(batch))
