"""The options of a ViT read from its modules, and its weights under the names that all ways of writing share."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.attention import DividedAfterSoftmaxAttention, RotaryAttention, SeparateAttention
from vit_lightning.models.blocks import ACTIVATIONS, DropPath, FeedForwardBlock, LayerScale, MultiHeadAttention
from vit_lightning.models.crate import ISTA, MSSA
from vit_lightning.models.feed_forward import PackedSwiGLU, SwiGLU
from vit_lightning.models.heads import (
    AttentionPool,
    ClassTokenAndMeanPool,
    ClassTokenPool,
    DistilledHead,
    MaxPool,
    MeanAllPool,
    MeanMaxPool,
    MeanPool,
)
from vit_lightning.models.patches import ConvProjection, LinearProjection
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions, SinCos2dPositions
from vit_lightning.models.vit import ViT, drop_path_rates
from vit_lightning.weights.options import OPTIONS, Options, norm_text


def describe(vit: ViT) -> Options:
    """The options of a ViT, read from its modules.

    Raises:
        UserError: names blocks that are not ours, and blocks that differ from one another.
    """
    problems: list[str] = []
    options = {
        **OPTIONS,
        **{name: getattr(vit, name) for name in ("image_size", "patch_size", "in_channels", "num_classes")},
        **{name: getattr(vit, name) for name in ("emb_size", "depth", "num_heads")},
        **_embedding(vit, problems),
        **_head(vit, problems),
    }
    blocks = [_block(block, problems) for block in vit.encoder]
    rates = [block.pop("drop_path") for block in blocks]
    options |= {**blocks[0], "drop_path": vit.drop_path}
    for name in blocks[0]:
        if any(block.get(name) != blocks[0][name] for block in blocks):
            problems.append(f"{name}: the blocks of the encoder differ from one another")
    if rates != drop_path_rates(vit.drop_path, len(rates)):
        problems.append(f"drop_path={rates} of the blocks does not grow linearly to {vit.drop_path}")
    if options["final_norm"] is None:
        options["final_norm"] = "before_pool" if "norm" in dict(vit.named_children()) else "none"
    last = dict(vit.named_children()).get("norm", getattr(vit.head, "norm", None))
    if last is not None and (text := _norm(last, "norm", problems)) != options["norm"]:
        problems.append(f"norm={options['norm']} of the blocks and {text} at the end differ")
    if problems:
        raise UserError(dict.fromkeys(problems))
    return options


def _norm(module: nn.Module | None, name: str, problems: list[str]) -> str | None:
    if module is None:
        return None
    if isinstance(module, nn.LayerNorm):
        return norm_text("layernorm", module.eps)
    if isinstance(module, nn.RMSNorm) and module.eps is not None:
        return norm_text("rmsnorm", module.eps)
    problems.append(_foreign(name, module))
    return None


def _foreign(name: str, module: nn.Module | None) -> str:
    return f"{name}: {type(module).__name__} is no block of ours, and so nothing that another family could have"


def _child(module: nn.Module, name: str) -> Any:
    return dict(module.named_children()).get(name)


def _embedding(vit: ViT, problems: list[str]) -> Options:
    embedding = vit.patch_embedding
    projection, positions = _child(embedding, "projection"), _child(embedding, "positions")
    layer = _child(projection, "conv") or _child(projection, "linear")
    if not isinstance(projection, ConvProjection | LinearProjection):
        problems.append(_foreign("patch_projection", projection))
    return {
        "patch_bias": getattr(layer, "bias", None) is not None,
        "patch_norm": _norm(_child(projection, "patch_norm"), "patch_norm", problems),
        "patch_token_norm": _norm(_child(projection, "norm"), "patch_token_norm", problems),
        "class_token": _child(embedding, "class_token") is not None,
        "distillation_token": _child(embedding, "distillation_token") is not None,
        "register_tokens": 0
        if (registers := _child(embedding, "register_tokens")) is None
        else registers.token.shape[1],
        "positions": _positions(positions, vit.prefix_tokens, problems),
        "embedding_norm": _norm(_child(embedding, "norm"), "embedding_norm", problems),
        "emb_dropout": _child(embedding, "dropout").p,
        "patch_dropout": 0.0 if (dropout := _child(embedding, "patch_dropout")) is None else dropout.p,
    }


def _positions(positions: nn.Module | None, prefix_tokens: int, problems: list[str]) -> str:
    if positions is None:
        return "none"
    if type(positions) is LearnedPositions or (type(positions) is LearnedPatchPositions and not prefix_tokens):
        return "learned"
    if type(positions) is LearnedPatchPositions:
        return "learned_patches"
    if type(positions) is SinCos2dPositions:
        return f"sincos2d {positions.form} {float(positions.temperature)!r}"
    problems.append(_foreign("positions", positions))
    return "none"


def _block(block: nn.Module, problems: list[str]) -> Options:
    halves = {name: getattr(half, "fn", half) for name, half in block.named_children()}
    attention, feed_forward = halves["attention"], halves["feed_forward"]
    scale = _child(attention, "layer_scale")
    drop = _child(attention, "drop_path")
    assert scale is None or isinstance(scale, LayerScale)
    assert drop is None or isinstance(drop, DropPath)
    norms = {_norm(_child(half, "norm"), "norm", problems) for half in (attention, feed_forward)}
    if len(norms) > 1:
        problems.append(f"norm: the two of a block differ ({', '.join(map(str, norms))})")
    return {
        "norm": norms.pop(),
        "layer_scale": None if scale is None else scale.init,
        "drop_path": 0.0 if drop is None else drop.p,
        **_attention(_child(attention, "attention"), problems),
        **_feed_forward(_child(feed_forward, "feed_forward"), problems),
    }


_ATTENTIONS: dict[type[nn.Module], str] = {
    MultiHeadAttention: "softmax",
    SeparateAttention: "softmax",
    RotaryAttention: "softmax",
    DividedAfterSoftmaxAttention: "divided_after_softmax",
    MSSA: "mssa",
}


def _attention(attention: Any, problems: list[str]) -> Options:
    if type(attention) not in _ATTENTIONS:
        problems.append(_foreign("attention", attention))
        return {}
    layer = next(iter(attention.children()))
    return {
        "attention": _ATTENTIONS[type(attention)],
        "rotary": _rotary(attention) if isinstance(attention, RotaryAttention) else None,
        "dim_head": attention.dim_head,
        "scale": attention.scale,
        "qkv_bias": layer.bias is not None,
        "qk_norm": _norm(attention.query_norm, "qk_norm", problems),
        "attention_norm": _norm(attention.norm, "attention_norm", problems),
        "projection": attention.projection is not None,
        "projection_bias": attention.projection is None or attention.projection.bias is not None,
        "dropout": attention.dropout,
        "projection_dropout": attention.projection_dropout.p if attention.projection is not None else 0.0,
    }


def _rotary(attention: RotaryAttention) -> str:
    if attention.max_resolution is not None:
        return f"max_resolution {attention.max_resolution}, reference_grid {attention.reference_grid}"
    return f"temperature {attention.temperature}, reference_grid {attention.reference_grid}"


def _activation(module: nn.Module, problems: list[str]) -> str | None:
    for name, make in ACTIVATIONS.items():
        ours = make()
        if type(ours) is type(module) and ours.extra_repr() == module.extra_repr():
            return name
    problems.append(_foreign("activation", module))
    return None


def _feed_forward(part: Any, problems: list[str]) -> Options:
    kinds = {FeedForwardBlock: "mlp", SwiGLU: "swiglu", PackedSwiGLU: "swiglu_packed", ISTA: "ista"}
    if type(part) not in kinds:
        problems.append(_foreign("feed_forward", part))
        return {}
    if isinstance(part, ISTA):
        return {
            "feed_forward": "ista",
            "hidden": len(part.dictionary),
            "step_size": part.step_size,
            "threshold": part.threshold,
        }
    return {
        "feed_forward": kinds[type(part)],
        "hidden": part.contract.in_features,
        "activation": _activation(part.activation, problems),
        "feed_forward_bias": part.contract.bias is not None,
        "feed_forward_norm": _norm(getattr(part, "norm", None), "feed_forward_norm", problems),
        "feed_forward_dropout": part.dropout.p,
        "output_dropout": part.output_dropout.p,
    }


def _head(vit: ViT, problems: list[str]) -> Options:
    head = vit.head
    if isinstance(head, DistilledHead):
        return {"pool": "cls", "head_dropout": head.dropout.p, "final_norm": None}
    dropout, representation = _child(head, "dropout"), _child(head, "representation")
    return {
        **_pool(_child(head, "pool"), vit.prefix_tokens, problems),
        "final_norm": "after_pool" if _child(head, "norm") is not None else None,
        "head_dropout": 0.0 if dropout is None else dropout.p,
        "representation_size": None if representation is None else representation.linear.out_features,
    }


def _pool(pool: Any, prefix_tokens: int, problems: list[str]) -> Options:
    names = {
        ClassTokenPool: "cls",
        ClassTokenAndMeanPool: "cls_and_mean",
        MeanPool: "mean",
        MeanAllPool: "mean_all",
        MaxPool: "max",
        MeanMaxPool: "mean_max",
        AttentionPool: "attention",
    }
    if type(pool) not in names:
        problems.append(_foreign("pool", pool))
        return {}
    name = names[type(pool)] + ("_all" if getattr(pool, "prefix", False) else "")
    if not prefix_tokens:  # then over all tokens is over the patches
        name = name.removesuffix("_all")
    if type(pool) is not AttentionPool:
        return {"pool": name}
    hidden = _child(pool.feed_forward, "contract")
    return {
        "pool": name,
        "pool_hidden": hidden.in_features,
        "pool_activation": _activation(_child(pool.feed_forward, "activation"), problems),
        "pool_norm": _norm(pool.norm, "pool_norm", problems),
    }


def canonical_state(vit: ViT) -> dict[str, Tensor]:
    """The weights under the names that a ViT of ``build(describe(vit))`` has."""
    state = dict(vit.state_dict())
    projection = "patch_embedding.projection"
    if isinstance(vit.patch_embedding.projection, LinearProjection) and f"{projection}.patch_norm.weight" not in state:
        height, width = vit.patch_size
        matrix = state.pop(f"{projection}.linear.weight")
        state[f"{projection}.conv.weight"] = rearrange(matrix, "e (c p1 p2) -> e c p1 p2", p1=height, p2=width)
        if f"{projection}.linear.bias" in state:
            state[f"{projection}.conv.bias"] = state.pop(f"{projection}.linear.bias")
    for name, module in vit.named_modules():
        if isinstance(module, SeparateAttention):
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{name}.{part}.{kind}", None) for part in ("queries", "keys", "values")]
                if parts[0] is not None:
                    state[f"{name}.qkv.{kind}"] = torch.cat([part for part in parts if part is not None])
    return state
