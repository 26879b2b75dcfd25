"""State with which a run resumes beside Lightning's own: attributes of callbacks and modules, hooks of a start."""

import functools
import pickle
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from vit_lightning.errors import UserError, refuse
from vit_lightning.training.lightning_detours import begin_epoch_again, log_on, logged_so_far, own_generators

CANNOT_RESUME: dict[type[Callback], str] = {
    callbacks.ModelPruning: "its masks are in no checkpoint (prune the trained network, with torch.nn.utils.prune)",
    callbacks.LearningRateFinder: "a resumed run would search again (search first, by Lightning's Tuner)",
    callbacks.BatchSizeFinder: "a resumed run would search again (search first, by Lightning's Tuner)",
}
_NUMPY = [type(np.dtype(code)) for code in "?bhilqBHILQefd"]
_OF_NUMPY = [np.ndarray, np.dtype, np.ones(1).__reduce__()[0], np.ones(1)[0].__reduce__()[0], *_NUMPY]
_PLAIN = {bool, int, float, str, type(None), Tensor, nn.Parameter, np.ndarray, *(kind.type for kind in _NUMPY)}
_AS_PLAIN: dict[type, Any] = {deque: list, defaultdict: dict, OrderedDict: dict, Counter: dict}
_OF_TORCH = (RemovableHandle, torch.Size, torch.dtype, torch.device)
_NO_STATE = (FunctionType, functools.partial, MethodType, type, PurePath, *_OF_TORCH)
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_OF_LIGHTNING = {*vars(LightningModule()), "_hparams", "_hparams_initial", "_hparams_name"}
_OF_OPTIMIZER = vars(SGD([torch.zeros(1)])).keys()


def callback_problems(kinds: Iterable[type]) -> list[str]:
    """Returns the callbacks with which a killed run could not be resumed."""
    found = [(kind, text) for kind in kinds for one, text in CANNOT_RESUME.items() if issubclass(kind, one)]
    return [f"trainer.callbacks.{kind.__name__}: {text}" for kind, text in found]


