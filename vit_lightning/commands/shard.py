"""``lightning shard``: the images of a page as large files that LitData reads, one after the other and restartable."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vit_lightning.commands.console import quiet, say
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.base import BAD_IMAGES, ImageData
from vit_lightning.data.decoded import DecodedImages
from vit_lightning.data.sharded import CONTENTS, need_litdata
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import hold, write_whole

SPLITS: tuple[Split, ...] = ("train", "val", "test")
IMAGES_IN_SHARD = 256
MAX_SHARD_BYTES = 2**32 - 2**20
"""LitData counts them in 32 bits."""


def shard(experiment: Experiment, images_in_shard: int = IMAGES_IN_SHARD) -> Path:
    """Writes all splits of the page's images, as they lie in their files, to ``experiment.out``; returns it.

    Each image is decoded once: what is damaged is an error or left out, as ``data.on_bad_image`` says. A shard is a
    file of its own with a checksum beside it, put in its place when it is complete; one that is there is not written
    again, so a writing that was stopped goes on, and ends with the same files.

    Raises:
        UserError: damaged images, or too many; no files to copy; the folder holds shards of other images.
    """
    quiet()
    need_litdata()
    if experiment.out is None:
        raise UserError("out is missing: lightning shard --config PAGE.yaml OUT")
    data = experiment.data
    data.in_memory = False
    data.prepare_data()
    out = Path(experiment.out)
    out.mkdir(parents=True, exist_ok=True)
    with hold(out, "out"):
        _refuse_other(out, data, images_in_shard)
        written = {
            split: write_split(out / split, data.dataset(split), images_in_shard, data.max_bad_share)
            for split in SPLITS
        }
        counts = {split: count for split, (count, _) in written.items()}
        skipped = [" ".join(line.split()) for _, lines in written.values() for line in lines]
        if skipped:
            write_whole(out / BAD_IMAGES, "".join(f"{line}\n" for line in skipped))
        page = {"class_names": data.class_names, "images": counts, "mean": data.mean, "std": data.std}
        write_whole(out / CONTENTS, json.dumps(page, indent=2) + "\n")
    if skipped:
        say(f"{len(skipped)} damaged images were left out: {out / BAD_IMAGES}")
    say(f"{', '.join(f'{count} {split}' for split, count in counts.items())} images: {out}")
    return out


def _refuse_other(out: Path, data: ImageData, images_in_shard: int) -> None:
    """Shards of one folder are of one set; what they are of is written before the first."""
    parts = [data.dataset(split).fingerprint() for split in SPLITS]  # type: ignore[attr-defined]
    plans = {
        choice: hashlib.sha256("".join([*parts, str(images_in_shard), choice]).encode()).hexdigest()
        for choice in ("error", "skip")
    }
    plan, path = plans[data.on_bad_image], out / "plan.txt"
    # shards that were written without skipping hold no damage, so that skipping may go on with them
    if path.is_file() and path.read_text(encoding="utf-8") not in (plan, plans["error"]):
        raise UserError(f"out={out} holds shards of other images (choose a new folder)")
    write_whole(path, plan)


def write_split(folder: Path, dataset: Any, images_in_shard: int, max_bad_share: float) -> tuple[int, list[str]]:
    """The shards of a split and LitData's ``index.json``; the number of images, and what was left out."""
    if not isinstance(dataset, DecodedImages):
        raise UserError(f"data: {type(dataset).__name__} has no files (choose ImageFolder or HuggingFaceSet)")
    folder.mkdir(exist_ok=True)
    starts = range(0, len(dataset), images_in_shard)
    shards: list[dict[str, Any]] = []
    skipped: list[str] = []
    for number, start in enumerate(tqdm(starts, desc=folder.name, unit=" shards", disable=None)):
        record = folder / f"shard-{number:06}.json"
        if not _is_whole(folder, record):
            indices = range(start, min(start + images_in_shard, len(dataset)))
            _write_shard(folder, record, number, dataset, indices)
        shards.append(json.loads(record.read_text(encoding="utf-8")))
        skipped += shards[-1]["skipped"]
        if len(skipped) > max_bad_share * len(dataset):
            damaged = f"{len(skipped)} of {len(dataset)} {folder.name} images are damaged, first:"
            raise UserError([f"data.max_bad_share={max_bad_share}: {damaged}", *skipped[:5]])
    filled = [part for part in shards if part["chunk"] is not None]
    if not filled:
        raise UserError(f"{folder.name} holds no image that can be decoded")
    index = {"chunks": [part["chunk"] for part in filled], "config": filled[0]["config"], "updated_at": "0"}
    write_whole(folder / "index.json", json.dumps(index))
    return sum(len(part["labels"]) for part in shards), skipped


def _is_whole(folder: Path, record: Path) -> bool:
    """Whether a shard is there, with the checksum that its record says."""
    if not record.is_file():
        return False
    said = json.loads(record.read_text(encoding="utf-8"))
    if said["chunk"] is None:
        return True
    path = folder / said["chunk"]["filename"]
    return path.is_file() and _checksum(path) == str(said["sha256"])


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_shard(folder: Path, record: Path, number: int, dataset: DecodedImages, indices: Sequence[int]) -> None:
    """One shard and then its record; a kill in between leaves what the next writing replaces."""
    from litdata.streaming.writer import BinaryWriter

    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    writer = BinaryWriter(str(part), chunk_size=len(indices) + 1, chunk_index=number)
    labels: list[int] = []
    skipped: list[str] = []
    size = 0
    for index in indices:
        source = dataset.source(index)
        try:
            dataset.whole(index)
        except UserError as error:
            if not dataset.skip:
                raise
            skipped += error.problems
            continue
        content = source.read_bytes() if isinstance(source, Path) else source
        writer.add_item(len(labels), content)  # bytes alone: LitData writes a dict twice, and reads it slowly
        labels.append(int(dataset.labels[index]))
        size += len(content)
        if size > MAX_SHARD_BYTES:
            raise UserError(f"{dataset.name(index)}: the {len(indices)} images of a shard are more than 4 GiB")
    said: dict[str, Any] = {"chunk": None, "config": None, "sha256": "", "labels": labels, "skipped": skipped}
    if labels:
        writer.done()
        written = json.loads((part / "0.index.json").read_text(encoding="utf-8"))
        said["chunk"], said["config"] = written["chunks"][0], {**written["config"], "chunk_size": None}
        path = part / said["chunk"]["filename"]
        said["sha256"] = _checksum(path)
        os.replace(path, folder / path.name)
    write_whole(record, json.dumps(said))
    shutil.rmtree(part, ignore_errors=True)
