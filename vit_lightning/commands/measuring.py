"""Interleaved timing of alternatives: the core of ``lightning bench`` and of ``experiments/benchmarks``.

The speed of a shared machine changes within seconds. So the alternatives are called one after the other, in another
random order in each round, and only ratios of the same round are compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch


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
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    calls: int = 1,
    limit_s: float | None = None,
    least: int = 3,
    leave_out: Callable[[Rounds], Collection[str]] | None = None,
    synchronize: Callable[[], object] | None = None,
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
    steps: Mapping[str, Callable[[], object]],
    seconds: Mapping[str, list[float]],
    draw: random.Random,
    *,
    calls: int,
    wait: Callable[[], object],
) -> None:
    """Adds the seconds of one round of ``paired_rounds``."""
    for name in draw.sample(list(steps), len(steps)):
        step = steps[name]
        began = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        seconds[name].append((time.perf_counter() - began) / calls)


def median(values: Sequence[float], *, draws: int = 2000) -> Interval:
    """Returns the median of rounds, with an interval by bootstrap."""
    drawn = np.median(np.random.default_rng(0).choice(values, (draws, len(values))), axis=1)
    return Interval(float(np.median(values)), *(float(limit) for limit in np.quantile(drawn, (0.025, 0.975))))


def combined(ratios: Sequence[Interval]) -> Interval:
    """Returns the geometric mean of ratios that were measured apart; their logarithms are taken for normal."""
    logarithms = np.log(ratios)
    middle, half = logarithms[:, 0].mean(), np.hypot.reduce(logarithms[:, 2] - logarithms[:, 1]) / (2 * len(ratios))
    return Interval(*(float(np.exp(value)) for value in (middle, middle - half, middle + half)))


def matrix_product(
    rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Callable[[], object]:
    """Returns a call that multiplies two random matrices into memory that is kept: 2 * rows * inner * columns FLOP.

    Timed in the same rounds as a network it gives the rate that the machine's matrix units reach at that moment.
    """
    first = torch.randn(rows, inner, device=device, dtype=dtype)
    second = torch.randn(inner, columns, device=device, dtype=dtype)
    product = torch.empty(rows, columns, device=device, dtype=dtype)
    return lambda: torch.mm(first, second, out=product)
