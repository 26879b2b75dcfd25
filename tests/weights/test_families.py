"""Every family as one table of (family, model, source): the function of those who wrote it, in, out and unnamed.

In float64, forward and backward, from the tensors in a file of which nobody says what they are.
"""

import copy
import re
from functools import partial

import pytest
import torch
import transformers
import vit_pytorch as lucid
from references import CONFIGS, MORE, TIMM, TIMM_CONFIGS, fresh, randomise, told
from safetensors.torch import save_file
from timm.layers import GELUTanh, Mlp, QuickGELU, RmsNorm, SwiGLU, SwiGLUPacked
from timm.layers import LayerNorm as TimmLayerNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from vit_lightning import load
from vit_lightning.config.networks import network_in_file
from vit_lightning.weights import FAMILIES, from_reference, to_reference
from vit_lightning.weights.convert import WRITTEN
from vit_lightning.weights.files import read_weights
from vit_lightning.weights.identify import identify
from vit_lightning.weights.options import describe, model_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def images(*shape, seed=1):
    batch = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batch[-1] *= 0.01  # little contrast makes the epsilon of a norm over pixels visible
    return batch


def timm_vit(config, kind=VisionTransformer):
    """A model of timm, its classes in the place of the words for them."""

    def norm(word):
        name, eps = word.split("_")
        return partial({"layernorm": TimmLayerNorm, "rmsnorm": RmsNorm}[name], eps=float(eps))

    words = {
        "norm_layer": norm,
        "embed_norm_layer": norm,
        "act_layer": {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "quick_gelu": QuickGELU, "SiLU": nn.SiLU}.get,
        "mlp_layer": {"Mlp": Mlp, "SwiGLU": SwiGLU, "SwiGLUPacked": SwiGLUPacked}.get,
        "img_size": lambda size: size if isinstance(size, int) else tuple(size),
        "patch_size": lambda size: size if isinstance(size, int) else tuple(size),
    }
    return kind(**{name: words[name](value) if name in words else value for name, value in config.items()})


def torchvision_vit(config):
    norm = {"norm_layer": partial(nn.LayerNorm, eps=1e-5)} if "norm_layer" in config else {}
    return TorchvisionViT(**{**config, **norm})


def of_transformers(config, kind="ViT", form="ForImageClassification"):
    """A model of transformers without a token of pre-training, and with frequencies in float64."""
    made = getattr(transformers, f"{kind}Config")(**config)
    network = getattr(transformers, kind + form)(made)
    if hasattr(network, "rope_embeddings"):
        inv_freq = 1 / made.rope_theta ** torch.arange(0, 1, 4 / 12, dtype=torch.float64)
        network.rope_embeddings.inv_freq = inv_freq
    return network


def lucid_vit(config, kind=lucid.ViT):
    sizes = {name: tuple(config[name]) for name in ("image_size", "patch_size") if isinstance(config[name], list)}
    return kind(**{**config, **sizes})


