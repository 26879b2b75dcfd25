import itertools
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensors import write_images

from vit_lightning import ImageFolder, UserError
from vit_lightning.data.batches import Request
from vit_lightning.data.image_files import ImageFiles, data_of_files
from vit_lightning.data.images import Images, centre_box, random_resized_box

CLASSES = ("cat", "dog", "owl")


def make_folder(root: Path, *splits: str, count: int = 10) -> Path:
    for place in splits or ("",):
        for number, name in enumerate(CLASSES):
            write_images(root / place / name, count, seed=hash((place, number)) % 1000)
    return root


def files(data: ImageFolder, split: str) -> list[Path]:
    return data._splits[split].images


@pytest.mark.parametrize(
    ("folders", "val", "test", "said"),
    [
        ("train|val|test", "val", "test", ""),
        ("train|validation|test", "validation", "test", ""),
        ("train|test", "", "test", ""),
        ("train|val", "val", "", ""),
        ("train", "", "", ""),
        ("", "", "", ""),
        ("Training|Testing", "", "Testing", ""),
        ("seg_train/seg_train|seg_test/seg_test", "", "seg_test/seg_test", ""),
        ("training_set|test_set", "", "test_set", ""),
        ("train|dev", "dev", "", ""),
        ("train|Valid|TEST", "Valid", "TEST", ""),
        ("Train-Images|Validation Set|testset", "Validation Set", "testset", ""),
        ("train|hard_test", "", "hard_test", "hard_test is taken as test"),
        ("train|test_clean|pred", "", "test_clean", "test_clean is taken as test; {}: left out 1 folder pred"),
        ("train|test|test_old", "", "test", "left out 1 folder test_old"),
        ("train|test_a|test_b", "", "", "left out 1 folder test_a, 1 folder test_b"),
        ("asl_train/asl_train|asl_test", "", "asl_test", "asl_test is taken as test"),  # as archives have it
        ("imagenet_train/imagenet_train|imagenet_val", "imagenet_val", "", "imagenet_val is taken as val"),
        ("train|test1/!", "", "", "left out 1 folder test1 without class folders"),
        ("asl_train|asl_test/!", "", "", "left out 1 folder asl_test without class folders"),
    ],
)
def test_splits_come_from_folders_or_are_cut_from_training(tmp_path, folders, val, test, said):
    train, *others = folders.split("|")
    for place in (train, *others):
        if place.endswith("/!"):
            write_images(tmp_path / place[:-2], 4)
        else:
            make_folder(tmp_path, place)
    data = ImageFolder(root=tmp_path, image_size=8)
    found = [files(data, split) for split in ("train", "val", "test")]
    cut = 0 if val else 3, 0 if test else 6
    assert [*map(len, found)] == [30 - sum(cut), cut[0] or 30, cut[1] or 30]
    assert len({path for paths in found for path in paths}) == sum(map(len, found))
    assert [{path.parent.parent for path in paths} for paths in found] == [
        {tmp_path / (place or train)} for place in (train, val, test)
    ]
    assert data.class_names == list(CLASSES)
    assert data.notice == (said and f"{tmp_path}: {said.format(tmp_path)}")


@pytest.mark.parametrize("split", ["", "train"])
def test_what_programs_leave_is_no_class(tmp_path, split):
    root = make_folder(tmp_path, split) / split
    for name in ("__MACOSX", "@eaDir", ".ipynb_checkpoints", "cat/@eaDir"):
        write_images(root / name, 2)
    write_images(root / "cat" / ".thumbs", 3)
    (root / "cat" / "._000.jpg").write_bytes(b"metadata")
    data = ImageFolder(root=tmp_path, image_size=8)
    assert data.class_names == list(CLASSES)
    assert sum(len(files(data, split)) for split in ("train", "val", "test")) == 30
    assert data.notice == f"{tmp_path}: left out 1 folder @eaDir, 1 folder __MACOSX"


def test_names_of_classes_are_equal_in_any_form_of_unicode(tmp_path):
    for place, name in ("train", "caf\u00e9"), ("train", "cafe\u0301"), ("test", "cafe\u0301"), ("train", "bar"):
        write_images(tmp_path / place / name, 10)
    data = ImageFolder(root=tmp_path, image_size=8)
    assert data.class_names == ["bar", "caf\u00e9"]
    assert [data._source[split].labels for split in ("train", "test")] == [[0] * 10 + [1] * 20, [1] * 10]


