"""Small models of every family in ``vit_lightning.weights``, with random weights from a seed."""

from __future__ import annotations

import torch

from vit_lightning import to_reference
from vit_lightning.weights import FAMILIES
from vit_lightning.weights.options import OPTIONS, build

CONFIGS = {
    "timm": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5},
    "timm_legacy": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5},
    "torchvision": {
        "image_size": 8,
        "patch_size": 4,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "mlp_dim": 24,
        "num_classes": 5,
    },
    "hf": {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_labels": 5,
    },
    "vit_pytorch": {
        "image_size": 8,
        "patch_size": 4,
        "num_classes": 5,
        "dim": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
    },
    "simple_vit": {
        "image_size": 8,
        "patch_size": 4,
        "num_classes": 5,
        "dim": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
    },
    "crate": {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2},
    "big_vision": {
        "image_size": [8, 8],
        "patch_size": [4, 4],
        "num_classes": 5,
        "width": 16,
        "depth": 2,
        "num_heads": 2,
    },
    "google": {
        "image_size": [8, 8],
        "patches": [4, 4],
        "num_classes": 5,
        "hidden_size": 16,
        "num_layers": 2,
        "mlp_dim": 24,
        "num_heads": 2,
    },
    "torch_encoder": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5},
    "einops_tutorial": {"img_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 5},
}


def fresh(family, layout=None, **more):
    """Returns a ViT with random weights, and its tensors and config in the family's form."""
    table = FAMILIES[family]
    config = {**CONFIGS[family], **more}
    vit = build(table.read(config, {**table.layout_for(OPTIONS), **(layout or {})}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    state, _ = to_reference(vit, family=family, layout=layout)
    return vit.eval(), state, config
