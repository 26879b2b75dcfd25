"""Against the peers' own classes with random weights, both ways, in float64: forward, backward, strict loading."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from references import TIMM, TIMM_CONFIGS, randomise
from torch import nn

from vit_lightning import UserError, ViT
from vit_lightning.models.layers import LayerNorm
from vit_lightning.weights import from_reference, to_reference

timm = pytest.importorskip("timm")


def images(*shape, seed=1):
    batch = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batch[-1] *= 0.01  # little contrast makes the epsilon of a norm over pixels visible
    return batch


def logits_of(output):
    return getattr(output, "logits", output)


def agree(peer, family, config, shape, make, atol=1e-10):
    """Import, forward, backward, export; ``make`` builds the peer's class from a config."""
    peer.eval()
    vit = from_reference(peer.state_dict(), family=family, config=config).eval()
    assert sum(p.numel() for p in vit.parameters()) == sum(p.numel() for p in peer.parameters())
    inputs = [images(*shape).requires_grad_() for _ in range(2)]
    ours, theirs = vit(inputs[0]), logits_of(peer(inputs[1]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert theirs.std() > 0.01

    direction = images(*theirs.shape, seed=2)
    ours.backward(direction)
    theirs.backward(direction)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=10 * atol)
    gradients = copy.deepcopy(vit)
    with torch.no_grad():
        for weight, other in zip(gradients.parameters(), vit.parameters(), strict=True):
            weight.copy_(other.grad)
    named, _ = to_reference(gradients, family=family)
    for name, weight in peer.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(named[name], weight.grad, rtol=1e-9, atol=10 * atol)

    back, same = to_reference(vit, family=family)
    assert same == config
    state = peer.state_dict()
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    vit.reference = None  # as a model that was never theirs
    exported, written = to_reference(vit, family=family)
    other = make(written).double().eval()
    other.load_state_dict(exported, strict=True)
    torch.testing.assert_close(logits_of(other(inputs[1].detach())), theirs.detach(), rtol=0, atol=atol)
    return vit


def timm_arguments(config):
    """Classes of timm in the place of the words for them."""
    from timm.layers import GELUTanh, Mlp, RmsNorm, SwiGLU, SwiGLUPacked
    from timm.layers import LayerNorm as TimmLayerNorm

    def norm(word):
        kind, eps = word.split("_")
        return partial({"layernorm": TimmLayerNorm, "rmsnorm": RmsNorm}[kind], eps=float(eps))

    words = {
        "norm_layer": norm,
        "embed_norm_layer": norm,
        "act_layer": {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "SiLU": nn.SiLU}.get,
        "mlp_layer": {"Mlp": Mlp, "SwiGLU": SwiGLU, "SwiGLUPacked": SwiGLUPacked}.get,
        "img_size": lambda size: size if isinstance(size, int) else tuple(size),
        "patch_size": lambda size: size if isinstance(size, int) else tuple(size),
    }
    return {name: words[name](value) if name in words else value for name, value in config.items()}


def timm_vit(config):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**timm_arguments(config))


def timm_distilled(config):
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(**timm_arguments(config))


def timm_shape(config):
    size = config.get("img_size")
    return (3, config.get("in_chans", 3), *((size, size) if isinstance(size, int) else size))


@pytest.mark.parametrize("options", TIMM_CONFIGS.values(), ids=TIMM_CONFIGS)
def test_timm(options):
    config = {**TIMM, **options}
    agree(randomise(timm_vit(config)), "timm", config, timm_shape(config), timm_vit)


@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"init_values": 0.1, "qkv_bias": False}], ids=str)
def test_timm_distilled(options):
    config = {**TIMM, **options}
    agree(randomise(timm_distilled(config)), "timm", config, timm_shape(config), timm_distilled)


def test_timm_distilled_gives_the_pair_in_training():
    peer = randomise(timm_distilled(TIMM)).train()
    peer.set_distilled_training(True)
    vit = from_reference(peer.state_dict(), family="timm", config=TIMM).train()
    for ours, theirs in zip(vit(images(2, 3, 16, 16)), peer(images(2, 3, 16, 16)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"representation_size": 7},
        {"norm_layer": "layernorm_1e-5"},
        {"dropout": 0.1, "attention_dropout": 0.2, "num_heads": 4},
    ],
    ids=str,
)
def test_torchvision(options):
    from torchvision.models.vision_transformer import VisionTransformer

    def make(config):
        norm = {"norm_layer": partial(nn.LayerNorm, eps=1e-5)} if "norm_layer" in config else {}
        return VisionTransformer(**{**config, **norm})

    config = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    config |= {"num_classes": 5, **options}
    agree(randomise(make(config)), "torchvision", config, (3, 3, 16, 16), make)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "qkv_bias": False},
        {"image_size": [8, 24], "patch_size": [4, 6], "num_channels": 1},
        {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "hidden_act": "silu"},
    ],
    ids=str,
)
def test_hugging_face(options):
    transformers = pytest.importorskip("transformers")

    def make(config):
        return transformers.ViTForImageClassification(transformers.ViTConfig(**config))

    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config |= {"image_size": 16, "patch_size": 4, "num_labels": 5, **options}
    size = config["image_size"]
    shape = (3, config.get("num_channels", 3), *((size, size) if isinstance(size, int) else size))
    vit = agree(randomise(make(config)), "hf", config, shape, make)
    disk, _ = to_reference(vit, family="hf", layout={"names": "disk"})
    assert "vit.encoder.layer.1.attention.attention.query.weight" in disk
    again = from_reference(disk, family="hf", config=config).eval()
    assert torch.equal(again(images(*shape)), vit(images(*shape)))


