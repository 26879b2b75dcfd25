import io
import json
import pickle
import random
import re
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import datasets
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from tensors import write_images, write_parquet

from vit_lightning import HuggingFaceSet, ImageFolder, UserError
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import Request


def parquet(place: Path, *splits: str) -> Path:
    for number, split in enumerate(splits):
        for label, name in enumerate(("cat", "dog")):
            write_images(place / "images" / split / name, 20, seed=10 * number + label)
        write_parquet(place / "tables" / f"my-{split}-0.parquet", place / "images" / split)
    return place / "tables"


def of(place: Path, tables: Path, **arguments: object) -> HuggingFaceSet:
    return HuggingFaceSet(path=str(tables), image_size=8, num_workers=0, cache=place / "cache", **arguments)


def test_the_readme_of_a_folder_says_which_files_are_of_which_split(tmp_path):
    """datasets#4578, #5209: as ``load_dataset`` reads it, in place of all files cut anew."""
    tables = parquet(tmp_path, "train", "test")
    (tables / "my-train-0.parquet").rename(tables / "data.parquet")
    (tables / "my-test-0.parquet").rename(tables / "held.parquet")
    splits = "[{split: train, path: data.parquet}, {split: test, path: held.parquet}]"
    configs = f"[{{config_name: whole, data_files: {splits}}}, {{config_name: held, data_files: held.parquet}}]"
    (tables / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    data = of(tmp_path, tables, name="whole")
    data.setup("fit")
    assert [data.image_count(split) for split in ("train", "val", "test")] == [36, 4, 40]
    with pytest.raises(UserError, match=r"cannot be loaded: Config name is missing.*'whole', 'held'"):
        of(tmp_path, tables).check()
    with pytest.raises(UserError, match=r"cannot be loaded: .* \(datasets takes \[ for a pattern: rename the folder\)"):
        of(tmp_path, tables.rename(tmp_path / "tables [1]"), name="whole").check()


def test_a_table_gives_the_images_of_the_folder_that_it_was_made_of(tmp_path):
    data = of(tmp_path, parquet(tmp_path, "train", "val", "test"))
    folder = ImageFolder(root=tmp_path / "images", image_size=8, num_workers=0)
    assert data.class_names == folder.class_names == ["cat", "dog"]
    for split in ("train", "val", "test"):
        for keys in (None, [4, 5, 6]):
            ours, theirs = (d.dataset(split).__getitems__(Request([0, 25, 39], keys)) for d in (data, folder))
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.labels, theirs.labels)
    expected = [path.read_bytes() for path in sorted((tmp_path / "images" / "train").rglob("*.jpg"))]
    in_worker = pickle.dumps(data.dataset("train"))
    assert len(in_worker) < 20_000  # names of files, not images
    order = random.Random(0).choices(range(40), k=1000)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(pickle.loads(in_worker).source, order)) == [expected[index] for index in order]


def test_shards_of_webdataset_give_the_images_of_the_folder_that_they_were_made_of(tmp_path):
    """webdataset#426, open_clip#480."""
    parquet(tmp_path, "train", "test")
    for split in ("train", "test"):
        files = [*enumerate(sorted((tmp_path / "images" / split).rglob("*.jpg")))]
        for shard in (0, 1):
            (tmp_path / "shards [1]").mkdir(exist_ok=True)
            with tarfile.open(tmp_path / f"shards [1]/{split}-{shard:06}.tar", "w") as tar:
                for number, file in files[20 * shard :][:20]:
                    tar.add(file, f"{number:03}.jpg")
                    member = tarfile.TarInfo(f"{number:03}.cls")
                    member.size = 1
                    tar.addfile(member, io.BytesIO(b"%d" % (file.parent.name == "dog")))
    data = of(tmp_path, tmp_path / "shards [1]", label_column="cls")
    folder = ImageFolder(root=tmp_path / "images", image_size=8, num_workers=0)
    for split in ("train", "test"):
        ours, theirs = (one.dataset(split).__getitems__(Request([0, 19, 25, 34], None)) for one in (data, folder))
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_mistakes_are_named(tmp_path):
    tables = parquet(tmp_path, "train")
    with pytest.raises(UserError, match=r"no column data.image_column=picture \(choose image, label\)"):
        of(tmp_path, tables, image_column="picture").check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no Parquet files, .*ImageFolder"):
        of(tmp_path, tmp_path / "empty").check()
    (tables / "other.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"other\.parquet says none of train, val and test, beside train"):
        of(tmp_path, tables).check()


def table_of(place: Path, rows: dict[str, list[object]], *, others: dict[str, list[object]] | None = None) -> Path:
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


def test_the_only_column_of_images_needs_no_usual_name(tmp_path):
    """As in CIFAR-10 of the hub, which has ``img``; no labels are guessed, nor images that not all tables have."""
    for file in parquet(tmp_path, "train", "val", "test").iterdir():
        table = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "made"))
        table.rename_columns({"image": "img"}).to_parquet(str(file))
    data = of(tmp_path, tmp_path / "tables")
    data.check()
    assert data.class_names == ["cat", "dog"]
    assert [int(data.dataset("val").__getitems__(Request([index], None)).labels) for index in (0, 39)] == [0, 1]
    for asked in ({"label_column": "species"}, {"image_column": "picture"}):
        with pytest.raises(UserError, match=f"no column data.{next(iter(asked))}={next(iter(asked.values()))}"):
            of(tmp_path, tmp_path / "tables", **asked).check()
    table.rename_columns({"image": "photo"}).to_parquet(str(file))  # of one file
    with pytest.raises(UserError, match=r"no column data\.image_column=image"):
        of(tmp_path, tmp_path / "tables").check()