TORCHVISION = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
LUCID = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
HF = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
CLASSES = {"num_labels": 5, "intermediate_size": 24}
REGISTERS = {"num_register_tokens": 4}
distilled = partial(timm_vit, kind=VisionTransformerDistilled)
dinov2 = partial(of_transformers, kind="Dinov2", form="Model")
registers = partial(of_transformers, kind="Dinov2WithRegisters", form="Model")
dinov3 = partial(of_transformers, kind="DINOv3ViT", form="Model")
deit = partial(of_transformers, kind="DeiT")
PEERS = [
    *(("timm", timm_vit, {**TIMM, **options}) for options in TIMM_CONFIGS.values()),
    ("timm", timm_vit, {**TIMM, "dynamic_img_size": True, "dynamic_img_pad": True}),
    *(("timm", distilled, {**TIMM, **o}) for o in ({}, {"num_classes": 0}, {"init_values": 0.1, "qkv_bias": False})),
    ("timm_legacy", timm_vit, {**TIMM, "mlp_ratio": 3.0, "qkv_bias": False}),
    *(
        ("torchvision", torchvision_vit, {**TORCHVISION, "num_classes": 5, **options})
        for options in ({}, {"representation_size": 7}, {"norm_layer": "layernorm_1e-5"})
    ),
    *(
        ("hf", of_transformers, {**HF, **CLASSES, **options})
        for options in (
            {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "qkv_bias": False},
            {"image_size": [8, 24], "patch_size": [4, 6], "num_channels": 1},
            {"hidden_act": "silu"},
            {"hidden_act": "relu"},
            {"hidden_act": "quick_gelu"},
        )
    ),
    ("deit", deit, {**HF, **CLASSES}),
    ("deit", partial(deit, form="ForImageClassificationWithTeacher"), {**HF, **CLASSES, "layer_norm_eps": 1e-6}),
    *(
        ("vit_pytorch", lucid_vit, {**LUCID, **options})
        for options in (
            {"pool": "mean"},
            {"dim_head": 12, "channels": 1},
            {"heads": 1, "dim_head": 16},
            {"heads": 4, "dim_head": 8},
            {"image_size": [8, 24], "patch_size": [4, 6]},
        )
    ),
    *(
        ("simple_vit", partial(lucid_vit, kind=lucid.SimpleViT), {**LUCID, **options})
        for options in ({}, {"dim_head": 12, "channels": 1}, {"heads": 1, "dim_head": 16})
    ),
    ("dinov2", dinov2, HF),
    ("dinov2", dinov2, {**HF, "use_swiglu_ffn": True, "qkv_bias": False}),
    ("dinov2", partial(dinov2, form="ForImageClassification"), {**HF, "num_labels": 5}),
    ("dinov2", registers, {**HF, **REGISTERS, "use_swiglu_ffn": True}),
    ("dinov2", partial(registers, form="ForImageClassification"), {**HF, **REGISTERS, "num_labels": 5}),
    ("dinov3", dinov3, {**HF, **REGISTERS, "intermediate_size": 40}),
    ("dinov3", dinov3, {**HF, "use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 40}),
    ("dinov3", dinov3, {**HF, "mlp_bias": False, "proj_bias": False, "intermediate_size": 40}),
]


def output_of(network, batch, *, tokens=False):
    output = network(batch)
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if "logits" in output else output.last_hidden_state[:, slice(None) if tokens else 0]


def check_found(place, family, given, vit, batch):
    """The weights in a file, and the config that its model has here, are those of a ViT."""
    file = read_weights(place)
    found = identify(file, given)
    assert found.family == family or {found.family, family} == {"timm", "timm_legacy"}
    again = from_reference(file.tensors, family=found.family, config=found.config).eval()
    network = network_in_file({"model": model_config(again)}).eval()
    network.load_state_dict(again.state_dict(), strict=True)
    dtype = next(vit.parameters()).dtype
    with torch.no_grad():
        expected = vit(batch.to(dtype))
        assert torch.equal(again(batch.to(dtype)), expected)
        assert torch.equal(network.to(dtype)(batch.to(dtype)), expected)


@pytest.mark.parametrize(("family", "make", "config"), PEERS, ids=lambda each: None if callable(each) else str(each))
def test_a_model_of_others_goes_in_and_out(family, make, config, tmp_path):
    peer = randomise(make(config)).eval()
    for name, weight in peer.named_parameters():
        if name.endswith("mask_token"):
            nn.init.zeros_(weight)
    atol = 1e-6 if family == "dinov3" else 1e-10  # its coordinates are in float32
    state = peer.state_dict()
    vit = from_reference(state, family=family, config=config).eval()
    batch = images(3, vit.in_channels, *vit.image_size)
    inputs = [batch.clone().requires_grad_() for _ in range(2)]
    tokens = family.startswith("dino") and not vit.num_classes
    ours = (vit.forward_features if tokens else vit)(inputs[0])
    theirs = output_of(peer, inputs[1], tokens=tokens)
    assert not tokens or torch.equal(vit(batch), ours[:, 0])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert theirs.std() > 0.01
    ours.backward(images(*theirs.shape, seed=2))
    theirs.backward(images(*theirs.shape, seed=2))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=10 * atol)
    torch.save(state, tmp_path / "a.pth")
    check_found(tmp_path / "a.pth", family, told(family, config, state), vit, batch)
    if family not in WRITTEN:
        return
    assert sum(p.numel() for p in vit.parameters()) == sum(p.numel() for p in peer.parameters())
    gradients = copy.deepcopy(vit)
    with torch.no_grad():
        for weight, other in zip(gradients.parameters(), vit.parameters(), strict=True):
            weight.copy_(other.grad)
    layout = FAMILIES[family].find_layout({name: tuple(value.shape) for name, value in state.items()})
    named, _ = to_reference(gradients, family=family, layout=layout)
    for name, weight in peer.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(named[name], weight.grad, rtol=1e-9, atol=10 * atol)
    back, written = to_reference(vit, family=family, layout=layout)
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    other = make(written).double().eval()
    other.load_state_dict(back, strict=True)
    torch.testing.assert_close(output_of(other, batch, tokens=tokens), theirs.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize(("family", "more"), [*((family, {}) for family in CONFIGS), *MORE], ids=str)
def test_a_model_of_a_table_goes_in_and_out(family, more, tmp_path):
    vit, state, config = fresh(
        family, {"attention": "separate"} if "separate_literal" in more.values() else None, **more
    )
    again = from_reference(state, family=family, config=config).eval()
    assert describe(again) == describe(vit)
    batch = images(2, 3, 8, 8).float()
    assert torch.equal(again(batch), vit(batch))
    save_file(state, tmp_path / "a.safetensors")
    check_found(tmp_path / "a.safetensors", family, told(family, config, state), vit, batch)
    if family in WRITTEN:
        layout = FAMILIES[family].find_layout({name: tuple(value.shape) for name, value in state.items()})
        back, same = to_reference(again, family=family, layout=layout)
        assert FAMILIES[family].read(same, layout) == FAMILIES[family].read(config, layout)
        assert set(back) == set(state)
        assert all(torch.equal(back[name], state[name]) for name in state)


def of_before_linen(state):
    numbers = {"LayerNorm_1/": "LayerNorm_2/", "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1"}
    for now, before in {**numbers, "MlpBlock_0": "MlpBlock_3"}.items():
        state = {name.replace(now, before): value for name, value in state.items()}
    return {f"opt/target/{name}": value for name, value in state.items()}


def stacked(state):
    blocks = {name: state[name] for name in state if "encoderblock_0/" in name}
    rest = {f"params/{name}": value for name, value in state.items() if "encoderblock_" not in name}
    both = {name: torch.stack([value, state[name.replace("block_0/", "block_1/")]]) for name, value in blocks.items()}
    return rest | {f"params/{name.replace('encoderblock_0', 'encoderblock')}": value for name, value in both.items()}


@pytest.mark.parametrize(("family", "form"), [("google", of_before_linen), ("big_vision", stacked)])
def test_other_forms_of_files_of_jax(family, form):
    vit, state, config = fresh(family)
    again = from_reference(form(state), family=family, config=config).eval()
    assert not state.keys() & form(state).keys()
    assert torch.equal(again(images(2, 3, 8, 8).float()), vit(images(2, 3, 8, 8).float()))


@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [
        ("hf", {"names": "disk"}, "vit.encoder.layer.1.attention.attention.key.weight"),
        ("timm", {"scales": ("gamma_1", "gamma_2")}, "blocks.0.gamma_1"),  # of DeiT III's own code
        ("timm_legacy", {"blocks": "block"}, "block.1.attn.qkv.weight"),
        ("torchvision", {"mlp": ["linear_1", "linear_2"]}, "encoder.layers.encoder_layer_1.mlp.linear_2.bias"),
        ("einops_tutorial", {"attention": "separate"}, "1.1.0.fn.1.queries.weight"),
    ],
    ids=str,
)
def test_a_model_is_exported_in_each_layout(family, layout, name):
    more = {"einops_tutorial": {"attention_variant": "separate_correct"}, "timm": {"init_values": 0.1}}
    vit, state, config = fresh(family, layout, **more.get(family, {}))
    again = from_reference(state, family=family, config=config).eval()
    assert torch.equal(again(images(2, 3, 8, 8).float()), vit(images(2, 3, 8, 8).float()))
    back, _ = to_reference(again, family=family, layout=layout)
    assert name in back
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(back[n], state[n]) for n in state)
    assert name not in to_reference(again, family=family)[0]


