"""Datasets, data modules and transforms of the user's own, in the place of ours."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from runs import SMALL, killed_after, same_weights, whole_and_resumed
from sklearn.datasets import load_digits
from torch.utils.data import ConcatDataset, DataLoader, Subset

from vit_lightning import Digits, ImageData, PerImage, UserError, WrappedDataset
from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import DamagedImage
from vit_lightning.data.items import Items, read_item, to_pixels
from vit_lightning.data.wrapped import WrappedDataModule
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_results

FLAGS = (*SMALL, "--wandb.mode=disabled")


@pytest.fixture
def own(in_folder: Path) -> Path:
    shutil.copy(Path(__file__).with_name("my_scans.py"), in_folder)
    return in_folder


def test_a_killed_run_on_a_dataset_and_transforms_of_others_ends_in_the_same_bits(own):
    transforms = "[{class_path: RandomPerspective, p: 1.0}, {class_path: my_scans.noisy}, RandomCrop, RandomInvert]"
    flags = [*FLAGS, "--data.class_path=my_scans.Scans", "--data.count=150", f"--data.augment={transforms}"]
    flags += ["--data.batch_size=16", "--checkpoint.every_n_steps=1", "--trainer.max_epochs=2"]
    fit(resolve([*flags, "--data.num_workers=0", "--out=whole"]))
    with killed_after(9):
        fit(resolve([*flags, "--data.num_workers=2", "--out=run"]))
    results = fit(resolve([*flags, "--data.num_workers=2", "--out=run", "--resume=auto"]))
    assert same_weights("whole", "run")["global_step"] == results["steps"] == 14
    # the written config is read again as it is, with options of the dataset beside those of ours
    again = resolve(["--ckpt=run", "--trust", "--data.batch_size=8", "--wandb.mode=disabled"], "test")
    assert again.data.arguments == {"count": 150}
    assert [type(change).__name__ for change in again.data.augment][::2] == ["PerImage", "RandomCrop"]
    assert main(["test", "--ckpt=run", "--trust", "--out=test"]) == 0
    assert main(["check-data", "--config=run/config.yaml", "--out=check"]) == 0
    assert main(["show-batch", "--config=run/config.yaml", "--out=shown"]) == 0
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("zero.png")
    assert main(["predict", "zero.png", "--ckpt=run", "--trust", "--out=predicted"]) == 0


@pytest.mark.parametrize(("kind", "rows"), [("Staged", range(60)), ("Predicted", range(40, 60)), ("Unlabelled", ())])
def test_images_to_predict_are_those_of_predict_dataloader_or_else_of_the_test(kind, rows, own):
    fit(resolve([*FLAGS, f"--data.class_path=my_scans.{kind}"]))
    run = next(Path("runs/run").iterdir())
    assert main(["predict", f"--ckpt={run}", "--trust", "--out=predicted"]) == 0
    lines = Path("predicted", "predictions.csv").read_text().splitlines()[1:]
    assert [line.split(",")[1] for line in lines] == ([str(load_digits().target[row]) for row in rows] or [""] * 20)


@pytest.mark.parametrize(("writer", "code"), [(["--trainer.callbacks=my_scans.Writer"], 0), ([], 2)])
def test_tensors_that_a_writer_of_lightning_has_written_are_predictions(writer, code, own, capsys):
    flags = [flag for flag in FLAGS if "--model" not in flag] + ["--module=my_scans.Tensors", *writer, "--out=run"]
    assert main(["fit", *flags, "--data=my_scans.Predicted"]) == 0
    assert main(["predict", "--ckpt=run", "--trust", "--out=predicted"]) == code
    assert Path("written.pt").exists() == (not code)
    assert code or torch.load("written.pt").shape == (20, 10)
    assert main(["predict", "own.png", "--ckpt=run", "--trust"]) == 2
    assert "(without any, those of predict_dataloader or else of the test are predicted)" in capsys.readouterr().err


def test_images_that_ranks_validate_twice_are_named(own):
    data = resolve([*FLAGS, "--data=my_scans.Module"]).data
    assert "ranks" not in data.notice
    data.for_trainer.trainer = SimpleNamespace(world_size=2)
    assert "; 2 ranks may validate an image twice (validate --ckpt RUN --trainer.devices=1 does not)" in data.notice


def test_code_of_the_user_s_reads_its_own_data_module_on_the_trainer(own, capsys):
    """PL#13940, with a name that our data has too: its classes were not there, and its batch size was our 64.

    PL#19838: that no predictions tell whether a logged accuracy is true is said, by each command that tests.
    """
    flags = [flag for flag in FLAGS if "--model" not in flag]
    flags += ["--data=my_scans.Module", "--module=my_scans.Reads", "--trainer.max_epochs=2"]
    checkpoint = whole_and_resumed("fit", *flags, kill=5)  # with the layer that its setup has made in place of None
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 0.16
    assert checkpoint["Module"] == {"transform": "none"}
    assert checkpoint["state_dict"]["batches"] == checkpoint["global_step"], "Lightning calls the module's own hook too"
    assert main(["test", "--ckpt=run", "--trust", "--out=test"]) == 0
    said = "note        no report of the test images, and what it logs is held against no predictions"
    assert capsys.readouterr().out.count(said) >= 2


@pytest.mark.parametrize("kind", ["Unvalidated", "Drawn"])
def test_the_order_of_an_own_loader_goes_on_behind_the_end_of_an_epoch(kind, own):
    """lightly#578: without validation, or from a generator of the loader's, a resumed run shuffled otherwise."""
    flags = [flag for flag in FLAGS if "--model" not in flag] + ["--module=my_scans.Trained", "--trainer.max_epochs=3"]
    assert whole_and_resumed("fit", *flags, f"--data=my_scans.{kind}", kill=5)["global_step"] == 12


def test_a_lightning_data_module_trains_tests_and_resumes(own, capsys):
    flags = [*FLAGS, "--data.class_path=my_scans.Module", "--data.count=50", "--checkpoint.every_n_steps=1"]
    flags += ["--trainer.max_epochs=2"]
    assert whole_and_resumed("fit", *flags, kill=4)["global_step"] == 8, "shuffled as it would have been"
    saved = read_checkpoint(Path("run/checkpoints/last.ckpt"))
    assert (saved["datamodule_hyper_parameters"], saved["datamodule_hparams_name"]) == ({"count": 50}, "kwargs")
    results = read_results(Path("run"))
    assert 0.0 <= results["test/acc_low"] <= results["test/acc"]
    assert "is used as it is" in capsys.readouterr().out
    with np.load("run/test_predictions.npz") as table:
        assert table["index"].tolist() == list(range(50))
    assert main(["predict", "--ckpt=run", "--trust", "--out=predicted"]) == 0
    assert len(Path("predicted", "predictions.csv").read_text().splitlines()) == 51
    capsys.readouterr()
    given = ["--config=run/config.yaml"]
    for command in ("show-batch", "check-data"):
        assert main([command, *given]) == 2
        assert capsys.readouterr().err.count("class_path=my_scans.Module: ") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.class_path=my_scans.Scans", "--data.cuont=3"], "data.cuont=3: .*did you mean data.count"),
        (["--data.class_path=my_scans.Scans", "--data.count=x"], "data.count=x must be an int"),
        (["--data.class_path=my_scans.Scans", "--data.zz=1"], "data.zz=1: there is no such option .*count.*val_share"),
        (["--data.class_path=my_scans.Twisted"], r"my_scans.Twisted: item 0 is a dict, not \(image, label\)"),
        (["--data.class_path=my_scans.Module", "--data.augment=[RandomCrop]"], "data.augment: there is no such option"),
        (["--data.class_path=my_scans.Module", "--data.num_classes=1"], "num_classes=1"),
        (["--data=my_scans.Module", "--module=my_scans.Lazy"], "^module.layer.weight has no size before a first batch"),
        (["--data=my_scans.Curriculum"], r"first batch \(needless with data.image_size and .*'current_epoch'"),
        (["--data.class_path=my_scans.Untested"], r"my_scans.Untested has no test_dataloader .*test=false"),
        (["--data=my_scans.Unvalidated"], r"my_scans.Unvalidated has no val_dataloader .*without a validation_step"),
    ],
)
def test_mistakes_are_named_before_training(own, flags, message):
    with pytest.raises(UserError, match=message):
        resolve([flag for flag in (*FLAGS, *flags) if "Lazy" not in str(flags) or "--model." not in flag])


def test_a_data_module_whose_first_batch_was_looked_at_trains_on_what_it_gives_first(own, capsys):
    """PL#21492: one that gives another chunk at each call trained on the second."""
    data = resolve([*FLAGS, "--data=my_scans.Chunks"]).data
    data.setup("fit")
    data.train_dataloader()
    assert capsys.readouterr().out == "chunk 1\nchunk 1\n"
    sizes = ["--data.image_size=8", "--data.in_channels=1"]
    assert resolve([*FLAGS, "--data=my_scans.Curriculum", *sizes]).data.in_channels == 1


def test_a_data_module_that_draws_a_split_tests_no_image_that_it_has_trained_on(own, capsys):
    """PL#9865, lightning-hydra-template#184: setup() is called for the training and the test, both in each process."""
    assert main(["fit", *FLAGS, "--data=my_scans.Split", "--out=run"]) == 0
    assert main(["test", "--ckpt=run", "--trust"]) == 0
    drawn = [line.split(" ", 2)[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("drawn")]
    assert len({split for stage, split in drawn if stage.startswith("TrainerFn")}) == 1
    assert len(drawn) == 5


def test_labels_that_a_data_module_numbers_from_one_are_refused_at_the_first_batch(own):
    """ultralytics#4514, happy-transformer#248: IndexError of the loss."""
    flags = [*FLAGS, "--data.class_path=my_scans.Module", "--data.num_classes=9", "--out=run"]
    with pytest.raises(UserError, match=r"has the label 9 \(labels of 9 classes are 0 to 8: .* data.num_classes\)$"):
        fit(resolve(flags))


def test_a_data_module_without_test_images_trains_with_test_false(own):
    experiment = resolve([*FLAGS, "--data.class_path=my_scans.Untested", "--test=false", "--trainer.max_steps=1"])
    assert not any(key.startswith("test/") for key in fit(experiment))


def test_a_module_without_a_validation_trains_and_is_tested_as_in_lightning(own):
    flags = [flag for flag in FLAGS if "--model" not in flag]
    experiment = resolve([*flags, "--data=my_scans.Unvalidated", "--module=my_scans.Trained", "--trainer.max_epochs=9"])
    assert fit(experiment)["test/acc"] > 0.9


class Damaged:
    def __getitem__(self, index):
        raise DamagedImage("a.png: damaged image")


def test_a_damaged_image_of_an_own_dataset_is_said_as_such():
    with pytest.raises(DamagedImage, match=r"^a\.png: damaged image$"):
        read_item(Damaged(), 0, "class_path=Damaged")


def test_an_error_of_a_later_item_names_its_file_and_line(own):
    experiment = resolve(
        [*FLAGS, "--data.class_path=my_scans.Late", "--data.count=150", "--data.num_workers=1", "--out=run"]
    )
    with pytest.raises(UserError, match=r"my_scans.Late: item 7: ZeroDivisionError: .*my_scans.py, line \d+"):
        fit(experiment)


def test_images_of_all_kinds_become_the_same_bytes():
    pixels = np.arange(75, dtype=np.uint8).reshape(5, 5, 3) * 3
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    for image in (Image.fromarray(pixels), pixels, tensor, tensor.float() / 255, pixels / 255.0):
        assert np.array_equal(to_pixels(image), pixels)
    assert to_pixels(tensor[0]).shape == to_pixels(Image.fromarray(pixels).convert("L")).shape == (5, 5, 1)
    for wrong in (tensor.int(), tensor.float(), "cat.jpg", pixels[None], pixels.transpose(2, 0, 1)):
        with pytest.raises(UserError):
            to_pixels(wrong)
    with pytest.raises(UserError, match=r"4 channels, the first one has 3 \(image.convert\('RGB'\)"):
        to_pixels(torch.zeros(4, 5, 5), 3)


class Sizes(torch.utils.data.Dataset):
    """Colour images of several sizes, of training and test."""

    def __init__(self, train: bool):
        self.targets = [0, 1] * (20 if train else 5)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return Image.new("RGB", (20 + index, 16), (index, 0, 0)), self.targets[index]


@pytest.mark.parametrize("names", [("image", "label"), ("pixel_values", "labels"), ("img", "label")])
def test_an_item_of_a_dict_is_read_by_the_names_of_hugging_face(names):
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    assert read_item([{"id": 7, **dict(zip(names, (image, 3), strict=True))}], 0, "mine") == (image, 3)


def test_a_label_may_be_an_array_of_one_number():
    """MedMNIST#53."""
    assert read_item([("image", np.array([3]))], 0, "") == ("image", 3)
    with pytest.raises(UserError, match=r"label \[0 1\] \(ndarray\), not a whole number"):
        read_item([("image", np.array([0, 1]))], 0, "")


def test_missing_splits_are_cut_and_images_resized():
    with pytest.raises(UserError, match=r"image_size is missing: .*16x20, 16x40, 16x59"):
        WrappedDataset(dataset_class=Sizes)
    data = WrappedDataset(dataset_class=Sizes, image_size=8, num_workers=0)
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [36, 4, 10]
    assert (data.image_size, data.in_channels, data.num_classes) == ((8, 8), 3, 2)
    batch = next(iter(data.train_dataloader()))
    assert batch.images.shape == (36, 3, 8, 8)
    val = data.dataset("val")
    assert not {*val.indices} & {*data.dataset("train").indices}
    assert val.labels.bincount().tolist() == [2, 2]
    assert val.whole(0).shape == (16, 20 + val.indices[0], 3)
    assert data.notice == ""


@pytest.mark.parametrize(("labels", "empty"), [((1, 2, 3), "0 (1 of 4"), ((0, 5, 9), "1, 2, 3, 4, 6, 7, 8 (7 of 10")])
def test_outputs_that_no_label_uses_are_said(labels, empty):
    class Gaps:
        targets = labels * 20

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, index):
            return np.full((8, 8), index, np.uint8), self.targets[index]

    data = WrappedDataset(dataset_class=Gaps)
    assert data.num_classes == 1 + max(labels)
    assert f"no training image is of {empty} classes) (data.num_classes)" in data.notice
    Gaps.classes = [str(label) for label in range(data.num_classes)]  # as those of another target_types (vision#8364)
    assert f"no training image is of {empty} classes) (data.class_names)" in WrappedDataset(dataset_class=Gaps).notice


