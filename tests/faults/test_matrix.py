"""Row 4 of the fault plan: each part that a config can name, alone, in a run that is killed and one that is not.

What is public, or one of the words of an option, is listed here or does not train: the first test finds what is new.
"""

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import harness
import pytest
import yaml
from PIL import Image
from runs import REPOSITORY

import vit_lightning
from vit_lightning.models.heads import POOLS
from vit_lightning.models.initialisation import INITIALISATIONS
from vit_lightning.models.patches import PROJECTIONS
from vit_lightning.models.positions import POSITIONS
from vit_lightning.training.losses import DistillationConfig, LossConfig
from vit_lightning.training.optim import OptimizerConfig
from vit_lightning.training.optimizers import Schedule

RUN = (*(flag for flag in harness.FLAGS if not flag.startswith("--model.")), "--trainer.max_epochs=2")
MODEL = ("--model.patch_size=4", "--model.emb_size=16", "--model.depth=2", "--model.num_heads=2")


def words(option: Any, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(option)[name])


def classes(option: str, *names: str) -> dict[str, tuple[str, ...]]:
    """Flags that give an option a class each."""
    return {name: (f"--{option}={name}",) for name in names}


def in_list(option: str, *names: str, **arguments: Any) -> dict[str, tuple[str, ...]]:
    values = {name: yaml.safe_dump([{"class_path": name, **arguments}], default_flow_style=True) for name in names}
    return {name: (f"--{option}={value.strip()}",) for name, value in values.items()}


PARTS: dict[str, tuple[str, ...]] = {
    **in_list("data.augment", "HorizontalFlip", "RandAugment", "RandomAffine", "TrivialAugment", "RandomErasing"),
    **in_list("data.augment", "RandomResizedCrop", "AutoAugment", "ThreeAugment", "ColorJitter"),
    **in_list("data.augment", "TimmRandAugment"),
    **in_list("data.augment", "RandomCrop", padding=1),
    **in_list("data.augment", "PerImage", transform="torchvision.transforms.v2.RandomHorizontalFlip"),
    **in_list("data.augment", "torchvision.transforms.v2.RandomRotation", degrees=9),
    **in_list("data.mixing", "MixUp", "CutMix"),
    **in_list("trainer.callbacks+", "KNNProbe", "LinearProbe"),
    **classes("model.block", "CompactBlock", "ParallelBlock", "PostNormBlock", "ResPostNormBlock", "SandwichNormBlock"),
    "TransformerEncoderBlock": (
        "--model.block=TransformerEncoderBlock",
        "--model.drop_path=0.3",
        "--model.layer_scale=0.1",
    ),
    "CrateBlock": ("--model.block=CrateBlock", "--model.attention=MSSA", "--model.feed_forward=ISTA"),
    **classes("model.attention", "MultiHeadAttention", "DividedAfterSoftmaxAttention", "RotaryAttention"),
    **classes("model.attention", "SeparateAttention"),
    **classes("model.feed_forward", "FeedForwardBlock", "SwiGLU", "PackedSwiGLU"),
    **classes("model.norm", "LayerNorm", "RMSNorm", "BatchNorm"),
    **classes("model.pool", "AttentionPool", "ClassTokenAndMeanPool", "MaxPool", "MeanAllPool", "MeanMaxPool"),
    **classes("model.pool", "SequencePool", *POOLS),
    **classes("model.positions", "LearnedPatchPositions", "LearnedPositions", "SinCos2dPositions", *POSITIONS),
    **classes("model.patch_projection", "ConvProjection", "ConvTokenizer", "LinearProjection", *PROJECTIONS),
    **classes("model.initialisation", *INITIALISATIONS),
    "dropouts": ("--model.emb_dropout=0.2", "--model.attention.dropout=0.2", "--model.feed_forward.dropout=0.2"),
    "patch dropout": ("--model.patch_dropout=0.3", "--model.activation_checkpointing=true"),
    "average": ("--ema.decay=0.9",),
    "MAE": (
        "--model.patch_size=2",
        "--module={class_path: MAE, decoder_emb_size: 16, decoder_depth: 1, decoder_num_heads: 2}",
    ),
    "LoRA": ("--lora.rank=2", "--lora.dropout=0.5"),
    "frozen": ("--freeze=backbone", "--model.head_dropout=0.5"),
    "class weights": ("--loss={class_path: CrossEntropyLoss, weight: [1, 2, 1, 1, 1, 1, 1, 1, 1, 5]}",),
    **{f"optimizer {name}": (f"--optimizer.name={name}",) for name in words(OptimizerConfig, "name")},
    **{f"schedule {name}": (f"--optimizer.schedule={name}",) for name in get_args(Schedule)},
    **{f"loss {name}": (f"--loss.name={name}",) for name in words(LossConfig, "name")},
    **{f"precision {name}": (f"--trainer.precision={name}",) for name in ("bf16-mixed", "bf16-true", "64-true")},
    **{f"distillation {kind}": (f"--distillation.kind={kind}",) for kind in words(DistillationConfig, "kind")},
    "compiled": ("--compile=true",),
    "Digits": (),
    "ImageFolder": ("--data.class_path=ImageFolder", "--data.root=images", "--data.image_size=8"),
    **{path.stem: (f"--config={path}",) for path in sorted(REPOSITORY.glob("experiments/families/*.yaml"))},
}
"""Flags that train each part."""

