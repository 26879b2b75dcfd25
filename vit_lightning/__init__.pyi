"""The public names, each where it is defined: ``vit_lightning.ViT`` is ``vit_lightning.models.vit.ViT``.

``__init__.py`` reads this file when it is imported, editors and mypy read it as a stub. A new public name is one line.
"""

from vit_lightning.commands.fit import fit as fit
from vit_lightning.commands.load import load as load
from vit_lightning.config.experiment import Experiment as Experiment
from vit_lightning.config.resolve import resolve as resolve
from vit_lightning.data.augment import Augmentation as Augmentation
from vit_lightning.data.augment import HorizontalFlip as HorizontalFlip
from vit_lightning.data.augment import RandomAffine as RandomAffine
from vit_lightning.data.augment import RandomCrop as RandomCrop
from vit_lightning.data.augment import RandomErasing as RandomErasing
from vit_lightning.data.augment import RandomResizedCrop as RandomResizedCrop
from vit_lightning.data.base import ImageData as ImageData
from vit_lightning.data.batch_transform import CutMix as CutMix
from vit_lightning.data.batch_transform import MixUp as MixUp
from vit_lightning.data.hugging_face import HuggingFaceSet as HuggingFaceSet
from vit_lightning.data.image_files import ImageFiles as ImageFiles
from vit_lightning.data.image_files import ImageFolder as ImageFolder
from vit_lightning.data.per_image import PerImage as PerImage
from vit_lightning.data.policies import AutoAugment as AutoAugment
from vit_lightning.data.policies import RandAugment as RandAugment
from vit_lightning.data.policies import ThreeAugment as ThreeAugment
from vit_lightning.data.policies import TimmRandAugment as TimmRandAugment
from vit_lightning.data.small_sets import CIFAR10 as CIFAR10
from vit_lightning.data.small_sets import CIFAR100 as CIFAR100
from vit_lightning.data.small_sets import Digits as Digits
from vit_lightning.data.small_sets import TorchvisionSet as TorchvisionSet
from vit_lightning.data.wrapped import WrappedDataModule as WrappedDataModule
from vit_lightning.data.wrapped import WrappedDataset as WrappedDataset
from vit_lightning.errors import UserError as UserError
from vit_lightning.models.attention import DividedAfterSoftmaxAttention as DividedAfterSoftmaxAttention
from vit_lightning.models.attention import MultiHeadAttention as MultiHeadAttention
from vit_lightning.models.attention import RotaryAttention as RotaryAttention
from vit_lightning.models.attention import SeparateAttention as SeparateAttention
from vit_lightning.models.blocks import CompactBlock as CompactBlock
from vit_lightning.models.blocks import ParallelBlock as ParallelBlock
from vit_lightning.models.blocks import PostNormBlock as PostNormBlock
from vit_lightning.models.blocks import ResPostNormBlock as ResPostNormBlock
from vit_lightning.models.blocks import SandwichNormBlock as SandwichNormBlock
from vit_lightning.models.blocks import TransformerEncoder as TransformerEncoder
from vit_lightning.models.blocks import TransformerEncoderBlock as TransformerEncoderBlock
from vit_lightning.models.crate import ISTA as ISTA
from vit_lightning.models.crate import MSSA as MSSA
from vit_lightning.models.crate import CrateBlock as CrateBlock
from vit_lightning.models.feed_forward import FeedForwardBlock as FeedForwardBlock
from vit_lightning.models.feed_forward import PackedSwiGLU as PackedSwiGLU
from vit_lightning.models.feed_forward import SwiGLU as SwiGLU
from vit_lightning.models.heads import AttentionPool as AttentionPool
from vit_lightning.models.heads import ClassificationHead as ClassificationHead
from vit_lightning.models.heads import ClassTokenAndMeanPool as ClassTokenAndMeanPool
from vit_lightning.models.heads import MaxPool as MaxPool
from vit_lightning.models.heads import MeanAllPool as MeanAllPool
from vit_lightning.models.heads import MeanMaxPool as MeanMaxPool
from vit_lightning.models.heads import SequencePool as SequencePool
from vit_lightning.models.layers import BatchNorm as BatchNorm
from vit_lightning.models.layers import LayerNorm as LayerNorm
from vit_lightning.models.layers import ResidualAdd as ResidualAdd
from vit_lightning.models.layers import RMSNorm as RMSNorm
from vit_lightning.models.patches import ConvProjection as ConvProjection
from vit_lightning.models.patches import ConvTokenizer as ConvTokenizer
from vit_lightning.models.patches import LinearProjection as LinearProjection
from vit_lightning.models.patches import PatchEmbedding as PatchEmbedding
from vit_lightning.models.positions import LearnedPatchPositions as LearnedPatchPositions
from vit_lightning.models.positions import LearnedPositions as LearnedPositions
from vit_lightning.models.positions import SinCos2dPositions as SinCos2dPositions
from vit_lightning.models.vit import ViT as ViT
from vit_lightning.random_keys import sample_keys as sample_keys
from vit_lightning.storage.metrics import read_metrics as read_metrics
from vit_lightning.training.classifier import ViTClassifier as ViTClassifier
from vit_lightning.training.ema import EMAConfig as EMAConfig
from vit_lightning.training.fast_paths import accelerate as accelerate
from vit_lightning.training.losses import Distillation as Distillation
from vit_lightning.training.losses import DistillationConfig as DistillationConfig
from vit_lightning.training.losses import LossConfig as LossConfig
from vit_lightning.training.losses import Teacher as Teacher
from vit_lightning.training.mae import MAE as MAE
from vit_lightning.training.optim import OptimizerConfig as OptimizerConfig
from vit_lightning.training.probes import KNNProbe as KNNProbe
from vit_lightning.weights.convert import from_reference as from_reference
from vit_lightning.weights.convert import to_reference as to_reference
from vit_lightning.weights.options import model_config as model_config

__version__: str
__all__: list[str]