TRAIN = {f"train/{name}": 2 for name in CLASSES}
TINY = {f"train/{name}/images": 10 for name in CLASSES} | {"val/images": 10, "test/images": 10}


def write_tree(root: Path, tree: dict[str, int | str]) -> Path:
    """Writes folders with some images, and text files."""
    for place, what in tree.items():
        if isinstance(what, int):
            write_images(root / place, what)
        else:
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_text(what)
    return root


@pytest.mark.parametrize(
    ("tree", "messages"),
    [
        (
            {**TRAIN, "train/ant/a.heic": "none", "train/ant/b.heic": "none", "train/bee": 0},
            [r"no images in .*/ant, .*/bee \(left out 2 .heic: .*DatasetFolder with .*\): .* images there \(.apng, "],
        ),
        (  # CUB-200-2011: SHI-Labs#5, cs-kd#5
            {"images/001.albatross": 2, "images/002.auklet": 2, "attributes": 0},
            [r"no images in .*attributes: .*\(is data.root=.*/images meant\?\)$"],
        ),
        ({"photos.zip": "none", "more.tar.gz": "none"}, [r"found 0 \(more\.tar\.gz, photos\.zip: unpack first\)"]),
        ({"train.csv": "label,pixel0\n"}, [r"found 0 \(train\.csv: a Dataset of your own gives such images\)"]),
        (
            {"data_batch_1": "none", "test_batch": "none", "batches.meta": "none"},
            [r"found 0 \(data_batch_1, test_batch: data\.class_path=CIFAR10 or CIFAR100, data\.root the folder around"],
        ),
        (
            {"t10k-images-idx3-ubyte.gz": "none", "train-labels.idx1-ubyte": "none"},
            [r"\.gz, train-labels\.idx1-ubyte: data\.class_path=TorchvisionSet with data\.name=MNIST"],
        ),
        ({"fog.npy": "none", "labels.npy": "none"}, [r"found 0 \(fog\.npy, labels\.npy: a Dataset of your own"]),
        (
            {"train/0.tar": "none", "test/0.tar": "none"},
            [r"found 0 \(0\.tar: unpack first, or data\.class_path=HuggingFaceSet reads shards of WebDataset"],
        ),
        ({f"images/{name}": 2 for name in CLASSES}, [r"found 1 \(is data\.root=.*/images meant\?\)"]),
        ({"dev/cat": 2, "dev/dog": 2, "Testing/cat": 2}, [r"has images of val and test, none of train \(ln -s"]),
        ({**TRAIN, "test/cat": 2, "test/dog": 2, "test/owl": 0, "test/fox": 2}, ["/test/fox", "/test/owl"]),
        (TINY, [r"val/images has no class folders: move each image to .*val/images/CLASS, or "]),
        (
            {"train/images": 2, "train/metadata.csv": "file_name,label\n"},
            ["metadata.csv: data.class_path=HuggingFaceSet with data.path=.* reads it"],
        ),
        (  # fastai#1126: as of Kaggle
            {"train": 2, "train.csv": "image_id,label\n"},
            ["labels in a table .*/train/metadata.csv, columns file_name and label: "],
        ),
    ],
    ids=str,
)
def test_what_is_no_set_of_images_is_named_with_the_way_out(tmp_path, tree, messages):
    with pytest.raises(UserError) as caught:
        ImageFolder(root=write_tree(tmp_path, tree)).check()
    for problem, message in zip(caught.value.problems, messages, strict=True):
        assert problem.startswith(f"root={tmp_path}")
        assert re.search(message, problem)


def test_folders_that_are_numbers_are_classes_in_order_of_value(tmp_path):
    for number in range(12):
        write_images(tmp_path / "train" / str(number), 1, seed=number)
    data = ImageFolder(root=tmp_path, image_size=8)
    assert data.class_names == [str(number) for number in range(12)]
    assert [path.parent.name for path in data.source_splits()["train"].images] == data.class_names


@pytest.mark.parametrize("wanted", ["val", "test"])
def test_classes_are_those_of_training_where_a_test_lacks_some(tmp_path, wanted):
    for place in ("train/0", "train/1", "train/5", "val/1", "val/5", "test/1", "test/5"):
        write_images(tmp_path / place, 2)
    data = ImageFolder(root=tmp_path, image_size=8)
    data.wanted = wanted
    assert data.class_names == ["0", "1", "5"]
    assert data._source[wanted].labels == [1, 1, 2, 2]
    assert data.take_classes(["0", "1", "5"], "the model") == ""


