"""What is trained: a network, its loss, its metrics and its optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from vit_lightning.errors import UserError
from vit_lightning.metric_facts import METRICS, Stage, make_metrics
from vit_lightning.training.distillation import Distillation
from vit_lightning.training.ema import EMAConfig, WeightAverage, without_average
from vit_lightning.training.losses import LossConfig, make_loss
from vit_lightning.training.optim import OptimizerConfig, optimizer_and_schedule


class ViTClassifier(LightningModule):
    """Trains a network that gives logits (b, num_classes) for images (b, c, H, W).

    Logs ``loss`` and ``acc`` under ``train/``, ``val/`` and ``test/``, ``acc5`` of more than five classes under the
    last two, and ``test/ece``, the calibration error. Batches are (images, labels, ...).

    Args:
        network: a ViT or any other module.
        num_classes: number of classes; ``network.num_classes`` when not given.
        optimizer: rate, decay and schedule.
        loss: the loss in training; validation and test report plain cross entropy.
        ema: whether validation, test and checkpoints have the average of the weights.
        distillation: a teacher that it learns from besides the labels.
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
        self.distillation = distillation  # no module, nor is the next one
        self.average = WeightAverage(ema) if ema is not None and ema.decay is not None else None
        self.losses: dict[Stage, nn.Module] = {
            "train": make_loss(loss or LossConfig()),
            "val": nn.CrossEntropyLoss(),
            "test": nn.CrossEntropyLoss(),
        }
        self.train_metrics = make_metrics("train", classes)
        self.val_metrics = make_metrics("val", classes)
        self.test_metrics = make_metrics("test", classes)
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False)
        self._hyperparameters: list[dict[str, Any]] = []
        self.confusion_matrix: Tensor | None = None  # (true, predicted), counts of the last test

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor | tuple[Tensor, ...] = self.network(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.shared_step(batch, "train")
        self.log("train/loss_step", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Gives the logits to callbacks, besides counting them."""
        _, logits = self.shared_step(batch, "test")
        self.confusion.update(logits, batch[1])
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Class probabilities (b, num_classes) with labels (b,) and the place of each image in its split (b,)."""
        logits = self(batch[0])
        assert isinstance(logits, Tensor), "several heads are for training"
        probabilities = logits.float().softmax(dim=-1)
        return {"probabilities": probabilities, "labels": batch[1], "indices": batch[2]}

    def shared_step(self, batch: Any, stage: Stage) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch; counts it into the metrics of its stage."""
        images, labels = batch[0], batch[1]
        given = self(images)
        # a ViT with a distillation token gives in training the logits of two heads; both learn from the labels where
        # there is no teacher
        heads = given if isinstance(given, tuple) else (given,)
        # in half precision the shares of a mixed image would be rounded too
        heads = tuple(logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in heads)
        mixed = getattr(batch, "targets", None)  # shares of classes, where a training image is mixed of several
        targets = labels if mixed is None else mixed.to(heads[0].dtype)
        if stage == "train" and self.distillation is not None:
            loss = self.distillation.loss(self.losses[stage](heads[0], targets), heads[-1], images)
        else:
            loss = torch.stack([self.losses[stage](logits, targets) for logits in heads]).mean(dim=0)
        logits: Tensor = torch.stack(heads).mean(dim=0)
        with torch.no_grad():
            # the calibration error takes logits for probabilities where all of a batch lie between 0 and 1
            probabilities = logits.float().softmax(dim=-1)
            for name, metric in getattr(self, f"{stage}_metrics").items():
                if name == "loss":
                    metric.update(loss, len(labels))
                else:
                    metric.update(probabilities, labels)
                self.log(f"{stage}/{name}", metric, prog_bar=METRICS[name].in_bar, on_step=False, on_epoch=True)
        return loss, logits

    def on_fit_start(self) -> None:
        if self.average is not None:
            self.average.start(self.network)
        if self.distillation is not None:
            self.distillation.teacher.to(self.device)
        # after Trainer.validate or test their counts are inference tensors, which training may not change
        for metric in (*self.val_metrics.values(), *self.test_metrics.values()):
            assert isinstance(metric, Metric)
            metric.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The epoch's counts of all ranks together; one of them takes them up again."""
        counts = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("train_metrics.")}
        for name, value in counts.items():
            total = value.detach().clone()
            checkpoint["state_dict"][name] = self.trainer.strategy.reduce(total, reduce_op="sum")
        if self.average is not None:
            self.average.save(checkpoint)
        if self.distillation is not None:
            self.distillation.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if any(value.dtype == torch.float64 for value in _network_state(checkpoint)):
            self.network.double()  # precision 64-true, which Lightning sees to only after it has loaded the weights
        if self.trainer.state.fn == TrainerFn.FITTING:
            if self.average is not None:
                self.average.load(checkpoint)
            else:
                without_average(checkpoint)
            if self.distillation is not None:
                self.distillation.load(checkpoint)
        if self.trainer.global_rank > 0:
            for name, value in checkpoint["state_dict"].items():
                if name.startswith("train_metrics."):
                    value.zero_()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.average is not None:
            self.average.update(self.network)

    def on_validation_epoch_start(self) -> None:
        if self.average is not None:
            self.average.show(self.network)

    def on_validation_epoch_end(self) -> None:
        if self.average is not None:
            self.average.hide(self.network)

    def on_train_end(self) -> None:
        if self.average is not None:  # what is tested from here on, as the checkpoints say
            self.average.end(self.network)

    def on_train_start(self) -> None:
        """What the page says of rates and decay holds, also where a checkpoint has just said otherwise."""
        optimizers, schedulers = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        if not isinstance(optimizers, torch.optim.Optimizer) or not isinstance(schedulers, LambdaLR):
            return  # of a subclass
        if len(optimizers.param_groups) != len(self._hyperparameters):
            return
        schedulers.base_lrs = [group["initial_lr"] for group in self._hyperparameters]
        for group, own, factor in zip(
            optimizers.param_groups, self._hyperparameters, schedulers.lr_lambdas, strict=True
        ):
            group.update(own, lr=own["initial_lr"] * factor(schedulers.last_epoch))

    def on_train_epoch_start(self) -> None:
        # a checkpoint of an epoch's end still holds what that epoch had counted
        for metric in self.train_metrics.values():
            assert isinstance(metric, Metric)
            metric.reset()

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()
        self.confusion.reset()

    def on_test_epoch_end(self) -> None:
        self.confusion_matrix = self.confusion.compute()  # over all ranks, so all have to ask at once
        self.on_validation_epoch_end()

    def on_predict_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_predict_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        batches = self._batches_per_epoch()
        steps_per_epoch = max(1, math.ceil(batches / self.trainer.accumulate_grad_batches))
        optimizer, schedule = optimizer_and_schedule(
            self.network,
            self.optimizer_config,
            total_steps=self._total_steps(steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
        )
        self._hyperparameters = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _batches_per_epoch(self) -> int:
        """Batches of an epoch; ``Trainer.estimated_stepping_batches`` would use up the loader's state."""
        batches = getattr(self.trainer.datamodule, "train_batches_per_epoch", None)  # type: ignore[attr-defined]
        if batches is None:  # loaders of the user's own: Lightning counts their batches when it is asked for steps
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


def _network_state(checkpoint: dict[str, Any]) -> list[Tensor]:
    return [value for name, value in checkpoint["state_dict"].items() if name.startswith("network.")]
