"""The options of a ViT as plain data, which our models and other people's share, and a ViT built from them.

Implementations of the same function have the same options: one layer or three for queries, keys and values, a
convolution or a matrix over patches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from vit_lightning.models import heads
from vit_lightning.models.attention import DividedAfterSoftmaxAttention, MultiHeadAttention
from vit_lightning.models.blocks import LayerNorm, RMSNorm, TransformerEncoderBlock
from vit_lightning.models.crate import ISTA, MSSA, CrateBlock
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.patches import ConvProjection, LinearProjection
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions, SinCos2dPositions
from vit_lightning.models.vit import ViT

Options = dict[str, Any]

OPTIONS: Options = {
    "image_size": (224, 224),
    "patch_size": (16, 16),
    "in_channels": 3,
    "num_classes": 1000,
    "emb_size": 768,
    "depth": 12,
    "num_heads": 12,
    "patch_bias": True,
    "patch_norm": None,  # of the pixels of a patch
    "patch_token_norm": None,  # of the projected patches
    "class_token": True,
    "distillation_token": False,
    "register_tokens": 0,
    "positions": "learned",
    "rotary": None,
    "embedding_norm": None,
    "norm": "layernorm_1e-06",
    "final_norm": "before_pool",
    "attention": "softmax",
    "dim_head": 64,
    "scale": 0.125,
    "qkv_bias": True,
    "qk_norm": None,
    "attention_norm": None,
    "projection": True,
    "projection_bias": True,
    "feed_forward": "mlp",
    "hidden": 3072,
    "activation": "gelu",
    "feed_forward_bias": True,
    "feed_forward_norm": None,
    "step_size": None,
    "threshold": None,
    "layer_scale": None,
    "pool": "cls",
    "pool_hidden": None,
    "pool_activation": None,
    "pool_norm": None,
    "representation_size": None,
    "emb_dropout": 0.0,
    "patch_dropout": 0.0,
    "dropout": 0.0,  # of attention weights
    "projection_dropout": 0.0,
    "feed_forward_dropout": 0.0,
    "output_dropout": 0.0,  # of the feed-forward part
    "head_dropout": 0.0,
    "drop_path": 0.0,
}
"""All options, with the values of ViT-B/16; a norm is its kind and epsilon, such as layernorm_1e-06."""

Kinds = dict[str, Callable[..., nn.Module]]

NORMS: Kinds = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
POSITIONS: Kinds = {"learned": LearnedPositions, "learned_patches": LearnedPatchPositions}
ATTENTIONS: Kinds = {"softmax": MultiHeadAttention, "divided_after_softmax": DividedAfterSoftmaxAttention, "mssa": MSSA}
FEED_FORWARDS: Kinds = {"mlp": FeedForwardBlock, "swiglu": SwiGLU, "swiglu_packed": PackedSwiGLU, "ista": ISTA}
POOLS: Kinds = {
    "cls": heads.ClassTokenPool,
    "cls_and_mean": heads.ClassTokenAndMeanPool,
    "mean": heads.MeanPool,
    "mean_all": heads.MeanAllPool,
    "max": heads.MaxPool,
    "mean_max": heads.MeanMaxPool,
    "attention": heads.AttentionPool,
}
"""max_all, mean_max_all and attention_all are those that pool the tokens before the patches too."""

DROPOUTS = ("emb_dropout", "projection_dropout", "feed_forward_dropout", "output_dropout")
"""Dropouts that most families set to one value: of the embedded patches, inside the MLP, and of both branches."""

SIZES = ("image_size", "patch_size", "in_channels", "num_classes", "emb_size", "depth", "num_heads")
_VIT_ARGUMENTS = (
    *SIZES,
    *("class_token", "distillation_token", "register_tokens", "final_norm", "layer_scale", "representation_size"),
    *("emb_dropout", "patch_dropout", "head_dropout", "drop_path"),
)
"""Options that are arguments of ViT as they are."""

_ATTENTION_ARGUMENTS = {
    "softmax": ("dim_head", "projection", "projection_bias", "scale", "qkv_bias", "dropout", "projection_dropout"),
    "divided_after_softmax": ("qkv_bias", "dropout", "projection_dropout"),
    "mssa": ("dim_head", "projection", "dropout", "projection_dropout"),
}


def norm_text(kind: str, eps: float) -> str:
    return f"{kind}_{eps!r}"


def _make_norm(text: str | None) -> Any:
    """Returns what makes the norm of a text such as layernorm_1e-06, or None."""
    if text is None:
        return None
    kind, _, eps = text.rpartition("_")
    return partial(NORMS[kind], eps=float(eps))


def build(options: Options) -> ViT:
    """Returns a ViT of these options with newly initialised weights.

    Raises:
        UserError: names options that do not fit together.
    """
    pixels = _make_norm(options["patch_norm"])
    projection = ConvProjection if pixels is None else partial(LinearProjection, patch_norm=pixels)
    return ViT(
        **{name: options[name] for name in _VIT_ARGUMENTS},
        pool=_make_pool(options),
        patch_projection=partial(projection, bias=options["patch_bias"], norm=_make_norm(options["patch_token_norm"])),
        positions=_make_positions(options["positions"]),
        norm=_make_norm(options["norm"]),
        embedding_norm=_make_norm(options["embedding_norm"]),
        block=CrateBlock if options["feed_forward"] == "ista" else TransformerEncoderBlock,
        attention=_make_attention(options),
        feed_forward=_make_feed_forward(options),
    )


def _make_pool(options: Options) -> Any:
    name = options["pool"]
    if name in ("cls", "mean"):
        return name
    pool = POOLS.get(name) or partial(POOLS[name.removesuffix("_all")], prefix=True)
    if not name.startswith("attention"):
        return pool
    return partial(
        pool,
        prefix=name == "attention_all",
        expansion=options["pool_hidden"] / options["emb_size"],
        activation=options["pool_activation"],
        norm=_make_norm(options["pool_norm"]),
    )


def _make_positions(name: str) -> Any:
    if not name.startswith("sincos2d"):
        return POSITIONS.get(name, name)
    form: Any
    _, form, temperature = name.split(" ")
    return partial(SinCos2dPositions, form=form, temperature=float(temperature))


def _make_attention(options: Options) -> Any:
    kind = options["attention"]
    arguments = {name: options[name] for name in _ATTENTION_ARGUMENTS[kind]}
    if kind == "softmax":
        arguments |= {"qk_norm": _make_norm(options["qk_norm"]), "norm": _make_norm(options["attention_norm"])}
    return partial(ATTENTIONS[kind], **arguments)


def _make_feed_forward(options: Options) -> Any:
    kind = options["feed_forward"]
    if kind == "ista":
        return partial(ISTA, step_size=options["step_size"], threshold=options["threshold"])
    return partial(
        FEED_FORWARDS[kind],
        expansion=options["hidden"] / options["emb_size"],
        activation=options["activation"],
        bias=options["feed_forward_bias"],
        norm=_make_norm(options["feed_forward_norm"]),
        dropout=options["feed_forward_dropout"],
        **({"output_dropout": options["output_dropout"]} if kind == "mlp" else {}),
    )
