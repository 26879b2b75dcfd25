"""Rates by hand, and against timm's and transformers' schedules."""

from __future__ import annotations

import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn
from transformers import get_linear_schedule_with_warmup

from vit_lightning import OptimizerConfig
from vit_lightning.training.optim import optimizer_and_schedule
from vit_lightning.training.optimizers import lr_factor


def factors(schedule, **settings):
    settings = {"total_steps": 10, "warmup_steps": 2, "min_factor": 0.1, **settings}
    return [lr_factor(step, schedule=schedule, **settings) for step in range(settings["total_steps"] + 1)]


def rates(total_steps=20, steps_per_epoch=10, **settings):
    config = OptimizerConfig(lr=1.0, **settings)
    optimizer, schedule = optimizer_and_schedule(
        nn.Linear(2, 2), config, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def test_line_by_hand():
    expected = [0.5, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1, 0.1]
    assert factors("linear") == pytest.approx(expected, abs=1e-12)


def test_wsd_by_hand():
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]
    assert factors("wsd", decay_steps=4) == pytest.approx(expected, abs=1e-12)


def test_wsd_without_a_fall_is_constant_and_with_nothing_else_a_line():
    assert factors("wsd", decay_steps=0)[:10] == factors("constant")[:10]
    assert factors("wsd", decay_steps=8) == factors("wsd", decay_steps=10) == factors("linear")


def test_warmup_begins_where_it_is_told():
    expected = [0.4, 0.6, 0.8, 1.0, 1.0]
    assert factors("constant", total_steps=4, warmup_steps=4, warmup_factor=0.2) == pytest.approx(expected, abs=1e-12)
    assert rates(schedule="constant", warmup_steps=4, warmup_lr=0.2)[:4] == pytest.approx(expected[:4])


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


def test_a_cosine_is_timm_s_one_step_later():
    optimizer = sgd()
    theirs = CosineLRScheduler(
        optimizer, t_initial=15, lr_min=0.1, warmup_t=5, warmup_lr_init=0.2, warmup_prefix=True, t_in_epochs=False
    )
    expected = []
    for step in range(20):
        theirs.step_update(step + 1)
        expected.append(optimizer.param_groups[0]["lr"])
    used = rates(warmup_steps=5, warmup_lr=0.2, min_lr=0.1)
    assert used[:19] == pytest.approx(expected[:19], abs=1e-12)
    assert used[19] == pytest.approx(0.1)
