"""A trained model in Python and by ``lightning predict`` and ``embed``: the same numbers, from images of every kind."""

import csv
import json
import random
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from runs import SMALL
from tensors import randomise, write_images
from torchvision import models

from vit_lightning import Digits, UserError, load
from vit_lightning.cli import main
from vit_lightning.commands import trained
from vit_lightning.data.image_files import data_of_files, find_images
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.weights.hubs import LIBRARIES

NAMES = ("dog, wet", "ä cat", "🦊")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on rectangular photographs of three classes, with averaged weights, and such photographs."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(NAMES):
        write_images(folder / "images/train" / name, 20, size=(30, 20), seed=number)
        write_images(folder / "images/test" / name, 3, size=(21, 33), seed=9 + number)
    flags = ["--data=ImageFolder", f"--data.root={folder / 'images'}", "--data.image_size=16"]
    flags += [
        "--optimizer.warmup_epochs=0",
        "--data.centre_share=0.75",
        "--data.mean=[0.4, 0.5, 0.6]",
        "--data.num_workers=0",
        "--ema.decay=0.9",
    ]
    assert main(["fit", *SMALL, *flags, "--optimizer.lr=0.01", "--data.batch_size=8", f"--out={folder / 'run'}"]) == 0
    return folder


def test_predictions_are_those_of_the_command_and_of_the_same_images_of_the_test(photos, in_folder, capsys):
    run, images = photos / "run", photos / "away/test"
    assert main(["predict", f"--ckpt={run}", "--out=split"]) == 0
    (photos / "images").rename(photos / "away")  # the data need not be there
    assert main(["predict", f"--ckpt={run}", str(images), "--out=out", "--top_k=3"]) == 0
    assert main(["predict", f"--ckpt={run}"]) == 2  # which is of the data
    assert "images is not a folder" in capsys.readouterr().err
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    model = load(run)
    files = sorted(images.rglob("*.jpg"))
    found = model.predict(images, top_k=3)
    assert [one.file for one in found] == list(map(str, files))
    assert len({tuple(one.probabilities) for one in found}) == 9
    split, rows = (
        csv.DictReader(Path(name, "predictions.csv").read_text(encoding="utf-8").splitlines())
        for name in ("split", "out")
    )
    for one, row, tested in zip(found, rows, split, strict=True):
        assert (tested["prediction"], tested["label"]) == (one.classes[0], Path(one.file).parent.name)
        assert float(tested["probability"]) == pytest.approx(one.probabilities[0], abs=2e-6)
        assert [row["file"], *(row[f"class_{n}"] for n in (1, 2, 3))] == [one.file, *one.classes]
        assert [float(row[f"probability_{n}"]) for n in (1, 2, 3)] == pytest.approx(one.probabilities, abs=2e-6)
    pictures = [Image.open(file).convert("RGB") for file in files]
    arrays = [np.asarray(picture) for picture in pictures]
    for same in (files, [*map(str, files)], arrays):
        assert [one[1:] for one in model.predict(same, top_k=3)] == [one[1:] for one in found]
    assert [one.file for one in model.predict([files[1], pictures[0], files[1]])] == [
        str(files[1]),
        "image 1",
        str(files[1]),
    ]
    assert not model.network.training
    assert before[0].equal(torch.get_rng_state())
    assert before[1] == random.getstate()
    assert sorted(path.name for path in in_folder.iterdir()) == ["out", "split"]
    averaged = read_checkpoint(run / "checkpoints/best.ckpt")
    state = averaged["state_dict"]
    assert all(torch.equal(value, state[f"network.{name}"]) for name, value in model.network.state_dict().items())
    assert any(not torch.equal(value, state[f"network.{name}"]) for name, value in averaged["ema"]["trained"].items())
    (photos / "away").rename(photos / "images")
    assert (model.class_names, model.centre_share, model.image_size) == ([*NAMES], 0.75, (16, 16))


def test_tokens_and_features_are_those_of_the_network(trained):
    model, data = load(trained[0]), Digits()
    pixels = data.dataset("test").images[:70]
    images = data.transform.normalise(pixels)
    network = model.network
    with torch.no_grad():
        embedded = network.patch_embedding(images)
        block = network.encoder[0](embedded)
        tokens = network.forward_features(images)
        features = network.head[:-1](tokens)
        logits = network(images)
    for given in (pixels, images):
        assert torch.allclose(model.forward_features(given), tokens, atol=1e-6)
        assert torch.allclose(model.embed(given), features, atol=1e-6)
        first, last = model.tokens(given, blocks=(0, -1))
        assert torch.equal(first, last)
        assert torch.allclose(first, block, atol=1e-6)
        found = model.predict(given, top_k=1)
        assert [one.classes for one in found] == [[str(label)] for label in logits.argmax(dim=1).tolist()]
    gray = [image[0].numpy() for image in pixels[:3]]
    assert torch.allclose(model.embed(gray), features[:3], atol=1e-6)
    assert torch.allclose(model.embed(np.stack(gray)[..., None]), features[:3], atol=1e-6)
    assert torch.allclose(model.embed([Image.fromarray(gray[0])]), features[:1], atol=1e-6)


