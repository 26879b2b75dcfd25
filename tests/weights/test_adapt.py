import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.layers.patch_embed import resample_patch_embed
from timm.models._manipulate import adapt_input_conv

from vit_lightning.errors import UserError
from vit_lightning.models.positions import LearnedPatchPositions
from vit_lightning.models.vit import ViT
from vit_lightning.weights.adapt import adapt
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.init_from import InitialWeights

TINY = {"image_size": 32, "patch_size": 8, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
TABLE, KERNEL = "patch_embedding.positions.table", "patch_embedding.projection.conv.weight"


def vit(**changes):
    made = ViT(**{**TINY, **changes})
    if made.num_classes:
        torch.nn.init.normal_(made.head.linear.weight)
    return made


def test_names_of_classes_that_are_no_outputs_are_left_out():
    """Three names beside a head of two outputs: there is no third row."""
    network = torch.nn.Sequential()
    network.add_module("body", torch.nn.Flatten())
    network.add_module("head", torch.nn.Linear(12, 2))
    file = WeightsFile("memory", None, network.state_dict(), {"class_names": ["a", "b", "c"]})
    found = InitialWeights(file, make_network=None).fitted(network, "bicubic", class_names=["c", "b"])
    assert "head kept: the data has the classes c, b; init_from=memory has 2 without names" in found.notes[-1]
    assert torch.equal(found.adapted.state["head.weight"], network.head.weight)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("tokens", [{}, {"register_tokens": 3}, {"class_token": False, "pool": "mean"}], ids=str)
def test_positions_are_resized_as_in_timm_and_tokens_before_them_kept(tokens, interpolation):
    source, target = vit(**tokens), vit(image_size=(48, 24), **tokens)
    adapted = adapt(target, source, interpolation=interpolation)
    prefix = source.prefix_tokens
    theirs = resample_abs_pos_embed(
        source.state_dict()[TABLE], [6, 3], num_prefix_tokens=prefix, interpolation=interpolation
    )
    torch.testing.assert_close(adapted.state[TABLE], theirs, rtol=0, atol=1e-6)
    assert adapted.resized == {TABLE: f"positions 4x4 -> 6x3 {interpolation}"}
    back = adapt(vit(**tokens), target)
    assert back.state[TABLE].shape == source.state_dict()[TABLE].shape


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_channels_are_those_of_timm(channels):
    source = vit()
    adapted = adapt(vit(in_channels=channels), source)
    torch.testing.assert_close(adapted.state[KERNEL], adapt_input_conv(channels, source.state_dict()[KERNEL]))


@pytest.mark.parametrize("patch", [(4, 4), (16, 8), (16, 16)])
def test_patches_are_those_of_timm_and_resized_images_keep_their_projections(patch):
    source, target = vit(), vit(image_size=(4 * patch[0], 4 * patch[1]), patch_size=patch)
    adapted = adapt(target, source)
    kernel = source.state_dict()[KERNEL]
    torch.testing.assert_close(adapted.state[KERNEL], resample_patch_embed(kernel, list(patch)), rtol=1e-4, atol=1e-5)
    assert list(adapted.resized) == [KERNEL]
    if patch == (16, 16):
        adapted.load(target)
        patches = torch.rand(2, 3, 8, 8).repeat(1, 1, 4, 4)
        larger = F.interpolate(patches[..., :8, :8], (16, 16), mode="bicubic", antialias=True).repeat(1, 1, 4, 4)
        expected = source.patch_embedding.projection(patches)
        torch.testing.assert_close(target.patch_embedding.projection(larger), expected, rtol=1e-4, atol=1e-4)


def test_a_new_head_and_another_last_norm_are_said():
    source, target = vit(), vit(num_classes=3, pool="mean", final_norm="after_pool")
    adapted = adapt(target, source)
    assert set(adapted.new) == {"head.linear.weight", "head.linear.bias", "head.norm.weight", "head.norm.bias"}
    assert set(adapted.left_out) == {"norm.weight", "norm.bias"}
    assert adapted.sentence().endswith("new last norm, new head (5 -> 3 classes), last norm left out")
    with pytest.raises(UserError, match=r"head.linear.weight as 5x16, the model as 3x16"):
        adapt(target, source, new_head=False)
    features = adapt(vit(num_classes=0), source)
    assert set(features.left_out) == {"head.linear.weight", "head.linear.bias"}


def test_tokens_that_one_side_has_are_new_or_left_out():
    source, target = vit(), vit(distillation_token=True)
    adapted = adapt(target, source)
    old, new = source.state_dict()[TABLE], adapted.state[TABLE]
    assert torch.equal(new[:, 0], old[:, 0])
    assert torch.equal(new[:, 2:], old[:, 1:])
    assert not new[:, 1].any()
    assert "patch_embedding.distillation_token.token" in adapted.new
    gone = adapt(vit(class_token=False, pool="mean"), source)
    assert torch.equal(gone.state[TABLE], old[:, 1:])
    assert gone.left_out == {"patch_embedding.class_token.token": "class token left out"}
    patches = adapt(vit(positions=LearnedPatchPositions), source)
    assert torch.equal(patches.state[TABLE], old[:, 1:])


def test_everything_else_is_named_at_once():
    with pytest.raises(UserError) as caught:
        adapt(vit(emb_size=8, depth=2), vit(layer_scale=0.1))
    text = "\n".join(caught.value.problems)
    assert "it lacks encoder.1.attention.fn.norm.weight" in text
    assert "it has norm.weight as 16, the model as 8" in text
    assert "it has encoder.0.attention.fn.layer_scale.scale, which the model lacks" in text
    assert f"it has {TABLE} as 1x17x16, the model as 1x17x8" in text


def test_a_network_of_timm_gets_a_new_classifier_and_resized_positions():
    make = timm.models.VisionTransformer
    given = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "reg_tokens": 2}
    source = make(img_size=32, num_classes=5, **given)
    target = make(img_size=(48, 16), num_classes=3, in_chans=1, **given)
    adapted = adapt(target, source.state_dict())
    assert set(adapted.new) == {"head.weight", "head.bias"}
    assert set(adapted.resized) == {"pos_embed", "patch_embed.proj.weight"}
    theirs = resample_abs_pos_embed(source.pos_embed, [6, 2], num_prefix_tokens=3)
    torch.testing.assert_close(adapted.state["pos_embed"], theirs, rtol=0, atol=1e-6)
    adapted.load(target)
    assert torch.equal(target.cls_token, source.cls_token)
