"""Weights of unknown origin: family and sizes from names, shapes and the files beside them; a ViT as a config."""

from __future__ import annotations

import argparse
import copy
import json
from functools import cache

import pytest
import torch
from references import CONFIGS, MORE, TIMM, TIMM_CONFIGS, fresh, randomise
from runs import SHARED
from safetensors.torch import save_file
from torch import nn

from vit_lightning import RotaryAttention, SeparateAttention, UserError, ViT
from vit_lightning.config.networks import network_in_file
from vit_lightning.models.patches import LinearProjection
from vit_lightning.models.positions import SinCos2dPositions
from vit_lightning.weights import FAMILIES, from_reference, to_reference
from vit_lightning.weights.describe import model_config
from vit_lightning.weights.files import WeightsFile, read_weights
from vit_lightning.weights.identify import identify

UNTOLD = ("num_heads", "num_attention_heads", "global_pool", "fc_norm", "act_layer", "norm_layer", "init_values")
UNTOLD += ("pool_include_prefix", "pool", "ista", "dim_head", "qk_scale", "attention_variant", "drop_path_rate")
UNTOLD += ("hidden_act", "embed_norm_layer")


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def opened(file, config=None):
    """The ViT of a file whose family nobody named."""
    found = identify(file, config)
    return from_reference(file.tensors, family=found.family, config=found.config).eval(), found


def read(state):
    return WeightsFile("weights", None, {name: torch.as_tensor(value) for name, value in state.items()})


@cache
def built(text):
    return network_in_file({"model": json.loads(text)}).eval()


def check_config(vit, *shape):
    """A config's model builds the same function from the same tensors."""
    network = copy.deepcopy(built(json.dumps(model_config(vit))))
    network.load_state_dict(vit.state_dict(), strict=True)
    network, vit = network.double(), vit.double()
    with torch.no_grad():
        assert torch.equal(network(images(*shape)), vit(images(*shape)))


NEW_PARTS = ("rectangles", "max with prefix", "map", "qk norm, rms", "attention and mlp norm", "patch norm")
CASES = [*((family, {}) for family in CONFIGS), *MORE]
CASES += [("timm", {**TIMM_CONFIGS[name], "depth": 1}) for name in NEW_PARTS]
CASES += [
    pytest.param("timm", {**options, "depth": 1}, marks=pytest.mark.full)
    for name, options in TIMM_CONFIGS.items()
    if name not in NEW_PARTS
]


@pytest.mark.parametrize(("family", "more"), CASES, ids=str)
def test_family_and_sizes_are_found(family, more):
    layout = {"attention": "separate"} if "separate_literal" in more.values() else None
    vit, state, config = fresh(family, layout, **more)
    words = {name: field.theirs for field in FAMILIES[family].fields for name in field.options}
    told = (
        [words["image_size"]]
        if not any("pos" in name for name in state) or isinstance(more.get("img_size"), list)
        else []
    )
    given = {name: value for name, value in config.items() if name in (*UNTOLD, *told)}
    if more.get("fc_norm"):
        given["global_pool"] = "token"
    if more.get("mlp_layer") == "SwiGLUPacked":
        given["act_layer"] = more.get("act_layer", "gelu")
    again, found = opened(read(state), given)
    assert found.family == family or {found.family, family} == {"timm", "timm_legacy"}
    shape = (2, vit.in_channels, *vit.image_size)
    with torch.no_grad():
        assert torch.equal(again(images(*shape).float()), vit(images(*shape).float()))
    check_config(vit, *shape)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": SeparateAttention, "patch_projection": LinearProjection},
        {"attention": RotaryAttention, "positions": "none", "pool": "mean", "class_token": False},
        {"positions": SinCos2dPositions, "image_size": (8, 12), "layer_scale": 0.1, "num_classes": 0},
    ],
    ids=str,
)
def test_our_own_variants_as_config(options):
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    vit = ViT(**{**sizes, **options}).eval()
    check_config(vit, 2, 3, *vit.image_size)


