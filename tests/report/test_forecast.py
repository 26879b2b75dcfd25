"""The forecast of an ablation: its runs, what it can show, and how far two runs differ."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from tests.fake_study import make_study
from vit_lightning.report.comparisons import compare, make_schedule, terms_of
from vit_lightning.report.forecast import assumed_sd, expect, forecast_sentences, measured_sd, tuning_luck
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
    terms = terms_of(make_plain(rules, "abc")).values()
    expected = expect(rules, terms, 0.9, truth)
    assert 18 < runs < 40, "some are decided before the last analysis"
    assert abs(expected.runs - runs) < 3 * error[0]
    assert abs(expected.answered - answered) < 3 * error[1]
    assert expect(rules, terms, 0.9, 3.0).runs < expected.runs


def test_a_study_that_cannot_show_its_effect_says_so():
    rules = Compare("test/acc", 0.005, 60)
    sd = assumed_sd(rules, 360)
    assert sd == pytest.approx(np.sqrt(0.05 / 360))
    pair = [{"b": 1, "a": -1}]
    assert expect(rules, pair, sd, 0.005).better < 0.8 < expect(rules, pair, assumed_sd(rules, 10_000), 0.005).better
    first, shown, costs = forecast_sentences(make_plain(rules, "ab"), 360, 6.0)
    why = "if on 5 % of 360 test images one is right and the other wrong"
    assert first == f"two runs differ by 1.2 points (standard deviation), {why}"
    power = f"{100 * expect(rules, pair, sd, 0.005).better:.2g} %"
    assert shown.startswith(f"60 seeds show an improvement of 0.5 points with a probability of {power}: raise compare.")
    assert costs.endswith("better by 0.5 points; at most 120 runs: 12 min")
    assert "raise" not in forecast_sentences(make_plain(rules, "ab"), 10_000, None)[1]
    single = expect(Compare("score", 1.0, 6), pair, 0.6, 1.0).better
    power = 1 - special.nctdtr(5, 1.0 * np.sqrt(6) / 0.6, special.stdtrit(5, 1 - 0.025 * 0.8 / 1.1001288))
    assert single == pytest.approx(power, abs=0.03), "with one analysis it is that of a t-test"
    unknown = ["what test/loss can show is said after 3 pairs of runs; at most 120 runs"]
    assert forecast_sentences(make_plain(Compare("test/loss", 0.005, 60), "ab"), 360, None) == unknown


def test_three_pairs_tell_the_spread_and_an_analysis_the_chance(tmp_path):
    study = make_study(tmp_path, seeds=4, max_seeds=8, missing=[("mean without class token", 3)])
    gaps = {arm: np.array([run.results["test/acc"] for run in study.done if run.arm == arm]) for arm in study.arms}
    base, one, other = gaps.values()
    squares = np.var(one - base, ddof=1) * 3 + np.var(other - base[:3], ddof=1) * 2
    assert measured_sd(study) == pytest.approx(np.sqrt(squares / 5))
    assert forecast_sentences(study, 360, None)[0].endswith(" points (standard deviation), as measured so far")
    [said] = forecast_sentences(make_study(tmp_path / "six", seeds=6, max_seeds=20), 360, None)
    assert said.startswith("by the pairs so far, 20 seeds answer 2 open comparisons with a chance of ")


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
        luck = tuning_luck(dataclasses.replace(study, metric="val/own", tuning=tuning), 0.02)
        return float((~np.isnan(luck)).mean())

    assert different(1, "max") == different(-1, "min") == 0
    assert min(different(-1, "max"), different(1, "min")) > 0.2
