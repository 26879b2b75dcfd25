"""The LightningModule: a network, its loss, its metrics and its optimizer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from vit_lightning.errors import UserError
from vit_lightning.metric_facts import METRICS, Stage, make_metrics
from vit_lightning.training.distillation import Distillation
from vit_lightning.training.ema import EMAConfig, WeightAverage, without_average
from vit_lightning.training.losses import HeadsLoss, LossConfig, make_loss, mean_over_heads
from vit_lightning.training.optim import ConfiguredRates, OptimizerConfig, optimizer_and_schedule


class StepOutput(NamedTuple):
    """Outcome of one batch.

    Args:
        loss: a number.
        logits: (b, num_classes), mean over the heads, at least float32.
        heads: logits of each head; several only of a ViT with a distillation token in training.
    """

    loss: Tensor
    logits: Tensor
    heads: tuple[Tensor, ...]


class ViTClassifier(LightningModule):
    """Trains a network that returns logits (b, num_classes) for images (b, c, H, W). Batches are (images, labels, ...).

    Logs the metrics of ``metric_facts`` under ``train/``, ``val/`` and ``test/``. Averaged weights, a teacher, and
    learning rates after a resume are callbacks, which it brings along for any Trainer.

    Args:
        network: a ViT or any other module.
        num_classes: number of classes; ``network.num_classes`` when not given.
        optimizer: learning rate, weight decay and schedule.
        loss: the loss in training; validation and test report plain cross entropy.
        ema: whether validation, test and checkpoints use averaged weights.
        distillation: a teacher to learn from besides the labels.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        num_classes: int | None = None,
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig | None = None,
        ema: EMAConfig | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        super().__init__()
        classes = getattr(network, "num_classes", None) if num_classes is None else num_classes
        if not isinstance(classes, int) or classes < 2:
            raise UserError(f"num_classes={classes} must be at least 2 to classify")
        self.network = network
        self.num_classes = classes
        self.optimizer_config = optimizer or OptimizerConfig()
        self.configured_rates = ConfiguredRates()
        self.distillation = distillation
        self.average = WeightAverage(ema) if ema is not None and ema.decay is not None else None
        plain = nn.CrossEntropyLoss()
        self.losses: dict[Stage, nn.Module] = {"train": make_loss(loss or LossConfig()), "val": plain, "test": plain}
        self.heads_losses: dict[Stage, HeadsLoss] = {
            stage: mean_over_heads(criterion) for stage, criterion in self.losses.items()
        }
        if distillation is not None:
            self.heads_losses["train"] = distillation.heads_loss(self.losses["train"])
        self.train_metrics = make_metrics("train", classes)
        self.val_metrics = make_metrics("val", classes)
        self.test_metrics = make_metrics("test", classes)
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False)
        self.confusion_matrix: Tensor | None = None  # (true, predicted), counts of the last test

    def configure_callbacks(self) -> list[Callback]:
        return [
            callback for callback in (self.configured_rates, self.average, self.distillation) if callback is not None
        ]

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor | tuple[Tensor, ...] = self.network(images)
        return logits

    def step(self, batch: Any, stage: Stage) -> StepOutput:
        """Computes loss and logits of a batch."""
        images, labels = batch[0], batch[1]
        output = self(images)
        heads = output if isinstance(output, tuple) else (output,)
        # in half precision the targets of a mixed image would be rounded too
        heads = tuple(logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in heads)
        mixed = getattr(batch, "targets", None)  # (b, num_classes), fractions of the classes of mixed images
        targets = labels if mixed is None else mixed.to(heads[0].dtype)
        return StepOutput(self.heads_losses[stage](heads, targets, images), torch.stack(heads).mean(dim=0), heads)

    @torch.no_grad()
    def log_metrics(self, output: StepOutput, labels: Tensor, stage: Stage) -> None:
        """Adds a batch to the metrics of its stage."""
        # the calibration error takes logits for probabilities if all of a batch lie between 0 and 1
        probabilities = output.logits.float().softmax(dim=-1)
        for name, metric in getattr(self, f"{stage}_metrics").items():
            metric.update(*((output.loss, len(labels)) if name == "loss" else (probabilities, labels)))
            self.log(f"{stage}/{name}", metric, prog_bar=METRICS[name].in_bar, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.step(batch, "train")
        self.log_metrics(output, batch[1], "train")
        self.log("train/loss_step", output.loss, prog_bar=True, on_step=True, on_epoch=False)
        return output.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_metrics(self.step(batch, "val"), batch[1], "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the logits to callbacks."""
        output = self.step(batch, "test")
        self.log_metrics(output, batch[1], "test")
        self.confusion.update(output.logits, batch[1])
        return output.logits

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Returns class probabilities (b, num_classes), labels (b,) and the index of each image in its split (b,)."""
        logits = self(batch[0])
        assert isinstance(logits, Tensor), "several heads are for training"
        return {"probabilities": logits.float().softmax(dim=-1), "labels": batch[1], "indices": batch[2]}

    def on_fit_start(self) -> None:
        # after Trainer.validate or test their counts are inference tensors, which training may not change
        _reset(self.val_metrics, self.test_metrics)

    def on_train_epoch_start(self) -> None:
        _reset(self.train_metrics)  # a checkpoint of an epoch's end still holds that epoch's counts

    def on_test_epoch_start(self) -> None:
        self.confusion.reset()

    def on_test_epoch_end(self) -> None:
        self.confusion_matrix = self.confusion.compute()  # over all ranks, so all have to call it at once

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Sums the epoch's counts over ranks; in a resumed run the first rank continues them."""
        state = checkpoint["state_dict"]
        for name in _train_counts(checkpoint):
            state[name] = self.trainer.strategy.reduce(state[name].detach().clone(), reduce_op="sum")
        if self.average is not None:  # here, as Lightning calls no callback for files of weights alone
            self.average.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if any(value.dtype == torch.float64 for name, value in state.items() if name.startswith("network.")):
            self.network.double()  # precision 64-true, which Lightning applies only after loading the weights
        if self.trainer.state.fn == TrainerFn.FITTING and self.average is None:
            without_average(checkpoint)
        if self.trainer.global_rank > 0:
            for name in _train_counts(checkpoint):
                state[name].zero_()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        batches = self._batches_per_epoch()
        steps_per_epoch = max(1, math.ceil(batches / self.trainer.accumulate_grad_batches))
        optimizer, schedule = optimizer_and_schedule(
            self.network,
            self.optimizer_config,
            total_steps=self._total_steps(steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _batches_per_epoch(self) -> int:
        """Batches of an epoch; ``Trainer.estimated_stepping_batches`` would use up the loader's state."""
        batches = getattr(self.trainer.datamodule, "train_batches_per_epoch", None)  # type: ignore[attr-defined]
        if batches is None:  # the user's own loaders: Lightning counts their batches when it is asked for steps
            _ = self.trainer.estimated_stepping_batches
            return int(self.trainer.num_training_batches)
        limit = self.trainer.limit_train_batches
        return int(batches * limit) if isinstance(limit, float) else min(int(batches), int(limit or batches))

    def _total_steps(self, steps_per_epoch: int) -> int:
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        by_epochs = math.inf if epochs is None or epochs < 0 else epochs * steps_per_epoch
        total = min(by_epochs, math.inf if steps < 0 else steps)
        if math.isinf(total):
            raise UserError("trainer.max_epochs=-1: the schedule needs an end, give trainer.max_epochs or max_steps")
        return int(total)


def _reset(*stages: nn.ModuleDict) -> None:
    for metrics in stages:
        for metric in metrics.values():
            assert isinstance(metric, Metric)
            metric.reset()


def _train_counts(checkpoint: dict[str, Any]) -> list[str]:
    return [name for name in checkpoint["state_dict"] if name.startswith("train_metrics.")]
