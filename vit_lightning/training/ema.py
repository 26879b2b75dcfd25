"""Exponential moving average of a network's weights, used in validation, test and checkpoints.

Lightning's WeightAveraging validates the average but tests the trained weights, saves those in checkpoints of weights
alone, and has no warm-up.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.training.callbacks import has_whole_weights
from vit_lightning.training.lightning_detours import accumulates

_PREFIX = "network."


@dataclass
class EMAConfig:
    """Exponential moving average of the weights, used in validation, test and checkpoints in place of the weights.

    Args:
        decay: decay of the average in each optimizer step (in each batch where a module steps by hand), such as 0.9999;
            no average when not given.
        warmup: whether the decay of step t = 1, 2, ... is at most (1 + t) / (10 + t).
    """

    decay: float | None = None
    warmup: bool = True

    def __post_init__(self) -> None:
        if self.decay is not None and not 0.0 <= self.decay < 1.0:
            raise UserError(f"decay={self.decay} must be at least 0 and below 1 (or null for no average)")
        if self.decay is None and not self.warmup:
            raise UserError("warmup=False does nothing without decay (give a decay, such as 0.9999)")

    def decay_at(self, step: int) -> float:
        """Returns the decay of a step, counted from 1."""
        decay = 0.0 if self.decay is None else self.decay
        return min(decay, (1 + step) / (10 + step)) if self.warmup else decay


class WeightAverage(Callback):
    """Moving average of the weights and buffers of ``module.network``; integer buffers are copied.

    Validation, test and prediction use the average, checkpoints hold it, and after the fit the network keeps it. The
    average of half-precision weights is kept in float32, as half precision would round small changes away.
    """

    def __init__(self, config: EMAConfig) -> None:
        self.config = config
        self.steps = 0
        self._average: dict[str, Tensor] = {}
        self._holders: dict[str, tuple[dict[str, Any], str]] = {}
        self._trained: dict[str, Tensor] | None = None  # while the network holds the average
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not has_whole_weights(trainer):
            kind = type(trainer.strategy).__name__
            raise UserError(f"ema.decay={self.config.decay} beside {kind}, which shards the weights: leave out one")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start(pl_module.get_submodule("network"))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # callbacks may have put other modules in before the epoch
            self._holders = _holders(pl_module.get_submodule("network"))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if not accumulates(trainer):
            self.update(pl_module.get_submodule("network"))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show(pl_module.get_submodule("network"))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hide(pl_module.get_submodule("network"))

    # after an interrupted fit, where the average is still kept
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end(pl_module.get_submodule("network"))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.load(checkpoint)

    def start(self, network: nn.Module) -> None:
        """Starts the average with the network's weights, or resumes it from the loaded checkpoint."""
        self.hide(network)  # an exception may have ended a validation
        loaded, self._loaded = self._loaded, None
        self.steps = 0 if loaded is None else loaded["steps"]
        if loaded is not None:
            network.load_state_dict(loaded["trained"])
        state = network.state_dict()
        own = state if loaded is None else loaded["average"]
        self._average = {name: _to_float32(value).to(state[name].device, copy=True) for name, value in own.items()}
        self._holders = _holders(network)

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Moves the average towards the weights, after each optimizer step."""
        self.steps += 1
        if self._average.keys() <= self._holders.keys():
            state = {name: tensors[key] for name, (tensors, key) in self._holders.items()}
        else:  # a network of the user's own makes its state_dict in its own way
            state = network.state_dict()
        moving = [name for name, value in self._average.items() if value.is_floating_point()]
        averages = [self._average[name] for name in moving]
        values = [state[name].to(average.dtype) for name, average in zip(moving, averages, strict=True)]
        torch._foreach_lerp_(averages, values, 1.0 - self.config.decay_at(self.steps))
        for name in self._average.keys() - set(moving):
            self._average[name].copy_(state[name])

    def show(self, network: nn.Module) -> None:
        """Loads the average into the network."""
        if self._average and self._trained is None:
            self._trained = {name: value.clone() for name, value in network.state_dict().items()}
            network.load_state_dict(self._average)

    def hide(self, network: nn.Module) -> None:
        """Loads the trained weights back into the network."""
        if self._trained is not None:
            network.load_state_dict(self._trained)
            self._trained = None

    def end(self, network: nn.Module) -> None:
        """Leaves the average in the network for good."""
        self.show(network)
        self._average, self._trained = {}, None

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Makes the average the weights of a checkpoint, and adds the trained weights under ``ema``."""
        if not self._average:
            return
        state = checkpoint["state_dict"]
        trained = {name: state[_PREFIX + name] for name in self._average} if self._trained is None else self._trained
        checkpoint["ema"] = {"trained": trained, "steps": self.steps}
        checkpoint["state_dict"] = {**state, **{_PREFIX + name: value for name, value in self._average.items()}}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the average of a checkpoint for ``start``; a checkpoint without one starts a new average."""
        if "ema" not in checkpoint:
            return
        state = checkpoint["state_dict"]
        average = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
        self._loaded = {**checkpoint["ema"], "average": average}


def without_average(checkpoint: dict[str, Any]) -> None:
    """Replaces the average in a checkpoint by the trained weights, to resume without an average."""
    trained = checkpoint["ema"]["trained"] if "ema" in checkpoint else {}
    checkpoint["state_dict"] |= {_PREFIX + name: value for name, value in trained.items()}


def _holders(network: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Returns where each parameter and buffer of a network lies: a dict of its module, and the key there.

    A ``state_dict()`` in each step takes milliseconds; a tensor kept for good would miss a buffer that is replaced.
    """
    return {
        f"{path}.{key}".lstrip("."): (tensors, key)
        for path, module in network.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key in tensors
    }


def _to_float32(value: Tensor) -> Tensor:
    return value.detach().float() if value.dtype in (torch.bfloat16, torch.float16) else value.detach()
