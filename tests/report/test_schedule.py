"""Runs that the analyses of a study need: the same whatever the order in which runs end."""

import random
from pathlib import Path

import numpy as np
import pytest

from vit_lightning.report.comparisons import make_schedule, most_seeds
from vit_lightning.report.study import Compare, Run, Study

SEEDS = [*range(21)]


def study_of(runs: list[Run], how: str) -> Study:
    arms = {run.arm: {} for run in sorted(runs, key=lambda run: run.arm)} or {"a": {}, "b": {}}
    return Study(
        name="p",
        question="",
        folder=Path("nowhere"),
        config="c.yaml",
        metric="val/loss",
        goal="maximize",
        compare=Compare("test/acc", 0.02, 14, arms=how),
        baseline="a",
        arms=arms,
        seeds=SEEDS[: most_seeds(14)],
        split_varies=False,
        runs=runs,
    )


def all_runs(failed: set[tuple[str, int]]) -> dict[tuple[str, int], Run]:
    """Outcomes of all runs that may be: b is like a, c much better, d a little worse."""
    draw = np.random.default_rng(4)
    means = {"a": 0.5, "b": 0.5, "c": 0.7, "d": 0.48}
    outcomes = {}
    for seed in SEEDS:
        for arm, mean in means.items():
            results = {"test/acc": round(mean + draw.normal(0, 0.02), 3), "test_images": 1000}
            state = "failed" if (arm, seed) in failed else "done"
            outcomes[arm, seed] = Run(arm, seed, f"{arm}{seed}", state, results={} if state == "failed" else results)
    return outcomes


def carry_out(how: str, outcomes: dict[tuple[str, int], Run], order: random.Random) -> dict[str, int]:
    """Ends runs in a random order, a few at a time, until no more are needed; returns the number for each arm."""
    ended: list[Run] = [Run(arm, 0, "", "missing") for arm in "abcd"]
    while True:
        seeds = make_schedule(study_of(ended, how)).seeds
        known = {(run.arm, run.seed) for run in ended if run.state != "missing"}
        needed = [(arm, seed) for arm, count in seeds.items() for seed in SEEDS[:count] if (arm, seed) not in known]
        if not needed:
            return seeds
        ended += [outcomes[key] for key in order.sample(needed, min(len(needed), order.randint(1, 5)))]


@pytest.mark.parametrize("how", ["baseline", "pairs"])
@pytest.mark.parametrize("failed", [set(), {("b", 6), ("d", 2)}])
def test_the_order_in_which_runs_end_changes_nothing(how, failed):
    outcomes = all_runs(failed)
    needed, *others = [carry_out(how, outcomes, random.Random(number)) for number in range(3)]
    assert all(other == needed for other in others)
    assert needed["c"] == 6 + bool(failed and how != "baseline"), "it is decided at the first analysis"
    if failed:
        assert needed["d"] >= 7, "a seed more, in place of that with a failed run"
