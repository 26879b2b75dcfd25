"""Estimates of an ablation and doubts about its claims, measured on made-up results.

    python experiments/benchmarks/ablation_estimates.py estimates|images|skew|warnings [--studies 2000]

Estimates: bias of the mean. Images: coverage of the interval for new seeds on new
images. Skew: false claims of tests that allow for skew, in the place of the t-test. Warnings: how often arms are named
as unlike in spread.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from ablation_errors import Values
from scipy import special

from vit_lightning.report.sequential import Design, at, follow
from vit_lightning.report.variance import components, spread_p

ALPHA, MAX_SEEDS = 0.05, 40


def print_estimates(studies: int) -> None:
    """Errors of the mean where a comparison has stopped, over all and over those found better."""
    print(f"{'sd':>5}{'truth':>7}{'better, %':>11}{'above, %':>10}{'bias':>8}{'of better':>11}")
    for sd, truth in itertools.product((0.5, 1.7), (0.0, 0.25, 0.5, 1.0, 2.0)):
        draw = np.random.default_rng(1)
        course = follow(truth + sd * draw.standard_normal((studies, 60)), Design(1.0, ALPHA, 1, 60))
        errors, better = at(course.mean, course.stop) - truth, at(course.claims["better"], course.stop)
        of_better = errors[better].mean() if better.any() else math.nan
        line = f"{sd:5}{truth:7}{100 * better.mean():11.0f}{100 * np.mean(errors > 0):10.0f}{errors.mean():+8.3f}"
        print(f"{line}{of_better:+11.3f}", flush=True)


def print_images(studies: int) -> None:
    """Right and wrong answers of two arms: probits of the image, of its gain by the arm, and of the seed."""
    header = {
        "images": 7,
        "seeds": 6,
        "sd of gains": 12,
        "of seeds": 12,
        "over seeds, %": 15,
        "crossed, %": 12,
        "width": 7,
    }
    print("".join(f"{name:>{width}}" for name, width in header.items()))
    for images, seeds in ((360, 6), (360, 10), (360, 30), (2000, 10), (2000, 30)):
        for gains, by_seed in ((0.0, 0.1), (0.5, 0.1), (1.0, 0.05), (0.3, 0.3)):
            draw, held, wider = np.random.default_rng(1), [], []
            spreads = [math.sqrt(1 + 1.5**2 + by_seed**2 + one**2) for one in (0.0, gains)]
            truth = special.ndtr(2.2 / spreads[1]) - special.ndtr(2 / spreads[0])
            for _ in range(studies):
                hard = draw.normal(2, 1.5, images)
                logits = hard, hard + draw.normal(0.2, gains, images)
                right = [
                    draw.random((seeds, images)) < special.ndtr(one + draw.normal(0, by_seed, (seeds, 1)))
                    for one in logits
                ]
                table = right[1].astype(float) - right[0]
                parts, error = components(table), table.mean() - truth
                alone = special.stdtrit(seeds - 1, 0.975) * parts.error_new_seeds
                both = max(alone, special.stdtrit(parts.freedom_new_images, 0.975) * parts.error_new_images)
                held.append((abs(error) <= alone, abs(error) <= both))
                wider.append(both / alone)
            narrow, crossed = 100 * np.mean(held, axis=0)
            print(
                f"{images:7}{seeds:6}{gains:12}{by_seed:12}{narrow:15.1f}{crossed:12.1f}{np.median(wider):7.2f}",
                flush=True,
            )


def t_test(values: Values, pairs: Values) -> Values:
    """One-sided p of a mean above zero at each look (studies, arms, looks), as the other tests."""
    mean, sd, _ = moments(values, pairs)
    return special.stdtr(pairs - 1, -mean / sd * np.sqrt(pairs))


def hall(values: Values, pairs: Values) -> Values:
    """Hall's transformation (JRSS B 54, 1992), never more generous than the t-test."""
    mean, sd, skewness = moments(values, pairs)
    u = mean / sd
    t = u + skewness * u**2 / 3 + skewness**2 * u**3 / 27 + skewness / (6 * pairs)
    return special.stdtr(pairs - 1, -np.sqrt(pairs) * np.minimum(t, u))


def johnson(values: Values, pairs: Values) -> Values:
    """Johnson's modified t (JASA 73, 1978), never more generous than the t-test."""
    mean, sd, skewness = moments(values, pairs)
    u = mean / sd
    t = u + skewness / (6 * pairs) + skewness * u**2 / 3
    return special.stdtr(pairs - 1, -np.sqrt(pairs) * np.minimum(t, u))


def signed_ranks(values: Values, pairs: Values) -> Values:
    """Wilcoxon's signed ranks, exact."""
    found = []
    for n in pairs:
        ranks = np.abs(values[..., :n]).argsort(-1).argsort(-1) + 1
        found.append(_above(int(n))[(ranks * (values[..., :n] > 0)).sum(-1)])
    return np.stack(found, -1)


@functools.cache
def _above(n: int) -> Values:
    """Returns the probability of a sum of positive ranks, or a larger one."""
    counts = np.ones(1)
    for rank in range(1, n + 1):
        counts = np.convolve(counts, np.eye(1, rank + 1)[0] + np.eye(1, rank + 1, rank)[0])
    return counts[::-1].cumsum()[::-1] / 2.0**n


def trimmed(values: Values, pairs: Values) -> Values:
    """The t-test of the mean without a fifth at each end (Tukey and McLaughlin, Sankhya A 25, 1963)."""
    found = []
    for n in pairs:
        ordered, cut = np.sort(values[..., :n], -1), max(1, int(0.2 * n))
        kept = ordered[..., cut : n - cut]
        sd = np.clip(ordered, kept[..., :1], kept[..., -1:]).std(-1, ddof=1)
        t = kept.mean(-1) * (1 - 2 * cut / n) * math.sqrt(n) / sd
        found.append(special.stdtr(n - 2 * cut - 1, -t))
    return np.stack(found, -1)


