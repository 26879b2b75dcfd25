"""``lightning check-data``: reads every image once and tells what is wrong with them, before a run does."""

from __future__ import annotations

import hashlib
import html
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from vit_lightning.commands.console import say
from vit_lightning.commands.figures import image_grid
from vit_lightning.commands.session import session
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Request
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import write_whole

SPLITS: tuple[Split, ...] = ("train", "val", "test")
Report = dict[str, Any]


class Found(NamedTuple):
    """What is known of one image once it has been read."""

    split: Split
    label: int
    name: str
    fault: str | None = None
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels."""
    digest: str = ""
    """Of the pixels, so that a copy under another name or in another lossless format has the same."""
    sums: tuple[int, ...] = ()
    """Of each channel's values, 0 to 255."""
    squares: tuple[int, ...] = ()


def check_data(experiment: Experiment) -> Report:
    """Reads all images of all splits; leaves ``data.json``, ``index.html`` and ``samples.png`` in a folder.

    Raises:
        UserError: images are damaged and ``data.on_bad_image`` is error; after the report is written.
    """
    data = experiment.data
    with session(experiment, "check-data") as folder:
        data.in_memory = False  # each is read once, and the first that is damaged must not be the last
        data.prepare_data()
        found = list(read_all_images(data))
        report = summarise(found, data.class_names)
        write_whole(folder / "data.json", json.dumps(report, indent=2) + "\n")
        _draw_samples(data, found, folder / "samples.png")
        write_whole(folder / "index.html", page(report, experiment.name))
    say(table(report))
    say(f"report      {folder / 'index.html'}")
    damaged = [line for split in SPLITS for line in report["splits"][split]["damaged"]]
    if damaged and data.on_bad_image == "error":
        raise UserError(damaged)
    return report


def read_all_images(data: ImageData) -> Iterator[Found]:
    """Every image of every split, with a bar."""
    datasets: dict[Split, Any] = {split: data.dataset(split) for split in SPLITS}
    for split, dataset in datasets.items():
        if not hasattr(dataset, "whole"):
            raise UserError(f"data: {type(data).__name__} has no way to read single images of {split}")
    total = sum(len(dataset) for dataset in datasets.values())
    # threads, since Pillow decodes outside of Python's lock; few, since an image may take 200 MB
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool, tqdm(total=total, unit=" images") as bar:
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
    sums, squares = ([int(count @ power) for count in counts] for power in (values, values**2))
    return Found(split, label, name, None, (width, height), digest, tuple(sums), tuple(squares))


def summarise(found: Sequence[Found], class_names: Sequence[str]) -> Report:
    """The report, as plain data."""
    good = [image for image in found if image.fault is None]
    copies = defaultdict(list)
    for image in good:
        copies[image.digest].append(image)
    groups = [group for group in copies.values() if len(group) > 1]
    return {
        "splits": {
            split: _split_report([image for image in found if image.split == split], class_names) for split in SPLITS
        },
        "duplicates_within_splits": [_named(group) for group in groups if len({i.split for i in group}) == 1],
        "duplicates_across_splits": [_named(group) for group in groups if len({i.split for i in group}) > 1],
        "duplicates_with_other_labels": [_named(group) for group in groups if len({i.label for i in group}) > 1],
        **mean_and_std([image for image in good if image.split == "train"]),
    }


def _named(group: Sequence[Found]) -> list[str]:
    return [f"{image.split}: {image.name}" for image in group]


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
    """Of all pixels, between 0 and 1, for each channel; from whole numbers, so exact until the last division."""
    pixels = sum(image.size[0] * image.size[1] for image in images)
    if not pixels:
        return {"mean": [], "std": []}
    sums = [sum(values) for values in zip(*(image.sums for image in images), strict=True)]
    squares = [sum(values) for values in zip(*(image.squares for image in images), strict=True)]
    return {
        "mean": [round(total / pixels / 255, 4) for total in sums],
        "std": [
            round((square * pixels - total**2) ** 0.5 / pixels / 255, 4)
            for total, square in zip(sums, squares, strict=True)
        ],
    }


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("split", "images", "classes", "per class", "width", "height", "damaged")]
    for split, part in report["splits"].items():
        counts = [count for count in part["per_class"].values() if count] or [0]
        spans = [f"{part[side]['min']} to {part[side]['max']}" for side in ("width", "height")]
        per_class = f"{min(counts)} to {max(counts)}"
        rows.append((split, str(part["images"]), str(len(counts)), per_class, *spans, str(len(part["damaged"]))))
    return rows


def _facts(report: Report) -> list[tuple[str, str]]:
    kinds = ("within splits", "across splits", "with other labels")
    facts = [(f"duplicates {kind}", str(len(report[f"duplicates_{kind.replace(' ', '_')}"]))) for kind in kinds]
    return [*facts, *((name, ", ".join(f"{value:.4f}" for value in report[name])) for name in ("mean", "std"))]


def table(report: Report) -> str:
    """The report on one screen."""
    rows = _rows(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *(f"{name:<30} {value}" for name, value in _facts(report))])


def page(report: Report, title: str) -> str:
    """The report as one HTML page beside ``samples.png``."""

    def listed(heading: str, lines: Sequence[str]) -> str:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        return f"<h2>{heading}: {len(lines)}</h2>\n<ul>{items}</ul>\n" if lines else ""

    def grid(rows: Sequence[Sequence[str]]) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>\n"

    classes = [("class", *report["splits"])] + [
        (name, *(str(part["per_class"][name]) for part in report["splits"].values()))
        for name in report["splits"]["train"]["per_class"]
    ]
    style = "body{font-family:sans-serif;margin:2em} td{padding:.1em .8em;text-align:right} img{max-width:100%}"
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>",
        f"<h1>{html.escape(title)}</h1>",
        grid(_rows(report)),
        grid(_facts(report)),
        listed("Damaged", [line for part in report["splits"].values() for line in part["damaged"]]),
        listed("The same in several splits", [", ".join(group) for group in report["duplicates_across_splits"]]),
        listed("The same under other labels", [", ".join(group) for group in report["duplicates_with_other_labels"]]),
        listed("The same within a split", [", ".join(group) for group in report["duplicates_within_splits"]]),
        "<h2>Samples</h2><img src=samples.png>",
        grid(classes),
    ]
    return "\n".join(parts)


def _draw_samples(data: ImageData, found: Sequence[Found], path: Path) -> None:
    """Up to 64 training images, as many of each class, as they look where nothing is random."""
    places: dict[int, list[int]] = defaultdict(list)
    for index, image in enumerate(image for image in found if image.split == "train"):
        if image.fault is None:
            places[image.label].append(index)
    each = max(1, 64 // max(1, len(places)))
    chosen = [index for label in sorted(places) for index in places[label][:each]][:64]
    if chosen:
        batch = data.dataset("train").__getitems__(Request(chosen, None))  # type: ignore[attr-defined]
        titles = [data.class_names[label] for label in batch.labels.tolist()]
        image_grid(batch.images.numpy(), titles, [False] * len(titles)).savefig(path, dpi=150)
