import re
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image
from timm.data import auto_augment
from torchvision.transforms import v2

from vit_lightning import AutoAugment, RandAugment, ThreeAugment, TimmRandAugment
from vit_lightning.data import operations, policies
from vit_lightning.data.policies import DRAWN, OPERATIONS, POLICIES, SIGNED, sub_policies
from vit_lightning.random_keys import mix, sample_keys, uniform


def images(count, height=32, width=32, channels=3):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, channels, height, width), generator=generator).byte()


def keys(count, seed=0):
    return sample_keys(seed, 0, torch.arange(count))


def in_torchvision(image, name, magnitude, fill=0):
    theirs = v2.RandAugment(fill=fill)
    return theirs._apply_image_or_video_transform(image, name, magnitude, theirs.interpolation, theirs._fill)


SIZES = [(32, 32), (45, 38)]
TIE = 1e-5
"""Distance in pixels from a tie of nearest-neighbour sampling, above the float32 error of coordinates up to 45."""


def distance_to_tie(name, magnitudes, height, width):
    """How far the source coordinates of each pixel, computed in float64, are from midway between two; (n, H, W)."""
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    m = magnitudes[:, None, None]
    if name == "ShearX":
        x, y = x + m * (y + height / 2), y + 0 * m
    elif name == "ShearY":
        x, y = x + 0 * m, y + m * (x + width / 2)
    else:
        assert name == "Rotate"
        x, y = m.deg2rad().cos() * x - m.deg2rad().sin() * y, m.deg2rad().sin() * x + m.deg2rad().cos() * y
    columns, rows = x + (width - 1) / 2, y + (height - 1) / 2
    return torch.minimum(*((place - place.floor() - 0.5).abs() for place in (columns, rows)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("space", [v2.RandAugment, v2.TrivialAugmentWide])
@pytest.mark.parametrize("name", list(OPERATIONS)[:DRAWN])
def test_every_operation_is_torchvision_s_for_all_magnitudes_at_once(name, space, size):
    """Ties aside: torchvision's coordinates are a matrix product, which MKL rounds by the processor.

    On Intel with AVX-512 no pixel differs; ``MKL_CBWR=COMPATIBLE`` shows what AMD does: 20, 59 and 38 of
    106,020 pixels of ShearX, ShearY and Rotate, all within 2e-7 of a tie.
    """
    magnitudes, signed = space._AUGMENTATION_SPACE[name]
    assert signed == (name in SIGNED)
    values = magnitudes(31, *size)
    values = [0.0] if values is None else values.tolist()
    values += [-value for value in values] if signed else []
    image, given = images(1, *size)[0], torch.tensor(values, dtype=torch.float64)
    batch = image.expand(len(values), -1, -1, -1)
    theirs = torch.stack([in_torchvision(image, name, value) for value in values])
    different = (OPERATIONS[name](batch, given) != theirs).any(dim=1)
    tie = torch.zeros_like(different)
    if name in ("ShearX", "ShearY", "Rotate"):  # translations are whole pixels, half a pixel from any tie
        tie = distance_to_tie(name, given, *size) < TIE
        slightly_wrong = (OPERATIONS[name](batch, 1.003 * given) != theirs).any(dim=1)
        assert (slightly_wrong & ~tie).any()
    assert not (different & ~tie).any()
    assert (different & tie).float().mean() <= 0.001


def recorded(monkeypatch, policy, count=3000, height=32, width=32):
    """Name and magnitude of each operation that the policy asks for."""
    asked = []
    names = list(OPERATIONS)[:DRAWN]

    def record(batch, operation, magnitude, changes):
        asked.append([(names[o], m) for o, m in zip(operation.tolist(), magnitude.tolist(), strict=True)])
        return batch

    monkeypatch.setattr(operations, "change_each", record)
    policy(torch.zeros(count, 3, height, width, dtype=torch.uint8), keys(count))
    return asked


@pytest.mark.parametrize(("magnitude", "size"), [(0, (32, 32)), (9, (32, 32)), (30, (45, 38))])
def test_randaugment_draws_operations_of_torchvision_s_magnitudes(monkeypatch, magnitude, size):
    layers = recorded(monkeypatch, RandAugment(num_ops=3, magnitude=magnitude), height=size[0], width=size[1])
    assert len(layers) == 3
    assert layers[0] != layers[1]
    for name in list(OPERATIONS)[:DRAWN]:
        table, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
        values = table(31, *size)
        value = 0.0 if values is None else values[magnitude].item()
        seen = {m for layer in layers for n, m in layer if n == name}
        assert seen == ({value, -value} if signed else {value})
    counts = [sum(n == name for n, _ in layers[0]) for name in list(OPERATIONS)[:DRAWN]]
    assert min(counts) > 150  # of 214 expected


@pytest.mark.parametrize("policy", POLICIES)
def test_autoaugment_has_torchvision_s_table(policy):
    table, names = sub_policies(policy), list(OPERATIONS)
    ours = [
        tuple((names[int(row) // 20], p, row % 20 / 2) for row, p in both.T.tolist()) for both in table.permute(2, 0, 1)
    ]
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    assert ours == [tuple((name, p, bin_ or 0) for name, p, bin_ in both) for both in theirs]


@pytest.fixture(scope="module")
def photograph():
    """A photograph in 325 pieces."""
    whole = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    return whole.unfold(1, 32, 32).unfold(2, 32, 25).flatten(1, 2).transpose(0, 1).contiguous()


THEIRS = {
    "cifar10": """
        6707149 26653693 30777155 27060349 16116666 32513656 32823375 3444569 23298161 35290823 12266539 16203668
        7265461 12767471 10892752 17287489 23225254 18397409 18091843 7455043 18665471 17823166 11275196 19385231
        18224935""",
    "imagenet": """
        27415440 12033291 16219639 33922256 8034591 19360045 17233608 15939177 13021237 16764760 8965449 19297220
        18393556 17945128 12480799 29916759 15227672 11222192 18278315 18615804 8569456 4448635 20212158 2514279
        23047476""",
}
"""What examples/utils/autoaug.py of Compact-Transformers makes of a photograph (at cd11f09), by Pillow 13.0.0.

For each sub-policy, every third one with positive signs, when no probability is missed (one of 0 is): the sum of the
pixels times their number, counted from 0, modulo 97. Translations go the other way there.
"""
ROUNDED = ("AutoContrast", "Color", "Contrast")
"""What Pillow rounds otherwise than torchvision, by a level of 255, or two where the mean is rounded too."""


@pytest.mark.parametrize("policy", THEIRS)
def test_autoaugment_is_that_of_compact_transformers_for_the_same_draws(monkeypatch, photograph, policy):
    number, missed = torch.arange(25) / 25 + 0.01, torch.zeros(25)
    sign = (torch.arange(25) % 3 == 0).float()
    monkeypatch.setattr(policies, "uniform", lambda *_: [number, missed, missed, sign, sign])
    ours, weights = AutoAugment(policy)(photograph[::13], keys(25)), (torch.arange(3072) % 97).view(3, 32, 32)
    sums = (ours * weights).sum((1, 2, 3)).tolist()
    for sub, one, theirs in zip(POLICIES[policy].split(","), sums, map(int, THEIRS[policy].split()), strict=True):
        levels = 2 if {*ROUNDED} & {*sub.split()} else 0.01 * ("Sharpness" in sub)  # one, in few pixels
        assert abs(one - theirs) <= levels * weights.sum(), sub


def test_autoaugment_draws_each_operation_for_itself(monkeypatch):
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(policies.operations, "change_each", lambda images, which, *_: kept.append(which) or images)
    monkeypatch.setattr(policies, "apply_operations", lambda images, rows, _: kept.append(rows) or images)
    AutoAugment()(torch.zeros(20_000, 3, 1, 1, dtype=torch.uint8), keys(20_000))
    (sheared, rows), p = kept, sub_policies("cifar10")[1]
    changed = torch.stack([sheared | (rows[0] > 0), rows[1] > 0])
    shares = [*changed.double().mean(1).tolist(), float(changed.all(0).double().mean())]
    assert shares == pytest.approx([*p.mean(1).tolist(), float(p.prod(0).mean())], abs=0.014)  # four standard errors
    signs = (rows % 2)[:, (rows > 0).all(0)].double()
    assert [*signs.mean(1).tolist(), float(signs.prod(0).mean())] == pytest.approx([0.5, 0.5, 0.25], abs=0.025)


@pytest.mark.parametrize("words", ["m9-mstd0.5-inc1", "m10-mstd1-inc1", "m0-inc1"])
def test_timm_s_randaugment_is_timm_s_for_the_same_draws(monkeypatch, photograph, words):
    """Of pixels from the nearest place."""
    options = dict(re.findall(r"([a-z]+)([\d.]+)", words))
    ours = TimmRandAugment(1, float(options["m"]), float(options.get("mstd", 0)), fill=99)
    hints = {"interpolation": Image.Resampling.NEAREST, "img_mean": (99, 99, 99)}
    theirs = auto_augment.rand_augment_transform(f"rand-n1-{words}", hints)
    names, given = list(OPERATIONS), photograph.repeat(4, 1, 1, 1)
    by_name = {re.sub("Increasing|Rel", "", operation.name): operation for operation in theirs.ops}
    assert by_name.keys() == set(names[1:])
    changed = ours(given, keys(len(given)))
    posterize, black = ImageOps.posterize, Image.new("RGB", (32, 32))  # newer ones refuse 0 bits, which timm gives
    monkeypatch.setattr(ImageOps, "posterize", lambda image, bits: posterize(image, bits) if bits else black)
    wrong, off = Counter(), Counter()
    for image, result, (draw, sign, bin_, chance) in zip(
        given, changed, uniform(mix(keys(len(given)), 0), range(1, 5)).T.tolist(), strict=True
    ):
        name, level = names[1 + int(15 * draw)], NormalDist().inv_cdf((int(31 * bin_) + 0.5) / 31)
        negative = (sign < 0.5) != name.startswith("Translate")  # which goes the other way
        draws = iter([chance, float(negative)])
        monkeypatch.setattr("random.random", lambda draws=draws: next(draws))
        monkeypatch.setattr("random.gauss", lambda mean, std, level=level: mean + std * level)
        monkeypatch.setattr("numpy.random.choice", lambda *_, one=by_name[name], **__: [one])
        expected = torch.from_numpy(np.array(theirs(Image.fromarray(image.permute(1, 2, 0).numpy())))).permute(2, 0, 1)
        apart = (expected.int() - result.int()).abs()
        wrong[name] += int((apart > 0).any(0).sum())
        off[name] = max(off[name], int(apart.max()))
    assert wrong.keys() == set(names[1:])
    assert {name for name in wrong if wrong[name]} <= {*ROUNDED, "Rotate"}
    assert wrong["Rotate"] < 10, "ties"
    assert max(off[name] for name in ROUNDED) <= 2


def test_three_augment_gives_each_change_to_a_third():
    batch = images(3000, 16, 16)
    changed = ThreeAugment(jitter=0.0)(batch, keys(3000))
    gray = (changed == changed[:, :1]).flatten(1).all(1)
    solarized = (changed == torch.where(batch >= 128, 255 - batch, batch)).flatten(1).all(1)
    assert not (gray & solarized).any()
    for share in (gray, solarized, ~(gray | solarized)):
        assert 0.3 < share.float().mean() < 0.37
