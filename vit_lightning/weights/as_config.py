"""The model of a config, class paths and arguments, that builds a given ViT."""

from __future__ import annotations

from typing import Any

from torch import nn

from vit_lightning.errors import UserError
from vit_lightning.models.attention import RotaryAttention, SeparateAttention
from vit_lightning.models.patches import LinearProjection
from vit_lightning.models.vit import ViT
from vit_lightning.weights.describe import describe
from vit_lightning.weights.options import ATTENTIONS, FEED_FORWARDS, POOLS, POSITIONS, SIZES, Options

_SAME = (*SIZES, "class_token", "distillation_token", "register_tokens", "final_norm", "representation_size")


def model_config(model: nn.Module | Options) -> dict[str, Any]:
    """Returns ``class_path`` and ``init_args`` of a ViT in plain data, as a config has them under ``model``.

    The network that a config builds from it has the same names of weights and, given the same weights, computes the
    same. Dropouts are left out.

    Args:
        model: a ViT of our blocks, or its options.

    Raises:
        UserError: it is another network, or has blocks that are not ours.
    """
    if isinstance(model, nn.Module) and not isinstance(model, ViT):
        raise UserError(f"{type(model).__name__} is no ViT of ours")
    options = describe(model) if isinstance(model, ViT) else model
    found: dict[str, Any] = {name: options[name] for name in _SAME}
    found |= {name: _side(options[name]) for name in ("image_size", "patch_size")}
    found |= {"layer_scale": options["layer_scale"], "embedding_norm": _norm(options["embedding_norm"])}
    found |= {"norm": _norm(options["norm"]), "pool": _pool(options), "positions": _positions(options["positions"])}
    attention, projection = None, None
    if isinstance(model, ViT):
        attention = model.encoder[0].get_submodule("attention.fn.attention")
        projection = model.patch_embedding.projection
    found["patch_projection"] = _projection(options, isinstance(projection, LinearProjection))
    found["attention"] = _attention(options, attention)
    found["feed_forward"] = _feed_forward(options)
    if options["feed_forward"] == "ista":
        found["block"] = _part("CrateBlock")
    return {"class_path": "vit_lightning.ViT", "init_args": {k: v for k, v in found.items() if v is not None}}


def _part(name: str, **arguments: Any) -> dict[str, Any]:
    given = {key: value for key, value in arguments.items() if value is not None}
    return {"class_path": f"vit_lightning.{name}"} | ({"init_args": given} if given else {})


def _side(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _norm(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    kind, _, eps = text.rpartition("_")
    return _part({"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[kind], eps=float(eps))


def _pool(options: Options) -> Any:
    name = options["pool"]
    if name in ("cls", "mean"):
        return name
    if name.startswith("attention"):
        return _part(
            "AttentionPool",
            prefix=name == "attention_all",
            expansion=options["pool_hidden"] / options["emb_size"],
            activation=options["pool_activation"],
            norm=_norm(options["pool_norm"]),
        )
    if name in POOLS:
        return _part(POOLS[name].__name__)
    return _part(POOLS[name.removesuffix("_all")].__name__, prefix=True)


def _positions(name: str) -> Any:
    if name.startswith("sincos2d"):
        _, form, temperature = name.split(" ")
        return _part("SinCos2dPositions", form=form, temperature=float(temperature))
    return name if name in ("learned", "none") else _part(POSITIONS[name].__name__)


def _projection(options: Options, linear: bool) -> dict[str, Any]:
    patch_norm, norm = _norm(options["patch_norm"]), _norm(options["patch_token_norm"])
    if linear or patch_norm is not None:
        return _part("LinearProjection", bias=options["patch_bias"], patch_norm=patch_norm, norm=norm)
    return _part("ConvProjection", bias=options["patch_bias"], norm=norm)


def _attention(options: Options, attention: Any) -> dict[str, Any]:
    kind = options["attention"]
    if kind == "divided_after_softmax":
        return _part("DividedAfterSoftmaxAttention", qkv_bias=options["qkv_bias"])
    usual = options["dim_head"] * options["num_heads"] == options["emb_size"]
    dim_head = None if usual else options["dim_head"]
    if kind == "mssa":
        return _part("MSSA", dim_head=dim_head, projection=options["projection"])
    qkv = {"qkv_bias": options["qkv_bias"], "qk_norm": _norm(options["qk_norm"])}
    if isinstance(attention, RotaryAttention):
        grid = attention.reference_grid
        return _part(
            "RotaryAttention",
            **qkv,
            temperature=attention.temperature,
            max_resolution=attention.max_resolution,
            reference_grid=None if grid is None else list(grid),
        )
    return _part(
        "SeparateAttention" if type(attention) is SeparateAttention else ATTENTIONS[kind].__name__,
        **qkv,
        dim_head=dim_head,
        scale=None if options["scale"] == options["dim_head"] ** -0.5 else options["scale"],
        norm=_norm(options["attention_norm"]),
        projection=options["projection"],
        projection_bias=options["projection_bias"],
    )


def _feed_forward(options: Options) -> dict[str, Any]:
    kind = options["feed_forward"]
    if kind == "ista":
        return _part("ISTA", step_size=options["step_size"], threshold=options["threshold"])
    return _part(
        FEED_FORWARDS[kind].__name__,
        expansion=options["hidden"] / options["emb_size"],
        activation=options["activation"],
        bias=options["feed_forward_bias"],
        norm=_norm(options["feed_forward_norm"]),
    )