def test_the_linear_embedding_of_the_tutorial_goes_both_ways():
    _, state, config = fresh("einops_tutorial")
    kernel = state.pop("0.projection.0.weight")
    state["0.projection.1.weight"] = kernel.permute(0, 2, 3, 1).flatten(1)  # (s1 s2 c), as the tutorial's Rearrange
    state["0.projection.1.bias"] = state.pop("0.projection.0.bias")
    vit = from_reference(state, family="einops_tutorial", config=config)
    assert torch.equal(vit.state_dict()["patch_embedding.projection.conv.weight"], kernel)
    again, found = opened(read(state), {"num_heads": 2})
    assert found.layout["patches"] == "linear"
    back, _ = to_reference(again, family="einops_tutorial")
    assert all(torch.equal(back[name], state[name]) for name in state)
    conv, _ = to_reference(again, family="einops_tutorial", layout={"patches": "conv"})
    assert torch.equal(conv["0.projection.0.weight"], kernel)


def timm_file(folder):
    """What timm's own CheckpointSaver writes."""
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer
    from timm.utils import CheckpointSaver

    peer = VisionTransformer(**{**TIMM, "embed_dim": 128, "reg_tokens": 2, "init_values": 0.1})
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    saver = CheckpointSaver(
        randomise(peer), optimizer, argparse.Namespace(model="vit", lr=0.1), checkpoint_dir=str(folder)
    )
    saver.save_checkpoint(0, 1.0)
    return peer, folder / "last.pth.tar"


def timm_hub_folder(folder):
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    arguments = {"img_size": 32, "depth": 1, "num_heads": 6, "global_pool": "avg"}
    peer = randomise(timm.create_model("vit_tiny_patch16_224", num_classes=5, **arguments))
    save_for_hf(peer, folder, model_args=arguments)
    return peer, folder


def hugging_face_folder(folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, image_size=16, patch_size=4
    )
    config.hidden_act = "gelu_pytorch_tanh"
    peer = randomise(transformers.ViTForImageClassification(config))
    peer.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return peer, folder


def torchvision_file(folder):
    from torchvision.models.vision_transformer import VisionTransformer

    peer = VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=128, mlp_dim=24, num_classes=5
    )
    torch.save({"model": nn.DataParallel(randomise(peer)).state_dict(), "epoch": 1}, folder / "weights.pth")
    return peer, folder / "weights.pth"


def vit_pytorch_file(folder):
    lucid = pytest.importorskip("vit_pytorch")
    peer = randomise(lucid.ViT(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=24))
    save_file(peer.state_dict(), folder / "weights.safetensors")
    return peer, folder / "weights.safetensors"


@pytest.mark.parametrize(
    "write",
    [timm_file, timm_hub_folder, hugging_face_folder, torchvision_file, vit_pytorch_file],
    ids=lambda f: f.__name__,
)
def test_what_the_peers_save_loads_without_naming_the_family(write, tmp_path):
    peer, place = write(tmp_path)
    file = read_weights(place)
    vit, found = opened(file)
    size = vit.image_size[0]
    batch = images(2, 3, size, size)
    with torch.no_grad():
        output = peer.eval()(batch)
        theirs = getattr(output, "logits", output)
        torch.testing.assert_close(vit(batch), theirs, rtol=0, atol=1e-10)
    back, _ = to_reference(vit, family=found.family)
    if found.family == "hf":  # other names in memory than on disk
        back, _ = to_reference(vit, family="hf", layout={"names": "memory"})
    peer.load_state_dict(back, strict=True)
    check_config(vit, *batch.shape)
    if write is hugging_face_folder:
        facts = {"image_size": (16, 16), "centre_share": 1.0, "resize": [16, 16], "interpolation": "fast_bilinear"}
        assert file.view == {"mean": [0.5] * 3, "std": [0.5] * 3, **facts}
    if write is timm_hub_folder:
        assert vit.num_heads == 6
        assert file.view["mean"] == [0.5] * 3


