import importlib
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from fake_study import bare_study, make_study
from runs import REPOSITORY

from vit_lightning.report.analysis import analyse
from vit_lightning.report.comparisons import compare, compare_all, make_schedule
from vit_lightning.report.page import make_page, verdicts
from vit_lightning.report.report import make_report
from vit_lightning.report.wording import SUM, kind_of

IMAGES = 360


def accuracies(counts):
    return [round(float(np.float32(count / IMAGES)), 7) for count in counts]


def test_accuracies_are_compared_as_counts_of_images():
    base = [345, 346, 341, 350, 347, 344]
    results = {"cls": accuracies(base), "mean": accuracies([count + 1 for count in base])}
    [one] = compare(bare_study(results))
    assert list(one.differences.values()) == [1 / IMAGES] * 6
    assert (one.sd, one.verdict, one.next, one.images) == (0.0, "undecided", 8, IMAGES)
    assert np.isnan([one.low, one.high]).all(), "and no interval of width 0"
    [rounded] = compare(bare_study(results, images=None))
    assert (rounded.verdict, rounded.images) == ("undecided", None), "rounding errors are no spread"


def test_a_pair_with_a_failed_run_is_replaced_by_the_next_seed():
    base = np.random.default_rng(0).integers(338, 346, 20) / IMAGES
    better = [*(base + np.tile([7, 8], 10) / IMAGES)]
    kept = compare(bare_study({"cls": base, "mean": better}))[0]
    assert (kept.verdict, kept.n, kept.decided, kept.next, kept.failed) == ("better", 6, True, None, [])
    better[3] = None
    [failed] = compare(bare_study({"cls": base, "mean": better}))
    assert (failed.verdict, failed.n, failed.complete, failed.blocked) == ("better", 6, 19, False)
    assert (list(failed.counted), failed.seeds_for(6)) == ([0, 1, 2, 4, 5, 6], 7)
    assert [run.seed for run in failed.failed] == [3]


def test_a_comparison_ends_where_half_as_many_runs_again_fail_as_it_has_pairs():
    base = np.random.default_rng(0).integers(338, 346, 9) / IMAGES
    better = [*(base + np.tile([7, 8, 9], 3) / IMAGES)]
    better[:3] = [None] * 3
    [one] = compare(bare_study({"cls": base, "mean": better}))
    assert (one.verdict, one.seeds_for(6)) == ("better", 9)
    better[3] = None
    [one] = compare(bare_study({"cls": base, "mean": better}))
    assert (one.verdict, one.complete, one.blocked, one.next, one.seeds_for(6)) == ("failed", 5, True, 6, 4)


@pytest.mark.parametrize(("goal", "sign"), [("maximize", 1), ("minimize", -1)])
def test_no_verdict_speaks_against_its_range_though_images_are_few(goal, sign):
    """Counts of 20 to 360 images, which are often all alike, or unknown, also where the maximum was raised."""
    draw, seen = np.random.default_rng(1), set()
    for known, effect in itertools.product([20, 100, 360, None] * 30, (0.01, None)):
        images = known or 10_000
        effect = effect or 0.5 / images  # then an image more and none are the effect apart from it, either way
        most, extended = [(8, ()), (20, (6,)), (30, (20,))][draw.integers(3)]
        gains = effect * draw.choice([-2, -1, 0, 0.5, 1, 2]) + effect * draw.choice([0.1, 0.5, 2]) * draw.normal(
            size=most
        )
        base = 0.8 + 0.003 * draw.normal(size=most)
        results = {"cls": np.rint(base * images) / images, "mean": np.rint((base + gains) * images) / images}
        rules = {"smallest_effect": effect, "max_seeds": most, "extended": extended}
        [one] = compare(replace(bare_study(results, images=known, **rules), goal=goal))
        kind = kind_of(one)
        seen.add(kind)
        if np.isnan(one.low):
            assert not kind.startswith("clearly")
            continue
        assert one.low <= one.mean <= one.high
        low, high = sorted((sign * one.low, sign * one.high))
        assert (low > 0, high < 0) == ("better" in one.claims, "worse" in one.claims)
        assert (high < effect, low > -effect) == ("not better" in one.claims, "not worse" in one.claims)
        assert (low >= effect, high <= -effect) == (kind == "clearly better", kind == "clearly worse")
    assert len(seen) >= 8


