"""Pictures and numbers of validations during training, which they leave as it is."""

import json

import matplotlib
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from PIL import Image
from torch import nn

from vit_lightning import Digits, EMAConfig, OptimizerConfig, ViT, ViTClassifier
from vit_lightning.data.batches import Request
from vit_lightning.figures.pictures import confusion_picture, numbers, sheet
from vit_lightning.figures.validation_pictures import CELLS, ValidationPictures, _facts
from vit_lightning.inspect.survey import glance
from vit_lightning.storage.wandb_logger import RunLogger, WandbConfig

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
BATCHES = {"limit_train_batches": 4, "limit_val_batches": 2, "num_sanity_val_steps": 1}


class Inverted(Digits):
    """Digits with a hook of Lightning's, as users have them."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch.replace(images=255 - batch.images)


class Seen(Callback):
    """What the validations of a run have measured."""

    def __init__(self):
        self.metrics = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(folder, every, epochs=3, module=None, **arguments):
    folder.mkdir(exist_ok=True)
    seed_everything(0, verbose=False)
    data, seen = Inverted(batch_size=50), Seen()
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))
    rates = OptimizerConfig(lr=0.02)
    module = module or ViTClassifier(network, num_classes=10, optimizer=rates, ema=EMAConfig(decay=0.9))
    pictures = ValidationPictures(data, RunLogger(folder, "a", WandbConfig(), {}), every)
    callbacks = [pictures, seen] if isinstance(module, ViTClassifier) else [pictures]
    settings = {**QUIET, **BATCHES, "max_epochs": epochs, "accelerator": "cpu", **arguments}
    trainer = Trainer(**settings, callbacks=callbacks, default_root_dir=folder)
    trainer.fit(module, datamodule=data)
    return module, seen


def names(folder):
    return sorted(path.name for path in (folder / "validation").glob("*.*"))


def test_every_nth_and_the_last_epoch_have_pictures_and_training_is_the_same(tmp_path):
    trained, seen = train(tmp_path / "a", 2)
    assert names(tmp_path / "a") == [
        *(f"confusion-000{epoch}.png" for epoch in (2, 3)),
        *(f"epoch-000{epoch}.{kind}" for epoch in (2, 3) for kind in ("json", "png")),
    ]
    shown = json.loads((tmp_path / "a/validation/epoch-0002.json").read_text())["sample"]["index"]
    assert {path.stem for path in (tmp_path / "a/validation/images").iterdir()} == {*map(str, shown)}
    told = [json.loads((tmp_path / f"a/validation/epoch-000{epoch}.json").read_text()) for epoch in (2, 3)]
    for facts, metrics in zip(told, seen.metrics[1:], strict=True):
        assert facts["accuracy"] == pytest.approx(metrics["val/acc"], abs=1e-6)
        assert facts["images"] == sum(facts["class_images"]) == 96
        counts = np.zeros((10, 10))
        for true, predicted, count in facts["confusion"]:
            counts[true, predicted] = count
        assert counts.sum(axis=1).tolist() == facts["class_images"]
        accuracies = counts.diagonal() / counts.sum(axis=1)
        assert facts["class_accuracy"] == pytest.approx(accuracies.tolist(), abs=1e-6)
        of_images = Digits().dataset("val").labels[facts["sample"]["index"]].tolist()
        assert facts["sample"]["label"] == of_images == sorted(3 * [*range(10)])
        assert len(facts["sample"]["prediction"]) == len(facts["sample"]["confidence"]) == 30
    assert [(facts["epoch"], facts["step"]) for facts in told] == [(2, 7), (3, 11)]
    assert told[0]["sample"]["index"] == told[1]["sample"]["index"], "the same images, to see them change"

    without, bare = train(tmp_path / "b", 0)
    assert not (tmp_path / "b" / "validation").exists()
    assert bare.metrics == seen.metrics
    assert all(torch.equal(value, without.state_dict()[name]) for name, value in trained.state_dict().items())


def test_several_validations_an_epoch_have_one_picture(tmp_path):
    train(tmp_path, None, 11, val_check_interval=0.5, limit_train_batches=2, num_sanity_val_steps=0)
    assert [*map(int, (name[6:10] for name in names(tmp_path) if name.endswith("json")))] == [1, 2, 4, 8, 11]


def test_a_vit_has_pictures_of_its_inside_and_training_is_the_same(tmp_path):
    def vit():
        torch.manual_seed(0)
        sizes = {"image_size": 8, "patch_size": 2, "in_channels": 1, "emb_size": 16, "depth": 3, "num_heads": 2}
        return ViTClassifier(ViT(**sizes, num_classes=10, emb_dropout=0.1, drop_path=0.1), num_classes=10)

    trained, _ = train(tmp_path / "a", 1, 2, vit())
    facts = json.loads((tmp_path / "a/validation/epoch-0002.json").read_text())
    data = Inverted(batch_size=50)
    data.setup("fit")
    chosen = facts["sample"]["index"]
    images = data.dataset("val").__getitems__(Request(chosen[:: -(-len(chosen) // 8)], None)).images
    maps, ranks = glance(trained.network, data.transform.normalise(images))
    assert facts["effective_rank"] == pytest.approx(ranks.tolist(), abs=2e-3)
    drawn = Image.open(tmp_path / "a/validation/attention-0002.png")
    first = maps[0, 1] / maps[0, 1].max()
    side = 64 + 2
    pixels = [drawn.getpixel((2 * side + 16 * column + 5, 32 + 16 * row + 5)) for row, column in np.ndindex(4, 4)]
    colours = matplotlib.colormaps["viridis"]((255 * first).round().int().numpy(), bytes=True)[:, :3]
    assert np.abs(np.array(pixels) - colours).max() <= 2
    train(tmp_path / "c", 1, 1, vit(), precision="bf16-mixed")
    assert Image.open(tmp_path / "c/validation/attention-0001.png").mode == "RGB"
    without, _ = train(tmp_path / "b", 0, 2, vit())
    assert all(torch.equal(value, without.state_dict()[name]) for name, value in trained.state_dict().items())


class Silent(LightningModule):
    """A module whose validation returns a loss, or outputs that are no logits of the classes."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return self.network(batch.images.flatten(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        return self.network(batch.images.flatten(1))[:, :3] if batch_idx else self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_without_logits_or_validation_there_is_nothing(tmp_path):
    train(tmp_path, 1, 1, Silent())
    train(tmp_path, 1, 1, limit_val_batches=0)
    assert not (tmp_path / "validation").exists()


