"""Ranges beside the verdicts of an ablation: how often all of a study hold, and what two-sided intervals would show.

    python experiments/benchmarks/ablation_ranges.py [STUDIES]

Simulated studies with normal results and at most 40 seeds; a run's standard deviation and the true difference of all
arms to the baseline are in smallest effects. A two-sided interval contradicts an equivalent verdict where it reaches
beyond the smallest effect; a range ends before it (``ArmComparison.low`` and ``high``). Intervals are what those of all
analyses share, or the latest one where the mean has left that (``ArmComparison.interval``).
"""

from __future__ import annotations

import sys

import numpy as np

from vit_lightning.report.sequential import Design, at, follow


def rates(arms: int, sd: float, truth: float, studies: int) -> tuple[float, float, float, float]:
    """Returns fractions of studies in which all ranges hold, all two-sided intervals, and any verdict is false, and the
    fraction of equivalent verdicts that their two-sided interval contradicts."""
    design = Design(1.0, 0.05, arms, 40)
    runs = sd * np.random.default_rng(7).standard_normal((studies, arms + 1, 40))
    course = follow(truth + runs[:, 1:] - runs[:, :1], design)
    low, high, floor, ceiling = (at(getattr(course, name), course.stop) for name in ("low", "high", "floor", "ceiling"))
    latest, mean = (low, high), at(course.mean, course.stop)
    low, high = (
        at(np.maximum.accumulate(course.low, -1), course.stop),
        at(np.minimum.accumulate(course.high, -1), course.stop),
    )
    left = (mean < low) | (mean > high)
    low, high = (np.where(left, one, shared) for one, shared in zip(latest, (low, high), strict=True))
    better, worse, not_better, not_worse = (at(made, course.stop) for made in course.claims.values())
    top = np.where(not_better & (high >= 1), np.clip(ceiling, 0, 1), high)
    bottom = np.where(not_worse & (low <= -1), np.clip(floor, -1, 0), low)
    enough = better & (low >= 1)  # the report says "by 1 or more"
    false = [better & (truth <= 0), worse & (truth >= 0), not_better & (truth >= 1), enough & (truth < 1)]
    equivalent = not_better & not_worse & ~better & ~worse
    crossed = equivalent & ((high >= 1) | (low <= -1))
    return (
        float(((bottom <= truth) & (truth <= top)).all(-1).mean()),
        float(((low <= truth) & (truth <= high)).all(-1).mean()),
        float(np.any(false, axis=(0, 2)).mean()),
        float(crossed.sum() / max(1, equivalent.sum())),
    )


def main(studies: int) -> None:
    print("| arms | sd of a run | truth | all ranges hold, % | all intervals, % | any verdict false, % | crossed, % |")
    print("|---|---|---|---|---|---|---|")
    for arms in (1, 2, 4):
        for sd in (0.4, 0.55, 1.1):
            for truth in (0.0, 0.5, 1.0):
                found = " | ".join(f"{100 * rate:.1f}" for rate in rates(arms, sd, truth, studies))
                print(f"| {arms} | {sd:g} | {truth:g} | {found} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
