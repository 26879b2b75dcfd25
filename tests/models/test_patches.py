import pytest
import torch
from tensors import randn, randomise

from vit_lightning import UserError, ViT
from vit_lightning.models.patches import DistillationToken, RegisterTokens

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


def test_tokens_stand_in_the_order_class_distillation_registers_patches():
    vit = ViT(**SMALL, distillation_token=True, register_tokens=2, positions="none").eval()
    embedding = randomise(vit.patch_embedding).double()
    tokens = embedding(randn(2, 3, 8, 8))
    assert tokens.shape == (2, 1 + 1 + 2 + 4, 16)
    parts = [embedding.class_token, embedding.distillation_token, embedding.register_tokens]
    expected = torch.cat([part.token for part in parts], dim=1).expand(2, 4, 16)
    assert torch.equal(tokens[:, :4], expected)
    assert torch.equal(tokens[:, 4:], embedding.projection(randn(2, 3, 8, 8)))
    assert vit.prefix_tokens == 4


@pytest.mark.parametrize("make", [RegisterTokens, DistillationToken])
def test_tokens_are_at_least_one(make):
    with pytest.raises(UserError, match="count=0 must be at least 1"):
        make(8, 0)