def test_a_key_draws_the_same_crop_again(tmp_path):
    train = ImageFolder(root=make_folder(tmp_path, "train"), image_size=8, min_area=0.2).dataset("train")
    one, again, other = (train.__getitems__(Request([0], [key])).images for key in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_interpolation_is_that_of_all_splits_and_of_later_predictions(tmp_path):
    make_folder(tmp_path, "train", "test")
    fast = ImageFolder(root=tmp_path, image_size=9, interpolation="fast_bicubic")
    usual = ImageFolder(root=tmp_path, image_size=9)
    for split, keys in (("train", [7, 8]), ("test", None)):
        one, other = (data.dataset(split).__getitems__(Request([0, 1], keys)).images for data in (fast, usual))
        assert 0 < (one.int() - other.int()).abs().float().mean() < 12
    assert "interpolation" not in usual.test_view()  # as in all earlier checkpoints
    later = data_of_files("run", {"test_view": fast.test_view()})
    files = ImageFiles(**{name: value for name, value in later.items() if name != "class_path"})
    files.files = fast._splits["test"].images[:2]
    again = files.dataset("test").__getitems__(Request([0, 1], None)).images
    assert torch.equal(again, fast.dataset("test").__getitems__(Request([0, 1], None)).images)


def test_an_image_of_the_right_size_keeps_its_pixels(tmp_path):
    for name in CLASSES:
        write_images(tmp_path / name, 10, size=(16, 16))
    data = ImageFolder(root=tmp_path, image_size=16, centre_share=1.0)
    shown = data.dataset("test").__getitems__(Request([0], None)).images[0]
    stored = np.asarray(Image.open(files(data, "test")[0]))
    assert np.array_equal(shown.permute(1, 2, 0).numpy(), stored)


def test_random_boxes_lie_inside_and_keep_area_and_ratio():
    boxes = [random_resized_box(500, 375, min_area=0.3, key=key) for key in range(2000)]
    left, upper, right, lower = np.array(boxes).T
    assert left.min() >= 0
    assert upper.min() >= 0
    assert right.max() <= 500
    assert lower.max() <= 375
    share = (right - left) * (lower - upper) / (500 * 375)
    ratio = (right - left) / (lower - upper)
    assert 0.29 < share.min() < 0.33
    assert share.max() > 0.9
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35


def test_centre_box_has_the_target_s_ratio_and_share():
    assert centre_box(500, 375, target=(224, 224), fraction=1.0) == (62.5, 0.0, 437.5, 375.0)
    assert centre_box(100, 100, target=(10, 10), fraction=0.5) == (25.0, 25.0, 75.0, 75.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_jpegs_decoded_where_they_are_trained_on_have_nearly_the_fast_pixels(tmp_path, workers):
    """On a CPU, whose JPEGs are libjpeg's; also of images that are no plain JPEG."""
    make_folder(tmp_path, "train", "val", "test")
    Image.new("RGBA", (20, 14), (1, 200, 3, 255)).save(tmp_path / "train" / "cat" / "003.png")
    (tmp_path / "train" / "cat" / "003.jpg").unlink()
    given = {"root": tmp_path, "image_size": 9, "min_area": 0.5, "batch_size": 16}
    fast = ImageFolder(**given, interpolation="fast_bicubic", num_workers=0)
    device = ImageFolder(**given, interpolation="device_bicubic", num_workers=workers)
    assert device.test_view() == fast.test_view()
    for split in ("train", "val"):
        for one, other in zip(loader_of(fast, split), loader_of(device, split), strict=True):
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.labels, other.labels)
            # the fast ones are rounded to 8 bits between columns and rows too
            assert (one.images.float() - other.images.float()).abs().mean((1, 2, 3)).max() < 1
    later = tmp_path / "train" / "owl" / "005.jpg"
    later.write_bytes(later.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"005\.jpg: damaged"):
        list(loader_of(device, "train"))
    with pytest.raises(UserError, match="interpolation=device_bicubic and augment"):
        ImageFolder(root=tmp_path, interpolation="device_bicubic", augment=[torch.clone])


def damage(path: Path, kind: str) -> None:
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:200])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.write_text("no image")


