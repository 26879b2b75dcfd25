import math

import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

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
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(seed, number=0):
    bits = (seed + GOLDEN * (number + 1)) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def unsigned(tensor):
    return [value & MASK for value in tensor.tolist()]


def keys(count, seed=0, epoch=0):
    return sample_keys(seed, epoch, torch.arange(count))


def ramps(count, height, width, dtype=torch.uint8):
    """Row + 1 in channel 0, column + 1 in channel 1: what is left of them tells the shift."""
    rows = torch.arange(1, height + 1).view(-1, 1).expand(height, width)
    columns = torch.arange(1, width + 1).expand(height, width)
    return torch.stack([rows, columns]).expand(count, 2, height, width).to(dtype)


def offsets(crop, images_keys, size):
    """(top, left) that each key gives, of the window in the padded image."""
    seen = crop(ramps(len(images_keys), size, size), images_keys).long()
    middle = size // 2
    return [(int(image[0, middle, middle]) - 1 - middle, int(image[1, middle, middle]) - 1 - middle) for image in seen]


def test_reference_gives_the_published_numbers():
    assert [splitmix64(1234567, number) for number in range(5)] == PUBLISHED


def test_mix_gives_the_published_numbers_as_streams():
    assert [unsigned(mix(torch.tensor([1234567]), number))[0] for number in range(5)] == PUBLISHED


@pytest.mark.parametrize("stream", [0, 1, 7])
def test_mix_equals_splitmix64_for_all_kinds_of_numbers(stream):
    bits = [0, 1, -1, 2**63 - 1, -(2**63), 1234567, -987654321] + [(i * GOLDEN) % 2**63 for i in range(50)]
    assert unsigned(mix(torch.tensor(bits), stream)) == [splitmix64(value & MASK, stream) for value in bits]


def test_mix_is_the_same_by_numpy_and_by_torch_and_for_streams_at_once():
    by_torch = [_mix(_begun(keys(1000), stream)) for stream in range(3, 6)]
    assert torch.equal(mix(keys(1000), 5), by_torch[-1])
    assert torch.equal(mix(keys(1000), range(3, 6)), torch.stack(by_torch))
    assert torch.equal(uniform(keys(1000), range(3, 6))[2], uniform(keys(1000), 5))


def test_mix_does_not_write_into_its_input():
    bits = torch.arange(5)
    mix(bits)
    assert bits.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 3), (2**32 - 1, 100_000)])
def test_sample_keys_are_nested_splitmix64(seed, epoch):
    indices = [0, 1, 59_999, -1, 2**40]
    start = splitmix64((splitmix64(seed) + epoch) & MASK)
    expected = [splitmix64((start + index) & MASK) for index in indices]
    assert unsigned(sample_keys(seed, epoch, torch.tensor(indices))) == expected


def test_sample_keys_depend_on_nothing_but_seed_epoch_and_index():
    everything = sample_keys(5, 2, torch.arange(1000))
    torch.manual_seed(123)
    torch.rand(10)
    some = torch.tensor([999, 3, 3, 500])
    assert torch.equal(sample_keys(5, 2, some), everything[some])
    assert torch.equal(sample_keys(5, 2, some.to(torch.int32)), everything[some])


def test_sample_keys_differ_for_each_seed_epoch_and_index():
    all_keys = torch.cat([keys(1000, seed, epoch) for seed in range(10) for epoch in range(10)])
    assert len(all_keys.unique()) == 100_000


def test_random_numbers_leave_torchs_generator_alone():
    state = torch.get_rng_state()
    batch = torch.zeros(8, 3, 6, 6)
    HorizontalFlip()(RandomCrop()(batch, keys(8)), keys(8))
    assert torch.equal(torch.get_rng_state(), state)


def test_uniform_is_the_upper_24_bits():
    expected = [(splitmix64(value & MASK, 3) >> 40) / 2**24 for value in keys(100).tolist()]
    assert uniform(keys(100), 3).dtype is torch.float32
    assert uniform(keys(100), 3).tolist() == expected


@pytest.mark.parametrize("stream", [0, 1, 2, 3])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1)])
def test_uniform_is_uniform(seed, epoch, stream):
    draws = uniform(keys(100_000, seed, epoch), stream).double()
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean().item() - 1 / 2) < 4 * (1 / 12 / 100_000) ** 0.5
    assert abs(draws.var().item() - 1 / 12) < 4 * (1 / 180 / 100_000) ** 0.5
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        lambda: uniform(keys(100_000), 2),
        lambda: uniform(keys(100_000, seed=1), 1),
        lambda: uniform(keys(100_000, epoch=1), 1),
        lambda: uniform(keys(100_000), 1).roll(1),
        lambda: uniform(mix(keys(100_000), 1), 1),
    ],
    ids=["stream", "seed", "epoch", "next image", "mixed again"],
)
def test_uniform_numbers_are_independent(other):
    pairs = torch.stack([uniform(keys(100_000), 1), other()])
    counts = torch.histogramdd(pairs.T.contiguous(), [10, 10], range=[0.0, 1.0, 0.0, 1.0]).hist
    assert stats.chisquare(counts.flatten().numpy()).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("padding", [1, 2, 4])
