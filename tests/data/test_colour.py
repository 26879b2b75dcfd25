from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional

from vit_lightning import UserError
from vit_lightning.data import colour
from vit_lightning.data.colour import ColorJitter
from vit_lightning.random_keys import sample_keys


def images(count=6, channels=3):
    return torch.randint(0, 256, (count, channels, 19, 23), generator=torch.Generator().manual_seed(1)).byte()


PAIRS = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "saturation": functional.adjust_saturation,
    "sharpness": functional.adjust_sharpness,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_each_image_is_changed_as_torchvision_changes_it(name, channels):
    factors = [0.0, 0.01, 0.3, 1.0, 1.37, 1.99]
    batch = images(channels=channels)
    ours = getattr(colour, name)(batch, torch.tensor(factors, dtype=torch.float64))
    theirs = [PAIRS[name](image, factor) for image, factor in zip(batch, factors, strict=True)]
    assert torch.equal(ours, torch.stack(theirs))


@pytest.mark.parametrize("channels", [1, 3])
def test_hue_is_torchvision_s_within_the_rounding_of_a_level(channels):
    turns = [-0.5, -0.2, 0.0, 0.05, 0.3, 0.5]
    batch = images(channels=channels)
    ours = colour.hue(batch, torch.tensor(turns))
    theirs = torch.stack([functional.adjust_hue(image, turn) for image, turn in zip(batch, turns, strict=True)])
    differences = (ours.int() - theirs.int()).abs()
    assert differences.max() <= 1
    assert (differences > 0).float().mean() < 0.001


def test_gray_posterized_and_solarized_are_torchvision_s():
    batch = images()
    assert torch.equal(colour.grayscale(batch), functional.rgb_to_grayscale(batch, num_output_channels=3))
    bits = [1, 2, 4, 6, 7, 8]
    theirs = [functional.posterize(image, number) for image, number in zip(batch, bits, strict=True)]
    assert torch.equal(colour.posterize(batch, torch.tensor(bits)), torch.stack(theirs))
    thresholds = [0.0, 8.5, 128.0, 200.3, 254.5, 255.0]
    theirs = [functional.solarize(image, value) for image, value in zip(batch, thresholds, strict=True)]
    assert torch.equal(colour.solarize(batch, torch.tensor(thresholds)), torch.stack(theirs))


def test_jitter_changes_each_image_by_itself_and_in_every_order():
    keys = sample_keys(0, 0, torch.arange(50))
    batch = images(1).expand(50, -1, -1, -1)
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    together = jitter(batch, keys)
    assert torch.equal(together, torch.cat([jitter(batch[:1], key[None]) for key in keys]))
    assert len({image.numpy().tobytes() for image in together}) == 50
    assert torch.equal(ColorJitter(0, 0, 0, 0)(batch, keys), batch)


def test_jitter_is_torchvision_s_functions_in_the_drawn_order():
    keys = sample_keys(3, 0, torch.arange(30))
    batch, jitter = images(1).expand(30, -1, -1, -1), ColorJitter(0.4, 0.5, 0.6)
    order = torch.stack([colour.uniform(keys, 10 + number) for number in range(4)], dim=1).argsort(dim=1)
    factors = [jitter._strength(number, colour.uniform(keys, 20 + number)) for number in range(3)]
    assert all(0.4 <= value <= 1.6 for value in torch.stack(factors).flatten().tolist())
    functions = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    assert len({tuple(row) for row in order.tolist()}) > 12
    for number, image in enumerate(batch):
        for change in order[number].tolist():
            if change < 3:
                image = functions[change](image, factors[change][number].double().item())
        assert torch.equal(image, jitter(batch, keys)[number])


def test_bad_strengths_are_named_at_once():
    with pytest.raises(UserError) as caught:
        ColorJitter(brightness=-1.0, hue=0.6)
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "augment.ColorJitter.brightness",
        "augment.ColorJitter.hue",
    ]
