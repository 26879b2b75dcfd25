"""``lightning convert``: weights of one implementation as those of another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from references import fresh
from safetensors.torch import load_file

from vit_lightning.cli import main
from vit_lightning.config.networks import network_in_file
from vit_lightning.weights import from_reference
from vit_lightning.weights.convert import WRITTEN
from vit_lightning.weights.files import FORMATS, write_tensors
from vit_lightning.weights.sources import open_source

SUFFIXES = list(FORMATS)


def written(family, path, **more):
    """Writes a model of a family to a file, and returns it with its tensors."""
    vit, state, config = fresh(family, **more)
    write_tensors(state, path)
    path.with_suffix(".json").write_text(json.dumps({"family": family, "config": config}))
    return vit, state


def read(path):
    if path.suffix == ".npz":
        return {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


@pytest.mark.parametrize(("number", "family"), list(enumerate(WRITTEN)))
def test_a_file_of_a_family_is_written_again_bit_for_bit(number, family, in_folder, capsys):
    first, last = (Path(f"{name}{SUFFIXES[(number + shift) % 3]}") for shift, name in enumerate("ab"))
    _, state = written(family, first)
    assert main(["convert", str(first), str(last), f"--to={family}"]) == 0
    assert "same logits within 0 " in capsys.readouterr().out
    again = read(last)
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert {path.name for path in Path().iterdir()} == {
        p.name for f in (first, last) for p in (f, f.with_suffix(".json"))
    }


def test_the_arguments_beside_the_weights_make_the_other_library_s_model(in_folder):
    """Trained with dropouts that torchvision has not, which matter in training alone."""
    from torchvision.models.vision_transformer import VisionTransformer

    vit, _ = written("timm", Path("model.pth"), drop_path_rate=0.1, drop_rate=0.2)
    assert main(["convert", "model.pth", "folder/other.pth", "--to=torchvision"]) == 0
    network = VisionTransformer(**json.loads(Path("folder/other.json").read_text())["config"]).eval()
    network.load_state_dict(torch.load("folder/other.pth", weights_only=True), strict=True)
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(network(images), vit(images), rtol=0, atol=1e-5)
    # a name that a folder of save_pretrained has too
    assert main(["convert", "model.pth", "folder/model.safetensors", "--to=timm"]) == 0


def test_a_run_becomes_a_folder_of_transformers(results, in_folder):
    transformers = pytest.importorskip("transformers")
    assert main(["convert", "out", "theirs", "--to=hf"]) == 0
    assert main(["export", "--ckpt=out", "--out=ours", "--to=hf"]) == 0
    files = {folder: {path.name: path.read_bytes() for path in Path(folder).iterdir()} for folder in ("theirs", "ours")}
    files["theirs"]["README.md"] = files["theirs"]["README.md"].replace(b"theirs", b"ours")  # its name
    assert files["theirs"] == files["ours"]
    network = transformers.AutoModelForImageClassification.from_pretrained("theirs")
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(
        network(images).logits, open_source("out", make_network=network_in_file).network(images), rtol=0, atol=1e-5
    )
    assert from_reference(load_file("theirs/model.safetensors"), family="hf", config=network.config.to_diff_dict())


def test_what_a_family_cannot_express_is_named_and_nothing_is_written(in_folder, capsys):
    written("timm", Path("model.npz"), reg_tokens=2, qk_norm=True)
    assert main(["convert", "model.npz", "other.npz", "--to=torchvision"]) == 2
    text = capsys.readouterr().err
    assert "register_tokens=2: torchvision cannot express it" in text
    assert "qk_norm=layernorm_1e-06: torchvision cannot express it" in text
    assert "all of it is in timm (lightning convert --to=timm)" in text
    assert main(["convert", "model.npz", "other.onnx", "--to=timn"]) == 2
    text = capsys.readouterr().err
    assert "to=timn must be one of timm" in text
    assert "other.onnx must end with .safetensors, .pth, .npz" in text
    assert main(["convert", "model.npz", "model.npz/other.npz", "--to=timm"]) == 2
    assert "DST model.npz/other.npz cannot be made" in capsys.readouterr().err
    assert main(["convert", "model.npz", "model.npz", "--to=timm"]) == 2
    assert "model.npz is there already" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"model.npz", "model.json"}
