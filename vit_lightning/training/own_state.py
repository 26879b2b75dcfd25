"""State with which a run resumes beside Lightning's own: attributes of callbacks and modules, hooks of a start."""

from __future__ import annotations

import functools
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.training.callbacks import accumulated_in
from vit_lightning.training.lightning_detours import begin_epoch_again

CANNOT_RESUME: dict[type[Callback], str] = {
    ModelPruning: "its masks are in no checkpoint (prune the trained network, with torch.nn.utils.prune)",
    LearningRateFinder: "a resumed run would search again (search first, by Lightning's Tuner, and give the rate)",
    BatchSizeFinder: "a resumed run would search again (search first, by Lightning's Tuner, and give the size)",
}


def callback_problems(kinds: Iterable[type]) -> list[str]:
    """Returns the callbacks with which a killed run could not be resumed."""
    return [
        f"trainer.callbacks.{kind.__name__}: {text}"
        for kind in kinds
        for one, text in CANNOT_RESUME.items()
        if issubclass(kind, one)
    ]


class OwnState(Callback):
    """Callback that lets a run resume with callbacks and modules of the user's as they were.

    Checkpoints get the attributes that have changed since the parts were made: of each callback without a state of its
    own, and of the module and its parts, with what needs a gradient. In a resumed run Lightning calls ``setup``,
    ``on_fit_start`` and ``on_train_start`` once more, and ``on_train_epoch_start`` only at the start of an epoch. Here
    that is called inside an epoch too, and none of these hooks changes weights and optimizer, or those attributes.
    """

    def __init__(self) -> None:
        self._made: dict[str, dict[str, Any]] = {}
        self._trained: dict[str, bool] = {}
        self._restored: dict[str, Any] | None = None
        self._named: set[str] = set()
        self._accumulated = 1  # by the config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse(callback_problems(map(type, trainer.callbacks)))  # type: ignore[attr-defined]
            self._accumulated = trainer.accumulate_grad_batches
            self._made, self._trained = self._attributes(trainer), _trained(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = trainer.accumulate_grad_batches
        counted = accumulated_in(trainer, trainer.current_epoch, self._accumulated)
        others: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if now != counted and not any(isinstance(one, StochasticWeightAveraging) for one in others):
            raise UserError(
                f"trainer.accumulate_grad_batches={now} in epoch {trainer.current_epoch}, by a callback or the module: "
                f"the learning rate counts on {counted} (give a GradientAccumulationScheduler, whose steps are counted)"
            )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        changed = {
            place: {name: value for name, value in values.items() if not _same(value, self._made.get(place), name)}
            for place, values in self._attributes(trainer, name_lost=True).items()
        }
        own = {place: values for place, values in changed.items() if values}
        trained = {name: yes for name, yes in _trained(pl_module).items() if yes != self._trained.get(name)}
        own[""] = {"accumulate_grad_batches": trainer.accumulate_grad_batches, "requires_grad": trained}
        ranks: list[Any] = [own]
        if trainer.world_size > 1:
            ranks *= trainer.world_size
            torch.distributed.all_gather_object(ranks, own)
        checkpoint["own_state"] = ranks

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if "own_state" not in checkpoint:
            return
        self._restored = {**checkpoint["own_state"][trainer.global_rank]}
        for part in (*_stateless(trainer), *([] if _is_ours(pl_module) else [pl_module])):
            for name in ("on_fit_start", "on_train_start"):
                setattr(part, name, _without_effect(getattr(part, name), trainer))
        states = checkpoint.get("callbacks", {})

        def call_hooks() -> None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if not (_is_ours(callback) or isinstance(callback, LearningRateMonitor)):  # that would log a row again
                    _without_effect(callback.on_train_epoch_start, trainer)(trainer, pl_module)
                    if callback.state_key in states and is_overridden("on_train_epoch_start", callback, Callback):
                        callback.load_state_dict(states[callback.state_key])
            if not _is_ours(pl_module):
                _without_effect(pl_module.on_train_epoch_start, trainer)()

        begin_epoch_again(trainer, call_hooks, functools.partial(self._put_back, trainer))

    def _put_back(self, trainer: Trainer) -> None:
        """Gives the parts the attributes of the checkpoint, and those that it lacks as they were made."""
        if self._restored is None:
            return
        restored, self._restored = self._restored, None
        trainer.accumulate_grad_batches = restored[""]["accumulate_grad_batches"]
        trained = self._trained | restored[""]["requires_grad"]
        for name, weight in trainer.lightning_module.named_parameters():
            weight.requires_grad_(trained.get(name, weight.requires_grad))
        for place, part in _parts(trainer).items():
            keeper, now = _Keeper(trainer, part), _Keeper(trainer, part).attributes()
            for name, kept in {**self._made.get(place, {}), **restored.get(place, {})}.items():
                try:
                    if not _same(kept, now, name):
                        keeper.put_back(name, kept)
                except TypeError as fault:
                    text = "was made while it trained and is no plain data, so that a resumed run lacks it"
                    raise UserError(f"{place}.{name} {text} (give it a state_dict and load_state_dict)") from fault

    def _attributes(self, trainer: Trainer, *, name_lost: bool = False) -> dict[str, dict[str, Any]]:
        """Returns copies of the attributes of all parts that are plain data, or hold it."""
        found: dict[str, dict[str, Any]] = {}
        for place, part in _parts(trainer).items():
            keeper = _Keeper(trainer, part)
            found[place] = keeper.attributes()
            lost = (
                {f"{place}.{name}" for name in keeper.lost} if isinstance(part, Callback | LightningModule) else set()
            )
            if name_lost and (new := lost - self._named):
                self._named |= new
                text = (
                    "in no checkpoint: if training changes it, a run that is killed and resumed ends in other weights"
                )
                warnings.warn(
                    f"{', '.join(sorted(new))}: {text} (give it a state_dict and load_state_dict)", stacklevel=2
                )
        return found


def _trained(module: nn.Module) -> dict[str, bool]:
    return {name: weight.requires_grad for name, weight in module.named_parameters()}


def _is_ours(part: object) -> bool:
    return type(part).__module__.startswith("vit_lightning.")


def _stateless(trainer: Trainer) -> list[Callback]:
    """Returns the callbacks of the user's own that keep no state themselves."""
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith(("vit_lightning.", "lightning."))
        and not isinstance(callback, ProgressBar)
        and not any(is_overridden(name, callback, Callback) for name in ("state_dict", "on_save_checkpoint"))
    ]


