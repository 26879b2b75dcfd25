"""``lightning check-data`` and ``show-batch``: all images of a config, or a batch as the model gets it."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vit_lightning.commands.console import say
from vit_lightning.commands.session import session
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.splits import SPLITS, Split
from vit_lightning.errors import UserError, counted, refuse
from vit_lightning.figures.pictures import LARGE, pixels_of, sheet, write_png
from vit_lightning.storage.folder import write_whole

Report = dict[str, Any]
DUPLICATES = ("within_splits", "across_splits", "with_other_labels")
"""Kinds of groups of equal images, as in the keys of ``data.json``."""
NAMED = 3
"""Groups of equal images of a kind that are named on the screen."""
SHOWN = 32
"""Images on the sheet of ``show-batch``."""


class Found(NamedTuple):
    """One image once it has been read."""

    split: Split
    label: int
    name: str
    fault: str | None = None
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels."""
    digest: str = ""
    """Hash of the pixels, the same for a copy under another name or in another lossless format."""
    moments: tuple[tuple[int, int], ...] = ()
    """For each channel, the sums of its values, 0 to 255, and of their squares."""


def check_data(experiment: Experiment) -> Report:
    """Reads all images of all splits; writes ``data.json`` to a new folder.

    Raises:
        UserError: images are damaged; after the report is written.
    """
    data = experiment.data
    with session(experiment, "check-data") as folder:
        data.in_memory = False  # each is read once, and all damaged ones are to be found, not only the first
        data.prepare_data()
        found = list(read_all_images(data))
        report = summarise(found, data.class_names)
        write_whole(folder / "data.json", json.dumps(report, indent=2) + "\n")
    say(text(report))
    if data.notice:
        say(data.notice)
    say(found_files(report))
    say(f"report      {folder / 'data.json'}")
    damaged = [line for split in SPLITS for line in report["splits"][split]["damaged"]]
    refuse(damaged)
    return report


def read_all_images(data: ImageData) -> Iterator[Found]:
    """Yields every image of every split, in order, with a progress bar in a terminal."""
    datasets: dict[Split, Any] = {split: data.dataset(split) for split in SPLITS}
    for split, dataset in datasets.items():
        if not hasattr(dataset, "whole"):
            raise UserError(f"data: {type(data).__name__} has no way to read single images of {split}")
    total = sum(len(dataset) for dataset in datasets.values())
    # threads, since Pillow decodes outside of Python's lock; few, since an image may take 200 MB
    with (
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
        tqdm(total=total, unit=" images", disable=None) as bar,
    ):
        for split, dataset in datasets.items():
            for found in pool.map(partial(read_one, dataset, split), range(len(dataset))):
                bar.update()
                yield found


def read_one(dataset: Any, split: Split, index: int) -> Found:
    label, name = int(dataset.labels[index]), dataset.name(index)
    try:
        pixels = dataset.whole(index)
    except UserError as error:
        return Found(split, label, name, fault=str(error))
    height, width, channels = pixels.shape
    digest = hashlib.sha256(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).data).hexdigest()
    values = np.arange(256)
    counts = [np.bincount(pixels[..., channel].ravel(), minlength=256) for channel in range(channels)]
    moments = tuple((int(count @ values), int(count @ values**2)) for count in counts)
    return Found(split, label, name, None, (width, height), digest, moments)


def summarise(found: Sequence[Found], class_names: Sequence[str]) -> Report:
    """Returns the report as plain data, as in ``data.json``."""
    good = [image for image in found if image.fault is None]
    copies = defaultdict(list)
    for image in good:
        copies[image.digest].append(image)
    duplicates: dict[str, list[list[str]]] = {kind: [] for kind in DUPLICATES}
    for group in copies.values():
        if len(group) > 1:
            names = [f"{image.split}: {image.name}" for image in group]
            splits, labels = {image.split for image in group}, {image.label for image in group}
            duplicates["within_splits" if len(splits) == 1 else "across_splits"].append(names)
            if len(labels) > 1:
                duplicates["with_other_labels"].append(names)
    return {
        "splits": {
            split: _split_report([image for image in found if image.split == split], class_names) for split in SPLITS
        },
        **{f"duplicates_{kind}": groups for kind, groups in duplicates.items()},
        **mean_and_std([image for image in good if image.split == "train"]),
    }


