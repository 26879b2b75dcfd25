"""``lightning validate``, ``test`` and ``predict``: a trained model on the images of its config, or on image files."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from vit_lightning.commands.console import row, say, stage_lines
from vit_lightning.commands.load import Prediction, top_classes
from vit_lightning.commands.module import Restored, compile_chosen, load_weights, make_module
from vit_lightning.commands.session import Results, logged, make_trainer, measure_test, session
from vit_lightning.config.experiment import Experiment
from vit_lightning.data.image_files import ImageFiles, find_images, in_words
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, at_least, counted, refuse
from vit_lightning.figures.test_report import report_test, write_rows
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.training.callbacks import TestPredictions, gather
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.resources import AUTO
from vit_lightning.weights.init_from import with_resized_positions

SHOWN_LINES = 20
"""Largest number of images whose predictions are printed; they are written in any case."""


def load_trained(experiment: Experiment) -> tuple[LightningModule, Path, list[Callback]]:
    """Returns the LightningModule of ``ckpt``, its file, and what loads the weights where that is still to do."""
    assert experiment.trained is not None
    path, checkpoint, notes = experiment.trained
    for note in notes:
        say(row("warning", note))
    module = make_module(experiment)
    if not isinstance(module, ViTClassifier):
        return module, path, [Restored(checkpoint, path)]
    given = experiment.data.image_size, experiment.config["resize_positions"]
    checkpoint, changed = with_resized_positions(checkpoint, module.network, *given)
    if changed:
        say(row("image size", changed))
    load_weights(module, checkpoint, path)
    return module, path, []


def validate(experiment: Experiment) -> Results:
    """Measures the model of ``ckpt`` on the validation images."""
    return evaluate(experiment, "validate")


def test(experiment: Experiment) -> Results:
    """Measures the model of ``ckpt`` on the test images."""
    return evaluate(experiment, "test")


def evaluate(experiment: Experiment, stage: Literal["validate", "test"]) -> Results:
    """Measures the model of ``ckpt``; writes ``results.json`` and, of a test, its report to a new folder."""
    data = experiment.data
    with session(experiment, stage) as folder:
        module, path, restored = load_trained(experiment)
        predictions = TestPredictions()
        callbacks = [predictions, *restored]
        trainer = make_trainer(experiment.make_trainer_arguments({"logger": False}), folder, callbacks, [])
        if experiment.config["compile"] != AUTO:  # which would not pay for one pass
            compile_chosen(module, experiment, trainer)
        if stage == "validate":
            trainer.validate(module, datamodule=data.for_trainer, verbose=False)
            results = logged(trainer, "val")
        else:
            results, tables = measure_test(trainer, module, data, predictions)
            if is_first() and tables[""]:
                say(report_test(folder, tables[""], data))
        write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    split: Split = "val" if stage == "validate" else "test"
    if data.own_loaders and data.notice:
        say(row("note", data.notice))
    if split in data.cut_splits:
        cut = f"cut from the training images by split_seed={data.split_seed}"
        say(row("images", f"{data.image_count(split):,} of {split}, {cut}"))
    say(stage_lines(split, results, data.further))
    say(row("weights", str(path)))
    say(row("results", str(folder)))
    return results


def predict(experiment: Experiment, *, top_k: int = 5) -> None:
    """Predicts the given image files; without any all images of the run's predict_dataloader, else of its test.

    Args:
        top_k: number of top classes per image.
    """
    refuse(at_least(1, top_k=top_k))
    if experiment.images:
        predict_files(experiment, top_k)
    else:
        predict_test_images(experiment)


def predict_test_images(experiment: Experiment) -> None:
    """Writes label, if any, prediction and probability of each image to ``predictions.csv`` in a new folder."""
    with session(experiment, "predict") as folder:
        path = folder / "predictions.csv"
        trainer, found = _run_network(experiment, folder, {})
        if not found:
            say("predictions are those that a BasePredictionWriter has written")
            return
        values, tops = found["probabilities"].double().max(dim=1)
        # else in the order in which Lightning shares the images out to the ranks
        indices = found.get("indices", torch.arange(len(tops)) * trainer.world_size + trainer.global_rank)
        names = [*experiment.data.label_names, ""]  # of no label
        columns = [indices, found.get("labels", torch.full_like(tops, -1)), tops, values]
        rows = gather(trainer, torch.stack([column.double() for column in columns], dim=1)).tolist()
        lines = [(int(n), names[int(label)], names[int(top)], share) for n, label, top, share in sorted(rows)]
        write_rows(path, ("index", "label", "prediction", "probability"), lines)
    say(f"predictions of {counted(len(lines), 'image')}: {path}")


def predict_files(experiment: Experiment, top_k: int) -> None:
    """Writes the most likely classes of each image file to a new folder.

    Images are preprocessed like the test images of the run, whose data need not be there.

    Raises:
        UserError: a path does not exist, or an image is damaged.
    """
    data = experiment.data
    assert isinstance(data, ImageFiles)
    left_out = Counter[str]()
    data.files = files = find_images(experiment.images, left_out)
    if left_out:
        say(in_words(left_out))
    with session(experiment, "predict") as folder:
        _, found = _run_network(experiment, folder, _one_device(experiment.trainer["devices"]))
        each = zip(map(str, files), found["probabilities"], strict=True)
        predictions = [top_classes(file, of_file, data.class_names, top_k) for file, of_file in each]
        path = folder / "predictions.csv"
        _write(path, predictions)
    for file, classes, values in predictions if len(predictions) <= SHOWN_LINES else []:
        top = ", ".join(f"{name} {100 * value:.1f} %" for name, value in list(zip(classes, values, strict=True))[:3])
        say(f"{file}: {top}")
    say(f"predictions of {counted(len(predictions), 'image')}: {path}")


def _run_network(experiment: Experiment, folder: Path, given: Mapping[str, Any]) -> tuple[Trainer, dict[str, Tensor]]:
    """Returns the Trainer, and what ``classify`` tells of all images of this process."""
    module, _, restored = load_trained(experiment)
    trainer = make_trainer(experiment.make_trainer_arguments({"logger": False, **given}), folder, restored, [])
    batches: list[Any] = trainer.predict(module, datamodule=experiment.data.for_trainer) or []
    other = next((type(batch).__name__ for batch in batches if not isinstance(batch, Mapping)), None)
    if other and not any(isinstance(callback, BasePredictionWriter) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        way_out = "leave it out, for the softmax of forward, or use Lightning's Trainer.predict"
        raise UserError(f"predict_step of {type(module).__name__} returns {other} ({way_out})")
    return trainer, {name: torch.cat([one[name] for one in batches]).cpu() for name in (() if other else batches[0])}


def _one_device(devices: Any) -> dict[str, Any]:
    """Returns Trainer arguments for one device, however many the run was trained on: a few images need no more."""
    one = devices if isinstance(devices, list) and len(devices) == 1 else 1
    return {"callbacks": None, "devices": one, "strategy": "auto", "num_nodes": 1, "limit_predict_batches": None}


def _write(path: Path, predictions: Sequence[Prediction]) -> None:
    numbers = range(1, len(predictions[0].classes) + 1)
    head = ["file", *(f"{column}_{n}" for n in numbers for column in ("class", "probability"))]
    tops = [zip(one.classes, one.probabilities, strict=True) for one in predictions]
    write_rows(path, head, [[one.file, *chain(*top)] for one, top in zip(predictions, tops, strict=True)])
