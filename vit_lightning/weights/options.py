"""The options of a ViT as plain data, which our models and other people's share; a ViT and a config made from them.

Implementations of the same function have the same options: one layer or three for queries, keys and values, a
convolution or a matrix over patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from vit_lightning.models import heads
from vit_lightning.models.attention import DividedAfterSoftmaxAttention, MultiHeadAttention, RotaryAttention
from vit_lightning.models.blocks import LayerNorm, RMSNorm
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


class Rotary(NamedTuple):
    """Arguments of RotaryAttention."""

    temperature: float
    max_resolution: float | None
    reference_grid: list[int] | None


Kinds = dict[str, type[nn.Module]]

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
_ARGUMENTS = (
    *("in_channels", "num_classes", "emb_size", "depth", "num_heads", "class_token", "distillation_token"),
    *("register_tokens", "final_norm", "representation_size", "layer_scale"),
    *("emb_dropout", "patch_dropout", "head_dropout", "drop_path"),
)
"""Options that are arguments of ViT as they are."""


class Part(NamedTuple):
    """A class of ours with arguments, which may be such parts themselves; an argument of None is left out."""

    kind: type[nn.Module]
    arguments: Mapping[str, Any]

    def factory(self) -> Callable[..., nn.Module]:
        """Returns what makes the part from the arguments that ViT gives it."""
        given = {name: value for name, value in self.arguments.items() if value is not None}
        return partial(self.kind, **{name: _made(value) for name, value in given.items()})

    def config(self) -> dict[str, Any]:
        """Returns the part as a config names it, in plain data, without dropouts."""
        stay = {name: value for name, value in self.arguments.items() if value is not None and not _is_dropout(name)}
        arguments = {name: value.config() if isinstance(value, Part) else value for name, value in stay.items()}
        return {"class_path": f"vit_lightning.{self.kind.__name__}"} | ({"init_args": arguments} if arguments else {})


def _made(value: Any) -> Any:
    return value.factory() if isinstance(value, Part) else value


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name == "drop_path"


def norm_text(kind: str, eps: float) -> str:
    return f"{kind}_{eps!r}"


def _norm(text: str | None) -> Part | None:
    """Returns the norm of a text such as layernorm_1e-06."""
    if text is None:
        return None
    kind, _, eps = text.rpartition("_")
    return Part(NORMS[kind], {"eps": float(eps)})


def build(options: Options) -> ViT:
    """Returns a ViT of these options with newly initialised weights.

    Raises:
        UserError: names options that do not fit together.
    """
    vit: Any = as_part(options).factory()()
    return vit  # type: ignore[no-any-return]


def as_part(options: Options) -> Part:
    """Returns ViT with the arguments that these options are."""
    ista = options["feed_forward"] == "ista"
    patch_norm, norm = _norm(options["patch_norm"]), _norm(options["patch_token_norm"])
    projection = ConvProjection if patch_norm is None else LinearProjection
    return Part(
        ViT,
        {
            **{name: options[name] for name in _ARGUMENTS},
            **{name: _side(options[name]) for name in ("image_size", "patch_size")},
            "embedding_norm": _norm(options["embedding_norm"]),
            "norm": _norm(options["norm"]),
            "pool": _pool(options),
            "positions": _positions(options["positions"]),
            "patch_projection": Part(
                projection, {"bias": options["patch_bias"], "patch_norm": patch_norm, "norm": norm}
            ),
            "attention": _attention(options),
            "feed_forward": _feed_forward(options),
            "block": Part(CrateBlock, {}) if ista else None,
        },
    )


def _side(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _pool(options: Options) -> Any:
    name = options["pool"]
    if name in ("cls", "mean"):
        return name
    if not name.startswith("attention"):
        return Part(POOLS.get(name) or POOLS[name.removesuffix("_all")], {"prefix": None if name in POOLS else True})
    expansion, norm = options["pool_hidden"] / options["emb_size"], _norm(options["pool_norm"])
    given = {"prefix": name == "attention_all", "expansion": expansion}
    return Part(POOLS["attention"], {**given, "activation": options["pool_activation"], "norm": norm})


def _positions(name: str) -> Any:
    if name.startswith("sincos2d"):
        _, form, temperature = name.split(" ")
        return Part(SinCos2dPositions, {"form": form, "temperature": float(temperature)})
    return name if name in ("learned", "none") else Part(POSITIONS[name], {})


def _attention(options: Options) -> Part:
    kind = options["attention"]
    usual = options["dim_head"] * options["num_heads"] == options["emb_size"]
    sizes = {"dim_head": None if usual else options["dim_head"], "projection": options["projection"]}
    given = {name: options[name] for name in ("dropout", "projection_dropout")}
    if kind == "mssa":
        return Part(MSSA, {**sizes, **given})
    given |= {"qkv_bias": options["qkv_bias"]}
    if kind == "divided_after_softmax":
        return Part(DividedAfterSoftmaxAttention, given)
    given |= {"qk_norm": _norm(options["qk_norm"])}
    if options["rotary"] is not None:
        return Part(RotaryAttention, {**given, **options["rotary"]._asdict()})
    scale = None if options["scale"] == options["dim_head"] ** -0.5 else options["scale"]
    given |= {"scale": scale, "norm": _norm(options["attention_norm"])}
    return Part(MultiHeadAttention, {**sizes, **given, "projection_bias": options["projection_bias"]})


def _feed_forward(options: Options) -> Part:
    kind = options["feed_forward"]
    if kind == "ista":
        return Part(ISTA, {"step_size": options["step_size"], "threshold": options["threshold"]})
    given = {
        "expansion": options["hidden"] / options["emb_size"],
        "activation": options["activation"],
        "bias": options["feed_forward_bias"],
        "norm": _norm(options["feed_forward_norm"]),
        "dropout": options["feed_forward_dropout"],
        "output_dropout": options["output_dropout"] if kind == "mlp" else None,
    }
    return Part(FEED_FORWARDS[kind], given)
