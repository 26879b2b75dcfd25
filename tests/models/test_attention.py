from functools import partial

import pytest
import torch
from tensors import operators, randn, randomise
from timm import layers

from vit_lightning import ViT
from vit_lightning.errors import UserError
from vit_lightning.models.attention import MultiHeadAttention, RotaryAttention, SeparateAttention
from vit_lightning.models.positions import RotaryPositions


def vit(**options):
    sizes = {"image_size": (8, 12), "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return ViT(**{**sizes, "attention": RotaryAttention, "positions": "none", **options})


@pytest.mark.parametrize("options", [{}, {"temperature": 100.0}, {"reference_grid": (4, 4)}], ids=str)
def test_rotary_attention_equals_timm_s(options):
    ours = RotaryAttention(16, 2, **options)
    ours.set_grid((2, 3), 1)
    theirs = layers.AttentionRope(16, 2, qkv_bias=True, num_prefix_tokens=1)
    randomise(ours).double()
    names = {"qkv": "qkv", "projection": "proj"}
    state = ours.state_dict()
    theirs.double().load_state_dict({f"{names[n.split('.')[0]]}.{n.split('.')[1]}": t for n, t in state.items()})
    rope = layers.RotaryEmbeddingCat(
        8,
        in_pixels=False,
        temperature=options.get("temperature", 10_000.0),
        feat_shape=[2, 3],
        ref_feat_shape=options.get("reference_grid"),
    )
    tokens = randn(2, 7, 16)
    # timm has its angles in float32
    torch.testing.assert_close(ours(tokens), theirs(tokens, rope=rope.get_embed().double()), rtol=0, atol=1e-6)
    assert not torch.allclose(ours(tokens), plain(ours, tokens), atol=1e-3)


def plain(attention, tokens):
    same = MultiHeadAttention(16, 2).double()
    same.load_state_dict(attention.state_dict())
    return same(tokens)


def test_rotary_positions_of_pixels_equal_timm_s():
    heads = randn(2, 3, 7, 8)
    ours = RotaryPositions((2, 3), 8, 1, max_resolution=16.0).double()
    rope = layers.RotaryEmbeddingCat(8, max_res=16, feat_shape=[2, 3]).get_embed().double()
    expected = torch.cat([heads[:, :, :1], layers.apply_rot_embed_cat(heads[:, :, 1:], rope)], dim=2)
    torch.testing.assert_close(ours(heads), expected, rtol=0, atol=1e-5)  # angles up to 8 pi in float32


@pytest.mark.parametrize("bias", [True, False])
def test_gates_of_elements_are_timm_s(bias):
    ours = randomise(MultiHeadAttention(12, 3, gate="elements", norm=torch.nn.LayerNorm, qkv_bias=bias)).double()
    more = {"gated": True, "scale_norm": True, "norm_layer": torch.nn.LayerNorm}
    theirs = layers.Attention(12, 3, qkv_bias=bias, **more).double()
    theirs.load_state_dict({name.replace("projection", "proj"): weight for name, weight in ours.state_dict().items()})
    tokens = randn(2, 7, 12)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [MultiHeadAttention, SeparateAttention])
def test_gates_of_heads_are_one_number_for_each(kind):
    ours = randomise(kind(12, 3, gate="heads")).double()
    tokens = randn(2, 7, 12)
    outputs = ours.attend(*ours.heads(tokens))
    gates = torch.sigmoid(tokens @ ours.gate.weight.T + ours.gate.bias)
    expected = torch.cat([outputs[:, head] * gates[..., head : head + 1] for head in range(3)], dim=-1)
    torch.testing.assert_close(ours(tokens), ours.projection(expected), rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="gate=head must be one of elements, heads"):
        kind(12, 3, gate="head")


def test_vit_tells_rotary_attention_its_registers():
    attention = partial(RotaryAttention, register_temperature=100.0)
    network = vit(register_tokens=4, attention=attention)
    positions = network.encoder[0].attention.fn.attention.positions
    assert (positions.prefix_tokens, len(positions.table[0])) == (1, 4 + 2 * 3)


def test_rotary_angles_are_exact_in_float64_and_kept_in_bfloat16():
    network = vit().bfloat16().double()
    positions = network.encoder[0].attention.fn.attention.positions
    assert torch.equal(positions.table, RotaryPositions((2, 3), 8).double().table)
    half = RotaryPositions((40, 40), 8).bfloat16()
    heads = randn(1, 1, 1600, 8)
    exact = RotaryPositions((40, 40), 8).double()(heads)
    torch.testing.assert_close(half(heads.bfloat16()).double(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sines_and_cosines_are_made_once_for_a_grid_with_the_bits_of_their_angles(dtype):
    positions = RotaryPositions((4, 5), 8, 1).to(dtype)
    angles = positions.exact.to(torch.promote_types(dtype, torch.float32))
    heads = randn(2, 3, 21, 8, dtype=dtype)
    first, second = heads[:, :, 1:, ::2], heads[:, :, 1:, 1::2]
    sine, cosine = angles.sin().to(dtype), angles.cos().to(dtype)
    turned = positions(heads)[:, :, 1:]
    assert torch.equal(turned[..., ::2], first * cosine - second * sine)
    assert torch.equal(turned[..., 1::2], second * cosine + first * sine)
    assert not {"sin", "cos"} & operators(lambda: positions(heads)).keys()


def test_heads_that_are_not_projected_are_as_wide_as_the_tokens():
    with pytest.raises(UserError, match="projection=False: the heads are 8 wide"):
        MultiHeadAttention(12, 2, dim_head=4, projection=False)
