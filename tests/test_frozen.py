"""Values that no change of the code may move: those of shipped configs; state dict, start and logits of networks.

``python tests/test_frozen.py`` writes the files of ``tests/frozen`` anew, for a change that is meant and whose commit
says why.
"""

import contextlib
import json
import re
import tempfile
import zlib
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from runs import REPOSITORY
from tensors import write_images, write_parquet
from torch import Tensor, nn

import vit_lightning as vl
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.resolve import resolve

FROZEN = REPOSITORY / "tests" / "frozen"
EXPERIMENTS = REPOSITORY / "experiments"
CONFIGS = {
    str(path.relative_to(EXPERIMENTS).with_suffix("")): path
    for path in sorted(EXPERIMENTS.rglob("*.yaml"))
    if "ablations" not in path.parts
}
FAMILIES = [name for name in CONFIGS if name.startswith("families/")]
SIZES = {"image_size": (8, 12), "patch_size": 4, "num_classes": 5, "emb_size": 16, "depth": 2, "num_heads": 2}
CRATE = {"block": vl.CrateBlock, "attention": vl.MSSA, "feed_forward": vl.ISTA}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow heads, no biases": {
        "attention": partial(vl.MultiHeadAttention, dim_head=3, qkv_bias=False, projection_bias=False),
        "feed_forward": partial(vl.FeedForwardBlock, expansion=2.0, bias=False, activation="silu"),
    },
    "norms within": {
        "attention": partial(vl.MultiHeadAttention, qk_norm=vl.RMSNorm, norm=vl.LayerNorm, scale=0.3),
        "feed_forward": partial(vl.FeedForwardBlock, norm=vl.LayerNorm, activation="gelu_tanh"),
    },
    "SeparateAttention": {"attention": vl.SeparateAttention},
    "DividedAfterSoftmaxAttention": {"attention": vl.DividedAfterSoftmaxAttention},
    "RotaryAttention": {"attention": partial(vl.RotaryAttention, temperature=100.0), "positions": "none"},
    "rotary, registers": {"attention": vl.RotaryAttention, "register_tokens": 2, "pool": vl.MeanAllPool},
    "rotary registers, gates": {
        "attention": partial(vl.RotaryAttention, register_temperature=100.0, gate="heads"),
        "register_tokens": 4,
    },
    "MSSA": {"attention": vl.MSSA},
    "CrateBlock": CRATE,
    "CrateBlock, ReLU": {**CRATE, "feed_forward": vl.FeedForwardBlock, "positions": vl.LearnedPatchPositions},
    "SwiGLU": {"feed_forward": vl.SwiGLU, "norm": vl.RMSNorm},
    "PackedSwiGLU": {"feed_forward": partial(vl.PackedSwiGLU, expansion=2.5), "layer_scale": 0.1},
    "mean": {"pool": "mean", "class_token": False, "final_norm": "after_pool", "positions": "sincos2d"},
    "mean beside a class token": {"pool": "mean", "final_norm": "none", "embedding_norm": vl.LayerNorm},
    "AttentionPool": {"pool": vl.AttentionPool},
    "ClassTokenAndMeanPool": {"pool": vl.ClassTokenAndMeanPool},
    "MaxPool": {"pool": vl.MaxPool},
    "MeanMaxPool": {"pool": vl.MeanMaxPool, "representation_size": 6},
    "SequencePool": {"pool": vl.SequencePool},
    "CompactBlock": {"block": vl.CompactBlock, "initialisation": "compact"},
    "distillation": {"distillation_token": True},
    "linear patches": {"patch_projection": partial(vl.LinearProjection, patch_norm=vl.LayerNorm, norm=vl.LayerNorm)},
    "ConvTokenizer": {"patch_projection": vl.ConvTokenizer},
    "LearnedPatchPositions": {"positions": vl.LearnedPatchPositions, "register_tokens": 1},
    **{f"sincos2d, {form}": {"positions": partial(vl.SinCos2dPositions, form=form)} for form in ("simple_vit", "mae")},
    "features": {"num_classes": 0},
}
NETWORKS = [*FAMILIES, *VARIANTS]