class OwnState(Callback):
    """Callback that lets a run resume with callbacks and modules of the user's as they were.

    Checkpoints get the attributes that are plain data and have changed since the parts were made: of each callback
    without a state of its own, of optimizers, and of the module and its parts, with what needs a gradient (and
    gradients, where the module steps by hand), all metrics of the Trainer, such as those of the last validation, what
    was logged in the epoch, and the state of generators of loaders and of optimizers inside others. Attributes of
    another kind that may change are named. In a resumed run Lightning calls ``setup``, ``on_fit_start`` and
    ``on_train_start`` once more, and ``on_train_epoch_start`` only at the start of an epoch. Here that is called inside
    an epoch too, and none of these hooks changes weights and optimizer, or those attributes.

    Args:
        own: the user's callbacks.
        changed: the arguments of each, as patience, that are others than in the checkpoint: they hold, even where the
            callback's own state has those of the checkpoint.
    """

    def __init__(self, own: Sequence[Callback], changed: Sequence[set[str]]) -> None:
        self._changed, self._named, self._step = [*zip(own, changed, strict=True)], set[str](), -1
        self._known: dict[str, dict[str, Any]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse(callback_problems(map(type, trainer.callbacks)))  # type: ignore[attr-defined]
        self._made = {place: pickle.dumps(value) for place, value in _attributes(trainer)[0].items()}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # now there are optimizers
        found = {place: pickle.dumps(value) for place, value in _attributes(trainer)[0].items()}
        self._made |= {place: value for place, value in found.items() if place[0].startswith("optimizer ")}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, numbers in self._known.items():
            getattr(trainer, name).update(numbers)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        before, self._step = self._step, trainer.global_step
        if before == self._step and trainer.accumulate_grad_batches > 1:
            text = f"{type(optimizer).__name__} computes a batch again in its step, with the gradients of all before it"
            raise UserError(f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: {text} (give 1)")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["inner_optimizers"] = [one.state_dict() for one in _optimizers(trainer)[len(trainer.optimizers) :]]
        plain, others = _attributes(trainer)
        if new := others - self._named:
            self._named |= new
            text = "in no checkpoint: if training changes it, a run that is killed and resumed ends in other weights"
            warnings.warn(f"{', '.join(sorted(new))}: {text} (give it state_dict and load_state_dict)", stacklevel=2)
        changed = {place: value for place, value in plain.items() if pickle.dumps(value) != self._made.get(place)}
        drawn = [generator.get_state() for generator in own_generators(trainer)]
        known = {name: getattr(trainer, name) for name in _METRICS}
        torch.save((changed, logged_so_far(trainer), drawn, known), packed := BytesIO())  # with devices of tensors
        checkpoint["own_state"] = [packed.getvalue()] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(checkpoint["own_state"], packed.getvalue())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ranks, states = checkpoint["own_state"], checkpoint["callbacks"]
        packed = BytesIO(ranks[trainer.global_rank % len(ranks)])  # there may be more ranks than before
        device = trainer.strategy.root_device
        with torch.serialization.safe_globals(_OF_NUMPY):
            found = torch.load(packed, lambda data, at: data if at == "cpu" else data.to(device=device))  # type: ignore[attr-defined]
        kept, logged, drawn, self._known = found
        for callback, arguments in self._changed:
            if isinstance(state := states.get(callback.state_key), dict):
                state |= {name: vars(callback)[name] for name in arguments & vars(callback).keys() & state.keys()}
        for part in _parts(trainer).values():
            for name in ("on_fit_start", "on_train_start") if isinstance(part, Callback | LightningModule) else ():
                setattr(part, name, _without_effect(getattr(part, name), trainer))

        def call_hooks() -> None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if not (_is_ours(callback) or isinstance(callback, callbacks.LearningRateMonitor)):  # it would log
                    _without_effect(callback.on_train_epoch_start, trainer)(trainer, pl_module)
                    if callback.state_key in states:
                        callback.load_state_dict(states[callback.state_key])
            if not _is_ours(pl_module):
                _without_effect(pl_module.on_train_epoch_start, trainer)()

        def put_back() -> None:
            parts, (now, _) = {"trainer": trainer, **_parts(trainer)}, _attributes(trainer)
            # not what a setup has made something else of, such as None a layer
            made = {place: pickle.loads(value) for place, value in self._made.items() if place in now}
            for (part, name), value in (made | kept).items():
                if part in parts and pickle.dumps(now.get((part, name), ...)) != pickle.dumps(value):
                    old = vars(parts[part]).get(name)
                    if type(old) in _AS_PLAIN:
                        old.clear()
                        (old.extend if isinstance(old, deque) else old.update)(value)
                    else:
                        setattr(parts[part], name, value)
            groups = {id(group["params"]): group for one in trainer.optimizers for group in one.param_groups}
            inner = _optimizers(trainer)[len(trainer.optimizers) :]
            for one, state in zip(inner, checkpoint["inner_optimizers"], strict=True):
                one.load_state_dict(state)  # now its groups are copies of those that it shares
                one.param_groups = [groups.get(id(group["params"]), group) for group in one.param_groups]
            log_on(trainer, logged)
            for generator, before in zip(own_generators(trainer), drawn, strict=False):
                generator.set_state(before)

        begin_epoch_again(trainer, call_hooks, put_back)


def _is_ours(part: object) -> bool:
    return type(part).__module__.startswith("vit_lightning.")


def _is_the_users(part: object) -> bool:
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    return file is not None and "site-packages" not in file


def _parts(trainer: Trainer) -> dict[str, Any]:
    """Returns what has attributes that are kept: the module and its parts, callbacks without a state, weights."""
    module, own = trainer.lightning_module, []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        is_known = type(callback).__module__.startswith(("vit_lightning.", "lightning."))
        has_state = any(is_overridden(name, callback, Callback) for name in ("state_dict", "on_save_checkpoint"))
        own += [] if is_known or has_state or isinstance(callback, callbacks.ProgressBar) else [callback]
    found = by_kind([(type(callback).__name__, callback) for callback in own])
    found |= {f"module {name}": part for name, part in module.named_modules() if not _is_ours(part)}
    found |= {f"optimizer {number}": one for number, one in enumerate(_optimizers(trainer)) if not _is_ours(one)}
    return found | {f"weight {name}": weight for name, weight in module.named_parameters()}


def by_kind(parts: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns parts by their kind and their number among those of a kind, whatever else is among them."""
    kinds = [kind for kind, _ in parts]
    return {f"{kind} {kinds[:place].count(kind)}": part for place, (kind, part) in enumerate(parts)}


def _optimizers(trainer: Trainer) -> list[Optimizer]:
    """Returns the optimizers, then those that they hold, as SAM does, without having their state."""
    found = [*trainer.optimizers]
    for outer in found:
        if not _is_ours(outer) and type(outer).state_dict is Optimizer.state_dict:
            leaves = _leaves([*vars(outer).values()])
            found += [leaf for leaf in leaves if isinstance(leaf, Optimizer) and leaf not in found]
    return found


def _attributes(trainer: Trainer) -> tuple[dict[tuple[str, str], Any], set[str]]:
    """Returns the attributes that are plain data, by part and name, and the names of others that may change."""
    module, others = trainer.lightning_module, set()
    held = {id(one) for one in (*module.modules(), *module.parameters(), *module.buffers(), *_optimizers(trainer))}
    held |= {id(one) for one in (trainer, *trainer.loggers, *trainer.callbacks)}  # type: ignore[attr-defined]
    kept = ("accumulate_grad_batches", "should_stop")
    plain: dict[tuple[str, str], Any] = {("trainer", name): getattr(trainer, name) for name in kept}
    weights = [(f"weight {name}", weight) for name, weight in module.named_parameters()]
    plain |= {(place, "requires_grad"): weight.requires_grad for place, weight in weights}
    if not module.automatic_optimization:  # gradients may be accumulated by hand
        plain |= {(place, "grad"): weight.grad for place, weight in weights}
    for place, part in _parts(trainer).items():
        plain |= {(place, name): getattr(part, name) for name in getattr(part, "_non_persistent_buffers_set", ())}
        known = _OF_LIGHTNING if isinstance(part, nn.Module) else _OF_OPTIMIZER if isinstance(part, Optimizer) else ()
        for name in vars(part).keys() - known:
            value = vars(part)[name]
            value = _AS_PLAIN.get(type(value), lambda one: one)(value)
            leaves = _leaves(value)
            own = [leaf for leaf in leaves if id(leaf) not in held and not isinstance(leaf, _NO_STATE)]
            if len(own) == len(leaves) and {*map(type, own)} <= _PLAIN:
                plain[place, name] = value
            elif {*map(type, own)} - {str} and (isinstance(part, Callback) or _is_the_users(part)):
                others.add(f"{type(part).__name__}.{name}")
    return plain, others


def _leaves(value: Any) -> list[Any]:
    """Returns what containers hold, or else the value itself."""
    items = [*value, *value.values()] if type(value) is dict else value
    return [leaf for item in items for leaf in _leaves(item)] if type(items) in (list, tuple, set) else [value]


def _without_effect(hook: Callable[..., Any], trainer: Trainer) -> Callable[..., None]:
    """Returns a hook that logs nothing, and leaves weights and the values of the optimizer's groups as they are."""

    @functools.wraps(hook)
    def call(*args: Any) -> None:
        module = trainer.lightning_module
        tensors = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
        groups = [(group, dict(group)) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        silent = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)  # Lightning refuses a second call
        vars(module).update(silent)
        hook(*args)
        for name in silent:
            del vars(module)[name]
        for tensor, before in tensors:
            tensor.data.copy_(before)
        for group, values in groups:
            group.update(values)

    return call
