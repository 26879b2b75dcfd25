"""Ablations beside the tools that one could take instead, on the same made-up results.

    python -m pip install ictonyx==0.5.0 adastop==0.1.3 confseq==0.0.11    # in an environment of its own
    python experiments/benchmarks/ablation_peers.py [--studies 1000] [--adastop 100]

Each tool follows a study by its own rules, with alpha 0.05 for all comparisons with the baseline together, and at most
40 seeds; betting, which has no last look, with at most 1,000. A tool that is not installed is named and left out.
confseq 0.0.11 is built from source (CMake, pybind11 and the headers of Boost) and was written for numpy 1.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ablation_errors import ALPHA, Scene, Values, rates_of

MAX_SEEDS, BETS = 40, 1000
FIXED = 20
"""Runs of each arm, as ictonyx has it by default."""
BATCH = 5
"""Runs of each arm between two looks of AdaStop, its default; 8 looks come to 40 runs."""
EFFECT, BASELINE = 0.01, 0.9
"""Smallest effect and accuracy of the baseline, where a tool must know the bounds of a metric."""
TRUTHS = {2: {"0": (0.0,), "1": (1.0,), "mixed": (0.5,)}, 3: {"0": (0.0,) * 2, "1": (1.0,) * 2, "mixed": (0.0, 2.0)}}
TRUTHS[5] = {"0": (0.0,) * 4, "1": (1.0,) * 4, "mixed": (-1.0, 0.0, 0.5, 2.0)}
SPREADS = {"quiet": 0.4, "noisy": 1.1}
"""Standard deviation of a run, in smallest effects."""
Claims = dict[tuple[int, int], str]
"""Better, worse or equivalent by pair of arms; those that are open are left out."""
Tool = Callable[[Values, int], tuple[Claims, int]]
"""Follows a study with results (arms, seeds), the baseline first: its claims, and its runs."""


@dataclass(frozen=True)
class Row:
    """Outcome of a tool in a scene."""

    false: float
    answered: float
    runs: float
    studies: int

    def __str__(self) -> str:
        error = math.sqrt(self.false * (1 - self.false) / self.studies)
        each = self.runs / self.answered if self.answered >= 0.005 else math.inf
        return f"{100 * self.false:7.1f} ({100 * error:.1f}){100 * self.answered:8.0f}{self.runs:9.1f}{each:9.1f}"


def load(name: str) -> Any:
    """Imports a tool; returns None, and says so, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"left out: {name.partition('.')[0]} is not installed ({error})")
        return None


def ictonyx(analysis: Any) -> Tool:
    """Compares a fixed number of runs: signed ranks of two arms; of more, Kruskal-Wallis and rank sums of all pairs."""

    def follow(results: Values, seed: int) -> tuple[Claims, int]:
        import pandas

        arms = {str(arm): pandas.Series(row[:FIXED]) for arm, row in enumerate(results)}
        if len(arms) == 2:
            tests = {(1, 0): analysis.paired_wilcoxon_test(arms["1"], arms["0"], alpha=ALPHA)}
        else:
            found = analysis.compare_multiple_models(arms, alpha=ALPHA)
            names = {f"{one}_vs_{two}": (int(two), int(one)) for one in arms for two in arms if one < two}
            tests = {names[name]: test for name, test in found.pairwise_comparisons.items()}
        means = results[:, :FIXED].mean(-1)
        claims = {
            pair: "better" if means[pair[0]] > means[pair[1]] else "worse"
            for pair, test in tests.items()
            if test.is_significant(ALPHA)
        }
        return claims, len(results) * FIXED

    return follow


def adastop(agents: Any) -> Tool:
    """Looks after every 5 runs by permutation tests; what it calls equal at the last look is no claim here."""

    def follow(results: Values, seed: int) -> tuple[Claims, int]:
        pairs = np.array([(0, arm) for arm in range(1, len(results))])
        looks = MAX_SEEDS // BATCH
        comparator = agents.MultipleAgentsComparator(
            n=BATCH, K=looks, B=2000, comparisons=pairs, alpha=ALPHA, seed=seed
        )
        runs = np.zeros(len(results), dtype=int)
        for look in range(1, looks + 1):
            needed = np.arange(len(results)) if look == 1 else np.unique(comparator.current_comparisons)
            runs[needed] = look * BATCH
            comparator.partial_compare(
                {str(arm): row[: look * BATCH] for arm, row in enumerate(results)}, verbose=False
            )
            if comparator.is_finished:
                break
        words = {"larger": "worse", "smaller": "better"}  # of the baseline, which comes first
        decisions = {
            (int(arm), 0): comparator.decisions[str(pair)] for pair, arm in zip(pairs, pairs[:, 1], strict=True)
        }
        return {pair: words[word] for pair, word in decisions.items() if word in words}, int(runs.sum())

    return follow


