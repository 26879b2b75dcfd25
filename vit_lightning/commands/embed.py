"""``lightning embed``: features of images in a trained model, as NumPy arrays."""

import io
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.load import Checkpoint, Facts, Model, Size, Trust, open_model
from vit_lightning.config.experiment import make_data
from vit_lightning.config.own_files import also_search
from vit_lightning.data.base import ImageData
from vit_lightning.data.image_files import ImageFiles, find_images, in_words
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, at_least, counted, named, refuse
from vit_lightning.storage.folder import new_folder, write_whole
from vit_lightning.training.resources import device_type
from vit_lightning.weights.sources import Source
from vit_lightning.weights.trust import refuse_untrusted

Columns = dict[str, np.ndarray[Any, Any]]


def embed(
    *images: Path,
    ckpt: Checkpoint,
    split: Split = "test",
    out: Path | None = None,
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
    batch_size: int = 64,
    num_workers: int = 0,
) -> Path:
    """Writes the pooled features of images before the classifier, (n, e), with their names; returns the file.

    Args:
        *images: image files and folders; by default the test images of the run that trained the model.
        split: images of the run that are taken without any: train (without augmentation), val or test.
        out: new .npz file; by default embeddings.npz in a new folder, RUN/embed/TIME or runs/embed/TIME.
        batch_size: images in a batch; with the run's own test images that of the run.
        num_workers: processes that decode image files; likewise.

    Raises:
        UserError: model or images are not there, or an image is damaged.
    """
    problems = [*at_least(1, batch_size=batch_size), *at_least(0, num_workers=num_workers)]
    if out is not None and out.exists():
        problems.append(f"out={out} is there already (choose a new file)")
    if out is not None and out.suffix != ".npz":
        problems.append(f"out={out} must end in .npz")
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
    model.network.to(device_type("auto"))
    data = (
        model.data(files, batch_size=batch_size, num_workers=num_workers)
        if files
        else run_images(source, split, trust=trust)
    )
    if note := in_words(left_out) or data.notice:
        say(note)
    columns = _columns(model, data, split)
    content = io.BytesIO()
    np.savez(content, **columns)  # type: ignore[arg-type]
    with ExitStack() as stack:
        parent = (source.run or Path("runs")) / "embed"
        path = out or stack.enter_context(new_folder(None, parent, "")) / "embeddings.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    count, width = columns["features"].shape
    say(f"features of {counted(count, 'image')}, {counted(width, 'number')} each: {path}")
    return path


def run_images(source: Source, split: Split, *, trust: bool) -> ImageData:
    """Returns the data of the run that trained a model, with a split; ``trust`` allows any class and its own files."""
    if source.config is None:
        raise UserError(f"ckpt={source.place} is of no run with images: name images or folders")
    if not trust:
        refuse_untrusted({"data": source.config["data"]})
    elif source.run is not None:
        also_search(source.run)
    data = make_data(source.config)
    data.wanted = None if split == "train" else split
    with named("data."):
        data.check()
        data.setup({"val": "validate", "train": "fit"}.get(split, split))
    names = source.class_names  # none of a masked autoencoder
    if names and (note := data.take_classes(names, f"the model of ckpt={source.place}")):
        say(row("warning", note))
    return data


def _columns(model: Model, data: ImageData, split: Split) -> Columns:
    """Returns the table: image, for images of a run label, and features."""
    if split != "test" and not data.own_loaders:
        raise UserError(f"split={split} needs data with our own loaders (ImageData)")
    dataset: Any = data.dataset(split)
    name = dataset.name if callable(getattr(dataset, "name", None)) else str
    chosen = data.train_subset if split == "train" else None
    indices = torch.arange(data.image_count(split)) if chosen is None else chosen
    batches = data.predict_dataloader() if split == "test" else data.plain_batches(split, indices)
    names: list[str] = []
    labels: list[int] = []
    features: list[torch.Tensor] = []
    with tqdm(total=len(indices), desc="features", unit=" images", disable=None, leave=False) as bar:
        for batch in batches:
            features.append(model.features(model.to_input(batch, data))[0].float().cpu())
            names += [str(name(index)) for index in batch.indices.tolist()]
            labels += batch.labels.tolist()
            bar.update(len(batch.indices))
    of_data = {} if isinstance(data, ImageFiles) else {"label": np.array(labels)}
    return {"image": np.array(names), **of_data, "features": torch.cat(features).numpy()}
