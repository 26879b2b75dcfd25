from __future__ import annotations

import importlib.util
import os
import random
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import Running
from runs import SMALL
from tensors import write_images

from vit_lightning import HuggingFaceSet, ImageFolder, UserError
from vit_lightning.cli import main
from vit_lightning.commands.arguments import read_call
from vit_lightning.commands.shard import shard
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import Request

installed = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra datasets")


def images(root: Path, count: int = 30) -> Path:
    for number, (split, name) in enumerate((s, n) for s in ("train", "val", "test") for n in ("cat", "dog")):
        write_images(root / split / name, count, seed=number)
    return root


def shards(folder: str = "shards", **arguments: object) -> HuggingFaceSet:
    return HuggingFaceSet(path=folder, image_size=8, cache=Path("cache"), **{"num_workers": 0, **arguments})


def shard_words(root: Path, *more: str) -> list[str]:
    return ["shard", "--data.class_path=ImageFolder", f"--data.root={root}", "--data.image_size=8", *SMALL, *more]


@installed
def test_shards_hold_the_images_of_the_folder(in_folder):
    folder = ImageFolder(root=images(in_folder / "images"), image_size=8, num_workers=0)
    assert main(shard_words(folder.root, "shards")) == 0
    data = shards()
    assert data.class_names == folder.class_names
    for split in ("train", "val", "test"):
        for keys in (None, [4, 5, 6]):
            ours, theirs = (d.dataset(split).__getitems__(Request([0, 59, 31], keys)) for d in (data, folder))
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.labels, theirs.labels)
    assert not Path("cache").exists(), "a second copy of the images"


@installed
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_at_the_right_image(in_folder, workers):
    assert main(shard_words(images(in_folder / "images"), "shards")) == 0
    whole_data = shards(num_workers=workers, batch_size=7)
    whole = list(whole_data.train_dataloader())
    assert len(whole) == 9
    rest = shards(num_workers=2 - workers, batch_size=7)
    rest._train_requests = lambda: islice(whole_data._train_requests(), 4, None)
    for one, other in zip(whole[4:], rest.train_dataloader(), strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert torch.equal(one.images, other.images)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@installed
def test_writing_that_was_killed_gives_the_same_shards(tmp_path):
    root = images(tmp_path / "images", 60)

    def start(out: Path) -> Running:
        experiment = resolve(shard_words(root)[1:], "shard")
        return Running(partial(shard, images_in_file=5), experiment, out, folder=tmp_path)

    assert start(tmp_path / "once").finish().returncode == 0
    draw = random.Random(0)
    for _ in range(int(os.environ.get("SHARD_KILLS", "3"))):
        process, until = start(tmp_path / "killed"), time.monotonic() + 60
        while not (tmp_path / "killed").exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5))
        process.kill()
        process.finish()
    (tmp_path / "killed").mkdir(exist_ok=True)
    whole = (tmp_path / "once" / "train-00001-of-00024.parquet").read_bytes()
    (tmp_path / "killed" / "train-00001-of-00024.parquet").write_bytes(whole[:-100])
    (tmp_path / "killed" / "val-00000-of-00024.parquet").unlink(missing_ok=True)
    (tmp_path / "killed" / ".val-00000-of-00024.parquet.part").write_bytes(b"half of it")  # what a kill may leave
    assert start(tmp_path / "killed").finish().returncode == 0
    assert files(tmp_path / "killed") == files(tmp_path / "once")


