"""Losses of training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_lightning.errors import with_place
from vit_lightning.limits import probabilities, refuse

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Loss, a scalar, from logits (b, classes) and labels (b,), or class probabilities (b, classes) of mixed images."""

HeadsLoss = Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]
"""Loss from the logits of each head, (b, num_classes), the targets and the images."""


@dataclass
class LossConfig:
    """The loss in training.

    Args:
        name: ce (cross entropy) or bce (binary cross entropy of each class, Touvron et al. 2022, DeiT III). In its
            place class_path gives any class or function of (logits, targets), with its own arguments.
        label_smoothing: fraction of the target that is spread over all classes, also with mixup and cutmix.
    """

    name: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        refuse(probabilities(label_smoothing=self.label_smoothing))


@dataclass(frozen=True)
class OwnLoss:
    """A loss of the user's.

    Args:
        make: returns a new one.
        name: its class or function.
    """

    make: Callable[[], Criterion]
    name: str
    label_smoothing: float = field(default=0.0, init=False)
    """None that we know of."""

    def problems(self, classes: int, *, mixes: bool) -> list[str]:
        """Returns the reasons for which it cannot be trained with, found on a few random logits.

        Args:
            classes: number of classes.
            mixes: whether targets may be class probabilities too.
        """
        labels = torch.arange(4) % classes
        kinds = {"labels": labels}
        if mixes:
            kinds["class probabilities, which data.mixing makes"] = F.one_hot(labels, classes).float()
        with torch.random.fork_rng(devices=[]):
            criterion = self.make()
            if isinstance(criterion, nn.Module) and any(weight.requires_grad for weight in criterion.parameters()):
                return [f"{self.name} has parameters, which the optimizer does not train"]
            for kind, targets in kinds.items():
                if problem := _problem(criterion, torch.randn(4, classes, requires_grad=True), targets):
                    return [f"with {kind}: {problem}"]
        return []


def _problem(criterion: Criterion, logits: Tensor, targets: Tensor) -> str:
    try:
        loss = criterion(logits, targets)
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.is_floating_point():
            given = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            return f"it gives {given} where a tensor of one number is expected"
        if not loss.requires_grad:
            return "it gives no gradient"
        torch.autograd.grad(loss, logits)
    except Exception as fault:  # whatever the user's code raises
        return f"{with_place(fault)} (it is called with logits, then targets)"
    return ""


class TensorLoss(nn.Module):
    """A loss with tensors among its arguments, such as weights of the classes.

    They have device and type of the logits, and are no state: in a resumed run those of the config hold.

    Args:
        target: class or function of the loss; a class that is a module registers them as its buffers.
        arguments: its other arguments.
        tensors: its tensors by name.
    """

    def __init__(self, target: Any, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors, self._is_class = dict(tensors), inspect.isclass(target)
        self.criterion: Any = partial(target, **arguments)
        if self._is_class:
            self.criterion = self.criterion(**tensors)
            buffers = self.criterion.named_buffers(recurse=False) if isinstance(self.criterion, nn.Module) else ()
            given = {id(tensor) for tensor in tensors.values()}
            self._tensors = {name: tensor for name, tensor in buffers if id(tensor) in given}
            for name, tensor in self._tensors.items():
                self.criterion.register_buffer(name, tensor, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self._tensors = {name: tensor.to(logits) for name, tensor in self._tensors.items()}
        if self._is_class:  # again, since a module in half precision has rounded its buffers
            for name, tensor in self._tensors.items():
                setattr(self.criterion, name, tensor)
        loss: Tensor = self.criterion(logits, targets, **({} if self._is_class else self._tensors))
        return loss


class BinaryCrossEntropy(nn.Module):
    """Binary cross entropy of each class, a mean over images and classes.

    Takes logits (b, classes) and labels (b,) or class probabilities (b, classes). Label smoothing keeps the sum of a
    target at 1.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[1]
        targets = (F.one_hot(targets, classes) if targets.ndim == 1 else targets).to(logits.dtype)
        smoothed = targets * (1.0 - self.label_smoothing) + self.label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits, smoothed)


def make_loss(config: LossConfig | OwnLoss) -> Criterion:
    """Returns a new loss of logits (b, classes) against labels (b,) or class probabilities (b, classes)."""
    if isinstance(config, OwnLoss):
        return config.make()
    if config.name == "bce":
        return BinaryCrossEntropy(config.label_smoothing)
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)


def mean_over_heads(criterion: Criterion) -> HeadsLoss:
    """Returns the mean of a criterion over the heads."""

    def loss(heads: tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
        losses = [criterion(logits, targets) for logits in heads]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(dim=0)

    return loss
