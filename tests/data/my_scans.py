"""A dataset, data modules and modules of a user, as files of theirs: copied into the working folder of a test."""

import os
import random

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset


class Scans:
    """Digits with random noise of its own."""

    def __init__(self, count: int = 80):
        digits = load_digits()
        self.images, self.labels = (15 * digits.images[:count]).astype(np.uint8), digits.target[:count]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]) + torch.randint(0, 3, (8, 8), dtype=torch.uint8)
        return (255 - image if random.random() < 0.5 else image), int(self.labels[index])


def noisy(image):
    return image ^ torch.from_numpy(np.random.randint(0, 4, image.shape, dtype=np.uint8))  # noqa: NPY002


class Untested(LightningDataModule):
    num_classes = 10

    def __init__(self, count: int = 60):
        super().__init__()
        self.save_hyperparameters()
        self.count = count

    def setup(self, *, stage):  # by name, as Lightning passes it
        digits = load_digits()
        images, labels = torch.tensor(digits.images[: self.count, None]).float() / 16, torch.tensor(digits.target)
        self.set = TensorDataset(images, labels[: self.count])

    def train_dataloader(self):
        return DataLoader(self.set, 16, True)

    def val_dataloader(self):
        return DataLoader(self.set, 16)


class Module(Untested):
    test_dataloader, batch_size, transform, classes = Untested.val_dataloader, 16, "none", "abcdefghij"

    def state_dict(self):
        return {"transform": self.transform}


class Staged(Untested):
    def setup(self, stage):
        super().setup(stage=stage)
        setattr(self, stage, self.set)

    def test_dataloader(self):
        return DataLoader(self.test, 16)


class Predicted(Staged):
    def predict_dataloader(self):
        return DataLoader(Subset(self.predict, range(40, 60)), 16)


class Unlabelled(Staged):
    def predict_dataloader(self):
        return DataLoader(self.predict.tensors[0][40:], 16)


class Drawn(Module):
    def train_dataloader(self):
        return DataLoader(self.set, 16, True, generator=torch.Generator().manual_seed(0))


class Unvalidated(LightningDataModule):
    num_classes, count = 10, 60
    setup, train_dataloader, test_dataloader = Untested.setup, Untested.train_dataloader, Module.test_dataloader


class Trained(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test/acc", (self.layer(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


class Reads(Trained):
    def __init__(self):
        super().__init__()
        del self.layer  # else None were a part of the module
        self.layer = None
        self.register_buffer("batches", torch.zeros(()))

    def setup(self, stage):
        if self.layer is None:
            self.layer = torch.nn.Linear(64, len(self.trainer.datamodule.classes))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.batches += self.training
        return batch

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.trainer.datamodule.batch_size / 100)


class Tensors(Trained):
    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1)).softmax(1)


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: str = "epoch"):
        super().__init__(write_interval)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        torch.save(torch.cat(predictions), "written.pt")


class Chunks(Module):
    calls = 0

    def train_dataloader(self):
        self.calls += 1
        print("chunk", self.calls)
        return super().train_dataloader()


class Curriculum(Module):
    def train_dataloader(self):
        return DataLoader(self.set, 4 * (1 + self.trainer.current_epoch))


class Lazy(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(10)

    def test_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Twisted(Scans):
    def __getitem__(self, index):
        return {"x": 1, "y": 2}


class Split(Module):
    def __init__(self):
        super().__init__()
        self.first = np.random.permutation(60).tolist()  # noqa: NPY002

    def setup(self, stage):
        super().setup(stage=stage)
        self.drawn = torch.utils.data.random_split(self.set, [40, 20])
        print("drawn", stage, self.first, sorted(self.drawn[1].indices))

    def train_dataloader(self):
        return DataLoader(self.drawn[0], 16, True)

    def test_dataloader(self):
        return DataLoader(self.drawn[1], 16)


class Late(Scans):
    def __getitem__(self, index):
        return super().__getitem__(index) if index != 7 else 1 / 0


class Unnamed:
    """Numbers its classes as a set has them in each process."""

    def __init__(self, split: str = "train"):
        self.order = os.environ.get("ORDER", "012")

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return np.full((8, 8), 80 * (index % 3) + index, np.uint8), self.order.index(str(index % 3))
