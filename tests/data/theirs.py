"""A dataset, data modules and modules of a user, as files of theirs: copied into the working folder of a test."""

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


@dataclass
class Held:
    x: torch.Tensor
    y: torch.Tensor


def three(images, labels):
    return images, labels, labels + 1000


def hot(images, labels):
    return images, one_hot(labels, 10)


def several(images, labels):
    return images, (one_hot(labels, 10) + one_hot((labels + 1) % 10, 10)).float()


MAKES = {
    "pair": lambda images, labels: [images, labels],
    "dict": lambda images, labels: {"pixel_values": images, "labels": labels},
    "three": three,
    "held": Held,
    "hot": hot,
    "several": several,
}


class Data(LightningDataModule):
    num_classes = 10

    def __init__(self, kind: str):
        super().__init__()
        self.make = MAKES[kind]

    def setup(self, stage):
        digits = load_digits()
        self.items = [
            *zip(torch.tensor(digits.images[:96, None]).float() / 16, torch.tensor(digits.target[:96]), strict=True)
        ]

    def _loader(self, items):
        return DataLoader(items, 16, collate_fn=lambda items: self.make(*map(torch.stack, zip(*items, strict=True))))

    def train_dataloader(self):
        return self._loader(self.items[:64])

    def val_dataloader(self):
        return self._loader(self.items[64:80])

    def test_dataloader(self):
        return self._loader(self.items[72:])


class Net(LightningModule):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layers = kind, nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.acc = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.layers(images)

    def parts(self, batch):
        assert type(batch) is {"pair": list, "dict": dict, "three": tuple, "hot": tuple}.get(self.kind, type(batch))
        if self.kind == "held":
            return batch.x, batch.y
        images, labels, *more = batch.values() if self.kind == "dict" else batch
        assert all(torch.equal(each, labels + 1000) for each in more)
        return images, labels

    def training_step(self, batch, batch_idx):
        images, labels = self.parts(batch)
        loss = binary_cross_entropy_with_logits if self.kind == "several" else cross_entropy
        return loss(self(images), labels.float() if labels.ndim == 2 else labels)

    def validation_step(self, batch, batch_idx, name="val/acc"):
        images, labels = self.parts(batch)
        logits = self(images)
        self.acc(logits, labels if labels.ndim == 1 else labels.argmax(dim=1))
        self.log(name, self.acc, batch_size=len(labels))
        return logits

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx, "test/acc")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Talks(Net):
    def test_step(self, batch, batch_idx):
        self.logger.experiment.log({"a": 1})
