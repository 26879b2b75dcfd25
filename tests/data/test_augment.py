"""Random numbers from keys, and the augmentations that draw by them: alike in any batch, on a host and on a device."""

import math

import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from vit_lightning import AutoAugment, RandAugment, ThreeAugment, TimmRandAugment
from vit_lightning.data import augment
from vit_lightning.data.augment import (
    HorizontalFlip,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    affine,
)
from vit_lightning.errors import UserError
from vit_lightning.random_keys import _begun, _mix, mix, sample_keys, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# Vigna's splitmix64.c with seed 1234567
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def splitmix64(seed, number=0):
    bits = (seed + GOLDEN * (number + 1)) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def unsigned(tensor):
    return [value & MASK for value in tensor.tolist()]


def keys(count, seed=0, epoch=0):
    return sample_keys(seed, epoch, torch.arange(count))


def ramps(count, height, width):
    """Row + 1 in channel 0, column + 1 in channel 1: what is left of them tells the shift."""
    rows = torch.arange(1, height + 1).view(-1, 1).expand(height, width)
    columns = torch.arange(1, width + 1).expand(height, width)
    return torch.stack([rows, columns]).expand(count, 2, height, width).byte()


def test_mix_gives_the_published_numbers_as_streams():
    assert [splitmix64(1234567, number) for number in range(5)] == PUBLISHED
    assert [unsigned(mix(torch.tensor([1234567]), number))[0] for number in range(5)] == PUBLISHED


@pytest.mark.parametrize("stream", [0, 7])
def test_mix_equals_splitmix64_for_all_kinds_of_numbers(stream):
    bits = [0, 1, -1, 2**63 - 1, -(2**63), 1234567, -987654321] + [(i * GOLDEN) % 2**63 for i in range(50)]
    assert unsigned(mix(torch.tensor(bits), stream)) == [splitmix64(value & MASK, stream) for value in bits]


def test_mix_is_the_same_by_numpy_and_by_torch_and_for_streams_at_once():
    by_torch = [_mix(_begun(keys(1000), stream)) for stream in range(3, 6)]
    assert torch.equal(mix(keys(1000), 5), by_torch[-1])
    assert torch.equal(mix(keys(1000), range(3, 6)), torch.stack(by_torch))
    assert torch.equal(uniform(keys(1000), range(3, 6))[2], uniform(keys(1000), 5))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**32 - 1, 100_000)])
def test_sample_keys_are_nested_splitmix64(seed, epoch):
    indices = [0, 1, 59_999, -1, 2**40]
    start = splitmix64((splitmix64(seed) + epoch) & MASK)
    expected = [splitmix64((start + index) & MASK) for index in indices]
    assert unsigned(sample_keys(seed, epoch, torch.tensor(indices))) == expected
    assert torch.equal(sample_keys(5, 2, torch.tensor([3, 500], dtype=torch.int32)), keys(501, 5, 2)[[3, 500]])


def test_uniform_is_the_upper_24_bits():
    expected = [(splitmix64(value & MASK, 3) >> 40) / 2**24 for value in keys(100).tolist()]
    assert uniform(keys(100), 3).dtype is torch.float32
    assert uniform(keys(100), 3).tolist() == expected


