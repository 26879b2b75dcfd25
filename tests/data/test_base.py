import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from vit_lightning import CutMix, Digits, HorizontalFlip, MixUp, RandomCrop, UserError, ViT, ViTClassifier
from vit_lightning.data.splits import stratified_cut


def pixels(data: Digits, split: str) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.dataset(split).images}


def test_digits_are_split_once_and_for_all():
    data = Digits()
    sizes = {split: len(data.dataset(split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 1294, "val": 143, "test": 360}
    assert len(set.union(*(pixels(data, split) for split in sizes))) == sum(map(len, (pixels(data, s) for s in sizes)))
    counts = torch.bincount(data.dataset("test").labels)
    assert counts.min() >= 34
    assert counts.max() <= 38
    assert torch.equal(data.dataset("test").images, Digits().dataset("test").images)
    assert not torch.equal(data.dataset("test").images, Digits(split_seed=1).dataset("test").images)


def test_digits_keep_scikit_learn_s_pixels():
    from sklearn.datasets import load_digits

    data = Digits()
    ours = torch.cat([data.dataset(split).images for split in ("train", "val", "test")])
    theirs = {image.astype(np.uint8).tobytes() for image in load_digits().images}
    assert {(image[0].numpy() / (255 / 16)).round().astype(np.uint8).tobytes() for image in ours} == theirs


@pytest.mark.parametrize("share", [0.1, 0.37, 13, 36])  # of which some leave equal remainders
def test_stratified_cut_is_that_of_scikit_learn(share):
    from sklearn.model_selection import train_test_split

    for labels in ([0, 1, 2, 3] * 12 + [7] * 2, [0] * 30 + [1] * 15 + [2] * 8):
        theirs = train_test_split(range(len(labels)), test_size=share, random_state=3, stratify=labels)
        assert stratified_cut(labels, share, seed=3, split="val") == tuple(map(sorted, theirs))


def test_a_cut_without_an_image_of_each_class_names_its_share():
    with pytest.raises(UserError, match=r"test_share=0\.1 of 12 training images .* each of 3 classes"):
        stratified_cut([0, 1, 2] * 4, 0.1, seed=0, split="test")


class Recorder(ViTClassifier):
    """Remembers which images it was trained on, and what they looked like."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=8, depth=1, num_heads=1)
        )
        self.seen: list[list[int]] = []
        self.images: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.indices.tolist())
        self.images.append(batch.images.clone())
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        if batch.targets is not None:
            self.targets.append(batch.targets)
            assert torch.equal(batch.labels, batch.targets.argmax(1))


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def train(data: Digits, **arguments: object) -> Recorder:
    module = Recorder()
    Trainer(accelerator="cpu", max_epochs=2, **QUIET, **arguments).fit(module, datamodule=data)
    return module


def test_each_epoch_shows_each_image_once_in_an_order_of_its_own():
    seed_everything(5, verbose=False)
    seen = train(Digits(batch_size=200)).seen
    first, second = ([index for batch in epoch for index in batch] for epoch in (seen[:7], seen[7:]))
    assert sorted(first) == sorted(second) == list(range(1294))
    assert first != second
    limited, fitted = (
        train(Digits(batch_size=200), **given).seen for given in ({"limit_train_batches": 2}, {"overfit_batches": 2})
    )
    assert len(limited) == len(fitted) == 4
    assert limited[:2] != limited[2:]
    assert fitted[:2] == fitted[2:]


def test_order_augmentation_and_mixing_follow_the_seed_and_the_step_and_not_the_workers():
    def trained(seed: int, workers: int) -> Recorder:
        seed_everything(seed, verbose=False)
        augment, mixing = [RandomCrop(2), HorizontalFlip()], [MixUp(), CutMix()]
        return train(Digits(batch_size=200, num_workers=workers, augment=augment, mixing=mixing))

    first, again, other = trained(5, 0), trained(5, 2), trained(6, 0)
    assert len(first.targets) == 14
    for one, same in ((first.images, again.images), (first.targets, again.targets)):
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(first.images[0], other.images[0])
    assert len({round(float(targets.max(1).values.min()), 4) for targets in first.targets}) > 10


def test_images_that_are_measured_are_not_augmented():
    data = Digits(batch_size=200, augment=[RandomCrop(2)])
    run = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    shown = []

    class Watch(Recorder):
        def predict_step(self, batch, batch_idx):
            shown.append(batch.images)

    run.predict(Watch(), data)
    assert torch.equal(torch.cat(shown), data.transform.normalise(data.dataset("test").images))


def test_a_fraction_is_trained_on_and_validation_stays_whole():
    data = Digits(batch_size=50, fraction=0.1)
    seen = train(data).seen
    assert {index for batch in seen for index in batch} == {*data.train_subset.tolist()}
    assert len(data.train_subset) in range(125, 135)
    assert len(data.dataset("val")) == 143
    assert data.train_batches_per_epoch == len(seen) / 2 == 3


def test_shots_are_images_of_each_class():
    data = Digits(shots=5)
    assert torch.bincount(data.dataset("train").labels[data.train_subset]).tolist() == [5] * 10
    with pytest.raises(UserError, match=r"shots=500: some classes have fewer training images \(0 128, 1 131"):
        Digits(shots=500).train_batches_per_epoch  # noqa: B018
    with pytest.raises(UserError) as caught:
        Digits(shots=3, fraction=0.5, repetitions=0, mixing_off_epoch=-1)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["repetitions", "mixing_off_epoch", "shots"]


def test_mixing_has_its_probability_and_ends_where_it_is_asked_to():
    seed_everything(1, verbose=False)
    seen = train(Digits(batch_size=100, mixing=[MixUp(p=0.25), CutMix(p=0.25)], mixing_off_epoch=1))
    of_epochs = [
        [bool((targets.max(1).values < 1.0).any()) for targets in seen.targets[at : at + 13]] for at in (0, 13)
    ]
    assert len(seen.targets) == 26
    assert 2 <= sum(of_epochs[0]) <= 11
    assert not any(of_epochs[1])
