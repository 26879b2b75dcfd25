import pytest
import torch
from tensors import randn, randomise

from vit_lightning import UserError, ViT
from vit_lightning.models.patches import (
    ConvProjection,
    DistillationToken,
    LinearProjection,
    RegisterTokens,
)

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


PATCHES = [(4, 4), (2, 6), (6, 2), (1, 1)]


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


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_conv_and_linear_projection_are_equal_for_equal_weights(patch, channels):
    conv = randomise(ConvProjection(channels, patch, 8).double())
    linear = LinearProjection(channels, patch, 8).double()
    linear.load_state_dict(
        {"linear.weight": conv.conv.weight.detach().flatten(1), "linear.bias": conv.conv.bias.detach()}
    )
    images = randn(2, channels, 3 * patch[0], 2 * patch[1])
    assert conv(images).shape == (2, 6, 8)
    torch.testing.assert_close(conv(images), linear(images), rtol=1e-12, atol=1e-12)
