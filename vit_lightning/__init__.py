"""Vision Transformers from readable blocks, trained through Lightning from one page.

Names are imported when they are used: ``from vit_lightning import ViT`` needs torch and einops alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AttentionPool": "models.heads",
    "CIFAR10": "data.torchvision_sets",
    "CIFAR100": "data.torchvision_sets",
    "ClassTokenAndMeanPool": "models.heads",
    "ClassificationHead": "models.heads",
    "ColorJitter": "data.colour",
    "ConvProjection": "models.patches",
    "CrateMeasures": "training.crate_measures",
    "CutMix": "data.mixing",
    "Digits": "data.base",
    "Distillation": "training.distillation",
    "DistillationConfig": "training.distillation",
    "DividedAfterSoftmaxAttention": "models.attention",
    "EMAConfig": "training.ema",
    "FeedForwardBlock": "models.blocks",
    "HorizontalFlip": "data.augment",
    "HuggingFaceSet": "data.hugging_face",
    "ISTA": "models.crate",
    "ImageData": "data.base",
    "ImageFiles": "data.image_files",
    "ImageFolder": "data.image_folder",
    "LayerNorm": "models.blocks",
    "LearnedPatchPositions": "models.positions",
    "LearnedPositions": "models.positions",
    "LinearProjection": "models.patches",
    "LossConfig": "training.losses",
    "MSSA": "models.crate",
    "MaxPool": "models.heads",
    "MeanAllPool": "models.heads",
    "MeanMaxPool": "models.heads",
    "MixUp": "data.mixing",
    "MultiHeadAttention": "models.blocks",
    "OptimizerConfig": "training.optim",
    "PackedSwiGLU": "models.feed_forward",
    "PatchEmbedding": "models.patches",
    "RMSNorm": "models.blocks",
    "RandAugment": "data.policies",
    "RandomAffine": "data.augment",
    "RandomCrop": "data.augment",
    "RandomErasing": "data.augment",
    "RandomResizedCrop": "data.augment",
    "ResidualAdd": "models.blocks",
    "RotaryAttention": "models.attention",
    "SeparateAttention": "models.attention",
    "ShardedSet": "data.sharded",
    "SinCos2dPositions": "models.positions",
    "SwiGLU": "models.feed_forward",
    "Teacher": "training.distillation",
    "ThreeAugment": "data.policies",
    "TorchvisionSet": "data.torchvision_sets",
    "TransformerEncoder": "models.blocks",
    "TransformerEncoderBlock": "models.blocks",
    "TrivialAugment": "data.policies",
    "UserError": "errors",
    "ViT": "models.vit",
    "ViTClassifier": "training.classifier",
    "from_reference": "weights.convert",
    "to_reference": "weights.convert",
}

if TYPE_CHECKING:
    from vit_lightning.data.augment import HorizontalFlip as HorizontalFlip
    from vit_lightning.data.augment import RandomAffine as RandomAffine
    from vit_lightning.data.augment import RandomCrop as RandomCrop
    from vit_lightning.data.augment import RandomErasing as RandomErasing
    from vit_lightning.data.augment import RandomResizedCrop as RandomResizedCrop
    from vit_lightning.data.base import Digits as Digits
    from vit_lightning.data.base import ImageData as ImageData
    from vit_lightning.data.colour import ColorJitter as ColorJitter
    from vit_lightning.data.hugging_face import HuggingFaceSet as HuggingFaceSet
    from vit_lightning.data.image_files import ImageFiles as ImageFiles
    from vit_lightning.data.image_folder import ImageFolder as ImageFolder
    from vit_lightning.data.mixing import CutMix as CutMix
    from vit_lightning.data.mixing import MixUp as MixUp
    from vit_lightning.data.policies import RandAugment as RandAugment
    from vit_lightning.data.policies import ThreeAugment as ThreeAugment
    from vit_lightning.data.policies import TrivialAugment as TrivialAugment
    from vit_lightning.data.sharded import ShardedSet as ShardedSet
    from vit_lightning.data.torchvision_sets import CIFAR10 as CIFAR10
    from vit_lightning.data.torchvision_sets import CIFAR100 as CIFAR100
    from vit_lightning.data.torchvision_sets import TorchvisionSet as TorchvisionSet
    from vit_lightning.errors import UserError as UserError
    from vit_lightning.models.attention import DividedAfterSoftmaxAttention as DividedAfterSoftmaxAttention
    from vit_lightning.models.attention import RotaryAttention as RotaryAttention
    from vit_lightning.models.attention import SeparateAttention as SeparateAttention
    from vit_lightning.models.blocks import FeedForwardBlock as FeedForwardBlock
    from vit_lightning.models.blocks import LayerNorm as LayerNorm
    from vit_lightning.models.blocks import MultiHeadAttention as MultiHeadAttention
    from vit_lightning.models.blocks import ResidualAdd as ResidualAdd
    from vit_lightning.models.blocks import RMSNorm as RMSNorm
    from vit_lightning.models.blocks import TransformerEncoder as TransformerEncoder
    from vit_lightning.models.blocks import TransformerEncoderBlock as TransformerEncoderBlock
    from vit_lightning.models.crate import ISTA as ISTA
    from vit_lightning.models.crate import MSSA as MSSA
    from vit_lightning.models.feed_forward import PackedSwiGLU as PackedSwiGLU
    from vit_lightning.models.feed_forward import SwiGLU as SwiGLU
    from vit_lightning.models.heads import AttentionPool as AttentionPool
    from vit_lightning.models.heads import ClassificationHead as ClassificationHead
    from vit_lightning.models.heads import ClassTokenAndMeanPool as ClassTokenAndMeanPool
    from vit_lightning.models.heads import MaxPool as MaxPool
    from vit_lightning.models.heads import MeanAllPool as MeanAllPool
    from vit_lightning.models.heads import MeanMaxPool as MeanMaxPool
    from vit_lightning.models.patches import ConvProjection as ConvProjection
    from vit_lightning.models.patches import LinearProjection as LinearProjection
    from vit_lightning.models.patches import PatchEmbedding as PatchEmbedding
    from vit_lightning.models.positions import LearnedPatchPositions as LearnedPatchPositions
    from vit_lightning.models.positions import LearnedPositions as LearnedPositions
    from vit_lightning.models.positions import SinCos2dPositions as SinCos2dPositions
    from vit_lightning.models.vit import ViT as ViT
    from vit_lightning.training.classifier import ViTClassifier as ViTClassifier
    from vit_lightning.training.crate_measures import CrateMeasures as CrateMeasures
    from vit_lightning.training.distillation import Distillation as Distillation
    from vit_lightning.training.distillation import DistillationConfig as DistillationConfig
    from vit_lightning.training.distillation import Teacher as Teacher
    from vit_lightning.training.ema import EMAConfig as EMAConfig
    from vit_lightning.training.losses import LossConfig as LossConfig
    from vit_lightning.training.optim import OptimizerConfig as OptimizerConfig
    from vit_lightning.weights.convert import from_reference as from_reference
    from vit_lightning.weights.convert import to_reference as to_reference


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
