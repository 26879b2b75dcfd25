import pytest
import torch
import torch.nn.functional as F

from vit_lightning import UserError, ViT
from vit_lightning.blocks import LayerNorm, RMSNorm
from vit_lightning.patches import ConvProjection, DistillationToken, LinearProjection, RegisterTokens

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomise(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return module.double()


def test_norms_stand_before_and_after_the_matrix():
    projection = randomise(LinearProjection(3, (2, 4), 8, patch_norm=LayerNorm, norm=RMSNorm))
    batch = randn(2, 3, 4, 8)
    pixels = F.unfold(batch, (2, 4), stride=(2, 4)).transpose(1, 2)
    normed = F.layer_norm(pixels, (24,), projection.patch_norm.weight, projection.patch_norm.bias, eps=1e-6)
    tokens = F.linear(normed, projection.linear.weight, projection.linear.bias)
    expected = tokens * (tokens.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * projection.norm.weight
    torch.testing.assert_close(projection(batch), expected, rtol=0, atol=1e-12)


def test_a_convolution_may_lack_its_bias_and_have_a_norm():
    projection = randomise(ConvProjection(3, (2, 2), 8, bias=False, norm=LayerNorm))
    assert [name for name, _ in projection.named_parameters()] == ["conv.weight", "norm.weight", "norm.bias"]
    out = projection(randn(2, 3, 4, 4))
    torch.testing.assert_close(out, projection.norm(projection.tokens(projection.conv(randn(2, 3, 4, 4)))))


def test_tokens_stand_in_the_order_class_distillation_registers_patches():
    vit = ViT(**SMALL, distillation_token=True, register_tokens=2, positions="none").eval()
    embedding = randomise(vit.patch_embedding)
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
    vit = randomise(ViT(**SMALL, embedding_norm=LayerNorm)).eval()
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