LUCID = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": "mean"},
        {"dim_head": 12, "channels": 1},
        {"heads": 1, "dim_head": 16},
        {"dropout": 0.1, "emb_dropout": 0.2, "heads": 4, "dim_head": 8},
        {"image_size": [8, 24], "patch_size": [4, 6]},
    ],
    ids=str,
)
def test_vit_pytorch(options):
    lucid = pytest.importorskip("vit_pytorch")

    def make(config):
        sizes = {n: tuple(config[n]) for n in ("image_size", "patch_size") if isinstance(config[n], list)}
        return lucid.ViT(**{**config, **sizes})

    config = {**LUCID, **options}
    size = config["image_size"]
    shape = (3, config.get("channels", 3), *((size, size) if isinstance(size, int) else size))
    agree(randomise(make(config)), "vit_pytorch", config, shape, make)


@pytest.mark.parametrize("options", [{}, {"dim_head": 12, "channels": 1}, {"heads": 1, "dim_head": 16}], ids=str)
def test_simple_vit(options):
    lucid = pytest.importorskip("vit_pytorch")
    config = {**LUCID, **options}
    peer = randomise(lucid.SimpleViT(**config))
    # its table is in float32, and ours is the same float32 numbers
    agree(peer, "simple_vit", config, (3, config.get("channels", 3), 16, 16), lambda c: lucid.SimpleViT(**c))


class EncoderViT(nn.Module):
    """Document 003's idea in our words: torch's own encoder between embedding and head."""

    def __init__(self, *, img_size, patch_size, num_classes, embed_dim, depth, num_heads, mlp_ratio=4.0):
        super().__init__()
        patches = nn.Conv2d(3, embed_dim, patch_size, stride=patch_size)
        self.patch_embed = nn.ModuleDict({"proj": patches})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (img_size // patch_size) ** 2, embed_dim))
        block = nn.TransformerEncoderLayer(
            embed_dim, num_heads, int(embed_dim * mlp_ratio), activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, batch):
        tokens = self.patch_embed["proj"](batch).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(batch), -1, -1), tokens], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def test_torch_encoder():
    config = {"img_size": 16, "patch_size": 4, "num_classes": 5, "embed_dim": 16, "depth": 3, "num_heads": 4}
    config["mlp_ratio"] = 2.5
    agree(randomise(EncoderViT(**config)), "torch_encoder", config, (3, 3, 16, 16), lambda c: EncoderViT(**c))


def test_our_own_model_in_timm_and_torchvision():
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = ViT(image_size=16, patch_size=4, emb_size=16, depth=2, num_heads=2, num_classes=5)
    vit = randomise(vit).eval()
    expected = vit(images(2, 3, 16, 16))
    for family, make in {"timm": timm_vit, "torchvision": lambda config: VisionTransformer(**config)}.items():
        state, config = to_reference(vit, family=family)
        peer = make(config).double().eval()
        peer.load_state_dict(state, strict=True)
        torch.testing.assert_close(peer(images(2, 3, 16, 16)), expected, rtol=0, atol=1e-10)


def test_from_one_family_to_another():
    """big_vision's model with attention pooling in timm, Hugging Face's in torchvision, torch's encoder in timm."""
    transformers = pytest.importorskip("transformers")
    from torchvision.models.vision_transformer import VisionTransformer

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        num_labels=5,
        layer_norm_eps=1e-6,
    )
    peer = randomise(transformers.ViTForImageClassification(config)).eval()
    plain = {n: getattr(config, n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")}
    plain |= {"intermediate_size": 24, "image_size": 16, "num_labels": 5, "layer_norm_eps": 1e-6}
    vit = from_reference(peer.state_dict(), family="hf", config=plain)
    state, theirs = to_reference(vit, family="torchvision")
    other = VisionTransformer(**theirs).double().eval()
    other.load_state_dict(state, strict=True)
    torch.testing.assert_close(other(images(2, 3, 16, 16)), peer(images(2, 3, 16, 16)).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "family", "message"),
    [
        ({"layer_scale": 0.1}, "torchvision", "layer_scale=0.1: torchvision cannot express it"),
        ({"register_tokens": 2}, "hf", "register_tokens=2: hf cannot express it"),
        ({"drop_path": 0.1}, "vit_pytorch", "drop_path=0.1: vit_pytorch cannot express it"),
        ({"representation_size": 8}, "timm", "representation_size=8: timm cannot express it"),
        ({"positions": "sincos2d"}, "timm", "positions=sincos2d big_vision 10000.0: timm cannot express it"),
        ({"image_size": (16, 8)}, "torchvision", r"image_size=\(16, 8\): torchvision cannot express it"),
        ({"attention": lambda e, h: nn.Identity()}, "timm", "attention: Identity is no block of ours"),
        ({}, "google", "activation=gelu: google cannot express it"),
        ({}, "hf", None),
        ({"norm": partial(LayerNorm, eps=1e-5)}, "torch_encoder", "dropout=0.0: torch_encoder cannot express it"),
    ],
)
def test_what_a_family_cannot_express_is_named(options, family, message):
    vit = ViT(**{"image_size": 16, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, **options})
    if message is None:
        to_reference(vit, family=family)
        return
    with pytest.raises(UserError, match=message):
        to_reference(vit, family=family)
