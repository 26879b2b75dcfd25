import math
from functools import cache, partial
from itertools import pairwise

import pytest
import torch

from vit_lightning.data.batches import Loader, Request
from vit_lightning.data.images import Images
from vit_lightning.data.sampling import (
    epoch_order,
    evaluation_requests,
    nested_subset,
    step_weight,
    train_batch_count,
    train_requests,
)
from vit_lightning.random_keys import sample_keys

SPLITS = [
    (size, batch_size, ranks)
    for size in (1, 2, 3, 7, 8, 9, 10, 16, 17, 31, 64, 65, 100, 1797)
    for batch_size in (1, 2, 3, 8, 64, 2000)
    for ranks in (1, 2, 3, 7, 8)
    if size >= ranks and size < 200 * batch_size
]


def epoch_of(rank=0, ranks=1, *, size=23, batch_size=3, seed=0, completed=0, batches=None, subset=None, repetitions=1):
    facts = {"size": size, "batch_size": batch_size, "seed": seed, "completed": completed, "subset": subset}
    facts |= {"batches_per_epoch": train_batch_count(size, batch_size, ranks) if batches is None else batches}
    return list(train_requests(**facts, rank=rank, ranks=ranks, repetitions=repetitions))


@cache
def on_all_ranks(size, batch_size, ranks):
    return [epoch_of(rank, size=size, batch_size=batch_size, ranks=ranks) for rank in range(ranks)]


def indices(requests):
    return [index for request in requests for index in request.indices]


def images(count=20):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.arange(count) * 10)


def loader(dataset, requests, num_workers=0):
    return Loader(dataset, lambda: iter(requests), len(requests), num_workers=num_workers)


@pytest.mark.parametrize("size", [1, 100])
def test_epoch_order_has_each_image_once(size):
    state = torch.get_rng_state()
    assert sorted(epoch_order(2**32 - 1, 3, size)) == list(range(size))
    assert torch.equal(torch.get_rng_state(), state)


