"""Interleaved timing: what is called how often, and which way round a ratio is."""

from __future__ import annotations

import collections
import itertools
import math

import measuring
import pytest
import torch
from measuring import Rounds, combined, matrix_product, median, paired_rounds, peak_memory


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


def test_what_is_left_out_has_the_first_rounds_alone():
    asked: list[int] = []

    def leave_out(so_far: Rounds) -> list[str]:
        asked.append(len(so_far.seconds["a"]))
        return ["b"] if asked[-1] >= 10 else []

    result = paired_rounds({"a": int, "b": int}, 17, leave_out=leave_out)
    assert asked == [5, 10, 15]
    assert [len(result.seconds[name]) for name in "ab"] == [17, 10]
    firsts = zip(result.seconds["a"], result.seconds["b"], strict=False)
    assert result.ratios("a", "b") == [second / first for first, second in firsts]


def test_a_time_is_of_one_call(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(clock)))
    assert paired_rounds({"a": lambda: next(clock), "b": int}, 3, calls=4).seconds == {"a": [1.25] * 3, "b": [0.25] * 3}


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


def test_a_matrix_product_has_its_type_and_shape():
    product = matrix_product(2, 3, 5, torch.bfloat16)()
    assert (product.shape, product.dtype) == ((2, 5), torch.bfloat16)


def test_the_peak_counts_what_lives_at_once_and_no_views():
    weight = torch.ones(1000, requires_grad=True)

    def step():
        first = weight * 2.0  # 4 kB, kept by the product
        (first * first).sum().backward()
        weight.grad = None

    views = peak_memory(lambda: weight[:10].view(2, 5), torch.device("cpu"))
    one, apart = (
        peak_memory(call, torch.device("cpu")) for call in (lambda: weight * 2, lambda: (weight * 2, None)[1])
    )
    assert (views, one, apart) == (0, 4000, 4000)
    assert 12000 <= peak_memory(step, torch.device("cpu")) <= 20008