def test_random_crop_is_pad_and_slice_for_every_offset(padding, dtype):
    choices = 2 * padding + 1
    crop, batch_keys = RandomCrop(padding), keys(1500)
    shifts = offsets(crop, batch_keys, size=10)
    shifts = [(top + padding, left + padding) for top, left in shifts]
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(1, 256, (1500, 3, 10, 10), generator=generator).to(dtype)
    padded = torch.nn.functional.pad(batch, [padding] * 4)
    expected = [image[:, top : top + 10, left : left + 10] for image, (top, left) in zip(padded, shifts, strict=True)]
    out = crop(batch, batch_keys)
    assert out.dtype is dtype
    assert torch.equal(out, torch.stack(expected))
    assert set(shifts) == {(top, left) for top in range(choices) for left in range(choices)}


def test_random_crop_offsets_are_equally_likely():
    shifts = offsets(RandomCrop(2), keys(20_000), size=6)
    counts = [shifts.count((top, left)) for top in range(-2, 3) for left in range(-2, 3)]
    assert sum(counts) == 20_000
    assert stats.chisquare(counts).pvalue > 1e-3


def test_random_crop_of_rectangles():
    batch = ramps(500, 4, 9)
    out = RandomCrop(1)(batch, keys(500))
    windows = torch.nn.functional.pad(batch[0], [1] * 4).unfold(1, 4, 1).unfold(2, 9, 1).permute(1, 2, 0, 3, 4)
    windows = {tuple(window.flatten().tolist()) for window in windows.flatten(0, 1)}
    assert {tuple(image.flatten().tolist()) for image in out} == windows
    assert len(windows) == 9


def test_what_comes_in_at_the_border_is_black():
    out = RandomCrop(3)(torch.full((200, 3, 8, 8), 255, dtype=torch.uint8), keys(200))
    assert set(out.unique().tolist()) == {0, 255}
    black = (out == 0).all(1)
    assert torch.equal(black, (out == 0).any(1))
    assert black[:, 0].all(-1).any()
    assert black[:, -1].all(-1).any()
    assert not black[:, 3:5, 3:5].any()


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 4, 8, 16, 100])
def test_the_largest_random_number_stays_inside_the_padded_image(monkeypatch, padding):
    monkeypatch.setattr(augment, "uniform", lambda keys, streams: torch.full((len(streams), len(keys)), 1 - 2**-24))
    batch = ramps(1, 5, 5)
    expected = torch.nn.functional.pad(batch, [padding] * 4)[..., 2 * padding :, 2 * padding :]
    assert torch.equal(RandomCrop(padding)(batch, keys(1)), expected)


def test_random_crop_without_padding_changes_nothing():
    batch = ramps(10, 5, 5)
    assert torch.equal(RandomCrop(0)(batch, keys(10)), batch)


@pytest.mark.parametrize("change", [RandomCrop(2), HorizontalFlip()], ids=["crop", "flip"])
def test_a_batch_of_one_equals_a_batch_of_many(change):
    batch = torch.rand(40, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    together = change(batch, keys(40))
    alone = [change(batch[i : i + 1], keys(40)[i : i + 1]) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, batch)


@pytest.mark.parametrize("change", [RandomCrop(2), HorizontalFlip(1.0)], ids=["crop", "flip"])
def test_changes_do_not_write_into_the_images(change):
    batch = torch.rand(40, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    before = batch.clone()
    change(batch, keys(40))
    assert torch.equal(batch, before)


@pytest.mark.parametrize("change", [RandomCrop(2), HorizontalFlip()], ids=["crop", "flip"])
def test_changes_give_contiguous_images_of_the_same_shape(change):
    out = change(torch.zeros(7, 3, 6, 5, dtype=torch.uint8), keys(7))
    assert out.shape == (7, 3, 6, 5)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_horizontal_flip_mirrors_the_asked_share_exactly(p, dtype):
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, 256, (10_000, 2, 2, 3), generator=generator).to(dtype)
    batch[..., 0], batch[..., 2] = 1, 2
    out = HorizontalFlip(p)(batch, keys(10_000))
    flipped = out[:, 0, 0, 0] == 2
    mirrored = torch.stack([batch[..., 2], batch[..., 1], batch[..., 0]], dim=-1)
    assert out.dtype is dtype
    assert torch.equal(out[flipped], mirrored[flipped])
    assert torch.equal(out[~flipped], batch[~flipped])
    assert abs(flipped.float().mean().item() - p) <= 4 * (p * (1 - p) / 10_000) ** 0.5


def test_flip_and_crop_of_the_same_key_are_independent():
    shifts = offsets(RandomCrop(1), keys(20_000), size=4)
    batch = torch.tensor([0.0, 1.0]).expand(20_000, 1, 1, 2)
    flips = HorizontalFlip()(batch, keys(20_000))[:, 0, 0, 0].long().tolist()
    counts = torch.zeros(2, 3, 3)
    for flip, (top, left) in zip(flips, shifts, strict=True):
        counts[flip, top + 1, left + 1] += 1
    assert stats.chisquare(counts.flatten().numpy()).pvalue > 1e-3


def test_bad_settings_are_errors_with_their_values():
    with pytest.raises(UserError, match="padding=-1 must be at least 0"):
        RandomCrop(-1)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match=f"p={p} must be between 0 and 1"):
            HorizontalFlip(p)


