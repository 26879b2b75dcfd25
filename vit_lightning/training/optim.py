"""Parameter groups, the optimizer, and the learning rate of each step."""

import copy
import math
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from vit_lightning.errors import UserError, problems_of, refuse, with_place
from vit_lightning.training.optimizers import FusedAdamW, Lamb, Lion, MuonWithAdamW, OwnSchedule, Schedule, lr_factor

_OPTIMIZERS = {
    "betas": ("adamw", "adam", "lamb", "lion", "muon"),
    "eps": ("adamw", "adam", "lamb", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd",),
}
"""Optimizers that take an argument, for each argument that not all of them take."""


@dataclass
class OptimizerConfig:
    """An optimizer and a learning rate schedule with warm-up.

    Args:
        name: adamw, adam, sgd, lamb, lion, or muon (Muon for the matrices of the encoder, AdamW for all other
            parameters). In its place class_path gives any torch.optim class, with its own arguments and defaults.
        lr: learning rate after the warm-up; by default 0.001, but that of the class which class_path gives.
        weight_decay: weight decay, by default 0.05, but that of the class which class_path gives. Decoupled, except for
            adam and sgd, which add it to the gradient.
        weight_decay_on: weights that decay: matrices, not norms, biases, class token and positions; or all.
        betas: decay rates of the moments; by default (0.9, 0.999), but (0.9, 0.99) for lion.
        eps: epsilon of adamw, adam, lamb and muon.
        momentum: momentum of sgd (default 0.9) and muon (default 0.95).
        nesterov: whether sgd uses Nesterov momentum.
        layer_decay: learning rate of each block relative to the next one; 1 for the same learning rate everywhere.
        schedule: cosine or linear decay from lr to min_lr; wsd (warm-up, stable, decay) keeps lr and decays linearly to
            min_lr at the end; constant keeps lr. Also a class of torch.optim.lr_scheduler, or a function of step and
            total steps after the warm-up that returns a factor of lr, with its arguments; with interval=epoch beside
            them they count epochs.
        decay_fraction: fraction of training in which wsd decays.
        warmup_epochs: epochs of linear warm-up from warmup_lr to lr; at most those of the training.
        warmup_steps: optimizer steps of warm-up, in place of warmup_epochs.
        warmup_fraction: warm-up as a fraction of training, in place of warmup_epochs.
        warmup_lr: learning rate before the first step of the warm-up.
        min_lr: learning rate at the end of training; multiplied by layer_decay like lr.
    """

    name: Literal["adamw", "adam", "sgd", "lamb", "lion", "muon"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool = False
    layer_decay: float = 1.0
    schedule: Schedule = "cosine"
    decay_fraction: float = 0.2
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    warmup_lr: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        def limits(rule: str, is_within: Callable[[float], bool], *names: str) -> list[str]:
            values = {name: getattr(self, name) for name in names}
            return problems_of(
                *((name, value, value is None or is_within(value), rule) for name, value in values.items())
            )

        rates = ("lr", "weight_decay", "eps", "warmup_epochs", "warmup_steps", "warmup_lr", "min_lr")
        problems = [
            *limits("a finite number, at least 0", lambda value: 0.0 <= value < math.inf, *rates),
            *limits("at least 0 and below 1", lambda value: 0.0 <= value < 1.0, "momentum"),
            *limits("between 0 and 1", lambda value: 0.0 <= value <= 1.0, "decay_fraction", "warmup_fraction"),
            *limits("above 0 and at most 1", lambda value: 0.0 < value <= 1.0, "layer_decay"),
        ]
        if self.betas is not None and not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(f"betas={list(self.betas)} must both be at least 0 and below 1")
        problems += self._unused_problems()
        names = ("warmup_epochs", "warmup_steps", "warmup_fraction")
        warmups = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if len(warmups) > 1:
            problems.append(f"{' and '.join(warmups)}: give one of them")
        if self.nesterov and self.momentum == 0.0:
            problems.append("nesterov=True needs a momentum above 0")
        if not problems:
            below_lr = {name: getattr(self, name) for name in ("min_lr", "warmup_lr")}
            problems += [
                f"{name}={rate} must not be above lr={self.lr}" for name, rate in below_lr.items() if rate > self.lr
            ]
        refuse(problems)

    def _unused_problems(self) -> list[str]:
        defaults = {field.name: field.default for field in fields(self)}
        warms_up = self.warmup_epochs or self.warmup_steps or self.warmup_fraction
        reasons = {
            name: f"name={self.name} (it is for {', '.join(optimizers)})"
            for name, optimizers in _OPTIMIZERS.items()
            if self.name not in optimizers
        }
        reasons |= {} if warms_up else {"warmup_lr": "warmup_epochs=0 (give a warm-up)"}
        own = getattr(self, "own_schedule", None) is not None  # which may have the name of one of ours
        if self.schedule != "wsd" or own:
            reasons["decay_fraction"] = f"schedule={self.schedule} (it is for wsd)"
        if self.schedule not in ("cosine", "linear", "wsd") or own:
            reasons["min_lr"] = f"schedule={self.schedule} (it is for cosine, linear, wsd)"
        given = {name: getattr(self, name) for name in reasons if getattr(self, name) != defaults[name]}
        return [f"{name}={value} does nothing for {reasons[name]}" for name, value in given.items()]

    def count_warmup(self, *, total_steps: int, steps_per_epoch: int) -> int:
        """Returns the optimizer steps of the warm-up."""
        steps = self.warmup_steps or (self.warmup_fraction or 0.0) * total_steps or self.warmup_epochs * steps_per_epoch
        return min(round(steps), total_steps)


@dataclass
class OwnOptimizerConfig(OptimizerConfig):
    """An optimizer or a schedule of the user's, or both, whose class paths are ``name`` and ``schedule``.

    Args:
        make: returns the optimizer of parameter groups, which have ``lr``, ``weight_decay`` and ``lr_scale``; None for
            the one of ``name``.
        own_arguments: its arguments.
        own_schedule: the factors of lr after the warm-up; None for those of ``schedule``.
    """

    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    own_arguments: tuple[str, ...] = ()
    own_schedule: OwnSchedule | None = None

    def problems(self, groups: list[dict[str, Any]]) -> list[str]:
        """Returns the reasons for which these groups cannot be trained, found on a few weights."""
        if self.make is not None and (problem := self._optimizer_problem(groups)):
            return [f"class_path={self.name}: {problem}"]
        few = [{**groups[0], "params": [nn.Parameter(torch.ones(2, 2))]}]
        try:
            _own_factors(self, _make_optimizer(nn.Identity(), self, few).defaults, 4, 1)
        except UserError as error:
            return [f"schedule={self.schedule}: {problem}" for problem in error.problems]
        return []

    def _optimizer_problem(self, groups: list[dict[str, Any]]) -> str:
        assert self.make is not None
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2)
        try:
            optimizer: object = self.make([{**group, "params": _stand_ins(group["params"])} for group in groups])
            if not isinstance(optimizer, torch.optim.Optimizer):
                return f"it gives {type(optimizer).__name__} where a torch.optim.Optimizer is expected"
            one = self.make([{**groups[0], "params": [weight]}])
            set_mode([one], "train")
            # as Lightning calls it
            one.step(closure=lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
        except Exception as fault:  # whatever the class raises
            return with_place(fault)
        if self.weight_decay and "weight_decay" not in {*optimizer.defaults, *self.own_arguments}:
            return f"{type(optimizer).__name__} has no weight decay (give optimizer.weight_decay=0)"
        return ""


def _stand_ins(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Returns parameters of the same shapes that take no memory."""
    return [nn.Parameter(torch.zeros(()).expand(weight.shape)) for weight in weights]


def parameter_groups(
    network: nn.Module,
    weight_decay: float,
    *,
    all_decay: bool = False,
    layer_decay: float = 1.0,
    muon: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Returns parameter groups, none of them empty; each trainable parameter is in exactly one.

    Parameters with the same weight decay and learning rate share a group, which has ``weight_decay`` and ``lr_scale``,
    its learning rate relative to the head's. Groups of ``muon`` come first, then those near the head.

    A network may list its parameters without weight decay (``no_decay() -> set[str]``, as ViT does). In any other
    network these are vectors (dimensions of length 1 not counted) and parameters whose names do not end in "weight":
    tokens, positions, tables.

    Args:
        network: the network.
        weight_decay: weight decay of the parameters that have any.
        all_decay: whether these are all parameters.
        layer_decay: learning rate of each block relative to the next one (Bao et al. 2022, BEiT, appendix).
        muon: names of the matrices for Muon, whose groups have ``muon`` set to true.

    Raises:
        UserError: all parameters are frozen, or ``layer_decay`` needs a method that the network lacks.
    """
    trainable = {_uncompiled(name): weight for name, weight in network.named_parameters() if weight.requires_grad}
    if not trainable:
        raise UserError("the network has no parameter to train: all are frozen")
    no_decay = getattr(network, "no_decay", None)
    without = (
        set(map(_uncompiled, no_decay()))
        if callable(no_decay)
        else {name for name, weight in trainable.items() if _is_vector(name, weight)}
    )
    scales = _lr_scales(network, layer_decay, trainable)
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, weight in trainable.items():
        groups.setdefault((name in muon, scales.get(name, 1.0), all_decay or name not in without), []).append(weight)
    return [
        {"params": weights, "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        | ({"muon": True} if is_matrix else {})
        for (is_matrix, scale, decays), weights in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def _uncompiled(name: str) -> str:
    """Returns the name of a parameter without the prefix of ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def _is_vector(name: str, weight: nn.Parameter) -> bool:
    return sum(length > 1 for length in weight.shape) < 2 or not name.endswith("weight")


def _lr_scales(network: nn.Module, layer_decay: float, trainable: Collection[str]) -> dict[str, float]:
    """Returns ``layer_decay`` to the power of the number of layers between each parameter and the head.

    Raises:
        UserError: the network does not say how deep its parameters lie, or all that are trained lie in one layer.
    """
    if layer_decay == 1.0:
        return {}
    layer_index = getattr(network, "layer_index", None)
    if not callable(layer_index):
        text = f"{type(network).__name__} does not say how deep a parameter lies (a method layer_index(name) -> int)"
        raise UserError(f"layer_decay={layer_decay} needs a ViT: {text}")
    indices = {name: layer_index(name) for name in (_uncompiled(name) for name, _ in network.named_parameters())}
    if len(indices) > len(trainable) and len({indices[name] for name in trainable}) == 1:
        hint = "give --optimizer.layer_decay=1; --config linear_probe has a recipe for a frozen backbone"
        text = "all parameters but those of one layer are frozen"
        raise UserError(f"layer_decay={layer_decay} does nothing: {text} ({hint})")
    return {name: layer_decay ** (max(indices.values()) - index) for name, index in indices.items()}


def muon_matrices(network: nn.Module) -> set[str]:
    """Returns the names of the matrices that Muon trains.

    In a ViT these are the matrices of the encoder; in another network all matrices with weight decay, except that of
    the last linear layer.

    Raises:
        UserError: there are none, or all are frozen.
    """
    weights = {_uncompiled(name): weight for name, weight in network.named_parameters()}
    matrices = {name for name, weight in weights.items() if weight.ndim == 2}
    if callable(no_decay := getattr(network, "no_decay", None)) and hasattr(network, "encoder"):
        matrices = {name for name in matrices if name.startswith("encoder.")} - set(map(_uncompiled, no_decay()))
    else:
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        matrices = {name for name in matrices if not _is_vector(name, weights[name])}
        matrices -= {_uncompiled(f"{name}.weight") for name in linear[-1:]}
    trained = {name for name in matrices if weights[name].requires_grad}
    if not trained:
        which = "trained matrices" if matrices else "matrices"
        raise UserError(f"name=muon: {type(network).__name__} has no {which} before its classifier (choose adamw)")
    return trained


def optimizer_and_schedule(
    network: nn.Module, config: OptimizerConfig, *, total_steps: int, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Returns the optimizer over ``parameter_groups`` and its schedule, to be stepped after every optimizer step."""
    optimizer = _make_optimizer(network, config, _groups(network, config))
    lr = config.lr or 1.0  # with lr=0, min_lr and warmup_lr are 0 as well
    warmup_steps = config.count_warmup(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    own, length = _own_factors(config, optimizer.defaults, total_steps - warmup_steps, steps_per_epoch)

    def factor(step: int) -> float:  # no partial: LambdaLR would put it into checkpoints
        if own and step >= warmup_steps:
            found, changed = own[min((step - warmup_steps) // length, len(own) - 1)]
            for group in optimizer.param_groups:
                group.update(changed)
            return float(found)
        return lr_factor(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            schedule=config.schedule,
            min_factor=config.min_lr / lr,
            warmup_factor=config.warmup_lr / lr,
            decay_steps=round(config.decay_fraction * total_steps),
        )

    return optimizer, LambdaLR(optimizer, factor)


def _own_factors(config: OptimizerConfig, group: dict[str, Any], steps: int, per_epoch: int) -> tuple[list[Any], int]:
    """Returns the factors of lr of a schedule of the user's, none without one, and the steps that each is for."""
    if not isinstance(config, OwnOptimizerConfig) or config.own_schedule is None:
        return [], 1
    length = per_epoch if config.own_schedule.interval == "epoch" else 1
    return config.own_schedule.factors({**group, "lr": config.lr or 1.0}, max(1, math.ceil(steps / length))), length


def set_mode(optimizers: Sequence[torch.optim.Optimizer], mode: Literal["train", "eval"]) -> None:
    """Lets optimizers that have weights for training and others for evaluation, as ScheduleFree's, put them in."""
    for optimizer in optimizers:
        getattr(optimizer, mode, lambda: None)()


class ConfiguredGroups(Callback):
    """Callback that gives a resumed run what its config has changed in parameter groups and schedules, and no more.

    It tells optimizers whether they train or evaluate, too.
    """

    def __init__(self) -> None:
        self._configured: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"configured": self._configured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["configured"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._configured = copy.deepcopy({place: state for place, (state, _) in _values(trainer).items()})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        set_mode(trainer.optimizers, "train")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        set_mode(trainer.optimizers, "eval")

    on_train_end = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for place, (state, values) in _values(trainer).items():
            before, own = self._before.get(place, {}), self._configured.get(place, {})
            both = own.keys() & before.keys()
            changed = {name: own[name] for name in both if _in_bytes(own[name]) != _in_bytes(before[name])}
            base = "initial_lr" if "initial_lr" in both else "lr"
            if base not in changed:
                changed.pop("lr", None)  # of a schedule's first step
            elif before[base]:
                changed["lr"] = own[base] * (state["lr"] / before[base])  # a schedule has come further
            values.update(changed)
        for schedule in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(schedule, LambdaLR):  # of which the function may have changed
                factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
                rates = [lr * factor for lr, factor in zip(schedule.base_lrs, factors, strict=True)]
                if rates != schedule.get_last_lr():  # else what another callback has made of them stays
                    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate


def _in_bytes(value: Any) -> bytes:
    """Returns plain data as bytes, equal for equal data; those of tensors themselves are not."""
    return pickle.dumps(apply_to_collection(value, Tensor, Tensor.tolist))


def _values(trainer: Trainer) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each parameter group and schedule, by place: what of it is plain data, and where that is kept."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    schedules += [inner for schedule in schedules for inner in getattr(schedule, "_schedulers", ())]
    found = {f"schedule {k}": (one.state_dict(), vars(one)) for k, one in enumerate(schedules)}
    for k, optimizer in enumerate(trainer.optimizers):
        found |= {f"group {k}.{j}": (group, group) for j, group in enumerate(optimizer.param_groups)}
    parts = ("params", "_schedulers", "lr_lambdas", "_last_lr")
    return {
        place: ({name: value for name, value in state.items() if name not in parts}, values)
        for place, (state, values) in found.items()
    }


def group_problems(network: nn.Module, config: OptimizerConfig) -> list[str]:
    """Returns the reasons for which the optimizer cannot train a network."""
    try:
        groups = _groups(network, config)
    except UserError as error:
        return error.problems
    return config.problems(groups) if isinstance(config, OwnOptimizerConfig) else []


def _groups(network: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    matrices = muon_matrices(network) if config.name == "muon" else ()
    all_decay = config.weight_decay_on == "all"
    groups = parameter_groups(
        network, config.weight_decay, all_decay=all_decay, layer_decay=config.layer_decay, muon=matrices
    )
    # a schedule multiplies the learning rate of each group
    return [{**group, "lr": config.lr * group["lr_scale"]} for group in groups]


def _make_optimizer(network: nn.Module, config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # torch's fused optimizers take floating-point weights on CPU and CUDA only; all together if these are alike
    kinds = {(weight.dtype, weight.device) for weight in network.parameters()}
    fused = len(kinds) < 2 and all(dtype.is_floating_point and place.type in ("cpu", "cuda") for dtype, place in kinds)
    usual = {"muon": 0.95, "sgd": 0.9}
    lr, betas, momentum = config.lr, config.betas or (0.9, 0.999), config.momentum
    momentum = usual.get(config.name, 0.0) if momentum is None else momentum
    adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": config.eps}
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: FusedAdamW(groups, **adam) if fused else torch.optim.AdamW(groups, **adam),
        "adam": lambda: torch.optim.Adam(groups, **adam, fused=fused),
        "sgd": lambda: torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=config.nesterov, fused=fused),
        "lamb": lambda: Lamb(groups, adam),
        "lion": lambda: Lion(groups, {"lr": lr, "betas": config.betas or (0.9, 0.99)}),
        "muon": lambda: MuonWithAdamW(groups, **adam, momentum=momentum, fused=fused),
    }
    own = config.make if isinstance(config, OwnOptimizerConfig) else None
    optimizer = makers[config.name]() if own is None else own(groups)
    # Lightning refuses to clip gradients of an optimizer that unscales them itself, as the fused ones do, even in
    # bfloat16 where nothing is scaled; with this attribute a scaler unscales first, so that clipping is right
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer
