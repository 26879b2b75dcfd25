"""The transform of a batch as it is on a device: without choices of the host, and compiled to one graph."""

from __future__ import annotations

import pytest
import torch

from vit_lightning import (
    ColorJitter,
    HorizontalFlip,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    ThreeAugment,
    TrivialAugment,
)
from vit_lightning import random_keys as drawing
from vit_lightning.data import augment, policies
from vit_lightning.data.batch_transform import BatchTransform
from vit_lightning.data.batches import Batch

CHANGES = [
    [RandomCrop(2), HorizontalFlip(), RandAugment(), RandomErasing(0.5)],
    [RandomResizedCrop(), TrivialAugment(), RandomAffine()],
    [ThreeAugment(), ColorJitter(hue=0.1)],
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: type(changes[0]).__name__)
def test_one_graph_gives_the_images_that_a_cpu_gives(monkeypatch, changes):
    images = torch.randint(0, 256, (60, 3, 20, 16), generator=torch.Generator().manual_seed(0)).byte()
    keys = drawing.sample_keys(0, 0, torch.arange(60))
    transform = BatchTransform(augment=changes, mixing=(), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1), repetitions=1)
    expected = transform(Batch(images, torch.zeros(60), torch.arange(60), keys), num_classes=0, key=0).images
    monkeypatch.setattr(policies, "host_chooses", lambda images: False)
    monkeypatch.setattr(drawing, "_calculate", lambda function, bits: function(bits))
    monkeypatch.setattr(augment, "_is_for_numpy", lambda images: False)
    torch._dynamo.reset()
    transform.compile(backend="aot_eager")
    assert torch.equal(transform._on_device(images, keys, 0), expected)
    assert not torch.equal(expected, transform.normalise(images))