ELSEWHERE = {
    "Augmentation ImageData PatchEmbedding ResidualAdd TransformerEncoder ClassificationHead": "in all",
    "ViT ViTClassifier": "in all",
    "Distillation Teacher DistillationConfig EMAConfig LossConfig OptimizerConfig Experiment": "under other names here",
    "MSSA ISTA": "CrateBlock",
    "UserError accelerate fit from_reference load model_config read_metrics resolve": "no part",
    "sample_keys to_reference": "no part",
    "ImageFiles": "predicts only",
    "CIFAR10 CIFAR100 TorchvisionSet HuggingFaceSet": "their images are read as those of ImageFolder, by index",
    "WrappedDataModule WrappedDataset": "tests/data/test_wrapped.py resumes them",
}
"""What is public and is not trained here, and why."""


def test_row_04_every_public_part_is_listed():
    listed = {*PARTS, *" ".join(ELSEWHERE).split()}
    assert {*vit_lightning.__all__} - listed == set()
    assert all(inspect.isclass(getattr(vit_lightning, name)) for name in PARTS if hasattr(vit_lightning, name))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    assert harness.fit(folder, "--trainer.max_epochs=1") == 0, harness.log(folder)
    return folder / "run"


def images(folder: Path) -> None:
    """Writes 40 grey images of two classes for training, and 8 to test."""
    for number in range(48):
        path = folder / f"images/{'train' if number < 40 else 'test'}/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 9), (5 * number, 100, 250 - 5 * number)).save(path)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_row_04_a_part_comes_out_the_same_after_a_kill(tmp_path, part, request):
    flags = (*RUN, *(() if "--config" in "".join(PARTS[part]) else MODEL), *PARTS[part])
    if part.startswith("distillation"):
        flags = (*flags, f"--distillation.teacher={request.getfixturevalue('teacher')}")
    if part == "ImageFolder":
        flags = (*(flag for flag in flags if "batch_size" not in flag and "augment" not in flag), "--data.batch_size=4")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        images(folder) if part == "ImageFolder" else folder.mkdir()
    assert harness.command(whole, "fit", *flags) == 0, harness.log(whole)
    assert harness.command(killed, "fit", *flags, fault="0:11:batch_start:KILL") == -9, harness.log(killed)
    assert harness.resume(killed) == 0, harness.log(killed)
    assert not harness.differences(harness.outcome(whole), harness.outcome(killed))
