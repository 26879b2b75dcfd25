import numpy as np
import pytest
from scipy import stats

from vit_lightning.report.statistics import correlation, highest_rate, paired_p, sign_flip_p, t_interval, welch_p

ARM = np.array([0.961, 0.972, 0.955, 0.969, 0.958, 0.975, 0.963, 0.966])
BASE = np.array([0.958, 0.964, 0.957, 0.961, 0.952, 0.97, 0.96, 0.959])


def test_tests_and_intervals_are_those_of_scipy():
    gaps = ARM - BASE
    paired = stats.ttest_rel(ARM, BASE)
    assert paired_p(gaps) == pytest.approx(paired.pvalue, rel=1e-9)
    assert t_interval(gaps, 0.05) == pytest.approx(tuple(paired.confidence_interval(0.95)), rel=1e-9)
    flipped = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(gaps) == pytest.approx(flipped.pvalue)
    assert welch_p(ARM, BASE) == pytest.approx(stats.ttest_ind(ARM, BASE, equal_var=False).pvalue)
    assert correlation(ARM, BASE) == pytest.approx(stats.pearsonr(ARM, BASE).statistic)


def test_the_sign_flip_test_of_counts_keeps_its_ties():
    draw = np.random.default_rng(0)
    for _ in range(100):
        counts = draw.binomial(360, 0.97, (2, 8)).astype(float)
        gaps = counts[0] - counts[1]
        flipped = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(int) @ gaps.astype(int)
        assert sign_flip_p(gaps) == np.mean(np.abs(flipped) >= abs(int(gaps.sum())))


def test_the_sign_flip_test_cannot_get_under_its_least_p():
    assert sign_flip_p(np.array([1.0, 2, 3, 4, 5])) == 0.0625
    assert sign_flip_p(np.full(20, 1.0)) == pytest.approx(1e-5, rel=1e-4)  # of 100,000 flips, the one that was observed


def test_differences_that_are_all_alike_have_the_p_of_their_signs():
    assert paired_p(np.full(8, 0.01)) == 2.0**-7
    assert paired_p(np.float32(0.9027778) - np.full(6, np.float32(0.9), dtype=np.float32)) == 2.0**-5
    assert paired_p(np.zeros(8)) == 1.0


@pytest.mark.parametrize(("events", "runs"), [(0, 8), (1, 8), (7, 30), (8, 8)])
def test_the_highest_rate_is_that_of_clopper_and_pearson(events, runs):
    limits = stats.binomtest(events, runs, alternative="less").proportion_ci(0.95, method="exact")
    assert highest_rate(events, runs) == pytest.approx(limits.high)
    if (events, runs) == (0, 8):
        assert highest_rate(events, runs) == pytest.approx(0.31, abs=0.005)
