"""The configs of ImageNet: parameters of their papers, and a few steps on generated photographs."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageFilter
from runs import REPOSITORY

from vit_lightning.cli import main
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve

CONFIGS = {path.stem: path for path in (REPOSITORY / "experiments" / "imagenet").glob("*.yaml")}
CIFAR = {
    re.sub(r"#.*\n", "", path.read_text()).replace("CIFAR100", "CIFAR10"): path
    for path in sorted((REPOSITORY / "experiments").glob("cifar*.yaml"))
    if "lightning.CIFAR" in path.read_text() and "resnet" not in path.stem
}
"""Configs by what they say: most of CIFAR-100 are those of CIFAR-10."""

# S/16; SimpleViT has no 197 learned positions and class token, but a hidden layer of 384 x 384 + 384 in its head; DeiT
# III's class token has no position, with two factors of 384 in each of 12 blocks; CRATE-T of the repository has 6.09M
PARAMETERS = {
    "vit_augreg": 22_050_664,
    "simplevit": 22_050_664 - 197 * 384 - 384 + 384 * 384 + 384,
    "deit": 22_050_664,
    "deit3": 22_050_664 - 384 + 12 * 2 * 384,
    "crate_tiny": 6_090_856,
    "mae": 86_567_656 - 197 * 768,  # ViT-B/16 with a table of sines and cosines in place of learned positions
    "vit5": 22_039_144,  # that of its vit5_small
}


def photograph(draw: np.random.Generator, hue: int) -> Image.Image:
    """Smooth shapes, as large as photographs on the web are."""
    small = draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    small[..., hue % 3] //= 2
    return Image.fromarray(small).resize((400, 300), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(0)
    for hue, name in enumerate(("n01440764", "n01443537", "n01484850")):
        for split, count in (("train", 8), ("val", 3), ("test", 3)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                photograph(draw, hue).save(root / split / name / f"{number}.JPEG")
    return root


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_has_the_parameters_of_its_paper(name, photographs):
    """All values of the configs are frozen, see ``test_frozen.py``."""
    model = resolve([f"--config={CONFIGS[name]}", f"--data.root={photographs}"]).config["model"]
    with torch.device("meta"):
        network = network_in_file({"model": {**model, "init_args": {**model["init_args"], "num_classes": 1000}}})
    assert sum(weight.numel() for weight in network.parameters()) == PARAMETERS[name]


SMALLER = ["--model.depth=2", "--model.emb_size=24", "--model.num_heads=2", "--data.image_size=32"]


def few_steps(photographs: Path, name: str) -> list[str]:
    flags = ["--data.batch_size=8", "--data.num_workers=0", "--trainer.accelerator=cpu", "--trainer.fast_dev_run=2"]
    return ["fit", f"--config={CONFIGS[name]}", f"--data.root={photographs}", *flags]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_at_a_small_size(name, photographs, in_folder, capsys):
    assert main([*few_steps(photographs, name), *SMALLER]) == 0
    assert "training, validation and test work" in capsys.readouterr().out


@pytest.mark.parametrize("path", CIFAR.values(), ids=lambda path: path.stem)
def test_a_config_of_cifar_trains_at_a_small_size(path, photographs, in_folder, capsys):
    """On photographs in the place of CIFAR, which is not here."""
    given = yaml.safe_load(path.read_text())["data"]["init_args"] | {"root": str(photographs), "image_size": 32}
    data = {"class_path": "vit_lightning.ImageFolder", "init_args": {**given, "min_area": 1.0, "batch_size": 8}}
    Path("data.yaml").write_text(yaml.safe_dump({"data": data}, sort_keys=False))
    flags = ["--model.depth=1", "--model.emb_size=12", "--model.num_heads=2", "--trainer.accelerator=cpu"]
    assert main(["fit", f"--config={path}", "--config=data.yaml", *flags, "--trainer.fast_dev_run=1"]) == 0
    assert "training, validation and test work" in capsys.readouterr().out
