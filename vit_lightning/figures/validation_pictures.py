"""Pictures and plain numbers of a run's validations, written while it trains."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Request
from vit_lightning.errors import UserError
from vit_lightning.figures.inside import attention_sheet
from vit_lightning.figures.pictures import (
    balanced,
    confusion_picture,
    enlarged,
    numbers,
    pixels_of,
    predictions_sheet,
    sheet,
    write_png,
)
from vit_lightning.inspect.survey import glance
from vit_lightning.inspect.watch import find_blocks, grid_of
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.storage.metrics import json_number
from vit_lightning.storage.wandb_logger import RunLogger
from vit_lightning.storage.wandb_values import IMAGES
from vit_lightning.training.callbacks import gather, has_whole_weights, is_due, labelled
from vit_lightning.training.lightning_detours import logged_steps
from vit_lightning.training.mae import MAE

Array = np.ndarray[Any, Any]

SAMPLE = 32
"""Largest number of images on a picture."""
INSIDE = 8
"""Largest number of images whose attention is drawn."""
CELLS = 10_000
"""Largest number of cells of a confusion matrix in a JSON file: all of them, of up to 100 classes."""


class ValidationPictures(Callback):
    """Callback that writes pictures and numbers of the last validation in epochs 1, 2, 4, 8, ..., and in the last one.

    They are of the predictions that the validation computes anyway, on all ranks. The validation step must return
    logits (b, classes), as ViTClassifier's does; without them nothing is written. In the run folder, for epoch 12
    (counted from 1), and in W&B at the step of the validation:

    - ``validation/epoch-0012.png``: the same images each time, as many of each class, with predictions and their
      confidence; a wrong one has a frame and a second line with the true class. Only for data with our own loaders.
    - ``validation/images/INDEX.png``: these images alone, for W&B's table of predictions.
    - ``validation/confusion-0012.png``: the confusion matrix.
    - ``validation/attention-0012.png``: of a ViT, where the head looks in the first of these images, layer by layer
      (``inspect.survey.glance``).
    - ``validation/reconstructions-0012.png``: of a run of MAE, in place of all others: some of these images masked,
      reconstructed, and as they are.
    - ``validation/epoch-0012.json``, written last, a mapping of plain numbers::

        epoch            12, counted from 1
        step             that of the validation's row in metrics.jsonl
        images           number of validation images
        accuracy         share of them that is right
        classes          names of the classes; all classes below are positions in this list
        class_images     [images of each class]
        class_accuracy   [accuracy of each class; null without images]
        confusion        [[true class, predicted class, images], ...], the largest ``CELLS`` of the cells above 0
        sample           {index, label, prediction, confidence}: lists, of the images on epoch-0012.png in its order;
                         index is that of the image in the validation split
        effective_rank   [effective rank of the tokens after each block, of those images]; only of a ViT

    Args:
        data: the data module.
        wandb: W&B.
        every_n_epochs: epochs between two pictures, 0 for none; None for each power of two, since a network changes
            most at first.
    """

    def __init__(self, data: ImageData, wandb: RunLogger, every_n_epochs: int | None = None) -> None:
        self.data, self.wandb, self.every_n_epochs = data, wandb, every_n_epochs
        self._due = False
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sample: list[int] | None = None
        self._images: Array | None = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._parts, self._due = [], is_fit and self._is_due(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        power = 1 << (trainer.current_epoch + 1).bit_length() - 1
        every = power if self.every_n_epochs is None else self.every_n_epochs
        if not every or not is_due(trainer, every):
            return False
        left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_idx - 1
        return not (trainer.val_check_batch or math.inf) <= left < math.inf  # else there is a later one in this epoch

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        seen = sum(len(part[0]) for part in self._parts)
        found = labelled(trainer, outputs, batch, seen) if self._due and not dataloader_idx else None
        if found is None or outputs.shape[1] != len(self.data.label_names):
            return
        confidence, prediction = outputs.detach().float().softmax(dim=-1).max(dim=-1)
        self._parts.append(
            (found.indices, found.labels, prediction, confidence)
        )  # on the device, without waiting for it

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._due:
            return
        columns = [torch.cat(column).cpu().double() for column in zip(*self._parts, strict=True)]
        self._parts = []
        rows = gather(trainer, torch.stack(columns, dim=1) if columns else torch.empty(0, 4, dtype=torch.float64))
        classes = len(self.data.label_names)
        table = rows[((rows[:, 1:3] >= 0) & (rows[:, 1:3] < classes)).all(dim=1)].numpy()  # a loss may ignore labels
        autoencoder = pl_module if isinstance(pl_module, MAE) and has_whole_weights(trainer) else None
        if (len(table) or autoencoder is not None) and is_first():
            if autoencoder is not None:
                self._draw_reconstructions(trainer, autoencoder)
            else:
                self._write(trainer, pl_module, table[table[:, 0].argsort(kind="stable")])

    def _write(self, trainer: Trainer, pl_module: LightningModule, table: Array) -> None:
        epoch, step = trainer.current_epoch + 1, logged_steps(trainer)
        folder = Path(trainer.default_root_dir) / "validation"
        folder.mkdir(exist_ok=True)
        is_new = self._sample is None
        sample, images = self._choose(table)
        if is_new and images is not None:
            (folder / IMAGES).mkdir(exist_ok=True)
            for index, image in zip(sample[:, 0].astype(int), images, strict=True):
                write_png(folder / IMAGES / f"{index}.png", enlarged(image))
        found = numbers(table[:, 1].astype(int), table[:, 2].astype(int), self.data.label_names)
        facts = {"epoch": epoch, "step": step, **_facts(table, sample, found)}
        title = f"epoch {epoch}: {100 * facts['accuracy']:.2f} % of {facts['images']:,} validation images are right"
        if images is not None and len(images):
            rows = list(zip(*(facts["sample"][name] for name in ("label", "prediction", "confidence")), strict=True))
            drawn = predictions_sheet(images, self.data.label_names, rows, f"{title}, {len(images)} of them here")
            write_png(folder / f"epoch-{epoch:04d}.png", drawn)
        matrix = confusion_picture(found["confusion"], self.data.label_names, title)
        write_png(folder / f"confusion-{epoch:04d}.png", matrix)
        network = getattr(pl_module, "network", None)
        is_whole = has_whole_weights(trainer)
        if images is not None and len(images) and network is not None and find_blocks(network) and is_whole:
            with contextlib.suppress(UserError, torch.OutOfMemoryError):  # no attention that is known, or no room
                facts["effective_rank"] = self._draw_inside(trainer, network, images, folder, epoch)
        path = folder / f"epoch-{epoch:04d}.json"
        write_whole(path, json.dumps(facts) + "\n")
        self.wandb.log_validation(path)

    def _draw_reconstructions(self, trainer: Trainer, module: MAE) -> None:
        """Draws images with their patches masked, as the decoder tells them, and as they are."""
        epoch, folder = trainer.current_epoch + 1, Path(trainer.default_root_dir) / "validation"
        table = np.zeros((self.data.image_count("val"), 4))
        table[:, 0] = np.arange(len(table))
        rows, images = self._choose(table)
        if images is None or not len(images):
            return
        shown = np.linspace(0, len(images) - 1, min(INSIDE, len(images))).astype(int)  # a row of the sheet
        device = trainer.strategy.root_device
        with trainer.precision_plugin.val_step_context(), torch.no_grad():
            given = self.data.transform.normalise(torch.from_numpy(images[shown]).to(device))
            drawn = module.reconstruct(given, torch.from_numpy(rows[shown, 0]).long().to(device))
        pixels = [pixels_of(one, self.data.mean, self.data.std).numpy() for one in drawn]
        captions = [word for word in ("masked", "reconstructed", "original") for _ in shown]
        folder.mkdir(exist_ok=True)
        path = folder / f"reconstructions-{epoch:04d}.png"
        rows_of_sheet = np.concatenate([*pixels, images[shown]])
        write_png(path, sheet(rows_of_sheet, captions, title=f"epoch {epoch}", columns=len(shown)))
        self.wandb.log_images({"images/reconstructions": path}, logged_steps(trainer))

    def _draw_inside(
        self, trainer: Trainer, network: nn.Module, images: Array, folder: Path, epoch: int
    ) -> list[float | str]:
        """Draws attention of a ViT; returns the effective ranks of its tokens."""
        images = images[:: -(-len(images) // INSIDE)]  # of many classes
        pixels = torch.from_numpy(images).to(trainer.strategy.root_device)
        with trainer.precision_plugin.val_step_context():
            given = self.data.transform.normalise(pixels).to(next(network.parameters()).dtype)
            maps, ranks = glance(network, given)
        drawn = attention_sheet(images, maps.numpy(), grid_of(network).columns)
        write_png(folder / f"attention-{epoch:04d}.png", drawn)
        return [json_number(rank) for rank in ranks]

    def _choose(self, table: Array) -> tuple[Array, Array | None]:
        """Returns rows and pixels of the fixed images, which are chosen and read once, without those now damaged."""
        if self._sample is None:
            self._sample = table[balanced(table[:, 1], SAMPLE), 0].astype(int).tolist()
            if self.data.own_loaders:
                dataset: Any = self.data.dataset("val")
                with isolate_rng():
                    batch = dataset.__getitems__(Request(self._sample, None))
                if not isinstance(batch, UserError) and batch.indices.tolist() == self._sample:
                    self._images = batch.images.cpu().numpy()
        place = {int(index): row for row, index in enumerate(table[:, 0])}
        shown = [number for number, index in enumerate(self._sample) if index in place]
        rows = table[[place[self._sample[number]] for number in shown]]
        return rows, None if self._images is None else self._images[shown]


def _facts(table: Array, sample: Array, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a JSON file, but for epoch and step, from rows of four columns and their ``numbers``."""
    columns = zip(("index", "label", "prediction"), sample.T[:3].astype(int), strict=True)
    return {
        "images": len(table),
        "accuracy": round(float((table[:, 1] == table[:, 2]).mean()), 6),
        **found,
        "confusion": found["confusion"][:CELLS],
        "sample": {
            **{name: column.tolist() for name, column in columns},
            "confidence": np.nan_to_num(sample[:, 3]).round(6).tolist(),
        },
    }
