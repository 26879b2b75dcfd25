"""Losses of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_lightning.errors import UserError

HeadsLoss = Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]
"""Loss from the logits of each head, (b, num_classes), the targets and the images."""


@dataclass
class LossConfig:
    """The loss in training.

    Args:
        name: ce (cross entropy) or bce (binary cross entropy of each class, Touvron et al. 2022, DeiT III).
        label_smoothing: fraction of the target that is spread over all classes, also with mixup and cutmix.
    """

    name: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")


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


def make_loss(config: LossConfig) -> nn.Module:
    """Returns a loss of logits (b, classes) against labels (b,) or class probabilities (b, classes)."""
    if config.name == "bce":
        return BinaryCrossEntropy(config.label_smoothing)
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)


def mean_over_heads(criterion: nn.Module) -> HeadsLoss:
    """Returns the mean of a criterion over the heads."""

    def loss(heads: tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
        return torch.stack([criterion(logits, targets) for logits in heads]).mean(dim=0)

    return loss