def test_other_columns_are_left_alone_and_a_null_is_a_damaged_image(tmp_path):
    write_images(tmp_path / "images", 20)
    files = [{"bytes": path.read_bytes(), "path": None} for path in sorted((tmp_path / "images").iterdir())]
    rows = {"image": [None, *files[1:]], "label": [0, 1] * 10, "mask": [{"bytes": b"none", "path": None}] * 20}
    data = of(tmp_path, table_of(tmp_path, rows, others={**rows, "label": [-1] * 20}), val_share=0.2)
    assert data.class_names == ["0", "1"]
    sizes = {split: len(data.dataset(split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 12, "val": 4, "test": 4}  # the test without labels is as if it were not there
    seen = 0
    for split in sizes:
        dataset = data.dataset(split)
        indices = [index for index in range(len(dataset)) if not dataset.name(index).endswith("row 0")]
        seen += len(indices)
        assert len(dataset.__getitems__(Request(indices, None)).indices) == len(indices)
        for index in {*range(len(dataset))} - {*indices}:
            assert "row 0: damaged image" in str(dataset.__getitems__(Request([index], None)))
    assert seen == 19


CARD = """---
configs: [{config_name: small, data_files: small/*.parquet}, {config_name: large, data_files: large/*.parquet}]
---
"""


PARTS = ", ".join(f"{{split: {split}, path: small/*.parquet}}" for split in ("train", "extra", "hard_test"))


class Hub(ThreadingHTTPServer):
    """A server that answers for the set me/set as the hub does: ``commits`` has the files of each, the last is main."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path).partition("?")[0]
        about, _, place = path.removeprefix("/api/datasets/me/set").partition("/tree/")
        revision, _, name = (place or path.partition("/resolve/")[2] or about.removeprefix("/revision/")).partition("/")
        commit = revision if revision not in ("", "main") else [*self.server.commits][-1]
        files = self.server.commits.get(commit)
        if files is None:
            self.reply(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        elif place:
            here = {file: content for file, content in files.items() if file.rpartition("/")[0] == name}
            found = [{"type": "file", "path": f, "size": len(c), "oid": str(hash(c))} for f, c in here.items()]
            folders = {file.partition("/")[0] for file in files if "/" in file} if not name else ()
            found += [{"type": "directory", "path": folder, "size": 0, "oid": folder} for folder in folders]
            self.reply(json.dumps(found).encode())
        elif path.startswith("/api/datasets/me/set"):
            self.reply(json.dumps({"id": "me/set", "sha": commit, "siblings": []}).encode())
        elif name in files:
            self.reply(files[name], 200, {"ETag": f'"{hash(files[name])}"', "X-Repo-Commit": commit})
        else:
            self.reply(b"", 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def reply(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def test_a_set_of_the_hub_is_pinned_to_the_commit_that_was_loaded(tmp_path, monkeypatch):
    hub, old, new = Hub(), "a" * 40, "b" * 40
    for place, name, value in (
        (constants, "ENDPOINT", hub.url),  # what HF_ENDPOINT sets, before the libraries are imported
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
        (constants, "HF_HUB_CACHE", str(tmp_path / "hub")),
        (datasets.config, "HF_ENDPOINT", hub.url),
    ):
        monkeypatch.setattr(place, name, value)
    for commit, labels in ((old, ("cat", "dog")), (new, ("cat", "emu"))):
        for name in labels:
            write_images(tmp_path / commit / name, 5, seed=0)
        write_parquet(tmp_path / "one.parquet", tmp_path / commit)
        table = (tmp_path / "one.parquet").read_bytes()
        hub.commits[commit] = {"README.md": CARD.encode(), "small/train.parquet": table}
    newest = hub.commits.pop(new)
    newest["README.md"] = CARD.replace("small/*.parquet", f"[{PARTS}]").encode()
    flags = ["--data.class_path=HuggingFaceSet", "--data.path=me/set", "--data.name=small", "--data.image_size=8"]
    flags += [f"--data.cache={tmp_path / 'cache'}", "--model.patch_size=4", "--model.emb_size=8", "--model.depth=1"]
    began = resolve([*flags, "--model.num_heads=1"])
    assert began.config["data"]["init_args"]["revision"] == old
    hub.commits[new] = newest
    (tmp_path / "config.yaml").write_text(began.to_yaml())
    again = resolve([f"--config={tmp_path / 'config.yaml'}"])
    assert again.data.class_names == ["cat", "dog"]
    assert again.config == began.config
    now = of(tmp_path, Path("me/set"), name="small")
    assert now.class_names == ["cat", "emu"]
    assert now.notice == "data.path=me/set: hard_test is taken as test; without use: extra"
    assert now.pinned() == {"revision": new}
    with pytest.raises(UserError, match=r"path=me/set cannot be loaded: .*nowhere"):
        of(tmp_path, Path("me/set"), revision="nowhere").check()
    with pytest.raises(UserError, match=r"cannot be loaded: .*small.*large"):
        of(tmp_path, Path("me/set"), name="medium").check()
    hub.shutdown()
    hub.server_close()  # from here on nobody answers, and nobody is asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert of(tmp_path, Path("me/set"), name="small").class_names == ["cat", "emu"]
    with pytest.raises(UserError, match=r"revision=c{40} is not in .*cache, but [ab]{40}"):
        of(tmp_path, Path("me/set"), name="small", revision="c" * 40).check()
    with pytest.raises(UserError, match="revision=main is for sets of the hub"):
        of(tmp_path, tmp_path, revision="main").check()


SHADES = {"cat": 40, "dog": 120, "owl": 200}


def rows(*classes: str, count: int = 6, labels: dict[str, Any] | None = None, names: list[str] | None = None) -> Any:
    """A table of gray images, whose shade is that of their class."""
    images, values = [], []
    for name in classes:
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (SHADES[name],) * 3).save(file, "PNG")
        images += [{"bytes": file.getvalue(), "path": None}] * count
        values += [name if labels is None else labels[name]] * count
    table = datasets.Dataset.from_dict({"image": images, "label": values}).cast_column("image", datasets.Image())
    return table.cast_column("label", datasets.ClassLabel(names=names)) if names else table


def shades(data: HuggingFaceSet) -> dict[str, set[tuple[str, int]]]:
    """Class name and shade of the images of each split."""
    found = {}
    for split in ("train", "val", "test"):
        batch = data.dataset(split).__getitems__(Request([*range(len(data.dataset(split)))], None))
        names = [data.class_names[label] for label in batch.labels.tolist()]
        found[split] = {*zip(names, batch.images[:, 0, 0, 0].tolist(), strict=True)}
    return found


ALL = {*SHADES.items()}
THREE = list(SHADES)


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({"train": [THREE], "val": [THREE], "test": [["owl", "dog", "cat"]]}, ALL),
        ({"train": [THREE, ["owl", "cat", "dog"]], "test": [THREE]}, ALL),
        ({"train": [THREE], "test": [["owl", "cat"]]}, ALL - {("dog", 120)}),
        ({"train": [["cat", "owl"], ["dog", "owl"]], "test": [["dog", "cat"], ["owl", "cat"]]}, ALL),
    ],
    ids=["test in another order", "shards in another order", "test of some", "shards of some"],
)
def test_classes_of_files_go_by_name(tmp_path, tables, found):
    for split, shards in tables.items():
        for number, names in enumerate(shards):
            rows(*names, names=names).to_parquet(str(tmp_path / f"{split}-{number}.parquet"))
    seen = shades(of(tmp_path, tmp_path, val_share=0.2))
    assert (seen["train"], seen["test"]) == (ALL, found)
    assert seen["val"] <= ALL


def test_classes_that_training_lacks_are_refused_and_numbers_are_said_to_be_equated(tmp_path):
    rows(*THREE, names=THREE).to_parquet(str(tmp_path / "train.parquet"))
    rows("cat", "dog", labels={"cat": 0, "dog": 1}).to_parquet(str(tmp_path / "test.parquet"))
    data = of(tmp_path, tmp_path, val_share=0.2)
    assert shades(data)["test"] == {("cat", 40), ("dog", 120)}
    assert data.notice == f"data.path={tmp_path}: labels of test are numbers, in the order of the class names"
    tested = of(tmp_path, tmp_path)
    tested.wanted = "test"  # which needs no training images
    assert (tested.class_names, tested.notice) == (THREE, data.notice)
    assert tested.source_splits().keys() == {"test"}
    rows("cat", "dog", "owl", labels={"cat": 7, "dog": 8, "owl": 9}).to_parquet(str(tmp_path / "train.parquet"))
    rows("cat", "owl", labels={"cat": 7, "owl": 9}).to_parquet(str(tmp_path / "test.parquet"))
    tested = of(tmp_path, tmp_path)
    tested.wanted = "test"
    assert (tested.class_names, tested.notice) == (["7", "8", "9"], "")
    assert {*tested.source_splits()["test"].labels} == {0, 2}
    rows(*THREE, names=THREE).to_parquet(str(tmp_path / "train.parquet"))
    rows("cat", "dog", labels={"cat": "cat", "dog": "fox"}).to_parquet(str(tmp_path / "test.parquet"))
    with pytest.raises(UserError, match=r"label of test holds fox \(.* those of training: cat, dog, owl\)"):
        of(tmp_path, tmp_path, val_share=0.2).dataset("train")
    rows("cat", names=["cat", "fox"]).to_parquet(str(tmp_path / "test.parquet"))
    rows("cat", "owl", names=THREE).to_parquet(str(tmp_path / "train.parquet"))
    assert (
        of(tmp_path, tmp_path, val_share=0.2).notice
        == f"data.path={tmp_path}: no training image is of dog (1 of 3 classes)"
    )


@pytest.mark.parametrize(
    "labels",
    [
        {"cat": 1, "dog": 2, "owl": 3},
        {"cat": 0, "dog": 5, "owl": 900},
        {"cat": "NA", "dog": "a b", "owl": "x"},
        {"cat": "2", "dog": "10", "owl": "100"},
        {"cat": False, "dog": True},
    ],
    ids=str,
)
def test_labels_are_those_that_are_there_in_order(tmp_path, labels):
    rows(*labels, labels=labels).to_parquet(str(tmp_path / "train.parquet"))
    data = of(tmp_path, tmp_path, val_share=0.2)
    assert data.class_names == [*map(str, labels.values())]
    assert all(found == {(str(labels[name]), SHADES[name]) for name in labels} for found in shades(data).values())
    assert data.notice == ""


@pytest.mark.parametrize("label", [[1, 0], 0.5, {"a": 1}], ids=str)
def test_a_label_that_is_none_is_named_with_its_type(tmp_path, label):
    rows("cat", labels={"cat": label}).to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(UserError, match=r"label of train holds .*: an image has one label") as caught:
        of(tmp_path, tmp_path, val_share=0.2).check()
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def write_listed(folder: Path, *images: str, suffix: str = ".csv") -> None:
    """Images of the classes that their names begin with, and a list of them."""
    listed = [(name, name.rpartition("/")[2].partition("_")[0]) for name in images]
    for name, label in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (SHADES[label],) * 3).save(folder / name)
    lines = [f"{name},{label}" for name, label in listed]
    if suffix == ".jsonl":
        lines = [json.dumps({"file_name": name, "label": label}) for name, label in listed]
    (folder / f"metadata{suffix}").write_text("\n".join([*["file_name,label"] * (suffix == ".csv"), *lines]) + "\n")


def write_form(place: Path, form: str) -> None:
    train, test = rows(*THREE, names=THREE), rows(*THREE, names=THREE, count=2)
    names = [f"{name}_{number}.png" for name in THREE for number in range(6)]
    if form == "save_to_disk":
        datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(place))
    elif form == "save_to_disk of each":
        train.shuffle(seed=0).save_to_disk(str(place / "Training"))
        test.save_to_disk(str(place / "test_set"))
    elif form == "the hub's":
        for split, table in (("train", train), ("test", test)):
            (place / "default" / split).mkdir(parents=True)
            table.to_parquet(str(place / "default" / split / "0000.parquet"))
    elif form == "a list of all":
        write_listed(place, *(f"train/{name}" for name in names), *(f"test/{name}" for name in names[::3]))
    else:
        suffix = form.rpartition(" ")[2]
        write_listed(place / "train", *names, suffix=suffix)
        write_listed(place / "test", *names[::3], suffix=suffix)


FORMS = ["save_to_disk", "save_to_disk of each", "the hub's", "a list of all", "lists .csv", "lists .jsonl"]


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_on_disk(tmp_path, form):
    write_form(tmp_path / "a set [1]", form)
    data = of(tmp_path, tmp_path / "a set [1]", val_share=0.2)
    assert data.class_names == THREE
    assert shades(data) == dict.fromkeys(("train", "val", "test"), ALL)
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [14, 4, 6]
    assert data.cut_splits == ("val",)


def test_several_sets_in_a_folder_are_refused(tmp_path):
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
        rows(*THREE).to_parquet(str(tmp_path / name / "train-0.parquet"))
    both = f"{tmp_path / 'large'} and {tmp_path / 'small'} hold images of train"
    with pytest.raises(UserError, match=re.escape(both)):
        of(tmp_path, tmp_path, val_share=0.2).check()
    assert of(tmp_path, tmp_path / "small").class_names == THREE
    (tmp_path / "small" / "train-0.parquet").rename(tmp_path / "small" / "0000.parquet")
    assert len(of(tmp_path, tmp_path / "small", val_share=0.2).dataset("train")) == 11  # no name says a split
    (tmp_path / "large" / "train-0.parquet").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"train-0\.parquet is damaged: "):
        of(tmp_path, tmp_path / "large").check()


@pytest.mark.parametrize("labels", [("1", "2", "x"), ("1.0", "2.0", "3.0"), ("1", "2", "03")])
def test_labels_of_lists_are_read_as_text(tmp_path, labels):
    for split, classes in ("train", labels), ("test", labels[:2]):
        (tmp_path / split).mkdir()
        names = [f"{label}_{number}.png" for label in classes for number in range(6)]
        for name in names:
            Image.new("RGB", (8, 8)).save(tmp_path / split / name)
        listed = [f"{name},{name.partition('_')[0]}" for name in names]
        text = "\n".join(["file_name,label", *listed]) + "\n"
        (tmp_path / split / "metadata.csv").write_text(text.replace(",", ";") if split == "test" else text)
    data = of(tmp_path, tmp_path, val_share=0.2)
    assert data.class_names == list(labels)
    assert data.source_splits()["test"].labels == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [("file_name,label\na.png,Käfer\n", "must be UTF-8: UnicodeD"), ("image\na.png\n", "has no column")],
)
def test_a_list_that_cannot_be_read_is_named(tmp_path, text, problem):
    (tmp_path / "metadata.csv").write_text(text, encoding="cp1252")
    with pytest.raises(UserError, match=f"^path={tmp_path}/metadata.csv {problem}"):
        of(tmp_path, tmp_path).check()


def test_a_list_of_windows_is_read_and_files_that_are_not_there_are_counted(tmp_path):
    names = [f"{split}/{name}_{number}.png" for split in ("train", "test") for name in THREE for number in range(6)]
    write_listed(tmp_path, *names)
    listed = (tmp_path / "metadata.csv").read_text()
    (tmp_path / "metadata.csv").write_text(listed.replace("/", "\\"))
    assert shades(of(tmp_path, tmp_path, val_share=0.2)) == dict.fromkeys(("train", "val", "test"), ALL)
    for number in (2, 4):
        (tmp_path / f"train/dog_{number}.png").unlink()
    text = f"2 of 36 files of metadata.csv are not there: {tmp_path}/train/dog_2.png"
    with pytest.raises(UserError, match=f"path={tmp_path}: {text}$"):
        of(tmp_path, tmp_path).check()


@pytest.mark.parametrize(("kind", "missing"), [(".csv", "-1"), (".csv", ""), (".parquet", -1), (".parquet", None)])
def test_a_training_image_without_a_label_is_refused_in_any_form(tmp_path, missing, kind):
    given = {
        "cat": missing,
        "dog": "dog" if isinstance(missing, str) else 3,
        "owl": "owl" if isinstance(missing, str) else 4,
    }
    rows(*THREE, labels=given).to_parquet(str(tmp_path / "train.parquet"))
    if kind == ".csv":
        (tmp_path / "train.parquet").unlink()
        write_listed(tmp_path, *(f"{name}_{number}.png" for name in THREE for number in range(6)))
        listed = (tmp_path / "metadata.csv").read_text()
        (tmp_path / "metadata.csv").write_text(listed.replace(",cat", f",{'' if missing is None else missing}"))
    with pytest.raises(UserError, match=r"label of train holds .* \(.*of training: (3, 4|dog, owl)\)") as error:
        of(tmp_path, tmp_path, val_share=0.2).dataset("train")
    assert "no label" in str(error.value)
