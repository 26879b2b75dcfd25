import math
from functools import partial

import pytest
import torch
from tensors import rand, randomise
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from vit_lightning.errors import UserError
from vit_lightning.models.attention import MultiHeadAttention, RotaryAttention
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.initialisation import INITIALISATIONS
from vit_lightning.models.layers import DropPath, LayerNorm, LayerScale
from vit_lightning.models.patches import ClassToken, ConvProjection, LinearProjection
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions, SinCos2dPositions
from vit_lightning.models.resize import resize
from vit_lightning.models.vit import ViT

SMALL = {"image_size": 16, "patch_size": 4, "emb_size": 32, "depth": 2, "num_heads": 4, "num_classes": 10}

# from torchvision's tables, timm's CSV and the closed form, each with a head of 1000 classes
COUNTS = [
    ("Ti/16", 224, 5_717_416),
    ("S/16", 224, 22_050_664),
    ("B/16", 224, 86_567_656),
    ("B/32", 224, 88_224_232),
    ("L/16", 224, 304_326_632),
    ("L/32", 224, 306_535_400),
    ("H/14", 224, 632_045_800),
    ("Ti/16", 384, 5_790_376),
    ("S/16", 384, 22_196_584),
    ("B/16", 384, 86_859_496),
    ("B/32", 384, 88_297_192),
    ("L/16", 384, 304_715_752),
    ("L/32", 384, 306_632_680),
    ("H/14", 518, 633_470_440),
]


def small(**options):
    return ViT(**SMALL | options)


def on_meta(*args, **options):
    with torch.device("meta"):
        return ViT(*args, **options)


def count(network):
    return sum(weight.numel() for weight in network.parameters())


def torchvision_names(depth, representation):
    names = {
        "patch_embedding.projection.conv": "conv_proj",
        "patch_embedding.class_token.token": "class_token",
        "patch_embedding.positions.table": "encoder.pos_embedding",
        "norm": "encoder.ln",
        "head.linear": "heads.head",
    }
    if representation:
        names["head.representation.linear"] = "heads.pre_logits"
    for i in range(depth):
        theirs = f"encoder.layers.encoder_layer_{i}"
        names |= {
            f"encoder.{i}.attention.fn.norm": f"{theirs}.ln_1",
            f"encoder.{i}.attention.fn.attention.qkv.weight": f"{theirs}.self_attention.in_proj_weight",
            f"encoder.{i}.attention.fn.attention.qkv.bias": f"{theirs}.self_attention.in_proj_bias",
            f"encoder.{i}.attention.fn.attention.projection": f"{theirs}.self_attention.out_proj",
            f"encoder.{i}.feed_forward.fn.norm": f"{theirs}.ln_2",
            f"encoder.{i}.feed_forward.fn.feed_forward.expand": f"{theirs}.mlp.0",
            f"encoder.{i}.feed_forward.fn.feed_forward.contract": f"{theirs}.mlp.3",
        }
    return names


def theirs_for(name, names):
    if name in names:
        return names[name]
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}"


@pytest.mark.parametrize(("preset", "image_size", "parameters"), COUNTS)
def test_presets_have_the_published_number_of_parameters(preset, image_size, parameters):
    assert count(on_meta(preset, image_size=image_size)) == parameters


@pytest.mark.parametrize(("size", "num_heads"), [("Ti", 3), ("S", 6), ("B", 12), ("L", 16), ("H", 16)])
def test_presets_have_the_published_number_of_heads(size, num_heads):
    blocks = on_meta(f"{size}/14").encoder
    assert {block.attention.fn.attention.num_heads for block in blocks} == {num_heads}


def test_without_a_preset_the_sizes_are_those_of_b16():
    assert count(on_meta()) == 86_567_656


