import random

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import v2

from vit_lightning import CutMix, Digits, MixUp, UserError
from vit_lightning.data.batch_transform import BatchTransform
from vit_lightning.data.batches import Batch


def batch(count=6, height=9, width=12):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, height, width, generator=generator), torch.arange(count) % 4


class Fixed:
    """A distribution that always draws the same."""

    def __init__(self, value):
        self.value = value

    def sample(self, shape):
        return torch.tensor(self.value)


def share_of(key, alpha):
    return random.Random(key).betavariate(alpha, alpha)


@pytest.mark.parametrize("key", range(20))
def test_mixup_is_torchvision_s_for_its_share(key):
    images, labels = batch()
    theirs = v2.MixUp(alpha=0.8, num_classes=4)
    theirs._dist = Fixed([share_of(key, 0.8)])
    expected_images, expected_targets = theirs(images, labels)
    mixed, targets = MixUp(0.8)(images, F.one_hot(labels, 4), key=key)
    torch.testing.assert_close(mixed, expected_images, rtol=0, atol=1e-6)
    torch.testing.assert_close(targets, expected_targets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("key", range(20))
def test_cutmix_is_torchvision_s_for_its_share_and_middle(key, monkeypatch):
    images, labels = batch()
    draw = random.Random(key)
    share = draw.betavariate(1.0, 1.0)
    middle = iter([draw.randrange(12), draw.randrange(9)])
    theirs = v2.CutMix(alpha=1.0, num_classes=4)
    theirs._dist = Fixed([share])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([next(middle)]))
    expected_images, expected_targets = theirs(images, labels)
    mixed, targets = CutMix(1.0)(images, F.one_hot(labels, 4), key=key)
    assert torch.equal(mixed, expected_images)
    torch.testing.assert_close(targets, expected_targets, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mixing", [MixUp(), CutMix()], ids=["MixUp", "CutMix"])
def test_a_key_draws_the_same_again_and_leaves_its_input_alone(mixing):
    images, labels = batch()
    before = images.clone()
    results = [mixing(images, F.one_hot(labels, 4), key=key) for key in (1, 1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    assert torch.equal(images, before)
    assert all(torch.allclose(targets.sum(1), torch.ones(6)) for _, targets in results)


HALF = [MixUp(p=0.25), CutMix(p=0.25)]


@pytest.mark.parametrize(
    ("mixing", "expected"),
    [
        ([MixUp()], (1.0, 0.0)),
        ([MixUp(), CutMix()], (0.5, 0.5)),
        (HALF, (0.25, 0.25)),  # SPT's mix_prob of 0.5, or timm's mixup_prob
        ([MixUp(), CutMix(p=0.3)], (0.7, 0.3)),  # timm's mixup_switch_prob of 0.3
        ([CutMix(p=0.0)], (0.0, 0.0)),
    ],
)
def test_a_batch_is_mixed_in_one_way_or_not_at_all_with_the_asked_probability(mixing, expected):
    transform = BatchTransform(augment=[], mixing=mixing, mean=(0.5,), std=(0.2,), repetitions=1)
    pixels = torch.randint(0, 256, (3, 1, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    given = Batch(pixels, torch.arange(3), torch.arange(3), torch.arange(3))
    plain, counts = transform.normalise(pixels), [0, 0]
    for key in range(800):
        batch = transform(given, num_classes=4, key=key * 7919)
        pasted = all((batch.images[i] == plain[i]).logical_or(batch.images[i] == plain[i - 1]).all() for i in range(3))
        if batch.targets.max(1).values.min() < 1.0:
            counts[pasted] += 1
        else:
            assert torch.equal(batch.labels, given.labels)
        off = transform(given, num_classes=4, key=key * 7919, mixes=False)
        assert torch.equal(off.images, plain)
        assert torch.equal(off.targets, F.one_hot(given.labels, 4).float())
    missing = 0.07 if expected[1] else 0.0  # boxes of less than a pixel
    assert counts[0] / 800 == pytest.approx(expected[0], abs=0.05 if expected[0] else 0.0)
    assert counts[1] / 800 == pytest.approx(expected[1] * (1 - missing), abs=0.06 if expected[1] else 0.0)


def test_bad_values_are_named():
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match=r"mixing\.MixUp\.alpha"):
            MixUp(alpha)
    with pytest.raises(UserError, match=r"mixing: sum of p=1\.2 must be at most 1"):
        Digits(mixing=[MixUp(p=0.6), CutMix(p=0.6)])
    with pytest.raises(UserError, match=r"mixing\.CutMix\.p=1\.5 must be between 0 and 1"):
        CutMix(p=1.5)


@pytest.mark.parametrize("mixing", [MixUp(), CutMix()], ids=["MixUp", "CutMix"])
def test_an_image_that_is_repeated_is_not_mixed_with_itself(mixing):
    images = torch.arange(4.0).repeat_interleave(3)[:, None, None, None].expand(-1, 1, 8, 8)
    labels = images[:, 0, 0, 0].long()
    for key in range(5):
        mixed, targets = mixing(images, F.one_hot(labels, 4).float(), key=key, repetitions=3)
        assert torch.equal((targets > 0).sum(dim=1).unique(), (targets[0] > 0).sum()[None])  # all alike
        shares = targets @ torch.arange(4.0)
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), shares)
        own = targets.gather(1, labels[:, None])[:, 0]
        assert torch.allclose(own, own[0].expand(12)), "all keep the same share"
