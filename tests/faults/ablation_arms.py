"""What goes wrong in the runs of an ablation, for its tests: a callback that a config names."""

import os
import time

import torch
from lightning.pytorch import Callback

from vit_lightning.errors import UserError


class Breaks(Callback):
    """Does ``how`` in the second batch; of several ways, separated by commas, each seed has its own."""

    def __init__(self, how: str) -> None:
        self.ways = how.split(",")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        how = self.ways[int(os.environ["PL_GLOBAL_SEED"]) % len(self.ways)]
        if how == "slow":
            time.sleep(0.03)
        if batch_idx != 1:
            return
        if how == "memory":
            torch.empty(10**15)
        elif how == "nan":
            with torch.no_grad():
                next(pl_module.parameters()).fill_(float("nan"))
        elif how == "config":
            raise UserError("model.depth=9 is more than there is")
        elif how == "hang":
            time.sleep(1000)
        elif how == "leaves":
            os._exit(0)
        elif how == "status":
            os._exit(255)


class Sleeps(Callback):
    """Makes each step longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(self.seconds)
