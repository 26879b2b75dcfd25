import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

from vit_lightning import CIFAR10, CIFAR100, TorchvisionSet, UserError


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.fixture
def fashion_mnist(tmp_path: Path) -> Path:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 50)):
        write_idx(raw / f"{part}-images-idx3-ubyte", draw.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))
    return tmp_path


def test_a_set_of_torchvision_is_split_without_overlap(fashion_mnist):
    data = TorchvisionSet(name="FashionMNIST", root=fashion_mnist)
    assert data.class_names[0] == "T-shirt/top", "before it is loaded"
    data.prepare_data()
    splits = {split: data.dataset(split) for split in ("train", "val", "test")}
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 180, "val": 20, "test": 50}
    assert torch.bincount(splits["val"].labels).tolist() == [2] * 10
    assert splits["train"].images.shape == (180, 1, 28, 28)
    theirs = torchvision.datasets.FashionMNIST(fashion_mnist, train=False)
    assert torch.equal(splits["test"].images[:, 0], theirs.data)
    assert torch.equal(splits["test"].labels, theirs.targets)
    images = [image.numpy().tobytes() for dataset in splits.values() for image in dataset.images]
    assert len(set(images)) == 250
    assert (data.num_classes, data.image_size, data.in_channels) == (10, (28, 28), 1)


def write_batch(path: Path, count: int, labels: str, classes: int) -> str:
    draw = np.random.default_rng(len(path.name))
    content = {
        "data": draw.integers(0, 256, (count, 3072), dtype=np.uint8),
        labels: [i % classes for i in range(count)],
    }
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("ours", "classes"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_cifar_goes_through_torchvision(tmp_path, monkeypatch, ours, classes):
    theirs = getattr(torchvision.datasets, ours.__name__)
    folder = tmp_path / theirs.base_folder
    folder.mkdir()
    key = "labels" if classes == 10 else "fine_labels"
    for part in ("train_list", "test_list"):
        sums = [[name, write_batch(folder / name, 2 * classes, key, classes)] for name, _ in getattr(theirs, part)]
        monkeypatch.setattr(theirs, part, sums)
    names = [f"class {number}" for number in range(classes)]
    (folder / theirs.meta["filename"]).write_bytes(pickle.dumps({theirs.meta["key"]: names}))
    meta_sum = hashlib.md5((folder / theirs.meta["filename"]).read_bytes()).hexdigest()
    monkeypatch.setattr(theirs, "meta", {**theirs.meta, "md5": meta_sum})
    data = ours(root=tmp_path, val_share=0.5)
    batch = theirs(tmp_path, train=False)
    assert data.num_classes == classes
    assert torch.equal(data.dataset("test").images, torch.from_numpy(batch.data).permute(0, 3, 1, 2))
    assert data.dataset("test").labels.tolist() == batch.targets
    assert len(data.dataset("train")) == len(data.dataset("val"))
    assert data.class_names == names


def test_a_set_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(UserError, match="CIFAR10 cannot be loaded from root="):
        CIFAR10(root=tmp_path).dataset("test")


def test_a_share_that_cannot_be_cut_is_named(fashion_mnist):
    with pytest.raises(UserError, match=r"val_share=1e-05 of 200 training images is no cut"):
        TorchvisionSet(name="FashionMNIST", root=fashion_mnist, val_share=1e-5).dataset("train")


def test_bad_values_are_refused(tmp_path):
    with pytest.raises(UserError, match="val_share=0"):
        CIFAR10(root=tmp_path, val_share=0.0)
    with pytest.raises(UserError, match="name=ImageNet is none of CIFAR10, CIFAR100"):
        TorchvisionSet(name="ImageNet", root=tmp_path)