@installed
def test_damage_is_an_error_or_left_out(in_folder, capsys):
    root = images(in_folder / "images")
    (root / "train" / "cat" / "004.jpg").write_bytes(b"no image")
    assert main(shard_words(root, "shards")) == 2
    assert "004.jpg" in capsys.readouterr().err
    with pytest.raises(UserError, match="path=shards is not finished"):
        shards().check()
    assert main(shard_words(root, "shards")) == 2
    assert main(shard_words(root, "--data.on_bad_image=skip", "others")) == 0
    assert len(shards("others").dataset("train")) == 59
    assert main(shard_words(root, "--data.on_bad_image=skip", "shards")) == 0
    assert main(shard_words(root, "shards")) == 2
    assert "files of other images" in capsys.readouterr().err
    Path("shards/extra.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"extra.parquet is none of the files of lightning shard"):
        shards().check()


@pytest.mark.parametrize(
    "given", [["--config", "a.yaml", "out"], ["--config=a.yaml", "out"], ["out", "--config=a.yaml"]]
)
def test_the_folder_may_be_given_without_its_option(in_folder, given):
    Path("a.yaml").write_text("data: {class_path: Digits}\nmodel: {patch_size: 4}\n")
    assert read_call("shard", shard, given).words == [Path("out")]
    with pytest.raises(UserError, match="two: unexpected argument"):
        read_call("shard", shard, [*given, "two"])


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_library_the_way_out_is_named(in_folder, capsys):
    assert main(shard_words(images(in_folder / "images", 5), "shards")) == 2
    assert "vit-lightning[datasets]" in capsys.readouterr().err


@installed
def test_threads_get_the_images_that_they_ask_for(in_folder):
    root = images(in_folder / "images", 150)
    shard(resolve(shard_words(root)[1:], "shard"), Path("shards"), images_in_file=5)
    source = shards().dataset("train").source
    expected = [path.read_bytes() for path in sorted((root / "train").rglob("*.jpg"))]
    order = random.Random(0).choices(range(300), k=3000)
    with ThreadPoolExecutor(4) as pool:
        assert all(got == expected[index] for got, index in zip(pool.map(source, order), order, strict=True))


@installed
def test_shards_that_are_not_as_written_are_refused(in_folder):
    root = images(in_folder / "images", 5)
    shard(resolve(shard_words(root)[1:], "shard"), Path("shards"), images_in_file=5)
    part = Path("shards/val-00001-of-00002.parquet")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged Parquet"):
        shards().check()
    part.unlink()
    with pytest.raises(UserError, match=r"shards/val-00001-of-00002\.parquet is missing"):
        shards().check()


@installed
def test_large_row_groups_are_unpacked_once(in_folder, monkeypatch):
    """A row group is read for one image: what is too large for that goes through the cache of ``datasets``."""
    folder = ImageFolder(root=images(in_folder / "images"), image_size=8, num_workers=0)
    assert main(shard_words(folder.root, "shards")) == 0
    monkeypatch.setattr("vit_lightning.data.hugging_face.MAX_GROUP_BYTES", 100)
    ours, theirs = (d.dataset("test").__getitems__(Request([0, 59, 31], None)) for d in (shards(), folder))
    assert torch.equal(ours.images, theirs.images)
    assert list(Path("cache").rglob("*.arrow"))


@installed
def test_the_flags_that_read_the_shards_are_printed(in_folder, capsys):
    root = images(in_folder / "images", 10)
    assert main(shard_words(root, "--data.mean=[0.5,0.5,0.25]", "shards")) == 0
    flags = shlex.split(capsys.readouterr().out.splitlines()[-1])[2:]
    data = resolve(flags, "fit").data
    assert isinstance(data, HuggingFaceSet)
    assert (data.mean, data.std) == ((0.5, 0.5, 0.25), (0.229, 0.224, 0.225))
    assert len(data.dataset("train")) == 20


@installed
def test_what_is_left_out_is_listed_and_not_too_much(in_folder, capsys):
    root = images(in_folder / "images", 10)
    for name in ("train/cat/003.jpg", "test/dog/000.jpg"):
        (root / name).write_bytes(b"no image")
    assert main(shard_words(root, "--data.on_bad_image=skip", "--data.max_bad_share=0.04", "shards")) == 2
    assert "data.max_bad_share=0.04: 1 of 20 train" in capsys.readouterr().err
    assert main(shard_words(root, "--data.on_bad_image=skip", "shards")) == 0
    listed = [line.split(": ")[0] for line in Path("shards/bad_images.txt").read_text().splitlines()]
    assert listed == [str(root / "train/cat/003.jpg"), str(root / "test/dog/000.jpg")]
    assert "left out 2 damaged images" in capsys.readouterr().out


@installed
def test_images_are_reduced_to_a_shorter_side_and_smaller_ones_are_kept(in_folder, capsys):
    root = images(in_folder / "images", 5)
    large = root / "train" / "cat" / "000.jpg"
    pixels = np.add.outer(np.arange(60), np.arange(90)).astype(np.uint8)[..., None].repeat(3, axis=2)
    Image.fromarray(pixels).save(large, quality=95)
    assert main(shard_words(root, "--shorter_side=30", "shards")) == 0
    read = shards().dataset("train")
    assert read.whole(0).shape == (30, 45, 3)
    expected = np.asarray(Image.open(large).resize((45, 30), Image.Resampling.BICUBIC))
    assert np.abs(read.whole(0).astype(int) - expected).mean() < 2
    assert [read.source(i) for i in range(1, 5)] == [(root / f"train/cat/00{i}.jpg").read_bytes() for i in range(1, 5)]
    assert main(shard_words(root, "shards")) == 2
    assert "files of other images" in capsys.readouterr().err
