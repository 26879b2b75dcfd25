"""Random studies: whether each has a report, and whether no verdict speaks against its numbers.

    python experiments/benchmarks/ablation_random.py [--studies 5000] [--random 0]

Arms, grids, sizes and pairs; counts of few images and real numbers; further metrics, failures, missing runs, raised
maxima. What is wrong is printed with its number; every hundredth study has its whole report made, with figures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vit_lightning.report.analysis import Analysis, analyse
from vit_lightning.report.comparisons import ArmComparison, make_schedule
from vit_lightning.report.page import verdicts
from vit_lightning.report.report import make_report
from vit_lightning.report.study import SIZES, Compare, Run, Study, arm_name
from vit_lightning.report.tables import difference_table, verdict_table
from vit_lightning.report.wording import caveats, headline, kind_of, lines, notes, recommendation, sentence

METRICS = ("test/acc", "test/loss", "test/ece", "test/shifted/acc")


def random_study(draw: np.random.Generator, folder: Path) -> Study:
    """Returns a study of any kind, with any results."""
    factors: dict[str, list[Any]] = {}
    arms, how = [f"arm {number}" for number in range(draw.integers(2, 6))], draw.choice(["baseline", "pairs"])
    if draw.random() < 0.3:
        key, counts = str(draw.choice([SIZES, "depth"])), draw.integers(2, 4, 2)
        factors = {"arms": [f"a{n}" for n in range(counts[0])], key: [f"b{n}" for n in range(counts[1])]}
        arms, how = [arm_name(*both) for both in itertools.product(*factors.values())], "baseline"
    most = int(draw.choice([6, 7, 8, 12, 20, 40]))
    extended = (int(draw.integers(6, most)),) if most > 7 and draw.random() < 0.3 else ()
    effects = {str(name): float(draw.choice([0.002, 0.01, 0.05])) for name in draw.permutation(METRICS)}
    first, *others = [*effects][: draw.integers(1, 4) if how == "baseline" else 1]
    rules = Compare(
        metric=first,
        smallest_effect=effects[first],
        max_seeds=most,
        alpha=float(draw.choice([0.05, 0.01, 0.2])),
        arms=str(how),  # type: ignore[arg-type]
        until=str(draw.choice(["equivalent", "not better"])) if how == "baseline" else "equivalent",  # type: ignore[arg-type]
        then={name: effects[name] for name in others},
        extended=extended,
    )
    seeds, images = most + most // 2, int(draw.choice([10, 91, 360, 10_000]))
    failing, noise = draw.choice([0, 0, 0.05, 0.3]), effects[first] * draw.choice([0, 0.1, 0.5, 2])
    common, runs = draw.normal(0.8, noise, seeds), []
    for arm in arms:
        gain = draw.choice([-2, -1, 0, 0.5, 1, 2]) * effects[first]
        values = np.clip(common + gain + noise * draw.standard_normal(seeds), 0, 1)
        for seed in range(int(draw.integers(0, seeds + 1)) if draw.random() < 0.2 else seeds):
            results: dict[str, Any] = {name: float(values[seed] * draw.choice([1, 1, 1.01])) for name in METRICS}
            for name, count in ("test/acc", "test_images"), ("test/shifted/acc", "test/shifted/images"):
                results |= {name: round(float(values[seed]) * images) / images, count: images}
            state = "failed" if draw.random() < failing else "done"
            runs.append(Run(arm, seed, f"{arm}-{seed}", state, "error", results if state == "done" else {}))  # type: ignore[arg-type]
    made = Study(
        **{"name": "random", "question": "", "folder": folder, "config": "c.yaml", "metric": "val/acc"},  # type: ignore[arg-type]
        goal="minimize" if first in ("test/loss", "test/ece") else "maximize",
        compare=rules,
        baseline=arms[0],
        arms={arm: {"model.depth": number} for number, arm in enumerate(arms)},
        seeds=[*range(seeds)],
        split_varies=False,
        runs=runs,
        factors=factors,
    )
    known = {(run.arm, run.seed) for run in runs}
    needed = [(arm, seed) for arm, count in make_schedule(made).seeds.items() for seed in range(count)]
    missing = [Run(*one, folder="x", state="missing") for one in needed if one not in known]
    return replace(made, runs=[run for run in runs if (run.arm, run.seed) in needed] + missing)


def wrong_with(one: ArmComparison) -> list[str]:
    """Returns what speaks against a verdict."""
    effect, kind = one.design.smallest_effect, kind_of(one)
    sign = 1 if one.study.goal == "maximize" else -1
    low, high = sorted((sign * one.low, sign * one.high))
    if math.isnan(low):
        return ["clearly without a range"] * kind.startswith("clearly")
    found = {
        "the difference is outside its range": not low <= sign * one.mean <= high,
        "better or worse": (low > 0, high < 0) != ("better" in one.claims, "worse" in one.claims),
        "not better or not worse": (high < effect, low > -effect)
        != ("not better" in one.claims, "not worse" in one.claims),
        "clearly": (low >= effect, high <= -effect) != (kind == "clearly better", kind == "clearly worse"),
    }
    return [text for text, is_wrong in found.items() if is_wrong]


def words_of(analysis: Analysis) -> str:
    """Returns all sentences of a report."""
    return "\n".join(
        [headline(analysis), recommendation(analysis), *caveats(analysis, {}), *notes(analysis)]
        + [sentence(one, line) for one in analysis.by_metric() for line in lines(one)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=5000)
    parser.add_argument("--random", type=int, default=0)
    given = parser.parse_args()
    wrong, kinds, folder = 0, Counter[str](), Path(tempfile.mkdtemp())
    for number in range(given.studies):
        found: list[str] = []
        try:
            study = random_study(np.random.default_rng((given.random, number)), folder)
            analysis = analyse(study)
            for by in analysis.by_metric():
                found += [f"{one.arm}, {one.metric}: {text}" for one in by.comparisons for text in wrong_with(one)]
                kinds.update(kind_of(one) for one in by.comparisons)
                verdict_table(by), difference_table(by)
            words = words_of(analysis)
            means = {name: arm.mean for name, arm in analysis.arms.items()}
            for one in analysis.between_arms:
                opposite = one.n > 0 and one.mean * (means[one.arm] - means[one.other]) < 0
                found += ["signs differ without a reason"] * (opposite and "signs differ" not in words)
            verdicts(analysis)
            if number % 100 == 0:
                make_report(study)
        except Exception:
            found.append(traceback.format_exc())
        wrong += bool(found)
        for text in found:
            print(f"study {number}: {text}", flush=True)
        if (done := number + 1) % 500 == 0 or done == given.studies:
            print(f"{done} studies, {wrong} with something wrong; {dict(kinds.most_common())}", flush=True)


if __name__ == "__main__":
    main()