@pytest.mark.parametrize("representation_size", [None, 7])
@pytest.mark.parametrize("num_heads", [1, 3, 12])
@pytest.mark.parametrize("patch_size", [2, 4])
def test_logits_and_gradients_equal_torchvisions(patch_size, num_heads, representation_size):
    theirs = VisionTransformer(
        image_size=8,
        patch_size=patch_size,
        num_layers=3,
        num_heads=num_heads,
        hidden_dim=24,
        mlp_dim=96,
        num_classes=5,
        representation_size=representation_size,
    )
    theirs = randomise(theirs.double(), scale=0.3)
    ours = ViT(
        image_size=8,
        patch_size=patch_size,
        emb_size=24,
        depth=3,
        num_heads=num_heads,
        num_classes=5,
        representation_size=representation_size,
    ).double()
    names = torchvision_names(3, representation_size is not None)
    state = theirs.state_dict()
    ours.load_state_dict({name: state[theirs_for(name, names)] for name in ours.state_dict()})
    assert count(ours) == count(theirs)

    inputs = [rand(2, 3, 8, 8).requires_grad_() for _ in range(2)]
    logits, expected = ours(inputs[0]), theirs(inputs[1])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    direction = rand(2, 5, seed=1)
    logits.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-9)
    for name, weight in ours.named_parameters():
        gradient = theirs.get_parameter(theirs_for(name, names)).grad
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "none"])
@pytest.mark.parametrize(("class_token", "pool"), [(True, "cls"), (True, "mean"), (False, "mean")])
def test_class_token_and_pool_set_the_number_of_tokens_and_not_of_logits(class_token, pool, positions):
    network = small(class_token=class_token, pool=pool, positions=positions)
    batch = rand(2, 3, 16, 16, dtype=torch.float32)
    assert network.forward_features(batch).shape == (2, 16 + class_token, 32)
    assert network(batch).shape == (2, 10)


@pytest.mark.parametrize(("class_token", "pool"), [(True, "cls"), (True, "mean"), (False, "mean")])
def test_features_are_the_pooled_tokens_after_the_last_norm(class_token, pool):
    network = randomise(small(class_token=class_token, pool=pool, num_classes=0).double(), scale=0.3)
    tokens = network.forward_features(rand(2, 3, 16, 16))
    expected = tokens[:, 0] if pool == "cls" else tokens[:, -16:].mean(dim=1)
    torch.testing.assert_close(network(rand(2, 3, 16, 16)), expected, rtol=1e-12, atol=1e-12)


def test_tokens_after_the_last_norm_are_normalised():
    network = small(num_classes=0)
    tokens = network.forward_features(rand(2, 3, 16, 16, dtype=torch.float32))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 17), rtol=0, atol=1e-5)
    torch.testing.assert_close(tokens.var(-1, correction=0), torch.ones(2, 17), rtol=1e-2, atol=0)


def test_mean_pool_gives_the_class_token_no_gradient_without_attention():
    network = randomise(small(pool="mean", attention=lambda emb_size, num_heads: nn.Identity()), scale=0.3)
    network(rand(2, 3, 16, 16, dtype=torch.float32)).sum().backward()
    assert network.patch_embedding.class_token.token.grad.count_nonzero() == 0
    assert network.patch_embedding.positions.table.grad[:, 1:].count_nonzero() > 0


@pytest.mark.parametrize("patch_projection", ["conv", "linear"])
@pytest.mark.parametrize("positions", ["learned", "sincos2d"])
def test_rectangular_images_and_patches(positions, patch_projection):
    network = small(
        image_size=(8, 24), patch_size=(4, 6), in_channels=1, positions=positions, patch_projection=patch_projection
    )
    batch = rand(2, 1, 8, 24, dtype=torch.float32)
    assert network.forward_features(batch).shape == (2, 1 + 2 * 4, 32)
    assert network(batch).shape == (2, 10)
    assert (network.image_size, network.patch_size, network.in_channels) == ((8, 24), (4, 6), 1)


