"""Learning from a teacher besides the labels (Touvron et al. 2021, DeiT, section 4)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.training.losses import HeadsLoss

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation of each channel by which images were normalised."""


@dataclass
class DistillationConfig:
    """Learning from a trained network besides the labels; the head of a distillation token learns from it alone.

    Args:
        teacher: run folder (its best checkpoint), checkpoint, torchvision:MODEL or timm:MODEL, such as
            torchvision:regnet_y_16gf; none when not given.
        kind: hard takes the teacher's decision for a label, soft its probabilities.
        alpha: share of the teacher in the loss.
        temperature: of soft distillation; a higher one makes the probabilities more alike.
    """

    teacher: str | None = None
    kind: Literal["hard", "soft"] = "hard"
    alpha: float = 0.5
    temperature: float = 3.0

    def __post_init__(self) -> None:
        problems = []
        if not 0.0 <= self.alpha <= 1.0:
            problems.append(f"alpha={self.alpha} must be between 0 and 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            problems.append(f"temperature={self.temperature} must be a finite number above 0")
        if self.kind == "hard" and self.temperature != 3.0:
            problems.append(f"temperature={self.temperature} does nothing for kind=hard")
        if self.teacher is None and (self.kind, self.alpha) != ("hard", 0.5):
            problems.append("teacher is missing: without one, kind and alpha do nothing")
        if problems:
            raise UserError(problems)


class Teacher:
    """A frozen network that gives logits (b, classes) for the student's normalised images (b, c, H, W).

    No module: it is in no list of parameters, no state_dict and no checkpoint, and stays in evaluation mode.

    Args:
        network: the trained network.
        normalised: mean and deviation of the images that it learned from; as the student's when not given.
        images: mean and deviation of the student's images.
    """

    def __init__(
        self, network: nn.Module, *, normalised: Statistics | None = None, images: Statistics | None = None
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self._factor, self._shift = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
        self._same = normalised is None or images is None or _plain(normalised) == _plain(images)
        if not self._same and normalised is not None and images is not None:
            (mean, deviation), (own_mean, own_deviation) = (
                [torch.tensor(list(numbers), dtype=torch.float64)[:, None, None] for numbers in pair]
                for pair in (images, normalised)
            )
            self._factor = (deviation / own_deviation).float()
            self._shift = ((mean - own_mean) / own_deviation).float()

    def to(self, device: torch.device) -> None:
        self.network.to(device)
        self._factor, self._shift = self._factor.to(device), self._shift.to(device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(next(self.network.parameters()).dtype)
        if not self._same:
            images = images * self._factor.to(images.dtype) + self._shift.to(images.dtype)
        logits: Tensor = self.network(images)
        return logits

    def digest(self) -> str:
        """SHA-256 of its weights."""
        sha = hashlib.sha256()
        for name, value in sorted(self.network.state_dict().items()):
            sha.update(name.encode())
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def _plain(statistics: Statistics) -> list[list[float]]:
    return [[float(number) for number in numbers] for numbers in statistics]


class Distillation(Callback):
    """The loss of a student with a teacher: (1 - alpha) times that of the labels and alpha times the teacher's.

    The soft one is T^2 KL(teacher || student) of softmax(logits / T), a mean over images as in the paper; DeiT's code
    divides it by the number of classes besides.
    """

    def __init__(self, config: DistillationConfig, teacher: Teacher) -> None:
        self.config, self.teacher = config, teacher
        self._digest = teacher.digest()

    def loss(self, of_labels: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """The loss, a number.

        Args:
            of_labels: loss of the class head against the labels.
            logits: those of the head that learns from the teacher, (b, classes); the same head where there is one.
            images: what the student got, (b, c, H, W).
        """
        teacher = self.teacher(images).float()
        if self.config.kind == "hard":
            of_teacher = F.cross_entropy(logits, teacher.argmax(dim=1))
        else:
            heat = self.config.temperature
            student, wanted = (F.log_softmax(each.float() / heat, dim=1) for each in (logits, teacher))
            of_teacher = heat**2 * F.kl_div(student, wanted, reduction="batchmean", log_target=True)
        return (1.0 - self.config.alpha) * of_labels + self.config.alpha * of_teacher

    def heads_loss(self, criterion: nn.Module) -> HeadsLoss:
        """Returns the loss by which the first head learns from the labels and the last one from the teacher."""

        def loss(heads: tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
            return self.loss(criterion(heads[0], targets), heads[-1], images)

        return loss

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.teacher.to(trainer.strategy.root_device)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["teacher"] = self._digest

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to resume with another teacher."""
        if trainer.state.fn == TrainerFn.FITTING and checkpoint.get("teacher", self._digest) != self._digest:
            raise UserError(f"distillation.teacher={self.config.teacher} has other weights than when the run began")