def test_an_image_that_can_no_longer_be_read_is_left_out():
    pictures = ValidationPictures(Digits(), None, 1)
    images, labels = (pictures.data.dataset("val").images, pictures.data.dataset("val").labels.numpy())
    table = np.column_stack([np.arange(len(labels)), labels, labels, np.ones(len(labels))])
    chosen, _ = pictures._choose(table)
    left, shown = pictures._choose(np.delete(table, int(chosen[3, 0]), axis=0))
    assert left.tolist() == np.delete(chosen, 3, axis=0).tolist()
    assert np.array_equal(shown, images[left[:, 0].astype(int)])


def test_a_thousand_classes_take_little_room_and_any_image_is_drawn():
    drawn = np.random.default_rng(0)
    table = np.column_stack([np.arange(50_000), *drawn.integers(0, 1000, (2, 50_000)), drawn.random(50_000)])
    labels = [f"class {number}" for number in range(1000)]
    found = numbers(table[:, 1].astype(int), table[:, 2].astype(int), labels)
    facts = _facts(table, table[:32], found)
    assert len(facts["confusion"]) == CELLS
    assert len(json.dumps(facts)) < 300_000
    for classes in (2, 20, 100, 1000):
        some = [cell for cell in found["confusion"] if max(cell[:2]) < classes]
        picture = confusion_picture(some, labels[:classes], 40 * "title ")
        assert 100 < picture.height < 1600
        assert picture.width > 1000, "the title is cut off"
    for shape in ((1, 8, 8), (3, 32, 32), (3, 224, 160), (5, 64, 64)):
        images = drawn.integers(0, 255, (9, *shape)).astype(np.uint8)
        picture = sheet(images, ["a name that is much too long for its place", "a\ntrue b", "c"] * 3, [False] * 9, "")
        assert picture.width == 8 * 122
        assert picture.height < 400
    wrong = sheet(images[:1], ["a\ntrue b"], [True], "")
    assert isinstance(wrong, Image.Image)
    assert (196, 30, 30) in {colour for _, colour in wrong.getcolors(100_000)}
