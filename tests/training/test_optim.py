"""Parameter groups, and rates against torch's and transformers' schedules."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchvision.models import resnet18
from transformers import get_linear_schedule_with_warmup

from vit_lightning.errors import UserError
from vit_lightning.models.vit import ViT
from vit_lightning.training.optim import OptimizerConfig, OwnOptimizerConfig, optimizer_and_schedule, parameter_groups
from vit_lightning.training.optimizers import OwnSchedule

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}

NETWORKS = {
    "vit": lambda: ViT(**SMALL),
    "vit, linear, sincos2d": lambda: ViT(**SMALL, patch_projection="linear", positions="sincos2d"),
    "vit, no class token": lambda: ViT(**SMALL, class_token=False, pool="mean", positions="none"),
    "vit, all parts": lambda: ViT(**SMALL, layer_scale=0.1, drop_path=0.1, representation_size=5, register_tokens=3),
    "vit, distilled": lambda: ViT(**SMALL, distillation_token=True),
    "vit, no head": lambda: ViT(**SMALL | {"num_classes": 0}),
    "resnet18": lambda: resnet18(weights=None),
    "linear": lambda: nn.Linear(4, 3),
}


def make(name):
    with torch.device("meta"):
        return NETWORKS[name]()


def rates(total_steps=20, steps_per_epoch=10, **settings):
    config = OptimizerConfig(**{"lr": 1.0, **settings})
    optimizer, schedule = optimizer_and_schedule(
        nn.Linear(2, 2), config, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("name", NETWORKS)
def test_each_parameter_is_in_one_group_and_exactly_the_matrices_and_kernels_decay(name):
    network = make(name)
    decayed, others = parameter_groups(network, 0.05)
    kernels = {id(module.weight) for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    grouped = [[id(weight) for weight in group["params"]] for group in (decayed, others)]
    assert sorted(grouped[0] + grouped[1]) == sorted(id(weight) for weight in network.parameters())
    assert {*grouped[0]} == kernels
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.05, 0.0)


def test_a_network_names_its_own_parameters_without_decay():
    class Named(nn.Linear):
        def no_decay(self):
            return {"weight"}

    network = Named(4, 3)
    decayed, others = parameter_groups(network, 0.05)
    assert [id(weight) for weight in decayed["params"]] == [id(network.bias)]
    assert [id(weight) for weight in others["params"]] == [id(network.weight)]


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
    used = rates(40, 1, lr=1e-2, warmup_epochs=warmup, min_lr=min_lr)
    assert used == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("epochs", "warmup"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.26, 13), (99.0, 30)])
def test_warmup_epochs_may_be_a_fraction_and_end_with_training(epochs, warmup):
    used = rates(30, lr=0.1, warmup_epochs=epochs, schedule="constant")
    expected = [0.1 * min(1.0, (step + 1) / warmup) if warmup else 0.1 for step in range(30)]
    assert used == pytest.approx(expected)


@pytest.mark.parametrize("option", ["min_lr", "decay_fraction"])
def test_a_schedule_of_the_user_s_takes_no_option_of_ours_whose_name_it_has(option):
    own = OwnSchedule("user.wsd", lambda group, steps: [(1.0, {})] * steps)
    with pytest.raises(UserError, match=f"{option}=0.0001 does nothing for schedule=wsd"):
        OwnOptimizerConfig(schedule="wsd", own_schedule=own, **{option: 0.0001})


def test_a_frozen_network_is_refused():
    with pytest.raises(UserError, match="all are frozen"):
        parameter_groups(torch.nn.Linear(2, 2).requires_grad_(False), 0.1)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def test_warmup_begins_where_it_is_told():
    assert rates(schedule="constant", warmup_steps=4, warmup_lr=0.2)[:5] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("warmup", [{"warmup_epochs": 0.5}, {"warmup_steps": 5}, {"warmup_fraction": 0.25}], ids=str)
def test_warmup_in_epochs_steps_and_as_a_share(warmup):
    assert rates(schedule="constant", **warmup)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_wsd_of_a_config_falls_in_its_share():
    used = rates(schedule="wsd", decay_fraction=0.25, warmup_steps=2, min_lr=0.0)
    assert used == pytest.approx([0.5, *[1.0] * 14, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_a_line_is_that_of_transformers_one_step_later():
    optimizer = sgd()
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=20)
    expected = []
    for _ in range(20):
        optimizer.step()
        theirs.step()  # their first step has rate 0, ours is their second
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates(schedule="linear", warmup_steps=5) == pytest.approx(expected, abs=1e-12)