def test_conv_and_linear_patch_projection_give_equal_logits_for_equal_weights():
    conv = randomise(small().double(), scale=0.3)
    linear = small(patch_projection="linear").double()
    state = conv.state_dict()
    for kind in ("weight", "bias"):
        weight = state.pop(f"patch_embedding.projection.conv.{kind}")
        state[f"patch_embedding.projection.linear.{kind}"] = weight.flatten(1) if kind == "weight" else weight
    linear.load_state_dict(state)
    batch = rand(2, 3, 16, 16)
    torch.testing.assert_close(conv(batch), linear(batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("d", "r", "c"), [(32, 7, 10), (32, 64, 3)])
def test_representation_size_adds_its_layer_and_changes_the_head(d, r, c):
    difference = count(small(num_classes=c, representation_size=r)) - count(small(num_classes=0))
    assert difference == (d * r + r) + (r * c + c)


def test_features_of_a_network_with_representation_are_its_tanh():
    network = randomise(small(num_classes=0, representation_size=7), scale=0.3)
    features = network(rand(2, 3, 16, 16, dtype=torch.float32))
    assert features.shape == (2, 7)
    assert features.abs().max() <= 1


@pytest.mark.parametrize(("depth", "last"), [(2, 0.3), (5, 0.1), (12, 0.9)])
def test_drop_path_grows_linearly_from_zero_to_the_last_block(depth, last):
    network = small(depth=depth, drop_path=last)
    for i, block in enumerate(network.encoder):
        rates = [module.p for module in block.modules() if isinstance(module, DropPath)]
        assert rates == ([] if i == 0 else pytest.approx([last * i / (depth - 1)] * 2, rel=1e-6))


def test_no_drop_path_no_drop_path_modules():
    assert not any(isinstance(module, DropPath) for module in small().modules())


def test_embedding_dropout_reaches_the_patch_embedding():
    assert small(emb_dropout=0.4).patch_embedding.dropout.p == 0.4


def test_dropout_and_drop_path_change_training_and_not_evaluation():
    network = randomise(small(emb_dropout=0.1, drop_path=0.5), scale=0.3)
    batch = rand(4, 3, 16, 16, dtype=torch.float32)
    torch.manual_seed(0)
    assert not torch.equal(network(batch), network(batch))
    network.eval()
    assert torch.equal(network(batch), network(batch))


def test_layer_scale_starts_at_its_value_in_both_branches_of_each_block():
    scales = [module.scale for module in small(layer_scale=0.01).modules() if isinstance(module, LayerScale)]
    assert len(scales) == 4
    assert all(torch.equal(scale, torch.full((32,), 0.01)) for scale in scales)


def test_class_token_head_and_biases_start_at_zero_and_norms_at_one():
    network = small(representation_size=7)
    zeros = [network.patch_embedding.class_token.token, network.head.linear.weight]
    zeros += [weight for name, weight in network.named_parameters() if name.endswith("bias")]
    assert all(weight.count_nonzero() == 0 for weight in zeros)
    norms = [module for module in network.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 5
    assert all((norm.weight == 1).all() for norm in norms)


def test_positions_start_normal_with_deviation_one_fiftieth():
    torch.manual_seed(0)
    table = small(image_size=64, emb_size=64).patch_embedding.positions.table
    assert abs(table.mean().item()) < 5 * 0.02 / table.numel() ** 0.5
    assert abs(table.std().item() / 0.02 - 1) < 5 / (2 * table.numel()) ** 0.5
    assert table.abs().max() > 3 * 0.02


def test_queries_keys_and_values_start_as_separate_xavier_matrices():
    torch.manual_seed(0)
    for block in small(emb_size=64).encoder:
        parts = block.attention.fn.attention.qkv.weight.detach().split(64)
        assert len(parts) == 3
        for part in parts:
            bound = math.sqrt(6 / (64 + 64))
            assert 0.99 * bound < part.abs().max() <= bound
            assert abs(part.var().item() / (bound**2 / 3) - 1) < 0.1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.1.attention.fn.attention.projection", (32, 32)),
        ("encoder.1.feed_forward.fn.feed_forward.expand", (128, 32)),
        ("encoder.1.feed_forward.fn.feed_forward.contract", (32, 128)),
    ],
)
def test_other_matrices_start_xavier_uniform(name, shape):
    torch.manual_seed(0)
    weight = small(representation_size=50).get_submodule(name).weight.detach()
    bound = math.sqrt(6 / sum(shape))
    assert weight.shape == shape
    assert 0.98 * bound < weight.abs().max() <= bound
    assert abs(weight.var().item() / (bound**2 / 3) - 1) < 0.1


