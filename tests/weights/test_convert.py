"""Weights and configs of families: strict checks, what a family cannot express, and errors that name what is wrong."""

import numpy as np
import pytest
import torch
from references import fresh, told

from vit_lightning import UserError, ViT
from vit_lightning.models.attention import RotaryAttention, SeparateAttention
from vit_lightning.models.patches import LinearProjection
from vit_lightning.weights import from_reference, to_reference
from vit_lightning.weights.convert import WRITTEN
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.identify import identify


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["timm", "google", "dinov2"])
def test_missing_unexpected_and_misshapen_tensors_are_named(family):
    _, state, config = fresh(family)
    names = [name for name in state if state[name].ndim and not name.endswith("mask_token")]  # which is not read
    missing, misshapen = names[0], names[-1]
    state["nobody.knows"] = torch.zeros(1)
    del state[missing]
    state[misshapen] = torch.zeros(*state[misshapen].shape, 3)
    with pytest.raises(UserError) as caught:
        from_reference(state, family=family, config=config)
    text = str(caught.value)
    assert f"{missing} is missing" in text
    assert "nobody.knows is unexpected" in text
    assert f"{misshapen} has shape" in text


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("timm", {"embed_dims": 3}, "config.embed_dims=3: timm has no such option"),
        ("timm", {"block_fn": "ParallelBlock"}, "config.block_fn=ParallelBlock: we do not have this option of timm"),
        ("timm", {"global_pool": "prr"}, "config.global_pool=prr: we have token, avg"),
        ("timm", {"act_layer": "mish"}, "config.act_layer=mish: we have gelu"),
        ("timm", {"norm_layer": "batchnorm_1e-5"}, "config.norm_layer=batchnorm_1e-5 must be layernorm_EPS"),
        ("big_vision", {"posemb": 3}, "config.posemb=3 must be text"),
        ("big_vision", {"patch_size": [4.0, 4.0]}, r"config.patch_size=\[4.0, 4.0\] must be a whole number"),
        ("hf", {"num_attention_heads": 0}, "num_heads=0 must be at least 1"),
        ("timm", {"qkv_bias": "False"}, "qkv_bias=False must be true or false"),
        ("timm", {"num_heads": 5}, "num_heads=5 must be at least 1 and divide"),
        ("timm", {"mlp_ratio": float("nan")}, "mlp_ratio=nan must be a number"),
    ],
    ids=str,
)
def test_options_that_we_do_not_have_are_named(family, change, message):
    _, state, config = fresh(family)
    with pytest.raises(UserError, match=message):
        from_reference(state, family=family, config={**config, **change})


def test_all_missing_arguments_are_named_at_once():
    with pytest.raises(UserError) as caught:
        from_reference({}, family="vit_pytorch", config={"image_size": 8})
    missing = [problem.split()[0] for problem in caught.value.problems]
    assert missing == [f"config.{name}" for name in ("patch_size", "num_classes", "dim", "depth", "heads", "mlp_dim")]


def test_unknown_families_and_those_that_are_read_alone_are_named():
    vit = ViT(image_size=8, patch_size=4, emb_size=16, depth=1, num_heads=2)
    for family in ("dinov2", "google"):
        with pytest.raises(UserError, match=f"family={family} is read alone: must be one of timm, torchvision, hf"):
            to_reference(vit, family=family)
    with pytest.raises(UserError, match=r"family=tim must be one of timm, torchvision, hf.*google"):
        from_reference({}, family="tim", config={})


def test_two_implementations_of_one_function_are_exported_alike():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    vit = ViT(**sizes, attention=SeparateAttention, patch_projection=LinearProjection)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    state, config = to_reference(vit, family="timm")
    plain = from_reference(state, family="timm", config=config)
    assert state["blocks.0.attn.qkv.weight"].shape == (48, 16)
    torch.testing.assert_close(plain(images(2, 3, 8, 8)), vit(images(2, 3, 8, 8)), rtol=0, atol=1e-5)


BEFORE_NORMS = {"patch_norm": None, "patch_token_norm": None, "final_norm": "after_pool"}
OLDER = {**BEFORE_NORMS, "version": "older", "blocks": "norm outside"}
SEPARATE = {"attention": "separate"}
PUBLISHED = [
    ("google", {"image_size": [8, 12], "patches": [4, 4]}, {}, [-2.269957985545, 0.350735964413]),
    ("google", {"classifier": "gap", "representation_size": 7}, {}, [-2.084204368987, 0.677071640521]),
    ("big_vision", {}, {}, [1.20319861806, 2.513672538372]),
    ("big_vision", {"pool_type": "tok", "rep_size": 7, "mlp_dim": 20}, {}, [-1.501346904771, 1.355479502726]),
    ("big_vision", {"pool_type": "map", "image_size": [8, 12]}, {}, [0.683617457484, 22.973746400496]),
    ("crate", {"dim_head": 5}, {}, [-0.93710190214, 0.879413973669]),
    ("crate", {"pool": "mean", "ista": 0.3, "dim_head": 5}, {}, [0.518130790742, -0.666926211458]),
    ("crate", {"heads": 1, "dim_head": 16, "channels": 1}, {}, [0.07777247735, -0.71490589734]),
    ("einops_tutorial", {"attention_variant": "fused_literal"}, {}, [1.559100543248, 2.443998083391]),
    ("einops_tutorial", {"attention_variant": "fused_correct"}, {}, [1.699506760001, 4.550464144101]),
    ("einops_tutorial", {"attention_variant": "separate_literal"}, SEPARATE, [1.637328908656, 1.850988064143]),
    ("einops_tutorial", {"attention_variant": "separate_correct"}, SEPARATE, [1.788827202764, 2.872867062524]),
    ("simple_vit", {}, BEFORE_NORMS, [-3.128911308536, -0.799149844037]),
    ("simple_vit", {}, {"final_norm": "after_pool"}, [-1.799760187687, 1.06131715737]),
    ("vit_pytorch", {"dim_head": 12, "channels": 1}, OLDER, [1.693288449278, -0.099406661209]),
    ("vit_pytorch", {"pool": "mean"}, OLDER, [-0.806009815956, -1.684530816107]),
    ("torch_encoder", {"num_heads": 4, "mlp_ratio": 2.5}, {}, [-0.891751054912, -0.621477060804]),
]
"""Family, its words, what differs in names, and the first logits of an image over weights in these names.

Numbers of plain numpy and einsums written from the papers and from the code of the tutorial, of vit-pytorch's modules
before 2023, and of torch's encoder; commit 43bcb0bc has that code, here, in test_crate and in
test_families.
"""