def _split_report(images: Sequence[Found], class_names: Sequence[str]) -> Report:
    counts = Counter(image.label for image in images)
    sizes = [image.size for image in images if image.fault is None] or [(0, 0)]
    return {
        "images": len(images),
        "per_class": {name: counts[label] for label, name in enumerate(class_names)},
        "damaged": [image.fault for image in images if image.fault is not None],
        **{
            side: {"min": min(values), "median": float(np.median(values)), "max": max(values)}
            for side, values in zip(("width", "height"), zip(*sizes, strict=True), strict=True)
        },
    }


def mean_and_std(images: Sequence[Found]) -> dict[str, list[float]]:
    """Returns mean and standard deviation of each channel, of pixels between 0 and 1; exact until the last division."""
    pixels = sum(image.size[0] * image.size[1] for image in images)
    statistics: dict[str, list[float]] = {"mean": [], "std": []}
    for channel in zip(*(image.moments for image in images), strict=True):
        total, squares = (sum(values) for values in zip(*channel, strict=True))
        statistics["mean"].append(round(total / pixels / 255, 4))
        statistics["std"].append(round((squares * pixels - total**2) ** 0.5 / pixels / 255, 4))
    return statistics


def text(report: Report) -> str:
    """Returns the report without names of images and classes, for one screen."""
    rows: list[Sequence[object]] = [("split", "images", "classes", "per class", "width", "height", "damaged")]
    for split, part in report["splits"].items():
        counts = [count for count in part["per_class"].values() if count] or [0]
        spans = [f"{part[side]['min']} to {part[side]['max']}" for side in ("width", "height")]
        per_class = f"{min(counts)} to {max(counts)}"
        rows.append((split, part["images"], len(counts), per_class, *spans, len(part["damaged"])))
    facts = {f"duplicates {kind.replace('_', ' ')}": str(len(report[f"duplicates_{kind}"])) for kind in DUPLICATES}
    facts |= {name: ", ".join(f"{value:.4f}" for value in report[name]) for name in ("mean", "std")}
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    table = ["  ".join(map("{:>{}}".format, row, widths)) for row in rows]
    return "\n".join([*table, *(f"{name:<30} {value}" for name, value in facts.items())])


def found_files(report: Report) -> str:
    """Returns the first groups of equal images that are in several splits or classes, which make results wrong."""
    groups = [(kind, group) for kind in DUPLICATES[1:] for group in report[f"duplicates_{kind}"][:NAMED]]
    return "\n".join(f"same {kind.replace('_', ' ')}: {' = '.join(group)}" for kind, group in groups)


def show_batch(experiment: Experiment) -> None:
    """Draws the first images that the first epoch trains on, augmented and mixed, with their labels."""
    data = experiment.data
    with session(experiment, "show-batch") as folder:
        data.num_workers, data.in_memory = 0, False  # a few images of one batch
        data.prepare_data()
        data.setup("fit")
        data.dataset("train")  # a LightningDataModule has none that can be drawn
        batch = data.model_input(next(iter(data.train_dataloader())), completed=0)
        pixels = pixels_of(batch.images[:SHOWN], data.mean, data.std)
        titles = label_texts(batch, data.class_names)[:SHOWN]
        path = folder / "batch.png"
        write_png(path, sheet(pixels.numpy(), titles, cell=LARGE))
    say(f"{len(titles)} of {counted(len(batch.images), 'image')} of the first batch: {path}")


def label_texts(batch: Batch, names: list[str]) -> list[str]:
    """Returns the class of each image, or the percentages of the two classes of a mixed one."""
    if batch.targets is None:
        return [names[label] for label in batch.labels.tolist()]
    fractions, classes = batch.targets.topk(2, dim=1)
    return [
        names[first] if fraction > 0.995 else f"{100 * fraction:.0f} {names[first]}, {100 * rest:.0f} {names[second]}"
        for (fraction, rest), (first, second) in zip(fractions.tolist(), classes.tolist(), strict=True)
    ]