@pytest.mark.parametrize("size", [(8, 8), (12, 20)])
@pytest.mark.parametrize(
    ("degrees", "factor", "right", "down"),
    [(0, 1, 0, 0), (30, 1, 0, 0), (-20, 1.3, 0, 0), (0, 1, 2, -3), (15, 0.8, 1, 2)],
)
def test_affine_equals_torchvision_for_fixed_parameters(size, degrees, factor, right, down):
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    theirs = v2.functional.affine(
        images,
        angle=degrees,
        translate=[right, down],
        scale=factor,
        shear=[0.0, 0.0],
        interpolation=v2.InterpolationMode.BILINEAR,
    )
    both = torch.ones(2)
    shifts = (2 * right / size[1] * both, 2 * down / size[0] * both)
    ours = affine(images, math.radians(degrees) * both, factor * both, *shifts)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_random_affine_draws_within_its_limits_for_each_image_by_itself():
    images = torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    keys = sample_keys(0, 0, torch.arange(64))
    augment = RandomAffine(10.0, (0.9, 1.1), 0.1)
    together = augment(images, keys)
    assert together.dtype == torch.uint8
    assert all(torch.equal(together[i : i + 1], augment(images[i : i + 1], keys[i : i + 1])) for i in range(64))
    assert torch.equal(RandomAffine(0.0, (1.0, 1.0), 0.0)(images, keys), images)
    assert not torch.equal(together, images)


def test_random_affine_refuses_what_cannot_be():
    with pytest.raises(UserError) as caught:
        RandomAffine(degrees=-1.0, scale=(1.2, 0.8))
    assert len(caught.value.problems) == 2


def noise(count, height=24, width=20):
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(0)).byte()


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


def test_areas_are_evenly_distributed_where_all_fit():
    _, _, height, width = RandomResizedCrop((0.3, 0.6), (1.0, 1.0)).boxes(keys(20_000), 1000, 1000)
    assert stats.kstest((height * width / 1e6).double().numpy(), stats.uniform(0.3, 0.3).cdf).statistic < 0.012


def test_where_no_box_fits_the_whole_image_is_shown_and_nothing_is_erased():
    batch = noise(20, 4, 100)
    assert torch.equal(RandomResizedCrop((0.9, 1.0), (1.0, 1.0))(batch, keys(20)), batch)
    assert torch.equal(RandomErasing(1.0, (0.9, 1.0), (1.0, 1.0))(batch, keys(20)), batch)


@pytest.mark.parametrize("fill", ["black", "noise"])
def test_erasing_covers_the_box_alone_of_the_asked_share(fill):
    erasing, batch = RandomErasing(0.4, fill=fill), noise(5000)
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


@pytest.mark.parametrize("size", [(24, 20), (7, 33), (64, 64)])
@pytest.mark.parametrize("change", [RandomResizedCrop(), RandomErasing(0.7), RandomErasing(0.7, fill="black")])
def test_boxes_on_a_cpu_hold_the_pixels_of_the_form_for_devices(change, size, monkeypatch):
    batch, drawn = noise(200, *size), keys(200)
    fast = change(batch, drawn)
    monkeypatch.setattr("vit_lightning.data.operations.host_chooses", lambda images: False)
    assert torch.equal(fast, change(batch, drawn))


@pytest.mark.parametrize("change", [RandomResizedCrop(), RandomErasing(0.7)], ids=["resized crop", "erasing"])
def test_boxes_of_an_image_do_not_depend_on_its_batch(change):
    batch = noise(64)
    together = change(batch, keys(64))
    assert torch.equal(together, torch.cat([change(batch[i : i + 5], keys(64)[i : i + 5]) for i in range(0, 64, 5)]))
    assert not torch.equal(together, batch)
    assert torch.equal(batch, noise(64))


def test_bad_boxes_are_named_at_once():
    with pytest.raises(UserError) as caught:
        RandomErasing(p=2.0, scale=(0.5, 0.2), ratio=(0.0, 1.0))
    assert [problem.split("=")[0].rpartition(".")[2] for problem in caught.value.problems] == ["p", "scale", "ratio"]
