"""Networks made by functions of timm and torchvision, with their own arguments."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tensors import write_images

from vit_lightning import UserError
from vit_lightning.commands.fit import fit
from vit_lightning.commands.trained import evaluate
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint

SMALL = ["--model.embed_dim=32", "--model.depth=1", "--model.num_heads=2", "--model.patch_size=8"]
TINY = ["--model=timm.create_model", "--model.model_name=vit_tiny_patch16_224", *SMALL]


@pytest.fixture
def images(in_folder):
    for number, name in enumerate("abc"):
        write_images(Path("images/train") / name, 10, size=(16, 16), seed=number)
    flags = ["--data=ImageFolder", "--data.root=images", "--data.image_size=16", "--data.num_workers=0"]
    return [*flags, "--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def problems(*flags):
    with pytest.raises(UserError) as caught:
        resolve(flags)
    return caught.value.problems


def test_a_model_of_timm_trains_and_is_tested_and_its_config_repeats_it(images):
    experiment = resolve([*images, *TINY, "--model.drop_rate=0.1", "--out=run"])
    results = fit(experiment)
    written = yaml.safe_load(Path("run/config.yaml").read_text())["model"]
    assert written["class_path"] == "timm.create_model"
    given = {"model_name": "vit_tiny_patch16_224", "num_classes": 3, "in_chans": 3, "img_size": 16, "drop_rate": 0.1}
    assert given.items() <= written["init_args"].items()
    assert evaluate(resolve(["--ckpt=run"], "test"), "test")["test/loss"] == pytest.approx(results["test/loss"])
    again = resolve(["--config=run/config.yaml"])
    assert again.config["model"] == experiment.config["model"]
    state = read_checkpoint(Path("run/checkpoints/last.ckpt"))["state_dict"]
    assert state["network.pos_embed"].shape == (1, 5, 32)


def test_a_method_of_a_class_makes_a_network(in_folder):
    text = "from torch import nn\nclass Line(nn.Linear):\n    @classmethod\n    def of_pixels(cls, count: int):\n"
    Path("by_method.py").write_text(f"{text}        return nn.Sequential(nn.Flatten(), cls(count, 10))\n")
    experiment = resolve(["--config=digits", "--model=by_method.Line.of_pixels", "--model.count=64"])
    assert experiment.config["model"] == {"class_path": "by_method.Line.of_pixels", "init_args": {"count": 64}}
    assert type(experiment.make_network()[1]).__name__ == "Line"


def test_a_function_that_stands_where_a_word_may_is_a_default():
    encoder = "--model.encoder_layer={class_path: torch.nn.TransformerEncoderLayer, d_model: 8, nhead: 2}"
    found = problems("--model=torch.nn.TransformerEncoder", encoder, "--model.num_layers=2")
    assert [text for text in found if "relu" in text] == []


def test_a_function_of_timm_gets_gray_images_and_only_what_it_takes(images):
    digits = resolve(["--model=timm.models.vit_tiny_patch16_224", *SMALL[:-1], "--model.patch_size=4"])
    assert digits.config["model"]["init_args"]["in_chans"] == 1
    with torch.device("meta"):
        assert digits.make_network()(torch.empty(2, 1, 8, 8)).shape == (2, 10)
        assert (
            resolve([*images, "--data.image_size=32", "--model=timm.models.convnext_atto"]).make_network().num_classes
            == 3
        )
        flag = "--model=timm.models.VisionTransformer"  # the class itself
        assert resolve([*images, flag, *SMALL]).make_network().patch_embed.img_size == (16, 16)


def test_unknown_arguments_and_names_are_all_told_before_a_run():
    assert len(problems(*TINY, "--model.drop_rat=0.1", "--model.foo=1")) == 2
    assert problems(TINY[0]) == ["model.model_name is missing (an argument of timm.create_model)"]
    assert problems(*TINY, "--model.num_classes=7")[0].startswith("model.num_classes=7 does not fit the data")
    assert problems(*TINY, "--model.checkpoint_path=a.pth") == ["model.checkpoint_path=a.pth: give it as init_from"]


@pytest.mark.parametrize(
    ("model", "option", "source"),
    [
        ({"class_path": "timm.create_model", "model_name": "vit_tiny_patch16_224"}, {"pretrained": True}, "timm"),
        ({"class_path": "torchvision.models.resnet18"}, {"weights": "IMAGENET1K_V1"}, "torchvision"),
    ],
)
def test_weights_that_a_model_names_are_given_as_init_from(model, option, source, monkeypatch):
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", None)  # nothing is fetched, nor by a file of weights
    name = model.get("model_name", model["class_path"].rpartition(".")[2])
    message = f"model.{next(iter(option))}=.*: give init_from={source}:{name} instead"
    with pytest.raises(UserError, match=message):
        resolve(["--model=" + json.dumps(model | option)])
    with pytest.raises(UserError, match=message):
        network_in_file({"model": model | option})
