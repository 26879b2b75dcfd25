"""Interleaved timing of alternatives: what the scripts beside it share.

The speed of a shared machine changes within seconds. So the alternatives are called one after the other, in another
random order in each round, and only ratios of the same round are compared.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], object]


class Interval(NamedTuple):
    """Median with the limits of its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class Rounds(NamedTuple):
    """Seconds of one call of each alternative, round by round; one that was left out has the first rounds alone."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Returns the seconds of the median round."""
        return float(np.median(self.seconds[name]))

    def ratio(self, first: str, second: str) -> Interval:
        """Returns how many times as fast the first is as the second: above 1 it is the faster one."""
        return median(self.ratios(first, second))

    def ratios(self, first: str, second: str) -> list[float]:
        """Returns the ratio of each round of both: seconds of the second over those of the first."""
        pairs = zip(self.seconds[first], self.seconds[second], strict=False)
        return [theirs / own for own, theirs in pairs]

    def fastest(self, names: Sequence[str]) -> str:
        """Returns the name whose median round is the shortest."""
        return min(names, key=self.median)


def paired_rounds(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    warmup: int = 2,
    calls: int = 1,
    limit_s: float | None = None,
    least: int = 3,
    leave_out: Callable[[Rounds], Collection[str]] | None = None,
    synchronize: Step | None = None,
    seed: int = 0,
) -> Rounds:
    """Calls each of ``steps`` once in each round, in random orders that follow from ``seed``, and returns the seconds.

    Args:
        warmup: calls of each step beforehand, which are not counted.
        calls: calls of a step in a row, whose mean is its time in that round.
        limit_s: seconds after which no further round begins.
        least: rounds that are run whatever the limit.
        leave_out: returns the names of those that take no further turns; it is asked after every fifth round.
        synchronize: waits for the device, as ``torch.cuda.synchronize``; it is called before and after what is timed.
    """
    wait = synchronize or (lambda: None)
    draw = random.Random(seed)
    for step in steps.values():
        for _ in range(warmup):
            step()
    wait()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    started = time.perf_counter()
    for number in range(rounds):
        if limit_s is not None and number >= least and time.perf_counter() - started > limit_s:
            break
        if leave_out is not None and number and number % 5 == 0:
            gone = leave_out(Rounds(seconds))
            steps = {name: step for name, step in steps.items() if name not in gone}
        take_turns(steps, seconds, draw, calls=calls, wait=wait)
    return Rounds(seconds)


def take_turns(
    steps: Mapping[str, Step],
    seconds: Mapping[str, list[float]],
    draw: random.Random,
    *,
    calls: int,
    wait: Step,
) -> None:
    """Adds the seconds of one round of ``paired_rounds``."""
    for name in draw.sample(list(steps), len(steps)):
        step = steps[name]
        began = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        seconds[name].append((time.perf_counter() - began) / calls)


class BesideTrainer(Callback):
    """Callback, the first of a Trainer's, that lets alternatives take a turn each between two of the Trainer's steps.

    A step of the Trainer is all that happens from the end of these turns to the beginning of the next ones.

    Args:
        name: name of the Trainer's steps among the rounds.
        make: makes the alternatives from the Trainer and its first batch, and calls each until it is warm.
        is_done: whether the training ends, asked after each round.
    """

    def __init__(
        self, name: str, make: Callable[[Trainer, Any], Mapping[str, Step]], is_done: Callable[[Rounds], bool]
    ) -> None:
        self.name, self._make, self._is_done = name, make, is_done
        self.rounds = Rounds({})
        self.left = 0.0
        """Time at which the Trainer went on."""
        self._steps: Mapping[str, Step] = {}
        self._draw, self._batches = random.Random(0), 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        calls, wait = calls_of(trainer.strategy.root_device)
        if not self._steps:
            self._steps = self._make(trainer, batch)
            self.rounds = Rounds({name: [] for name in (self.name, *self._steps)})
        self._batches += 1
        if self._batches % calls:
            return
        trainer.strategy.checkpoint_io.finish()  # in the Trainer's time
        wait()
        if self.left:
            self.rounds.seconds[self.name].append((time.perf_counter() - self.left) / calls)
            take_turns(self._steps, self.rounds.seconds, self._draw, calls=calls, wait=wait)
        trainer.should_stop = self._is_done(self.rounds)
        self.left = time.perf_counter()


def calls_of(device: torch.device) -> tuple[int, Step]:
    """Returns how often a step is called in a turn, to fill the queue of a GPU, and what waits for the device."""
    return (10, torch.cuda.synchronize) if device.type == "cuda" else (1, int)


def training_step(
    loss: Callable[[], Tensor], optimizer: Optimizer, clip: Callable[[Optimizer], object] | None = None
) -> Callable[[], None]:
    """Returns a bare step of training: loss, gradients, which may be clipped, and weights."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        if clip is not None:
            clip(optimizer)
        optimizer.step()

    return step


def bytes_held(network: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Returns the bytes of weights and of the optimizer's state."""
    states = [] if optimizer is None else optimizer.state.values()
    held = [*network.parameters(), *(value for state in states for value in state.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in held if isinstance(tensor, Tensor))


class _Allocated(TorchDispatchMode):
    """Counter of the bytes of tensors that operations make, and of their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(_storages((args, kwargs)))  # of the weights, whose views are no new memory
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return output

    def _add(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes that a call of ``step`` adds at its peak to what is allocated before it.

    On CUDA from the allocator, elsewhere by counting the tensors that operations return (in eager mode alone, and
    without memory inside an operation).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    allocated = _Allocated()
    with allocated:
        step()
    return allocated.peak


def median(values: Sequence[float], *, draws: int = 2000) -> Interval:
    """Returns the median of rounds, with an interval by bootstrap."""
    drawn = np.median(np.random.default_rng(0).choice(values, (draws, len(values))), axis=1)
    return Interval(float(np.median(values)), *(float(limit) for limit in np.quantile(drawn, (0.025, 0.975))))


def combined(ratios: Sequence[Interval]) -> Interval:
    """Returns the geometric mean of ratios that were measured apart; their logarithms are taken for normal."""
    logarithms = np.log(ratios)
    middle, half = logarithms[:, 0].mean(), np.hypot.reduce(logarithms[:, 2] - logarithms[:, 1]) / (2 * len(ratios))
    return Interval(*(float(np.exp(value)) for value in (middle, middle - half, middle + half)))


def matrix_product(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Step:
    """Returns a call that multiplies two random matrices into memory that is kept: 2 * rows * inner * columns FLOP.

    Timed in the same rounds as a network it gives the rate that the machine's matrix units reach at that moment.
    """
    first = torch.randn(rows, inner, device=device, dtype=dtype)
    second = torch.randn(inner, columns, device=device, dtype=dtype)
    product = torch.empty(rows, columns, device=device, dtype=dtype)
    return lambda: torch.mm(first, second, out=product)