@pytest.mark.parametrize("patch_projection", ["conv", "linear"])
def test_patch_projection_starts_lecun_normal_cut_at_two_deviations(patch_projection):
    torch.manual_seed(0)
    network = small(emb_size=128, patch_size=8, patch_projection=patch_projection)
    weight = network.patch_embedding.projection[0 if patch_projection == "conv" else 1].weight.detach()
    deviation = (3 * 8 * 8) ** -0.5
    assert abs(weight.std().item() / deviation - 1) < 5 / (2 * weight.numel()) ** 0.5
    assert 2.2 * deviation < weight.abs().max() <= 2 * deviation / 0.8796


def test_same_seed_same_weights_and_other_seed_other_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(small().parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_names_in_the_state_are_a_contract_with_checkpoints():
    block = "encoder.0."
    assert list(small(depth=1).state_dict()) == [
        "patch_embedding.projection.conv.weight",
        "patch_embedding.projection.conv.bias",
        "patch_embedding.class_token.token",
        "patch_embedding.positions.table",
        f"{block}attention.fn.norm.weight",
        f"{block}attention.fn.norm.bias",
        f"{block}attention.fn.attention.qkv.weight",
        f"{block}attention.fn.attention.qkv.bias",
        f"{block}attention.fn.attention.projection.weight",
        f"{block}attention.fn.attention.projection.bias",
        f"{block}feed_forward.fn.norm.weight",
        f"{block}feed_forward.fn.norm.bias",
        f"{block}feed_forward.fn.feed_forward.expand.weight",
        f"{block}feed_forward.fn.feed_forward.expand.bias",
        f"{block}feed_forward.fn.feed_forward.contract.weight",
        f"{block}feed_forward.fn.feed_forward.contract.bias",
        "norm.weight",
        "norm.bias",
        "head.linear.weight",
        "head.linear.bias",
    ]


def test_optional_parts_add_names_and_rename_nothing():
    plain = set(small(depth=1).state_dict())
    more = set(small(depth=1, layer_scale=0.1, drop_path=0.5, representation_size=7).state_dict())
    assert more - plain == {
        "encoder.0.attention.fn.layer_scale.scale",
        "encoder.0.feed_forward.fn.layer_scale.scale",
        "head.representation.linear.weight",
        "head.representation.linear.bias",
    }
    assert plain < more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 5}, r"patch_size=5 does not divide image_size=16 .*1, 2, 4, 8, 16"),
        ({"patch_size": (4, 3)}, r"patch_size=4x3 does not divide image_size=16"),
        ({"image_size": (16, 18)}, r"patch_size=4 does not divide image_size=16x18 .*1, 2\)"),
        ({"patch_size": 32}, r"patch_size=32 is larger than image_size=16"),
        ({"patch_size": (4, 32)}, r"patch_size=4x32 is larger than image_size=16"),
        ({"patch_size": 0}, r"patch_size=0 must be at least 1"),
        ({"image_size": (0, 16)}, r"image_size=0x16 .*must be at least 1"),
        ({"class_token": False}, r"pool=cls needs class_token=true"),
        ({"depth": 0}, r"depth=0 must be at least 1"),
        ({"depth": 1_000_000}, r"depth=1000000 must be at most 500"),
        ({"image_size": 8192, "patch_size": 4}, r"image_size=8192 has 4,194,304 patches .*at most 1,048,576"),
        ({"emb_size": 0}, r"emb_size=0 must be at least 1"),
        ({"emb_size": -32}, r"emb_size=-32 must be at least 1"),
        ({"num_heads": 0}, r"num_heads=0 must be at least 1"),
        ({"num_heads": 5}, r"num_heads=5 does not divide emb_size=32"),
        ({"in_channels": 0}, r"in_channels=0 must be at least 1"),
        ({"num_classes": -1}, r"num_classes=-1 must be at least 0"),
        ({"representation_size": 0}, r"representation_size=0 must be at least 1"),
        ({"drop_path": 1.0}, r"drop_path=1.0 must be at least 0 and below 1"),
        ({"drop_path": -0.1}, r"drop_path=-0.1 must be at least 0"),
        ({"drop_path": math.nan}, r"drop_path=nan must be at least 0"),
        ({"emb_dropout": 1.0}, r"emb_dropout=1.0 must be at least 0 and below 1"),
        ({"positions": "sincos2d", "emb_size": 34, "num_heads": 2}, r"emb_size=34 must be a multiple of 4"),
    ],
    ids=str,
)
def test_bad_sizes_are_errors_with_their_values(options, message):
    with pytest.raises(UserError, match=message) as raised:
        small(**options)
    assert len(raised.value.problems) == 1


