"""Training images a second and core from photographs, with equal filters, against other loaders; and where time goes.

python experiments/benchmarks/large_images.py [--rounds 40] [--seconds 200] [--out large_images.json]

60 JPEGs of 500 x 375 pixels (quality 90 to 95, 4:2:0), different parts of the two photographs of scikit-learn; from
each a random part of 8 to 100 % at 224 pixels, flipped, normalised, in batches of 30. One process, one thread, no
workers; the contenders of a filter are interleaved, one epoch each in every round, and so are the parts of the work, on
crops that are the same for all.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import litdata
import numpy as np
import PIL
import simplejpeg
import timm
import torch
import torchvision
from data_loading import Source, of_loader, of_timm, ours
from measuring import Rounds, paired_rounds
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from vit_lightning import HorizontalFlip, ImageFolder
from vit_lightning.data import decoding
from vit_lightning.data.batch_transform import BatchTransform
from vit_lightning.data.decoding import decode
from vit_lightning.data.image_set import IMAGENET_MEAN, IMAGENET_STD
from vit_lightning.data.images import random_resized_box
from vit_lightning.random_keys import one_key

BATCH, SIDE = 30, 224


def write_photographs(root: Path, count: int = 60) -> Path:
    """Writes parts of real photographs at 500 x 375; their noise and edges are what a JPEG decoder meets."""
    draw = np.random.default_rng(0)
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(count):
        whole = photographs[number % 2]
        width = draw.uniform(0.55, 1.0) * min(whole.width, whole.height * 4 / 3)
        left, upper = draw.uniform(0, whole.width - width), draw.uniform(0, whole.height - width * 3 / 4)
        box = (left, upper, left + width, upper + width * 3 / 4)
        part = whole.resize((500, 375), Image.Resampling.BICUBIC, box=box)
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number // 2 % 2 else part
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        part.save(folder / f"{number:05}.jpg", quality=int(draw.integers(90, 96)))
    return root


def ours_with(root: Path, interpolation: str, *, extra: bool = True) -> Source:
    """Ours; ``extra``: simplejpeg is installed."""
    sizes = {"root": root, "image_size": SIDE, "min_area": 0.08, "batch_size": BATCH, "num_workers": 0}
    source = ours(ImageFolder(**sizes, augment=[HorizontalFlip()], interpolation=interpolation))
    while True:
        decoding.simplejpeg = simplejpeg if extra else None
        yield next(source)


def finish(interpolation: v2.InterpolationMode) -> v2.Compose:
    """Everything after decoding, of torchvision."""
    crop = v2.RandomResizedCrop(SIDE, interpolation=interpolation, antialias=True)
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ToImage(), *to_float])


def read_tensor(path: str) -> torch.Tensor:
    return decode_jpeg(torchvision.io.read_file(path), mode=ImageReadMode.RGB)


def of_torchvision(root: Path, transform: v2.Compose, *, tensors: bool) -> Source:
    loader = {"loader": read_tensor} if tensors else {}
    dataset = torchvision.datasets.ImageFolder(root, transform, **loader)
    return of_loader(DataLoader(dataset, batch_size=BATCH, shuffle=True))


class Streamed(litdata.StreamingDataset):
    """litdata's shards of JPEGs, which it decodes to tensors."""

    def __init__(self, folder: Path, transform: v2.Compose) -> None:
        super().__init__(str(folder), shuffle=True)
        self.finish = transform

    def __getitem__(self, index: object) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return self.finish(image), label


def as_litdata(path: Path) -> tuple[Image.Image, int]:
    return Image.open(path), "ab".find(path.parent.name)


def of_litdata(folder: Path, transform: v2.Compose) -> Source:
    return of_loader(litdata.StreamingDataLoader(Streamed(folder, transform), batch_size=BATCH, num_workers=0))


def epoch_of(source: Source, images: int) -> Callable[[], None]:
    def epoch() -> None:
        done = 0
        while done < images:
            done += next(source)

    return epoch


