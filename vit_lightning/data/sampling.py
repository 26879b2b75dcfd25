"""The order of images in batches: a pure function of the seed and of the number of completed batches.

No order is stored anywhere: a resumed run continues at its batch counter, with any number of workers.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vit_lightning.data.batches import Request
from vit_lightning.random_keys import one_key, repeated_keys, sample_keys


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """Returns the order of ``size`` images in an epoch."""
    key = one_key(seed, epoch, -1)
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(key)).tolist()
    return order


def train_batch_count(size: int, batch_size: int, ranks: int) -> int:
    """Returns the batches of an epoch; the last is smaller, or a little larger if a rank would otherwise get none."""
    return max(1, math.ceil((size - ranks + 1) / (batch_size * ranks)))


def train_requests(
    *,
    size: int,
    batch_size: int,
    seed: int,
    completed: int,
    batches_per_epoch: int,
    rank: int,
    ranks: int,
    subset: Tensor | None = None,
    repetitions: int = 1,
) -> Iterator[Request]:
    """Yields the remaining requests of the epoch, after ``completed`` batches of the whole run.

    Each of ``size`` images comes once. With repetitions, an epoch shows size / repetitions images, each that many times
    in a row with other augmentations (Hoffer et al. 2020). ``subset`` holds the indices of a part of a dataset.
    """
    epoch, done = divmod(completed, batches_per_epoch)
    order = torch.tensor(epoch_order(seed, epoch, size)).repeat_interleave(repetitions)[:size]
    repetition = torch.arange(size) % repetitions
    indices = order if subset is None else subset[order]
    keys = repeated_keys(sample_keys(seed, epoch, indices), repetition)
    step = batch_size * ranks
    count = train_batch_count(size, batch_size, ranks)
    for number in range(done, count):
        together = torch.arange(number * step, (number + 1) * step if number < count - 1 else size)
        mine = torch.tensor_split(together, ranks)[rank]
        yield Request(indices[mine].tolist(), keys[mine].tolist())


def step_weight(number: int, *, size: int, batch_size: int, rank: int, ranks: int, batches: int, group: int) -> float:
    """Returns the factor on the mean loss of a batch with which an optimizer step has the mean over all its images.

    Lightning divides by ``group`` and DDP by ``ranks``, although the last step of an epoch may have fewer batches, and
    its last batch fewer images, which are not as many on each rank. Of all other steps it is 1.

    Args:
        number: number of the batch in its epoch, from 0.
        size: images of an epoch.
        batch_size: images of a batch on each rank.
        rank: number of the rank.
        ranks: number of ranks.
        batches: batches of an epoch, of which some may be left out (``limit_train_batches``).
        group: batches whose gradients are accumulated (``accumulate_grad_batches``).
    """
    step, count = batch_size * ranks, train_batch_count(size, batch_size, ranks)

    def together(batch: int) -> int:
        return step if batch < count - 1 else size - (count - 1) * step

    first = number - number % group
    images = sum(together(batch) for batch in range(first, min(first + group, batches)))
    whole, more = divmod(together(number), ranks)
    return (whole + (rank < more)) * ranks * group / images


def nested_subset(labels: Tensor, seed: int, *, fraction: float = 1.0, shots: int | None = None) -> Tensor:
    """Returns sorted indices of a part of each class; a larger part contains every smaller one."""
    rank = sample_keys(seed, -1, torch.arange(len(labels))).argsort(stable=True)
    chosen = []
    for label in torch.unique(labels):
        images = rank[labels[rank] == label]
        count = max(1, round(fraction * len(images))) if shots is None else shots
        chosen.append(images[:count])
    return torch.cat(chosen).sort().values


def evaluation_requests(*, size: int, batch_size: int, rank: int, ranks: int) -> list[Request]:
    """Returns requests for each image once over all ranks, as many on every rank (or ranks would wait for ever).

    Where there are more ranks than images, those without one have an empty request.
    """
    mine = torch.arange(size)[rank::ranks]
    count = max(1, min(math.ceil(math.ceil(size / ranks) / batch_size), size // ranks))
    return [Request(part.tolist(), None) for part in torch.tensor_split(mine, count) if size]
