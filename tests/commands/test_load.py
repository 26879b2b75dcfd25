"""A trained model in Python and by ``lightning predict`` and ``embed``: the same numbers."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import SMALL
from tensors import write_images

from vit_lightning import Digits, UserError, load
from vit_lightning.cli import main
from vit_lightning.data.image_files import data_of_files, find_images
from vit_lightning.storage.checkpoint_files import read_checkpoint

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
    state = read_checkpoint(run / "checkpoints/best.ckpt")["state_dict"]
    assert all(torch.equal(value, state[f"network.{name}"]) for name, value in model.network.state_dict().items())
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


def test_files_are_gray_for_a_model_of_gray_images(trained, in_folder):
    images, model = Digits().dataset("test").images[:4, 0].numpy(), load(trained[0])
    files = [f"{mode}.png" for mode in ("L", "RGB", "RGBA", "LA")]
    for image, file in zip(images, files, strict=True):
        Image.fromarray(image).convert(file.partition(".")[0]).save(file)
    assert [one[1:] for one in model.predict(files)] == [one[1:] for one in model.predict([*images])]


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


@pytest.mark.parametrize(("split", "count"), [("train", 1294), ("val", 143), ("test", 360)])
def test_images_of_each_split_of_a_run_have_features(split, count, trained, in_folder):
    assert main(["embed", f"--ckpt={trained[0]}", f"--split={split}", "--out=a.npz"]) == 0
    with np.load("a.npz") as table:
        assert len(set(table["image"].tolist())) == len(table["label"]) == count
