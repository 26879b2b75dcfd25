"""The losses of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_lightning.errors import UserError

HeadsLoss = Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]
"""Loss of the logits of each head, (b, num_classes), against targets and the images that they are for."""


@dataclass
class LossConfig:
    """The loss in training.

    Args:
        name: ce, cross entropy; or bce, binary cross entropy of each class by itself (Touvron et al. 2022, DeiT III).
        label_smoothing: share of the target that is spread over all classes, of mixed images too.
    """

    name: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")


class BinaryCrossEntropy(nn.Module):
    """Mean over images and classes of the cross entropy of each class against all others.

    Logits (b, classes) with labels (b,) or shares of classes (b, classes). Smoothing leaves the sum of a target at 1.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[1]
        shares = (F.one_hot(targets, classes) if targets.ndim == 1 else targets).to(logits.dtype)
        smoothed = shares * (1.0 - self.label_smoothing) + self.label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits, smoothed)


def make_loss(config: LossConfig) -> nn.Module:
    """The loss of logits (b, classes) against labels (b,) or shares of classes (b, classes)."""
    if config.name == "bce":
        return BinaryCrossEntropy(config.label_smoothing)
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)


def mean_over_heads(criterion: nn.Module) -> HeadsLoss:
    """Returns the loss by which each head learns from the labels."""

    def loss(heads: tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
        return torch.stack([criterion(logits, targets) for logits in heads]).mean(dim=0)

    return loss
