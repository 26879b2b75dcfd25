import itertools
import math
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from runs import REPOSITORY
from scipy import stats

from vit_lightning.report.statistics import (
    Rules,
    correlation,
    difference_power,
    equivalence_p,
    equivalence_power,
    holm,
    judge,
    least_sign_flip_p,
    paired_p,
    pocock,
    second_level,
    seeds_needed,
    seeds_to_tell,
    sign_flip_p,
    t_interval,
    two_analyses_error,
    visible_difference,
    welch_p,
)

ARM = np.array([0.961, 0.972, 0.955, 0.969, 0.958, 0.975, 0.963, 0.966])
BASE = np.array([0.958, 0.964, 0.957, 0.961, 0.952, 0.97, 0.96, 0.959])
RULES = Rules(alpha=0.05, smallest_effect=0.005, first=8)


def test_tests_and_intervals_are_those_of_scipy():
    gaps = ARM - BASE
    paired = stats.ttest_rel(ARM, BASE)
    assert paired_p(gaps) == pytest.approx(paired.pvalue, rel=1e-9)
    assert t_interval(gaps, 0.05) == pytest.approx(tuple(paired.confidence_interval(0.95)), rel=1e-9)
    flipped = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(gaps) == pytest.approx(flipped.pvalue)
    assert welch_p(ARM, BASE) == pytest.approx(stats.ttest_ind(ARM, BASE, equal_var=False).pvalue)
    assert correlation(ARM, BASE) == pytest.approx(stats.pearsonr(ARM, BASE).statistic)


def test_equivalence_and_holm_are_those_of_statsmodels():
    # statsmodels 0.15: ttost_paired(ARM, BASE, -0.008, 0.008); multipletests(..., method="holm")
    assert equivalence_p(ARM - BASE, 0.008) == pytest.approx(0.014718526487847976, rel=1e-6)
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05)[0] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2, math.nan], 0.05)[0] == [pytest.approx(0.4), 1.0]


def test_holm_rejects_exactly_what_its_own_p_and_number_say():
    draw = np.random.default_rng(0)
    for _ in range(300):
        p_values = list(draw.random(5) ** 4)
        adjusted, weighed = holm(p_values, 0.0294)
        for p, p_adjusted, number in zip(p_values, adjusted, weighed, strict=True):
            assert (p_adjusted <= 0.0294) == (p <= 0.0294 / number)


def test_levels_of_two_analyses_are_pocock_s():
    # Pocock 1977, two analyses: 2.178 for .05, 2.772 for .01
    assert pocock(0.05) == pytest.approx(0.0294, abs=5e-5)
    assert stats.norm.isf(pocock(0.05) / 2) == pytest.approx(2.178, abs=1e-3)
    assert stats.norm.isf(pocock(0.01) / 2) == pytest.approx(2.772, abs=1e-3)
    assert two_analyses_error(0.05, 0.05, 0.5) == pytest.approx(
        0.0831, abs=1e-4
    )  # Armitage, McPherson & Rowe 1969: .083
    assert second_level(0.05, pocock(0.05), 8, 8) == pocock(0.05)
    late = second_level(0.05, pocock(0.05), 8, 24)
    assert late < pocock(0.05)
    assert two_analyses_error(pocock(0.05), late, 0.25) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("sd", "pairs"),
    [(0.15, [20, 7, 5, 3, 3]), (0.2, [34, 10, 6, 4, 3]), (0.28, [64, 18, 9, 5, 3]), (0.4, [128, 34, 16, 8, 4])],
)
def test_pairs_for_a_power_are_those_of_statsmodels(sd, pairs):
    # statsmodels 0.15: TTestPower, 80 %, level .05
    def fewest(effect: float) -> int:
        return next(n for n in itertools.count(2) if difference_power(n, effect, sd, 0.05) >= 0.8)

    assert [fewest(effect) for effect in (0.1, 0.2, 0.3, 0.5, 1.0)] == pairs


def test_power_of_differences_and_of_equivalence():
    # statsmodels 0.15: TTestPower().power(1.0, 8, 0.0294)
    assert difference_power(8, 0.006, 0.006, 0.0294) == pytest.approx(0.5667808923026174, rel=1e-9)
    assert difference_power(8, visible_difference(8, 0.006, 0.0294), 0.006, 0.0294) == pytest.approx(0.8)
    draws = 0.006 * np.random.default_rng(0).standard_normal((40_000, 12))
    errors = draws.std(axis=1, ddof=1) / math.sqrt(12)
    seen = np.mean((0.005 - np.abs(draws.mean(axis=1))) / errors >= stats.t.isf(0.03, 11))
    assert equivalence_power(12, 0.005, 0.006, 0.03) == pytest.approx(seen, abs=0.008)
    seen = np.mean((0.005 - np.abs(draws.mean(axis=1) + 0.002)) / errors >= stats.t.isf(0.03, 11))
    assert equivalence_power(12, 0.005, 0.006, 0.03, 0.002) == pytest.approx(seen, abs=0.008)


def test_the_sign_flip_test_cannot_get_under_its_least_p():
    assert sign_flip_p(np.array([1.0, 2, 3, 4, 5])) == least_sign_flip_p(5) == 0.0625
    assert least_sign_flip_p(6) == 0.03125
    assert sign_flip_p(np.full(20, 1.0)) == pytest.approx(1e-5, rel=1e-4)  # of 100,000 flips, the one that was observed


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([0.010, 0.012, 0.009, 0.011, 0.010, 0.008], "better"),
        ([-0.010, -0.012, -0.009, -0.011, -0.010, -0.008], "worse"),
        ([0.001, -0.001, 0.0005, -0.0008, 0.0003, -0.0002], "equivalent"),
        ([0.03, -0.02, 0.01, -0.01, 0.02, -0.03], "undecided"),
        ([0.010, 0.012, 0.009, 0.011, 0.010], "undecided"),  # five pairs claim nothing
        ([0.01], "undecided"),
        ([], "undecided"),
    ],
)
def test_verdicts(gaps, verdict):
    assert judge([np.array(gaps)], RULES)[0].verdict == verdict


