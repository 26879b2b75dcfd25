import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchvision.models import resnet18

from vit_lightning.errors import UserError
from vit_lightning.models.vit import ViT
from vit_lightning.training.optim import OptimizerConfig, lr_factor, optimizer_and_schedule, parameter_groups

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}

NETWORKS = {
    "vit": lambda: ViT(**SMALL),
    "vit, linear, sincos2d": lambda: ViT(**SMALL, patch_projection="linear", positions="sincos2d"),
    "vit, no class token": lambda: ViT(**SMALL, class_token=False, pool="mean", positions="none"),
    "vit, all parts": lambda: ViT(**SMALL, layer_scale=0.1, drop_path=0.1, representation_size=5),
    "vit, no head": lambda: ViT(**SMALL | {"num_classes": 0}),
    "resnet18": lambda: resnet18(weights=None),
    "linear": lambda: nn.Linear(4, 3),
}


def make(name):
    with torch.device("meta"):
        return NETWORKS[name]()


def factor(step, *, total=10, warmup=4, schedule="cosine", least=0.1):
    return lr_factor(step, total_steps=total, warmup_steps=warmup, schedule=schedule, min_factor=least)


def rates(config, *, total_steps, steps_per_epoch=1, network=None):
    optimizer, schedule = optimizer_and_schedule(
        nn.Linear(2, 2) if network is None else network,
        config,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )
    used = []
    for _ in range(total_steps):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("name", NETWORKS)
def test_each_parameter_is_in_exactly_one_group(name):
    network = make(name)
    grouped = [id(weight) for group in parameter_groups(network, 0.05) for weight in group["params"]]
    assert sorted(grouped) == sorted(id(weight) for weight in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_exactly_the_matrices_and_kernels_take_decay(name):
    network = make(name)
    decayed, others = parameter_groups(network, 0.05)
    kernels = {id(module.weight) for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    assert {id(weight) for weight in decayed["params"]} == kernels
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.05, 0.0)


def test_a_network_names_its_own_parameters_without_decay():
    class Named(nn.Linear):
        def no_decay(self):
            return {"weight"}

    network = Named(4, 3)
    decayed, others = parameter_groups(network, 0.05)
    assert [id(weight) for weight in decayed["params"]] == [id(network.bias)]
    assert [id(weight) for weight in others["params"]] == [id(network.weight)]


@pytest.mark.parametrize("name", ["vit", "resnet18"])
def test_frozen_parameters_are_left_out(name):
    network = make(name)
    frozen = list(network.parameters())[:5]
    for weight in frozen:
        weight.requires_grad_(False)
    grouped = {id(weight) for group in parameter_groups(network, 0.05) for weight in group["params"]}
    assert grouped == {id(weight) for weight in network.parameters()} - {id(weight) for weight in frozen}


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (6, 0.1 + 0.9 * 0.5), (9, 0.1), (10, 0.1), (99, 0.1)],
)
def test_cosine_by_hand(step, expected):
    assert factor(step) == pytest.approx(expected, abs=1e-12)


def test_steps_after_a_run_that_only_warms_up_have_the_least_rate():
    assert [factor(step, total=4, warmup=4) for step in (3, 4, 5)] == pytest.approx([1.0, 0.1, 0.1])


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (3, 1.0), (4, 1.0), (9, 1.0)])
def test_constant_by_hand(step, expected):
    assert factor(step, schedule="constant") == expected


@pytest.mark.parametrize("warmup", [0, 1, 3, 9, 10])
@pytest.mark.parametrize("total", [10, 11, 100])
def test_last_step_of_a_cosine_has_the_least_rate_unless_it_warms_up(total, warmup):
    expected = 1.0 if warmup == total else 0.2
    assert factor(total - 1, total=total, warmup=warmup, least=0.2) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_rates_rise_in_the_warmup_and_fall_after_it(warmup):
    factors = [factor(step, total=50, warmup=warmup) for step in range(50)]
    assert all(a < b for a, b in pairwise(factors[:warmup]))
    assert all(a > b for a, b in pairwise(factors[max(0, warmup - 1) :]))
    assert all(0.0 < value <= 1.0 for value in factors)


@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
@pytest.mark.parametrize("warmup", [2, 5, 19])
def test_rates_equal_torchs_linear_and_cosine_schedules(warmup, min_lr):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    linear = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    cosine = CosineAnnealingLR(optimizer, T_max=40 - warmup, eta_min=min_lr)
    schedule = SequentialLR(optimizer, [linear, cosine], milestones=[warmup - 1])
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    config = OptimizerConfig(lr=1e-2, warmup_epochs=warmup, min_lr=min_lr)
    used = rates(config, total_steps=40)
    assert [rate for rate, _ in used] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_both_groups_have_the_same_rates():
    used = rates(OptimizerConfig(warmup_epochs=1), total_steps=20, steps_per_epoch=5, network=ViT(**SMALL))
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in used)


@pytest.mark.parametrize(("epochs", "warmup"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.26, 13), (99.0, 30)])
def test_warmup_epochs_may_be_a_fraction_and_end_with_training(epochs, warmup):
    config = OptimizerConfig(lr=0.1, warmup_epochs=epochs, schedule="constant")
    used = [rate for rate, _ in rates(config, total_steps=30, steps_per_epoch=10)]
    expected = [0.1 * min(1.0, (step + 1) / warmup) if warmup else 0.1 for step in range(30)]
    assert used == pytest.approx(expected)


