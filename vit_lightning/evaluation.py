"""Measuring and using a trained model: validate, test, predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import seed_everything

from vit_lightning.checkpoints import find_checkpoint, load_network, read_checkpoint, run_folder_of
from vit_lightning.config import make_trainer_arguments
from vit_lightning.data import ImageData
from vit_lightning.folder import claim_folder, write_whole
from vit_lightning.run import Results, logged, make_data_and_module, make_trainer, quiet, say


def evaluate(config: Namespace, verb: str) -> Results:
    """``validate``, ``test`` or ``predict`` with the weights of ``config.ckpt``; leaves a folder with what came out."""
    quiet()
    seed_everything(config.seed_everything, verbose=False)
    config.trainer.logger = False
    arguments = make_trainer_arguments(config)
    data, module = make_data_and_module(config)
    path = find_checkpoint(config.ckpt)
    load_network(module.network, read_checkpoint(path), path)
    run = run_folder_of(path)
    folder = claim_folder(config.out, (Path("runs") / path.stem if run is None else run) / verb, "")
    trainer = make_trainer(arguments, folder, [], [])
    if verb == "predict":
        batches = trainer.predict(module, datamodule=data) or []
        if trainer.is_global_zero:
            _write_predictions(folder / "predictions.csv", batches, data)
            say(f"predictions of the test images: {folder / 'predictions.csv'}")
        return {}
    run_verb = trainer.validate if verb == "validate" else trainer.test
    run_verb(module, datamodule=data, verbose=False)
    results = logged(trainer, "val/" if verb == "validate" else "test/")
    write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    for name, value in {**results, "weights": path, "results": folder}.items():
        say(f"{name:<10} {value:.4f}" if isinstance(value, float) else f"{name:<10} {value}")
    return results


def _write_predictions(path: Path, batches: list[Any], data: ImageData) -> None:
    names = data.class_names
    order = torch.cat([batch["indices"] for batch in batches]).argsort()
    probabilities = torch.cat([batch["probabilities"] for batch in batches])[order]
    labels = torch.cat([batch["labels"] for batch in batches])[order]
    lines = ["index,label,prediction,probability"]
    for index, (label, row) in enumerate(zip(labels.tolist(), probabilities, strict=True)):
        top = int(row.argmax())
        lines.append(f"{index},{names[label]},{names[top]},{float(row[top]):.6f}")
    write_whole(path, "\n".join(lines) + "\n")
