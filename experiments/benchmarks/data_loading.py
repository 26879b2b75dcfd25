"""Training images a second and core, from files to normalised batches, against the loaders that others use.

python experiments/benchmarks/data_loading.py [--cifar DIR] [--photographs 200] [--rounds 5] [--seconds 3]

(a) JPEGs of 32 pixels (``--cifar``: a folder DIR/train/CLASS/*.jpg, else 2,000 that are drawn), shifted by up to 4
    pixels and flipped, from the second epoch on; timm crops without the padding, which is less work.
(b) Drawn photographs of 500 x 375 pixels, a random part of each at 224 pixels, flipped. "decode alone" is the decoding,
    cropping and resizing of (b) without all else, "Pillow alone" the same from whole images.

Each has one process, one thread, no workers; contenders take turns of ``--seconds`` of processor time, in an order
drawn anew in each round; what is shown is the median round and the range. At the end, how far images decoded at a
reduced scale are from whole ones.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
import timm
import torch
import torchvision
from PIL import Image
from timm.data import ImageDataset, create_loader
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from vit_lightning import HorizontalFlip, HuggingFaceSet, ImageData, ImageFolder, RandomCrop
from vit_lightning.data.decoding import decode
from vit_lightning.data.image_set import IMAGENET_MEAN, IMAGENET_STD
from vit_lightning.data.images import random_resized_box
from vit_lightning.data.sampling import train_requests
from vit_lightning.random_keys import one_key

BATCH = 128
Source = Iterator[int]
"""Yields the number of images of each batch, without end."""


def photograph(draw: np.random.Generator, width: int, height: int) -> Image.Image:
    """Clouds of all sizes, weaker the smaller they are, as in photographs; and some edges."""
    pixels = np.zeros((height, width, 3))
    for octave in range(1, 8):
        coarse = draw.random((2**octave + 1, 2**octave + 1, 3), dtype=np.float32)
        channels = [Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        pixels += np.stack(channels, axis=-1) / 1.7**octave
    for _ in range(6):
        x, y = sorted(draw.integers(0, width, 2)), sorted(draw.integers(0, height, 2))
        pixels[y[0] : y[1], x[0] : x[1]] += draw.normal(0, 0.15, 3)
    pixels = (pixels - pixels.min()) / np.ptp(pixels)
    return Image.fromarray((pixels * 255).astype(np.uint8))


def write_folder(
    root: Path, count: int, size: tuple[int, int], *, splits: tuple[str, ...] = ("train", "val", "test")
) -> Path:
    draw = np.random.default_rng(0)
    for split, label in itertools.product(splits, ("a", "b")):
        folder = root / split / label
        folder.mkdir(parents=True)
        for number in range(count // 2 if split == "train" else 2):
            photograph(draw, *size).save(folder / f"{number:05}.jpg", quality=90)
    return root


def ours(data: ImageData) -> Source:
    data.setup("fit")
    dataset, size = data.dataset("train"), len(data.dataset("train"))
    batches = data.train_batches_per_epoch
    while True:
        for completed in itertools.count(step=batches):
            requests = partial(
                train_requests,
                size=size,
                batch_size=data.batch_size,
                seed=0,
                batches_per_epoch=batches,
                rank=0,
                ranks=1,
            )
            loader = DataLoader(
                dataset, batch_sampler=list(requests(completed=completed)), collate_fn=lambda batch: batch
            )
            for batch in loader:
                yield len(data.model_input(batch, completed).images)


def of_loader(loader: DataLoader) -> Source:
    while True:
        for batch in loader:
            yield len(batch[0])


def transform(first: v2.Transform) -> v2.Compose:
    rest = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return v2.Compose([v2.PILToTensor(), first, *rest])


def of_torchvision(train: Path, first: v2.Transform, batch: int) -> Source:
    dataset = torchvision.datasets.ImageFolder(train, transform(first))
    return of_loader(DataLoader(dataset, batch_size=batch, shuffle=True))


def of_timm(
    train: Path,
    size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    batch: int,
    interpolation: str = "bilinear",
) -> Source:
    loader = create_loader(
        ImageDataset(str(train)),
        input_size=(3, size, size),
        batch_size=batch,
        is_training=True,
        use_prefetcher=False,
        scale=scale,
        ratio=ratio,
        interpolation=interpolation,
        color_jitter=None,
        num_workers=0,
        persistent_workers=False,
    )
    return of_loader(loader)


def of_parquet(root: Path, folder: Path, **arguments: Any) -> Source:
    """Ours, from Parquet files that ``datasets`` writes and reads."""
    for split, table in datasets.load_dataset("imagefolder", data_dir=str(root), cache_dir=str(folder)).items():
        table.to_parquet(folder / "tables" / f"{split}.parquet")
    return ours(HuggingFaceSet(path=str(folder / "tables"), cache=folder, num_workers=0, **arguments))


def decode_alone(train: Path) -> Source:
    files = sorted(train.rglob("*.jpg"))
    for number in itertools.count():
        part = partial(random_resized_box, min_area=0.08, key=one_key(0, 0, number))
        decode(files[number % len(files)], "", size=(224, 224), choose_box=part)
        yield 1


def pillow_alone(train: Path) -> Source:
    files = sorted(train.rglob("*.jpg"))
    for number in itertools.count():
        whole = Image.open(files[number % len(files)]).convert("RGB")
        box = random_resized_box(*whole.size, min_area=0.08, key=one_key(0, 0, number))
        np.asarray(whole.resize((224, 224), Image.Resampling.BICUBIC, box=box))
        yield 1


def compare(title: str, sources: dict[str, Source | None], rounds: int, seconds: float, reference: str) -> None:
    there = {name: source for name, source in sources.items() if source is not None}
    for source in there.values():
        for _ in range(3):
            next(source)
    rates: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(rounds):
        for name in random.sample(list(there), len(there)):
            started, images = time.process_time(), 0
            while time.process_time() - started < seconds:
                images += next(there[name])
            rates[name].append(images / (time.process_time() - started))
    print(f"\n{title}\n{'':<16}{'images/s/core':>14}{'range':>20}   {reference} is faster by")
    for name, values in rates.items():
        middle = statistics.median(values)
        factor = statistics.median(a / b for a, b in zip(rates[reference], values, strict=True))
        print(f"{name:<16}{middle:>14,.0f}{f'{min(values):,.0f} to {max(values):,.0f}':>20}   {factor:.2f}")


def fidelity(train: Path, count: int) -> None:
    """PSNR in dB of what is decoded at a reduced scale against whole images, over random parts."""
    values = []
    files = sorted(train.rglob("*.jpg"))
    for number in range(count):
        path, key = files[number % len(files)], one_key(1, 0, number)
        whole = Image.open(path).convert("RGB")
        box = random_resized_box(*whole.size, min_area=0.08, key=key)
        expected = np.asarray(whole.resize((112, 112), Image.Resampling.BICUBIC, box=box)).astype(float)
        shown = decode(path, "", size=(112, 112), choose_box=lambda *_, box=box: box)
        error = ((shown - expected) ** 2).mean()
        values.append(99.0 if error == 0 else float(10 * np.log10(255**2 / error)))
    reduced = [value for value in values if value < 60]
    print(f"\nPSNR against Pillow from whole images, parts of 8 to 100 % at 112 pixels, {count} images:")
    print(f"{len(reduced)} at a reduced scale, median {statistics.median(reduced):.1f} dB, least {min(reduced):.1f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--photographs", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="images in a batch of (b)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch, "torchvision": torchvision, "timm": timm, "Pillow": PIL}
    print(", ".join(f"{name} {module.__version__}" for name, module in versions.items()), platform.processor())
    with tempfile.TemporaryDirectory() as place:
        cifar = asked.cifar or write_folder(Path(place) / "small", 2000, (32, 32))
        photographs = write_folder(Path(place) / "large", asked.photographs, (500, 375))
        run: Callable[..., None] = partial(compare, rounds=asked.rounds, seconds=asked.seconds, reference="ours")
        flips = [HorizontalFlip()]
        small = {"root": cifar, "image_size": 32, "min_area": 1.0, "batch_size": BATCH, "num_workers": 0}
        crop = v2.RandomCrop(32, padding=4)
        run(
            "(a) 32 pixels, shifted and flipped",
            {
                "ours": ours(ImageFolder(**small, augment=[RandomCrop(4), *flips])),
                "torchvision": of_torchvision(cifar / "train", crop, BATCH),
                "timm": of_timm(cifar / "train", 32, (1.0, 1.0), (1.0, 1.0), BATCH),
                "ours, Parquet": of_parquet(
                    cifar,
                    Path(place) / "parquet-a",
                    image_size=32,
                    min_area=1.0,
                    batch_size=BATCH,
                    augment=[RandomCrop(4), *flips],
                ),
            },
        )
        batch = min(asked.batch, asked.photographs)  # timm drops a batch that is not full
        large = {"root": photographs, "image_size": 224, "min_area": 0.08, "batch_size": batch, "num_workers": 0}
        part = v2.RandomResizedCrop(224)
        run(
            "(b) 500 x 375 pixels, random parts at 224",
            {
                "ours": ours(ImageFolder(**large, augment=flips)),
                "decode alone": decode_alone(photographs / "train"),
                "Pillow alone": pillow_alone(photographs / "train"),
                "torchvision": of_torchvision(photographs / "train", part, batch),
                "timm": of_timm(photographs / "train", 224, (0.08, 1.0), (3 / 4, 4 / 3), batch),
                "ours, Parquet": of_parquet(photographs, Path(place) / "parquet-b", batch_size=batch, augment=flips),
            },
        )
        fidelity(photographs / "train", 400)


if __name__ == "__main__":
    main()
