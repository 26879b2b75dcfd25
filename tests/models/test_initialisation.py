"""First weights by name, against those that the libraries themselves draw: zeros, bounds, means and variances."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import vit_pytorch as lucid
from references import CONFIGS
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import ViTConfig, ViTForImageClassification

import vit_lightning as vl
from vit_lightning.weights import FAMILIES
from vit_lightning.weights.options import Part, as_part, canonical_state, describe
from vit_lightning.weights.tables import find_names, to_ours

DRAWS = 50
WIDTH = 32
State = dict[str, Tensor]


def timm(**more: Any) -> nn.Module:
    return VisionTransformer(**SMALL, **more)


class TorchEncoder(nn.Module):
    """The ViT on ``nn.TransformerEncoder`` that is read to the user, with its own first weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, 4, 4)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.empty(1, 5, WIDTH))
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        nn.init.normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.xavier_uniform_(self.head.weight)


def as_deit() -> nn.Module:
    """DeiT's own: tokens, positions and linear layers truncated normal with 0.02, the convolution torch's."""
    vit = timm(init_values=0.1)
    for name, weight in vit.named_parameters():
        if name in ("cls_token", "pos_embed"):
            nn.init.trunc_normal_(weight, std=0.02)
    return vit


SMALL = CONFIGS["timm"] | {"depth": 1, "embed_dim": WIDTH}
HF = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
HF |= {"image_size": 8, "patch_size": 4}
LUCID = {"num_classes": 5, "dim": WIDTH, "depth": 1, "heads": 2, "mlp_dim": 24, "dim_head": 8}
LUCID |= {"image_size": 8, "patch_size": 4}
TORCHVISION = CONFIGS["torchvision"] | {"num_layers": 1, "hidden_dim": WIDTH, "representation_size": 7}
REFERENCES: dict[str, tuple[str, Callable[[], nn.Module], str, dict[str, Any]]] = {
    "timm": ("timm", timm, "timm", SMALL),
    "timm, registers": ("timm", partial(timm, reg_tokens=2), "timm", {**SMALL, "reg_tokens": 2}),
    "timm, map": ("timm", partial(timm, global_pool="map"), "timm", {**SMALL, "global_pool": "map"}),
    "deit": ("deit", as_deit, "timm", {**SMALL, "init_values": 0.1}),
    "torchvision": ("torchvision", lambda: TorchvisionViT(**TORCHVISION), "torchvision", TORCHVISION),
    "hugging_face": ("hugging_face", lambda: ViTForImageClassification(ViTConfig(**HF)), "hf", HF),
    "tutorial": ("tutorial", lambda: lucid.ViT(**LUCID), "vit_pytorch", LUCID),
    "torch_encoder": ("torch_encoder", TorchEncoder, "torch_encoder", SMALL),
}
"""By test: our name, what makes the library's model, family and config by which it is read."""


def drawn(make: Callable[[], State]) -> State:
    """All draws of each tensor, (draws, numbers), in float64."""
    torch.manual_seed(0)
    states = [make() for _ in range(DRAWS)]
    return {name: torch.stack([state[name].double().flatten() for state in states]) for name in states[0]}


def differences(ours: Tensor, theirs: Tensor) -> list[float]:
    """By how many standard errors means and variances differ; the numbers of a tensor are independent draws."""
    found = []
    for moment in (lambda x: x, lambda x: (x - x.mean()) ** 2):
        a, b = moment(ours.flatten()), moment(theirs.flatten())
        error = math.sqrt(float(a.var() / a.numel() + b.var() / b.numel()))
        found.append(abs(float(a.mean() - b.mean())) / error)
    return found


@pytest.mark.parametrize("case", REFERENCES)
def test_first_weights_are_those_of_the_library(case):
    name, make, family, config = REFERENCES[case]
    table = FAMILIES[family]

    layout = table.find_layout({key: tuple(value.shape) for key, value in make().state_dict().items()})
    part = Part(vl.ViT, {**as_part(table.read(config, layout)).arguments, "initialisation": name})
    vit = part.factory()()
    names = find_names(canonical_state(vit), table.names(describe(vit), layout))
    expected = drawn(lambda: to_ours(make().state_dict(), names))
    found = drawn(lambda: canonical_state(part.factory()()))
    assert found.keys() == expected.keys()
    for key, own in found.items():
        constant = bool((expected[key] == expected[key][0, 0]).all())
        assert bool((own == expected[key][0, 0]).all()) == constant, key
        if not constant:
            assert max(differences(own, expected[key])) < 4.0, key
            assert float(own.abs().max()) == pytest.approx(float(expected[key].abs().max()), rel=0.3), key


def bound(fan_in: int, fan_out: int) -> float:
    return math.sqrt(6.0 / (fan_in + fan_out))


