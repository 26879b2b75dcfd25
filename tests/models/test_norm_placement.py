"""Blocks whose norms stand elsewhere, and BatchNorm, each against code that others wrote."""

from functools import partial

import pytest
import torch
from tensors import randn, randomise
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from torch import Tensor, nn

from vit_lightning import UserError, ViT, to_reference
from vit_lightning.models.attention import MultiHeadAttention
from vit_lightning.models.blocks import (
    CompactBlock,
    ParallelBlock,
    PostNormBlock,
    ResPostNormBlock,
    SandwichNormBlock,
    TransformerEncoderBlock,
)
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.layers import BatchNorm, DropPath, LayerNorm, RMSNorm
from vit_lightning.weights.options import build, describe, model_config

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 8, "depth": 3, "num_heads": 2, "num_classes": 3}
BLOCKS = [CompactBlock, PostNormBlock, ResPostNormBlock, SandwichNormBlock, ParallelBlock]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def ours(block, **attention):
    """A block in float64 of width 12 with 3 heads, and a hidden layer of 24."""
    eps = partial(LayerNorm, eps=1e-5)
    parts = MultiHeadAttention(12, 3, **attention), FeedForwardBlock(12, expansion=2)
    return block(12, *parts, eps).double().eval()


def load(block: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """Loads weights by the beginnings of their names."""
    state = {}
    for name, weight in theirs.state_dict().items():
        first = next(first for first in names if name.startswith(first))
        state[names[first] + name.removeprefix(first)] = weight
    block.load_state_dict(state)


ATTENTION, FEED_FORWARD = "attention.fn", "feed_forward.fn"
TORCH = {
    "self_attn.in_proj_": f"{ATTENTION}.attention.qkv.",
    "self_attn.out_proj": f"{ATTENTION}.attention.projection",
    "linear1": f"{FEED_FORWARD}.feed_forward.expand",
    "linear2": f"{FEED_FORWARD}.feed_forward.contract",
}
TIMM = {
    "attn.qkv": f"{ATTENTION}.attention.qkv",
    "attn.proj": f"{ATTENTION}.attention.projection",
    "mlp.fc1": f"{FEED_FORWARD}.feed_forward.expand",
    "mlp.fc2": f"{FEED_FORWARD}.feed_forward.contract",
}
WITHIN = f"{ATTENTION}.norm", f"{FEED_FORWARD}.norm"
OF_TORCH = partial(nn.TransformerEncoderLayer, 12, 3, 24, 0.0, "gelu", batch_first=True)


@pytest.mark.parametrize(
    ("block", "make", "names", "norms"),
    [
        (PostNormBlock, OF_TORCH, TORCH, ("attention_norm", "feed_forward_norm")),
        (TransformerEncoderBlock, partial(OF_TORCH, norm_first=True), TORCH, WITHIN),
        (ResPostNormBlock, lambda: ResPostBlock(12, 3, mlp_ratio=2, qkv_bias=True), TIMM, WITHIN),
    ],
)
def test_places_of_norms_are_those_of_torch_and_timm(block, make, names, norms):
    theirs, found = randomise(make().double()).eval(), ours(block)
    for norm in (theirs.norm1, theirs.norm2):
        norm.eps = 1e-5
    load(found, theirs, {**names, "norm1": norms[0], "norm2": norms[1]})
    tokens = randn(2, 5, 12).requires_grad_()  # without gradients torch takes another way
    torch.testing.assert_close(found(tokens), theirs(tokens), **EXACT)


def test_parallel_is_timm_s_block_of_vit_22b():
    theirs = randomise(ParallelScalingBlock(12, 3, mlp_ratio=2, qk_norm=True).double()).eval()
    for norm in (theirs.in_norm, theirs.q_norm, theirs.k_norm):
        norm.eps = 1e-5
    found = ours(ParallelBlock, qkv_bias=False, qk_norm=partial(LayerNorm, eps=1e-5))
    state = theirs.state_dict()
    expand, qkv = state.pop("in_proj.weight").split([24, 36])
    names = {
        "mlp_bias": "parts.feed_forward.expand.bias",
        "in_norm": "norm",
        "q_norm": "parts.attention.query_norm",
        "k_norm": "parts.attention.key_norm",
        "attn_out_proj": "parts.attention.projection",
        "mlp_out_proj": "parts.feed_forward.contract",
    }
    state |= {"parts.feed_forward.expand.weight": expand, "parts.attention.qkv.weight": qkv}
    for name in [name for name in state if not name.startswith("parts.") and "qkv_bias" not in name]:
        first = next(first for first in names if name.startswith(first))
        state[names[first] + name.removeprefix(first)] = state.pop(name)
    found.load_state_dict({f"parallel.fn.{name}": value for name, value in state.items() if "qkv_bias" not in name})
    torch.testing.assert_close(found(randn(2, 5, 12)), theirs(randn(2, 5, 12)), **EXACT)


def test_sandwich_norm_is_that_of_glm_4():
    glm4 = pytest.importorskip("transformers.models.glm4.modeling_glm4")
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4, "pad_token_id": 0}
    theirs = randomise(glm4.Glm4DecoderLayer(glm4.Glm4Config(**sizes, intermediate_size=24), 0).double()).eval()
    norm = partial(RMSNorm, eps=theirs.input_layernorm.variance_epsilon)
    found = SandwichNormBlock(12, MultiHeadAttention(12, 3), FeedForwardBlock(12), norm).double().eval()
    first, second = found.attention.fn, found.feed_forward.fn

    class Attended(nn.Module):
        def forward(self, hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
            return first.attention(hidden_states), None

    pairs = (first.norm, theirs.input_layernorm), (first.output_norm, theirs.post_self_attn_layernorm)
    pairs += (second.norm, theirs.post_attention_layernorm), (second.output_norm, theirs.post_mlp_layernorm)
    for one, other in pairs:
        one.load_state_dict(other.state_dict())
    theirs.self_attn, theirs.mlp = Attended(), second.feed_forward
    expected = theirs(randn(2, 5, 12))
    # its norms compute in float32
    torch.testing.assert_close(found(randn(2, 5, 12)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_torch_s_over_images_and_tokens(training):
    norm, theirs = (randomise(make.double()) for make in (BatchNorm(6), nn.BatchNorm1d(6)))
    for step in range(3):
        tokens = randn(4, 5, 6, seed=step) + step
        norm(tokens), theirs(tokens.flatten(0, 1))
    norm.train(training), theirs.train(training)
    torch.testing.assert_close(norm(tokens), theirs(tokens.flatten(0, 1)).view(4, 5, 6), **EXACT)
    assert norm(tokens[:, 0]).shape == (4, 6)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    assert isinstance(synchronised.channels, nn.SyncBatchNorm)


@pytest.mark.parametrize("block", BLOCKS)
def test_each_branch_has_layer_scale_and_the_drop_path_of_its_block(block):
    vit = ViT(**SMALL, block=block, layer_scale=0.3, drop_path=0.4)
    for number, each in enumerate(vit.encoder):
        branches = 1 if block is ParallelBlock else 2
        rates = [module.p for module in each.modules() if isinstance(module, DropPath)]
        assert rates == ([] if number == 0 else pytest.approx([0.2 * number] * branches))
        assert sum(name.endswith("layer_scale.scale") for name in each.state_dict()) == branches


@pytest.mark.parametrize("block", [TransformerEncoderBlock, *BLOCKS])
def test_a_block_alone_works_as_in_the_tutorial(block):
    assert block()(torch.zeros(1, 3, 768)).shape == (1, 3, 768)
    assert block(emb_size=24)(torch.zeros(1, 3, 24)).shape == (1, 3, 24)


PARTS = {"layer_scale": 0.1, "drop_path": 0.2, "attention": partial(MultiHeadAttention, dim_head=6)}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("more", [{}, PARTS, {"norm": BatchNorm}], ids=str)
def test_a_config_of_the_network_names_its_block(block, more):
    """As checkpoints and exports keep it; other families have none of these blocks."""
    vit = ViT(**SMALL, block=block, **more)
    config = model_config(vit)
    assert config["init_args"]["block"] == {"class_path": f"vit_lightning.{block.__name__}"}
    again = build(describe(vit))
    assert describe(again) == describe(vit)
    if "norm" not in more:
        assert again.state_dict().keys() == vit.state_dict().keys()
        with pytest.raises(UserError, match=rf"block={describe(vit)['block']}: timm cannot express it"):
            to_reference(vit, family="timm")


def test_an_image_of_another_size_says_what_fits():
    vit = ViT(**SMALL).eval()
    with pytest.raises(UserError, match=r"images of 12x16 pixels, but the positions are those of 8x8: resize them"):
        vit(torch.zeros(1, 3, 12, 16))
    with pytest.raises(UserError, match="images of 12x16"):
        vit.forward_features(torch.zeros(1, 3, 12, 16))
    assert ViT(**SMALL, positions="none")(torch.zeros(1, 3, 12, 16)).shape == (1, 3)