@pytest.mark.skipif(not (SHARED / "golden").exists(), reason="the reference files are not here")
@pytest.mark.parametrize("name", ["big_vision/bv_map_sincos2d", "big_vision/bv_gap_learn", "google_vit/gv_token_rep"])
def test_files_of_jax(name):
    from safetensors.torch import load_file

    path = SHARED / "golden" / f"{name}.npz"
    about = json.loads(path.with_suffix(".json").read_text())
    file = read_weights(path)
    vit, found = opened(file, {"image_size": about["config"]["image_size"]})
    tensors = load_file(path.with_suffix(".io.safetensors"))
    logits = vit.double()(tensors["input/x_nhwc"].permute(0, 3, 1, 2).double())
    torch.testing.assert_close(logits, tensors["output_f64/logits"], rtol=0, atol=1e-10)
    assert found.family == name.split("_")[0] if "google" in name else found.family == "big_vision"


@pytest.mark.parametrize(("width", "depth", "patch", "heads"), [(1280, 2, 14, 20), (1280, 32, 14, 16)])
def test_heads_of_published_models(width, depth, patch, heads):
    from vit_lightning.weights.options import OPTIONS, build

    sizes = {"emb_size": width, "depth": depth, "patch_size": (patch, patch), "num_heads": heads, "hidden": 4 * width}
    with torch.device("meta"):
        vit = build({**OPTIONS, **sizes, "dim_head": width // heads, "scale": (width // heads) ** -0.5})
        state, _ = to_reference(vit, family="timm")
    found = identify(WeightsFile("weights", None, state))
    assert found.config["num_heads"] == heads
    assert f"{heads} heads" in found.notes[0]


def test_heads_of_crate_s():
    from vit_lightning.weights.options import build

    table = FAMILIES["crate"]
    config = {
        "image_size": 224,
        "patch_size": 16,
        "num_classes": 5,
        "dim": 576,
        "depth": 12,
        "heads": 12,
        "dim_head": 48,
    }
    with torch.device("meta"):
        state, _ = to_reference(build(table.read(config, {})), family="crate")
    assert identify(WeightsFile("weights", None, state)).config.items() >= {"heads": 12, "dim_head": 48}.items()


def test_what_tensors_do_not_tell_is_asked_for():
    _, state, _ = fresh("timm")
    with pytest.raises(UserError, match=r"do not tell the number of heads: give config=\{'num_heads'"):
        identify(read(state))
    with pytest.raises(UserError, match="3 heads do not divide the 16 channels"):
        identify(read(state), {"num_heads": 3})
    with pytest.raises(UserError, match=r"config\.num_head=2: timm has no such option"):
        identify(read(state), {"num_heads": 2, "num_head": 2})
    _, state, _ = fresh("timm", img_size=[8, 12])
    with pytest.raises(UserError, match=r"7 positions are no square of patches: give config=\{'img_size'"):
        identify(read(state), {"num_heads": 2})
    assert opened(read(state), {"num_heads": 2, "img_size": [8, 12]})[0].image_size == (8, 12)


@pytest.mark.parametrize(
    ("number", "message"),
    [("7", "those of 3 blocks, and not of 8"), ("9" * 9, "is unexpected"), ("9" * 5000, "is unexp")],
    ids=["gap", "huge", "endless"],
)
def test_numbers_of_blocks_are_not_believed(number, message):
    _, state, _ = fresh("timm")
    state[f"blocks.{number}.norm1.bias"] = torch.ones(16)
    with pytest.raises(UserError, match=message):
        identify(read(state), {"num_heads": 2})


def test_sizes_that_a_description_claims_are_not_believed():
    _, state, config = fresh("big_vision", posemb="sincos2d")
    for more, message in (
        ({"depth": 10**9}, "2 blocks, and not of"),
        ({"image_size": [10**6, 10**6]}, "at most 1,048,576"),
    ):
        beside = {"family": "big_vision", "config": {**config, **more}}
        with pytest.raises(UserError, match=message):
            identify(WeightsFile("weights", None, state, beside))
    assert identify(WeightsFile("weights", None, state, {"family": "big_vision", "config": config})).notes == ()


def test_foreign_weights_are_named():
    foreign = {"conv1.weight": torch.zeros(8, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(8, 8, 3, 3)}
    with pytest.raises(UserError, match=r"none of the families \(first names: conv1.weight, layer1"):
        identify(read(foreign))
    _, state, _ = fresh("timm")
    state["blocks.0.attn.rel_pos_bias.table"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.rel_pos_bias\.table is unexpected in the weights of timm"):
        identify(read(state), {"num_heads": 2})


def test_a_model_of_transformers_without_classifier(tmp_path):
    vit, state, _ = fresh("hf", {"names": "disk"}, num_labels=0)
    base = {name.removeprefix("vit."): value for name, value in state.items()}
    save_file({**base, "pooler.dense.bias": torch.zeros(16)}, tmp_path / "weights.safetensors")
    file = read_weights(tmp_path / "weights.safetensors")
    assert "pooler.dense.bias" in file.notes[0]
    again, found = opened(file, {"num_attention_heads": 2})
    assert found.config["num_labels"] == 0
    assert torch.equal(again(images(2, 3, 8, 8).float()), vit(images(2, 3, 8, 8).float()))


def test_a_model_of_timm_with_blocks_that_we_lack_is_refused():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        state = timm.create_model("vit_base_patch16_rpn_224", depth=1).state_dict()
    config = {"architecture": "vit_base_patch16_rpn_224", "model_args": {"depth": 1}}
    with pytest.raises(UserError, match=r"config\.block_fn=ResPostBlock: we do not have this option of timm"):
        identify(WeightsFile("weights", None, dict(state), config))


def test_weights_under_our_own_names():
    sizes = {"image_size": 16, "patch_size": 4, "emb_size": 128, "depth": 2, "num_classes": 5, "num_heads": 2}
    vit = ViT(**sizes, patch_projection="linear").eval()
    found = identify(read(vit.state_dict()))
    assert found.family == "vit_lightning"
    network = network_in_file({"model": found.config}).eval()
    network.load_state_dict(vit.state_dict())
    assert torch.equal(network(images(2, 3, 16, 16).float()), vit(images(2, 3, 16, 16).float()))
    _, options = found.config.values()
    assert identify(read(vit.state_dict()), {"num_heads": 4}).config["init_args"] == {**options, "num_heads": 4}
    beside = WeightsFile("weights", None, vit.state_dict(), {"model": found.config})
    assert identify(beside, {"pool": "mean"}).config["init_args"] == {**options, "pool": "mean"}
    with pytest.raises(UserError, match=r"config\.num_heads=x must be a whole number"):
        identify(read(vit.state_dict()), {"num_heads": "x"})
    with pytest.raises(UserError, match="of none of the families"):
        identify(read(vit.state_dict()), {"family": "timm"})


def test_positions_that_no_tensor_tells_are_asked_for():
    sizes = {"image_size": 16, "patch_size": 4, "emb_size": 128, "depth": 1, "num_classes": 5, "num_heads": 2}
    vit = ViT(**sizes, positions="sincos2d").eval()
    with pytest.raises(UserError, match=r"do not tell the positions: give config=\{'positions'"):
        identify(read(vit.state_dict()), {"image_size": 16})
    network = network_in_file(
        {"model": identify(read(vit.state_dict()), {"image_size": 16, "positions": "sincos2d"}).config}
    )
    network.load_state_dict(vit.state_dict())
    assert torch.equal(network.eval()(images(2, 3, 16, 16).float()), vit(images(2, 3, 16, 16).float()))
