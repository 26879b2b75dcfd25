"""``lightning embed``: features of images in a trained model, as a table."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.load import Checkpoint, Facts, Model, Size, Trust, open_model
from vit_lightning.config.experiment import make_data
from vit_lightning.config.own_files import also_search
from vit_lightning.data.base import ImageData
from vit_lightning.data.image_files import DAMAGED, ImageFiles, find_images, in_words
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError
from vit_lightning.limits import at_least, refuse
from vit_lightning.notation import counted
from vit_lightning.storage.checkpoint_files import run_folder_of
from vit_lightning.storage.folder import new_folder, to_csv, write_whole
from vit_lightning.weights.sources import Source
from vit_lightning.weights.trust import refuse_downloads, refuse_untrusted

Columns = dict[str, np.ndarray[Any, Any]]


def embed(
    *images: Path,
    ckpt: Checkpoint,
    split: Split = "test",
    out: Path | None = None,
    format: Literal["npz", "parquet", "csv"] | None = None,
    blocks: Sequence[int] = (),
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "auto",
) -> Path:
    """Writes the pooled features of images before the classifier, (n, e), with their names; returns the file.

    Args:
        *images: image files and folders; by default the test images of the run that trained the model.
        split: images of the run that are taken without any: train (without augmentation), val or test.
        out: new file; by default embeddings.npz in a new folder, RUN/embed/TIME or runs/embed/TIME.
        format: npz, parquet or csv; by default what the name of out says.
        blocks: numbers of encoder blocks, 0 the first and -1 the last, of which the mean over the patch tokens is
            written too.
        batch_size: images in a batch; with the run's own test images that of the run.
        num_workers: processes that decode image files; likewise.
        device: auto takes a GPU where there is one; or cpu, cuda, cuda:1, mps.

    Raises:
        UserError: model or images are not there; or, after all others are written, the damaged images.
    """
    suffix = f".{format}" if format else ".npz" if out is None else out.suffix
    problems = [*at_least(1, batch_size=batch_size), *at_least(0, num_workers=num_workers)]
    if out is not None and out.exists():
        problems.append(f"out={out} is there already (choose a new file)")
    if suffix not in _WRITERS:
        problems.append(f"out={out} must end in {', '.join(_WRITERS)} (or give --format)")
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        problems.append("format=parquet needs pyarrow: pip install 'vit-lightning[datasets]'")
    if image_size is not None and not images:
        problems.append(f"image_size={image_size} is for images that are given")
    if split != "test" and images:
        problems.append(f"split={split} is for the run's own images")
    refuse(problems)
    quiet()
    left_out = Counter[str]()
    files = find_images(images, left_out)
    source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
    model = Model(source)
    model.network.to(device_named(device))
    data = (
        model.data(files, batch_size=batch_size, num_workers=num_workers)
        if files
        else run_images(source, split, trust=trust)
    )
    if note := in_words(left_out) or data.notice:
        say(note)
    columns = _columns(model, data, blocks, split)
    problems = sorted(data.bad_images[split])
    if len(columns["image"]):
        with _folder(out, source) as folder:
            path = out or folder / f"embeddings{suffix}"
            write_whole(path, _WRITERS[suffix](columns))
        count, width = columns["features"].shape
        say(f"features of {counted(count, 'image')}, {counted(width, 'number')} each: {path}")
        if problems and not files:  # those of the run's own data are left out, as in its test
            say(f"left out {counted(len(problems), 'damaged image')}: {', '.join(problems[:3])}")
            return path
    if problems:
        others = "; those of the others are written" if len(columns["image"]) else ""
        all_images = len(columns["image"]) + len(problems)
        raise UserError([f"{len(problems)} of {all_images} images have no features{others}", *problems])
    return path


def device_named(name: str) -> torch.device:
    """Returns a device, auto the GPU where there is one; raises UserError if it is not there."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as fault:
        raise UserError(f"device={name}: {' '.join(str(fault).split())[:200]}") from fault
    return device


