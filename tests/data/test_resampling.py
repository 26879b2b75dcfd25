from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional

from vit_lightning.data.resampling import blur_weights, resample, resize_weights


def photographs(count, height, width):
    """Smooth with some noise, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    noise = torch.rand(count, 3, height, width, generator=generator) * 0.1
    return ((smooth + noise) / 1.1 * 255).to(torch.uint8)


@pytest.mark.parametrize("box", [(0, 0, 40, 50), (3, 7, 20, 30), (10, 2, 5, 45), (39, 49, 1, 1), (0, 0, 32, 24)])
def test_a_box_is_resized_as_torchvision_resizes_it(box):
    images = photographs(4, 40, 50)
    top, left, height, width = (torch.tensor([value]) for value in box)
    rows, columns = resize_weights(top, height, old=40, new=32), resize_weights(left, width, old=50, new=24)
    ours = resample(images, rows.expand(4, -1, -1), columns.expand(4, -1, -1))
    # in float and rounded, for torchvision's own arithmetic with 8-bit images rounds its weights
    theirs = functional.resized_crop(images.double(), *box, size=[32, 24], antialias=True)
    assert (ours - theirs).abs().max() <= 1.01
    assert (ours - theirs).abs().mean() < 0.36
    assert (ours.int() - functional.resized_crop(images, *box, size=[32, 24], antialias=True).int()).abs().max() <= 1


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_a_blur_is_torchvision_s(sigma):
    images = photographs(4, 33, 20)
    weights = [blur_weights(torch.full((4,), sigma), size=size, radius=6) for size in (33, 20)]
    ours = resample(images, *weights)
    theirs = functional.gaussian_blur(images, [13, 13], [sigma, sigma])
    assert (ours.int() - theirs.int()).abs().max() <= 1


def test_the_whole_of_an_image_keeps_its_pixels_and_an_even_one_its_value():
    images = photographs(3, 20, 20)
    whole = resize_weights(torch.zeros(3), torch.full((3,), 20), old=20, new=20)
    assert torch.equal(resample(images, whole, whole), images)
    part = resize_weights(torch.tensor([3.0]), torch.tensor([13.0]), old=20, new=20)
    even = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 20, 20)
    assert torch.equal(resample(even, part.expand(256, -1, -1), part.expand(256, -1, -1)), even)


def test_sums_are_exact_in_any_order():
    """What makes the result independent of how a kernel sums, and of the batch."""
    images = photographs(8, 224, 224)
    weights = resize_weights(torch.arange(8.0), torch.linspace(50, 210, 8), old=224, new=224)
    for rows in (weights, weights[:, :, torch.randperm(224)]):
        pixels = images.flatten(1, 2).float()
        scaled = weights.mul(1 << 15)
        assert torch.equal(scaled, scaled.round())
        exact = pixels.double() @ scaled.transpose(1, 2)
        assert torch.equal((pixels @ scaled.float().transpose(1, 2)).double(), exact)
        assert len(rows) == 8