def test_least_sizes_are_no_problem():
    network = ViT(
        image_size=1, patch_size=1, in_channels=1, num_classes=1, emb_size=4, depth=1, num_heads=1, positions="sincos2d"
    )
    assert network(torch.zeros(2, 1, 1, 1)).shape == (2, 1)


@pytest.mark.parametrize("emb_size", [4, 12, 36])
def test_sincos2d_takes_any_multiple_of_four(emb_size):
    network = small(emb_size=emb_size, num_heads=2, positions="sincos2d")
    assert network.patch_embedding.positions.table.shape == (17, emb_size)


@pytest.mark.parametrize("preset", ["X/16", "Ti", "Ti/", "Ti/0", "Ti/x", "Ti/-16", "ti/16", "Ti16", "/16", ""])
def test_unknown_presets_are_errors_with_the_choices(preset):
    with pytest.raises(UserError, match=r"preset=.* Ti, S, B, L, H, CRATE-T, .*such as Ti/16"):
        ViT(preset)


def test_all_problems_are_listed_at_once():
    with pytest.raises(UserError) as raised:
        ViT(
            image_size=30,
            patch_size=4,
            in_channels=0,
            num_classes=-1,
            emb_size=34,
            depth=0,
            num_heads=0,
            class_token=False,
            positions="sincos2d",
            representation_size=0,
            emb_dropout=-0.5,
            drop_path=1.0,
        )
    starts = [problem.split("=")[0] for problem in raised.value.problems]
    assert sorted(starts) == sorted(
        [
            "in_channels",
            "depth",
            "num_heads",
            "representation_size",
            "num_classes",
            "patch_size",
            "emb_dropout",
            "drop_path",
            "pool",
            "emb_size",
        ]
    )
    assert str(raised.value).splitlines() == raised.value.problems


def test_sizes_beside_a_preset_replace_its_own():
    network = ViT("Ti/16", image_size=8, patch_size=4, depth=1, num_heads=6, num_classes=2)
    assert (network.emb_size, network.depth, network.num_heads, network.patch_size) == (192, 1, 6, (4, 4))
    assert network.patch_embedding.projection.conv.weight.shape == (192, 3, 4, 4)
    assert network.patch_embedding.positions.table.shape == (1, 5, 192)
    assert len(network.encoder) == 1
    assert network.encoder[0].attention.fn.attention.num_heads == 6


def test_any_patch_size_goes_behind_the_slash():
    network = ViT("Ti/7", image_size=14, depth=1)
    assert network.patch_size == (7, 7)
    assert network.patch_embedding.projection.conv.kernel_size == (7, 7)