def test_less_of_a_loss_is_better():
    draw = np.random.default_rng(1)
    base = draw.normal(0.5, 0.001, 8)
    made = bare_study({"cls": base, "mean": base - 0.02 + draw.normal(0, 0.001, 8)}, images=None)
    [one] = compare(replace(made, goal="minimize"))
    assert one.verdict == "better"
    assert one.low < one.mean < one.high < 0
    mirrored = one.mirrored()
    assert (mirrored.verdict, mirrored.arm, mirrored.other) == ("worse", "cls", "mean")
    assert (mirrored.low, mirrored.mean, mirrored.high) == pytest.approx((-one.high, -one.mean, -one.low))


def test_all_pairs_share_alpha():
    draw = np.random.default_rng(2)
    results = {arm: draw.normal(0.9, 0.002, 20) for arm in "abcd"}
    pairs = compare(bare_study(results, images=None, arms="pairs"))
    assert [(one.arm, one.other) for one in pairs][:3] == [("b", "a"), ("c", "a"), ("d", "a")]
    assert (len(pairs), pairs[0].design.level) == (6, pytest.approx(0.05 / 6))


@pytest.fixture
def ablation_errors(monkeypatch):
    """The benchmark of errors."""
    monkeypatch.syspath_prepend(REPOSITORY / "experiments" / "benchmarks")
    yield importlib.import_module("ablation_errors")
    sys.modules.pop("ablation_errors")


@pytest.mark.full
def test_claims_are_false_as_rarely_as_promised_and_intervals_hold_in_every_scene(ablation_errors):
    for name, scene in ablation_errors.SCENES.items():
        rates, studies = ablation_errors.simulate(scene, 500), 500
        if scene.promised:
            assert rates.false <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / studies), name
            assert rates.all_covered >= 0.94 - 3 * np.sqrt(0.05 * 0.95 / studies), name


def test_studies_followed_one_by_one_agree_with_the_benchmark(ablation_errors):
    scene = replace(ablation_errors.BASE, truth=(0.0, 1.0), max_seeds=20, failing=0.02)
    results = ablation_errors.results_of(scene, 30, np.random.default_rng(0))
    rates = ablation_errors.rates_of(scene, results)
    found = [one for values in results for one in compare(ablation_errors.study_of(values, scene))]
    assert np.mean([one.course.decided[one.analysis] for one in found]) == pytest.approx(rates.answered)
    truth = np.tile(scene.truth, 30)
    errors = [one.mean - true for one, true in zip(found, truth, strict=True) if one.analysis is not None]
    assert np.mean(errors) == pytest.approx(rates.bias)
    ends = [
        (one.course, one.analysis, true) for one, true in zip(found, truth, strict=True) if one.analysis is not None
    ]
    held = [course.low[place] <= true <= course.high[place] for course, place, true in ends]
    assert np.mean(held) == pytest.approx(rates.covered)


def test_the_interval_holds_at_all_analyses_at_once_and_more_seeds_do_not_widen_it():
    """Also beyond the planned maximum, where little of the level is left and that of one analysis is wide."""
    truth, draw, held, alone, ends = 0.004, np.random.default_rng(3), [], 0, []
    for _ in range(150):
        base, gaps, before = draw.normal(0.9, 0.005, 12), draw.normal(truth, 0.01, 12), None
        seen = []
        for most, extended in ((6, ()), (12, (6,))):
            results = {"cls": base[:most], "mean": base[:most] + gaps[:most]}
            made = bare_study(results, images=None, smallest_effect=0.005, max_seeds=most, extended=extended)
            [one] = compare(made)
            one = replace(one, analysis=len(one.course.pairs) - 1)  # wherever it ended
            low, high = one.interval
            assert low <= one.mean <= high
            seen.append(low <= truth <= high)
            if before is not None:
                wider = one.course.high[-1] - one.course.low[-1] > before[1] - before[0]
                left = not before[0] <= one.mean <= before[1]
                alone += wider
                ends.append(left)
                assert left or before[0] <= low < high <= before[1]
            before = low, high
        held.append(all(seen))
    assert alone > 50, "intervals of one analysis widen"
    assert np.mean(ends) < 0.05
    assert np.mean(held) >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / 150)


