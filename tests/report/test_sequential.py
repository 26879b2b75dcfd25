import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from vit_lightning.report import sequential
from vit_lightning.report.sequential import Design, at, follow, nominal_levels, p_value

DESIGN = Design(smallest_effect=1.0, alpha=0.05, comparisons=2, max_pairs=30)


def test_boundaries_are_those_of_lan_and_demets():
    # the function that resembles Pocock's boundaries, one-sided .025, five equal analyses
    pairs = (10, 20, 30, 40, 50)
    spent = tuple(0.025 * math.log1p((math.e - 1) * n / 50) for n in pairs)
    assert -special.ndtri(nominal_levels(pairs, spent)) == pytest.approx([2.438, 2.427, 2.410, 2.397, 2.386], abs=1e-3)
    assert nominal_levels((30,), (0.025,)) == pytest.approx([0.025])


def test_a_level_is_spent_as_planned_and_what_is_kept_for_extensions_thereafter():
    planned, level = Design(1.0, 0.05, 1, 15), 0.025
    once, twice = replace(planned, max_pairs=20, extended=(15,)), replace(planned, max_pairs=60, extended=(15, 20))
    assert twice.analyses == (6, 8, 10, 12, 14, 15, *range(16, 61, 2))
    assert np.array_equal(once.levels(level)[:6], planned.levels(level)), "earlier claims stand"
    assert np.array_equal(twice.levels(level)[:9], once.levels(level))
    # independent of the integration: paths of normal sums, with many more crossings as boundaries are closer
    n, high = np.array(twice.analyses), 16 * level
    sums = np.random.default_rng(0).standard_normal((20_000, 60)).cumsum(-1)[:, n - 1]
    crossed = np.logical_or.accumulate(sums / np.sqrt(n) > -special.ndtri(twice.levels(high)), axis=-1).mean(0)
    held = high / (1 - math.log10(high) / sequential.HELD_BACK)
    for by, part in {10: 0.8 * 10 / 15, 15: 0.8, 20: 1 - 0.2 * 15 / 20, 60: 1 - 0.2 / 4}.items():
        assert crossed[twice.analyses.index(by)] == pytest.approx(held * part, abs=0.01)


def test_the_first_boundaries_do_not_depend_on_how_many_are_asked_for():
    pairs = DESIGN.analyses
    assert pairs == (*range(6, 31, 2),)
    assert np.array_equal(DESIGN.levels(0.01, 4), DESIGN.levels(0.01)[:4])
    assert Design(1.0, 0.05, 1, 9).analyses == (6, 8, 9)
    assert Design(1.0, 0.05, 1, 5).analyses == ()


def test_p_and_interval_agree_with_the_claims():
    draw, design = np.random.default_rng(0), DESIGN
    seen = set()
    for shift in (0.0, 0.8, -1.2):
        for differences in shift + draw.standard_normal((4, 12)):
            course = follow(differences, design)
            claimed = course.claims["better"] | course.claims["worse"]
            now = (course.low > 0) | (course.high < 0)
            assert np.array_equal(claimed, np.logical_or.accumulate(now))
            assert np.array_equal(course.claims["not better"], course.ceiling < design.smallest_effect)
            assert np.array_equal(course.claims["not worse"], course.floor > -design.smallest_effect)
            assert (p_value(differences, design) <= design.alpha) == claimed[-1]
            seen.add(bool(claimed[-1]))
    assert seen == {True, False}


def test_one_analysis_without_correction_is_the_t_test():
    differences = np.random.default_rng(1).normal(0.5, 1.0, 8)
    design = Design(0.5, 0.05, 1, 7)
    alone = Design(0.5, 0.05, 1, 6)
    paired = stats.ttest_1samp(differences[:6], 0.0)
    course = follow(differences[:6], alone)
    held = 0.8 / (1 - math.log10(0.025) / sequential.HELD_BACK)
    assert (course.low[0], course.high[0]) == pytest.approx(tuple(paired.confidence_interval(1 - 0.05 * held)))
    p, level = paired.pvalue, p_value(differences[:6], alone)
    assert level * 0.8 / (1 - math.log10(level / 2) / sequential.HELD_BACK) == pytest.approx(
        p, rel=0.03
    )  # steps, 2.3 %
    assert course.high[0] - course.low[0] < (wider := follow(differences[:7], design)).high[0] - wider.low[0]


@pytest.mark.parametrize(
    ("differences", "claims"),
    [
        ([2.0, 2.4, 1.8, 2.2, 2.0, 1.6], {"better", "not worse"}),
        ([-2.0, -2.4, -1.8, -2.2, -2.0, -1.6], {"worse", "not better"}),
        ([0.02, -0.02, 0.01, -0.01, 0.0, 0.01], {"not better", "not worse"}),
        ([0.5, 0.55, 0.45, 0.5, 0.52, 0.48], {"better", "not better", "not worse"}),
        ([3.0, -2.0, 1.0, -1.0, 2.0, -3.0], set()),
        ([2.0, 2.4, 1.8, 2.2, 2.0], set()),  # before the first analysis
    ],
)
def test_claims(differences, claims):
    course = follow(np.array(differences), DESIGN)
    assert {name for name, made in course.claims.items() if made.any()} == claims
    assert bool(course.decided.any()) == bool(claims)


