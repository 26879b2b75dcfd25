"""Measuring and using a trained model: validate, test, predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from vit_lightning.commands.console import quiet, say
from vit_lightning.commands.run import Results, logged, make_module, make_trainer
from vit_lightning.commands.test_report import interval, report_test, write_rows
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.options import TrainedOptions
from vit_lightning.data.base import ImageData
from vit_lightning.storage.checkpoint_files import find_checkpoint, load_network, read_checkpoint, run_folder_of
from vit_lightning.storage.folder import is_first, new_folder, write_whole
from vit_lightning.training.callbacks import TestPredictions, gather
from vit_lightning.training.classifier import ViTClassifier


def evaluate(experiment: Experiment, verb: str) -> Results:
    """``validate``, ``test`` or ``predict`` with the weights of ``ckpt``; leaves a folder with what came out."""
    quiet()
    assert isinstance(experiment.options, TrainedOptions)
    seed_everything(experiment.seed, verbose=False)
    arguments = experiment.make_trainer_arguments({"logger": False})
    data, module = experiment.data, make_module(experiment)
    path = find_checkpoint(experiment.options.ckpt)
    load_network(module.network, read_checkpoint(path), path)
    run = run_folder_of(path)
    with new_folder(experiment.out, (Path("runs") / path.stem if run is None else run) / verb, "") as folder:
        predictions = TestPredictions()
        trainer = make_trainer(arguments, folder, [predictions], [])
        if verb == "predict":
            return _predict(trainer, module, data, folder)
        run_verb = trainer.validate if verb == "validate" else trainer.test
        run_verb(module, datamodule=data, verbose=False)
        results = logged(trainer, "val/" if verb == "validate" else "test/") | interval(predictions.table)
        if is_first() and predictions.table:
            assert module.confusion_matrix is not None
            say(report_test(folder, predictions.table, data, module.confusion_matrix))
        write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    for name, value in {**results, "weights": path, "results": folder}.items():
        say(f"{name:<13} {value:.4f}" if isinstance(value, float) else f"{name:<13} {value}")
    return results


def _predict(trainer: Trainer, module: ViTClassifier, data: ImageData, folder: Path) -> Results:
    batches: list[Any] = trainer.predict(module, datamodule=data) or []
    columns = [torch.cat([batch[name].double().cpu() for batch in batches]) for name in ("indices", "labels")]
    probabilities = torch.cat([batch["probabilities"].double().cpu() for batch in batches])
    rows = gather(trainer, torch.cat([torch.stack(columns, dim=1), probabilities], dim=1))
    _write_predictions(folder / "predictions.csv", rows[rows[:, 0].argsort()], data)
    say(f"predictions of the test images: {folder / 'predictions.csv'}")
    return {}


def _write_predictions(path: Path, rows: torch.Tensor, data: ImageData) -> None:
    """Index, label, prediction and its probability of each image, from rows of index, label and all probabilities."""
    names = data.class_names
    said = [(int(row[0]), names[int(row[1])], int(row[2:].argmax()), float(row[2:].max())) for row in rows]
    lines = [(index, label, names[top], probability) for index, label, top, probability in said]
    write_rows(path, ("index", "label", "prediction", "probability"), lines)