def _parts(trainer: Trainer) -> dict[str, Any]:
    """Returns the parts whose attributes are kept, by name."""
    modules = {f"module.{name}".rstrip("."): part for name, part in trainer.lightning_module.named_modules()}
    own = {
        f"{type(part).__name__} ({number})" if number else type(part).__name__: part
        for number, part in _numbered(trainer)
    }
    return {name: part for name, part in (modules | own).items() if not _is_ours(part)}


def _numbered(trainer: Trainer) -> Iterator[tuple[int, Callback]]:
    seen: list[type] = []
    for callback in _stateless(trainer):
        yield seen.count(type(callback)), callback
        seen.append(type(callback))


def _same(value: Any, made: Mapping[str, Any] | None, name: str) -> bool:
    return made is not None and name in made and pickle.dumps(value) == pickle.dumps(made[name])


def _without_effect(hook: Callable[..., Any], trainer: Trainer) -> Callable[..., None]:
    """Returns a hook that leaves weights and the values of the optimizer's groups as they are."""

    @functools.wraps(hook)
    def call(*args: Any) -> None:
        module = trainer.lightning_module
        tensors = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        values = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        hook(*args)
        for tensor, before in tensors:
            tensor.data.copy_(before)
        for group, value in zip(groups, values, strict=True):
            group.update(value)

    return call


_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (
        lambda draw: draw.bit_generator.state,
        lambda draw, to: setattr(draw.bit_generator, "state", to),
    ),
}
_KIND = "kept as"
"""Key of what stands for a value that is no plain data."""
_OF_LIGHTNING = frozenset(vars(LightningModule()))


