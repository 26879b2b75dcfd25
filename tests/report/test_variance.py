import math

import numpy as np
import pytest
from fake_study import bare_study
from scipy import stats

from vit_lightning.report.comparisons import compare
from vit_lightning.report.variance import components, crossed_interval, spread, spread_p, unlike_spreads

# Shrout & Fleiss 1979, table 2: six targets, four judges; mean squares 11.24, 32.49 and 1.02
RATINGS = np.array([[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]])


def test_components_of_a_published_table():
    found = components(RATINGS)
    assert found.rest == pytest.approx(1.02, abs=5e-3)
    assert found.image == pytest.approx((32.49 - 1.02) / 6, abs=5e-3)
    means = RATINGS.mean(axis=1)
    assert found.error_new_seeds == pytest.approx(stats.sem(means))


def test_components_are_found_again_and_never_negative():
    draw = np.random.default_rng(0)
    seeds, images, rest = draw.normal(0, 0.5, (300, 1)), draw.normal(0, 2, (1, 400)), draw.normal(0, 1, (300, 400))
    found = components(seeds + images + rest)
    assert (found.image, found.rest) == pytest.approx((4.0, 1.0), rel=0.12)
    quiet = components(np.tile([[1, 0, 1, 1]], (3, 1)))
    assert (quiet.rest, quiet.error_new_seeds) == (0, 0)


def test_results_that_differ_by_rounding_alone_have_no_spread():
    accuracies = np.float32(0.9027778) - np.full(6, np.float32(0.9), dtype=np.float32)
    assert spread(accuracies.astype(float)) == 0.0


def test_the_spread_of_pairs_is_tested_by_the_correlation_of_sum_and_difference():
    draw = np.random.default_rng(0)
    shared = draw.normal(size=12)
    one, other = shared + draw.normal(0, 0.5, 12), shared + draw.normal(0, 1.5, 12)
    assert spread_p(one, other) == pytest.approx(stats.pearsonr(one + other, one - other).pvalue)
    assert spread_p(other, one) == pytest.approx(spread_p(one, other))
    assert spread_p(one, 2 - one) == 1.0
    assert spread_p(np.zeros(6), np.arange(6.0)) == 0.0


def test_counts_that_hardly_vary_do_not_differ_in_spread():
    draw = np.random.default_rng(1)
    counts = np.rint(draw.normal(0.3, 0.2, (2000, 2, 6)))
    found = np.array([[spread_p(*pair), spread_p(*pair, 1.0)] for pair in counts]) < 0.05
    assert found.mean(0)[0] > 0.3
    assert found.mean(0)[1] < 0.01


def compared(differences, max_seeds=12, baseline=None):
    """Returns the comparison of two arms with these differences of something that is better when higher."""
    results = {"a": np.zeros(len(differences)) if baseline is None else baseline, "b": differences}
    return compare(bare_study(results, metric="score", smallest_effect=1.0, max_seeds=max_seeds))[0]


@pytest.mark.parametrize("axis", ["seeds", "images"])
def test_the_crossed_interval_is_the_t_interval_where_one_of_both_varies_alone(axis):
    """One analysis at the level .0364; the spread over seeds is drawn small beside that of images."""
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
    assert found == pytest.approx(tuple(reference.confidence_interval(1 - 0.05 * 0.8 / 1.1001288)), abs=2e-4)


def test_the_crossed_interval_holds_for_new_seeds_and_new_images():
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
    assert np.mean(held) == pytest.approx(1 - 0.05 * 0.8 / 1.1, abs=0.03)
    assert np.mean(narrow) < 0.92


def _truth():
    """Expected difference of those studies: probit of normal numbers in closed form."""
    return stats.norm.cdf(1 / math.sqrt(3 + 0.05**2)) - stats.norm.cdf(1 / math.sqrt(2 + 0.05**2))


def test_arms_that_spread_unlike_are_named():
    draw = np.random.default_rng(4)
    alike = compared(draw.normal(size=12), baseline=draw.normal(size=12), max_seeds=40)
    unlike = compared(draw.normal(size=12), baseline=0.1 * draw.normal(size=12), max_seeds=40)
    assert unlike_spreads([alike]) == []
    [text] = unlike_spreads([alike, unlike])
    assert "Runs of 'b' spread 1" in text
    assert "times as much as those of 'a'" in text
    quiet = np.tile([0.9, 0.9 + 2e-16], 6)  # rounding is no spread
    [constant] = unlike_spreads([compared(draw.normal(size=12), baseline=quiet, max_seeds=40)])
    assert "Runs of 'b' spread, unlike those of 'a'." in constant
