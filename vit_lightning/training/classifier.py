"""The LightningModule: a network, its loss, its metrics and its optimizer."""

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Self

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

import vit_lightning
from vit_lightning.data.batches import as_batch, in_words
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import METRICS, MetricFacts, Stage, make_metrics, with_own
from vit_lightning.models.heads import heads_of
from vit_lightning.training.callbacks import TrainingBar, training_steps
from vit_lightning.training.ema import EMAConfig, WeightAverage, without_average
from vit_lightning.training.lightning_detours import data_of, is_attached, log_again
from vit_lightning.training.losses import (
    Criterion,
    Distillation,
    HeadsLoss,
    LossConfig,
    OwnLoss,
    make_loss,
    mean_over_heads,
)
from vit_lightning.training.optim import ConfiguredGroups, OptimizerConfig, optimizer_and_schedule


class StepOutput(NamedTuple):
    """Loss and logits of one batch.

    Args:
        loss: the loss, a scalar.
        logits: mean of the heads, (b, num_classes), at least float32.
        heads: logits of each head; a ViT with a distillation token has two in training.
    """

    loss: Tensor
    logits: Tensor
    heads: tuple[Tensor, ...]


class ConfiguredOptimizer(LightningModule):
    """LightningModule that is trained by the optimizer and the schedule of an ``OptimizerConfig``."""

    optimizer_config: OptimizerConfig

    def optimized(self) -> nn.Module:
        """Returns what the optimizer trains."""
        return self

    def configure_optimizers(self) -> OptimizerLRScheduler:
        per_epoch, total = training_steps(self.trainer, self._batches_per_epoch())
        if math.isinf(total):
            text = "the learning rate schedule needs an end (give trainer.max_epochs or max_steps)"
            raise UserError(f"trainer.max_epochs=-1: {text}")
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        schedulers = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
        accumulated = {batches for one in schedulers for batches in one.scheduling.values()}
        own = getattr(self.optimizer_config, "own_schedule", None)
        if len(accumulated) > 1 and (self.optimizer_config.warmup_epochs or (own and own.interval == "epoch")):
            text = "epochs differ in steps, and cannot be the unit of a warm-up or a schedule"
            ways = "give optimizer.warmup_steps or warmup_fraction, and interval: step"
            raise UserError(f"trainer.callbacks.GradientAccumulationScheduler: {text} ({ways})")
        optimizer, schedule = optimizer_and_schedule(
            self.optimized(), self.optimizer_config, total_steps=int(total), steps_per_epoch=int(per_epoch)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _batches_per_epoch(self) -> int:
        """Returns the batches of an epoch; ``Trainer.estimated_stepping_batches`` would use up the loader's state."""
        batches = getattr(self.trainer.datamodule, "train_batches_per_epoch", None)  # type: ignore[attr-defined]
        if batches is None:  # loaders of the user: Lightning counts their batches as a side effect
            self.trainer.fit_loop.setup_data()
            count = self.trainer.num_training_batches
            if math.isinf(count):
                text = "the training loader has no length, and the learning rate schedule needs one"
                raise UserError(f"trainer.limit_train_batches is missing: {text} (give the batches of an epoch)")
            return int(count)
        limit = self.trainer.limit_train_batches
        return int(batches * limit) if isinstance(limit, float) else min(int(batches), int(limit or batches))


class ViTClassifier(ConfiguredOptimizer):
    """LightningModule for a network from images (b, c, H, W) to logits (b, num_classes).

    Batches are (images, labels, ...). Logs the metrics of ``metric_facts`` under ``train/``, ``val/`` and ``test/``.
    Adds callbacks to any Trainer: averaged weights, a teacher, and learning rates of the config in a resumed run.

    Args:
        network: a ViT or any other module.
        num_classes: number of classes, by default ``network.num_classes``.
        optimizer: learning rate, weight decay and schedule.
        loss: the training loss, also as a callable of logits and targets; validation and test use plain cross entropy.
        ema: whether validation, test and checkpoints use averaged weights.
        distillation: distillation from a teacher.
        metrics: more metrics by name, of probabilities (b, num_classes) and labels, for validation and test.
    """

    takes_pairs = True
    """Whether batches of loaders of others come as images and labels."""
    measures: ClassVar[Mapping[str, MetricFacts]] = METRICS
    """Metrics that it logs beside those of a config."""

    def __init__(
        self,
        network: nn.Module,
        *,
        num_classes: int | None = None,
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig | OwnLoss | Criterion | None = None,
        ema: EMAConfig | None = None,
        distillation: Distillation | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        classes = getattr(network, "num_classes", None) if num_classes is None else num_classes
        if not isinstance(classes, int) or classes < 1:
            raise UserError(f"num_classes={classes} must be at least 1 to classify")
        self.network = network
        self.num_classes = classes
        self.optimizer_config = optimizer or OptimizerConfig()
        self.distillation, self._loss_in_bar = distillation, True
        self.average = WeightAverage(ema) if ema is not None and ema.decay is not None else None
        plain = nn.CrossEntropyLoss()
        self.training_loss = loss if callable(loss) else make_loss(loss or LossConfig())
        self.losses: dict[Stage, Criterion] = {"train": self.training_loss, "val": plain, "test": plain}
        self.heads_losses: dict[Stage, HeadsLoss] = {one: mean_over_heads(made) for one, made in self.losses.items()}
        if distillation is not None:
            self.heads_losses["train"] = distillation.heads_loss(self.losses["train"])
        self.metric_table = with_own(metrics or {}, self.measures)
        self.train_metrics = make_metrics("train", classes, self.metric_table)
        self.val_metrics = make_metrics("val", classes, self.metric_table)
        self.test_metrics = make_metrics("test", classes, self.metric_table)
        self.class_names: list[str] | None = None  # of the images that it was trained on

    def setup(self, stage: str) -> None:
        data = data_of(self.trainer)
        if stage == "fit":
            self.class_names = getattr(data, "class_names", None)
        takes = self.class_names is not None and hasattr(data, "take_classes")
        if note := data.take_classes(self.class_names, "the model") if takes else "":
            warnings.warn(note, stacklevel=2)

    def configure_callbacks(self) -> list[Callback]:
        return [ConfiguredGroups(), *filter(None, (self.average, self.distillation))]

    def optimized(self) -> nn.Module:
        return self.network

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor | tuple[Tensor, ...] = self.network(images)
        return logits

    def step(self, batch: Any, stage: Stage) -> StepOutput:
        """Computes loss and logits of a batch."""
        images, labels = batch[0], batch[1]
        given = heads_of(self.network, self(images))
        # half precision would round the targets of mixed images as well
        heads = tuple(logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in given)
        mixed = getattr(batch, "targets", None)  # class probabilities of mixed images (b, num_classes)
        targets = labels if mixed is None else mixed.to(heads[0].dtype)
        logits = heads[0] if len(heads) == 1 else torch.stack(heads).mean(dim=0)
        return StepOutput(self.heads_losses[stage](heads, targets, images), logits, heads)

    @torch.no_grad()
    def log_metrics(self, output: StepOutput, labels: Tensor, stage: Stage) -> None:
        """Adds a batch to the metrics of its stage."""
        # torchmetrics takes logits for probabilities if all of a batch are between 0 and 1; of ours none is in training
        is_plain = stage == "train" or len(self.metric_table) == 1
        scores = output.logits if is_plain else output.logits.float().softmax(dim=-1)
        for name, metric in getattr(self, f"{stage}_metrics").items():
            given: tuple[Any, ...] = (output.loss, len(labels)) if name == "loss" else (scores, labels)
            if len(labels):  # none on a rank of more ranks than a split has images
                metric.update(*given)
            in_bar = name in self.metric_table and self.metric_table[name].in_bar
            log_again(self, f"{stage}/{name}", metric, prog_bar=in_bar)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.step(batch, "train")
        self.log_metrics(output, batch[1], "train")
        log_again(self, "train/loss_step", output.loss, prog_bar=self._loss_in_bar)
        weight = self._step_weight(batch_idx)
        return output.loss if weight == 1.0 else output.loss * weight

    def _step_weight(self, batch_idx: int) -> float:
        """Returns the factor on the loss by which all images of a step, bad ones counted, weigh alike; 1 if unknown."""
        of_data = getattr(self.trainer.datamodule, "step_weight", None) if is_attached(self) else None  # type: ignore[attr-defined]
        return 1.0 if of_data is None else float(of_data(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the logits to callbacks."""
        output = self.step(batch, "val")
        self.log_metrics(output, batch[1], "val")
        return output.logits

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the logits to callbacks."""
        output = self.step(batch, "test")
        self.log_metrics(output, batch[1], "test")
        return output.logits

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return classify(self, batch, batch_idx)

    def on_fit_start(self) -> None:
        # our own bar reads it when it is drawn; Lightning would wait for the device in each step
        self._loss_in_bar = not isinstance(self.trainer.progress_bar_callback, TrainingBar | None)
        # after Trainer.validate their counts are inference tensors, which training may not change
        _reset(self.val_metrics, self.test_metrics)

    def on_train_epoch_start(self) -> None:
        _reset(self.train_metrics)  # a checkpoint from the end of an epoch still holds that epoch's counts

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, trust: bool = False, **kwargs: Any) -> Self:
        """Returns a classifier with the weights of a checkpoint, of a run or of any Trainer with this module.

        Args:
            checkpoint_path: the file, which is read as data alone.
            args: further arguments as those of ``LightningModule.load_from_checkpoint``.
            trust: whether classes that the file names may be of any package, and so run code.
            kwargs: likewise, and arguments of this class; ``network`` is needed only where the file does not tell its
                architecture: a network that is no ViT, or with blocks of your own.

        Raises:
            UserError: the file cannot be read, or does not tell its architecture.
        """
        if "network" not in kwargs:
            try:  # by the public name, as a program does: this room may not import those that read files
                kwargs["network"] = vit_lightning.load(checkpoint_path, trust=trust).network.train()
            except UserError as error:
                hint = "or give the network: load_from_checkpoint(..., network=...)"
                raise UserError([*error.problems, hint]) from error
        return super().load_from_checkpoint(checkpoint_path, *args, **{"weights_only": True, **kwargs})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Sums the counts of the epoch over ranks; in a resumed run the first rank continues with the sums.

        A checkpoint of a run has the config; that of another Trainer gets the model and the preprocessing of images.
        """
        if "config" not in checkpoint:
            with suppress(UserError):  # of a network that is no ViT of our blocks
                checkpoint["config"] = {"model": vit_lightning.model_config(self.network)}
            view = getattr(data_of(self.trainer), "test_view", None)
            checkpoint["test_view"] = view() if callable(view) else None
        state = checkpoint["state_dict"]
        for name in _train_counts(checkpoint):
            state[name] = self.trainer.strategy.reduce(state[name].detach().clone(), reduce_op="sum")
        if self.average is not None:  # Lightning calls no callbacks for checkpoints of weights alone
            self.average.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state, self.class_names = checkpoint["state_dict"], (checkpoint.get("test_view") or {}).get("class_names")
        if any(value.dtype == torch.float64 for name, value in state.items() if name.startswith("network.")):
            self.network.double()  # precision 64-true; Lightning converts only after it has loaded the weights
        if is_attached(self) and self.trainer.state.fn == TrainerFn.FITTING and self.average is None:
            without_average(checkpoint)
        own = self.state_dict()
        if not is_attached(self) and any(".lora_" in name for name in state.keys() - own.keys()):
            for name in [name for name in state if name.startswith("network.")]:  # adapters were merged as it was read
                del state[name]
            state |= {name: value for name, value in own.items() if name.startswith("network.")}
        if is_attached(self) and self.trainer.global_rank > 0:
            for name in _train_counts(checkpoint):
                state[name].zero_()


def probabilities(logits: Tensor, *, multi_label: bool = False) -> Tensor:
    """Returns the probability of each class from logits (b, classes); one logit, or several labels, have a sigmoid."""
    logits = logits.float()
    return logits.sigmoid() if multi_label or logits.shape[-1] == 1 else logits.softmax(dim=-1)


def classify(module: LightningModule, batch: Any, batch_idx: int) -> dict[str, Tensor]:
    """Returns class probabilities (b, num_classes), and labels and indices of the images (b,) if the batch has them.

    A batch of a loader of the user's own is images, (images,) or (images, labels), and has no indices.
    """
    pair = as_batch(batch)
    given = batch if pair is None else (pair.images, pair.labels)
    if isinstance(given, Mapping):
        needs = f"forward of {type(module).__name__} gets float images (b, c, H, W)"
        raise UserError(f"a batch holds {in_words(batch)}, and {needs} (give it a predict_step)")
    images, *labels = (given,) if isinstance(given, Tensor) else given
    logits = module(images)
    if not isinstance(logits, Tensor):
        raise UserError(f"{type(module).__name__} gives {type(logits).__name__} where logits (b, classes) are expected")
    data = getattr(module.trainer, "datamodule", None) if is_attached(module) else None
    found = {"probabilities": probabilities(logits, multi_label=getattr(data, "multi_label", False))}
    if labels and isinstance(labels[0], Tensor):
        found["labels"] = labels[0]
    if isinstance(getattr(batch, "indices", None), Tensor):
        found["indices"] = batch.indices
    return found


def _reset(*stages: nn.ModuleDict) -> None:
    for metrics in stages:
        for metric in metrics.values():
            metric.reset()  # type: ignore[operator]


def _train_counts(checkpoint: dict[str, Any]) -> list[str]:
    return [name for name in checkpoint["state_dict"] if name.startswith("train_metrics.")]
