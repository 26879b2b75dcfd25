"""The forecast of an ablation: its runs, whatever the order in which they end, and what it can show."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from fake_study import bare_study, make_study
from scipy import special

from vit_lightning.report.comparisons import compare, make_schedule, terms_of
from vit_lightning.report.forecast import assumed_sd, expect, forecast_sentences, measured_sd, tuning_luck
from vit_lightning.report.study import Compare, Run, Study, Tuning

STUDIES = 100


def make_plain(rules: Compare, arms: str) -> Study:
    """Makes a study without runs."""
    return bare_study({arm: [] for arm in arms}, compare=rules)


def needed_runs(rules: Compare, sd: float, truth: float, draw: np.random.Generator) -> tuple[int, float]:
    """Ends the runs of a study, analysis after analysis, until no more are needed; runs and share answered."""
    means = {"a": 0.0, "b": truth if rules.arms == "baseline" else 0.0, "c": truth}
    results = {arm: means[arm] + draw.normal(0, sd / np.sqrt(2), rules.max_seeds) for arm in "abc"}
    study = make_plain(rules, "abc")
    while True:
        seeds = make_schedule(study).seeds
        if sum(seeds.values()) == len(study.runs):
            found = compare(study)
            return len(study.runs), np.mean([one.course.decided[one.analysis] for one in found])
        study = bare_study({arm: results[arm][:count] for arm, count in seeds.items()}, compare=rules)


@pytest.mark.parametrize("how", ["baseline", "pairs"])
def test_the_expected_runs_are_those_of_studies_with_other_numbers(how):
    rules, truth = Compare("test/own", 1.0, 14, arms=how), 1.0
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
        luck = tuning_luck(replace(study, metric="val/own", tuning=tuning), 0.02)
        return float((~np.isnan(luck)).mean())

    assert different(1, "max") == different(-1, "min") == 0
    assert min(different(-1, "max"), different(1, "min")) > 0.2


SEEDS = [*range(21)]


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
    study = replace(make_plain(Compare("test/acc", 0.02, 14, arms=how), "abcd"), seeds=SEEDS)
    ended: list[Run] = [Run(arm, 0, "", "missing") for arm in "abcd"]
    while True:
        seeds = make_schedule(replace(study, runs=ended)).seeds
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
