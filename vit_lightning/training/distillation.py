"""Distillation from a teacher (Touvron et al. 2021, DeiT, section 4)."""

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
from vit_lightning.limits import problems_of, refuse
from vit_lightning.training.losses import Criterion, HeadsLoss

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel by which images are normalised."""


@dataclass
class DistillationConfig:
    """Distillation from a trained network; the head of a distillation token learns from the teacher alone.

    Args:
        teacher: run folder (its best checkpoint), checkpoint, file or folder of weights, hf-hub:OWNER/NAME, timm:NAME,
            torchvision:NAME, such as torchvision:regnet_y_16gf, or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS; no
            distillation when not given.
        kind: hard uses the teacher's prediction as the label, soft its probabilities.
        alpha: weight of the teacher in the loss; that of the labels is 1 - alpha.
        temperature: temperature of soft distillation, by which logits are divided.
    """

    teacher: str | None = None
    kind: Literal["hard", "soft"] = "hard"
    alpha: float = 0.5
    temperature: float = 3.0

    def __post_init__(self) -> None:
        problems = problems_of(
            ("alpha", self.alpha, 0.0 <= self.alpha <= 1.0, "between 0 and 1"),
            ("temperature", self.temperature, 0.0 < self.temperature < math.inf, "a finite number above 0"),
        )
        if self.kind == "hard" and self.temperature != 3.0:
            problems.append(f"temperature={self.temperature} does nothing for kind=hard")
        if self.teacher is None and (self.kind, self.alpha) != ("hard", 0.5):
            problems.append("teacher is missing: without one, kind and alpha do nothing")
        refuse(problems)


class Teacher:
    """A frozen network that returns logits (b, classes) for the student's normalised images (b, c, H, W).

    Not an nn.Module, so that it is in no list of parameters and no state_dict, and stays in evaluation mode.

    Args:
        network: the trained network.
        normalised: mean and standard deviation of the images it was trained on, by default the student's.
        images: mean and standard deviation of the student's images.
        columns: output of the network for each class of the student; by default the same in the same order.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        normalised: Statistics | None = None,
        images: Statistics | None = None,
        columns: Sequence[int] | None = None,
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self._columns = None if columns is None else torch.tensor(columns)
        self._renormalise: tuple[Tensor, Tensor] | None = None  # factor and shift
        if normalised is None or images is None:
            return
        (mean, std), (own_mean, own_std) = (
            [torch.tensor(list(numbers), dtype=torch.float64)[:, None, None] for numbers in pair]
            for pair in (images, normalised)
        )
        if not (torch.equal(mean, own_mean) and torch.equal(std, own_std)):
            self._renormalise = (std / own_std).float(), ((mean - own_mean) / own_std).float()

    def to(self, device: torch.device) -> None:
        self.network.to(device)
        self._columns = None if self._columns is None else self._columns.to(device)
        if device.type == "cuda":  # its convolutions would copy all images to this order
            self.network.to(memory_format=torch.channels_last)
        if self._renormalise is not None:
            factor, shift = self._renormalise
            self._renormalise = factor.to(device), shift.to(device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(next(self.network.parameters()).dtype)
        if self._renormalise is not None:
            factor, shift = self._renormalise
            images = images * factor.to(images.dtype) + shift.to(images.dtype)
        logits: Tensor = self.network(images)
        return logits if self._columns is None else logits[:, self._columns]

    def digest(self) -> str:
        """Returns the SHA-256 of the weights."""
        sha = hashlib.sha256()
        for name, value in sorted(self.network.state_dict().items()):
            sha.update(name.encode())
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


class Distillation(Callback):
    """Distillation loss: (1 - alpha) times the loss of the labels plus alpha times that of the teacher.

    The soft loss is T^2 KL(teacher || student) of softmax(logits / T), a mean over images as in the paper; DeiT's code
    also divides by the number of classes.
    """

    def __init__(self, config: DistillationConfig, teacher: Teacher) -> None:
        self.config, self.teacher = config, teacher
        self._digest = teacher.digest()

    def loss(self, label_loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """Returns the loss, a scalar.

        Args:
            label_loss: loss of the class head against the labels.
            logits: logits (b, classes) of the head that learns from the teacher.
            images: images of the student, (b, c, H, W).
        """
        teacher = self.teacher(images).float()
        if self.config.kind == "hard":
            teacher_loss = F.cross_entropy(logits, teacher.argmax(dim=1))
        else:
            temperature = self.config.temperature
            student, target = (F.log_softmax(each.float() / temperature, dim=1) for each in (logits, teacher))
            teacher_loss = temperature**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)
        return (1.0 - self.config.alpha) * label_loss + self.config.alpha * teacher_loss

    def heads_loss(self, criterion: Criterion) -> HeadsLoss:
        """Returns the loss of all heads: the first learns from the labels and the last from the teacher."""

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