def betting(module: Any, low: float, high: float) -> Tool:
    """Bets on each pair of runs against a difference of 0 and of the effect either way; as many looks as one likes.

    Args:
        module: ``confseq.betting``.
        low, high: bounds of the metric that are declared before the first run.
    """

    def follow(results: Values, seed: int) -> tuple[Claims, int]:
        alpha, claims = ALPHA / (len(results) - 1), Claims()
        metric = np.clip(BASELINE + EFFECT * results, low, high)
        stops = []
        for arm in range(1, len(results)):
            unit = (metric[arm] - metric[0] + (high - low)) / (2 * (high - low))
            bounds = {
                bound: module.betting_mart(unit, 0.5 + bound * EFFECT / (2 * (high - low)), alpha=alpha) >= 1 / alpha
                for bound in (-1, 0, 1)
            }
            rejected = {bound: np.maximum.accumulate(found) for bound, found in bounds.items()}
            inside = (
                rejected[-1] & rejected[1] & (np.abs(np.cumsum(results[arm] - results[0])) < np.arange(1, BETS + 1))
            )
            ended = rejected[0] | inside
            stop = int(ended.argmax()) if ended.any() else BETS - 1
            if rejected[0][stop]:
                claims[arm, 0] = (
                    "better" if results[arm, : stop + 1].mean() > results[0, : stop + 1].mean() else "worse"
                )
            elif inside[stop]:
                claims[arm, 0] = "equivalent"
            stops.append(stop + 1)
        return claims, sum(stops) + max(stops)

    return follow


def row_of(tool: Tool, results: Values, truth: Sequence[float]) -> Row:
    """Follows studies with a tool; only comparisons with the baseline count as answered, all claims may be false."""
    level = np.array([0.0, *truth])
    false, answered, runs = [], [], []
    for number, study in enumerate(results):
        claims, count = tool(study, number)
        gaps = {pair: level[pair[0]] - level[pair[1]] for pair in claims}
        wrong = {"better": lambda gap: gap <= 0, "worse": lambda gap: gap >= 0, "equivalent": lambda gap: abs(gap) >= 1}
        false.append(any(wrong[word](gaps[pair]) for pair, word in claims.items()))
        answered.append(sum(other == 0 for _, other in claims) / len(truth))
        runs.append(count)
    return Row(float(np.mean(false)), float(np.mean(answered)), float(np.mean(runs)), len(results))


def ours(results: Values, truth: tuple[float, ...], sd: float) -> Row:
    rates = rates_of(Scene(truth=truth, sd=math.sqrt(2) * sd, max_seeds=MAX_SEEDS), results)
    return Row(rates.false, rates.answered, rates.runs, len(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--adastop", type=int, default=100, help="studies for AdaStop, which permutes in Python")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    setattr(np, "float_", np.float64)  # of numpy 1, which confseq names  # noqa: B010
    tools: dict[str, tuple[Tool, int]] = {}
    if (module := load("ictonyx.analysis")) is not None:
        tools["ictonyx"] = ictonyx(module), given.studies
    if (module := load("adastop.compare_agents")) is not None:
        tools["AdaStop"] = adastop(module), given.adastop
    if (module := load("confseq.betting")) is not None:
        tools["betting, bounds 0 to 1"] = betting(module, 0.0, 1.0), given.studies
        tools["betting, bounds +-5 effects"] = (
            betting(module, BASELINE - 5 * EFFECT, BASELINE + 5 * EFFECT),
            given.studies,
        )
    print(f"{'':<30}{'false, % (se)':>13}{'ans., %':>8}{'runs':>9}{'each':>9}")
    for (noise, sd), (arms, truths) in ((one, two) for one in SPREADS.items() for two in TRUTHS.items()):
        for name, truth in truths.items():
            draw = np.random.default_rng(arms)
            results = np.array([0.0, *truth])[:, None] + sd * draw.standard_normal((given.studies, arms, BETS))
            print(f"{arms} arms, {noise}, truth {name}")
            print(f"{'  this package':<30}{ours(results[..., :MAX_SEEDS], truth, sd)}", flush=True)
            for tool, (follow, studies) in tools.items():
                print(f"{'  ' + tool:<30}{row_of(follow, results[:studies], truth)}", flush=True)


if __name__ == "__main__":
    main()
