"""Losses of training, and distillation from a teacher (Touvron et al. 2021, DeiT, section 4)."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from vit_lightning.errors import UserError, probabilities, problems_of, refuse, with_place

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
        target_threshold: of bce: fraction of a class in a mixed image above which its target is 1, else 0; with 0 all
            classes of the image have 1, as in DeiT III's code. Targets are the fractions when not given.
    """

    name: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.0
    target_threshold: float | None = None

    def __post_init__(self) -> None:
        shares = probabilities(label_smoothing=self.label_smoothing, target_threshold=self.target_threshold)
        is_used = self.target_threshold is None or self.name == "bce"
        refuse(shares, [] if is_used else [f"target_threshold={self.target_threshold} does nothing without name=bce"])


@dataclass(frozen=True)
class OwnLoss:
    """A loss of the user's.

    Args:
        make: returns a new one.
        name: its class or function.
    """

    make: Callable[[], Criterion]
    name: str

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

    def __init__(self, label_smoothing: float = 0.0, target_threshold: float | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.target_threshold = label_smoothing, target_threshold

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[1]
        targets = F.one_hot(targets, classes) if targets.ndim == 1 else targets
        targets = (targets if self.target_threshold is None else targets > self.target_threshold).to(logits.dtype)
        smoothed = targets * (1.0 - self.label_smoothing) + self.label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits, smoothed)


def make_loss(config: LossConfig | OwnLoss) -> Criterion:
    """Returns a new loss of logits (b, classes) against labels (b,) or class probabilities (b, classes)."""
    if isinstance(config, OwnLoss):
        return config.make()
    if config.name == "bce":
        return BinaryCrossEntropy(config.label_smoothing, config.target_threshold)
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)


def mean_over_heads(criterion: Criterion) -> HeadsLoss:
    """Returns the mean of a criterion over the heads."""

    def loss(heads: tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
        losses = [criterion(logits, targets) for logits in heads]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(dim=0)

    return loss


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