def test_epoch_orders_differ_between_epochs_and_seeds():
    orders = {tuple(epoch_order(seed, epoch, 100)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize(
    ("size", "batch_size", "ranks", "expected"),
    [(100, 10, 1, 10), (101, 10, 1, 11), (10, 4, 2, 2), (9, 4, 2, 1), (8, 4, 2, 1), (5, 100, 2, 1), (7, 1, 7, 1)],
)
def test_train_batch_count_by_hand(size, batch_size, ranks, expected):
    assert train_batch_count(size, batch_size, ranks) == expected


def test_an_epoch_has_each_image_once_in_as_many_batches_on_all_ranks_that_are_full_but_for_the_last():
    for size, batch_size, ranks in SPLITS:
        on_ranks = on_all_ranks(size, batch_size, ranks)
        assert sorted(index for requests in on_ranks for index in indices(requests)) == list(range(size))
        sizes = [[len(request.indices) for request in requests] for requests in on_ranks]
        assert {len(of_rank) for of_rank in sizes} == {train_batch_count(size, batch_size, ranks)}
        last = [of_rank.pop() for of_rank in sizes]
        assert all(set(of_rank) <= {batch_size} for of_rank in sizes), (size, batch_size, ranks)
        assert 0 < min(last) <= max(last) <= batch_size + (ranks > 1), (size, batch_size, ranks)
        assert max(last) - min(last) <= 1, (size, batch_size, ranks)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_a_step_weighs_all_its_images_alike_whatever_its_batches_and_ranks(group):
    for size, batch_size, ranks in SPLITS:
        on_ranks, counted = on_all_ranks(size, batch_size, ranks), train_batch_count(size, batch_size, ranks)
        for batches in {counted, max(1, counted // 2)}:
            facts = {"size": size, "batch_size": batch_size, "ranks": ranks, "batches": batches, "group": group}
            for first in range(0, batches, group):
                numbers = range(first, min(first + group, batches))
                sizes = [[len(requests[number].indices) for requests in on_ranks] for number in numbers]
                weights = [[step_weight(number, rank=rank, **facts) for rank in range(ranks)] for number in numbers]
                total = sum(map(sum, sizes))
                of_an_image = torch.tensor(weights, dtype=torch.float64) / torch.tensor(sizes) / (group * ranks)
                torch.testing.assert_close(of_an_image, torch.full_like(of_an_image, 1 / total))
                if total == batch_size * ranks * group:
                    assert weights == [[1.0] * ranks] * group


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_batches_of_the_epochs_order(ranks):
    order, step = epoch_order(0, 0, 23), 3 * ranks
    on_ranks = [epoch_of(rank, ranks=ranks) for rank in range(ranks)]
    for number, together in enumerate(list(zip(*on_ranks, strict=True))[:-1]):
        assert indices(together) == order[number * step : (number + 1) * step]
    assert indices(list(zip(*on_ranks, strict=True))[-1]) == order[(len(on_ranks[0]) - 1) * step :]


@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_are_those_of_seed_epoch_and_index(ranks):
    count = train_batch_count(23, 3, ranks)
    for request in epoch_of(ranks - 1, ranks=ranks, seed=9, completed=4 * count):
        assert request.keys == sample_keys(9, 4, torch.tensor(request.indices)).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_going_on_after_any_number_of_batches_gives_the_rest_of_the_same_sequence(ranks):
    count = train_batch_count(23, 3, ranks)
    for rank in range(ranks):
        epochs = [epoch_of(rank, ranks=ranks, completed=epoch * count) for epoch in range(3)]
        for completed in range(3 * count):
            epoch, done = divmod(completed, count)
            assert epoch_of(rank, ranks=ranks, completed=completed) == epochs[epoch][done:]


@pytest.mark.parametrize("completed", [0, 4, 8])
def test_limited_epochs_count_their_own_batches(completed):
    epoch, done = divmod(completed, 3)
    order = epoch_order(0, epoch, 23)
    first = epoch_of(completed=completed, batches=3)[0]
    assert first.indices == order[3 * done : 3 * done + 3]


def test_evaluation_has_each_image_once_in_as_many_batches_on_all_ranks():
    for size, batch_size, ranks in [*SPLITS, (1, 2, 3), (2, 1, 7)]:
        on_ranks = [
            evaluation_requests(size=size, batch_size=batch_size, rank=rank, ranks=ranks) for rank in range(ranks)
        ]
        assert sorted(index for requests in on_ranks for index in indices(requests)) == list(range(size))
        assert len({len(requests) for requests in on_ranks}) == 1, (size, batch_size, ranks)
        sizes = [len(request.indices) for requests in on_ranks for request in requests]
        assert min(sizes) > 0 or size < ranks, (size, batch_size, ranks)
        assert max(sizes) <= max(batch_size, 2 if ranks > 1 else 1), (size, batch_size, ranks)


def test_a_rank_without_an_image_of_a_split_has_an_empty_batch():
    requests = [evaluation_requests(size=2, batch_size=4, rank=rank, ranks=3) for rank in range(3)]
    assert requests == [[Request([0], None)], [Request([1], None)], [Request([], None)]]
    for workers in (0, 1):
        (batch,) = loader(images(), requests[2], num_workers=workers)
        assert (len(batch.images), len(batch.labels)) == (0, 0)


def test_evaluation_on_one_rank_keeps_the_order_and_has_no_keys():
    requests = evaluation_requests(size=23, batch_size=4, rank=0, ranks=1)
    assert indices(requests) == list(range(23))
    assert len(requests) == 6
    assert all(request.keys is None for request in requests)


def labels_of(counts):
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=generator)]


def test_fractions_are_nested_and_balanced():
    labels = labels_of([1000, 500, 100, 3])
    chosen = {share: nested_subset(labels, 7, fraction=share) for share in (0.01, 0.1, 0.2, 0.5, 1.0)}
    for small, large in pairwise(chosen.values()):
        assert {*small.tolist()} < {*large.tolist()}
    assert torch.bincount(labels[chosen[0.1]]).tolist() == [100, 50, 10, 1]
    assert torch.equal(chosen[1.0], torch.arange(len(labels)))
    assert torch.equal(chosen[0.1], chosen[0.1].sort().values)
    assert not torch.equal(chosen[0.1], nested_subset(labels, 8, fraction=0.1))


def test_shots_are_nested_and_lie_in_fractions():
    labels = labels_of([100, 50, 20])
    one, five = (nested_subset(labels, 0, shots=shots) for shots in (1, 5))
    assert torch.bincount(labels[five]).tolist() == [5, 5, 5]
    assert {*one.tolist()} < {*five.tolist()} < {*nested_subset(labels, 0, fraction=0.5).tolist()}


requests_of = partial(epoch_of, size=24, batch_size=4, seed=3)


def keyed(requests):
    return {pair for request in requests for pair in zip(request.indices, request.keys, strict=True)}


def test_a_subset_s_images_keep_their_keys():
    subset = torch.arange(0, 96, 4)
    requests = requests_of(0, 1, subset=subset)
    assert sorted(indices(requests)) == subset.tolist()
    assert keyed(requests) < keyed(requests_of(0, 1, size=96))


@pytest.mark.parametrize("repetitions", [2, 3, 5])
def test_repetitions_show_fewer_images_each_with_keys_of_its_own(repetitions):
    requests = requests_of(0, 1, repetitions=repetitions)
    shown = indices(requests)
    assert len(shown) == 24
    assert len(set(shown)) == math.ceil(24 / repetitions)
    assert requests_of(0, 1, repetitions=repetitions, completed=2) == requests[2:]
    pairs = keyed(requests)
    assert len({key for _, key in pairs}) == 24
    first = keyed(requests_of(0, 1))
    assert len(pairs & first) == len(set(shown))  # once with the key that it has without repetitions
    assert pairs == keyed(requests_of(0, 1, repetitions=repetitions, batch_size=7))
    assert pairs == keyed([r for rank in (0, 1) for r in requests_of(rank, 2, repetitions=repetitions)])
