"""How weights move: parameter groups, the optimizer and the rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from vit_lightning.errors import UserError


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a schedule that ends with training.

    Args:
        lr: learning rate after the warm-up.
        weight_decay: decoupled weight decay of matrices; norms, biases, class token and positions take none.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's epsilon.
        schedule: cosine goes from lr to min_lr, constant stays at lr.
        warmup_epochs: epochs in which the rate grows linearly from 0 to lr; cut to all of training.
        min_lr: rate at the end of training.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in ("lr", "weight_decay", "eps", "warmup_epochs", "min_lr")}
        problems = [
            f"{name}={value} must be a finite number, at least 0"
            for name, value in rates.items()
            if not (math.isfinite(value) and value >= 0.0)
        ]
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(f"betas={list(self.betas)} must both be at least 0 and below 1")
        if not problems and self.min_lr > self.lr:
            problems.append(f"min_lr={self.min_lr} must not be above lr={self.lr}")
        if problems:
            raise UserError(problems)


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, with and without decay; each trainable parameter is in exactly one.

    The network may name its parameters without decay (``no_decay() -> set[str]``, as ViT does); in any other network
    those are the vectors: norms and biases.
    """
    trainable = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    facts = getattr(network, "no_decay", None)
    if callable(facts):
        names = facts()
        # torch.compile puts a prefix before the names of what it wraps
        without = {name for name in trainable if name.replace("_orig_mod.", "") in names}
    else:
        without = {name for name, weight in trainable.items() if weight.ndim < 2}
    if not trainable:
        raise UserError("the network has no parameter to train: all are frozen")
    return [
        {"params": [trainable[name] for name in trainable if name not in without], "weight_decay": weight_decay},
        {"params": [trainable[name] for name in trainable if name in without], "weight_decay": 0.0},
    ]


def rate_factor(step: int, *, total_steps: int, warmup_steps: int, schedule: str, min_factor: float) -> float:
    """Rate of the step after ``step`` completed ones, as a share of lr.

    The first warm-up step has lr / warmup_steps, the last one lr; the last step of a cosine has min_factor * lr.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def optimizer_and_schedule(
    network: nn.Module, config: OptimizerConfig, *, total_steps: int, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW over ``parameter_groups`` and its schedule, to be stepped after every optimizer step."""
    groups = [group for group in parameter_groups(network, config.weight_decay) if group["params"]]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=_all_floating(network.parameters())
    )
    # Lightning refuses to clip gradients of an optimizer that says it unscales them itself, as the fused one does, even
    # in bfloat16 where nothing is scaled; without this mark, a scaler unscales first and clipping is right
    optimizer._step_supports_amp_scaling = False
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps)
    min_factor = min(1.0, config.min_lr / config.lr) if config.lr > 0.0 else 1.0

    def factor(step: int) -> float:
        return rate_factor(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            schedule=config.schedule,
            min_factor=min_factor,
        )

    return optimizer, LambdaLR(optimizer, factor)


def _all_floating(weights: Iterable[nn.Parameter]) -> bool:
    """Whether torch's fused AdamW can take the weights: it knows CPU and CUDA floating point only."""
    return all(weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in weights)
