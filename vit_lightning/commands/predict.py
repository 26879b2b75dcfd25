"""``lightning predict --ckpt RUN IMAGES``: what a trained model says of images of the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from vit_lightning.commands.console import quiet, say
from vit_lightning.commands.figures import image_grid
from vit_lightning.commands.run import make_module, make_trainer
from vit_lightning.commands.test_report import write_rows
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.options import PredictOptions
from vit_lightning.data.base import BAD_IMAGES
from vit_lightning.data.image_files import DAMAGED, ImageFiles, find_images
from vit_lightning.data.sampling import Request
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import find_checkpoint, load_network, read_checkpoint, run_folder_of
from vit_lightning.storage.folder import new_folder, write_whole

SHOWN_IMAGES = 30
"""Images on the sheet."""
SHOWN_LINES = 20
"""Images up to which what is said of them is printed, besides being written."""

Said = tuple[str, list[str], list[float]]
"""A file, its likeliest classes, and their probabilities."""


def predict_images(experiment: Experiment) -> None:
    """Writes the likeliest classes of each image, and a sheet of the first ones, to a folder.

    Images look as the test images of the run; the data of the run need not be there. Those that are damaged are named
    and listed in ``bad_images.txt``, and the others are predicted all the same.

    Raises:
        UserError: a place is not there; or, when all is written and unless ``data.on_bad_image`` is skip, the images
            that were damaged.
    """
    data, options = experiment.data, experiment.options
    assert isinstance(data, ImageFiles)
    assert isinstance(options, PredictOptions)
    data.files = files = find_images(experiment.images)
    quiet()
    seed_everything(experiment.seed, verbose=False)
    arguments = experiment.make_trainer_arguments(
        {"logger": False, "callbacks": None, **_one_device(experiment.trainer["devices"])}
    )
    module = make_module(experiment)
    path = find_checkpoint(options.ckpt)
    load_network(module.network, read_checkpoint(path), path)
    run = run_folder_of(path)
    with new_folder(experiment.out, (Path("runs") / path.stem if run is None else run) / "predict", "") as folder:
        trainer = make_trainer(arguments, folder, [], [])
        batches: list[Any] = trainer.predict(module, datamodule=data) or []
        labels = torch.cat([batch["labels"] for batch in batches]).cpu()
        probabilities = torch.cat([batch["probabilities"] for batch in batches]).cpu()
        good = (labels != DAMAGED).nonzero()[:, 0].tolist()
        said = [_likeliest(files[row], probabilities[row], data.class_names, options.top_k) for row in good]
        written = _write(folder, said, options.format) if said else None
        if said:
            _draw(folder / "predictions.png", data, good[:SHOWN_IMAGES], said[:SHOWN_IMAGES])
    _tell(said, written)
    problems = sorted(data.bad_images["test"])
    if problems and data.on_bad_image == "error":
        left = f", those of the {len(said)} others are written" if said else ""
        raise UserError([f"{len(problems)} of {len(files)} images have no prediction{left}", *problems])
    for problem in problems:
        say(f"left out: {problem} (all are in {folder / BAD_IMAGES})")


def _one_device(devices: Any) -> dict[str, Any]:
    """Returns arguments of the Trainer: a run may have been trained on more devices than a few images need."""
    one = devices if isinstance(devices, list) and len(devices) == 1 else 1
    return {"devices": one, "strategy": "auto", "num_nodes": 1, "limit_predict_batches": None}


def _likeliest(file: Path, probabilities: Tensor, names: Sequence[str], count: int) -> Said:
    values, classes = probabilities.topk(min(count, len(names)))
    return str(file), [names[label] for label in classes.tolist()], values.tolist()


def _write(folder: Path, said: Sequence[Said], kind: str) -> Path:
    path = folder / f"predictions.{kind}"
    if kind == "json":
        rows = [
            {
                "file": file,
                "classes": [
                    {"class": name, "probability": round(value, 6)} for name, value in zip(names, values, strict=True)
                ],
            }
            for file, names, values in said
        ]
        write_whole(path, json.dumps(rows, indent=2) + "\n")
    else:
        count = len(said[0][1])
        head = ["file", *(f"{column}_{n}" for n in range(1, count + 1) for column in ("class", "probability"))]
        lines = [
            [file, *(item for pair in zip(names, values, strict=True) for item in pair)] for file, names, values in said
        ]
        write_rows(path, head, lines)
    return path


def _draw(path: Path, data: ImageFiles, rows: Sequence[int], said: Sequence[Said]) -> None:
    """The first images as the model sees them, each with its file and likeliest class."""
    images = data.dataset("test").__getitems__(Request(list(rows), None)).images  # type: ignore[attr-defined]
    titles = [f"{Path(file).name}\n{names[0]} ({100 * values[0]:.0f} %)" for file, names, values in said]
    image_grid(np.asarray(images), titles, [False] * len(titles), columns=5).savefig(path, dpi=150)


def _tell(said: Sequence[Said], written: Path | None) -> None:
    for file, names, values in said if len(said) <= SHOWN_LINES else []:
        best = ", ".join(f"{name} {100 * value:.1f} %" for name, value in list(zip(names, values, strict=True))[:3])
        say(f"{file}: {best}")
    if written is not None:
        say(f"predictions of {len(said)} images: {written}")