@pytest.mark.parametrize(("kind", "workers"), [("cut short", 0), ("text", 1)])
def test_a_damaged_image_is_an_error_that_names_the_file(tmp_path, kind, workers):
    root = make_folder(tmp_path, "train", "test")
    bad = root / "test" / "dog" / "003.jpg"
    damage(bad, kind)
    data = ImageFolder(root=root, image_size=8, num_workers=workers)
    with pytest.raises(UserError) as caught:
        list(data.test_dataloader())
    assert len(caught.value.problems) == 1
    assert str(bad) in caught.value.problems[0]


def test_bad_values_are_named_all_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        ImageFolder(root=tmp_path / "missing", min_area=0.0, val_share=1.0, centre_share=2.0)
    named = [problem.split("=")[0] for problem in caught.value.problems]
    assert named == ["val_share", "min_area", "centre_share"]
    (tmp_path / "photos.zip").write_bytes(b"none")
    with pytest.raises(UserError, match=r"photos\.zip is not a folder \(photos\.zip: unpack first\)"):
        ImageFolder(root=tmp_path / "photos.zip").check()


def test_two_folders_for_one_split_or_one_for_two_are_refused(tmp_path):
    root = make_folder(tmp_path, "train", "val", "valid")
    (root / "test").symlink_to(root / "train")
    with pytest.raises(UserError) as caught:
        ImageFolder(root=root).check()
    assert ["both mean val" in problem for problem in caught.value.problems] == [True, False]
    assert "the same folder" in caught.value.problems[1]


def test_what_is_kept_in_memory_is_what_lies_on_disk(tmp_path):
    make_folder(tmp_path, "train", "val", "test")
    settings = {"root": tmp_path, "image_size": (8, 12), "min_area": 1.0, "num_workers": 0, "batch_size": 16}
    kept, disk = ImageFolder(**settings), ImageFolder(**settings, in_memory=False)
    for split in ("train", "val", "test"):
        assert isinstance(kept.dataset(split), Images) > isinstance(disk.dataset(split), Images)
        for one, other in zip(loader_of(kept, split), loader_of(disk, split), strict=True):
            for name in ("images", "labels", "indices"):
                assert torch.equal(getattr(one, name), getattr(other, name))
    assert kept.fingerprint() == disk.fingerprint()