class _Keeper:
    """Copies of the attributes of a part as plain data, and the way back, which keeps the objects.

    Args:
        trainer: what it holds itself, such as weights and optimizers, is no attribute's own.
        part: the part; other objects of its package are kept by their attributes.
    """

    def __init__(self, trainer: Trainer, part: Any) -> None:
        module: LightningModule = trainer.lightning_module
        parts = (*module.modules(), *module.parameters(), *module.buffers(), *trainer.optimizers, *trainer.loggers)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        others: list[Any] = [trainer, trainer.datamodule, *trainer.callbacks]  # type: ignore[attr-defined]
        self.held = {id(one) for one in (*parts, *schedules, *others)}
        self.part, self.package, self.device = part, _package(part), trainer.strategy.root_device
        self.lost: list[str] = []
        """Attributes that may change, and cannot be kept."""

    def attributes(self) -> dict[str, Any]:
        """Returns copies of the attributes that may change."""
        found: dict[str, Any] = {}
        for name, value in vars(self.part).items():
            if (isinstance(self.part, nn.Module) and name in _OF_LIGHTNING) or self._is_constant(value):
                continue
            try:
                found[name] = self._kept(value)
            except (TypeError, RecursionError):
                self.lost.append(name)
        return found

    def put_back(self, name: str, kept: Any) -> None:
        """Gives the part an attribute again; raises TypeError for an object that is no longer there."""
        setattr(self.part, name, self._again(vars(self.part).get(name), kept))

    def _is_constant(self, value: Any) -> bool:
        """Whether a value never changes, or is the Trainer's, or has its state elsewhere."""
        if id(value) in self.held or isinstance(value, RemovableHandle):
            return type(value) not in _ATOMS
        if isinstance(value, (*_ATOMS, Tensor, np.generic, nn.Module, tuple)):
            return False
        own_hash: Any = type(value).__hash__
        if callable(value) or own_hash not in (None, object.__hash__):
            return True
        try:
            return copy(value) is value
        except Exception:  # a file, a lock
            return True

    def _kept(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if self._is_constant(value):
            return None
        if isinstance(value, Tensor):
            copied = value.detach().clone()
            return copied if copied.device.type == "cpu" else {_KIND: "device", "value": copied}
        if isinstance(value, np.ndarray | np.generic):
            return {_KIND: "array", "value": torch.from_numpy(np.array(value))}
        if isinstance(value, list | deque | tuple | set):
            items = [self._kept(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else set(items) if isinstance(value, set) else items
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        if isinstance(value, tuple(_GENERATORS)):
            return {_KIND: "generator", "value": self._kept(_of_generator(value)[0](value))}
        if isinstance(value, nn.Module) or _package(value) == self.package:
            return {_KIND: "object", "value": self._contents(value)}
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return {_KIND: "state_dict", "value": self._kept(value.state_dict())}
        raise TypeError

    def _contents(self, value: Any) -> dict[str, Any]:
        """Returns the attributes of an object, but for the constants, and what else layers hold."""
        found: dict[str, Any] = {}
        for name, item in vars(value).items():
            try:
                found |= {} if self._is_constant(item) else {name: self._kept(item)}
            except TypeError:
                if not isinstance(value, nn.Module):
                    raise
        return found

    def _again(self, now: Any, kept: Any) -> Any:
        """Returns what was kept: the present object with the contents of then, where there is one."""
        if kept is None and now is not None and self._is_constant(now):
            return now
        if isinstance(kept, Tensor) and isinstance(now, Tensor) and kept.shape == now.shape:
            now.data.copy_(kept)
            return now
        if isinstance(kept, tuple):
            items = [self._again(*pair) for pair in _pairs(now, kept)]
            return type(now)(*items) if hasattr(now, "_fields") else tuple(items)
        if isinstance(kept, list):
            items = [self._again(*pair) for pair in _pairs(now, kept)]
            return _refilled(now, items) if isinstance(now, list | deque) else items
        if not isinstance(kept, dict):
            return kept
        kind, value = kept.get(_KIND), kept.get("value", {})
        if kind is None:
            held = now if isinstance(now, dict) else {}
            entries = {key: self._again(held.get(key), item) for key, item in kept.items()}
            return _refilled(now, entries) if isinstance(now, dict) else entries
        if kind in ("device", "array"):
            return self._again(now, value.to(self.device)) if kind == "device" else value.numpy().copy()[()]
        if now is None:
            raise TypeError
        if kind == "object":
            vars(now).update({name: self._again(vars(now).get(name), item) for name, item in value.items()})
        elif kind == "state_dict":
            now.load_state_dict(self._again(None, value))
        else:
            _of_generator(now)[1](now, self._again(None, value))
        return now


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _of_generator(value: object) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(functions for kind, functions in _GENERATORS.items() if isinstance(value, kind))


def _pairs(now: Any, kept: list[Any] | tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    there = list(now) if isinstance(now, list | deque | tuple) else []
    return zip(there + [None] * len(kept), kept, strict=False)


def _refilled(now: Any, contents: Any) -> Any:
    """Returns the same list, deque or dict with other contents."""
    now.clear()
    (now.update if isinstance(now, dict) else now.extend)(contents)
    return now