JAX = {
    "patch_embedding.projection.conv.weight": ("truncated", math.sqrt(1 / 48)),
    "encoder.0.attention.fn.attention.qkv.weight": ("uniform", bound(WIDTH, WIDTH)),
    "encoder.0.attention.fn.attention.projection.weight": ("uniform", bound(WIDTH, WIDTH)),
    "encoder.0.feed_forward.fn.feed_forward.expand.weight": ("uniform", bound(WIDTH, 4 * WIDTH)),
    "encoder.0.feed_forward.fn.feed_forward.contract.weight": ("uniform", bound(WIDTH, 4 * WIDTH)),
    "head.representation.linear.weight": ("truncated", math.sqrt(1 / WIDTH)),
}
_MLP_BIASES = [f"encoder.0.feed_forward.fn.feed_forward.{name}.bias" for name in ("expand", "contract")]
_POOL = "head.pool"
FANS = {
    "encoder.0.attention.fn.attention.qkv.weight": (WIDTH, 3 * WIDTH),
    "encoder.0.attention.fn.attention.projection.weight": (WIDTH, WIDTH),
    "encoder.0.feed_forward.fn.feed_forward.expand.weight": (WIDTH, 4 * WIDTH),
    "encoder.0.feed_forward.fn.feed_forward.contract.weight": (4 * WIDTH, WIDTH),
    "head.representation.linear.weight": (WIDTH, 7),
    "head.linear.weight": (7, 5),
}
FORMULAS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, float]]]] = {
    "google": ({}, {**JAX, "patch_embedding.positions.table": ("normal", 0.02)}),
    "big_vision": (
        {"pool": vl.AttentionPool},
        {
            **JAX,
            "patch_embedding.positions.table": ("normal", WIDTH**-0.5),
            f"{_POOL}.probe": ("uniform", bound(1, WIDTH)),
            **{f"{_POOL}.{name}.weight": ("uniform", bound(WIDTH, WIDTH)) for name in ("query", "kv", "projection")},
            **{
                f"{_POOL}.feed_forward.{n}.weight": ("uniform", bound(WIDTH, 4 * WIDTH)) for n in ("expand", "contract")
            },
            **dict.fromkeys(_MLP_BIASES, ("normal", 1e-6)),
            **{f"{_POOL}.feed_forward.{name}.bias": ("normal", 1e-6) for name in ("expand", "contract")},
        },
    ),
    "compact": (
        {"block": vl.CompactBlock, "pool": vl.SequencePool, "register_tokens": 1},
        {
            **dict.fromkeys(
                (*FANS, "patch_embedding.register_tokens.token", f"{_POOL}.score.weight"), ("normal", 0.02)
            ),
            "patch_embedding.projection.conv.weight": ("normal", math.sqrt(2 / 48)),
            "patch_embedding.projection.conv.bias": ("uniform", math.sqrt(1 / 48)),
            "patch_embedding.positions.table": ("normal", 0.2),
        },
    ),
    "spt": (
        {"patch_projection": "linear"},
        {
            **{name: ("normal", math.sqrt(2 / sum(fans))) for name, fans in FANS.items()},
            "patch_embedding.projection.linear.weight": ("normal", math.sqrt(2 / (48 + WIDTH))),
            "patch_embedding.class_token.token": ("normal", 1.0),
            "patch_embedding.positions.table": ("normal", 1.0),
        },
    ),
}
"""What the initialisers of the repositories are, of JAX flax's default and named ones: kind, bound or deviation."""


@pytest.mark.parametrize("name", FORMULAS)
def test_first_weights_are_those_of_the_repository(name):
    """LeCun normal is cut off at two standard deviations of the normal it comes from, 1 / 0.8796 of its own."""
    more, formulas = FORMULAS[name]
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": WIDTH, "depth": 1, "num_heads": 2, "num_classes": 5}
    options = {**sizes, "representation_size": 7, "initialisation": name, **more}
    found = drawn(lambda: vl.ViT(**options).state_dict())
    for key, numbers in found.items():
        kind, size = formulas.get(key, ("constant", 1.0 if key.endswith("norm.weight") else 0.0))
        if kind == "constant":
            assert (numbers == size).all(), key
            continue
        deviation = size / math.sqrt(3) if kind == "uniform" else size
        kurtosis = {"uniform": 1.8, "normal": 3.0, "truncated": 2.37}[kind]
        count = numbers.numel()
        assert abs(float(numbers.mean())) < 4 * deviation / math.sqrt(count), key
        assert abs(float(numbers.square().mean()) / deviation**2 - 1) < 4 * math.sqrt((kurtosis - 1) / count), key
        if kind != "normal":
            largest = size if kind == "uniform" else 2 * size / 0.87962566103423978
            assert 0.97 * largest < float(numbers.abs().max()) <= largest * (1 + 1e-6), key


@pytest.mark.parametrize("kind", [vl.LearnedPositions, vl.LearnedPatchPositions])
def test_positions_may_have_a_standard_deviation_of_their_own(kind):
    torch.manual_seed(0)
    vit = vl.ViT("Ti/1", image_size=8, depth=1, positions=partial(kind, std=0.5), initialisation="torch")
    assert float(vit.patch_embedding.positions.table.detach().std()) == pytest.approx(0.5, rel=0.03)


def test_a_function_of_the_user_s_own_draws_the_weights():
    def ones(network: nn.Module) -> None:
        for weight in network.parameters():
            nn.init.ones_(weight)

    vit = vl.ViT("Ti/8", image_size=8, depth=1, initialisation=ones)
    assert all((weight == 1).all() for weight in vit.parameters())
