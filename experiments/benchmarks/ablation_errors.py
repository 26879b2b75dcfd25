"""How often an ablation is wrong, how often it sees what is there: simulated ablations through the real procedure.

    python experiments/benchmarks/ablation_errors.py [--ablations 2000]

Each ablation has 8 seeds, arms that share half of their luck with the seed, and a second look at 8 more seeds wherever
an arm is undecided at the first. Errors count at either look; intervals are those of the last look.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit_lightning.report.statistics import (
    POWER,
    Rules,
    difference_power,
    equivalence_power,
    judge,
    pocock,
)

EFFECT, SD, SHARED = 0.005, 0.004, 0.5
"""Smallest effect, spread of the runs of an arm, and the correlation of arms over seeds."""


@dataclass(frozen=True)
class Rates:
    """Of simulated ablations."""

    false_difference: float
    """Some arm said to be better or worse that is not, at either look."""
    false_equivalence: float
    """Some arm said to be equivalent that differs by the smallest effect or more, at either look."""
    coverage: float
    """Arms whose interval for reading, as the last look shows it, holds the truth."""
    claims: list[float]
    """How often each arm is said to be better or worse, at either look."""
    second_looks: float


def simulate(
    truth: Sequence[float],
    ablations: int,
    *,
    images: int | None = None,
    sd: float = SD,
    alpha: float = 0.05,
    random: int = 0,
) -> Rates:
    """Ablations of arms with true differences to the baseline.

    Args:
        truth: true difference of each arm.
        ablations: how many.
        images: of a test set on which right answers are counted, so that results are coarse; None for normal numbers.
        sd: spread of the runs of an arm.
        alpha: of the study.
        random: of the random numbers.
    """
    draw, first, added = np.random.default_rng(random), 8, 8
    counts = {"difference": 0, "equivalence": 0, "covered": 0, "second": 0}
    claims = np.zeros(len(truth))
    for _ in range(ablations):
        values = _values(draw, truth, first + added, images, sd)
        looks = [judge(list(values[:, :first]), Rules(alpha, EFFECT, first=first))]
        if any(claim.verdict == "undecided" for claim in looks[0]):
            looks.append(judge(list(values), Rules(alpha, EFFECT, first=first, added=added)))
        said = [(claim.verdict, true) for look in looks for claim, true in zip(look, truth, strict=True)]
        counts["difference"] += any((v == "better" and t <= 0) or (v == "worse" and t >= 0) for v, t in said)
        counts["equivalence"] += any(v == "equivalent" and abs(t) >= EFFECT for v, t in said)
        counts["covered"] += sum(claim.low <= true <= claim.high for claim, true in zip(looks[-1], truth, strict=True))
        counts["second"] += len(looks) - 1
        claims += [any(look[n].verdict in ("better", "worse") for look in looks) for n in range(len(truth))]
    return Rates(
        counts["difference"] / ablations,
        counts["equivalence"] / ablations,
        counts["covered"] / ablations / len(truth),
        (claims / ablations).tolist(),
        counts["second"] / ablations,
    )


def _values(draw: np.random.Generator, truth: Sequence[float], seeds: int, images: int | None, sd: float) -> np.ndarray:
    """Differences to the baseline: (arms, seeds)."""
    shared = draw.standard_normal((1, seeds)) * np.sqrt(SHARED)
    luck = sd * (shared + draw.standard_normal((len(truth) + 1, seeds)) * np.sqrt(1 - SHARED))
    results = 0.97 + np.array([0.0, *truth])[:, None] + luck
    if images is not None:
        results = draw.binomial(images, np.clip(results, 0, 1)) / images
    return results[1:] - results[:1]


def power(ablations: int, random: int = 0) -> dict[str, tuple[int, float, float]]:
    """Pairs that are said to be enough, their stated power, and how often one look at so many makes the claim."""
    draw, level, sd = np.random.default_rng(random), pocock(0.05), SD * np.sqrt(2 * (1 - SHARED))
    found = {}
    for name, true, verdict, stated in (
        ("difference", EFFECT, "better", difference_power),
        ("equivalence", 0.0, "equivalent", equivalence_power),
    ):
        n = next(n for n in itertools.count(2) if stated(n, EFFECT, sd, level) >= POWER)
        rules = Rules(0.05, EFFECT, first=n)
        hits = [judge([true + sd * draw.standard_normal(n)], rules)[0].verdict == verdict for _ in range(ablations)]
        found[name] = (n, stated(n, EFFECT, sd, level), float(np.mean(hits)))
    return found


SCENES: dict[str, tuple[list[float], int | None, float]] = {
    "no arm differs": ([0.0, 0.0, 0.0], None, SD),
    "one arm, no difference": ([0.0], None, SD),
    "one arm, noisy": ([0.0], None, 4 * SD),
    "no arm differs, noisy": ([0.0, 0.0, 0.0], None, 4 * SD),
    "better, worse, none": ([EFFECT, -EFFECT, 0.0], None, SD),
    "small and large": ([EFFECT / 2, 3 * EFFECT], None, SD),
    "counts of 360 images": ([0.0, 0.0, EFFECT], 360, SD),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablations", type=int, default=2000)
    ablations = parser.parse_args().ablations
    print(f"{'':<24}{'false diff.':>12}{'false equiv.':>13}{'coverage':>10}{'2nd looks':>10}  claims by arm")
    for name, (truth, images, sd) in SCENES.items():
        rates = simulate(truth, ablations, images=images, sd=sd)
        shown = ", ".join(f"{rate:.3f}" for rate in rates.claims)
        print(
            f"{name:<24}{rates.false_difference:12.4f}{rates.false_equivalence:13.4f}{rates.coverage:10.4f}"
            f"{rates.second_looks:10.3f}  {shown}"
        )
    for name, (pairs, stated, seen) in power(ablations).items():
        print(f"power, {name}: {pairs} pairs, stated {stated:.3f}, seen {seen:.3f}")


if __name__ == "__main__":
    main()
