"""The configs of ImageNet against the tables of their papers, and run for a few steps on generated photographs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from runs import REPOSITORY

from vit_lightning.cli import main
from vit_lightning.commands.module import make_module
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.training.optim import optimizer_and_schedule

CONFIGS = {path.stem: path for path in (REPOSITORY / "experiments" / "imagenet").glob("*.yaml")}
CIFAR = sorted((REPOSITORY / "experiments").glob("cifar*_vit_*.yaml"))

TABLES: dict[str, dict[str, Any]] = {
    # Steiner et al. 2022, section 3, and the name of its published file of S/16; big_vision, configs/vit_i1k.py
    "vit_augreg": {
        "parameters": 22_050_664,
        "batch_size": 4096,
        "max_epochs": 300,
        "name": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 10_000,
        "schedule": "cosine",
        "min_lr": 0.0,
        "clip": 1.0,
        "drop_path": 0.0,
        "smoothing": 0.0,
        "loss": "ce",
        "min_area": 0.05,
        "centre_share": 224 / 256,
        "repetitions": 1,
        "augment": {"HorizontalFlip": {}, "RandAugment": {"num_ops": 2, "magnitude": 15}},
        "mixing": {"MixUp": 0.5},
    },
    # Beyer et al. 2022; big_vision, configs/vit_s16_i1k.py
    # parameters: S/16 less 197 learned positions and the class token, with a hidden layer of 384 x 384 + 384
    "simplevit": {
        "parameters": 22_050_664 - 197 * 384 - 384 + 384 * 384 + 384,
        "batch_size": 1024,
        "max_epochs": 90,
        "name": "adamw",
        "lr": 1e-3,
        "weight_decay": 1e-4 / 1e-3,
        "warmup_steps": 10_000,
        "schedule": "cosine",
        "min_lr": 0.0,
        "clip": 1.0,
        "drop_path": 0.0,
        "smoothing": 0.0,
        "loss": "ce",
        "min_area": 0.05,
        "centre_share": 224 / 256,
        "repetitions": 1,
        "augment": {"HorizontalFlip": {}, "RandAugment": {"num_ops": 2, "magnitude": 10}},
        "mixing": {"MixUp": 0.2},
    },
    # Touvron et al. 2021, table 9, column DeiT-B (the same for S)
    "deit": {
        "parameters": 22_050_664,
        "batch_size": 1024,
        "max_epochs": 300,
        "name": "adamw",
        "lr": 0.0005 * 1024 / 512,
        "weight_decay": 0.05,
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "schedule": "cosine",
        "min_lr": 1e-5,
        "clip": None,
        "drop_path": 0.1,
        "smoothing": 0.1,
        "loss": "ce",
        "min_area": 0.08,
        "centre_share": 224 / 256,
        "repetitions": 3,
        "augment": {
            "HorizontalFlip": {},
            "RandAugment": {"num_ops": 2, "magnitude": 9 * 3},
            "RandomErasing": {"p": 0.25},
        },
        "mixing": {"MixUp": 0.8, "CutMix": 1.0},
    },
    # Touvron et al. 2022, table 1, column "Ours, ImageNet-1k"; S/16 of README_revenge.md
    # parameters: S/16 whose class token has no position, with two factors of 384 in each of 12 blocks
    "deit3": {
        "parameters": 22_050_664 - 384 + 12 * 2 * 384,
        "batch_size": 2048,
        "max_epochs": 800,
        "name": "lamb",
        "lr": 4e-3,
        "weight_decay": 0.02,
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "schedule": "cosine",
        "min_lr": 1e-5,
        "clip": 1.0,
        "drop_path": 0.05,
        "smoothing": 0.0,
        "loss": "bce",
        "min_area": 0.08,
        "centre_share": 1.0,
        "repetitions": 3,
        "augment": {"HorizontalFlip": {}, "ThreeAugment": {"jitter": 0.3}},
        "mixing": {"MixUp": 0.8, "CutMix": 1.0},
    },
    # Yu et al. 2023, section 3; CRATE-T of the repository has 6.09M parameters
    "crate_tiny": {
        "parameters": 6_090_856,
        "batch_size": 2048,
        "max_epochs": 150,
        "name": "lion",
        "lr": 2.4e-4,
        "weight_decay": 0.5,
        "warmup_epochs": 5,
        "schedule": "cosine",
        "min_lr": 0.0,
        "clip": None,
        "drop_path": 0.0,
        "smoothing": 0.1,
        "loss": "ce",
        "min_area": 0.08,
        "centre_share": 224 / 256,
        "repetitions": 1,
        "augment": {"HorizontalFlip": {}},
        "mixing": {},
    },
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


def classes(items: list[Any]) -> dict[str, dict[str, Any]]:
    return {item["class_path"].rpartition(".")[2]: item["init_args"] for item in items or []}


def test_every_config_has_a_table():
    assert CONFIGS.keys() == TABLES.keys()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_config_says_what_its_paper_says(name, photographs):
    table = dict(TABLES[name])
    experiment = resolve([f"--config={CONFIGS[name]}", f"--data.root={photographs}"])
    data, model = (experiment.config[key]["init_args"] for key in ("data", "model"))
    settings, trainer = experiment.settings, experiment.trainer
    said = {**data, **model, **vars(settings.optimizer)}
    said |= {"max_epochs": trainer["max_epochs"], "clip": trainer["gradient_clip_val"]}
    said |= {"smoothing": settings.loss.label_smoothing, "loss": settings.loss.name}
    augment, mixing, parameters = table.pop("augment"), table.pop("mixing"), table.pop("parameters")
    assert {key: said[key] for key in table} == table
    assert data["image_size"] == 224
    assert settings.ema.decay is None
    shown = classes(data["augment"])
    assert list(shown) == list(augment)
    for kind, arguments in augment.items():
        assert arguments.items() <= shown[kind].items()
    assert {kind: arguments["alpha"] for kind, arguments in classes(data["mixing"]).items()} == mixing
    with torch.device("meta"):
        network = network_in_file(
            {"model": {**experiment.config["model"], "init_args": {**model, "num_classes": 1000}}}
        )
    assert sum(weight.numel() for weight in network.parameters()) == parameters


def test_deit3_is_as_large_as_timm_s():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model("deit3_small_patch16_224")
    assert sum(weight.numel() for weight in model.parameters()) == TABLES["deit3"]["parameters"]


def test_the_rates_of_training_follow_the_table(photographs):
    """Peak, warm-up and end in the steps of the whole of ImageNet, where 1 % of its images is validation."""
    steps_per_epoch = math.ceil(0.99 * 1_281_167 / 1024)
    experiment = resolve(
        [f"--config={CONFIGS['deit']}", f"--data.root={photographs}", "--model.depth=1", "--model.emb_size=12"]
    )
    module = make_module(experiment)
    optimizer, schedule = optimizer_and_schedule(
        module.network, module.optimizer_config, total_steps=300 * steps_per_epoch, steps_per_epoch=steps_per_epoch
    )
    peak = schedule.lr_lambdas[0]
    assert optimizer.param_groups[0]["initial_lr"] == 1e-3
    assert peak(5 * steps_per_epoch) == pytest.approx(1.0)
    assert 1e-3 * peak(300 * steps_per_epoch - 1) == pytest.approx(1e-5)
    assert 1e-3 * peak(0) < 2e-6


SMALLER = ["--model.depth=2", "--model.emb_size=24", "--model.num_heads=2", "--data.image_size=32"]


def few_steps(photographs: Path, name: str) -> list[str]:
    flags = ["--data.batch_size=8", "--data.num_workers=0", "--trainer.accelerator=cpu", "--trainer.fast_dev_run=2"]
    return ["fit", f"--config={CONFIGS[name]}", f"--data.root={photographs}", *flags]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_config_trains_at_a_small_size(name, photographs, in_folder, capsys):
    assert main([*few_steps(photographs, name), *SMALLER]) == 0
    assert "training, validation and test work" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_config_trains_at_its_own_size(name, photographs, in_folder, capsys):
    assert main(few_steps(photographs, name)) == 0
    assert "training, validation and test work" in capsys.readouterr().out


@pytest.mark.parametrize("path", CIFAR, ids=lambda path: path.stem)
def test_a_config_of_cifar_trains_at_a_small_size(path, photographs, in_folder, capsys):
    """On photographs in the place of CIFAR, which is not here."""
    experiment = resolve([f"--config={path}"])
    arguments = experiment.config["model"]["init_args"]
    count = sum(weight.numel() for weight in experiment.make_network().parameters())
    classes, width = arguments["num_classes"], {"Ti/4": 192, "S/4": 384}[arguments["preset"]]
    # 12 blocks, 65 positions, a class token, patches of 4 x 4 x 3, the last norm, the classifier
    blocks = 12 * (12 * width**2 + 13 * width)
    assert count == blocks + 65 * width + width + 48 * width + width + 2 * width + (width + 1) * classes
    config = Path("config.yaml")
    text = path.read_text().replace(f"vit_lightning.CIFAR{classes}", "vit_lightning.ImageFolder")
    config.write_text(text.replace("root: data\n", f"root: {photographs}\n    image_size: 32\n    min_area: 1.0\n"))
    flags = ["--model.depth=1", "--model.emb_size=12", "--model.num_heads=2", "--data.batch_size=8"]
    assert main(["fit", f"--config={config}", *flags, "--trainer.accelerator=cpu", "--trainer.fast_dev_run=1"]) == 0
    assert "training, validation and test work" in capsys.readouterr().out