def test_a_claim_stands_though_later_pairs_speak_against_it():
    differences = np.array([2.0, 2.4, 1.8, 2.2, 2.0, 1.6, -9.0, -9.0, -9.0, -9.0])
    course = follow(differences, DESIGN)
    assert course.claims["better"].tolist() == [True, True, True]
    assert course.low[0] > 0 > course.low[-1]
    assert course.stop == 0


def test_pairs_that_are_all_alike_claim_no_more_than_their_signs_do():
    one_image = np.full(8, 1 / 360)
    design = Design(0.005, 0.05, 1, 8)
    course = follow(one_image, design)
    assert course.sd.tolist() == [0.0, 0.0]
    assert not course.claims["better"][0], "six of six have p = .031"
    assert (course.low[0], course.high[0]) == (-math.inf, math.inf), "no interval of one point either"
    assert (course.low[1], course.high[1]) == (-math.inf, math.inf), "nor of eight, though they show that it is better"
    assert p_value(one_image[:6], design) == 1.0
    for most in (7, 10, 60):
        assert not follow(one_image[:6], Design(0.005, 0.05, 1, most)).claims["better"].any()
    assert follow(one_image[:6], Design(0.005, 0.05, 1, 6)).claims["better"][0], "one analysis alone: .031 is enough"
    assert course.claims["better"][1], "eight of eight have p = .0078"
    nothing = follow(np.zeros(8), design)
    assert p_value(np.zeros(8), design) == 1.0
    assert {name for name, made in nothing.claims.items() if made[-1]} == {"not better", "not worse"}


@pytest.mark.parametrize("arms", [2, 30])
def test_pairs_that_differ_in_sign_alone_are_judged_by_their_signs(arms):
    signs = np.random.default_rng(6).choice([-3.0, 3.0], (500, arms, 30))
    course = follow(signs, Design(1.0, 0.05, arms, 30))
    false = np.any(course.claims["better"] | course.claims["worse"], axis=(1, 2))
    assert false.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500), "by t-tests, .08 or .09"
    now = (course.low > 0) | (course.high < 0)
    made = course.claims["better"] | course.claims["worse"]
    vary = (course.sd > 0).all(-1)
    assert np.array_equal(np.logical_or.accumulate(now, -1)[vary], made[vary])
    ten = np.array([3.0] * 9 + [-3.0])
    assert p_value(ten, Design(1.0, 0.05, 1, 10)) > 0.02, "nine of ten have p = .021, by a t-test .003"


def test_what_has_not_ended_by_one_maximum_has_not_once_that_is_raised():
    differences = 0.4 + 3 * np.random.default_rng(9).standard_normal((2000, 60))
    short = Design(1.0, 0.05, 1, 20)
    long = replace(short, max_pairs=60, extended=(20,))
    before, after = follow(differences[:, :20], short), follow(differences, long)
    assert np.all(after.stop >= before.stop)
    decided = at(before.decided, before.stop)
    assert decided.any()
    assert np.array_equal(after.stop[decided], before.stop[decided])


def test_a_comparison_ends_where_an_answer_has_become_unlikely():
    noisy = 20 * np.random.default_rng(2).standard_normal((500, 30))
    course = follow(noisy, DESIGN)
    ended = at(course.unlikely, course.stop)
    assert ended.mean() > 0.8
    assert not at(course.decided, course.stop)[ended].any()
    assert not course.unlikely[..., -1].any(), "the last analysis ends all"
    missed = course.decided[..., -1] & ended
    assert missed.mean() < sequential.UNLIKELY


@pytest.mark.parametrize(("arms", "truth"), [(1, 0.0), (3, 0.0), (2, 1.0), (2, -1.0)])
def test_any_false_claim_has_at_most_probability_alpha(arms, truth):
    draw = np.random.default_rng(3)
    runs = draw.standard_normal((2000, arms + 1, 30))
    design = Design(1.0, 0.05, arms, 30)
    course = follow(truth + runs[:, 1:] - runs[:, :1], design)
    wrong = {"better": truth <= 0, "worse": truth >= 0, "not better": truth >= 1, "not worse": truth <= -1}
    false = np.any([course.claims[name][..., -1] for name in wrong if wrong[name]], axis=(0, 2))
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert 0.01 < false.mean() <= most
    covered = np.all((course.low <= truth) & (truth <= course.high), axis=(1, 2))
    assert covered.mean() >= 1 - most


def test_the_level_of_a_single_analysis_at_each_would_be_wrong_too_often(monkeypatch):
    monkeypatch.setattr(sequential, "nominal_levels", lambda pairs, spent, count=None: np.full(len(pairs), spent[-1]))
    course = follow(np.random.default_rng(4).standard_normal((2000, 30)), Design(1.0, 0.05, 1, 30))
    assert (course.claims["better"] | course.claims["worse"])[:, -1].mean() > 0.1