def read(name: str) -> Any:
    return json.loads((FROZEN / f"{name}.json").read_text())


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Dotted names and values of a config, in which a list is one value."""
    if not isinstance(values, dict) or not values:
        return {name: values}
    return {k: v for key, value in values.items() for k, v in flat(value, f"{name}.{key}" if name else key).items()}


def resolved(name: str) -> Experiment:
    """Resolves a shipped config in the working folder, in which images lie."""
    text, source = CONFIGS[name].read_text(), []
    if "ImageFolder" in text:
        source = ["--data.root=images"]
    if "HuggingFaceSet" in text:
        source = ["--data.path=tables", "--data.image_column=image", "--data.cache=tables/cache"]
    if "init_from: SOURCE" in text:  # to be given
        source.append("--init_from=null")
    return resolve([f"--config={CONFIGS[name]}", *source])


def values_of(experiment: Experiment) -> dict[str, Any]:
    """Values as ``--print_config`` prints them."""
    return flat(yaml.safe_load(experiment.to_yaml()))


def write_data(folder: Path) -> None:
    for label in "abc":
        write_images(folder / "images" / "train" / label, 4)
    (folder / "tables").mkdir()
    with contextlib.suppress(ImportError):
        write_parquet(folder / "tables" / "train.parquet", folder / "images" / "train")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_values_of_a_shipped_config(name, data, monkeypatch):
    monkeypatch.chdir(data)
    frozen = read("configs")
    expected = frozen["digits"]
    if name != "digits":
        expected = {k: v for k, v in expected.items() if k not in frozen[name]["without"]} | frozen[name]["with"]
    experiment = resolved(name)
    assert values_of(experiment) == expected
    with torch.device("meta"):
        network, classes = experiment.make_network(), experiment.data.num_classes
    assert getattr(network, "num_classes", classes) == classes


def build(name: str) -> nn.Module:
    """Builds a network with the first weights of seed 0."""
    torch.manual_seed(0)
    if name in VARIANTS:
        return vl.ViT(**{**SIZES, **VARIANTS[name]})
    return resolve([f"--config={CONFIGS[name]}"]).make_network()


def fixed(name: str, weight: Tensor) -> Tensor:
    """Numbers for a weight, from its name."""
    uniform = torch.from_numpy(np.random.default_rng(zlib.crc32(name.encode())).random(weight.shape)) * 2 - 1
    if weight.ndim > 1:
        return uniform * (3 / weight[0].numel()) ** 0.5
    return 0.1 * uniform + (1.0 if name.endswith("weight") else 0.0)


@cache
def facts(name: str) -> dict[str, Any]:
    """Facts of a network: shapes of its state dict, size of its first weights, logits and gradient of fixed weights."""
    network = build(name)
    state = network.state_dict()
    shapes = Counter(
        (re.sub(r"\d+", "N", key, count=1), "x".join(map(str, value.shape))) for key, value in state.items()
    )
    start = sum(float(value.double().abs().sum()) for value in state.values())
    network.double().eval()
    with torch.no_grad():
        for key, weight in network.named_parameters():
            weight.copy_(fixed(key, weight))
    height, width = network.image_size
    images = torch.from_numpy(np.random.default_rng(0).random((2, network.in_channels, height, width)))
    logits = network(images)
    (logits**2).sum().backward()
    gradient = sum(float((w.grad**2).sum()) for w in network.parameters() if w.grad is not None) ** 0.5
    return {
        "state": {f"{key} {shape}": count for (key, shape), count in shapes.items()},
        "start": start,
        "logits": logits.tolist(),
        "gradient": gradient,
    }


def test_every_network_is_frozen():
    assert [*read("networks")] == NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_the_state_dict_of_a_network(name):
    """In its order; numbers of blocks are N, with how often each name comes."""
    assert list(facts(name)["state"].items()) == list(read("networks")[name]["state"].items())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_weights_of_a_network(name):
    """The sum of their sizes; torch 2.10 draws truncated normals from other numbers than 2.14."""
    same_draws = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    expected = pytest.approx(read("networks")[name]["start"], rel=1e-6 if same_draws else 0.05)
    assert facts(name)["start"] == expected


@pytest.mark.parametrize("name", NETWORKS)
def test_the_logits_and_gradients_of_fixed_weights(name):
    found, frozen = facts(name), read("networks")[name]
    np.testing.assert_allclose(found["logits"], frozen["logits"], rtol=1e-9, atol=1e-10)
    assert found["gradient"] == pytest.approx(frozen["gradient"], rel=1e-9)


def freeze() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_data(Path())
        values = {name: values_of(resolved(name)) for name in CONFIGS}
    usual = values.pop("digits")
    configs: dict[str, Any] = {"digits": usual}
    for name, own in values.items():
        others = {key: value for key, value in own.items() if key not in usual or usual[key] != value}
        configs[name] = {"without": sorted(usual.keys() - own.keys()), "with": others}
    for name, frozen in {"configs": configs, "networks": {name: facts(name) for name in NETWORKS}}.items():
        (FROZEN / f"{name}.json").write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    freeze()