def test_a_deit_without_a_classifier_and_with_the_layer_of_pre_training_loads_without_a_word(tmp_path):
    peer = randomise(deit({**HF, "intermediate_size": 24, "hidden_act": "gelu_pytorch_tanh"}, form="Model")).eval()
    peer.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    found = load(tmp_path)
    batch = images(2, 3, 16, 16)
    torch.testing.assert_close(found.network(batch), output_of(peer, batch), rtol=0, atol=1e-10)
    assert (found.mean, found.network.num_heads) == ([0.5] * 3, 2)


def test_encoders_of_masked_autoencoders_are_read_without_their_decoders(tmp_path):
    """transformers#16101, mae#13."""
    decoder = {f"decoder_{name}": 1 for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size")}
    sizes = {**HF, **decoder, "intermediate_size": 24, "decoder_hidden_size": 8, "mask_ratio": 0.0}
    peer = randomise(of_transformers(sizes, "ViTMAE", "ForPreTraining")).double().eval()
    peer.save_pretrained(tmp_path)
    batch = images(2, 3, 16, 16)
    tokens = peer.vit(batch, noise=torch.arange(16.0).expand(2, 16)).last_hidden_state
    torch.testing.assert_close(load(tmp_path).network.double()(batch), tokens[:, 0], rtol=0, atol=1e-8)
    encoder = randomise(VisionTransformer(**{**TIMM, "num_classes": 0})).eval()
    beside = {"mask_token": torch.ones(1, 1, 8), "decoder_pos_embed": torch.ones(1, 17, 8)}
    beside |= {f"decoder_{name}": weight for name, weight in encoder.state_dict().items() if "blocks" in name}
    torch.save({"model": encoder.state_dict() | beside}, tmp_path / "mae.pth")
    found = load(tmp_path / "mae.pth", config={"num_heads": 2}).network.double()(batch)
    torch.testing.assert_close(found, encoder.double()(batch), rtol=0, atol=1e-8)


META = {
    "pos_embed": r"embeddings\.position_embeddings",
    "patch_embed.proj": r"embeddings\.patch_embeddings(\.projection)?",
    "": r"embeddings\.",
    "blocks.": r"(model|encoder)\.layer\.",
    "norm.": r"^layernorm\.",
    "attn.proj": r"attention\.o_proj",
    r"ls\1.gamma": r"layer_scale(\d)\.lambda1",
}
"""Names of Meta's repositories, and those of transformers in memory."""


def meta_file(peer, *, v3):
    """The tensors of a model under the names of Meta's repositories, with those that they keep beside them."""
    state, found = peer.state_dict(), {"mask_token": torch.ones(1, 24)}
    gated = any("gate_proj" in name for name in state)
    mlp = {"gate_proj": "w1", "up_proj": "w2" if gated else "fc1", "down_proj": "w3" if gated or not v3 else "fc2"}
    joined = {"attn.qkv": [f"attention.{part}_proj" for part in "qkv"]}
    joined |= {} if v3 or not gated else {"mlp.w12": ["mlp.gate_proj", "mlp.up_proj"]}
    for number, kind in ((n, k) for n in range(2) for k in ("weight", "bias")):
        block = f"{'model.' if v3 else 'encoder.'}layer.{number}"
        for theirs, parts in joined.items():
            values = [state.pop(f"{block}.{part}.{kind}", torch.full((24,), 7.0).double()) for part in parts]
            found[f"blocks.{number}.{theirs}.{kind}"] = torch.cat(values)
        if v3 and kind == "bias":  # which takes the bias of the keys away
            found[f"blocks.{number}.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(24)
    for name, value in state.items():
        for theirs, ours in META.items():
            name = re.sub(ours, theirs, name)
        for ours, theirs in mlp.items():
            name = name.replace(ours, theirs)
        found.setdefault(name.replace("register", "storage") if v3 else name, value)
    return found | ({"rope_embed.periods": torch.ones(3)} if v3 else {})


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (dinov2, {}),
        (dinov2, {"use_swiglu_ffn": True}),
        (registers, REGISTERS),
        (registers, {**REGISTERS, "use_swiglu_ffn": True}),
        (dinov3, {**REGISTERS, "intermediate_size": 40}),
        (dinov3, {**REGISTERS, "intermediate_size": 40, "use_gated_mlp": True, "hidden_act": "silu"}),
    ],
    ids=lambda each: None if callable(each) else str(each),
)
def test_files_of_meta_load_without_being_named(make, more, tmp_path):
    peer, v3 = randomise(make({**HF, **more})).eval(), make is dinov3
    state = meta_file(peer, v3=v3)
    assert not any("embeddings" in name or "layer." in name for name in state)
    save_file({name: weight.contiguous() for name, weight in state.items()}, tmp_path / "weights.safetensors")
    path, config = tmp_path / "weights.safetensors", {"num_attention_heads": 2, **({"image_size": 16} if v3 else {})}
    found = load(path, config=config)
    assert found.mean == [0.485, 0.456, 0.406]
    for name, weight in peer.named_parameters():
        if name.endswith("mask_token"):
            nn.init.zeros_(weight)
    atol = 1e-4 if v3 else 1e-8  # here tensors of two types, so that all are float32
    for size in ((16, 16), (8, 24)) if v3 else ((16, 16),):
        network = load(path, config=config, image_size=size).network.double()
        batch = images(2, 3, *size)
        tokens = network.forward_features(batch)
        torch.testing.assert_close(tokens, output_of(peer, batch, tokens=True), rtol=0, atol=atol)
        assert torch.equal(network(batch), tokens[:, 0])