def noise(count, height=24, width=20, channels=3):
    drawn = torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(0)).byte()
    drawn[: count // 8], drawn[count // 8 : count // 4] = 7, drawn[count // 8 : count // 4] // 50  # even and dark ones
    return drawn


def photographs():
    smooth = torch.nn.functional.interpolate(noise(12, 9, 8)[4:].float(), (220, 210), mode="bicubic")
    return smooth.clamp(0, 255).byte()


BATCHES = {"photographs": photographs}
BATCHES |= {str(shape): lambda shape=shape: noise(200, *shape) for shape in [(45, 38, 3), (28, 20, 1), (2, 9, 3)]}
CHANGES = [
    *(RandomCrop(2), HorizontalFlip(), RandomResizedCrop(), RandomErasing(0.7), RandomErasing(0.7, fill="black")),
    *(RandomAffine(), RandAugment(3, 9), RandAugment(1, 30), ThreeAugment()),
    *(AutoAugment(), AutoAugment("imagenet", fill=99), TimmRandAugment(3), TimmRandAugment(4, 10, 0)),
]


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_an_image_depends_on_its_key_alone_on_a_host_and_on_a_device(monkeypatch, change, kind):
    """A host changes them one by one, and blurs a few columns at a time; a device all at once."""
    batch = BATCHES[kind]()
    drawn, before, state = keys(len(batch)), batch.clone(), torch.get_rng_state()
    together = change(batch, drawn)
    assert (together.dtype, together.shape, together.is_contiguous()) == (torch.uint8, batch.shape, True)
    assert torch.equal(batch, before)
    assert not torch.equal(together, batch)
    parts = [change(batch[i : i + 7], drawn[i : i + 7]) for i in range(0, len(batch), 7)]
    assert torch.equal(together, torch.cat(parts))
    monkeypatch.setattr("vit_lightning.data.operations.host_chooses", lambda images: False)
    assert torch.equal(change(batch, drawn), together)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("padding", "size"), [(1, (4, 9)), (4, (10, 10))])
def test_random_crop_is_pad_and_slice_for_every_offset(padding, size):
    crop, drawn, choices = RandomCrop(padding), keys(1500), 2 * padding + 1
    middle = [side // 2 for side in size]
    seen = crop(ramps(1500, *size), drawn)[:, :, middle[0], middle[1]].long() - 1 - torch.tensor(middle) + padding
    shifts = [tuple(shift) for shift in seen.tolist()]
    batch = noise(1500, *size)
    padded = torch.nn.functional.pad(batch, [padding] * 4)
    expected = [
        image[:, top : top + size[0], left : left + size[1]] for image, (top, left) in zip(padded, shifts, strict=True)
    ]
    assert torch.equal(crop(batch, drawn), torch.stack(expected))
    assert set(shifts) == {(top, left) for top in range(choices) for left in range(choices)}


@pytest.mark.parametrize("padding", [0, 4, 100])
def test_the_largest_random_number_stays_inside_the_padded_image(monkeypatch, padding):
    monkeypatch.setattr(augment, "uniform", lambda keys, streams: torch.full((len(streams), len(keys)), 1 - 2**-24))
    batch = ramps(1, 5, 5)
    expected = torch.nn.functional.pad(batch, [padding] * 4)[..., 2 * padding :, 2 * padding :]
    assert torch.equal(RandomCrop(padding)(batch, keys(1)), expected)


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_horizontal_flip_mirrors_the_asked_share_exactly(p):
    batch = noise(10_000, 2, 3)
    batch[..., 0], batch[..., 2] = 1, 2
    out = HorizontalFlip(p)(batch, keys(10_000))
    flipped = out[:, 0, 0, 0] == 2
    assert torch.equal(out[flipped], batch[flipped].flip(-1))
    assert torch.equal(out[~flipped], batch[~flipped])
    assert abs(flipped.float().mean().item() - p) <= 4 * (p * (1 - p) / 10_000) ** 0.5


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: RandomCrop(-1), ["padding"]),
        (lambda: HorizontalFlip(float("nan")), ["p"]),
        (lambda: RandomAffine(degrees=-1.0, scale=(1.2, 0.8)), ["degrees", "scale"]),
        (lambda: RandomErasing(p=2.0, scale=(0.5, 0.2), ratio=(0.0, 1.0)), ["p", "scale", "ratio"]),
        (lambda: RandAugment(num_ops=0, magnitude=31), ["num_ops", "magnitude"]),
    ],
)
def test_bad_settings_are_named_at_once(made, named):
    with pytest.raises(UserError) as caught:
        made()
    assert [problem.split("=")[0].rpartition(".")[2] for problem in caught.value.problems] == named


