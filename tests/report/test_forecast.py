"""The forecast of an ablation: its runs, what it can show, and how far two runs differ."""

from __future__ import annotations

import dataclasses
import itertools
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from tests.fake_study import make_study
from vit_lightning.report.comparisons import compare, make_schedule
from vit_lightning.report.forecast import (
    Spread,
    assumed_spread,
    expect,
    forecast_sentences,
    measured_spread,
    tuning_luck,
    visible,
)
from vit_lightning.report.study import Compare, Run, Study, Tuning

STUDIES = 100


def make_plain(rules: Compare, arms: str) -> Study:
    """Makes a study without runs."""
    return Study(
        **{"name": "p", "question": "", "folder": Path("nowhere"), "config": "c.yaml", "metric": "val/loss"},
        **{"goal": "maximize", "compare": rules, "baseline": "a", "arms": {arm: {} for arm in arms}},
        **{"seeds": list(range(rules.max_seeds)), "split_varies": False, "runs": []},
    )


def needed_runs(rules: Compare, sd: float, truth: float, draw: np.random.Generator) -> tuple[int, float]:
    """Ends the runs of a study, analysis after analysis, until no more are needed; runs and share answered."""
    arms, study = ["a", "b", "c"], make_plain(rules, "abc")
    means = {"a": 0.0, "b": truth if rules.arms == "baseline" else 0.0, "c": truth}
    results = {arm: means[arm] + draw.normal(0, sd / np.sqrt(2), rules.max_seeds) for arm in arms}
    runs: list[Run] = []
    while True:
        study = dataclasses.replace(study, runs=runs)
        seeds = make_schedule(study).seeds
        if sum(seeds.values()) == len(runs):
            found = compare(study)
            return len(runs), np.mean([one.course.decided[one.analysis] for one in found])
        runs = [
            Run(arm, seed, "", "done", results={"test/own": results[arm][seed]})
            for arm, count in seeds.items()
            for seed in range(count)
        ]


@pytest.mark.parametrize(
    ("how", "truth", "until"),
    [("baseline", 1.0, "equivalent"), ("pairs", 1.0, "equivalent")],
)
def test_the_expected_runs_are_those_of_studies_with_other_numbers(how, truth, until):
    rules = Compare("test/own", 1.0, 14, arms=how, until=until)
    draw = np.random.default_rng(7)
    found = np.array([needed_runs(rules, 0.9, truth, draw) for _ in range(STUDIES)])
    runs, answered = found.mean(0)
    error = found.std(0, ddof=1) / np.sqrt(STUDIES)
    expected = expect(rules, 3, 0.9, truth)
    assert 18 < runs < 40, "some are decided before the last analysis"
    assert abs(expected.runs - runs) < 3 * error[0]
    assert abs(expected.answered - answered) < 3 * error[1]
    assert expect(rules, 3, 0.9, 3.0).runs < expected.runs


def test_the_visible_difference_shrinks_with_seeds_and_grows_with_noise():
    seen = [visible(Compare("score", 1.0, most), 2, Spread(1.0)) for most in (8, 16, 32)]
    assert all(one > other for one, other in pairwise(seen))
    assert visible(Compare("score", 3.0, 32), 2, Spread(3.0)) == pytest.approx(3 * seen[2], rel=0.01)


def test_a_study_that_cannot_show_its_effect_says_so():
    rules = Compare("test/acc", 0.005, 60)
    spread = assumed_spread(rules, 360)
    assert spread.sd == pytest.approx(np.sqrt(0.05 / 360))
    assert expect(rules, 2, spread.sd, 0.005).better < 0.8
    text = "\n".join(forecast_sentences(make_plain(rules, "ab"), spread, 6.0))
    assert "two runs disagree on 5 % of 360 test images (compare.disagreement)" in text
    short = re.search(
        r"360 test images at 5 % disagreement can show differences of ([\d.]+) points with 60 seeds, not of 0.5 points"
        ": raise compare.max_seeds, or plan with a larger compare.smallest_effect or more test images",
        text,
    )
    assert expect(rules, 2, spread.sd, float(short[1]) / 100).better == pytest.approx(0.8, abs=0.02)
    few = min(expect(rules, 2, spread.sd, truth).runs for truth in (0.0, 0.005))
    assert f"at most 120: {few / 10:.0f} min" in text
    many = assumed_spread(rules, 10_000)
    assert expect(rules, 2, many.sd, 0.005).better > 0.8
    assert "raise" not in "\n".join(forecast_sentences(make_plain(rules, "ab"), many))
    assert visible(rules, 2, Spread(many.sd)) == visible(rules, 2, many)
    single = visible(Compare("score", 1.0, 6), 2, Spread(1.0))
    power = 1 - special.nctdtr(5, single * np.sqrt(6), special.stdtrit(5, 1 - 0.025 * 0.8 / 1.1001288))
    assert power == pytest.approx(0.8, abs=0.03), "with one analysis it is that of a t-test"
    assert assumed_spread(rules, None) is None
    assert assumed_spread(Compare("test/loss", 0.005, 60), 400) is None


