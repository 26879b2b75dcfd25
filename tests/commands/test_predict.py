import csv
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from tensors import randomise, write_images
from torchvision import models

from vit_lightning import Digits, UserError, load
from vit_lightning.cli import main
from vit_lightning.commands import trained
from vit_lightning.data.image_files import data_of_files, find_images
from vit_lightning.weights.hubs import LIBRARIES


def read(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A folder with images of digits of many kinds, of which the ninth is damaged and another one hidden."""
    folder = tmp_path_factory.mktemp("kinds")
    images = Digits().dataset("test").images[:9, 0].numpy()
    modes = {"1.png": "L", "2.png": "RGB", "3.png": "RGBA", "4.gif": "P", "5.tiff": "L", "6.bmp": "L", "7.webp": "RGB"}
    for (name, mode), image in zip(modes.items(), images, strict=False):
        lossless = {"lossless": True} if name.endswith("webp") else {}
        Image.fromarray(image).convert(mode).save(folder / name, **lossless)
    Image.fromarray(images[7].astype(np.uint16) * 257).save(folder / "8.png")
    (folder / "9.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more than this")
    (folder / ".10.png").write_bytes(b"hidden")
    return folder


def test_any_kind_of_image_is_read_and_a_damaged_one_is_named(trained, kinds, in_folder, capsys):
    assert main(["predict", f"--ckpt={trained[0]}", "--out=split"]) == 0
    assert main(["predict", f"--ckpt={trained[0]}", str(kinds), "--out=said"]) == 2
    said, split = read("said/predictions.csv"), read("split/predictions.csv")[:8]
    assert [Path(row["file"]).name[0] for row in said] == list("12345678")
    for one, other in zip(split, said, strict=True):
        assert "class_5" in other
        assert other["class_1"] == one["prediction"]
        assert float(other["probability_1"]) == pytest.approx(float(one["probability"]), abs=2e-6)
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "lightning predict: 1 of 9 images have no prediction; the predictions of the others are written"
    assert "9.jpg: damaged image" in error[1]
    assert main(["predict", f"--ckpt={trained[0]}", str(kinds / "9.jpg"), "--out=all"]) == 2
    assert "1 of 1 images have no prediction" in capsys.readouterr().err


def test_models_of_others_say_what_load_says(in_folder, monkeypatch, capsys):
    """A file of weights, a folder, and models of libraries, without the weights that these would fetch."""
    warnings.simplefilter("ignore", UserWarning)
    write_images(Path("images"), 3, size=(40, 50))
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}
    torch.save(randomise(timm.models.VisionTransformer(**sizes), scale=0.1).state_dict(), "a.pth")
    timm_s = {"vit_tiny_patch16_224": randomise(timm.create_model("vit_tiny_patch16_224"), scale=0.1)}
    cards = {name: {"architecture": name, "pretrained_cfg": dict(timm_s[name].pretrained_cfg)} for name in timm_s}
    monkeypatch.setitem(LIBRARIES, "timm", lambda name: (timm_s[name], cards[name]))
    get = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, weights: randomise(get(name), scale=0.1))
    facts = {"num_heads": 2, "mean": [0.4, 0.5, 0.6], "std": [0.25, 0.25, 0.25], "class_names": ["cat", "dog", "fox"]}
    names = ("exported", "timm:vit_tiny_patch16_224", "torchvision:squeezenet1_1")
    given = {"a.pth": facts, **{name: {} for name in names}}
    assert main(["export", "--ckpt=a.pth", "--out=exported", f"--config={json.dumps(facts)}"]) == 0
    for number, (place, config) in enumerate(given.items()):
        flags = [f"--config={json.dumps(config)}"] if config else []
        assert main(["predict", "--ckpt", place, "images", *flags, "--top_k=3", f"--out={number}"]) == 0, place
        expected = load(place, config=config).predict("images")
        for row, one in zip(read(f"{number}/predictions.csv"), expected, strict=True):
            assert [row["file"], *(row[f"class_{n}"] for n in (1, 2, 3))] == [one.file, *one.classes[:3]], place
            assert float(row["probability_1"]) == pytest.approx(one.probabilities[0], abs=1e-5)
    said = capsys.readouterr().out
    assert "warning     tensors do not tell all" in said
    assert "64 channels for each were assumed" not in said, "they are given"
    Path("no.safetensors").write_bytes(b"x")
    for place in ("timm:vit_tiny_patch16_224", "a.pth", "exported"):
        flags = [f"--config={json.dumps(facts)}"] if place == "a.pth" else []
        assert main(["predict", "--ckpt", place, *flags]) == 2
        way_out = f"give --config with data (lightning predict --ckpt {place} IMAGES takes it"
        assert f"ckpt={place} is no run, whose images are known: {way_out}" in capsys.readouterr().err
    for place in ("no.safetensors", "images"):
        assert main(["predict", "--ckpt", place]) == 2
        assert "is no run" not in capsys.readouterr().err


def test_what_a_checkpoint_says_of_its_images_names_no_class():
    checkpoint = {"test_view": {**Digits().test_view(), "class_path": "torch.nn.Linear"}}
    assert data_of_files("run", checkpoint)["class_path"] == "vit_lightning.ImageFiles"


def test_weights_of_others_whose_images_nothing_describes_name_the_way_out():
    """timm#976: of one channel."""
    with pytest.raises(UserError, match=r"can be given \(--config='{mean: \.\.\., std: \.\.\.}' gives it"):
        data_of_files("a.pth", {"test_view": {"centre_share": 1.0, "class_names": ["a", "b"]}})
    with pytest.raises(UserError, match=r"no image files can be given$"):
        data_of_files("run", {"test_view": {"class_names": ["a", "b"]}})


def test_named_files_come_once_in_their_order(tmp_path):
    write_images(tmp_path / "x" / "y", 2)
    (tmp_path / "x" / "note.txt").write_text("no image")
    files = [tmp_path / "x" / "y" / f"{number:03}.jpg" for number in range(2)]
    assert find_images([files[1], tmp_path / "x", tmp_path / "x" / "note.txt"]) == [
        files[1],
        files[0],
        tmp_path / "x" / "note.txt",
    ]
    with pytest.raises(UserError, match="no such file"):
        find_images([tmp_path / "z"])


def test_a_predict_step_that_gives_no_probabilities_is_refused(monkeypatch):
    """PL#7144."""
    trainer = SimpleNamespace(predict=lambda *arguments, **others: [torch.ones(2, 3)])
    monkeypatch.setattr(trained, "load_trained", lambda experiment: (LightningModule(), None, []))
    monkeypatch.setattr(trained, "make_trainer", lambda *arguments: trainer)
    experiment = SimpleNamespace(make_trainer_arguments=dict, data=None)
    with pytest.raises(UserError, match=r"predict_step of LightningModule returns Tensor \(leave it out"):
        trained._run_network(experiment, Path(), {})