def parts_of(root: Path) -> dict[str, Callable[[], object]]:
    """Single pieces of the work, each over all images; crops are the same for all."""
    data = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))]
    sizes = [Image.open(BytesIO(content)).size for content in data]
    boxes = [random_resized_box(*size, min_area=0.08, key=one_key(0, 0, n)) for n, size in enumerate(sizes)]
    pillow = [Image.open(BytesIO(content)).convert("RGB") for content in data]
    arrays = [np.array(image) for image in pillow]
    crops = [array[box[1] : box[3], box[0] : box[2]] for array, box in zip(arrays, boxes, strict=True)]
    encoded = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in data]
    rows = np.empty((3, SIDE, SIDE), np.uint8)
    small = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    batch = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8)
    normalise = BatchTransform(augment=(), mixing=(), mean=IMAGENET_MEAN, std=IMAGENET_STD, repetitions=1).normalise
    size, eighth = (SIDE, SIDE), {"min_factor": 8, "min_height": 1, "min_width": 1}

    def each(call: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [call(number) for number in range(len(data))]

    def pillow_resize(kernel: Image.Resampling, number: int) -> Image.Image:
        return pillow[number].resize(size, kernel, box=boxes[number])

    def ours_at(interpolation: str, number: int) -> object:
        return decode(data[number], "", size=size, choose_box=lambda *_: boxes[number], interpolation=interpolation)

    return {
        "header by Pillow": each(lambda n: Image.open(BytesIO(data[n]), formats=decoding.FORMATS).getexif()),
        "entropy decoding (gray at 1/8, simplejpeg)": each(lambda n: simplejpeg.decode_jpeg(data[n], "GRAY", **eighth)),
        "and inverse DCT of the brightness (gray, simplejpeg)": each(lambda n: simplejpeg.decode_jpeg(data[n], "GRAY")),
        "all decoding: and colour (simplejpeg)": each(lambda n: simplejpeg.decode_jpeg(data[n], "RGB")),
        "all decoding (torchvision)": each(lambda n: decode_jpeg(encoded[n], mode=ImageReadMode.RGB)),
        "all decoding (Pillow, 4 bytes a pixel)": each(lambda n: Image.open(BytesIO(data[n])).load()),
        "at 7/8 of the size (simplejpeg)": each(
            lambda n: simplejpeg.decode_jpeg(data[n], "RGB", min_factor=1.01, min_height=300, min_width=300)
        ),
        "resizing, bicubic (Pillow)": each(partial(pillow_resize, Image.Resampling.BICUBIC)),
        "resizing, bilinear (Pillow)": each(partial(pillow_resize, Image.Resampling.BILINEAR)),
        "resizing, bicubic (torch)": each(lambda n: decoding._torch_resized(crops[n], size, "bicubic")),
        "resizing, bilinear (torch)": each(lambda n: decoding._torch_resized(crops[n], size, "bilinear")),
        "copy of the whole from Pillow": each(lambda n: np.asarray(pillow[n])),
        "copy to channels first": each(lambda n: np.copyto(rows, small.transpose(2, 0, 1))),
        "normalisation": lambda: [normalise(batch) for _ in range(len(data) // BATCH)],
        "ours, bicubic": each(partial(ours_at, "bicubic")),
        "ours, fast_bicubic": each(partial(ours_at, "fast_bicubic")),
    }


def show(rounds: Rounds, images: int, own: str, peers: list[str]) -> dict[str, object]:
    """Prints and returns images a second, and ratios to each other contender and to the fastest of ``peers``."""
    rows: dict[str, object] = {}
    fastest = rounds.fastest(peers)
    for name in sorted(rounds.seconds, key=rounds.median):
        rows[name] = {"images_per_s": images / rounds.median(name), "ours_over_it": rounds.ratio(own, name)}
        mark = "  <- fastest peer" if name == fastest else ""
        print(f"  {name:<40}{images / rounds.median(name):>7,.0f} images/s   {rounds.ratio(own, name)}{mark}")
    return {"fastest_peer": fastest, "rounds": len(rounds.seconds[own]), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=200.0, help="limit of all together")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "Pillow": PIL, "litdata": litdata}
    versions = {name: module.__version__ for name, module in modules.items()} | {"simplejpeg": simplejpeg.__version__}
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: ")
    result: dict[str, object] = {"cpu": cpu, "machine": platform.machine(), "versions": versions, "batch": BATCH}
    print(cpu, versions)
    with tempfile.TemporaryDirectory() as place:
        photographs = Path(place) / "photographs"
        for split, count in {"train": 60, "val": 2, "test": 2}.items():
            write_photographs(photographs / split, count)
        root = photographs / "train"
        files = sorted(root.rglob("*.jpg"))
        shards = Path(place) / "litdata"
        litdata.optimize(as_litdata, files, str(shards), chunk_bytes="64MB", num_workers=1, verbose=False)
        images = len(files) // BATCH * BATCH
        for name in ("bicubic", "bilinear"):
            mode = v2.InterpolationMode(name)
            sources = {
                "ours": ours_with(photographs, f"fast_{name}"),
                "ours without simplejpeg": ours_with(photographs, f"fast_{name}", extra=False),
                "ours, resized by Pillow": ours_with(photographs, name),
                "torchvision, tensors": of_torchvision(root, finish(mode), tensors=True),
                "torchvision, Pillow": of_torchvision(root, finish(mode), tensors=False),
                "timm": of_timm(root, SIDE, (0.08, 1.0), (3 / 4, 4 / 3), BATCH, interpolation=name),
                "litdata": of_litdata(shards, finish(mode)),
            }
            steps = {label: epoch_of(source, images) for label, source in sources.items()}
            rounds = paired_rounds(steps, asked.rounds, limit_s=asked.seconds * 0.4)
            print(f"\n{name}, {len(rounds.seconds['ours'])} rounds of {images} images; images/s, ours over it")
            result[name] = show(rounds, images, "ours", [label for label in sources if "ours" not in label])
        rounds = paired_rounds(parts_of(root), asked.rounds, limit_s=asked.seconds * 0.2)
        print(f"\nms of one image, median of {len(rounds.seconds['normalisation'])} rounds")
        result["ms"] = {name: round(1000 * rounds.median(name) / len(files), 3) for name in rounds.seconds}
        for name, value in result["ms"].items():
            print(f"  {name:<56}{value:.3f}")
    known = json.loads(asked.out.read_text()) if asked.out.is_file() else {}
    asked.out.write_text(json.dumps(known | {result["cpu"]: result}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
