"""How weights move: parameter groups, the optimizer and the rate at each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from vit_lightning.errors import UserError
from vit_lightning.training.optimizers import Lion, MuonWithAdamW
from vit_lightning.training.schedules import Schedule, rate_factor

_USERS = {
    "betas": ("adamw", "adam", "lion", "muon"),
    "eps": ("adamw", "adam", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd",),
}
"""Optimizers that use the keys that not all use."""


@dataclass
class OptimizerConfig:
    """An optimizer with warm-up and a schedule that ends with training.

    Args:
        name: adamw, adam, sgd, lion, or muon: Muon for the matrices of the encoder and AdamW for the rest, at one rate.
        lr: learning rate after the warm-up.
        weight_decay: weight decay of matrices; norms, biases, class token and positions take none. Decoupled, but for
            adam and sgd, where it is added to the gradient.
        betas: decay rates of the moments of adamw, adam and muon, (0.9, 0.999) when not given; of lion (0.9, 0.99).
        eps: epsilon of adamw, adam and muon.
        momentum: momentum of sgd, 0.9 when not given, and of muon, 0.95.
        nesterov: whether the momentum of sgd is Nesterov's.
        layer_decay: rate of a block over that of the block after it; 1 gives all the same rate.
        schedule: from lr to min_lr along a cosine or a line; wsd (warm-up, stable, decay) stays at lr and falls along a
            line at the end; constant stays at lr.
        decay_fraction: share of training in which wsd falls.
        warmup_epochs: epochs in which the rate grows linearly from warmup_lr to lr; cut to all of training.
        warmup_steps: the same in optimizer steps.
        warmup_fraction: the same as a share of training.
        warmup_lr: rate from which the warm-up grows.
        min_lr: rate at the end of training; that of each block is scaled as lr is.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "muon"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool = False
    layer_decay: float = 1.0
    schedule: Schedule = "cosine"
    decay_fraction: float = 0.2
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    warmup_lr: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        problems = [*self._number_problems(), *self._unused_problems()]
        warmups = [f"{name}={value}" for name, value in self._warmups().items() if value]
        if len(warmups) > 1:
            problems.append(f"{' and '.join(warmups)}: give one of them")
        if self.nesterov and self.momentum == 0.0:
            problems.append("nesterov=True needs a momentum above 0")
        if not problems:
            problems += [
                f"{name}={getattr(self, name)} must not be above lr={self.lr}"
                for name in ("min_lr", "warmup_lr")
                if getattr(self, name) > self.lr
            ]
        if problems:
            raise UserError(problems)

    def _number_problems(self) -> list[str]:
        names = ("lr", "weight_decay", "eps", "warmup_epochs", "warmup_steps", "warmup_lr", "min_lr")
        rates = {name: getattr(self, name) for name in names}
        problems = [
            f"{name}={value} must be a finite number, at least 0"
            for name, value in rates.items()
            if value is not None and not (math.isfinite(value) and value >= 0.0)
        ]
        if self.betas is not None and not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(f"betas={list(self.betas)} must both be at least 0 and below 1")
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            problems.append(f"momentum={self.momentum} must be at least 0 and below 1")
        shares = {"decay_fraction": self.decay_fraction, "warmup_fraction": self.warmup_fraction}
        problems += [
            f"{name}={share} must be between 0 and 1"
            for name, share in shares.items()
            if share is not None and not 0.0 <= share <= 1.0
        ]
        if not 0.0 < self.layer_decay <= 1.0:
            problems.append(f"layer_decay={self.layer_decay} must be above 0 and at most 1")
        return problems

    def _unused_problems(self) -> list[str]:
        """Keys that are given and would do nothing."""
        defaults = {field.name: field.default for field in fields(self)}
        return [
            f"{name}={getattr(self, name)} does nothing for name={self.name} (it is for {', '.join(users)})"
            for name, users in _USERS.items()
            if self.name not in users and getattr(self, name) != defaults[name]
        ]

    def _warmups(self) -> dict[str, float | None]:
        names = ("warmup_epochs", "warmup_steps", "warmup_fraction")
        return {name: getattr(self, name) for name in names}

    def count_warmup(self, *, total_steps: int, steps_per_epoch: int) -> int:
        """Steps of the warm-up."""
        steps = self.warmup_steps or (self.warmup_fraction or 0.0) * total_steps or self.warmup_epochs * steps_per_epoch
        return min(round(steps), total_steps)


