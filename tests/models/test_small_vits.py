"""Small ViTs as their configs build them, against what the published code gives in float64 for the same weights.

Weights and images are formulas of ``shared/golden/small_vits``, whose files hold everything; a few numbers stand here.
"""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from einops import rearrange
from runs import REPOSITORY, SHARED
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vit_lightning.config.resolve import resolve
from vit_lightning.training.optim import OptimizerConfig, optimizer_and_schedule

GOLDEN = SHARED / "golden" / "small_vits"
COMPACT = {
    "patch_embedding.projection.conv": "tokenizer.conv_layers.0.0",
    "patch_embedding.projection.layers.0.conv": "tokenizer.conv_layers.0.0",
    "patch_embedding.class_token.token": "classifier.class_emb",
    "patch_embedding.positions.table": "classifier.positional_emb",
    "encoder.*.attention.fn.norm": "classifier.blocks.*.pre_norm",
    "encoder.*.attention.fn.attention.qkv": "classifier.blocks.*.self_attn.qkv",
    "encoder.*.attention.fn.attention.projection": "classifier.blocks.*.self_attn.proj",
    "encoder.*.feed_forward_norm": "classifier.blocks.*.norm1",
    "encoder.*.feed_forward.fn.feed_forward.expand": "classifier.blocks.*.linear1",
    "encoder.*.feed_forward.fn.feed_forward.contract": "classifier.blocks.*.linear2",
    "norm": "classifier.norm",
    "head.pool.score": "classifier.attention_pool",
    "head.linear": "classifier.fc",
}
SPT = {
    "patch_embedding.projection.linear": "to_patch_embedding.1",
    "patch_embedding.class_token.token": "cls_token",
    "patch_embedding.positions.table": "pos_embedding",
    "encoder.*.attention.fn.norm": "transformer.layers.*.0.norm",
    "encoder.*.attention.fn.attention.qkv": "transformer.layers.*.0.fn.to_qkv",
    "encoder.*.attention.fn.attention.projection": "transformer.layers.*.0.fn.to_out.0",
    "encoder.*.feed_forward.fn.norm": "transformer.layers.*.1.norm",
    "encoder.*.feed_forward.fn.feed_forward.expand": "transformer.layers.*.1.fn.net.0",
    "encoder.*.feed_forward.fn.feed_forward.contract": "transformer.layers.*.1.fn.net.3",
    "norm": "mlp_head.0",
    "head.linear": "mlp_head.1",
}


class Published(NamedTuple):
    """A published network.

    Args:
        config: our config of it.
        count: its parameters.
        names: its names of ours.
        logits: first logits of the first image.
        losses: of the first steps.
        norm: norm of the gradient of the classifier's weight in step 1.
    """

    config: str
    count: int
    names: dict[str, str]
    logits: list[float]
    losses: list[float]
    norm: float


MODELS = {
    "vit_7_4_32": Published(
        "cifar10_vit_lite",
        3_716_874,
        COMPACT,
        logits=[2.12182220046, -2.28487224309, 2.25703066749],
        losses=[3.57765235358, 2.30373824295, 2.21867436075],
        norm=6.89988654174,
    ),
    "cvt_7_4_32": Published(
        "cifar10_cvt",
        3_716_619,
        COMPACT,
        logits=[0.152519140574, -0.231723474607, 0.139507707319],
        losses=[2.32555165681, 2.60528205842, 2.16227904651],
        norm=5.57637470348,
    ),
    "cct_7_3x1_32": Published(
        "cifar10_cct",
        3_760_139,
        COMPACT,
        logits=[0.183921255601, -0.254505010544, 0.152879347772],
        losses=[2.32312085335],
        norm=5.67041581658,
    ),
    "spt_vit_cifar10": Published(
        "cifar10_spt_vit",
        2_692_426,
        SPT,
        logits=[0.168217559004, -0.184215688881, 0.288196269154],
        losses=[2.3219578215, 2.21190462724, 2.12590651523],
        norm=5.06701182644,
    ),
}
"""By the name of its file."""


