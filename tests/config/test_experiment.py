"""An experiment: its config stays as it is, whatever is made of it."""

from __future__ import annotations

from copy import deepcopy

from vit_lightning.config.experiment import make_data
from vit_lightning.config.resolve import resolve

FLAGS = [
    "--model.patch_size=4",
    '--data.augment=[{"class_path": "RandomCrop", "padding": 1}]',
    '--trainer.callbacks=[{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}]',
]


def test_making_data_network_and_trainer_leaves_the_config_unchanged():
    experiment = resolve(FLAGS)
    before = deepcopy(dict(experiment.config))
    (stopping,) = experiment.make_trainer_arguments()["callbacks"]
    assert stopping.monitor == "val/loss"
    experiment.make_network()
    make_data(experiment.config)
    assert dict(experiment.config) == before