def test_labels_without_names_that_mean_others_than_in_training_are_said(own, monkeypatch, capfd):
    """pyGAT#51, geti#2397."""
    flags = ("--data.class_path=my_scans.Unnamed", "--data.num_workers=0", "--wandb.mode=disabled", "--out=run")
    assert main(["fit", *SMALL, *flags]) == 0
    said = "names no classes, and its training images or their labels are not those of the model of ckpt="
    for order, is_said in ("012", False), ("201", True):
        monkeypatch.setenv("ORDER", order)
        capfd.readouterr()
        assert main(["test", "--ckpt=run", "--trust"]) == 0
        assert (said in capfd.readouterr().out) is is_said


def test_an_ordinary_dataset_of_make_dataset_is_taken():
    class Own(ImageData):
        image_size, class_names, in_channels, mean, std = (8, 8), ["even", "odd"], 3, (0.5,) * 3, (0.25,) * 3

        def make_dataset(self, split):
            return torch.utils.data.Subset(Sizes(train=split == "train"), range(10))

    data = Own()
    assert isinstance(data.dataset("test"), Items)
    assert next(iter(data.train_dataloader())).labels.bincount().tolist() == [5, 5]


def test_a_transform_of_single_images_depends_on_keys_alone():
    from torchvision.transforms import v2

    images, keys = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8), torch.arange(6)
    change = PerImage(v2.ColorJitter(brightness=0.5, hue=0.2))
    state = torch.get_rng_state()
    changed = change(images, keys)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(changed[[4, 1]], change(images[[4, 1]], keys[[4, 1]]))
    assert not torch.equal(changed, change(images, keys + 6))
    # in the loader or after it, the same pixels
    first, second = Digits(augment=[v2.RandomInvert(0.5)]), Digits(augment=[v2.RandomInvert(0.5)])
    request = next(second._train_requests())
    batches = [next(iter(first.train_dataloader())), second.dataset("train").__getitems__(request)]
    assert [batch.augmented for batch in batches] == [1, 0]
    assert torch.equal(
        *(data.model_input(batch, 0).images for data, batch in zip((first, second), batches, strict=True))
    )


class Drawn(Sizes):
    def __init__(self, train: bool):
        drawn = np.random.permutation(50)  # noqa: NPY002
        super().__init__(train)
        self.order = drawn[:40] if train else drawn[40:]


def test_a_dataset_that_draws_its_own_split_draws_the_same_in_each_process():
    def orders() -> list[list[int]]:
        data = WrappedDataset(dataset_class=Drawn, image_size=8)
        return [data.dataset(split).dataset.order.tolist() for split in ("train", "test")]

    first = orders()
    assert sorted([*first[0], *first[1]]) == list(range(50))
    assert orders() == first


class Animals:
    """Black images of classes that differ from split to split."""

    def __init__(self, by_split, split="train"):
        if split not in by_split:
            raise ValueError(split)
        self.classes = by_split[split]

    def __len__(self):
        return 2 * len(self.classes)

    def __getitem__(self, index):
        return np.zeros((8, 8, 3), np.uint8), index % len(self.classes)


class Indexed(Animals):
    """Classes whose names class_to_idx alone has."""

    def __init__(self, by_split, split="train"):
        super().__init__(by_split, split)
        self.class_to_idx = {name: self.classes.index(name) for name in sorted(self.classes)}
        del self.classes

    def __len__(self):
        return 2 * len(self.class_to_idx)

    def __getitem__(self, index):
        return np.zeros((8, 8, 3), np.uint8), index % len(self.class_to_idx)