def test_less_is_better_of_a_loss():
    gaps = np.array([-0.010, -0.012, -0.009, -0.011, -0.010, -0.008])
    assert judge([gaps], Rules(0.05, 0.005, "minimize"))[0].verdict == "better"


def test_the_interval_of_the_claim_is_without_zero_exactly_where_a_difference_is_claimed():
    draw = np.random.default_rng(1)
    seen = set()
    for _ in range(200):
        gaps = [draw.normal(shift, 0.01, 8) for shift in (0.0, 0.01, 0.015, -0.02)]
        for claim in judge(gaps, RULES):
            assert (claim.verdict in ("better", "worse")) == (claim.claim_low > 0 or claim.claim_high < 0)
            assert (claim.verdict in ("better", "worse")) == (claim.p_adjusted <= RULES.level)
            seen.add(claim.verdict)
    assert {"better", "worse", "undecided"} <= seen


def test_differences_that_are_all_alike_claim_no_more_than_their_signs_do():
    same, zero = judge([np.full(8, 0.01), np.zeros(8)], RULES)
    assert (same.verdict, same.p, same.low, same.high) == ("better", 2.0**-7, 0.01, 0.01)
    assert (zero.verdict, zero.p) == ("equivalent", 1.0)
    [six] = judge([np.full(6, 0.01)], RULES)
    assert (six.verdict, six.p) == ("undecided", 0.03125)  # above .0294


def test_seeds_needed_reach_both_claims():
    gaps = np.array([0.012, -0.004, 0.009, -0.006, 0.011, 0.002, -0.003, 0.007])
    [claim] = judge([gaps], RULES)
    more = seeds_needed(claim, RULES, 1)
    assert more > 0
    assert RULES.level_with(more) < RULES.level, "the second analysis would be at less"
    for power in (difference_power, equivalence_power):
        assert power(8 + more, 0.005, claim.sd, RULES.level_with(more)) >= 0.8
    one_less = [
        power(7 + more, 0.005, claim.sd, RULES.level_with(more - 1)) for power in (difference_power, equivalence_power)
    ]
    assert min(one_less) < 0.8
    assert seeds_needed(judge([gaps[:1]], RULES)[0], RULES, 1) is None
    assert seeds_needed(judge([gaps + 0.05], RULES)[0], RULES, 1) == 0


def test_an_arm_that_is_undecided_with_seeds_enough_is_told_how_many_would_tell():
    draw = np.random.default_rng(0)
    told = 0
    for _ in range(60):
        n = int(draw.integers(14, 24))
        rules = Rules(0.05, 0.005, first=n)
        claims = judge([draw.normal(0.0025, 0.005, n), draw.normal(-0.003, 0.0045, n), draw.normal(0, 0.01, n)], rules)
        for claim in claims:
            if claim.verdict != "undecided" or seeds_needed(claim, rules, 3) > 0:
                continue
            told += 1
            more = seeds_to_tell(claim, rules, 3)
            assert more > 0
            level = rules.level_with(more) / 3
            seen = difference_power(n + more, claim.difference, claim.sd, level)
            assert max(seen, equivalence_power(n + more, 0.005, claim.sd, level, claim.difference)) >= 0.8
    assert told > 20


def test_pairs_that_are_all_alike_need_as_many_as_their_signs_do():
    [claim] = judge([np.full(6, 0.01)], RULES)  # .03125, above .0294
    assert seeds_needed(claim, RULES, 1) == 1


def test_before_all_runs_have_finished_nothing_is_claimed():
    gaps = np.array([0.010, 0.012, 0.009, 0.011, 0.010, 0.008])
    rules = Rules(0.05, 0.005, first=8, complete=False)
    [claim] = judge([gaps], rules)
    assert claim.verdict == "undecided"
    assert seeds_needed(claim, rules, 1) is None


@pytest.fixture(scope="module")
def errors():
    return SimpleNamespace(**runpy.run_path(str(REPOSITORY / "experiments" / "benchmarks" / "ablation_errors.py")))


@pytest.mark.parametrize("number", [0, 3, 6, *(pytest.param(scene, marks=pytest.mark.full) for scene in (1, 2, 4, 5))])
def test_2000_ablations_with_their_second_analyses(errors, number):
    truth, images, sd = list(errors.SCENES.values())[number]
    rates = errors.simulate(truth, 2000, images=images, sd=sd, random=number)
    most = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)
    assert rates.false_difference <= most
    assert rates.false_equivalence <= most
    assert rates.coverage == pytest.approx(0.95, abs=0.015)


def test_an_ablation_with_level_alpha_at_both_analyses_would_be_wrong_too_often(errors, monkeypatch):
    monkeypatch.setattr(Rules, "level", property(lambda self: self.alpha))
    truth, images, sd = errors.SCENES["no arm differs, noisy"]
    assert errors.simulate(truth, 2000, images=images, sd=sd).false_difference > 0.06


def test_the_power_that_is_stated_is_reached(errors):
    for _, stated, seen in errors.power(2000).values():
        assert stated >= 0.8
        assert seen == pytest.approx(stated, abs=3 * math.sqrt(stated * (1 - stated) / 2000))