def parameter_groups(
    network: nn.Module, weight_decay: float, *, layer_decay: float = 1.0, muon: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Groups with equal decay and rate, none empty; each trainable parameter is in exactly one.

    A group has ``weight_decay`` and ``lr_scale``, its rate over that of the head. First come those of ``muon``, and
    then those near the head.

    The network may name its parameters without decay (``no_decay() -> set[str]``, as ViT does). In any other network
    those are the vectors, where dimensions of length 1 do not count, and what is not called a weight: tokens,
    positions, tables.

    Args:
        network: the network.
        weight_decay: weight decay of those that take it.
        layer_decay: rate of a block over that of the block after it (Bao et al. 2022, BEiT, appendix).
        muon: names of the matrices of groups of their own, with ``muon`` true.

    Raises:
        UserError: all parameters are frozen, or the network cannot say how deep they lie.
    """
    trainable = {_plain(name): weight for name, weight in network.named_parameters() if weight.requires_grad}
    if not trainable:
        raise UserError("the network has no parameter to train: all are frozen")
    facts = getattr(network, "no_decay", None)
    without = (
        set(map(_plain, facts()))
        if callable(facts)
        else {name for name, weight in trainable.items() if _is_vector(name, weight)}
    )
    scales = _rate_scales(network, layer_decay)
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, weight in trainable.items():
        groups.setdefault((name in muon, scales.get(name, 1.0), name not in without), []).append(weight)
    return [
        {"params": weights, "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        | ({"muon": True} if is_matrix else {})
        for (is_matrix, scale, decays), weights in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def _plain(name: str) -> str:
    """The name of a parameter without what ``torch.compile`` puts before the names of what it wraps."""
    return name.replace("_orig_mod.", "")


def _is_vector(name: str, weight: nn.Parameter) -> bool:
    return sum(length > 1 for length in weight.shape) < 2 or not name.endswith("weight")


def _rate_scales(network: nn.Module, layer_decay: float) -> dict[str, float]:
    """``layer_decay`` to the number of layers between a parameter and the head."""
    if layer_decay == 1.0:
        return {}
    depth = getattr(network, "layer_index", None)
    if not callable(depth):
        raise UserError(
            f"layer_decay={layer_decay} needs a ViT: {type(network).__name__} does not say how deep a parameter lies "
            "(a method layer_index(name) -> int)"
        )
    depths = {_plain(name): depth(_plain(name)) for name, _ in network.named_parameters()}
    return {name: layer_decay ** (max(depths.values()) - index) for name, index in depths.items()}


def muon_matrices(network: nn.Module) -> set[str]:
    """Names of the matrices that Muon moves: those of a ViT's encoder; of another network all but the classifier's.

    In another network those are the ones that take decay: a table of positions is no matrix.

    Raises:
        UserError: there is none.
    """
    weights = {_plain(name): weight for name, weight in network.named_parameters()}
    matrices = {name for name, weight in weights.items() if weight.ndim == 2}
    if callable(facts := getattr(network, "no_decay", None)) and hasattr(network, "encoder"):
        matrices = {name for name in matrices if name.startswith("encoder.")} - set(map(_plain, facts()))
    else:
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        matrices = {name for name in matrices if not _is_vector(name, weights[name])}
        matrices -= {_plain(f"{name}.weight") for name in linear[-1:]}
    if not matrices:
        raise UserError(f"name=muon: {type(network).__name__} has no matrices before its classifier (choose adamw)")
    return matrices


def optimizer_and_schedule(
    network: nn.Module, config: OptimizerConfig, *, total_steps: int, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer over ``parameter_groups`` and its schedule, to be stepped after every optimizer step."""
    optimizer = _make_optimizer(network, config, _groups(network, config))
    warmup_steps = config.count_warmup(total_steps=total_steps, steps_per_epoch=steps_per_epoch)

    def factor(step: int) -> float:
        return rate_factor(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            schedule=config.schedule,
            min_factor=_share(config.min_lr, config.lr),
            warmup_factor=config.warmup_lr / config.lr if config.lr > 0.0 else 0.0,
            decay_steps=round(config.decay_fraction * total_steps),
        )

    return optimizer, LambdaLR(optimizer, factor)


class ConfiguredRates(Callback):
    """Re-applies learning rates and weight decay from the config after a checkpoint has restored older ones."""

    def __init__(self) -> None:
        self._configured: list[tuple[LambdaLR, list[dict[str, Any]]]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._configured = [
            (schedule, [{k: v for k, v in group.items() if k != "params"} for group in schedule.optimizer.param_groups])
            for schedule in schedules
            if isinstance(schedule, LambdaLR)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for schedule, groups in self._configured:
            schedule.base_lrs = [group["initial_lr"] for group in groups]
            for group, own, factor in zip(schedule.optimizer.param_groups, groups, schedule.lr_lambdas, strict=True):
                group.update(own, lr=own["initial_lr"] * factor(schedule.last_epoch))


def _share(rate: float, lr: float) -> float:
    return min(1.0, rate / lr) if lr > 0.0 else 1.0


def group_problems(network: nn.Module, config: OptimizerConfig) -> list[str]:
    """What the optimizer asks of a network that this one does not have."""
    try:
        _groups(network, config)
    except UserError as error:
        return error.problems
    return []


def _groups(network: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    matrices = muon_matrices(network) if config.name == "muon" else ()
    groups = parameter_groups(network, config.weight_decay, layer_decay=config.layer_decay, muon=matrices)
    # what a schedule multiplies is a group's own rate
    return [{**group, "lr": config.lr * group["lr_scale"]} for group in groups]


def _make_optimizer(network: nn.Module, config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    fused = _all_floating(network.parameters())
    lr, betas, eps = config.lr, config.betas or (0.9, 0.999), config.eps
    optimizer: torch.optim.Optimizer
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    elif config.name == "adam":
        optimizer = torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    elif config.name == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=config.nesterov, fused=fused)
    elif config.name == "lion":
        optimizer = Lion(groups, lr=lr, betas=config.betas or (0.9, 0.99))
    else:
        momentum = 0.95 if config.momentum is None else config.momentum
        optimizer = MuonWithAdamW(groups, lr=lr, momentum=momentum, betas=betas, eps=eps, fused=fused)
    # Lightning refuses to clip gradients of an optimizer that says it unscales them itself, as the fused ones do, even
    # in bfloat16 where nothing is scaled; without this mark, a scaler unscales first and clipping is right
    optimizer._step_supports_amp_scaling = False  # type: ignore[union-attr]
    return optimizer


def _all_floating(weights: Iterable[nn.Parameter]) -> bool:
    """Whether torch's fused optimizers can take the weights: they know CPU and CUDA floating point only."""
    return all(weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in weights)