def test_one_pair_tells_the_disagreement_and_three_the_spread_of_other_metrics(tmp_path):
    one = make_study(tmp_path / "one", seeds=1, max_seeds=8, missing=[("mean without class token", 0)])
    found = measured_spread(one)
    correct = []
    for run in one.done:
        with np.load(one.folder / run.folder / "test_predictions.npz") as file:
            correct.append(file["label"] == file["prediction"])
    share = np.mean(correct[0] != correct[1]) - (np.mean(correct[0]) - np.mean(correct[1])) ** 2
    assert (found.pairs, found.images, found.disagreement) == (1, 360, pytest.approx(share))
    assert found.sd == pytest.approx(np.sqrt(share / 360))
    assert "two runs differ by at least " in forecast_sentences(one, found)[0], "seeds may add to that"
    easy = dataclasses.replace(one, compare=dataclasses.replace(one.compare, smallest_effect=0.2))
    said = forecast_sentences(easy, found)
    assert said[1].startswith("if by no more, which 6 pairs will tell: 8 seeds show ")
    assert said[1].endswith(" points with over 99 %")
    assert share == pytest.approx(np.var(correct[0] * 1.0 - correct[1]))
    for run in one.done[:1]:
        (one.folder / run.folder / "test_predictions.npz").write_bytes(b"PK no zip")
    assert measured_spread(one) is None, "a damaged file is one that tells nothing"
    study = make_study(tmp_path / "more", seeds=4, max_seeds=8, missing=[("mean without class token", 3)])
    several = measured_spread(study)
    assert (several.pairs, several.freedom) == (7, 5)
    assert "allowing for how little 4 pairs tell of that: " in forecast_sentences(study, several)[1]
    assert forecast_sentences(study, several)[0].endswith(" (measured on 7 pairs of runs)")
    other = dataclasses.replace(study, compare=Compare("test/loss", 0.005, 8))
    gaps = np.array([[run.results["test/loss"] for run in study.done if run.arm == arm] for arm in ("cls", "mean")])
    third = [run.results["test/loss"] for run in study.done if run.arm == "mean without class token"]
    squares = [np.var(gaps[1] - gaps[0], ddof=1) * 3, np.var(np.array(third) - gaps[0][:3], ddof=1) * 2]
    assert measured_spread(other).sd == pytest.approx(np.sqrt(sum(squares) / 5))
    assert measured_spread(dataclasses.replace(one, compare=other.compare)) is None


def test_power_allows_for_a_spread_of_few_pairs():
    rules, deviations = Compare("score", 1.0, 6), 0.6 * np.sqrt(3 / np.random.default_rng(2).chisquare(3, 4000))
    power = 1 - special.nctdtr(5, 1.0 * np.sqrt(6) / deviations, special.stdtrit(5, 1 - 0.025 * 0.8 / 1.1001288))
    known, rough = (expect(rules, 2, 0.6, 1.0, freedom).better for freedom in (0, 3))
    assert rough == pytest.approx(power.mean(), abs=0.04)
    assert rough < known - 0.05


def test_the_luck_of_tuning_follows_the_direction_of_a_metric_of_the_user(tmp_path):
    """Of three values one stands apart from two that are alike: by the right direction it is the best."""
    study = make_study(tmp_path, seeds=1, max_seeds=20)
    options = {"optimizer.lr": [1, 2, 3]}

    def different(sign: int, mode: str) -> float:
        draw, trials = np.random.default_rng(0), []
        for arm, lr, seed in itertools.product(study.arms, options["optimizer.lr"], (100, 101)):
            value = (lr == 1) + draw.normal(0, 0.02)
            results = {"val/own": sign * value, "val/acc": value}
            trials.append(Run(arm, seed, "", "done", None, results, {"optimizer.lr": lr}))
        tuning = Tuning("val/own", mode, options, [100, 101], trials, {})
        return tuning_luck(dataclasses.replace(study, metric="val/own", tuning=tuning), 0.02)[0]

    assert different(1, "max") == different(-1, "min") == 0
    assert min(different(-1, "max"), different(1, "min")) > 0.2