def moments(values: Values, pairs: Values) -> tuple[Values, Values, Values]:
    """Returns mean, standard deviation and skewness of the first values at each look."""
    first, second, third = ((values**power).cumsum(-1)[..., pairs - 1] / pairs for power in (1, 2, 3))
    variance = np.maximum(second - first**2, 1e-300) * pairs / (pairs - 1)
    unbiased = pairs**2 / ((pairs - 1) * (pairs - 2))
    return first, np.sqrt(variance), (third - 3 * first * second + 2 * first**3) * unbiased / variance**1.5


TESTS = {"t": t_test, "Hall": hall, "Johnson": johnson, "signed ranks": signed_ranks, "trimmed t": trimmed}
KINDS = ("normal", "arms skewed", "baseline skewed", "baseline collapses")


def results_of(kind: str, arms: int, truth: float, studies: int, sd: float = 1.2, quieter: float = 10.0) -> Values:
    """Returns results (studies, arms, seeds) in smallest effects; skewed runs are exponential, with a tail upwards."""
    draw = np.random.default_rng(7)
    noise = draw.standard_normal((studies, arms, MAX_SEEDS))
    tails = draw.exponential(size=noise.shape) - 1
    if kind == "arms skewed":
        noise[:, 0] /= quieter
        noise[:, 1:] = tails[:, 1:]
    if kind == "baseline skewed":
        noise[:, 1:] /= quieter
        noise[:, 0] = tails[:, 0]
    if kind == "baseline collapses":  # 3 % of the runs end 8 standard deviations lower
        noise[:, 0] -= 8 * ((draw.random(noise[:, 0].shape) < 0.03) - 0.03)
    if kind == "last arm noisier":
        noise[:, -1] *= 2
    noise *= sd
    noise[:, 1:] += truth
    return noise


def print_skew(studies: int) -> None:
    print(f"{'false, % (answered, %)':<30}" + "".join(f"{name:>16}" for name in TESTS))
    for kind in KINDS:
        for arms in (3, 10):
            for truth in (0.0, 1.0):
                results = results_of(kind, arms, truth, studies)
                shown = [_errors(results[:, 1:] - results[:, :1], truth, test) for test in TESTS.values()]
                cells = "".join(f"{f'{false:.1f} ({answered:.0f})':>16}" for false, answered in shown)
                print(f"{f'{kind}, {arms} arms, truth {truth:g}':<38}{cells}", flush=True)


def _errors(gaps: Values, truth: float, test: Callable[[Values, Any], Values]) -> tuple[float, float]:
    """Returns the percentages of studies with a false claim, and of comparisons with an answer."""
    design = Design(1.0, ALPHA, gaps.shape[1], MAX_SEEDS)
    pairs = np.array(design.analyses)
    asked = {"better": gaps, "worse": -gaps, "not better": 1 - gaps, "not worse": 1 + gaps}
    made = {}
    for name, values in asked.items():
        level = design.level / 2 if name in ("better", "worse") else design.level
        made[name] = np.logical_or.accumulate(test(values, pairs) <= design.levels(level), -1)
    decided = made["better"] | made["worse"] | (made["not better"] & made["not worse"])
    ended = decided.copy()
    ended[..., -1] = True
    false = np.any([at(made[name], ended.argmax(-1)) for name in wrong_claims(truth)], axis=0)
    return 100 * float(false.any(-1).mean()), 100 * float(at(decided, ended.argmax(-1)).mean())


def print_warnings(studies: int) -> None:
    print(f"{'':<52}{'false, %':>9}{'warned, % of false':>20}{'warned, % of all':>18}")
    scenes = [(kind, 10.0) for kind in ("normal", "last arm noisier", "arms skewed", "baseline skewed")]
    for kind, quieter in [*scenes, ("arms skewed", 3.0), ("arms skewed", 1.0)]:
        for arms, sd, truth in itertools.product((3, 10), (0.3, 1.2), (0.0, 1.0)):
            results = results_of(kind, arms, truth, studies, sd, quieter)
            gaps = results[:, 1:] - results[:, :1]
            course = follow(gaps, Design(1.0, ALPHA, arms - 1, MAX_SEEDS))
            false = np.any([at(course.claims[name], course.stop) for name in wrong_claims(truth)], axis=(0, 2))
            pairs = np.array(course.pairs)[course.stop]
            warned = np.array([_is_unlike(*one) for one in zip(results, pairs, strict=True)])
            named = 100 * np.mean(warned[false]) if false.any() else math.nan
            name = f"{kind} ({quieter:g}), {arms} arms, sd {sd}, truth {truth:g}"
            print(f"{name:<52}{100 * false.mean():9.1f}{named:20.0f}{100 * warned.mean():18.1f}", flush=True)


def _is_unlike(results: Values, pairs: Values) -> bool:
    """Whether ``unlike_spreads`` names an arm of a study."""
    found = [spread_p(row[:n], results[0, :n]) for row, n in zip(results[1:], pairs, strict=True)]
    return min(found) <= ALPHA / len(found)


def wrong_claims(truth: float) -> list[str]:
    return [
        name for name, wrong in (("better", truth <= 0), ("worse", truth >= 0), ("not better", truth >= 1)) if wrong
    ]


def main() -> None:
    shown = {"estimates": print_estimates, "images": print_images, "skew": print_skew, "warnings": print_warnings}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=shown)
    parser.add_argument("--studies", type=int, default=2000)
    given = parser.parse_args()
    shown[given.what](given.studies)


if __name__ == "__main__":
    main()
