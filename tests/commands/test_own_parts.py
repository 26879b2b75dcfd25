"""Runs with parts of the user's own, in files beside a config: from another folder, killed, resumed, used again."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
from processes import Running, command

PARTS = """import os
import signal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn.functional import cross_entropy

from pieces.mixing import mix
from vit_lightning import ResidualAdd, ViTClassifier
from vit_lightning.models.layers import NamedSequential


class PostNorm(NamedSequential):
    def __init__(self, emb_size, attention, feed_forward, norm, layer_scale=None, drop_path=0.0):
        super().__init__(attention=ResidualAdd(attention), norm=norm(emb_size), feed_forward=feed_forward)


class Mixing(torch.nn.Module):
    def __init__(self, emb_size: int, num_heads: int, *, scale: float = 1.0):
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.eye(emb_size)), scale

    def forward(self, tokens):
        return mix(tokens @ self.weight) * self.scale


class WithAux(ViTClassifier):
    def __init__(self, *args, aux_weight: float = 0.3, **kwargs):
        super().__init__(*args, **kwargs)
        self.aux_weight, self.aux = aux_weight, torch.nn.Linear(64, self.num_classes)

    def training_step(self, batch, batch_idx):
        from pieces.late import WEIGHT

        aux = cross_entropy(self.aux(batch[0].flatten(1)), batch[1])
        return super().training_step(batch, batch_idx) + self.aux_weight * WEIGHT * aux


class Kill(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if os.environ.get("KILL_AT") == str(trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        self.mean = np.mean([getattr(self, "mean", 0.0), batch_idx])

    def state_dict(self):
        return {"mean": getattr(self, "mean", 0.0)}


class Alone(LightningModule):
    def __init__(self, num_classes, image_size, width: int = 32, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        sizes = torch.nn.Linear(image_size**2, width), torch.nn.ReLU(), torch.nn.Linear(width, num_classes)
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), *sizes)

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        if os.environ.get("BREAK"):
            return self.no_such_thing
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
"""

CONFIG = """
model:
  {patch_size: 4, emb_size: 16, depth: 1, num_heads: 2, block: {class_path: my_parts.PostNorm},
   attention: {class_path: my_parts.Mixing, scale: 0.5}}
module: {class_path: my_parts.WithAux, aux_weight: 0.5}
trainer: {max_epochs: 1, accelerator: cpu, callbacks: [my_parts.Kill]}
checkpoint: {every_n_steps: 5}
"""

ALONE = """
module: {class_path: my_parts.Alone, width: 16}
trainer: {max_epochs: 1, accelerator: cpu}
checkpoint: {monitor: val_loss, mode: min}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pieces").mkdir(parents=True)
    (folder / "pieces" / "mixing.py").write_text("def mix(tokens):\n    return tokens.roll(1, dims=1)\n")
    (folder / "pieces" / "late.py").write_text("WEIGHT = 0.5\n")
    (folder / "my_parts.py").write_text(PARTS)
    (folder / "exp.yaml").write_text(CONFIG)
    (folder / "alone.yaml").write_text(ALONE)
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_own_block_attention_module_and_callback_are_killed_and_resumed_from_the_copies(lightning, project, tmp_path):
    flags = "fit", "--config=project/exp.yaml"
    assert lightning(*flags, "--out=whole").returncode == 0
    environment = {"KILL_AT": "12", "WANDB_MODE": "disabled"}
    killed = Running(command, *flags, "--out=killed", folder=tmp_path, environment=environment).finish()
    assert killed.returncode == -9, killed.stderr
    copies = sorted(str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*.py"))
    assert copies == ["my_parts.py", "pieces/late.py", "pieces/mixing.py"]
    (project / "pieces" / "mixing.py").write_text("def mix(tokens):\n    return tokens\n")
    refused = lightning(*flags, "--out=killed", "--resume=auto")
    assert refused.returncode == 2
    assert "pieces/mixing.py has changed" in refused.stderr
    assert "--allow-config-change pieces/mixing.py" in refused.stderr
    (tmp_path / "project").rename(tmp_path / "gone")
    resumed = lightning("fit", "--resume=killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "lightning test --ckpt killed --trust" in resumed.stdout
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert "aux.weight" in one
    assert all(torch.equal(one[name], other[name]) for name in one)
    tested = lightning("test", "--ckpt=killed", "--trust", "--out=tested")
    assert tested.returncode == 0, tested.stderr
    results = json.loads((tmp_path / "killed" / "results.json").read_text())
    assert json.loads((tmp_path / "tested" / "results.json").read_text())["test/acc"] == results["test/acc"]


def test_a_lightning_module_of_its_own_kind_runs_predicts_and_shows_its_errors(lightning, project, tmp_path):
    flags = "fit", "--config=project/alone.yaml"
    result = lightning(*flags, "--out=run")
    assert result.returncode == 0, result.stderr
    assert "test_step of Alone returns no logits" in result.stdout
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert 0.0 < results["test_loss"] < 2.3
    assert results["val_loss"] < 2.3
    predicted = lightning("predict", "--ckpt=run", "--trust", "--out=predicted")
    assert predicted.returncode == 0, predicted.stderr
    rows = list(csv.DictReader((tmp_path / "predicted" / "predictions.csv").open()))
    assert len(rows) == 360
    assert sum(row["label"] == row["prediction"] for row in rows) > 100
    breaks = {**os.environ, "BREAK": "1"}
    broken = Running(command, *flags, "--out=broken", folder=tmp_path, environment=breaks).finish()
    assert broken.returncode == 1
    assert "project/my_parts.py, line 62\n    return self.no_such_thing" in broken.stderr
    assert "AttributeError: 'Alone' object has no attribute 'no_such_thing'" in broken.stderr
    assert len(broken.stderr.splitlines()) < 15
    assert "training_step" in (tmp_path / "broken" / "error.log").read_text()
