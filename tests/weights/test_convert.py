"""Weights and configs of families: strict checks, what a family cannot express, and errors that name what is wrong."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import fresh
from runs import REPOSITORY

from vit_lightning import UserError, ViT
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.models.attention import SeparateAttention
from vit_lightning.models.patches import LinearProjection
from vit_lightning.weights import FAMILIES, from_reference, to_reference
from vit_lightning.weights.convert import WRITTEN
from vit_lightning.weights.options import describe


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
        ("timm", {"dynamic_img_size": True}, "config.dynamic_img_size=True: we do not have this option of timm"),
        ("timm", {"global_pool": "prr"}, "config.global_pool=prr: we have token, avg"),
        ("timm", {"act_layer": "mish"}, "config.act_layer=mish: we have gelu"),
        ("timm", {"norm_layer": "batchnorm_1e-5"}, "config.norm_layer=batchnorm_1e-5 must be layernorm_EPS"),
        ("hf", {"hidden_act": "mish"}, "config.hidden_act=mish: we have gelu"),
        ("timm", {"depth": "two"}, "config.depth=two must be a whole number"),
        ("big_vision", {"posemb": 3}, "config.posemb=3 must be text"),
        ("hf", {"num_attention_heads": 0}, "num_heads=0 must be at least 1"),
        ("timm", {"qkv_bias": "False"}, "qkv_bias=False must be true or false"),
        ("timm", {"num_heads": 5}, "num_heads=5 must be at least 1 and divide"),
        ("timm", {"mlp_ratio": float("nan")}, "mlp_ratio=nan must be a number"),
        ("timm", {"init_values": "x"}, "init_values=x has a wrong type"),
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


def flax_norm(x, weights, name):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}/scale"], weights[f"{name}/bias"], eps=1e-6)


def flax_attention(queries, tokens, weights, name):
    """Computes flax's MultiHeadDotProductAttention, whose kernels have an axis for the heads."""
    q, k, v = (
        torch.einsum("nld,dhk->nlhk", x, weights[f"{name}/{part}/kernel"]) + weights[f"{name}/{part}/bias"]
        for part, x in {"query": queries, "key": tokens, "value": tokens}.items()
    )
    weights_of_values = (torch.einsum("nqhk,nlhk->nhql", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)
    out = torch.einsum("nhql,nlhk->nqhk", weights_of_values, v)
    return torch.einsum("nqhk,hkd->nqd", out, weights[f"{name}/out/kernel"]) + weights[f"{name}/out/bias"]


def flax_mlp(x, weights, name):
    hidden = F.gelu(x @ weights[f"{name}/Dense_0/kernel"] + weights[f"{name}/Dense_0/bias"], approximate="tanh")
    return hidden @ weights[f"{name}/Dense_1/kernel"] + weights[f"{name}/Dense_1/bias"]


def flax_vit(batch, weights, *, google):
    """Computes Google's two ViTs from their weights, patch by patch; the names of the weights decide which parts."""
    kernel = weights["embedding/kernel"]
    size = kernel.shape[0]
    patches = batch.permute(0, 2, 3, 1).unfold(1, size, size).unfold(2, size, size)  # n, rows, columns, c, p1, p2
    x = torch.einsum("nrscpq,pqce->nrse", patches, kernel).flatten(1, 2) + weights["embedding/bias"]
    if not google:
        x = x + weights["pos_embedding"]
    if "cls" in weights:
        x = torch.cat([weights["cls"].expand(len(x), -1, -1), x], dim=1)
    if google:
        x = x + weights["Transformer/posembed_input/pos_embedding"]
    for n in range(2):
        block = f"Transformer/encoderblock_{n}"
        y = flax_norm(x, weights, f"{block}/LayerNorm_0")
        x = x + flax_attention(y, y, weights, f"{block}/MultiHeadDotProductAttention_0")
        y = flax_norm(x, weights, f"{block}/LayerNorm_1")
        x = x + flax_mlp(y, weights, f"{block}/MlpBlock_0")
    x = flax_norm(x, weights, "Transformer/encoder_norm")
    if "MAPHead_0/probe" in weights:
        probe = weights["MAPHead_0/probe"].expand(len(x), -1, -1)
        x = flax_attention(probe, x, weights, "MAPHead_0/MultiHeadDotProductAttention_0")
        x = (x + flax_mlp(flax_norm(x, weights, "MAPHead_0/LayerNorm_0"), weights, "MAPHead_0/MlpBlock_0"))[:, 0]
    else:
        x = x[:, 0] if "cls" in weights else x.mean(dim=1)
    if "pre_logits/kernel" in weights:
        x = (x @ weights["pre_logits/kernel"] + weights["pre_logits/bias"]).tanh()
    return x @ weights["head/kernel"] + weights["head/bias"]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("google", {"image_size": [8, 12], "patches": [4, 4]}),
        ("google", {"classifier": "gap", "representation_size": 7}),
        ("big_vision", {}),
        ("big_vision", {"pool_type": "tok", "rep_size": 7, "mlp_dim": 20}),
        ("big_vision", {"pool_type": "map", "image_size": [8, 12]}),
    ],
    ids=str,
)
def test_google_s_models_equal_plain_einsums_over_their_own_weights(family, more):
    _, state, config = fresh(family, **more)
    weights = {name: 2 * tensor.double() for name, tensor in state.items()}
    vit = from_reference(weights, family=family, config=config).eval()
    batch = images(3, 3, *config["image_size"]).double()
    expected = flax_vit(batch, weights, google=family == "google")
    torch.testing.assert_close(vit(batch), expected, rtol=0, atol=1e-10)


