"""Weights of unknown origin: family and sizes from names, shapes and the files beside them; a ViT as a config."""

import pytest
import torch
from references import fresh

from vit_lightning import UserError, ViT
from vit_lightning.config.networks import network_in_file
from vit_lightning.weights import FAMILIES, from_reference, to_reference
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.identify import identify
from vit_lightning.weights.options import OPTIONS, build, describe
from vit_lightning.weights.tables import find_names, to_theirs


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def opened(file, config=None):
    """The ViT of a file whose family nobody named."""
    found = identify(file, config)
    return from_reference(file.tensors, family=found.family, config=found.config).eval(), found


def read(state):
    return WeightsFile("weights", None, {name: torch.as_tensor(value) for name, value in state.items()})


def test_the_linear_embedding_of_the_tutorial_goes_both_ways():
    _, state, config = fresh("einops_tutorial")
    kernel = state.pop("0.projection.0.weight")
    state["0.projection.1.weight"] = kernel.permute(0, 2, 3, 1).flatten(1)  # (s1 s2 c), as the tutorial's Rearrange
    state["0.projection.1.bias"] = state.pop("0.projection.0.bias")
    vit = from_reference(state, family="einops_tutorial", config=config)
    assert torch.equal(vit.state_dict()["patch_embedding.projection.conv.weight"], kernel)
    again, _ = opened(read(state), {"num_heads": 2})
    back, _ = to_reference(again, family="einops_tutorial", layout={"patches": "linear"})
    assert all(torch.equal(back[name], state[name]) for name in state)
    conv, _ = to_reference(again, family="einops_tutorial")
    assert torch.equal(conv["0.projection.0.weight"], kernel)


@pytest.mark.parametrize(
    ("family", "width", "depth", "patch", "heads"),
    [("timm", 1280, 2, 14, 20), ("timm", 1280, 32, 14, 16), ("dinov2", 384, 12, 14, 6), ("dinov2", 1024, 24, 14, 16)],
)
def test_heads_of_published_models(family, width, depth, patch, heads):
    sizes = {"emb_size": width, "depth": depth, "patch_size": (patch, patch), "num_heads": heads, "hidden": 4 * width}
    table, more = FAMILIES[family], {"layer_scale": 1.0, "num_classes": 0} if family == "dinov2" else {}
    with torch.device("meta"):
        vit = build({**OPTIONS, **sizes, **more, "dim_head": width // heads, "scale": (width // heads) ** -0.5})
        names = table.names(describe(vit), table.layout_for(OPTIONS))
        state = to_theirs(vit.state_dict(), find_names(vit.state_dict(), names))
        state |= {
            f"encoder.layer.{n}.layer_scale1.lambda1": torch.ones(width) for n in range(depth * (family != "timm"))
        }
    found = identify(WeightsFile("weights", None, state))
    assert (found.family, found.config.get("num_heads", found.config.get("num_attention_heads", 12))) == (family, heads)
    assert f"{heads} heads" in found.notes[0]


def test_heads_of_crate_s():
    table = FAMILIES["crate"]
    config = {"image_size": 224, "patch_size": 16, "num_classes": 5, "dim": 576, "depth": 12}
    config |= {"heads": 12, "dim_head": 48}
    with torch.device("meta"):
        state, _ = to_reference(build(table.read(config, {})), family="crate")
    assert identify(WeightsFile("weights", None, state)).config.items() >= {"heads": 12, "dim_head": 48}.items()


def timm_weights(**beside):
    return {**fresh("timm")[1], **beside}


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (timm_weights, {}, r"do not tell the number of heads: give config=\{'num_heads'"),
        (
            lambda: fresh("vit_pytorch", dim=64, heads=2, dim_head=32)[1],  # its one head of 64 has no projection
            {},
            r"do not tell the number of heads: give config=\{'heads'",
        ),
        (timm_weights, {"num_heads": 3}, "3 heads do not divide the 16 channels"),
        (timm_weights, {"num_heads": 2, "num_head": 2}, r"config\.num_head=2: timm has no such option"),
        (
            lambda: fresh("timm", img_size=[8, 12])[1],
            {"num_heads": 2},
            r"7 positions are no square of patches: give config=\{'img_size'",
        ),
        (
            lambda: timm_weights(**{"blocks.0.attn.rel_pos_bias.table": torch.zeros(3)}),
            {"num_heads": 2},
            r"blocks\.0\.attn\.rel_pos_bias\.table is unexpected in the weights of timm",
        ),
        (
            lambda: {"conv1.weight": torch.zeros(8, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(8, 8, 3, 3)},
            {},
            r"none of the families \(first names: conv1.weight, layer1",
        ),
        (
            lambda: {"q_proj.lora_A.default.weight": torch.zeros(4, 4), "cls_token": torch.zeros(1, 1, 4)},
            {},
            r"LoRA beside those of a model, which is not read \(PEFT's merge_and_unload",
        ),
    ],
)
def test_what_tensors_do_not_tell_and_what_is_foreign_is_named(make, config, message):
    with pytest.raises(UserError, match=message) as caught:
        identify(read(make()), config)
    assert len(caught.value.problems) == 1


def test_two_sizes_of_images_that_have_as_many_positions_are_both_named():
    """2 x 4 patches and a class token, or 3 x 3 patches; 2 x 8 patches are 4 x 4 as well."""
    state = fresh("timm", img_size=[8, 16])[1]
    assumed = identify(read(state), {"num_heads": 2})
    told = "img_size=12x12 was assumed, whose patches alone have positions: config={'img_size'"
    assert told in assumed.notes[0]
    given = identify(read(state), {"num_heads": 2, "img_size": [8, 16]})
    assert (given.config["img_size"], given.config.get("no_embed_class", False)) == ([8, 16], False)
    assert "image_size" not in str(given.notes)
    square = identify(read(fresh("timm", img_size=[8, 32])[1]), {"num_heads": 2})
    assert "image_size (16, 16)" in square.notes[0]


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
