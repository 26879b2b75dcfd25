"""LAMB, Lion, and Muon combined with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr

Group = dict[str, Any]


class _Foreach(Optimizer):
    """Base of optimizers that take the weights of a group at once."""

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Changes weights of a group by their gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _call(closure)
        for group in self.param_groups:
            if weights := [weight for weight in group["params"] if weight.grad is not None]:
                self.update(group, weights, [weight.grad for weight in weights])
        return loss


class Lamb(_Foreach):
    """LAMB: Adam's step with weight decay, scaled for each tensor to the norm of its weights (You et al. 2020).

    As in apex and timm, tensors of groups without weight decay take Adam's step as it is. Nothing is clipped here.

    Args:
        groups: parameter groups.
        lr: learning rate, the norm of a step relative to that of the weights.
        betas: decay rates of the two moments.
        eps: epsilon.
        weight_decay: weight decay, added to Adam's step before it is scaled.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        means = [_state(self, weight, "mean") for weight in weights]
        squares = [_state(self, weight, "square") for weight in weights]
        counts = [self.state[weight].get("step", 0) + 1 for weight in weights]
        for weight, count in zip(weights, counts, strict=True):
            self.state[weight]["step"] = count
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)
        steps = torch._foreach_div(means, [1.0 - beta1**count for count in counts])
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [(1.0 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(steps, scales)
        if decay:
            torch._foreach_add_(steps, weights, alpha=decay)
            norms = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(steps))
            ratios = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
            torch._foreach_mul_(steps, list(ratios))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])


class Lion(_Foreach):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2).

    Each weight changes by the same amount, so that Lion needs a learning rate 3 to 10 times smaller than AdamW's and a
    weight decay that many times larger (section 5 of the paper).

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: weight of the momentum in the step, and decay rate of the momentum.
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

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        (step_beta, momentum_beta), lr = group["betas"], group["lr"]
        momenta = [_state(self, weight, "momentum") for weight in weights]
        steps = torch._foreach_mul(momenta, step_beta)
        torch._foreach_add_(steps, gradients, alpha=1.0 - step_beta)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(weights, 1.0 - lr * group["weight_decay"])
        torch._foreach_add_(weights, steps, alpha=-lr)
        torch._foreach_mul_(momenta, momentum_beta)
        torch._foreach_add_(momenta, gradients, alpha=1.0 - momentum_beta)


class BatchedMuon(_Foreach, torch.optim.Muon):
    """torch's Muon, which orthogonalizes all matrices of a shape in one batch: half the time for small matrices."""

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        momenta, momentum = [_state(self, weight, "momentum_buffer") for weight in weights], group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1.0 - momentum)
        steps = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        for numbers in _alike(weights):
            some = [weights[number] for number in numbers]
            matrices = torch.stack([steps[number] for number in numbers]).bfloat16()
            is_tall = matrices.shape[1] > matrices.shape[2]
            matrices = _orthogonalized(matrices.mT if is_tall else matrices, group).to(some[0].dtype)
            if is_tall:
                matrices = matrices.mT.contiguous()  # else a GPU would add each matrix by a kernel of its own
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], some[0].shape)
            torch._foreach_add_(some, matrices.unbind(), alpha=-rate)


_BATCH = {"cpu": 2**22, "cuda": 2**25}
"""Elements that are orthogonalized at a time, which bounds the memory for it to about 40 and 320 MB."""


def _alike(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yields the numbers of matrices of the same shape."""
    alike: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(number)
    for shape, numbers in alike.items():
        at_once = max(1, _BATCH.get(matrices[0].device.type, _BATCH["cpu"]) // shape.numel())
        yield from (numbers[start : start + at_once] for start in range(0, len(numbers), at_once))


def _orthogonalized(matrices: Tensor, group: Group) -> Tensor:
    """Returns wide matrices (k, rows, columns) after the Newton-Schulz iteration of torch's Muon."""
    a, b, c = group["ns_coefficients"]
    matrices = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(matrices, matrices.mT)
        matrices = torch.baddbmm(matrices, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrices, beta=a)
    return matrices


class MuonWithAdamW(Optimizer):
    """One optimizer that uses torch's Muon for groups with ``muon`` set to true, and torch's AdamW for all others.

    Muon orthogonalizes the momentum of a matrix (Jordan et al. 2024). Its steps are scaled to the RMS of AdamW's
    (Liu et al. 2025, "Muon is scalable for LLM training"), so that both use the same learning rate and weight decay.

    Args:
        groups: parameter groups; those with ``muon`` true hold matrices alone.
        lr: learning rate of both.
        momentum: Muon's Nesterov momentum.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's epsilon.
        fused: whether torch's fused AdamW is used.
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
            self._halves.append(BatchedMuon(halves[0], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if halves[1]:
            self._halves.append(torch.optim.AdamW(halves[1], lr=lr, betas=betas, eps=eps, fused=fused))
        super().__init__([group for half in self._halves for group in half.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _call(closure)
        for half in self._halves:
            # loading a checkpoint replaces groups and state of this optimizer, which both halves use
            muon = isinstance(half, BatchedMuon)
            half.param_groups = [group for group in self.param_groups if bool(group.get("muon")) == muon]
            half.state = self.state
            half.step()
        return loss


def _state(optimizer: Optimizer, weight: Tensor, name: str) -> Tensor:
    """Returns a state of a weight, of its shape and at first zero."""
    state = optimizer.state[weight]
    if name not in state:
        state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    found: Tensor = state[name]
    return found


def _call(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
