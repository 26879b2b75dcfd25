"""``lightning validate`` and ``lightning test``: measure a trained model."""

from __future__ import annotations

import json
from typing import Literal

from vit_lightning.commands.console import row, say, stage_line
from vit_lightning.commands.session import Results, compile_chosen, load_trained, logged, make_trainer, session
from vit_lightning.config.experiment import Experiment
from vit_lightning.figures.test_report import interval, report_test
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.training.callbacks import TestPredictions


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
        module, path = load_trained(experiment)
        predictions = TestPredictions()
        trainer = make_trainer(experiment.make_trainer_arguments({"logger": False}), folder, [predictions], [])
        compile_chosen(module, experiment)
        measure = trainer.validate if stage == "validate" else trainer.test
        measure(module, datamodule=data, verbose=False)
        results = logged(trainer, "val" if stage == "validate" else "test") | interval(predictions.table)
        if is_first() and predictions.table:
            say(report_test(folder, predictions.table, data))
        write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    say(stage_line("val" if stage == "validate" else "test", results))
    say(row("weights", str(path)))
    say(row("results", str(folder)))
    return results