def loader_of(data: ImageFolder, split: str):
    return {"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[split]()


def test_random_parts_are_not_kept(tmp_path):
    make_folder(tmp_path)
    assert not isinstance(ImageFolder(root=tmp_path, image_size=8, min_area=0.5).dataset("train"), Images)
    with pytest.raises(UserError, match=r"in_memory=True needs min_area=1"):
        ImageFolder(root=tmp_path, image_size=8, in_memory=True)


@pytest.mark.parametrize("size", [(32, 33), (33, 32), (500, 375)])
def test_all_of_the_area_is_all_of_the_image(size):
    boxes = {random_resized_box(*size, min_area=1.0, key=key) for key in range(100)}
    assert boxes == {(0, 0, *size)}


@pytest.mark.parametrize(
    "names",
    [
        ("bullet_train", "car", "contest", "development", "latest", "testbed", "train station", "trains", "valley"),
        ("bullet_train", "steam_train"),
        ("bullet_train", "speed_test"),
    ],
)
def test_names_of_classes_are_no_splits(tmp_path, names):
    for name in names:
        write_images(tmp_path / name, 9)
    assert ImageFolder(root=tmp_path, image_size=8).class_names == list(names)


def test_what_is_no_image_or_in_no_class_is_counted(tmp_path):
    root = make_folder(tmp_path, "train", "test", count=2)
    cat, image = root / "train" / "cat", Image.new("RGB", (20, 14), (9, 99, 199))
    read = [cat / name for name in ("a.jfif", "b.JPE", "c.avif", "d.jp2", "e.pgm", "f")]
    kinds = ("JPEG", "JPEG", "AVIF", "JPEG2000", "PPM", "JPEG")
    for path, kind in zip(read, kinds, strict=True):
        image.convert("L" if path.suffix == ".pgm" else "RGB").save(path, kind)
    places = ["train/cat/g.heic", "train/dog/h.HEIC", "test/cat/list"]
    for place in [*places, "train/owl/note.txt", "train/loose.jpg", "a.jpg"]:
        (root / place).write_bytes(b"none")
    write_images(root / "seg_pred", 2)
    data = ImageFolder(root=root, image_size=8, val_share=0.5)
    assert {*files(data, "train"), *files(data, "val")} == {*(root / "train").glob("*/*.jpg"), *read}
    data._splits["train"].images[:] = read
    shown = data.dataset("train").__getitems__(Request([0, 1, 2, 3, 5], None)).images[..., 4, 4]
    assert (shown.int() - torch.tensor([9, 99, 199])).abs().max() < 6
    assert data.notice == (
        f"{root}: left out 2 .heic, 1 .jpg beside the class folders, 1 .jpg beside the folders of the splits, 1 .txt, "
        "1 folder seg_pred, 1 without a suffix"
    )


def test_links_are_followed_once_and_not_back(tmp_path):
    root, other = make_folder(tmp_path / "images", count=5), tmp_path / "other"
    write_images(other / "deep", 3)
    for name, to in {"more": other, "again": other, "up": root, "self": root / "cat"}.items():
        (root / "cat" / name).symlink_to(to)
    data = ImageFolder(root=root, image_size=8, val_share=0.2)
    found = [path for split in ("train", "val", "test") for path in files(data, split) if "cat" in path.parts]
    assert sorted(found) == sorted([*(root / "cat").glob("*.jpg"), *(root / "cat/again").rglob("*.jpg")])
    assert len(found) == 8


def test_what_lies_a_folder_deeper_is_said(tmp_path):
    root = make_folder(tmp_path, "images")
    make_folder(tmp_path, "fold_1", "phase2/images", "photos/Images")  # Office-31 has a folder of each kind
    data = ImageFolder(root=root, image_size=8)
    said = "the classes are fold_1, images, phase2, photos, not cat, dog, owl in them"
    assert data.notice == f"{root}: {said} (data.root={root}/fold_1 has those)"


def test_a_whole_set_among_the_classes_and_a_list_beside_them_are_said(tmp_path):
    make_folder(tmp_path / "DATASET", "train", "val")
    make_folder(tmp_path, "figures")
    said = f"the classes are DATASET, figures, not those in them (data.root={tmp_path}/DATASET has those)"
    assert ImageFolder(root=tmp_path, image_size=8).notice == f"{tmp_path}: {said}"
    root = make_folder(tmp_path / "listed")
    (root / "metadata.csv").write_text("file_name,label\n")
    said = "the classes are cat, dog, owl, and not the labels in metadata.csv"
    assert f"{root}: {said}; " in ImageFolder(root=root, image_size=8).notice


def test_parts_of_a_set_beside_a_table_of_labels_are_said(tmp_path):
    """cdfsl-benchmark#3, HAM10000."""
    for number in "12":
        write_images(tmp_path / f"HAM_images_part_{number}", 20)
    data = ImageFolder(root=tmp_path, image_size=8)
    assert data.notice == ""
    (tmp_path / "HAM_metadata.csv").write_text("image_id,dx\n")
    said = "the classes are HAM_images_part_1, HAM_images_part_2, and not the labels in HAM_metadata.csv"
    assert said in ImageFolder(root=tmp_path, image_size=8).notice


@pytest.mark.parametrize(("largest", "said"), [(4095, 1), (65535, 0)])
def test_images_of_12_bits_in_16_are_said_to_be_nearly_black(tmp_path, largest, said):
    """Sensors of 12 bits: of 256 levels 16 were left, and nothing told (pytorch-fid#62)."""
    for split, name in itertools.product(("train", "val", "test"), "ab"):
        (tmp_path / split / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((8, 8), largest * (number + 1) // 4, np.uint16)
            Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.tif")
    with warnings.catch_warnings(record=True) as caught:
        data = ImageFolder(root=str(tmp_path), image_size=8, in_memory=False)
        data.dataset("test")
        files = ImageFiles(**{**data.test_view(), "class_names": ["a", "b"]})
        files.files = sorted((tmp_path / "val").rglob("*.tif"))
        assert len(files.dataset("test")) == 8
    assert [str(one.message) for one in caught] == [
        f"images such as {tmp_path}/{split}/a/0.tif are nearly black (scale 16 bits to 65535)"
        for split in ("test", "val")[: 2 * said]
    ]
    files = ImageFiles(**{**data.test_view(), "class_names": ["a", "b"]})
    assert len(files.dataset("test")) == 0