@pytest.mark.parametrize("min_lr", [0.0, 0.01])
def test_last_rate_of_a_cosine_is_min_lr(min_lr):
    used = rates(OptimizerConfig(lr=0.1, min_lr=min_lr), total_steps=7)
    assert used[-1] == pytest.approx([min_lr, min_lr], abs=1e-12)


def test_rate_zero_stays_zero_and_leaves_the_weights():
    network = nn.Linear(2, 2)
    before = network.weight.detach().clone()
    network.weight.grad = torch.ones(2, 2)
    network.bias.grad = torch.ones(2)
    assert rates(OptimizerConfig(lr=0.0), total_steps=3, network=network) == [[0.0, 0.0]] * 3
    assert torch.equal(network.weight, before)


def test_steps_equal_those_of_torchs_adamw_with_the_same_settings():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    theirs.load_state_dict(ours.state_dict())
    before = [weight.detach().clone() for weight in ours.parameters()]
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3, schedule="constant")
    optimizer, _ = optimizer_and_schedule(ours, config, total_steps=5, steps_per_epoch=5)
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "foreach": False, "fused": False}
    reference = [
        torch.optim.AdamW([theirs.weight], weight_decay=0.3, **settings),
        torch.optim.AdamW([theirs.bias], weight_decay=0.0, **settings),
    ]
    inputs = torch.randn(5, 8, 4, dtype=torch.float64)
    for batch in inputs:
        for network, optimizers in ((ours, [optimizer]), (theirs, reference)):
            network.zero_grad()
            network(batch).square().sum().backward()
            for each in optimizers:
                each.step()
    for weight, expected, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)
        assert (weight != start).all()


def test_decay_moves_matrices_and_not_vectors():
    network = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    for weight in network.parameters():
        nn.init.ones_(weight)
        weight.grad = torch.zeros_like(weight)
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, schedule="constant")
    optimizer, _ = optimizer_and_schedule(network, config, total_steps=1, steps_per_epoch=1)
    optimizer.step()
    torch.testing.assert_close(network[0].weight.detach(), torch.full((3, 3), 0.95))
    for vector in (network[0].bias, network[1].weight, network[1].bias):
        assert torch.equal(vector, torch.ones(3))


def test_frozen_parameters_do_not_move():
    torch.manual_seed(0)
    network = ViT(**SMALL)
    network.patch_embedding.requires_grad_(False)
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    optimizer, _ = optimizer_and_schedule(network, OptimizerConfig(lr=0.1), total_steps=4, steps_per_epoch=4)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1])).backward()
        optimizer.step()
    moved = {name for name, weight in network.named_parameters() if not torch.equal(weight, before[name])}
    assert not any(name.startswith("patch_embedding") for name in moved)
    assert {name for name, weight in network.named_parameters() if weight.requires_grad} == moved


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_an_empty_group_is_left_out(frozen):
    network = nn.Linear(4, 3)
    getattr(network, frozen).requires_grad_(False)
    optimizer, _ = optimizer_and_schedule(network, OptimizerConfig(), total_steps=2, steps_per_epoch=2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "warmup_epochs", "min_lr"])
@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_bad_numbers_are_errors_with_their_values(name, value):
    with pytest.raises(UserError) as raised:
        OptimizerConfig(**{name: value})
    assert raised.value.problems == [f"{name}={value} must be a finite number, at least 0"]


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan)])
def test_bad_betas_are_errors(betas):
    with pytest.raises(UserError, match=r"betas=\["):
        OptimizerConfig(betas=betas)


def test_all_problems_are_listed_at_once():
    with pytest.raises(UserError) as raised:
        OptimizerConfig(lr=-1, weight_decay=-1, betas=(2, 2), eps=-1, warmup_epochs=-1, min_lr=-1)
    names = [problem.split("=")[0] for problem in raised.value.problems]
    assert names == ["lr", "weight_decay", "eps", "warmup_epochs", "min_lr", "betas"]


def test_zeros_are_no_problem():
    config = OptimizerConfig(lr=0, weight_decay=0, betas=(0, 0), eps=0, warmup_epochs=0, min_lr=0)
    assert config.betas == (0, 0)


def test_a_compiled_network_has_the_same_groups():
    network = ViT(image_size=8, patch_size=4, emb_size=16, depth=1, num_heads=2, num_classes=3)
    plain, compiled = parameter_groups(network, 0.1), parameter_groups(torch.compile(network), 0.1)
    assert [[id(weight) for weight in group["params"]] for group in plain] == [
        [id(weight) for weight in group["params"]] for group in compiled
    ]


def test_a_floor_above_the_rate_and_a_frozen_network_are_refused():
    with pytest.raises(UserError, match=r"min_lr=0.01 must not be above lr=0.001"):
        OptimizerConfig(lr=1e-3, min_lr=1e-2)
    with pytest.raises(UserError, match="all are frozen"):
        parameter_groups(torch.nn.Linear(2, 2).requires_grad_(False), 0.1)
