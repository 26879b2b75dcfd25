"""Vision Transformers from readable blocks, trained through Lightning from one page.

Names are imported when they are used: ``from vit_lightning import ViT`` needs torch and einops alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CIFAR10": "torchvision_sets",
    "CIFAR100": "torchvision_sets",
    "ClassificationHead": "heads",
    "Digits": "data",
    "FeedForwardBlock": "blocks",
    "HorizontalFlip": "augment",
    "ImageData": "data",
    "ImageFolder": "imagefolder",
    "LayerNorm": "blocks",
    "LossConfig": "classifier",
    "MultiHeadAttention": "blocks",
    "OptimizerConfig": "optim",
    "PatchEmbedding": "patches",
    "RandomAffine": "augment",
    "RandomCrop": "augment",
    "ResidualAdd": "blocks",
    "TorchvisionSet": "torchvision_sets",
    "TransformerEncoder": "blocks",
    "TransformerEncoderBlock": "blocks",
    "UserError": "errors",
    "ViT": "vit",
    "ViTClassifier": "classifier",
}

if TYPE_CHECKING:
    from vit_lightning.augment import HorizontalFlip as HorizontalFlip
    from vit_lightning.augment import RandomAffine as RandomAffine
    from vit_lightning.augment import RandomCrop as RandomCrop
    from vit_lightning.blocks import FeedForwardBlock as FeedForwardBlock
    from vit_lightning.blocks import LayerNorm as LayerNorm
    from vit_lightning.blocks import MultiHeadAttention as MultiHeadAttention
    from vit_lightning.blocks import ResidualAdd as ResidualAdd
    from vit_lightning.blocks import TransformerEncoder as TransformerEncoder
    from vit_lightning.blocks import TransformerEncoderBlock as TransformerEncoderBlock
    from vit_lightning.classifier import LossConfig as LossConfig
    from vit_lightning.classifier import ViTClassifier as ViTClassifier
    from vit_lightning.data import Digits as Digits
    from vit_lightning.data import ImageData as ImageData
    from vit_lightning.errors import UserError as UserError
    from vit_lightning.heads import ClassificationHead as ClassificationHead
    from vit_lightning.imagefolder import ImageFolder as ImageFolder
    from vit_lightning.optim import OptimizerConfig as OptimizerConfig
    from vit_lightning.patches import PatchEmbedding as PatchEmbedding
    from vit_lightning.torchvision_sets import CIFAR10 as CIFAR10
    from vit_lightning.torchvision_sets import CIFAR100 as CIFAR100
    from vit_lightning.torchvision_sets import TorchvisionSet as TorchvisionSet
    from vit_lightning.vit import ViT as ViT


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
