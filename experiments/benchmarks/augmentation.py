"""Augmentation of whole batches against torchvision's transforms, which are seeded and called once for each image.

python experiments/benchmarks/augmentation.py [--device cpu] [--rounds 15] [--cases 256x32 64x224]

Both are random functions of a key of each image, so both could resume. The two take turns in one process, on one
thread of a CPU, in an order drawn again in each round; a turn is one batch of uint8 images. Shown are the median time
of a batch and the median and range, over the rounds, of torchvision's time divided by ours.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor
from torchvision.transforms import v2

from vit_lightning import (
    AutoAugment,
    HorizontalFlip,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    ThreeAugment,
)
from vit_lightning.data.augment import Augmentation
from vit_lightning.data.batch_transform import images_at_a_time
from vit_lightning.random_keys import sample_keys


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def pairs(size: int) -> dict[str, tuple[Augmentation, v2.Transform]]:
    """Ours and torchvision's of the same distribution."""
    bilinear = v2.InterpolationMode.BILINEAR
    three = [v2.RandomGrayscale(1.0), v2.RandomSolarize(128, 1.0), v2.GaussianBlur(13, (0.1, 2.0))]
    return {
        "AutoAugment": (AutoAugment(), v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)),
        "RandAugment": (RandAugment(), v2.RandAugment()),
        "ThreeAugment": (ThreeAugment(), v2.Compose([v2.RandomChoice(three), v2.ColorJitter(0.3, 0.3, 0.3)])),
        "RandomResizedCrop": (RandomResizedCrop(), v2.RandomResizedCrop(size)),
        "RandomAffine": (RandomAffine(), v2.RandomAffine(10.0, (0.1, 0.1), (0.9, 1.1), interpolation=bilinear)),
        "RandomErasing": (RandomErasing(fill="black"), v2.RandomErasing(0.25)),
        "RandomCrop": (RandomCrop(), v2.RandomCrop(size, padding=4)),
        "HorizontalFlip": (HorizontalFlip(), v2.RandomHorizontalFlip()),
    }


def one_by_one(transform: v2.Transform, images: Tensor, keys: Tensor) -> Tensor:
    """torchvision's transform, seeded with the key of each image."""
    changed = []
    for image, key in zip(images, keys.tolist(), strict=True):
        torch.default_generator.manual_seed(key)
        changed.append(transform(image))
    return torch.stack(changed)


def in_parts(change: Callable[[Tensor, Tensor], Tensor], images: Tensor, keys: Tensor) -> None:
    """As a data module does it: on a CPU a few images at a time, which its cache can hold until they are normalised."""
    count = images_at_a_time(images) if images.device.type == "cpu" else len(images)
    for part in zip(images.split(count), keys.split(count), strict=True):
        change(*part)


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Of the processor where that does the work, so that other processes count little; else of the clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def compare(ours: Augmentation, theirs: v2.Transform, images: Tensor, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a batch in each round."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        keys = sample_keys(0, number, torch.arange(len(images))).to(images.device)
        runs = [partial(in_parts, change, images, keys) for change in (ours, partial(one_by_one, theirs))]
        for which in random.sample(range(2), 2):
            spent = seconds(runs[which], images.device)
            if number:  # the first round warms up
                times[which].append(spent)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+", default=["128x32", "256x32", "64x224"], help="images x pixels of a side")
    parser.add_argument("--names", nargs="+", default=list(pairs(1)))
    given = parser.parse_args()
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name() if given.device.type == "cuda" else cpu_name()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {hardware}, {given.rounds} rounds")
    for case in given.cases:
        count, size = map(int, case.split("x"))
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (count, 3, size, size), generator=generator).byte().to(given.device)
        print(f"\n{count} images of {size} x {size}\n{'':<22}{'ours':>10}{'torchvision':>13}   ratio (range)")
        for name in given.names:
            ours, theirs = pairs(size)[name]
            times = compare(ours, theirs, images, given.rounds)
            ratios = [b / a for a, b in zip(*times, strict=True)]
            middle = [f"{1000 * statistics.median(values):.1f} ms" for values in times]
            span = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name:<22}{middle[0]:>10}{middle[1]:>13}   {span}", flush=True)


if __name__ == "__main__":
    main()
