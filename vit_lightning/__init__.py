"""Vision Transformers from readable blocks, trained through Lightning from one page.

Names are imported when they are used: ``from vit_lightning import ViT`` needs torch and einops alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AttentionPool": "heads",
    "CIFAR10": "torchvision_sets",
    "CIFAR100": "torchvision_sets",
    "ClassTokenAndMeanPool": "heads",
    "ClassificationHead": "heads",
    "ColorJitter": "colour",
    "ConvProjection": "patches",
    "CrateMeasures": "crate_measures",
    "CutMix": "mixing",
    "Digits": "data",
    "Distillation": "distillation",
    "DistillationConfig": "distillation",
    "DividedAfterSoftmaxAttention": "attention_variants",
    "EMAConfig": "averaging",
    "FeedForwardBlock": "blocks",
    "HorizontalFlip": "augment",
    "HuggingFaceSet": "huggingface",
    "ISTA": "crate",
    "ImageData": "data",
    "ImageFolder": "imagefolder",
    "LayerNorm": "blocks",
    "LearnedPatchPositions": "positions",
    "LearnedPositions": "positions",
    "LinearProjection": "patches",
    "LossConfig": "losses",
    "MSSA": "crate",
    "MaxPool": "heads",
    "MeanAllPool": "heads",
    "MeanMaxPool": "heads",
    "MixUp": "mixing",
    "MultiHeadAttention": "blocks",
    "OptimizerConfig": "optim",
    "PackedSwiGLU": "feed_forward",
    "PatchEmbedding": "patches",
    "RMSNorm": "blocks",
    "RandAugment": "policies",
    "RandomAffine": "augment",
    "RandomCrop": "augment",
    "RandomErasing": "augment",
    "RandomResizedCrop": "augment",
    "ResidualAdd": "blocks",
    "RotaryAttention": "attention_variants",
    "SeparateAttention": "attention_variants",
    "ShardedSet": "sharded",
    "SinCos2dPositions": "positions",
    "SwiGLU": "feed_forward",
    "Teacher": "distillation",
    "ThreeAugment": "policies",
    "TorchvisionSet": "torchvision_sets",
    "TransformerEncoder": "blocks",
    "TransformerEncoderBlock": "blocks",
    "TrivialAugment": "policies",
    "UserError": "errors",
    "ViT": "vit",
    "ViTClassifier": "classifier",
    "from_reference": "weights",
    "to_reference": "weights",
}

if TYPE_CHECKING:
    from vit_lightning.attention_variants import DividedAfterSoftmaxAttention as DividedAfterSoftmaxAttention
    from vit_lightning.attention_variants import RotaryAttention as RotaryAttention
    from vit_lightning.attention_variants import SeparateAttention as SeparateAttention
    from vit_lightning.augment import HorizontalFlip as HorizontalFlip
    from vit_lightning.augment import RandomAffine as RandomAffine
    from vit_lightning.augment import RandomCrop as RandomCrop
    from vit_lightning.augment import RandomErasing as RandomErasing
    from vit_lightning.augment import RandomResizedCrop as RandomResizedCrop
    from vit_lightning.averaging import EMAConfig as EMAConfig
    from vit_lightning.blocks import FeedForwardBlock as FeedForwardBlock
    from vit_lightning.blocks import LayerNorm as LayerNorm
    from vit_lightning.blocks import MultiHeadAttention as MultiHeadAttention
    from vit_lightning.blocks import ResidualAdd as ResidualAdd
    from vit_lightning.blocks import RMSNorm as RMSNorm
    from vit_lightning.blocks import TransformerEncoder as TransformerEncoder
    from vit_lightning.blocks import TransformerEncoderBlock as TransformerEncoderBlock
    from vit_lightning.classifier import ViTClassifier as ViTClassifier
    from vit_lightning.colour import ColorJitter as ColorJitter
    from vit_lightning.crate import ISTA as ISTA
    from vit_lightning.crate import MSSA as MSSA
    from vit_lightning.crate_measures import CrateMeasures as CrateMeasures
    from vit_lightning.data import Digits as Digits
    from vit_lightning.data import ImageData as ImageData
    from vit_lightning.distillation import Distillation as Distillation
    from vit_lightning.distillation import DistillationConfig as DistillationConfig
    from vit_lightning.distillation import Teacher as Teacher
    from vit_lightning.errors import UserError as UserError
    from vit_lightning.feed_forward import PackedSwiGLU as PackedSwiGLU
    from vit_lightning.feed_forward import SwiGLU as SwiGLU
    from vit_lightning.heads import AttentionPool as AttentionPool
    from vit_lightning.heads import ClassificationHead as ClassificationHead
    from vit_lightning.heads import ClassTokenAndMeanPool as ClassTokenAndMeanPool
    from vit_lightning.heads import MaxPool as MaxPool
    from vit_lightning.heads import MeanAllPool as MeanAllPool
    from vit_lightning.heads import MeanMaxPool as MeanMaxPool
    from vit_lightning.huggingface import HuggingFaceSet as HuggingFaceSet
    from vit_lightning.imagefolder import ImageFolder as ImageFolder
    from vit_lightning.losses import LossConfig as LossConfig
    from vit_lightning.mixing import CutMix as CutMix
    from vit_lightning.mixing import MixUp as MixUp
    from vit_lightning.optim import OptimizerConfig as OptimizerConfig
    from vit_lightning.patches import ConvProjection as ConvProjection
    from vit_lightning.patches import LinearProjection as LinearProjection
    from vit_lightning.patches import PatchEmbedding as PatchEmbedding
    from vit_lightning.policies import RandAugment as RandAugment
    from vit_lightning.policies import ThreeAugment as ThreeAugment
    from vit_lightning.policies import TrivialAugment as TrivialAugment
    from vit_lightning.positions import LearnedPatchPositions as LearnedPatchPositions
    from vit_lightning.positions import LearnedPositions as LearnedPositions
    from vit_lightning.positions import SinCos2dPositions as SinCos2dPositions
    from vit_lightning.sharded import ShardedSet as ShardedSet
    from vit_lightning.torchvision_sets import CIFAR10 as CIFAR10
    from vit_lightning.torchvision_sets import CIFAR100 as CIFAR100
    from vit_lightning.torchvision_sets import TorchvisionSet as TorchvisionSet
    from vit_lightning.vit import ViT as ViT
    from vit_lightning.weights import from_reference as from_reference
    from vit_lightning.weights import to_reference as to_reference


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
