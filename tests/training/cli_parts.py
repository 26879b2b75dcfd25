"""A dataset, data modules and modules of a user, as files of theirs: copied into the working folder of a test."""

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class DM(LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        labels = torch.arange(48) % 3
        images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0)) + labels[:, None, None, None]
        return DataLoader(TensorDataset(images, labels), self.batch_size)

    val_dataloader = train_dataloader


class Lit(LightningModule):
    rates = []  # noqa: RUF012

    def __init__(self, num_classes, hidden=16):
        super().__init__()
        torch.manual_seed(1)  # whatever has drawn before
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", cross_entropy(self.layers(images), labels), batch_size=len(labels))
        right = self.layers(images).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean(), prog_bar=True, batch_size=len(labels))

    def on_train_epoch_end(self):
        self.log("number", float(self.current_epoch), prog_bar=True)


class Own(Lit):
    num_classes = 3

    def __init__(self, hidden=16, steps=6):
        super().__init__(3, hidden)
        self.steps = steps

    def setup(self, stage):
        self.data = DM(48 // self.steps)

    def train_dataloader(self):
        return self.data.train_dataloader()

    val_dataloader = test_dataloader = train_dataloader

    def test_step(self, batch, batch_idx):
        logits = self.layers(batch[0])
        self.log("test/acc", (logits.argmax(dim=1) == batch[1]).float().mean(), batch_size=len(batch[1]))
        return logits


class Loaders(DM):
    test_dataloader = DM.train_dataloader


class OwnHolder(Own):
    def __init__(self, network):
        super().__init__()


class Watch(Callback):
    def __init__(self, monitor, mode):
        pass


class Best(ModelCheckpoint):
    def __init__(self, monitor="accuracy", mode="max"):
        super().__init__(monitor=monitor, mode=mode)


class Net(nn.Sequential):
    def __init__(self, num_classes, width=4):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))


class Holder(Lit):
    def __init__(self, network):
        LightningModule.__init__(self)
        self.layers = network