def test_what_is_no_image_is_named(trained, in_folder):
    model = load(trained[0])
    Path("a.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more than this")
    write_images(Path("good"), 1)
    images = torch.zeros(1, 1, 8, 8)
    refused = {
        "a.jpg: damaged image": lambda: model.predict(["good", "a.jpg"]),
        r"takes tensors \(b, 1, 8, 8\), not \(b, 3x8x8\)": lambda: model.embed(torch.zeros(2, 3, 8, 8)),
        "images are torch.int64": lambda: model.embed(torch.zeros(2, 1, 8, 8, dtype=torch.int64)),
        "ndarray of float64 and shape": lambda: model.predict(np.zeros((8, 8))),
        r"shape \(8, 8, 5\) is no image: .* with c 1, 3 or 4": lambda: model.predict(np.zeros((8, 8, 5), np.uint8)),
        "there are no images": lambda: model.predict([]),
        r"blocks=\(1,\) must be .* the network has 1, 0 the first": lambda: model.tokens(images, blocks=(1,)),
        r"blocks=3 must be a list of numbers of blocks": lambda: model.attention(images, 3),
        r"int of no type and shape \(\) is no image": lambda: model.attention(3),
        r"classes=\[1, 2\] must be one for each of 1 image": lambda: model.relevance(images, [1, 2]),
        r"classes=0 must be one for each of 1 image": lambda: model.relevance(images, 0),
        "top_k=0 must be at least 1": lambda: model.predict("good", top_k=0),
    }
    for message, call in refused.items():
        with pytest.raises(UserError, match=message):
            call()


def test_features_of_files(photos, in_folder, capsys):
    run, images = str(photos / "run"), str(photos / "images/test")
    assert main(["embed", "--ckpt", run, images, "--out=b/a.npz", "--batch_size=4"]) == 0
    table, model = np.load("b/a.npz"), load(run)
    assert table["image"].tolist() == [str(file) for file in sorted(Path(images).rglob("*.jpg"))]
    assert table["features"] == pytest.approx(model.embed(images).numpy(), abs=1e-6)
    assert "features of 9 images, 16 numbers each: b/a.npz" in capsys.readouterr().out


def test_features_of_the_test_images_of_a_run(photos, in_folder, capsys):
    assert main(["embed", "--ckpt", str(photos / "run")]) == 0
    table = np.load(next((photos / "run/embed").glob("*/embeddings.npz")))
    assert table["label"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert np.array_equal(table["features"], load(photos / "run").embed(table["image"].tolist()).numpy())
    (in_folder / "bad.jpg").write_text("no image")
    flags = ["embed", "--ckpt", str(photos / "run"), "bad.jpg"]
    assert main([*flags, str(photos / "images/test/ä cat"), "--out=c.npz"]) == 2
    assert "lightning embed: bad.jpg: damaged image" in capsys.readouterr().err
    assert not Path("c.npz").exists()


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
    images = [str(file) for file in sorted(kinds.iterdir()) if file.name[0] in "12345678"]
    assert main(["predict", f"--ckpt={trained[0]}", *images, "--out=said"]) == 0
    said, split = read("said/predictions.csv"), read("split/predictions.csv")[:8]
    assert [Path(row["file"]).name[0] for row in said] == list("12345678")
    for one, other in zip(split, said, strict=True):
        assert "class_5" in other
        assert other["class_1"] == one["prediction"]
        assert float(other["probability_1"]) == pytest.approx(float(one["probability"]), abs=2e-6)
    assert main(["predict", f"--ckpt={trained[0]}", str(kinds), "--out=all"]) == 2
    assert re.search(r"lightning predict: .*9\.jpg: damaged image", capsys.readouterr().err)
    assert not Path("all").exists()


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
    with pytest.raises(UserError, match=r"no image files can be given \(without any, those of predict_dataloader"):
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
    trainer = SimpleNamespace(predict=lambda *arguments, **others: [torch.ones(2, 3)], callbacks=[])
    monkeypatch.setattr(trained, "load_trained", lambda experiment: (LightningModule(), None, []))
    monkeypatch.setattr(trained, "make_trainer", lambda *arguments: trainer)
    experiment = SimpleNamespace(make_trainer_arguments=dict, data=None)
    with pytest.raises(UserError, match=r"predict_step of LightningModule returns Tensor \(leave it out"):
        trained._run_network(experiment, Path(), {})


@pytest.mark.parametrize(("split", "count"), [("train", 1294), ("val", 143), ("test", 360)])
def test_images_of_each_split_of_a_run_have_features(split, count, trained, in_folder):
    assert main(["embed", f"--ckpt={trained[0]}", f"--split={split}", "--out=a.npz"]) == 0
    with np.load("a.npz") as table:
        assert len(set(table["image"].tolist())) == len(table["label"]) == count
