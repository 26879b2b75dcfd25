"""Callbacks and modules of a user, as a file of theirs: copied into the working folder of a test."""

import math
import os
import random
import signal
from collections import defaultdict, deque

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Accuracy


def scale(module, factor):
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(factor)


class Stateless(Callback):
    """Remembers things of many kinds in attributes, and acts on weights by each."""

    def __init__(self):
        self.count, self.recent, self.table = 0, deque(maxlen=3), np.zeros(2)
        self.means = defaultdict(lambda: None)

    def on_train_start(self, trainer, pl_module):
        self.start = [weight.detach().clone() for weight in pl_module.parameters()]
        self.weights = dict(pl_module.named_parameters())
        scale(pl_module, 0.5)

    def on_train_epoch_start(self, trainer, pl_module):
        self.first = True
        pl_module.log("first", 1.0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.first:
            scale(pl_module, 0.9)
        self.first = False

    def on_train_batch_end(self, trainer, pl_module, *others):
        self.count += 1
        self.table[self.count % 2] += 1
        self.recent.append(float(next(pl_module.parameters()).sum()))
        self.means["mean"] = np.mean(self.recent)
        if self.count % 2:
            scale(pl_module, 1 - 1e-3 * (abs(self.means["mean"]) + self.table[0]))
            with torch.no_grad():
                for weight, start in zip(self.weights.values(), self.start, strict=False):
                    weight.lerp_(start, 0.01)


class Stateful(Callback):
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def on_train_batch_end(self, trainer, pl_module, *others):
        self.count += 1
        scale(pl_module, 1 - 0.01 * (self.count % 3))


def stopping(patience: int):
    return EarlyStopping("val/loss", 9, patience)


class Listed(Callback):
    """Has a state that is no mapping."""

    def state_dict(self):
        return [1]


class Knowing(Callback):
    """Acts on weights by all numbers that a Trainer knows, and asks for one where the third epoch starts."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.seen = float(trainer.callback_metrics["val/acc"])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        known = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        numbers = [float(one[name]) for one in known for name in sorted(one) if "speed" not in name]
        scale(pl_module, 1 - 1e-3 * math.tanh(sum(numbers)))


class Unfreeze(Callback):
    def on_fit_start(self, trainer, pl_module):
        pl_module.network[1].requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.network[1].requires_grad_(trainer.current_epoch > 0)


class Decay(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.3 + 2 * group["weight_decay"]


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.draw, self.size, self.layer = random.Random(0), torch.ones(2).shape, torch.nn.ReLU()


class Noisy(Callback):
    def setup(self, trainer, pl_module, stage):
        pl_module.noise = Noise()


class Opaque(Callback):
    def __init__(self):
        self.draw, self.numbers, self.torchs = random.Random(0), np.random.RandomState(0), torch.Generator()
        self.recent, self.mean = [deque(maxlen=3)], Mean()
        self.constant, self.plain = (scale, Mean, self.setup), [1.0, {"a": torch.ones(1)}]


class Mean:
    total = 0.0


class Stopping(Callback):
    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop |= trainer.current_epoch == 0


class Other(Callback):
    def on_train_end(self, trainer, pl_module):
        scale(pl_module, 0.5)


class Logging(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.average = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)
        self.right = Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        images, labels = batch[0].flatten(1), batch[1]
        logits = self.layer(images)
        loss = nn.functional.cross_entropy(logits + self.average(images), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.right(logits.softmax(1), labels)
        self.log("train/right", self.right, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("train/first", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.layer(batch[0].flatten(1))
        self.log("val/acc", (logits.argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return SGD(self.layer.parameters(), 0.1)


class Following(Logging):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(10, 64), persistent=False)  # as of solo-learn#252

    def on_train_batch_end(self, *others):
        with torch.no_grad():
            self.queue.lerp_(self.layer.weight, 0.5)
            self.average.weight.lerp_(self.queue, 0.1)


class Late(Logging):
    def __init__(self):
        super().__init__()
        self.layer = self.average = None

    def make(self):
        if self.layer is None:
            self.layer, self.average = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)

    def test_step(self, batch, batch_idx):
        right = self.layer(batch[0].flatten(1)).argmax(1) == batch[1]
        self.log("test/acc", right.float().mean(), batch_size=len(right))


class InSetup(Late):
    def setup(self, stage):
        self.make()


class Configured(Late):
    def configure_model(self):
        self.make()


class Partial(Late):
    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.make()

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "average" not in name}


class Rated(Logging):
    def __init__(self, lr: float = 0.1, every: int = 5, kind: str = ""):
        super().__init__()
        self.lr, self.every, self.kind = lr, every, kind

    def configure_optimizers(self):
        sgd = SGD(self.layer.parameters(), self.lr)
        sgd.param_groups[0]["counted"] = torch.zeros(2)
        makers = {
            "step": lambda: schedules.StepLR(sgd, self.every, 0.5),
            "warm": lambda: schedules.LambdaLR(sgd, lambda step: min(1, (step + 1) / self.every)),
            "late": lambda: schedules.LambdaLR(sgd, lambda step: float(step >= self.every)),
            "rising": lambda: schedules.LinearLR(sgd, self.every / 10, total_iters=3),
            "two": lambda: schedules.SequentialLR(
                sgd, [schedules.ConstantLR(sgd, 0.5, 10), schedules.StepLR(sgd, 1, 0.5)], [self.every]
            ),
        }
        return [sgd], [{"scheduler": makers[self.kind](), "interval": "step"}] if self.kind else []

    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["counted"] += 1


class Plateaued(Logging):
    """Its rate follows the last validation, where there has been one."""

    def __init__(self, interval: str = "epoch"):
        super().__init__()
        self.interval = interval

    def configure_optimizers(self):
        sgd = SGD(self.layer.parameters(), 0.1)
        follow = {"scheduler": schedules.ReduceLROnPlateau(sgd, "max", 0.8, 0), "interval": self.interval}
        return [sgd], [{**follow, "monitor": "val/acc", "strict": False}]


class Weighted(Logging):
    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(torch.full([10], weight))


class SAM(Optimizer):
    """As davda54's, with an optimizer inside; its radius changes by a number that no state has."""

    def __init__(self, params, lr: float = 0.05, momentum: float = 0.9):
        super().__init__(params, {"lr": lr})
        self.base_optimizer, self.steps = SGD(self.param_groups, lr, momentum), 0
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.add_(weight.grad, alpha=0.1 * (self.steps % 3))
        self.steps += 1
        torch.enable_grad()(closure)()
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
        self.base_optimizer.step()
        return loss


class Free(Optimizer):
    """As schedulefree's: trains one set of weights, and has their mean for evaluation."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "train_mode": False})

    @torch.no_grad()
    def put_in(self, train_mode):
        for group in self.param_groups:
            for weight in group["params"] if group["train_mode"] != train_mode else ():
                if state := self.state[weight]:
                    weight.copy_(state["trained"] if train_mode else state["sum"] / state["steps"])
            group["train_mode"] = train_mode

    def train(self):
        self.put_in(True)

    def eval(self):
        self.put_in(False)

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            assert group["train_mode"], "call train"
            for weight in group["params"]:
                weight.sub_(0.0 if weight.grad is None else group["lr"] * weight.grad)
                state = self.state[weight]
                state["sum"], state["steps"] = weight + state.get("sum", 0.0), state.get("steps", 0) + 1
                state["trained"] = weight.clone()
        return loss


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if os.environ.get("STOP") and (trainer.current_epoch, batch_idx) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)


class ByHand(Logging):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Raw(Logging):
    """Steps an optimizer without Lightning's wrapper, so that the Trainer counts no step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Two(Raw):
    """Of whose two optimizers the Trainer counts each step."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(Logging.training_step(self, batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return SGD([self.layer.weight], 0.1), SGD([self.layer.bias], 0.1)


class Stream(IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for number in range(40):
            yield torch.randn(1, 8, 8, generator=draw), number % 10


class Streams(LightningDataModule):
    num_classes = 10

    def train_dataloader(self):
        return DataLoader(Stream(), 10)

    def val_dataloader(self):
        return DataLoader(Stream(), 10)


class Old(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_epoch_end(self, outputs):
        pass

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


def stop_in_last_batch():
    def stop(trainer, *others):
        if os.environ.get("STOP") and trainer.current_epoch == 1 and trainer.is_last_batch:
            os.kill(os.getpid(), signal.SIGTERM)

    return LambdaCallback(on_train_batch_end=stop)
