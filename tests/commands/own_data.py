"""Datasets and a data module of a user's own, whose images lie in class folders."""

from pathlib import Path

import numpy
import torch
from lightning import LightningDataModule
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Reversed(Dataset):
    classes = ["owl", "dog", "cat"]  # noqa: RUF012

    def __init__(self, split="train"):
        self.files = sorted(Path("images", {"valid": "val"}.get(split, split)).rglob("*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Image.open(self.files[index]), self.classes.index(self.files[index].parent.name)


class Numbered(Reversed):
    classes = None

    def __getitem__(self, index):
        return Image.open(self.files[index]), ["cat", "dog", "owl"].index(self.files[index].parent.name)


class Cropped(Reversed):
    classes = ["cat", "dog", "owl"]  # noqa: RUF012

    def __getitem__(self, index):
        image = Image.open(self.files[index])
        left, upper = (round(side / 8) for side in image.size)
        return image.crop((left, upper, image.width - left, image.height - upper)), index // (len(self) // 3)


class Module(LightningDataModule):
    num_classes, class_names = 3, Reversed.classes

    def loader(self, split):
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

        def normalised(image):
            return (torch.from_numpy(numpy.array(image)) / 255 - mean).div(std).permute(2, 0, 1)

        found = Reversed(split)
        items = [(normalised(image), label) for image, label in map(found.__getitem__, range(len(found)))]
        return DataLoader(items, batch_size=8)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")

    def test_dataloader(self):
        return self.loader("test")
