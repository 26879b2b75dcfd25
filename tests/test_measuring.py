"""Interleaved timing: what is called how often, and which way round a ratio is."""

import collections
import math

import pytest
import torch
from measuring import Rounds, combined, median, paired_rounds


def test_all_are_called_in_each_round_in_an_order_drawn_anew():
    called: list[str] = []
    steps = {name: lambda name=name: called.append(name) for name in "abc"}
    waited: list[int] = []
    result = paired_rounds(steps, 20, warmup=1, calls=2, synchronize=lambda: waited.append(len(called)))
    assert called[:3] == ["a", "b", "c"]
    groups = [called[3 + 6 * number :][:6] for number in range(20)]
    assert all(collections.Counter(group) == dict.fromkeys("abc", 2) for group in groups)
    assert len({tuple(group) for group in groups}) > 3
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == dict.fromkeys("abc", 20)
    assert waited == [3, *range(5, 124, 2)], "waits after the warm-up and after each that is timed"
    assert len(paired_rounds(steps, 20, limit_s=0.0).seconds["a"]) == 3
    assert len(paired_rounds(steps, 20, limit_s=0.0, least=12).seconds["a"]) == 12


def test_a_ratio_above_1_means_that_the_first_is_faster():
    result = Rounds({"ours": [1.0, 2.0, 4.0, 1.0], "theirs": [2.0, 4.0, 8.0, 8.0]})
    assert result.ratios("ours", "theirs") == [2.0, 2.0, 2.0, 8.0]
    median, low, high = result.ratio("ours", "theirs")
    assert (median, low) == pytest.approx((2.0, 2.0))
    assert 2.0 <= high <= 8.0
    assert str(Rounds({"a": [2.0], "b": [1.0]}).ratio("a", "b")) == "0.500 (0.500 to 0.500)"
    assert result.fastest(["theirs", "ours"]) == "ours"
    assert result.median("theirs") == 6.0


def test_the_intervals_cover_the_truth():
    draw = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(100):
        noisy = [(math.log(ratio) + 0.2 * torch.randn(30, generator=draw)).exp().tolist() for ratio in (0.5, 1.0, 4.0)]
        middle, low, high = combined([median(values, draws=200) for values in noisy])
        assert low < middle < high
        hits += low <= 2.0 ** (1 / 3) <= high
    assert 86 <= hits <= 100