class Found(NamedTuple):
    logits: Tensor
    norms: dict[str, float]
    losses: list[float]
    after: Tensor


def theirs(name: str, names: dict[str, str]) -> str:
    """Their name of one of our parameters."""
    block = name.split(".")[1] if name.startswith("encoder.") else ""
    plain = name.replace(f"encoder.{block}.", "encoder.*.") if block else name
    key = max((key for key in names if f"{plain}.".startswith(f"{key}.")), key=len)
    return (names[key] + plain.removeprefix(key)).replace("*", block)


@pytest.mark.parametrize("name", ["vit_lite", "cvt", "spt_vit"])
def test_the_config_of_cifar_100_has_the_recipe_of_cifar_10(name):
    ten, hundred = (yaml.safe_load((REPOSITORY / f"experiments/cifar{n}_{name}.yaml").read_text()) for n in (10, 100))
    assert (ten["data"].pop("class_path"), hundred["data"].pop("class_path")) == (
        "vit_lightning.CIFAR10",
        "vit_lightning.CIFAR100",
    )
    assert ten == hundred


def network_of(published: Published) -> nn.Module:
    return (
        resolve([f"--config={REPOSITORY}/experiments/{published.config}.yaml", "--data.augment=[HorizontalFlip]"])
        .make_network()
        .double()
    )


def load_formula(network: nn.Module, names: dict[str, str]) -> dict[str, nn.Parameter]:
    """Loads weights by the formula of the published tensors; returns these parameters by their names there."""
    found = dict(sorted((theirs(name, names), weight) for name, weight in network.named_parameters()))
    for k, (name, weight) in enumerate(found.items()):
        values = 0.05 * torch.sin(0.37 * k + 0.013 * torch.arange(weight.numel(), dtype=torch.float64))
        is_scale = name.endswith("weight") and weight.ndim == 1
        weight.data = values.view(weight.shape) + (1.0 if is_scale else 0.0)
    if "to_patch_embedding.1.weight" in found:  # where a patch is flattened with its channels last
        matrix = found["to_patch_embedding.1.weight"]
        matrix.data = rearrange(matrix.data, "e (p c) -> e (c p)", c=3)
    return found


def images() -> Tensor:
    b, c, i, j = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in (4, 3, 32, 32)), indexing="ij")
    return torch.sin(0.11 * b + 0.7 * c + 0.05 * i * (1.0 + 0.1 * c) + 0.031 * j)


def found_for(name: str, steps: int) -> Found:
    """What our network gives, before and after some steps without dropout, by our optimizer."""
    network = network_of(MODELS[name])
    weights, batch, labels = load_formula(network, MODELS[name].names), images(), torch.arange(4)
    for module in network.modules():  # in training mode, without what is drawn
        for probability in {"p", "dropout"} & vars(module).keys():
            setattr(module, probability, 0.0)
    with torch.no_grad():
        logits = network.eval()(batch)
    options: Any = {"lr": 5e-4, "weight_decay": 0.03, "weight_decay_on": "all", "schedule": "constant"}
    optimizer, _ = optimizer_and_schedule(network, OptimizerConfig(**options), total_steps=steps, steps_per_epoch=steps)
    norms, losses = dict[str, float](), list[float]()
    network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(network(batch), labels, label_smoothing=0.1)
        loss.backward()
        norms = norms or {name: float(weight.grad.norm()) for name, weight in weights.items()}
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return Found(logits, norms, losses, network.eval()(batch))


@pytest.mark.parametrize("name", MODELS)
def test_a_config_is_the_published_network(name):
    published = MODELS[name]
    found = found_for(name, steps=len(published.losses))
    assert sum(weight.numel() for weight in network_of(published).parameters()) == published.count
    assert found.logits[0, :3].tolist() == pytest.approx(published.logits, abs=1e-10)
    assert found.losses == pytest.approx(published.losses, abs=1e-9)
    assert found.norms[theirs("head.linear.weight", published.names)] == pytest.approx(published.norm, rel=1e-9)