@pytest.mark.parametrize(("family", "more", "layout", "logits"), PUBLISHED, ids=str)
def test_logits_are_those_of_code_that_is_elsewhere(family, more, layout, logits):
    _, state, config = fresh(family, layout, **more)
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: 0.6 * torch.randn(state[name].shape, generator=draw, dtype=torch.float64) for name in sorted(state)
    }
    vit = from_reference(weights, family=family, config=config).eval()
    batch = torch.randn(2, vit.in_channels, *vit.image_size, generator=draw, dtype=torch.float64)
    assert vit(batch)[-1, :2].tolist() == pytest.approx(logits, abs=1e-10)
    found = identify(WeightsFile("weights", None, weights), told(family, config, weights))
    assert torch.equal(from_reference(weights, family=found.family, config=found.config).eval()(batch), vit(batch))
    if family in WRITTEN:
        back, _ = to_reference(vit, family=family, layout=layout)
        assert all(torch.equal(back[name], weights[name]) for name in weights)
    if "final_norm" in layout:
        with pytest.raises(UserError, match=f"final_norm=after_pool: {family} cannot express it"):
            to_reference(vit, family=family)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_arrays_are_imported_and_keep_their_dtype_and_weights_are_copies(dtype):
    _, state, config = fresh("timm")
    arrays = {name: tensor.numpy().astype(dtype) for name, tensor in state.items()}
    vit = from_reference(arrays, family="timm", config=config)
    back, _ = to_reference(vit, family="timm")
    with torch.no_grad():
        for weight in vit.parameters():
            weight.zero_()
    assert all(np.array_equal(back[name].numpy(), arrays[name]) for name in arrays)
    assert {tensor.numpy().dtype for tensor in back.values()} == {np.dtype(dtype)}
    assert all(torch.equal(state[name].to(back[name]), back[name]) for name in state)


@pytest.mark.parametrize("other", ["float64", "float8_e4m3fn"])
def test_a_model_of_weights_of_several_dtypes_has_one(other):
    _, state, config = fresh("timm")
    state["blocks.0.norm1.weight"] = state["blocks.0.norm1.weight"].to(getattr(torch, other))
    vit = from_reference(state, family="timm", config=config).eval()
    whole = torch.float64 if other == "float64" else torch.float32
    assert {weight.dtype for weight in vit.parameters()} == {whole}
    assert vit(images(2, 3, 8, 8).to(whole)).isfinite().all()


@pytest.mark.parametrize(
    ("family", "head"), [("timm", "head."), ("torchvision", "heads."), ("simple_vit", "linear_head.")]
)
def test_weights_without_a_head_are_those_of_features(family, head):
    whole, state, config = fresh(family)
    bare = {name: value for name, value in state.items() if not name.startswith(head)}
    batch = images(2, whole.in_channels, *whole.image_size)
    features = from_reference(bare, family=family, config={**config, "num_classes": 0}).eval()
    assert torch.equal(whole.head.linear(features(batch)), whole(batch))
    again, written = to_reference(features, family=family)
    assert again.keys() == bare.keys()
    assert written["num_classes"] == 0


def test_rotary_attention_is_no_part_of_timm_s_table():
    vit = ViT("Ti/4", image_size=8, depth=1, attention=RotaryAttention, positions="none")
    with pytest.raises(UserError, match=r"rotary=Rotary\(temperature=10000\.0.*: timm cannot express it"):
        to_reference(vit, family="timm")


def test_parts_that_were_replaced_are_named():
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2}
    vit = ViT(**sizes)
    vit.encoder[0].feed_forward.fn.feed_forward.activation = torch.nn.Mish()
    vit.encoder[1].attention.fn.norm = torch.nn.BatchNorm1d(16)
    vit.encoder[1].feed_forward.fn.norm.eps = 1e-3
    with pytest.raises(UserError) as caught:
        to_reference(vit, family="timm")
    text = str(caught.value)
    for part in ("activation: Mish is no block of ours", "norm: BatchNorm1d is no block", "norm: those of the network"):
        assert part in text


def test_weights_that_are_whole_numbers_are_refused_by_name():
    with pytest.raises(UserError, match=r"cls_token holds torch.int64"):
        from_reference({"cls_token": torch.zeros(1, 1, 4, dtype=torch.int64)}, family="timm", config={})