def test_blocks_are_made_by_the_given_callables_from_the_sizes():
    calls = []

    def record(name, make):
        def make_block(*args):
            if torch.get_default_device().type != "meta":  # there the arguments are only tried
                calls.append((name, args))
            return make(*args)

        return make_block

    network = small(
        image_size=(16, 24),
        in_channels=5,
        attention=record("attention", partial(MultiHeadAttention, qkv_bias=False)),
        feed_forward=record("feed_forward", partial(FeedForwardBlock, expansion=2.0)),
        norm=record("norm", partial(LayerNorm, eps=1e-3)),
        positions=record("positions", partial(SinCos2dPositions, temperature=100.0)),
        patch_projection=record("patch_projection", LinearProjection),
    )
    assert calls.count(("attention", (32, 4))) == 2
    assert calls.count(("feed_forward", (32,))) == 2
    assert calls.count(("norm", (32,))) == 5
    assert calls.count(("positions", ((4, 6), 32, 1))) == 1
    assert calls.count(("patch_projection", (5, (4, 4), 32))) == 1
    assert len(calls) == 11
    assert network.encoder[1].attention.fn.attention.qkv.bias is None
    assert network.encoder[1].feed_forward.fn.feed_forward.expand.out_features == 64
    assert {module.eps for module in network.modules() if isinstance(module, nn.LayerNorm)} == {1e-3}
    assert network.patch_embedding.positions.temperature == 100.0
    assert isinstance(network.patch_embedding.projection, LinearProjection)
    assert network(rand(2, 5, 16, 24, dtype=torch.float32)).shape == (2, 10)


def test_positions_callable_is_told_when_there_is_no_class_token():
    network = small(class_token=False, pool="mean", positions=LearnedPositions)
    assert network.patch_embedding.positions.table.shape == (1, 16, 32)
    assert network.patch_embedding.positions.table.count_nonzero() > 0


def test_foreign_blocks_slot_into_the_encoder():
    network = small(attention=lambda emb_size, num_heads: nn.Tanh(), feed_forward=lambda emb_size: nn.Sigmoid())
    randomise(network.double(), scale=0.3)
    tokens = rand(2, 17, 32)
    first = network.encoder[0]
    expected = tokens + first.attention.fn.norm(tokens).tanh()
    expected = expected + first.feed_forward.fn.norm(expected).sigmoid()
    torch.testing.assert_close(first(tokens), expected)


@pytest.mark.parametrize(
    ("options", "projection", "class_token", "positions"),
    [
        ({}, ConvProjection, ClassToken, LearnedPositions),
        ({"patch_projection": "linear", "positions": "sincos2d"}, LinearProjection, ClassToken, SinCos2dPositions),
        ({"positions": "none", "class_token": False, "pool": "mean"}, ConvProjection, None, None),
    ],
    ids=str,
)
def test_names_choose_the_parts_of_the_patch_embedding(options, projection, class_token, positions):
    embedding = small(**options).patch_embedding
    expected = [projection, class_token, positions, nn.Dropout]
    assert [type(child) for child in embedding] == [part for part in expected if part is not None]


def test_vectors_class_token_and_positions_take_no_decay():
    network = small(depth=1, layer_scale=0.1, representation_size=7)
    matrices = {
        f"{name}.weight" for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))
    }
    assert len(matrices) == 7
    assert network.no_decay() == {name for name, _ in network.named_parameters()} - matrices


