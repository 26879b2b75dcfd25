from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import SHARED
from tensors import write_images, write_parquet

from vit_lightning import HuggingFaceSet, ImageFolder, UserError
from vit_lightning.data.batches import Request

installed = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra datasets")


def parquet(place: Path, *splits: str, damage: int | None = None) -> Path:
    (place / "tables").mkdir()
    for number, split in enumerate(splits):
        for label, name in enumerate(("cat", "dog")):
            write_images(place / "images" / split / name, 20, seed=10 * number + label)
        write_parquet(place / "tables" / f"my-{split}-0.parquet", place / "images" / split, damage=damage)
    return place / "tables"


def of(place: Path, tables: Path, **arguments: object) -> HuggingFaceSet:
    return HuggingFaceSet(path=str(tables), image_size=8, num_workers=0, cache=place / "cache", **arguments)


@installed
def test_a_table_gives_the_images_of_the_folder_that_it_was_made_of(tmp_path):
    data = of(tmp_path, parquet(tmp_path, "train", "val", "test"))
    folder = ImageFolder(root=tmp_path / "images", image_size=8, num_workers=0)
    assert data.class_names == folder.class_names == ["cat", "dog"]
    for split in ("train", "val", "test"):
        for keys in (None, [4, 5, 6]):
            ours, theirs = (d.dataset(split).__getitems__(Request([0, 25, 39], keys)) for d in (data, folder))
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.labels, theirs.labels)


@installed
def test_a_column_of_paths_is_read_too(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    write_images(tmp_path / "images", 20)
    paths = [str(path) for path in sorted((tmp_path / "images").iterdir())]
    (tmp_path / "tables").mkdir()
    table = pyarrow.table({"image": paths, "label": [number % 2 for number in range(20)]})
    write_table(table, tmp_path / "tables" / "train.parquet")
    data = of(tmp_path, tmp_path / "tables", min_area=1.0)
    assert next(iter(data.train_dataloader())).images.shape == (14, 3, 8, 8)


@installed
def test_what_the_source_lacks_is_cut_from_training(tmp_path):
    data = of(tmp_path, parquet(tmp_path, "train"))
    sizes = {split: len(data.dataset(split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 28, "val": 4, "test": 8}
    assert len({name for split in sizes for name in data.dataset(split).encoded.names}) == 40


@installed
def test_a_damaged_row_is_named_or_skipped(tmp_path):
    tables = parquet(tmp_path, "train", "val", "test", damage=7)
    with pytest.raises(UserError, match="train, row 7: damaged"):
        list(of(tmp_path, tables).train_dataloader())
    data = of(tmp_path, tables, on_bad_image="skip")
    seen = {index for batch in data.train_dataloader() for index in batch.indices.tolist()}
    assert seen == {*range(40)} - {7}


@installed
def test_mistakes_are_named(tmp_path):
    tables = parquet(tmp_path, "train")
    with pytest.raises(UserError, match=r"no column picture \(choose image, label\)"):
        of(tmp_path, tables, image_column="picture").check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no Parquet"):
        of(tmp_path, tmp_path / "empty").check()
    (tables / "other.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"other\.parquet must hold one of"):
        of(tmp_path, tables).check()


@installed
@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs the shared images")
def test_cifar_as_parquet(tmp_path):
    data = HuggingFaceSet(path=str(SHARED / "data"), image_size=32, min_area=0.5, num_workers=0, cache=tmp_path)
    assert data.num_classes == 10
    batch = data.dataset("test").__getitems__(Request(list(range(8)), None))
    assert batch.images.shape == (8, 3, 32, 32)
    content = data._tables["test"][0]["image"]["bytes"]
    assert np.asarray(Image.open(io.BytesIO(content))).shape == (32, 32, 3)


def test_bad_values_are_named_at_once():
    with pytest.raises(UserError) as caught:
        HuggingFaceSet(path="x", image_size=0, min_area=2.0, val_share=1.0)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["min_area", "image_size", "val_share"]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_library_the_way_out_is_named():
    with pytest.raises(UserError, match=r"pip install 'vit-lightning\[datasets\]'"):
        HuggingFaceSet(path="x").check()


def table_of(place: Path, rows: dict[str, list[object]], *, others: dict[str, list[object]] | None = None) -> Path:
    import datasets

    (place / "tables").mkdir()
    for split, values in {"train": rows, **({"test": others} if others else {})}.items():
        features = {
            "image": datasets.Image(),
            "label": datasets.Value("int64" if values["label"][0] != "a" else "string"),
        }
        features |= {"mask": datasets.Image()} if "mask" in values else {}
        table = datasets.Dataset.from_dict(values, features=datasets.Features(features))
        table.to_parquet(str(place / "tables" / f"{split}.parquet"))
    return place / "tables"


@installed
def test_other_columns_are_left_alone_and_a_null_is_a_damaged_image(tmp_path):
    write_images(tmp_path / "images", 20)
    files = [{"bytes": path.read_bytes(), "path": None} for path in sorted((tmp_path / "images").iterdir())]
    rows = {"image": [None, *files[1:]], "label": [0, 1] * 10, "mask": [{"bytes": b"none", "path": None}] * 20}
    data = of(
        tmp_path, table_of(tmp_path, rows, others={**rows, "label": [-1] * 20}), val_share=0.2, on_bad_image="skip"
    )
    assert data.class_names == ["0", "1"]
    sizes = {split: len(data.dataset(split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 12, "val": 4, "test": 4}  # the test without labels is as if it were not there
    seen = 0
    for split in sizes:
        dataset = data.dataset(split)
        indices = [index for index in range(len(dataset)) if not dataset.name(index).endswith("row 0")]
        seen += len(indices)
        assert len(dataset.__getitems__(Request([*range(len(dataset))], None)).indices) == len(indices)
    assert seen == 19


@installed
@pytest.mark.parametrize(("train", "test"), [("ab", None), ([0, -1], None), ([0, 1], [0, 7]), ([0, None], None)])
def test_labels_that_are_no_classes_are_named(tmp_path, train, test):
    write_images(tmp_path / "images", 2)
    image = [{"bytes": path.read_bytes(), "path": None} for path in (tmp_path / "images").iterdir()]
    others = {"image": image, "label": test} if test else None
    tables = table_of(tmp_path, {"image": image, "label": list(train)}, others=others)
    with pytest.raises(UserError, match="label_column=label of"):
        of(tmp_path, tables).dataset("train")
