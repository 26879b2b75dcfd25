"""Row 4 of the fault plan: each part that a config can name, alone, in a run that is killed and one that is not.

Those of the guide's one file stand beside a config in another folder, which is away when the run goes on.

What is public, or one of the words of an option, is listed here or does not train: the first test finds what is new.
"""

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import harness
import pytest
import yaml
from PIL import Image
from runs import REPOSITORY, example
from tensors import write_parquet

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


NETWORK = """

class Mlp(nn.Sequential):
    def __init__(self, num_classes, image_size=8, width=32):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes))
"""
OWN = {
    "block": ("--model.block={class_path: parts.Block, scale: 0.7}",),
    "attention": ("--model.attention=parts.Mixer",),
    "feed-forward": ("--model.feed_forward=parts.Wide",),
    "pool": ("--model.pool=parts.Top",),
    "loss": ("--loss={class_path: parts.focal, gamma: 1.5}", "--data.mixing=[MixUp]"),
    "optimizer": ("--optimizer={class_path: parts.Sign, beta: 0.8}",),
    "transform": ("--data.augment=[parts.darker]",),
    "dataset": ("--data={class_path: parts.Images, count: 300, batch_size: 24}",),
    "data module": ("--data={class_path: parts.Batches, batch_size: 6}",),
    "module": ("--module={class_path: parts.Module, width: 24}",),
    "metric": ("--metrics=[parts.Worst]",),
    "callback": ("--trainer.callbacks+=[{class_path: parts.Norms, every: 2}]",),
    "network": ("--model={class_path: parts.Mlp, width: 24}",),
}
SMALL, TOKEN = ("--data.image_size=8", "--data.batch_size=4"), "--model.distillation_token=true"
PARTS: dict[str, tuple[str, ...]] = {
    **{f"own {name}": ("--config=../project/exp.yaml", *flags) for name, flags in OWN.items()},
    **in_list("data.augment", "HorizontalFlip", "RandAugment", "RandomAffine", "RandomErasing"),
    **in_list("data.augment", "RandomResizedCrop", "AutoAugment", "ThreeAugment"),
    **in_list("data.augment", "TimmRandAugment"),
    **in_list("data.augment", "RandomCrop", padding=1),
    **in_list("data.augment", "PerImage", transform="torchvision.transforms.v2.RandomHorizontalFlip"),
    **in_list("data.augment", "torchvision.transforms.v2.RandomRotation", degrees=9),
    **in_list("data.mixing", "MixUp", "CutMix"),
    **in_list("trainer.callbacks+", "KNNProbe"),
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
    "layer decay": ("--optimizer.name=muon", "--optimizer.layer_decay=0.8", "--trainer.gradient_clip_val=1.0"),
    "mixing off": ("--data.mixing=[MixUp]", "--data.mixing_off_epoch=1", "--trainer.accumulate_grad_batches=2"),
    **{f"distillation {kind}": (f"--distillation.kind={kind}", TOKEN) for kind in words(DistillationConfig, "kind")},
    "compiled": ("--compile=true",),
    "Digits": (),
    "ImageFolder": ("--data.class_path=ImageFolder", "--data.root=images", *SMALL),
    "HuggingFaceSet": ("--data.class_path=HuggingFaceSet", "--data.path=tables", "--data.cache=cache", *SMALL),
    **{path.stem: (f"--config={path}",) for path in sorted(REPOSITORY.glob("experiments/families/*.yaml"))},
}
"""Flags that train each part."""

REPLACES = {
    "own module": ("--model", "--optimizer", "--checkpoint.m"),
    "own network": ("--model",),
    "own optimizer": ("--optimizer",),
}
REPLACES |= dict.fromkeys(("own dataset", "own data module", "ImageFolder", "HuggingFaceSet"), ("--data",))
"""Groups of the usual flags that a part comes in place of."""

ELSEWHERE = {
    "Augmentation ImageData PatchEmbedding ResidualAdd TransformerEncoder ClassificationHead": "in all",
    "ViT ViTClassifier": "in all",
    "Distillation Teacher DistillationConfig EMAConfig LossConfig OptimizerConfig Experiment": "under other names here",
    "MSSA ISTA": "CrateBlock",
    "UserError accelerate fit from_reference load model_config read_metrics resolve": "no part",
    "sample_keys to_reference": "no part",
    "ImageFiles": "predicts only",
    "CIFAR10 CIFAR100 TorchvisionSet": "their images are read as those of ImageFolder, by index",
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


def prepare(folder: Path, part: str) -> Path:
    """Writes what a part needs: a project, 40 images to train on and 8 to test; returns where it runs."""
    place = folder / "here"
    place.mkdir(parents=True)
    if part.startswith("own"):
        (folder / "project").mkdir()
        (folder / "project/parts.py").write_text(example("all parts") + NETWORK)
        (folder / "project/exp.yaml").write_text("seed_everything: 0\n")
    if part in ("ImageFolder", "HuggingFaceSet"):
        for number in range(48):
            path = place / f"images/{'train' if number < 40 else 'test'}/{'ab'[number % 2]}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (10, 9), (5 * number, 100, 250 - 5 * number)).save(path)
        for split in ("train", "test"):
            write_parquet(place / f"tables/{split}.parquet", place / "images" / split)
    return place


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "way"), [*((part, "KILL") for part in PARTS), ("own module", "TERM"), ("own dataset", "TERM")]
)
def test_row_04_a_part_comes_out_the_same_after_it_is_ended(tmp_path, part, way, request):
    usual = (*RUN, *(() if "--config=/" in "".join(PARTS[part]) else MODEL))
    flags = (*(flag for flag in usual if not flag.startswith(REPLACES.get(part, ("-no",)))), *PARTS[part])
    if part.startswith("distillation"):
        flags = (*flags, f"--distillation.teacher={request.getfixturevalue('teacher')}")
    whole, ended = (prepare(tmp_path / name, part) for name in ("whole", "ended"))
    assert harness.command(whole, "fit", *flags) == 0, harness.log(whole)
    # within an epoch, but for loaders that are not ours, which begin an interrupted epoch again
    fault = f"0:{8 if part == 'own data module' else 11}:batch_start:{way}"
    assert harness.command(ended, "fit", *flags, fault=fault) == (-9 if way == "KILL" else 143), harness.log(ended)
    if part.startswith("own"):
        (tmp_path / "ended/project").rename(tmp_path / "ended/moved")  # the run has its own copy
    assert harness.resume(ended) == 0, harness.log(ended)
    assert not harness.differences(harness.outcome(whole), harness.outcome(ended))
    if part.startswith("own"):
        assert harness.command(ended, "test", "--ckpt=run", "--trust") == 0, harness.log(ended)