def test_with_other_test_images_for_each_seed_only_pairs_within_a_seed_are_compared(tmp_path):
    made = replace(make_study(tmp_path, seeds=3, images=50), split_varies=True)
    for run in made.runs:
        path = made.folder / run.folder / "test_predictions.npz"
        with np.load(path) as file:
            arrays = dict(file)
        np.savez_compressed(path, **{**arrays, "index": arrays["index"] + 50 * run.seed})
    analysis = analyse(made)
    assert (analysis.tested.same, analysis.tested.why) == (False, "each seed has test images of its own")
    assert analysis.components == {}


def grid_of(factors, results):
    """The study of two factors with these results by arm, one for each seed."""
    return replace(bare_study(results, images=None, smallest_effect=0.02), factors=factors)


@pytest.fixture(scope="module")
def noisy():
    draw = np.random.default_rng(3)
    return lambda *means: [mean + draw.normal(0, 0.004, 6) for mean in means]


def test_of_a_grid_what_two_levels_do_together_is_claimed_beside_what_each_does(noisy):
    names = "gelu, depth=3", "gelu, depth=6", "swiglu, depth=3", "swiglu, depth=6"
    factors = {"model.feed_forward": ["gelu", "swiglu"], "model.depth": [3, 6]}
    results = dict(zip(names, noisy(0.70, 0.75, 0.70, 0.85), strict=True))
    *arms, together = compare(grid_of(factors, results))
    assert [(one.arm, one.other, one.verdict) for one in arms] == [
        ("gelu, depth=6", "gelu, depth=3", "better"),
        ("swiglu, depth=3", "gelu, depth=3", "equivalent"),
        ("swiglu, depth=6", "gelu, depth=3", "better"),
    ]
    none, deep, gated, both = results.values()
    assert (together.arm, together.verdict) == ("swiglu x depth=6", "better")
    assert [*together.differences.values()] == pytest.approx(both - deep - gated + none, abs=2e-6)
    assert {one.design.comparisons for one in (*arms, together)} == {4}, "they share alpha"
    first, last = [[94.2, 94.4, 94.0], [94.2, 94.7, 97.1]], [[96.2, 97.4, 94.1], [97.4, 96.6, 96.2]]
    more = [[94.4, 95.4, 93.7], [95.0, 96.3, 95.5]], [[96.4, 95.5, 95.5], [96.2, 95.3, 95.3]]
    published = [np.array([*one, *other]) for one, other in zip([*first, *last], [*more[0], *more[1]], strict=True)]
    *_, known = compare(grid_of(factors, dict(zip(names, published, strict=True))))
    # statsmodels 0.15, AnovaRM within both: F of the interaction
    assert known.n * known.mean**2 / known.sd**2 == pytest.approx(3.39222615, rel=1e-5)
    report = make_report(grid_of(factors, {**results, names[3]: noisy(0.75)[0]}))
    assert report.headline.endswith("'swiglu x depth=6' is undecided against the sum of what each does alone")
    assert make_schedule(report.study).seeds == dict.fromkeys(names, 8), "all four run on for it"


