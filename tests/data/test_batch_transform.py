"""The transform of a batch as it is on a device: without choices of the host, and compiled to one graph."""

import pytest
import torch
from torch._dynamo.utils import counters

from vit_lightning import (
    AutoAugment,
    HorizontalFlip,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    ThreeAugment,
    TimmRandAugment,
)
from vit_lightning import random_keys as drawing
from vit_lightning.data import operations, policies
from vit_lightning.data.batch_transform import BatchTransform
from vit_lightning.data.batches import Batch

CHANGES = [
    pytest.param([AutoAugment(fill=99), RandomCrop(2), HorizontalFlip(), RandomErasing(0.5)], id="crop"),
    pytest.param(
        [RandomResizedCrop(), RandomAffine(), RandAugment(), TimmRandAugment()],
        id="resized crop",
        marks=pytest.mark.full,
    ),
    pytest.param([ThreeAugment()], id="colours", marks=pytest.mark.full),
]


@pytest.mark.parametrize("changes", CHANGES)
def test_one_graph_gives_the_images_that_a_cpu_gives(monkeypatch, changes):
    images = torch.randint(0, 256, (60, 3, 20, 16), generator=torch.Generator().manual_seed(0)).byte()
    keys = drawing.sample_keys(0, 0, torch.arange(60))
    transform = BatchTransform(augment=changes, mixing=(), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1), repetitions=1)
    expected = transform(Batch(images, torch.zeros(60), torch.arange(60), keys), num_classes=0, key=0).images
    monkeypatch.setattr(operations, "host_chooses", lambda images: False)
    monkeypatch.setattr(drawing, "_calculate", lambda function, bits: function(bits))
    torch._dynamo.reset()
    transform.compile(backend="aot_eager")
    counters.clear()
    for count in (60, 59, 1, 60):  # without damaged images, or the last of an epoch
        assert torch.equal(transform._on_device(images[:count], keys[:count], 0), expected[:count])
    assert counters["stats"]["unique_graphs"] == 1
    assert not torch.equal(expected, transform.normalise(images))


@pytest.mark.full
def test_inductor_draws_and_moves_the_same(monkeypatch):
    """Also where a place is midway between two; without blends, whose sums a CPU's eager operators round once."""
    images = torch.randint(0, 256, (400, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    keys = drawing.sample_keys(0, 0, torch.arange(400))
    policy, unchanged = AutoAugment(), torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 255.0, 256.0, 0.0])
    monkeypatch.setattr(operations, "host_chooses", lambda images: False)
    monkeypatch.setattr(policies, "_parameters", lambda scale, channels: unchanged.expand(scale.table().numel(), -1))
    monkeypatch.setattr(drawing, "_calculate", lambda function, bits: function(bits))
    moved, draws = policy(images, keys), drawing.uniform(keys, range(10, 24))
    assert not torch.equal(moved, images)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(policy, fullgraph=True)(images, keys), moved)
    assert torch.equal(torch.compile(drawing.uniform, fullgraph=True)(keys, range(10, 24)), draws)
