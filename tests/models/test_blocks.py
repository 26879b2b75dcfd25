from functools import partial

import pytest
import torch
from tensors import randn, randomise
from torch import nn

from vit_lightning import UserError, ViT, to_reference
from vit_lightning.models.attention import DotProductAttention, MultiHeadAttention, attention_weights
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.layers import DropPath, NamedSequential, RMSNorm


def boolean_mask(*shape, seed=0):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return mask | torch.eye(shape[-1], dtype=torch.bool)


def attention_like_torchs(emb_size, num_heads, bias=True):
    theirs = randomise(nn.MultiheadAttention(emb_size, num_heads, bias=bias, batch_first=True).double())
    ours = MultiHeadAttention(emb_size, num_heads, qkv_bias=bias).double()
    names = {"qkv.weight": "in_proj_weight", "projection.weight": "out_proj.weight"}
    if bias:
        names |= {"qkv.bias": "in_proj_bias", "projection.bias": "out_proj.bias"}
    else:
        nn.init.zeros_(ours.projection.bias)
    weights = dict(theirs.named_parameters())
    ours.load_state_dict({name: weights[other] for name, other in names.items()}, strict=bias)
    return ours, theirs, names


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("emb_size", "num_heads"), [(12, 1), (12, 3), (16, 16)])
def test_attention_and_its_gradients_equal_torchs(emb_size, num_heads, bias, masked):
    ours, theirs, names = attention_like_torchs(emb_size, num_heads, bias)
    mask = boolean_mask(7, 7) if masked else None
    tokens = [randn(2, 7, emb_size).requires_grad_() for _ in range(2)]
    out = ours(tokens[0], mask)
    expected, _ = theirs(tokens[1], tokens[1], tokens[1], attn_mask=None if mask is None else ~mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    direction = randn(2, 7, emb_size, seed=1)
    out.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(tokens[0].grad, tokens[1].grad, rtol=1e-10, atol=1e-10)
    for name, other in names.items():
        torch.testing.assert_close(
            ours.get_parameter(name).grad, theirs.get_parameter(other).grad, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("shape", [(7, 7), (1, 1, 7, 7), (2, 1, 7, 7), (2, 1, 1, 7), (1, 3, 1, 7), (3, 7, 7)], ids=str)
def test_masks_broadcast_to_images_heads_queries_and_keys(shape):
    attention = randomise(MultiHeadAttention(12, 3).double())
    tokens = randn(2, 7, 12)
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(attention(tokens, mask), attention(tokens, mask.expand(2, 3, 7, 7).contiguous()))
    assert not torch.allclose(attention(tokens, mask), attention(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_query_that_may_attend_to_nothing_gets_zeros_and_finite_gradients(dtype):
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    queries, keys, values = (randn(1, 2, 5, 4, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
    out = DotProductAttention(0.5)(queries, keys, values, mask)
    weights = attention_weights(queries, keys, scale=0.5, mask=mask)
    (out.sum() + weights.square().sum()).backward()
    assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 4, dtype=dtype))
    assert torch.equal(weights[:, :, 2], torch.zeros(1, 2, 5, dtype=dtype))
    assert (out[:, :, [0, 1, 3, 4]] != 0).all()
    assert all(tensor.grad.isfinite().all() for tensor in (queries, keys, values))


@pytest.mark.parametrize("mask", [None, boolean_mask(6, 6)], ids=["all", "masked"])
def test_attention_weights_are_the_ones_that_attention_uses(mask):
    queries, keys, values = (randn(2, 3, 6, 4, seed=seed) for seed in range(3))
    weights = attention_weights(queries, keys, scale=0.7, mask=mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64))
    if mask is not None:
        assert (weights[..., ~mask] == 0).all()
    out = DotProductAttention(0.7)(queries, keys, values, mask)
    torch.testing.assert_close(weights @ values, out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["dropout", "projection_dropout"])
def test_attention_drops_in_training_only(name, dtype):
    plain = randomise(MultiHeadAttention(12, 3)).to(dtype)
    dropping = MultiHeadAttention(12, 3, **{name: 0.5}).to(dtype)
    dropping.load_state_dict(plain.state_dict())
    tokens = randn(2, 5, 12, dtype=dtype)
    torch.manual_seed(0)
    assert not torch.equal(dropping(tokens), dropping(tokens))
    assert torch.equal(dropping.eval()(tokens), plain(tokens))


def test_feed_forward_block_drops_after_the_activation_and_after_the_output():
    block = FeedForwardBlock(50, dropout=0.4)
    seen = []
    block.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.manual_seed(0)
    out = block(torch.randn(4, 50, 50))
    assert abs((seen[0] == 0).float().mean().item() - 0.4) < 0.02
    assert abs((out == 0).float().mean().item() - 0.4) < 0.03
    assert not (block.eval()(torch.randn(4, 50, 50)) == 0).any()


def test_drop_path_leaves_out_whole_images_and_scales_the_others():
    branch = randn(64, 3, 4)
    torch.manual_seed(0)
    out = DropPath(0.25)(branch)
    kept = (out != 0).flatten(1).any(1)
    assert 0 < kept.sum() < 64
    torch.testing.assert_close(out, branch / 0.75 * kept[:, None, None])


WRONG = {"dropout": 1.0, "expansion": 0.0, "activation": "mish"}


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda: MultiHeadAttention(8, 2, dropout=1.5, projection_dropout=-1.0), ["dropout", "projection_dropout"]),
        (lambda: MultiHeadAttention(8, 0), ["num_heads"]),
        (lambda: MultiHeadAttention(8, 2, dim_head=0), ["num_heads"]),
        (lambda: DropPath(1.0), ["p"]),
        (lambda: FeedForwardBlock(8, **WRONG), [*WRONG]),
        (lambda: SwiGLU(8, **WRONG), [*WRONG]),
        (lambda: PackedSwiGLU(8, **WRONG), [*WRONG]),
    ],
)
def test_values_that_cannot_work_are_refused_when_the_block_is_made(make, keys):
    with pytest.raises(UserError) as caught:
        make()
    assert [problem.split("=")[0] for problem in caught.value.problems] == keys


SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 8, "depth": 2, "num_heads": 2, "num_classes": 3}


def test_a_block_of_the_user_s_own_gets_all_that_the_others_get():
    class Gated(NamedSequential):
        def __init__(self, emb_size, attention, feed_forward, norm, layer_scale, drop_path, *, gain=1.0):
            super().__init__(norm=norm(emb_size), attention=attention, feed_forward=feed_forward)
            self.given = (emb_size, layer_scale, drop_path, gain)

    vit = ViT(**SMALL, block=partial(Gated, gain=0.5), layer_scale=0.1, drop_path=0.4, norm=RMSNorm)
    assert [block.given for block in vit.encoder] == [(8, 0.1, 0.0, 0.5), (8, 0.1, pytest.approx(0.4), 0.5)]
    assert isinstance(vit.encoder[0].norm, RMSNorm)
    with pytest.raises(UserError, match="block: Gated is no block of ours"):
        to_reference(vit, family="timm")


def test_attention_dropout_zeroes_the_asked_share_and_scales_the_rest():
    torch.manual_seed(0)
    zeros, values = torch.zeros(4, 8, 32, 32), torch.eye(32).expand(4, 8, 32, 32)
    weights = DotProductAttention(1.0, dropout=0.25)(zeros, zeros, values) * 32
    assert abs((weights == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / weights.numel()) ** 0.5
    assert torch.allclose(weights[weights != 0], torch.tensor(1 / 0.75))