def test_arms_of_several_sizes_are_compared_within_their_size_and_between(noisy):
    names = "cls, small", "cls, large", "mean, small", "mean, large"
    results = dict(zip(names, noisy(0.50, 0.90, 0.46, 0.94), strict=True))
    sized = grid_of({"arms": ["cls", "mean"], "sizes": ["small", "large"]}, results)
    found = [(one.arm, one.other, one.verdict) for one in compare(sized)]
    assert found[:2] == [("mean, small", "cls, small", "worse"), ("mean, large", "cls, large", "better")]
    assert found[2:] == [("mean x large", "cls, small", "better")]
    report = make_report(sized)
    assert report.recommendation.startswith("'mean' is with 'small' worse, by 2 points or more; with 'large' better")
    assert ": the answer flips." in report.recommendation
    three = {name: noisy(mean)[0] for name, mean in zip(names, (0.50, 0.90, 0.60, 0.908), strict=True)}
    sized = replace(sized, runs=bare_study(three).runs)
    assert "the difference changes with the size ('mean x large')" in make_report(sized).recommendation
    assert verdicts(analyse(sized))[-1]["other"] == SUM


def test_a_further_metric_is_asked_of_arms_that_differ_by_the_one_before_and_costs_no_alpha():
    draw, effect = np.random.default_rng(4), 0.005
    base, noise = draw.normal(0.9, 0.002, 20), draw.normal(0, 0.002, (4, 20))
    accuracy = {"cls": base, "mean": base + 0.02 + noise[0], "same": base + noise[1]}
    made = bare_study(accuracy, images=None, then={"test/ece": 0.005, "test/loss": 0.1}, smallest_effect=effect)
    for run in made.runs:
        gain = {"mean": -0.02}.get(run.arm, 0.0)
        ece, loss = 0.1 + gain + noise[2][run.seed] * (run.arm != "cls"), 40 * noise[3][run.seed] * (run.arm == "mean")
        run.results.update({"test/ece": ece, "test/loss": loss})
    found = {(one.metric, one.arm): one for one in compare_all(made)}
    assert [*found] == [("test/acc", "mean"), ("test/acc", "same"), ("test/ece", "mean"), ("test/loss", "mean")]
    assert [one.verdict for one in found.values()] == ["better", "equivalent", "better", "equivalent"], "less is better"
    assert [one.design.level for one in found.values()] == pytest.approx([0.025, 0.025, 0.0125, 0.00625])
    assert [one.design.gates for one in found.values()] == [True, True, True, False]
    report = make_report(made)
    assert report.headline == (
        "'mean' is better than 'cls', by 0.5 points or more; 'same' is equivalent to 'cls' (within 0.5 points); "
        "by test/ece 'mean' is better than 'cls', by 0.5 points or more; "
        "by test/loss 'mean' is equivalent to 'cls' (within 0.1)"
    )
    assert "Arms better or worse by test/acc are compared by test/ece, then test/loss too" in report.caveats[0]
    assert [table.rows[0][0] for name, table in report.tables.items() if "verdicts" in name] == ["mean"] * 3
    assert [one["metric"] for one in verdicts(report.analysis)] == [metric for metric, _ in found]
    page = make_page(report)
    assert page.index("test/ece against") < page.index("test/loss against") < page.index("How it was done")
    few = replace(made, runs=[run for run in made.runs if run.seed < 6])
    assert make_schedule(few).seeds == {"cls": 8, "mean": 8, "same": 6}
    assert [one.metric for one in make_schedule(few).comparisons if one.is_open] == ["test/loss"]


def test_a_further_metric_keeps_the_promise_where_one_with_all_of_alpha_would_not(ablation_errors, monkeypatch):
    """Where the first true difference is the smallest that matters, not better by it is false, and so is the second."""
    scenes = [ablation_errors.SCENES[f"then by another, {pair}, alike {alike}"] for pair, alike in WORST]
    rates = [ablation_errors.simulate(scene, 4000).false for scene in scenes]
    assert max(rates) <= 0.05
    design_of = ablation_errors.design_of
    naive = lambda rules, count: replace(design_of(rules, count), alpha=0.05, gates=False)  # noqa: E731
    monkeypatch.setattr(ablation_errors, "design_of", naive)
    assert min(ablation_errors.simulate(scene, 4000).false for scene in scenes) > 0.06


WORST = [("1 1", -1), ("1 1", 0), ("-1 1", 1)]
