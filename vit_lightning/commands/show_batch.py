"""``lightning show-batch``: a figure of training images as the model gets them."""

from __future__ import annotations

import torch

from vit_lightning.commands.console import counted, say
from vit_lightning.commands.session import session
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.figures.pictures import LARGE, sheet, write_png

SHOWN = 32


def show_batch(experiment: Experiment) -> None:
    """Draws the first images that the first epoch trains on, augmented and mixed, with their labels."""
    data = experiment.data
    with session(experiment, "show-batch") as folder:
        data.num_workers, data.in_memory = 0, False  # a few images of one batch
        data.prepare_data()
        data.setup("fit")
        batch = data.model_input(next(iter(data.train_dataloader())), completed=0)
        pixels = visible(data, batch.images[:SHOWN])
        titles = label_texts(batch, data.class_names)[:SHOWN]
        path = folder / "batch.png"
        write_png(path, sheet(pixels.numpy(), titles, cell=LARGE))
    say(f"{len(titles)} of {counted(len(batch.images), 'image')} of the first batch: {path}")


def visible(data: ImageData, images: torch.Tensor) -> torch.Tensor:
    """Returns normalised images (b, c, H, W) as uint8."""
    mean, std = (torch.tensor(value)[:, None, None] for value in (data.mean, data.std))
    return ((images * std + mean) * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)


def label_texts(batch: Batch, names: list[str]) -> list[str]:
    """Returns the class of each image, or the percentages of the two classes of a mixed one."""
    if batch.targets is None:
        return [names[label] for label in batch.labels.tolist()]
    fractions, classes = batch.targets.topk(2, dim=1)
    return [
        names[first] if fraction > 0.995 else f"{100 * fraction:.0f} {names[first]}, {100 * rest:.0f} {names[second]}"
        for (fraction, rest), (first, second) in zip(fractions.tolist(), classes.tolist(), strict=True)
    ]
