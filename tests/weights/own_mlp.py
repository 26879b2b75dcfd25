"""Modules of a user, as a file of theirs: copied into the working folder of a test."""

from typing import Any

import torch
from lightning.pytorch import LightningModule


class Own(LightningModule):
    def __init__(self, num_classes: int = 10, width: int = 8, sign: float = 1.0, kept: Any = None):
        super().__init__()
        self.save_hyperparameters()
        self.sign = sign
        self.body, self.head = torch.nn.Linear(64, width), torch.nn.Linear(width, num_classes)

    def forward(self, images):
        return self.sign * self.head(self.body(images.flatten(1)).relu())

    def training_step(self, batch, batch_idx):
        return 0 * self(batch[0]).sum()

    def test_step(self, batch, batch_idx, name="test/acc"):
        right = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log(name, right, batch_size=len(batch[1]))

    def validation_step(self, batch, batch_idx):
        self.test_step(batch, batch_idx, "val/acc")


class NoBias(Own):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.head = torch.nn.Linear(8, num_classes, bias=False)


class Renames(Own):
    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        for name in [*state]:
            state[name.removeprefix("old.")] = state.pop(name)
