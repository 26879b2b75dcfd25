"""Optimizers and schedules: LAMB, Lion, and Muon combined with AdamW; the learning rate as a function of the step."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr
from torch.optim.lr_scheduler import LRScheduler

from vit_lightning.errors import UserError, named, with_place

Group = dict[str, Any]


class _Foreach(Optimizer):
    """Base of optimizers that take the weights of a group at once."""

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Changes weights of a group by their gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if weights := [weight for weight in group["params"] if weight.grad is not None]:
                self.update(group, weights, [weight.grad for weight in weights])
        return loss


class FusedAdamW(_Foreach, torch.optim.AdamW):
    """torch's fused AdamW for weights of one type and device, which makes its lists of tensors once.

    torch makes them in each step: for 100 weights that takes the host twice as long as calling the kernels.

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: epsilon.
    """

    def __init__(self, groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        lists: dict[int, tuple[list[Tensor], ...]] = vars(self).setdefault("_lists", {})  # which a copy lacks
        known, means, squares, counts = lists.get(id(weights[0]), ([], [], [], []))
        is_whole = len(known) == len(weights) and all(map(operator.is_, known, weights))
        if not is_whole or self.state[weights[0]].get("exp_avg") is not means[0]:  # a checkpoint has replaced it
            known, means, squares, counts = [], [], [], []
            self._init_group(group, known, [], means, squares, [], counts)  # type: ignore[no-untyped-call]
            lists[id(weights[0])] = known, means, squares, counts
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            *(weights, gradients, means, squares, [], counts),
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
            beta1=group["betas"][0],
            beta2=group["betas"][1],
        )


class Lamb(_Foreach):
    """LAMB: Adam's step with weight decay, scaled for each tensor to the norm of its weights (You et al. 2020).

    As in apex and timm, tensors of groups without weight decay take Adam's step as it is. Nothing is clipped here.
    """

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
    """

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
        self._halves: list[Optimizer] = []
        if matrices := [group for group in groups if group.get("muon")]:
            self._halves.append(BatchedMuon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if others := [group for group in groups if not group.get("muon")]:
            adamw = FusedAdamW if fused else torch.optim.AdamW
            self._halves.append(adamw(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for half in self._halves for group in half.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
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


Schedule = Literal["cosine", "linear", "wsd", "constant"]

Interval = Literal["step", "epoch"]


Factor = tuple[float, Group]
"""A factor of lr, and what else a group has with it."""


class OwnSchedule(NamedTuple):
    """A schedule of the user's.

    Args:
        name: its class or function.
        factors: returns what follows the warm-up, from the defaults of the optimizer, with lr, and the number.
        interval: whether there is one for each step, or for each epoch.
    """

    name: str
    factors: Callable[[Group, int], list[Factor]]
    interval: Interval = "step"


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    schedule: str,
    min_factor: float,
    warmup_factor: float = 0.0,
    decay_steps: int = 0,
) -> float:
    """Returns the learning rate of the step after ``step`` completed ones, as a fraction of lr.

    The warm-up grows linearly from ``warmup_factor`` before its first step to 1 in its last. Each decay reaches
    ``min_factor`` in the last step of training.

    Args:
        step: completed optimizer steps.
        total_steps: steps of the whole training.
        warmup_steps: steps of the warm-up.
        schedule: cosine, linear, wsd (warm-up, stable, decay) or constant.
        min_factor: learning rate of the last step, as a fraction of lr.
        warmup_factor: learning rate before the first step, as a fraction of lr.
        decay_steps: steps at the end in which wsd decays; at most those after the warm-up.
    """
    if step < warmup_steps:
        return warmup_factor + (1.0 - warmup_factor) * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        warmup_steps = max(warmup_steps, total_steps - decay_steps)
        if step < warmup_steps:
            return 1.0
    progress = min(1.0, (step - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_factor + (1.0 - min_factor) * (1.0 - progress)


def factors_of_function(function: Callable[[int, int], float], steps: int) -> list[Factor]:
    """Returns the factors of ``steps`` steps, from a function of the completed steps and of their whole number.

    Raises:
        UserError: it fails, or a factor is no number of at least 0.
    """
    factors: list[Factor] = []
    for step in range(steps):
        with named(f"step {step} of {steps}: ", others=True):
            factors.append((float(function(step, steps)), {}))
        if not 0.0 <= (factor := factors[-1][0]) < math.inf:
            raise UserError(f"step {step} of {steps}: the factor {factor} must be a finite number, at least 0")
    return factors


def factors_of_scheduler(make: Callable[[Optimizer], LRScheduler], defaults: Group, steps: int) -> list[Factor]:
    """Returns what a torch scheduler makes of an optimizer's defaults, stepped after each of some steps.

    Beside learning rates these are the momenta or betas of OneCycleLR and CyclicLR.

    Raises:
        UserError: it fails, such as one that needs a metric.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)])  # which has no gradients
    optimizer.defaults, (group,) = defaults, optimizer.param_groups
    group.update(defaults)
    seen: list[Group] = []
    try:
        scheduler = make(optimizer)
        for _ in range(steps):
            seen.append(dict(group))
            optimizer.step()
            scheduler.step()
    except Exception as fault:  # whatever a class of others raises
        # at its end OneCycleLR refuses a step that sets the rate of none
        if len(seen) < steps:
            raise UserError(f"step {len(seen)} of {steps}: {with_place(fault)}") from fault
    changed = {name for name in defaults for one in seen if one[name] != defaults[name]} - {"lr"}
    factors = factors_of_function(lambda step, _: float(seen[step]["lr"]) / defaults["lr"], steps)
    return [(factor, {name: one[name] for name in changed}) for (factor, _), one in zip(factors, seen, strict=True)]
