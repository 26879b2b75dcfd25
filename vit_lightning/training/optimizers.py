"""Optimizers that torch has not, or not in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2).

    Its steps are as long in each weight, so that it wants a rate 3 to 10 times smaller than AdamW's, and a weight decay
    that many times larger (section 5 of the paper).

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: how much of the momentum goes into the step, and how much of it stays.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _call(closure)
        for group in self.param_groups:
            (of_step, of_momentum), rate = group["betas"], group["lr"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            momenta = [self._momentum(weight) for weight in weights]
            steps = torch._foreach_mul(momenta, of_step)
            torch._foreach_add_(steps, gradients, alpha=1.0 - of_step)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(weights, steps, alpha=-rate)
            torch._foreach_mul_(momenta, of_momentum)
            torch._foreach_add_(momenta, gradients, alpha=1.0 - of_momentum)
        return loss

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        momentum: Tensor = state["momentum"]
        return momentum


class MuonWithAdamW(Optimizer):
    """torch's Muon for the groups that say ``muon``, torch's AdamW for all others, as one optimizer.

    Muon makes the momentum of a matrix orthogonal (Jordan et al. 2024). Its steps are scaled to the length of AdamW's
    (Liu et al. 2025, "Muon is scalable for LLM training"), so that both take the same rate and decay.

    Args:
        groups: parameter groups; those with ``muon`` true hold matrices alone.
        lr: learning rate of both.
        momentum: Muon's momentum, which is Nesterov's.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's epsilon.
        fused: whether AdamW runs as one kernel.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        halves: list[list[Group]] = [[], []]
        for group in groups:
            halves[0 if group.get("muon") else 1].append(group)
        self._halves: list[Optimizer] = []
        if halves[0]:
            self._halves.append(torch.optim.Muon(halves[0], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if halves[1]:
            self._halves.append(torch.optim.AdamW(halves[1], lr=lr, betas=betas, eps=eps, fused=fused))
        super().__init__([group for half in self._halves for group in half.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _call(closure)
        for half in self._halves:
            # groups and state are this optimizer's own: a checkpoint that is loaded replaces both
            muon = isinstance(half, torch.optim.Muon)
            half.param_groups = [group for group in self.param_groups if bool(group.get("muon")) == muon]
            half.state = self.state
            half.step()
        return loss


def _call(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
