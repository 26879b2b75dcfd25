"""LAMB, Lion and Muon against implementations that nobody here wrote, and what a config says of optimizers."""

import copy
import inspect

import pytest
import timm.optim
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models import convnext_tiny, resnet18, swin_t, vit_b_16

from vit_lightning import OptimizerConfig, UserError, ViT, from_reference, to_reference
from vit_lightning.training.optim import muon_matrices, optimizer_and_schedule, parameter_groups
from vit_lightning.training.optimizers import BatchedMuon, FusedAdamW, MuonWithAdamW

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 3)).double()


def ours(weights: nn.Module, **settings: object):
    config = OptimizerConfig(schedule="constant", **settings)
    return optimizer_and_schedule(weights, config, total_steps=20, steps_per_epoch=20)[0]


def train(weights: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 10, first: int = 0) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = torch.randn(20, 8, 5, generator=draw, dtype=torch.float64)
    for batch in batches[first : first + steps]:
        weights.zero_grad()
        weights(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def split(weights: nn.Module) -> list[list[nn.Parameter]]:
    matrices = [weight for weight in weights.parameters() if weight.ndim == 2]
    return [matrices, [weight for weight in weights.parameters() if weight.ndim != 2]]


def assert_same(first: nn.Module, second: nn.Module, tolerance: float) -> None:
    start = network()
    for a, b, before in zip(first.parameters(), second.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert not torch.equal(a, before)


def test_muon_is_torch_s_with_torch_s_adamw_for_the_rest():
    mine, theirs = network(), network()
    matrices, vectors = split(theirs)
    optimizers = [
        torch.optim.Muon(matrices[:2], lr=0.01, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(matrices[2:], lr=0.01, weight_decay=0.3, betas=(0.8, 0.95)),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0, betas=(0.8, 0.95)),
    ]
    train(mine, ours(mine, name="muon", lr=0.01, weight_decay=0.3, momentum=0.9, betas=(0.8, 0.95)))
    train(theirs, *optimizers)
    assert_same(mine, theirs, 1e-12)
    defaults = inspect.signature(torch.optim.Muon).parameters
    group = ours(network(), name="muon").param_groups[0]
    assert all(group[name] == defaults[name].default for name in ("momentum", "nesterov", "ns_steps", "eps"))


PLAIN = {"foreach": False, "fused": False}


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "muon", "sgd"])
def test_an_optimizer_continues_from_its_state(name):
    straight, stopped = network(), network()
    train(straight, ours(straight, name=name), steps=8)
    train(stopped, first := ours(stopped, name=name), steps=3)
    second = ours(stopped, name=name)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(stopped, second, steps=5, first=3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), stopped.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "reference", "more", "tolerance"),
    [
        ("sgd", {"momentum": 0.7, "nesterov": True}, torch.optim.SGD, PLAIN, 1e-11),
        ("sgd", {}, torch.optim.SGD, {**PLAIN, "momentum": 0.9}, 1e-11),
        ("adam", {"betas": (0.8, 0.9), "eps": 1e-6}, torch.optim.Adam, PLAIN, 1e-11),
        ("adamw", {"betas": (0.8, 0.9), "eps": 1e-6}, torch.optim.AdamW, PLAIN, 1e-11),
        ("lion", {"betas": (0.8, 0.95)}, timm.optim.Lion, {}, 1e-14),
        ("lion", {}, timm.optim.Lion, {}, 1e-14),
        ("lamb", {"betas": (0.8, 0.95), "eps": 1e-6}, timm.optim.Lamb, {"max_grad_norm": None}, 1e-13),
    ],
    ids=str,
)
def test_the_others_are_those_of_torch_and_timm(name, settings, reference, more, tolerance):
    mine, theirs = network(), network()
    for weights in (mine, theirs) if name == "lamb" else ():
        nn.init.zeros_(weights[4].weight)  # as a classifier begins: its first step is not scaled
    matrices, vectors = split(theirs)
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    train(mine, ours(mine, name=name, lr=0.01, weight_decay=0.3, **settings), steps=20)
    train(theirs, reference(groups, lr=0.01, **settings, **more), steps=20)
    assert_same(mine, theirs, tolerance)


def test_adamw_makes_its_lists_again_for_other_weights_and_another_state():
    weights = [[nn.Parameter(torch.ones(*shape)) for shape in ((4,), (2, 3), (2,))] for _ in range(2)]
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizers = FusedAdamW(weights[0], **settings), torch.optim.AdamW(weights[1], **settings, fused=True)
    states: list = []
    for step in range(8):
        if step == 6:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        for some, optimizer in zip(weights, optimizers, strict=True):
            for number, weight in enumerate(some):
                weight.grad = None if number == step - 3 else torch.full_like(weight, step - 2.5)
            optimizer.step()
        if step == 5:
            optimizers = tuple(map(copy.copy, optimizers))
        if step == 2:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), step


def test_muon_takes_the_matrices_of_the_encoder():
    vit = ViT(**SMALL, patch_projection="linear", distillation_token=True, layer_scale=0.1)
    half = [f"encoder.{block}.{part}" for block in (0, 1) for part in ("attention.fn", "feed_forward.fn")]
    expected = {
        *(f"{name}.attention.{part}.weight" for name in half[::2] for part in ("qkv", "projection")),
        *(f"{name}.feed_forward.{part}.weight" for name in half[1::2] for part in ("expand", "contract")),
    }
    assert muon_matrices(vit) == muon_matrices(torch.compile(vit)) == expected
    optimizer = ours(vit, name="muon", layer_decay=0.5)
    assert isinstance(optimizer, MuonWithAdamW)
    moved = {id(weight) for group in optimizer.param_groups if group.get("muon") for weight in group["params"]}
    assert moved == {id(weight) for name, weight in vit.named_parameters() if name in expected}
    assert [group["lr_scale"] for group in optimizer.param_groups if group.get("muon")] == [0.5, 0.25]