class Sorted(Indexed):
    """Classes in the order of the alphabet beside class_to_idx, which labels follow, as in vision#1674."""

    def __init__(self, by_split, split="train"):
        super().__init__(by_split, split)
        self.classes = sorted(self.class_to_idx)


class Changed(Animals):
    """Labels that torchvision's target_transform changes, as in vision#475."""

    def target_transform(self, label):
        return len(self.classes) - 1 - label

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, self.target_transform(label)


class Joined(Changed):
    def target_transform(self, label):
        return label // 2


def test_classes_that_a_target_transform_joins_have_no_names():
    data = WrappedDataset(
        dataset_class=Joined, arguments={"by_split": {"train": ["cat", "dog", "eel", "fox"]}}, val_share=0.25
    )
    assert data.class_names == ["0", "1"]


def test_names_of_the_user_in_another_order_than_those_of_the_labels_are_refused():
    """keras#6075: there they choose the order of the labels, and here a cat would be called owl."""
    splits = {split: ["cat", "dog", "owl"] for split in ("train", "val", "test")}
    own = {"dataset_class": Animals, "arguments": {"by_split": splits}}
    with pytest.raises(UserError, match=r"class_names=owl, dog, cat: names follow labels, .* the order cat, dog, owl"):
        WrappedDataset(**own, class_names=["owl", "dog", "cat"])
    assert WrappedDataset(**own, class_names=["Katze", "Hund", "Eule"]).class_names == ["Katze", "Hund", "Eule"]


@pytest.mark.parametrize("kind", [Animals, Indexed, Sorted, Changed])
@pytest.mark.parametrize("names", [["dog", "eel"], ["eel", "dog", "cat"], ["cat", "dog", "eel"]])
def test_classes_of_a_split_are_those_of_training_by_name(names, kind):
    train = ["cat", "dog", "eel"]
    data = WrappedDataset(
        dataset_class=kind, arguments={"by_split": {"train": train, "val": names, "test": names}}, num_workers=0
    )
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert [data.class_names[label] for label in batch.labels] == names * 2
    assert [data.class_names[label] for label in data.dataset("val").labels] == names * 2


@pytest.mark.parametrize("other", [["cat", "dog"], ["dog", "eel"]])
def test_joined_datasets_number_classes_alike(other):
    def joined():
        return ConcatDataset([Animals({"train": names}, "train") for names in (["cat", "dog", "eel"], other)] * 5)

    if other == ["cat", "dog"]:
        assert WrappedDataset(dataset_class=joined).class_names == ["cat", "dog", "eel"]
        return
    with pytest.raises(UserError, match="have the classes cat, dog, eel and dog, eel, so that labels differ"):
        WrappedDataset(dataset_class=joined)


class Zoo(LightningDataModule):
    """Loaders of datasets that name their classes, each by itself, as DeepForest#1147 had."""

    def __init__(self, **by_split):
        super().__init__()
        self.sets = {split: Animals({split: names}, split) for split, names in by_split.items()}

    def loader(self, split):
        return DataLoader(
            Subset(self.sets[split], range(4)), 4, collate_fn=lambda rows: [*map(as_tensor, zip(*rows, strict=True))]
        )

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")


def as_tensor(parts):
    return torch.stack([torch.as_tensor(part).float().mT if np.ndim(part) else torch.tensor(part) for part in parts])


@pytest.mark.parametrize("names", [["cat", "eel"], ["eel", "dog", "cat"]])
def test_a_data_module_whose_splits_number_classes_by_themselves_is_refused(names):
    train = ["cat", "dog", "eel"]
    data = WrappedDataModule(module=Zoo(train=train, val=train[:2]), in_channels=3, image_size=None)
    assert data.class_names == train
    data.val_dataloader()
    loaders = LightningDataModule.from_datasets(Digits().dataset("train"), num_workers=0)  # attributes of the instance
    found = WrappedDataModule(module=loaders, num_classes=10, image_size=8, in_channels=1)
    assert (found.has("train"), found.has("val")) == (True, False)
    data = WrappedDataModule(module=Zoo(train=train, val=names))
    with pytest.raises(UserError, match=f"for val has the classes {', '.join(names)}, that for train cat, dog, eel"):
        data.val_dataloader()


def test_classes_of_a_split_that_training_lacks_are_refused():
    with pytest.raises(UserError, match=r"for test has the classes cat, fox; .*train has cat, dog, eel: .* no fox"):
        WrappedDataset(
            dataset_class=Animals, arguments={"by_split": {"train": ["cat", "dog", "eel"], "test": ["cat", "fox"]}}
        )