def tutorial_attention(tokens, state, variant):
    """Computes the tutorial's two attentions from weights under its names."""
    if variant.startswith("fused"):
        packed = F.linear(tokens, state["1.0.0.fn.1.qkv.weight"], state["1.0.0.fn.1.qkv.bias"])
        queries, keys, values = packed.unflatten(-1, (2, 8, 3)).permute(4, 0, 2, 1, 3)
    else:
        names = [f"1.0.0.fn.1.{part}" for part in ("queries", "keys", "values")]
        queries, keys, values = (
            F.linear(tokens, state[f"{n}.weight"], state[f"{n}.bias"]).unflatten(-1, (2, 8)).transpose(1, 2)
            for n in names
        )
    energy = queries @ keys.transpose(-1, -2)
    literal = variant.endswith("literal")
    weights = energy.softmax(-1) / 16**0.5 if literal else (energy / 8**0.5).softmax(-1)
    out = (weights @ values).transpose(1, 2).flatten(2)
    return F.linear(out, state["1.0.0.fn.1.projection.weight"], state["1.0.0.fn.1.projection.bias"])


@pytest.mark.parametrize("variant", ["fused_literal", "fused_correct", "separate_literal", "separate_correct"])
def test_the_tutorial_s_four_attentions(variant):
    layout = {"attention": variant.split("_")[0]}
    _, state, config = fresh("einops_tutorial", layout, attention_variant=variant)
    vit = from_reference(state, family="einops_tutorial", config=config).eval()
    tokens = images(2, 5, 16)
    got = vit.encoder[0].attention.fn.attention(tokens)
    torch.testing.assert_close(got, tutorial_attention(tokens, state, variant), rtol=0, atol=1e-5)


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


def test_features_go_only_to_and_come_only_from_families_that_have_such():
    _, state, config = fresh("simple_vit")
    with pytest.raises(UserError, match="num_classes=0: simple_vit has no model"):
        from_reference(state, family="simple_vit", config={**config, "num_classes": 0})
    vit = ViT(image_size=8, patch_size=4, emb_size=16, depth=2, num_heads=2, num_classes=0)
    state, config = to_reference(vit, family="timm")
    assert config["num_classes"] == 0
    assert not any(name.startswith("head") for name in state)
    with pytest.raises(UserError, match="num_classes=0: torchvision has no model"):
        to_reference(vit, family="torchvision")


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


FAMILY_OF_CONFIG = {"timm_registers": "timm", "deit_distilled": "timm", "hugging_face": "hf", "rotary": None}
FAMILY_OF_CONFIG |= {"vit_pytorch_older": "vit_pytorch", "einops_tutorial_as_written": "einops_tutorial"}
"""Where the config has another name than its family."""


@pytest.mark.parametrize("path", sorted((REPOSITORY / "experiments" / "families").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_config_of_a_family_is_that_family(path):
    experiment = resolve([f"--config={path}"])
    assert experiment.name == path.stem
    assert experiment.trainer["max_epochs"] == 30
    model = experiment.config["model"]
    colour = {**model, "init_args": {**model["init_args"], "in_channels": 3}}  # some families take no others
    vit = network_in_file({"model": colour})
    family = FAMILY_OF_CONFIG.get(path.stem, path.stem)
    if family is None:
        with pytest.raises(UserError, match=r"rotary=Rotary\(temperature=100\.0"):
            to_reference(vit, family="timm")
        return
    if family not in WRITTEN:
        table, options = FAMILIES[family], describe(vit)
        layout = table.layout_for(options)
        assert table.read(table.write(options, layout), layout) == options
        return
    layout = {"version": "older"} if path.stem == "vit_pytorch_older" else None
    state, written = to_reference(vit, family=family, layout=layout)
    again = from_reference(state, family=family, config=written)
    assert describe(again) == describe(vit)
    assert written.get("attention_variant") == {"einops_tutorial": "fused_correct"}.get(path.stem)


def test_weights_that_are_whole_numbers_are_refused_by_name():
    with pytest.raises(UserError, match=r"cls_token holds torch.int64"):
        from_reference({"cls_token": torch.zeros(1, 1, 4, dtype=torch.int64)}, family="timm", config={})
