"""``lightning inspect``: figures and a page of a trained model; the same maps in Python."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from runs import SMALL
from tensors import write_images

from vit_lightning import Digits, load
from vit_lightning.cli import main
from vit_lightning.inspect.maps import attention, relevance
from vit_lightning.inspect.survey import survey


def page_of(folder):
    text = (folder / "inspect.html").read_text()
    assert not re.search(r"(src|href)=.?(?!data:)|https?://|url\(", text.replace('src="data:', ""))
    return json.loads(re.search(r"^const model = (.*);$", text, re.MULTILINE)[1]), text


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))


def test_the_page_has_the_maps_of_the_model(trained, in_folder, capsys):
    assert main(["inspect", f"--ckpt={trained[0]}", "--count=3", "--out=out"]) == 0
    assert "3 images" in capsys.readouterr().out
    model, text = page_of(Path("out"))
    assert (model["layers"], model["heads"], model["grid"]) == (["1"], ["1", "2", "mean"], [2, 2])
    data = Digits()
    pixels = data.dataset("test").images
    pixels = pixels[torch.arange(3) * len(pixels) // 3]
    network = load(trained[0]).network
    found = survey(network, data.transform.normalise(pixels))
    for number, image in enumerate(model["images"]):
        np.testing.assert_allclose(np.asarray(opened(image["picture"]))[..., 0], pixels[number, 0], atol=1)
        maps = opened(image["views"]["attention"])
        assert maps.size == (6, 2)
        of_head = found.attention[number, 0, 1]
        np.testing.assert_allclose(np.asarray(maps)[:, 2:4].ravel(), 255 * of_head / of_head.max(), atol=0.6)
        names = {"attention", "rollout", "relevance", "token norm", "outliers", "token components"}
        assert set(image["views"]) == names
        marked = np.asarray(opened(image["views"]["outliers"])).any()
        assert image["outliers"][0].startswith("none") != marked
        least, most = found.relevance[number].aminmax()
        assert image["relevance"] == f"{float(least):.3g} (black) to {float(most):.3g}"
        assert re.fullmatch(r"test image \d+, of class \d: predicted( \d \(\d+ %\),?){3}", image["title"])
    names = {path.name for path in Path("out").iterdir()}
    assert {"attention_01.png", "attention_03.png", "attention_distance.png", "tokens.png"} <= names
    assert "<script>" in text
    accuracy = json.loads((trained[0] / "results.json").read_text())["test/acc"]
    assert model["known"].startswith(f"ViT, test accuracy {100 * accuracy:.2f} %, validation accuracy")
    assert model["reader"] == "the class token"
    assert model["known"] in text.split("</title>")[0]


def test_images_of_one_s_own_at_another_size(trained, in_folder):
    flags = ["--model.class_token=false", "--model.pool=mean", "--model.depth=2"]
    assert main(["fit", *SMALL, *flags, "--out=mean$^$"]) == 0
    write_images(Path("photos"), 2)
    assert main(["inspect", "photos", "--ckpt=mean$^$", "--image-size=16", "--out=out"]) == 0
    model, _ = page_of(Path("out"))
    assert (model["name"], model["layers"]) == ("mean$^$", ["1", "2"])
    assert {"attention_01.png", "attention_02.png", "tokens.png"} <= {path.name for path in Path("out").iterdir()}
    assert [opened(image["picture"]).size for image in model["images"]] == [(16, 16)] * 2
    assert [image["title"].split(":")[0] for image in model["images"]] == ["000.jpg", "001.jpg"]


def test_maps_in_python_are_those_of_the_network(trained):
    model, data = load(trained[0]), Digits()
    pixels = data.dataset("test").images[:11]
    images = data.transform.normalise(pixels)
    maps = model.attention(pixels, batch_size=4)
    assert maps.shape == (11, 1, 2, 5, 5)
    torch.testing.assert_close(maps, attention(model.network, images), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.attention(pixels, blocks=[-1]), maps)
    found = model.relevance(pixels, classes=[3] * 11)
    assert found.shape == (11, 2, 2)
    expected = relevance(model.network, images, torch.full((11,), 3))[:, 1:].reshape(11, 2, 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert not torch.equal(model.relevance(pixels), found)
