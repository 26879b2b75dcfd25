"""``lightning shard``: writes the images of a config as Parquet files that HuggingFaceSet reads; restartable."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from vit_lightning.commands.console import quiet, say
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.bad_images import BAD_IMAGES, bad_image_lines, refuse_too_many
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Pixels
from vit_lightning.data.image_set import IMAGENET_MEAN, IMAGENET_STD
from vit_lightning.data.images import DecodedImages
from vit_lightning.data.items import Items
from vit_lightning.data.parquet import PLAN, UNFINISHED, file_name, need_datasets
from vit_lightning.data.splits import SPLITS
from vit_lightning.errors import UserError
from vit_lightning.limits import at_least, refuse
from vit_lightning.notation import counted
from vit_lightning.storage.folder import hold, write_whole

IMAGES_IN_GROUP = 8
"""Images in a row group, which is read for one of them: fewer read faster, more make a smaller index."""
QUALITY = 95
"""Quality of JPEGs of images that are reduced."""
SKIPPED = b"skipped"
"""Key of a file's metadata: errors of the images that it leaves out, as JSON."""


def shard(experiment: Experiment, out: Path, *, images_in_file: int = 1024, shorter_side: int | None = None) -> Path:
    """Writes the encoded images of all splits to a folder and returns it.

    Each image is decoded once as a check: damaged ones are an error or are left out, by ``data.on_bad_image``. A file
    appears when it is complete and is not written again, so that a stopped command continues where it was and ends in
    the same files.

    Args:
        out: the folder.
        images_in_file: images in a file.
        shorter_side: pixels to which the shorter side of a larger image is reduced (bicubic; a JPEG of quality 95); by
            default no image is changed. Files are smaller and faster to read; random crops enlarge what they show.

    Raises:
        UserError: damaged images, or too many; no encoded images; the folder holds files of other images.
    """
    refuse(at_least(1, images_in_file=images_in_file, shorter_side=shorter_side))
    quiet()
    need_datasets("lightning shard")
    data = experiment.data
    if not data.own_loaders:
        raise UserError(f"data.{data.title}: single images of a LightningDataModule cannot be read")
    data.in_memory = False
    data.prepare_data()
    if not all(isinstance(data.dataset(split), DecodedImages | Items) for split in SPLITS):
        raise UserError(
            f"data.class_path={type(data).__name__} holds decoded images, and so nothing to shard "
            "(choose ImageFolder, HuggingFaceSet, or a Dataset of single images)"
        )
    if out.is_file():
        raise UserError(f"out={out} is a file, not a folder")
    out.mkdir(parents=True, exist_ok=True)
    with hold(out, "out"):
        _refuse_other(out, data, images_in_file, shorter_side)
        write_whole(out / UNFINISHED, "lightning shard removes this file when it has written all others\n")
        written = {split: _write_split(out, split, data, images_in_file, shorter_side) for split in SPLITS}
        skipped = [problem for _, problems in written.values() for problem in problems]
        if skipped:
            write_whole(out / BAD_IMAGES, bad_image_lines(skipped))
            say(f"left out {counted(len(skipped), 'damaged image')}: {out / BAD_IMAGES}")
        (out / UNFINISHED).unlink()
    say(f"{', '.join(f'{count} {split}' for split, (count, _) in written.items())} images: {out}")
    say(f"read with   {shlex.join(_flags(out, data))}")
    return out


def _flags(out: Path, data: ImageData) -> list[str]:
    """Returns the flags that read the files; mean and std unless they are the default."""
    statistics = {"mean": (data.mean, IMAGENET_MEAN), "std": (data.std, IMAGENET_STD)}
    given = [f"--data.{key}={list(value)}" for key, (value, default) in statistics.items() if value != default]
    return ["--data.class_path=HuggingFaceSet", f"--data.path={out}", *(flag.replace(" ", "") for flag in given)]


def _refuse_other(out: Path, data: ImageData, images_in_file: int, shorter_side: int | None) -> None:
    """Writes the hash of the images before the first file, and compares it with an earlier one."""
    parts = [data.dataset(split).fingerprint() for split in SPLITS]  # type: ignore[attr-defined]
    plans = {
        choice: hashlib.sha256("".join([*parts, f"{images_in_file} {shorter_side} {choice}"]).encode()).hexdigest()
        for choice in ("error", "skip")
    }
    plan, path = plans[data.on_bad_image], out / PLAN
    # files that were written without skipping hold no damage, so that skipping may continue with them
    if path.is_file() and path.read_text(encoding="utf-8") not in (plan, plans["error"]):
        raise UserError(f"out={out} holds files of other images (choose a new folder)")
    write_whole(path, plan)


def _write_split(
    out: Path, split: str, data: ImageData, images_in_file: int, shorter_side: int | None
) -> tuple[int, list[str]]:
    """Writes the files of a split; returns the number of images, and the errors of those that are left out."""
    dataset: Any = data.dataset(split)  # type: ignore[arg-type]
    starts = range(0, len(dataset), images_in_file)
    images, skipped = 0, list[str]()
    for number, start in enumerate(tqdm(starts, desc=split, unit=" files", disable=None)):
        path = out / file_name(split, number, len(starts))
        metadata = _metadata(path)
        if metadata is None:
            indices = range(start, min(start + images_in_file, len(dataset)))
            _write_file(path, dataset, indices, data.class_names, shorter_side)
            metadata = _metadata(path)
            assert metadata is not None
        images += metadata.num_rows
        skipped += json.loads(metadata.metadata[SKIPPED])
        refuse_too_many(skipped, total=len(dataset), split=split, max_share=data.max_bad_share)
    if not images:
        raise UserError(f"{split} holds no image that can be decoded")
    return images, skipped


def _metadata(path: Path) -> Any:
    """Returns what a Parquet file says of itself; None if it is not there, or cut short."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return read_metadata(path)
    except (ArrowException, OSError):
        return None


def _write_file(
    path: Path, dataset: DecodedImages | Items, indices: range, class_names: list[str], shorter_side: int | None
) -> None:
    import datasets
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=class_names)})
    schema = features.arrow_schema
    part = path.with_name(f".{path.name}.part")
    skipped: list[str] = []
    rows: list[dict[str, Any]] = []
    # images are compressed already, and without statistics and dictionaries the files are smaller
    with ParquetWriter(part, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for index in indices:
            try:
                pixels = dataset.whole(index)
            except UserError as error:
                if not getattr(dataset, "skip", False):
                    raise
                skipped += error.problems
                continue
            if shorter_side is None or shorter_side >= min(pixels.shape[:2]):
                source = dataset.source(index)
                content = source.read_bytes() if isinstance(source, Path) else source
            else:
                content = reduced(pixels, shorter_side)
            rows.append({"image": {"bytes": content, "path": None}, "label": int(dataset.labels[index])})
            if len(rows) == IMAGES_IN_GROUP:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        writer.add_key_value_metadata({SKIPPED.decode(): json.dumps(skipped)})
    with part.open("rb") as file:
        os.fsync(file.fileno())  # a power cut must not leave a whole name with half a file
    os.replace(part, path)


def reduced(pixels: Pixels, shorter_side: int) -> bytes:
    """Returns a JPEG of an image (H, W, c) whose shorter side has so many pixels."""
    scale = shorter_side / min(pixels.shape[:2])
    size = round(pixels.shape[1] * scale), round(pixels.shape[0] * scale)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    file = BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
