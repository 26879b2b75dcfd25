"""Mistakes, given to the command: each is answered in a few lines before any work starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import lightning.pytorch  # noqa: F401  # else a command says that it loads it
import pytest
import torch
from processes import installed_program
from runs import REPOSITORY
from tensors import write_images

from vit_lightning.cli import main

DIGITS = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"
FOLDER = ["--data=ImageFolder", "--data.image_size=8", "--model.patch_size=4", "--data.num_workers=0"]

# name: (arguments, what the answer must hold); PAGE names the file written from PAGES
CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key of the model": ([DIGITS, "--model.dept=3"], ["model.dept=3", "did you mean model.depth?"]),
    "unknown key of the trainer": ([DIGITS, "--trainer.max_epoch=3"], ["trainer.max_epoch=3", "trainer.max_epochs"]),
    "unknown key of a block": ([DIGITS, "--model.attention.qkvbias=true"], ["model.attention.qkvbias", "qkv_bias"]),
    "unknown key at the top": ([DIGITS, "--sede_everything=3"], ["sede_everything=3", "seed_everything"]),
    "unknown key in a page": (["--config=unknown.yaml"], ["model.dpth=3", "model.depth"]),
    "class word for a number": ([DIGITS, "--model.depth=big"], ["model.depth=big", "an int"]),
    "unknown pooling": ([DIGITS, "--model.pool=max"], ["model.pool=max", "cls, mean"]),
    "duplicate key": (["--config=twice.yaml"], ["twice.yaml", "depth comes twice", "line 4"]),
    "missing page": (["--config=nowhere.yaml"], ["config=nowhere.yaml", "No such file"]),
    "broken page": (["--config=broken.yaml"], ["config=broken.yaml", "not valid YAML"]),
    "class that is not there": ([DIGITS, "--data=ImagesFolder"], ["data.class_path=ImagesFolder", "ImageFolder"]),
    "callback that is not there": (["--config=callback.yaml"], ["trainer.callbacks", "EarlyStoping"]),
    "missing data folder": ([*FOLDER, "--data.root=nowhere"], ["data.root=nowhere", "not a folder"]),
    "no data folder given": (FOLDER, ["data.root is missing"]),
    "folder without classes": ([*FOLDER, "--data.root=flat"], ["data.root=flat", "two folders, one for each class"]),
    "empty class folder": ([*FOLDER, "--data.root=hollow"], ["hollow/train/b", "no images"]),
    "class that training lacks": ([*FOLDER, "--data.root=extra"], ["extra/val/z", "not in training"]),
    "damaged image": (
        [*FOLDER, "--data.root=damaged", "--trainer.max_epochs=1"],
        ["damaged/train/b/", "damaged image"],
    ),
    "patch does not divide": ([DIGITS, "--model.patch_size=3"], ["model.patch_size=3", "image_size=8", "1, 2, 4, 8"]),
    "patch larger than the image": (
        [DIGITS, "--model.patch_size=16"],
        ["model.patch_size=16", "larger", "image_size=8"],
    ),
    "heads do not divide": ([DIGITS, "--model.num_heads=5"], ["model.num_heads=5", "emb_size=64", "1, 2, 4, 8"]),
    "cls without class token": (
        [DIGITS, "--model.class_token=false", "--model.pool=cls"],
        ["model.pool=cls", "class_token=true"],
    ),
    "depth zero": ([DIGITS, "--model.depth=0"], ["model.depth=0", "at least 1"]),
    "batch of none": ([DIGITS, "--data.batch_size=0"], ["data.batch_size=0", "at least 1"]),
    "no epochs": ([DIGITS, "--trainer.max_epochs=0"], ["trainer.max_epochs=0", "at least 1"]),
    "dropout in a block": ([DIGITS, "--model.attention.dropout=1.5"], ["model.attention.dropout=1.5", "below 1"]),
    "negative rate": ([DIGITS, "--optimizer.lr=-1"], ["optimizer.lr=-1.0", "at least 0"]),
    "rate that is no number": ([DIGITS, "--optimizer.lr=nan"], ["optimizer.lr=nan", "finite"]),
    "negative seed": ([DIGITS, "--seed_everything=-1"], ["seed_everything=-1", "at least 0"]),
    "negative shift": (["--config=shift.yaml"], ["RandomCrop.padding=-1", "at least 0"]),
    "classes that the data lacks": ([DIGITS, "--model.num_classes=7"], ["model.num_classes=7", "10"]),
    "checkpoint metric that nobody logs": (
        [DIGITS, "--checkpoint.monitor=val/auc"],
        ["checkpoint.monitor=val/auc", "val/acc"],
    ),
    "callback's metric that nobody logs": (["--config=monitor.yaml"], ["EarlyStopping.monitor=val/los", "val/loss"]),
    "first weights that are not there": ([DIGITS, "--init_from=nowhere"], ["init_from=nowhere", "neither"]),
    "first weights of another model": ([DIGITS, "--init_from=other.ckpt"], ["other.ckpt", "another architecture"]),
    "first weights that are damaged": ([DIGITS, "--init_from=damaged.ckpt"], ["damaged.ckpt", "cannot be read"]),
    "accelerator that is not there": ([DIGITS, "--trainer.accelerator=tpu"], ["trainer", "tpu"]),
    "folder in use": ([DIGITS, "--out=flat"], ["out=flat", "not empty"]),
    "word that is no key": ([DIGITS, "model.depth=3"], ["model.depth=3", "--key=value"]),
    "several at once": (
        [
            DIGITS,
            "--model.dept=3",
            "--optimizer.lr=fast",
            "--data.batch_size=0",
            "--model.patch_size=3",
            "--seed_everything=-1",
        ],
        ["model.dept=3", "optimizer.lr=fast", "data.batch_size=0", "model.patch_size=3", "seed_everything=-1"],
    ),
    "test without a model": (["COMMAND test"], ["ckpt is missing"]),
    "test of a damaged checkpoint": (["COMMAND test", "--ckpt=damaged.ckpt"], ["damaged.ckpt", "cannot be read"]),
    "test with another model": (["COMMAND test", "--ckpt=other.ckpt", DIGITS], ["other.ckpt", "another architecture"]),
    "unknown command": (["COMMAND trian"], ["trian", "fit"]),
}

PAGES = {
    "unknown.yaml": "model: {patch_size: 4, dpth: 3}\n",
    "twice.yaml": "model:\n  patch_size: 4\n  depth: 3\n  depth: 4\n",
    "broken.yaml": "model: [1, 2\noptimizer: {\n",
    "empty.yaml": "# nothing\n",
    "callback.yaml": "model: {patch_size: 4}\ntrainer:\n"
    "  callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStoping}]\n",
    "monitor.yaml": "model: {patch_size: 4}\ntrainer:\n  callbacks:\n"
    "  - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/los}}\n",
    "shift.yaml": "model: {patch_size: 4}\ndata: {augment: [{class_path: RandomCrop, init_args: {padding: -1}}]}\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with everything that the cases name."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in PAGES.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(128, 256)))
    write_images(folder / "flat", 3)
    for root in ("hollow", "extra", "damaged"):
        for name in ("a", "b"):
            write_images(folder / root / "train" / name, 20)
    for image in (folder / "hollow" / "train" / "b").iterdir():
        image.unlink()
    for name in ("a", "b", "z"):
        write_images(folder / "extra" / "val" / name, 2)
    for image in (folder / "damaged" / "train" / "b").iterdir():
        image.write_bytes(image.read_bytes()[:300])
    torch.save({"state_dict": {"network.head.linear.weight": torch.zeros(10, 3)}}, folder / "other.ckpt")
    (folder / "damaged.ckpt").write_bytes((folder / "other.ckpt").read_bytes()[:500])
    return folder


INSTALLED = ("unknown command",)
"""Cases that are given to the installed command, the others to the same command in this process."""


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_in_a_few_lines(place, name, monkeypatch, capfd):
    monkeypatch.chdir(place)
    arguments = CASES[name][0]
    command, rest = (
        (arguments[0].split()[1], arguments[1:]) if arguments[0].startswith("COMMAND") else ("fit", arguments)
    )
    out = [] if any(word.startswith("--out") for word in rest) or command == "trian" else [f"--out=out {name}"]
    words = [command, *rest, *out]
    code = subprocess.run([installed_program(), *words], timeout=240).returncode if name in INSTALLED else main(words)
    out, err = capfd.readouterr()
    assert code == 2, err
    assert 1 <= len(err.strip().splitlines()) <= 15, err
    assert "Traceback" not in err
    for part in CASES[name][1]:
        assert part in err
    if name != "damaged image":  # which only shows when it is read
        assert out == ""
        assert not (place / f"out {name}").exists()
