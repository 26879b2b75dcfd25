import pytest
import torch
from torchvision.transforms.v2 import functional

from vit_lightning.data import operations, policies
from vit_lightning.data.operations import blur_weights, resample, resize_weights, resized
from vit_lightning.random_keys import sample_keys, uniform


def images(count=6, channels=3):
    return torch.randint(0, 256, (count, channels, 19, 23), generator=torch.Generator().manual_seed(1)).byte()


def test_gray_is_torchvision_s():
    batch = images()
    assert torch.equal(operations.grayscale(batch), functional.rgb_to_grayscale(batch, num_output_channels=3))


def test_jitter_is_torchvision_s_functions_in_the_drawn_order():
    keys = sample_keys(3, 0, torch.arange(30))
    batch = images(1).expand(30, -1, -1, -1)
    order = torch.stack([uniform(keys, 10 + number) for number in range(3)], dim=1).argsort(dim=1)
    factors = [0.4 + uniform(keys, 20 + number) * (1.6 - 0.4) for number in range(3)]
    jittered = policies._jittered(batch, keys, 0.6)
    functions = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    assert len({tuple(row) for row in order.tolist()}) == 6
    for number, image in enumerate(batch):
        for change in order[number].tolist():
            image = functions[change](image, factors[change][number].double().item())
        assert torch.equal(image, jittered[number])


def photographs(count, height, width):
    """Smooth with some noise, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    noise = torch.rand(count, 3, height, width, generator=generator) * 0.1
    return ((smooth + noise) / 1.1 * 255).to(torch.uint8)


@pytest.mark.parametrize("box", [(0, 0, 40, 50), (3, 7, 20, 30), (10, 2, 5, 45), (39, 49, 1, 1), (7, 1, 33, 49)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_a_box_is_resized_as_torch_s_kernel_for_bytes_resizes_it(box, channels):
    images = torch.cat([photographs(4, 40, 50)] * 2, dim=1)[:, :channels]
    images[0] = 255 * (images[0] > 127)
    top, left, height, width = (torch.tensor([value]) for value in box)
    rows, columns = resize_weights(top, height, size=40), resize_weights(left, width, size=50)
    ours = resample(images, rows.expand(4, -1, -1), columns.expand(4, -1, -1))
    assert torch.equal(ours, torch.stack([resized(image, box) for image in images]))
    theirs = functional.resized_crop(images, *box, size=[40, 50], antialias=True)
    # without AVX torchvision converts to float32 and back
    assert (ours.int() - theirs.int()).abs().max() <= (0 if "AVX" in torch.backends.cpu.get_cpu_capability() else 1)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_a_blur_is_torchvision_s(sigma):
    images = photographs(4, 33, 20)
    weights = [blur_weights(torch.full((4,), sigma), size=size, radius=6) for size in (33, 20)]
    ours = resample(images, *weights)
    theirs = functional.gaussian_blur(images, [13, 13], [sigma, sigma])
    assert (ours.int() - theirs.int()).abs().max() <= 1