def run_images(source: Source, split: Split, *, trust: bool) -> ImageData:
    """Returns the data of the run that trained a model, with a split; ``trust`` allows any class and its own files."""
    if source.config is None:
        raise UserError(f"ckpt={source.place} is of no run with images: name images or folders")
    if not trust:
        refuse_untrusted({"data": source.config["data"]})
        refuse_downloads(source.config["data"])
    elif source.path is not None and (folder := run_folder_of(source.path)) is not None:
        also_search(folder)
    data = make_data(source.config)
    data.wanted = None if split == "train" else split
    try:
        data.check()
        data.setup({"val": "validate", "train": "fit"}.get(split, split))
    except UserError as error:
        raise UserError([f"data.{problem}" for problem in error.problems]) from error
    if note := data.take_classes(source.class_names, f"the model of ckpt={source.place}"):
        say(row("warning", note))
    return data


def _columns(model: Model, data: ImageData, blocks: Sequence[int], split: Split) -> Columns:
    """Returns the table: image, for images of a run label, features, and a column for each block."""
    if split != "test" and not data.own_loaders:
        raise UserError(f"split={split} needs data with our own loaders (ImageData)")
    dataset: Any = data.dataset(split)
    chosen = data.train_subset if split == "train" else None
    indices = torch.arange(data.image_count(split)) if chosen is None else chosen
    batches = data.predict_dataloader() if split == "test" else data.plain_batches(split, indices)
    names: list[str] = []
    labels: list[int] = []
    parts: list[list[torch.Tensor]] = []
    with tqdm(total=len(indices), desc="features", unit=" images", disable=None, leave=False) as bar:
        for batch in batches:
            pooled, *tokens = model.features(model.to_input(batch, data), blocks)
            good = batch.labels != DAMAGED
            first = model.prefix_tokens
            found = [pooled, *(each[:, first:].mean(dim=1) for each in tokens)]
            parts.append([each.float().cpu()[good] for each in found])
            names += [_name(dataset, index) for index in batch.indices[good].tolist()]
            labels += batch.labels[good].tolist()
            bar.update(len(batch.indices))
    keys = ["features", *(f"block_{number}" for number in blocks)]
    of_data = {} if isinstance(data, ImageFiles) else {"label": np.array(labels)}
    values = [torch.cat(column).numpy() for column in zip(*parts, strict=True)]
    return {"image": np.array(names), **of_data, **dict(zip(keys, values, strict=True))}


def _name(dataset: Any, index: int) -> str:
    name = getattr(dataset, "name", None)
    return str(name(index)) if callable(name) else str(index)


def _folder(out: Path | None, source: Source) -> AbstractContextManager[Path]:
    """Makes the folder of the table."""
    if out is None:
        run = None if source.path is None else run_folder_of(source.path)
        return new_folder(None, (run or Path("runs")) / "embed", "")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"out={out} cannot be made: {fault.strerror}") from fault
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"out={out} cannot be written to")
    return nullcontext(out.parent)


def _npz(columns: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **columns)  # type: ignore[arg-type]
    return content.getvalue()


def _parquet(columns: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    content = io.BytesIO()
    table = {name: list(value) if value.ndim > 1 else value for name, value in columns.items()}
    parquet.write_table(pyarrow.table(table), content)
    return content.getvalue()


def _csv(columns: Mapping[str, np.ndarray[Any, Any]]) -> str:
    head = [
        name if value.ndim == 1 else f"{name}_{number}"
        for name, value in columns.items()
        for number in range(1 if value.ndim == 1 else value.shape[1])
    ]
    rows = zip(*(value.tolist() for value in columns.values()), strict=True)
    cells = ([cell for item in row for cell in (item if isinstance(item, list) else [item])] for row in rows)
    return to_csv(head, cells)


_WRITERS: dict[str, Any] = {".npz": _npz, ".parquet": _parquet, ".csv": _csv}
"""Functions from columns to the contents of a file, by suffix."""