@pytest.mark.parametrize("size", [(8, 8), (12, 20)])
@pytest.mark.parametrize(
    ("degrees", "factor", "right", "down"), [(30, 1, 0, 0), (-20, 1.3, 0, 0), (0, 1, 2, -3), (15, 0.8, 1, 2)]
)
def test_affine_equals_torchvision_for_fixed_parameters(size, degrees, factor, right, down):
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    given = {"angle": degrees, "translate": [right, down], "scale": factor, "shear": [0.0, 0.0]}
    theirs = v2.functional.affine(images, **given, interpolation=v2.InterpolationMode.BILINEAR)
    both = torch.ones(2)
    shifts = (2 * right / size[1] * both, 2 * down / size[0] * both)
    ours = affine(images, math.radians(degrees) * both, factor * both, *shifts)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("size", [(24, 20), (8, 8), (10, 40)])
def test_resized_crops_are_torchvision_s_for_their_boxes(size):
    crop, batch = RandomResizedCrop((0.2, 1.0)), noise(60, *size)
    boxes = torch.stack(crop.boxes(keys(60), *size), dim=1).tolist()
    expected = [v2.functional.resized_crop(i, *box, size=size) for i, box in zip(batch, boxes, strict=True)]
    assert (crop(batch, keys(60)).int() - torch.stack(expected).int()).abs().max() <= 1  # 0 with AVX
    assert len({tuple(box) for box in boxes}) > 30


def test_boxes_lie_inside_and_have_the_asked_area_and_ratio():
    top, left, height, width = RandomResizedCrop((0.3, 0.6), (0.5, 2.0)).boxes(keys(20_000), 200, 300)
    assert min(top.min(), left.min()) == 0
    assert (top + height).max() == 200
    assert (left + width).max() == 300
    area, ratio = height * width / 60_000, width / height
    assert 0.295 < area.min() < 0.305
    assert 0.595 < area.max() < 0.605
    assert 0.49 < ratio.min() < 0.52
    assert 1.95 < ratio.max() < 2.03
    _, _, height, width = RandomResizedCrop((0.3, 0.6), (1.0, 1.0)).boxes(keys(20_000), 1000, 1000)
    assert stats.kstest((height * width / 1e6).double().numpy(), stats.uniform(0.3, 0.3).cdf).statistic < 0.012


def test_where_no_box_fits_the_whole_image_is_shown_and_nothing_is_erased():
    batch = noise(20, 4, 100)
    assert torch.equal(RandomResizedCrop((0.9, 1.0), (1.0, 1.0))(batch, keys(20)), batch)
    assert torch.equal(RandomErasing(1.0, (0.9, 1.0), (1.0, 1.0))(batch, keys(20)), batch)


@pytest.mark.parametrize("fill", ["black", "noise"])
def test_erasing_covers_the_box_alone_of_the_asked_share(fill):
    erasing, batch = RandomErasing(0.4, fill=fill), noise(8000)[2000:7000]
    boxes = torch.stack(erasing._boxes.boxes(keys(5000), 24, 20), dim=1).tolist()
    out = erasing(batch, keys(5000))
    changed = (out != batch).flatten(1).any(1)
    assert abs(changed.float().mean() - 0.4) < 0.03
    covers = []
    for before, after, (top, left, height, width), erased in zip(batch, out, boxes, changed, strict=True):
        cover = after[:, top : top + height, left : left + width]
        expected = v2.functional.erase(before, top, left, height, width, cover) if erased else before
        assert torch.equal(after, expected)
        covers += [cover.flatten()] if erased else []
    values = torch.cat(covers)
    if fill == "black":
        assert not values.any()
    else:
        assert stats.chisquare(torch.bincount(values.long(), minlength=256).numpy()).pvalue > 1e-3
