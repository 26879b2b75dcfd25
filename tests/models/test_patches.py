import pytest
import torch
import torch.nn.functional as F
from tensors import randn, randomise
from torch import nn

from vit_lightning import UserError, ViT
from vit_lightning.models.layers import LayerNorm, RMSNorm
from vit_lightning.models.patches import (
    ClassToken,
    ConvProjection,
    DistillationToken,
    LinearProjection,
    PatchEmbedding,
    RegisterTokens,
)

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


PATCHES = [(4, 4), (2, 6), (6, 2), (1, 1)]


def test_norms_stand_before_and_after_the_matrix():
    projection = randomise(LinearProjection(3, (2, 4), 8, patch_norm=LayerNorm, norm=RMSNorm)).double()
    batch = randn(2, 3, 4, 8)
    pixels = F.unfold(batch, (2, 4), stride=(2, 4)).transpose(1, 2)
    normed = F.layer_norm(pixels, (24,), projection.patch_norm.weight, projection.patch_norm.bias, eps=1e-6)
    tokens = F.linear(normed, projection.linear.weight, projection.linear.bias)
    expected = tokens * (tokens.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * projection.norm.weight
    torch.testing.assert_close(projection(batch), expected, rtol=0, atol=1e-12)


def test_a_convolution_may_lack_its_bias_and_have_a_norm():
    projection = randomise(ConvProjection(3, (2, 2), 8, bias=False, norm=LayerNorm)).double()
    assert [name for name, _ in projection.named_parameters()] == ["conv.weight", "norm.weight", "norm.bias"]
    out = projection(randn(2, 3, 4, 4))
    torch.testing.assert_close(out, projection.norm(projection.tokens(projection.conv(randn(2, 3, 4, 4)))))


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


def test_registers_and_distillation_token_do_not_start_alike():
    torch.manual_seed(0)
    vit = ViT(**SMALL, distillation_token=True, register_tokens=3)
    registers = vit.patch_embedding.register_tokens.token[0]
    assert (registers[0] - registers[1]).abs().max() > 1e-3
    assert vit.patch_embedding.distillation_token.token.count_nonzero() == 16
    assert vit.patch_embedding.class_token.token.count_nonzero() == 0


def test_learned_tokens_take_no_decay():
    vit = ViT(**SMALL, distillation_token=True, register_tokens=3)
    learned = {f"patch_embedding.{name}.token" for name in ("class_token", "distillation_token", "register_tokens")}
    assert learned | {"patch_embedding.positions.table"} <= vit.no_decay()
    assert "head.distillation.weight" not in vit.no_decay()


def test_a_norm_may_stand_between_embedding_and_encoder():
    vit = randomise(ViT(**SMALL, embedding_norm=LayerNorm)).double().eval()
    tokens = vit.patch_embedding(randn(2, 3, 8, 8))
    plain = vit.patch_embedding[:-1](randn(2, 3, 8, 8))
    assert [name for name, _ in vit.patch_embedding.named_children()][-1] == "norm"
    torch.testing.assert_close(tokens, vit.patch_embedding.norm(plain))


@pytest.mark.parametrize("make", [RegisterTokens, DistillationToken])
def test_tokens_are_at_least_one(make):
    with pytest.raises(UserError, match="count=0 must be at least 1"):
        make(8, 0)
    with pytest.raises(UserError, match="register_tokens=-1 must be at least 0"):
        ViT(**SMALL, register_tokens=-1)


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


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_linear_projection_is_torchs_unfold_and_a_matrix(patch):
    projection = randomise(LinearProjection(3, patch, 8).double())
    images = randn(2, 3, 3 * patch[0], 2 * patch[1])
    patches = F.unfold(images, patch, stride=patch).transpose(1, 2)
    expected = F.linear(patches, projection.linear.weight, projection.linear.bias)
    torch.testing.assert_close(projection(images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [ConvProjection, LinearProjection])
def test_patches_come_row_by_row(make):
    projection = make(1, (2, 3), 1).double()
    nn.init.ones_(projection[0 if make is ConvProjection else 1].weight)
    nn.init.zeros_(projection[0 if make is ConvProjection else 1].bias)
    numbers = torch.arange(8, dtype=torch.float64).view(2, 4)
    image = numbers.repeat_interleave(2, dim=0).repeat_interleave(3, dim=1)[None, None]
    assert (projection(image)[0, :, 0] / 6).tolist() == list(range(8))


def test_class_token_goes_first_in_every_image_and_takes_the_type_of_the_tokens():
    class_token = randomise(ClassToken(4)).double()
    tokens = randn(3, 5, 4, dtype=torch.bfloat16)
    out = class_token(tokens)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out[:, 0], class_token.token[0, 0].to(torch.bfloat16).expand(3, 4))
    assert torch.equal(out[:, 1:], tokens)


def test_patch_embedding_adds_positions_to_the_class_token_too():
    class AddOne(nn.Module):
        def forward(self, tokens):
            return tokens + 1.0

    embedding = PatchEmbedding(
        projection=ConvProjection(3, (2, 2), 4), class_token=ClassToken(4), positions=AddOne(), dropout=nn.Dropout(0.0)
    )
    out = embedding(randn(2, 3, 4, 4, dtype=torch.float32))
    assert list(dict(embedding.named_children())) == ["projection", "class_token", "positions", "dropout"]
    assert torch.equal(out[:, 0], torch.ones(2, 4))


def test_patch_embedding_drops_embedded_tokens_in_training_only():
    embedding = PatchEmbedding(projection=nn.Identity(), class_token=None, positions=None, dropout=nn.Dropout(0.5))
    ones = torch.ones(1, 100, 100)
    torch.manual_seed(0)
    assert set(embedding(ones).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(embedding.eval()(ones), ones)