def test_layer_index_counts_from_the_embedding_to_the_head():
    network = small(depth=11, representation_size=7)
    assert {network.layer_index(name) for name, _ in network.named_parameters()} == set(range(13))
    expected = {
        "patch_embedding.projection.conv.weight": 0,
        "patch_embedding.class_token.token": 0,
        "patch_embedding.positions.table": 0,
        "encoder.0.attention.fn.norm.weight": 1,
        "encoder.10.feed_forward.fn.feed_forward.contract.bias": 11,
        "norm.weight": 12,
        "head.representation.linear.weight": 12,
        "head.linear.bias": 12,
    }
    assert {name: network.layer_index(name) for name in expected} == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": "mean"},
        {"class_token": False, "pool": "mean", "positions": "sincos2d", "patch_projection": "linear"},
        {"layer_scale": 0.1, "representation_size": 16, "drop_path": 0.1},
    ],
    ids=str,
)
def test_training_lowers_the_loss_on_a_fixed_batch(options):
    torch.manual_seed(0)
    network = small(**options)
    batch, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(network(batch), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(10), rel=1e-6)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_every_parameter_gets_a_gradient(pool):
    network = randomise(small(pool=pool, layer_scale=0.1, representation_size=16), scale=0.3)
    network(rand(4, 3, 16, 16, dtype=torch.float32)).square().sum().backward()
    assert [name for name, weight in network.named_parameters() if weight.grad.count_nonzero() == 0] == []


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "none"])
def test_bfloat16_network_gives_bfloat16_near_float64(positions):
    torch.manual_seed(0)
    network = small(positions=positions, num_classes=0).bfloat16().eval()
    batch = rand(4, 3, 16, 16, dtype=torch.bfloat16)
    out = network(batch)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), network.double()(batch.double()), rtol=0, atol=0.1)


def test_what_blocks_refuse_is_told_with_all_else_and_with_their_key():
    with pytest.raises(UserError) as caught:
        ViT(
            image_size=30,
            patch_size=4,
            emb_size=34,
            num_heads=5,
            attention=partial(MultiHeadAttention, dropout=2.0),
            feed_forward=partial(FeedForwardBlock, dropout=2.0),
            positions=partial(SinCos2dPositions, temperature=100.0),
        )
    starts = [problem.split("=")[0] for problem in caught.value.problems]
    assert starts == ["patch_size", "attention.dropout", "num_heads", "feed_forward.dropout", "emb_size"]


def test_unknown_words_are_refused_in_python_too():
    with pytest.raises(UserError) as caught:
        ViT(pool="max", patch_projection="mlp", positions="rotary", initialisation="tim")
    assert caught.value.problems == [
        "pool=max must be one of cls, mean",
        "patch_projection=mlp must be one of conv, linear",
        "positions=rotary must be one of learned, sincos2d, none",
        f"initialisation=tim must be one of {', '.join(INITIALISATIONS)} (did you mean timm?)",
    ]


@pytest.mark.parametrize("positions", ["learned", LearnedPatchPositions, "sincos2d", "none", "rotary"])
def test_images_of_another_size_and_back(positions):
    attention = RotaryAttention if positions == "rotary" else MultiHeadAttention
    given = {"patch_size": (2, 4), "emb_size": 8, "depth": 1, "num_heads": 1, "num_classes": 3, "attention": attention}
    given["positions"] = "none" if positions == "rotary" else positions
    vit, larger = (ViT(image_size=size, **given).double().eval() for size in ((8, 8), (12, 8)))
    torch.nn.init.normal_(vit.head.linear.weight)
    state = vit.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    small, large = torch.randn(2, 3, 8, 8).double(), torch.randn(2, 3, 12, 8).double()
    expected = vit(small)
    with torch.inference_mode():
        vit.set_image_size((12, 8))
    resized = dict(state)
    if (table := resized.get("patch_embedding.positions.table")) is not None:
        prefix = table.shape[1] - 8
        resized["patch_embedding.positions.table"] = resize(table, (4, 2), (6, 2), prefix, "bicubic")
    larger.load_state_dict(resized)
    assert torch.equal(vit(large), larger(large))
    vit.train()(large).sum().backward()
    assert all(weight.grad is not None for weight in vit.parameters())
    vit.eval().set_image_size(8)
    assert torch.equal(vit(small), expected)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    with pytest.raises(UserError, match=r"patch_size=2x4 does not divide image_size=9"):
        vit.set_image_size(9)