def test_muon_of_networks_of_others():
    with torch.device("meta"):
        assert {"heads.head.weight", "conv_proj.weight"}.isdisjoint(muon_matrices(vit_b_16()))
        assert len(muon_matrices(vit_b_16())) == 4 * 12
        assert len(muon_matrices(convnext_tiny())) == 2 * 18
        # four in each of 12 blocks and three between stages; the tables of relative positions are no matrices
        assert len(muon_matrices(swin_t())) == 4 * 12 + 3
        with pytest.raises(
            UserError, match=r"name=muon: ResNet has no matrices before its classifier \(choose adamw\)"
        ):
            muon_matrices(resnet18())


def test_compiled_networks_have_the_same_groups():
    vit = ViT(**SMALL, class_token=True)

    def groups(model: nn.Module) -> list[dict[str, object]]:
        made = parameter_groups(model, 0.1, layer_decay=0.5)
        return [group | {"params": [id(weight) for weight in group["params"]]} for group in made]

    expected = groups(vit)
    assert len({group["lr_scale"] for group in expected}) == 4
    assert groups(torch.compile(vit)) == expected
    vit.encoder[0] = torch.compile(vit.encoder[0])
    assert groups(vit) == expected


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_layer_decay_reaches_the_rate_of_each_group_in_each_step(name):
    vit = ViT(**SMALL)
    config = OptimizerConfig(name=name, lr=0.1, layer_decay=0.5, warmup_steps=2, min_lr=0.02, schedule="linear")
    optimizer, schedule = optimizer_and_schedule(vit, config, total_steps=6, steps_per_epoch=6)
    expected = {0: 0.125, 1: 0.25, 2: 0.5, 3: 1.0}
    names = {id(weight): name for name, weight in vit.named_parameters()}
    for rate in (0.05, 0.1, 0.08, 0.06, 0.04, 0.02):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                depth = vit.layer_index(names[id(weight)])
                assert group["lr"] == pytest.approx(rate * expected[depth], rel=1e-12)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr_scale"] == (0.5 if name == "muon" else 1.0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"momentum": 0.5}, "momentum=0.5 does nothing for name=adamw (it is for sgd, muon)"),
        ({"name": "sgd", "betas": (0.9, 0.9)}, "betas=(0.9, 0.9) does nothing for name=sgd (it is for adamw,"),
        ({"nesterov": True}, "nesterov=True does nothing for name=adamw (it is for sgd)"),
        ({"name": "sgd", "nesterov": True, "momentum": 0.0}, "nesterov=True needs a momentum above 0"),
        ({"name": "sgd", "momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"layer_decay": 0.0}, "layer_decay=0.0 must be above 0 and at most 1"),
        ({"decay_fraction": 1.1, "schedule": "wsd"}, "decay_fraction=1.1 must be between 0 and 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be a finite number, at least 0"),
        ({"warmup_epochs": 1, "warmup_steps": 3}, "warmup_epochs=1 and warmup_steps=3: give one of them"),
        ({"warmup_lr": 1.0, "warmup_steps": 2}, "warmup_lr=1.0 must not be above lr=0.001"),
        ({"warmup_lr": 1e-4}, "warmup_lr=0.0001 does nothing for warmup_epochs=0 (give a warm-up)"),
        ({"decay_fraction": 0.3}, "decay_fraction=0.3 does nothing for schedule=cosine (it is for wsd)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(settings, problem):
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**settings)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def test_muon_of_many_matrices_is_torch_s_of_one_after_another(monkeypatch):
    monkeypatch.setattr("vit_lightning.training.optimizers._BATCH", {"cpu": 2 * 8 * 12})  # two at a time
    torch.manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 8), (12, 8), (8, 12), (8, 12)]
    mine = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(mine)
    optimizers = BatchedMuon(mine, lr=0.1, weight_decay=0.3), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3)
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # bfloat16 rounds in the order of the sums
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


def rate_and_decay(vit):
    """Of each tensor in timm's names; which is which of ours is told by a number written into each."""
    config = OptimizerConfig(lr=1.0, weight_decay=0.3, layer_decay=0.5, schedule="constant")
    optimizer, _ = optimizer_and_schedule(vit, config, total_steps=1, steps_per_epoch=1)
    facts = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.fill_(len(facts) + 1)
                facts[len(facts) + 1] = (group["lr"], group["weight_decay"])
    tensors, _ = to_reference(vit, family="timm")
    numbers = {name: int(torch.as_tensor(tensor).flatten()[0]) for name, tensor in tensors.items()}
    assert all((torch.as_tensor(tensor) == numbers[name]).all() for name, tensor in tensors.items())
    return {name: facts[number] for name, number in numbers.items()}


def test_rate_and_decay_of_every_parameter_are_timm_s_but_for_its_last_norm():
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5)
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(
        model, weight_decay=0.3, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    theirs = {names[id(w)]: (group["lr_scale"], group["weight_decay"]) for group in groups for w in group["params"]}
    config = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    ours = rate_and_decay(from_reference(model.state_dict(), family="timm", config=config))
    different = {name: (theirs[name], ours[name]) for name in theirs if theirs[name] != ours[name]}
    # timm gives the last norm the rate of the last block, BEiT and MAE that of the head
    assert different == {f"norm.{kind}": ((0.5, 0.0), (1.0, 0.0)) for kind in ("weight", "bias")}
    assert theirs.keys() == ours.keys()