@pytest.mark.full
@pytest.mark.skipif(not GOLDEN.exists(), reason="the reference files are not here")
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_are_the_published_ones(name):
    arrays, about = np.load(GOLDEN / f"{name}.npz"), json.loads((GOLDEN / f"{name}.json").read_text())
    found = found_for(name, steps=20)
    assert [*found.norms] == [name for name, _ in about["tensors"]]
    np.testing.assert_allclose(found.logits, arrays["logits"], rtol=0, atol=1e-11)
    np.testing.assert_allclose([*found.norms.values()], arrays["grad_norms"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.losses[:15], arrays["losses"][:15], rtol=0, atol=1e-9)
    rest = 1e-6 if name == "spt_vit_cifar10" else 1e-9  # its training makes rounding errors larger from here on
    np.testing.assert_allclose(found.losses[15:], arrays["losses"][15:], rtol=0, atol=rest)
    np.testing.assert_allclose(found.after, arrays["logits_after"], rtol=0, atol=rest)


def test_learning_rates_are_those_of_the_training_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "experiments"))
    from compact_transformers import learning_rate, timm_learning_rate

    rates = [learning_rate(epoch, 200) for epoch in range(200)]
    assert rates[:6] == [1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0, 1.0]
    assert rates[5:] == pytest.approx([(1 + np.cos(np.pi * n / 195)) / 2 for n in range(195)])
    scheduler = pytest.importorskip("timm.scheduler")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=5.5e-4)
    timm = scheduler.CosineLRScheduler(optimizer, 300, lr_min=1e-5, warmup_t=10, warmup_lr_init=1e-6)
    for epoch in range(310):
        timm.step(epoch)
        ends = {"first": 1e-6 / 5.5e-4, "least": 1e-5 / 5.5e-4}
        found = 5.5e-4 * timm_learning_rate(epoch, 310, warmup=10, cooldown=10, **ends)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"]), epoch


VIT5 = {
    "patch_embedding.projection.conv": "patch_embed.proj",
    "patch_embedding.class_token.token": "cls_token",
    "patch_embedding.register_tokens.token": "reg_token",
    "patch_embedding.positions.table": "pos_embed",
    "encoder.*.attention.fn.norm": "blocks.*.norm1",
    "encoder.*.attention.fn.attention.qkv": "blocks.*.attn.qkv",
    "encoder.*.attention.fn.attention.projection": "blocks.*.attn.proj",
    "encoder.*.attention.fn.attention.query_norm": "blocks.*.attn.q_norm",
    "encoder.*.attention.fn.attention.key_norm": "blocks.*.attn.k_norm",
    "encoder.*.attention.fn.layer_scale.scale": "blocks.*.gamma_1",
    "encoder.*.feed_forward.fn.norm": "blocks.*.norm2",
    "encoder.*.feed_forward.fn.feed_forward.expand": "blocks.*.mlp.fc1",
    "encoder.*.feed_forward.fn.feed_forward.contract": "blocks.*.mlp.fc2",
    "encoder.*.feed_forward.fn.layer_scale.scale": "blocks.*.gamma_2",
    "norm": "norm",
    "head.linear": "head",
}


def test_vit_5_at_a_small_size_is_its_authors(tmp_path):
    """Of models_vit5.py at b7b0796, whose norms and angles are float32; without angles of registers by 6e-4 others."""
    page = yaml.safe_load((REPOSITORY / "experiments" / "imagenet" / "vit5.yaml").read_text())
    (tmp_path / "vit5.yaml").write_text(yaml.safe_dump({"model": page["model"]}))
    sizes = {"patch_size": 8, "emb_size": 64, "depth": 2, "num_heads": 2}
    flags = [f"--model.{name}={size}" for name, size in sizes.items()]
    network = resolve([f"--config={tmp_path}/vit5.yaml", "--data=CIFAR10", *flags]).make_network().double()
    load_formula(network, VIT5)
    with torch.no_grad():
        logits = network.eval()(images())
    assert logits[0, :3].tolist() == pytest.approx([0.674188003455, 0.533709798397, 0.026765480937], abs=1e-6)
