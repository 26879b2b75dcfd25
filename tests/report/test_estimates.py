import math
from dataclasses import replace

import numpy as np
import pytest
from fake_study import make_study
from scipy import stats

from vit_lightning.report import variance
from vit_lightning.report.comparisons import compare
from vit_lightning.report.sequential import Design, at, follow
from vit_lightning.report.study import Compare, Run
from vit_lightning.report.variance import components, crossed_interval, estimate, unlike_spreads


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Makes the comparison of two arms with these differences of a loss, or of something that is better when higher."""
    study = make_study(tmp_path_factory.mktemp("study"), seeds=6)

    def compared(differences, goal="maximize", max_seeds=12, baseline=None):
        rules = Compare("score", 1.0, max_seeds)
        values = {"a": np.zeros(len(differences)) if baseline is None else baseline, "b": differences}
        runs = [
            Run(arm, seed, "", "done", results={"score": float(value)})
            for arm, row in values.items()
            for seed, value in enumerate(row)
        ]
        seeds = list(range(max_seeds))
        arms = {"a": {}, "b": {}}
        return compare(replace(study, goal=goal, arms=arms, baseline="a", runs=runs, compare=rules, seeds=seeds))[0]

    return compared


def test_after_a_single_analysis_the_estimate_is_the_mean(compared):
    differences = np.random.default_rng(1).normal(0.0, 1.0, 6)
    for gain in (0.4, 1.0, 1.5):  # beside the boundary, where simulated studies differ in what they claim
        one = compared(differences + gain, max_seeds=6)
        assert estimate(one) == pytest.approx(one.mean, abs=0.01)


def test_half_of_all_studies_are_estimated_too_high(compared, monkeypatch):
    monkeypatch.setattr(variance, "PATHS", 200)
    truth, sd, draw = 1.0, 1.5, np.random.default_rng(0)
    found = [compared(values, max_seeds=30) for values in truth + sd * draw.standard_normal((100, 30))]
    errors = np.array([[one.mean - truth, estimate(one) - truth] for one in found])
    assert np.mean(errors[:, 1] > 0) == pytest.approx(0.5, abs=0.1)
    assert errors[:, 1].mean() < errors[:, 0].mean() - 0.05, "and the mean is too high"


def test_the_estimate_of_the_mirrored_and_of_the_minimized_has_the_other_sign(compared):
    differences = 1.5 + 1.2 * np.random.default_rng(4).standard_normal(12)
    one = compared(differences)
    assert one.verdict == "better"
    assert 0 < estimate(one) < one.mean
    assert estimate(one.mirrored()) == pytest.approx(-estimate(one), abs=0.01)
    assert estimate(compared(-differences, "minimize")) == -estimate(one)


def test_no_estimate_while_a_comparison_goes_on(compared):
    assert math.isnan(estimate(compared([2.0, -1.0, 1.0, 0.0, 2.0, 2.0], max_seeds=40)))
    assert math.isnan(estimate(compared([3.0, -2.0, 1.0])))
    assert estimate(compared([0.5] * 12)) == 0.5


@pytest.mark.parametrize("axis", ["seeds", "images"])
def test_the_crossed_interval_is_the_t_interval_where_one_of_both_varies_alone(compared, axis):
    """One analysis at the level .0475; the spread over seeds is drawn small beside that of images."""
    draw = np.random.default_rng(2)
    if axis == "images":
        table = np.tile(draw.normal(0.3, 1.0, 40), (6, 1))
        one = compared(table.mean(1) + 1e-4 * draw.standard_normal(6), max_seeds=6)
        reference = stats.ttest_1samp(table[0], 0.0)
    else:
        table = np.tile(draw.normal(0.3, 1.0, (6, 1)), (1, 40))
        one = compared(table.mean(1), max_seeds=6)
        reference = stats.ttest_1samp(table[:, 0], 0.0)
    found = crossed_interval(one, components(table))
    assert found == pytest.approx(tuple(reference.confidence_interval(1 - 0.05 * 0.95)), abs=2e-4)


def test_the_crossed_interval_holds_for_new_seeds_and_new_images(compared):
    """Right and wrong answers, with effects of seeds and of images on the difference."""
    draw, images, held, narrow = np.random.default_rng(5), 200, [], []
    for _ in range(300):
        hard, gain = draw.normal(1.0, 1.0, images), draw.normal(0.0, 1.0, images)
        right = [
            draw.random((6, images)) < stats.norm.cdf(hard + shift + draw.normal(0, 0.05, (6, 1)))
            for shift in (0, gain)
        ]
        table = right[1].astype(float) - right[0]
        one, truth = compared(table.mean(1), max_seeds=6), _truth()
        low, high = crossed_interval(one, components(table))
        held.append(low <= truth <= high)
        narrow.append(one.low <= truth <= one.high)
        assert low <= one.low < one.high <= high
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)
    assert np.mean(narrow) < 0.9


def _truth():
    """Expected difference of those studies: probit of normal numbers in closed form."""
    return stats.norm.cdf(1 / math.sqrt(3 + 0.05**2)) - stats.norm.cdf(1 / math.sqrt(2 + 0.05**2))


def test_outcomes_are_in_the_stage_wise_order():
    draws = np.random.default_rng(0).normal(0.3, 1.7, (2000, 12))
    course = follow(draws, Design(1.0, 0.05, 1, 12))
    outcome = variance._outcomes(course, course.stop, 1000.0, last=3)
    better, worse = (at(course.claims[name], course.stop) & (course.stop < 3) for name in ("better", "worse"))
    assert outcome[better].min() > outcome[~better].max() > outcome[worse].max()
    early, late = better & (course.stop == 0), better & (course.stop == 2)
    assert outcome[early].min() > outcome[late].max()
    at_last = course.stop == 3
    assert np.array_equal(outcome[at_last], course.mean[at_last, 3])


def test_arms_that_spread_unlike_are_named(compared):
    draw = np.random.default_rng(4)
    alike = compared(draw.normal(size=12), baseline=draw.normal(size=12), max_seeds=40)
    unlike = compared(draw.normal(size=12), baseline=0.1 * draw.normal(size=12), max_seeds=40)
    assert unlike_spreads([alike]) == []
    [text] = unlike_spreads([alike, unlike])
    assert "Runs of 'b' spread 1" in text
    assert "times as much as those of 'a'" in text
    [constant] = unlike_spreads([compared(draw.normal(size=12), max_seeds=40)])
    assert "Runs of 'b' spread unlike those of 'a'" in constant
