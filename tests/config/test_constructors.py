"""Networks made by functions of timm and torchvision, with their own arguments and the weights that they name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from tensors import write_images
from torchvision import models

from vit_lightning import UserError
from vit_lightning.commands.fit import fit
from vit_lightning.commands.trained import evaluate
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint

timm = pytest.importorskip("timm")

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
    assert problems(*TINY, "--model.drop_rat=0.1", "--model.foo=1")[0].startswith(
        "model.drop_rat=0.1: VisionTransformer takes no such argument (did you mean model.drop_rate?)"
    )
    assert len(problems(*TINY, "--model.drop_rat=0.1", "--model.foo=1")) == 2
    assert problems(TINY[0], "--model.model_name=vit_tiny_patch16_22") == [
        "model.model_name=vit_tiny_patch16_22: timm has no such model (did you mean vit_tiny_patch16_224?)"
    ]
    assert problems(TINY[0]) == ["model.model_name is missing (an argument of timm.create_model)"]
    assert problems(*TINY, "--model.num_classes=7")[0].startswith("model.num_classes=7 does not fit the data")
    assert problems(*TINY, "--model.checkpoint_path=a.pth") == ["model.checkpoint_path=a.pth: give it as init_from"]
    assert problems(TINY[0], "--model.model_name=vit_base_patch16_gap_224", "--model.pretrained=true") == [
        "model.pretrained=true: timm has no weights of vit_base_patch16_gap_224"
    ]


def from_file(path):
    return "--model.pretrained_cfg_overlay=" + json.dumps({"file": str(path)})


def test_weights_of_timm_are_read_once_and_as_data(images, capsys):
    given = {"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8, "img_size": 32}
    torch.save(timm.create_model("vit_tiny_patch16_224", **given).state_dict(), "weights.pth")
    flags = [*images, *TINY, "--model.pretrained=true", from_file("weights.pth")]
    both = "init_from=weights.pth beside model.pretrained=true: give one of the two"
    assert problems(*flags, "--init_from=weights.pth") == [both]
    fit(resolve([*flags, "--out=run", "--optimizer.lr=0", "--trainer.max_steps=1", "--test=false"]))
    assert "pretrained=true, new head (1000 -> 3 classes)" in capsys.readouterr().out
    state, trained = torch.load("weights.pth"), read_checkpoint(Path("run/checkpoints/last.ckpt"))["state_dict"]
    assert torch.equal(trained["network.blocks.0.mlp.fc1.weight"], state["blocks.0.mlp.fc1.weight"])
    assert trained["network.head.weight"].shape == (3, 32)
    assert trained["network.pos_embed"].shape == (1, 5, 32)  # 4x4 patches of 32 pixels became 2x2 of 16
    Path("weights.pth").unlink()
    evaluate(resolve(["--ckpt=run"], "test"), "test")  # its checkpoint has them

    class Runs:
        def __reduce__(self):
            return Path.touch, (Path("marker"),)

    Path("weights.pth").write_bytes(pickle.dumps({"head.weight": Runs()}))
    with pytest.raises(UserError, match=r"model\.pretrained=true: the weights cannot be had"):
        fit(resolve([*flags, "--out=other"]))
    assert not Path("marker").exists()
    assert not Path("other").exists()


def test_weights_of_torchvision_take_other_classes_and_image_sizes(images, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(Path("home").absolute()))
    folder = Path("home/hub/checkpoints")
    folder.mkdir(parents=True)
    weights = models.MobileNet_V3_Small_Weights.IMAGENET1K_V1
    named = ["--model=torchvision.models.mobilenet_v3_small", "--model.weights=IMAGENET1K_V1"]
    config = resolve([*images, *named]).config
    assert config["model"]["init_args"]["weights"] == "IMAGENET1K_V1"
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(UserError, match=r"cannot be had: .*in its cache as .*home/hub/checkpoints/mobilenet_v3_small-"):
        network_in_file(config, tell=print)
    torch.manual_seed(1)
    state = models.mobilenet_v3_small().state_dict()
    torch.save(state, folder / weights.url.rpartition("/")[2])
    torch.manual_seed(3)
    plain, after = network_in_file(config), torch.rand(1)
    loaded = []
    torch.manual_seed(3)
    network = network_in_file(config, tell=loaded.append)
    assert torch.rand(1) == after  # as without it
    assert loaded == ["torchvision.models.mobilenet_v3_small with weights=IMAGENET1K_V1, new head (1000 -> 3 classes)"]
    assert torch.equal(network.features[0][0].weight, state["features.0.0.weight"])
    assert torch.equal(network.classifier[3].weight, plain.classifier[3].weight)
    assert problems(*images, *named[:1], "--model.weights=V9")[0].startswith("model.weights=V9 must be one of")


def offline(*_, **__):
    raise OSError("no network")


@pytest.mark.full
def test_position_embeddings_of_torchvision_are_interpolated(images, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(Path("home").absolute()))
    folder = Path("home/hub/checkpoints")
    folder.mkdir(parents=True)
    state = models.vit_b_16().state_dict()
    torch.save(state, folder / models.ViT_B_16_Weights.IMAGENET1K_V1.url.rpartition("/")[2])
    config = resolve(
        [*images, "--data.image_size=48", "--model=torchvision.models.vit_b_16", "--model.weights=DEFAULT"]
    )
    loaded = []
    network = network_in_file(config.config, tell=loaded.append)
    assert "positions 14x14 -> 3x3 bicubic, new head (1000 -> 3 classes)" in loaded[0]
    expected = models.vision_transformer.interpolate_embeddings(48, 16, state)["encoder.pos_embedding"]
    assert torch.equal(network.encoder.pos_embedding, expected)
