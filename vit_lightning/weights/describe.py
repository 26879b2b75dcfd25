"""The options of a ViT read from its modules, and its weights under the names that all implementations share."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.limits import refuse
from vit_lightning.models.attention import RotaryAttention, SeparateAttention
from vit_lightning.models.blocks import TransformerEncoderBlock, drop_path_rates
from vit_lightning.models.crate import ISTA, CrateBlock
from vit_lightning.models.feed_forward import ACTIVATIONS
from vit_lightning.models.heads import DistilledHead
from vit_lightning.models.patches import ConvProjection, LinearProjection
from vit_lightning.models.positions import LearnedPositions, SinCos2dPositions
from vit_lightning.models.vit import ViT
from vit_lightning.weights.options import (
    ATTENTIONS,
    FEED_FORWARDS,
    OPTIONS,
    POOLS,
    POSITIONS,
    SIZES,
    Kinds,
    Options,
    norm_text,
)


def describe(vit: ViT) -> Options:
    """Returns the options of a ViT.

    Raises:
        UserError: names blocks that are not ours, and blocks that differ from one another.
    """
    refuse(dict.fromkeys(_foreign("block", block) for block in vit.encoder if not _is_ours(block)))
    problems: list[str] = []
    sizes = {name: getattr(vit, name) for name in SIZES}
    options = {**OPTIONS, **sizes, **_embedding(vit, problems), **_head(vit, problems)}
    blocks = [_block(block, problems) for block in vit.encoder]
    rates = [block.pop("drop_path") for block in blocks]
    options |= {**blocks[0], "drop_path": vit.drop_path}
    for name in blocks[0]:
        if any(block.get(name) != blocks[0][name] for block in blocks):
            problems.append(f"{name}: the blocks of the encoder differ from one another")
    if rates != drop_path_rates(vit.drop_path, len(rates)):
        problems.append(f"drop_path={rates} of the blocks does not grow linearly to {vit.drop_path}")
    after_pool = _at(vit, "head.norm")
    last = _at(vit, "norm", after_pool)
    options["final_norm"] = "none" if last is None else "before_pool" if after_pool is None else "after_pool"
    if last is not None and (text := _norm(last, "norm", problems)) != options["norm"]:
        problems.append(f"norm={options['norm']} of the blocks and {text} at the end differ")
    refuse(dict.fromkeys(problems))
    return options


def _at(module: Any, path: str, default: Any = None) -> Any:
    """Returns the attribute at a dotted path, or the default where a part of the path is absent or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return default
    return module


def _norm(module: nn.Module | None, name: str, problems: list[str]) -> str | None:
    if module is None:
        return None
    if isinstance(module, nn.LayerNorm):
        return norm_text("layernorm", module.eps)
    if isinstance(module, nn.RMSNorm) and module.eps is not None:
        return norm_text("rmsnorm", module.eps)
    problems.append(_foreign(name, module))
    return None


def _foreign(name: str, module: object) -> str:
    return f"{name}: {type(module).__name__} is no block of ours, so no other family has it"


def _kind(module: nn.Module, kinds: Kinds, name: str, problems: list[str]) -> str | None:
    """Returns the name of a module's class."""
    kind = next((kind for kind, made in kinds.items() if type(module) is made), None)
    problems += [_foreign(name, module)] if kind is None else []
    return kind


def _embedding(vit: ViT, problems: list[str]) -> Options:
    embedding = vit.patch_embedding
    projection = embedding.projection
    if not isinstance(projection, ConvProjection | LinearProjection):
        problems.append(_foreign("patch_projection", projection))
    registers = _at(embedding, "register_tokens.token")
    return {
        "patch_bias": _at(projection, "conv.bias", _at(projection, "linear.bias")) is not None,
        "patch_norm": _norm(_at(projection, "patch_norm"), "patch_norm", problems),
        "patch_token_norm": _norm(_at(projection, "norm"), "patch_token_norm", problems),
        "class_token": _at(embedding, "class_token") is not None,
        "distillation_token": _at(embedding, "distillation_token") is not None,
        "register_tokens": 0 if registers is None else registers.shape[1],
        "positions": _positions(_at(embedding, "positions"), vit.prefix_tokens, problems),
        "embedding_norm": _norm(_at(embedding, "norm"), "embedding_norm", problems),
        "emb_dropout": _at(embedding, "dropout.p"),
        "patch_dropout": _at(embedding, "patch_dropout.p", 0.0),
    }


def _positions(positions: nn.Module | None, prefix_tokens: int, problems: list[str]) -> str | None:
    if positions is None:
        return "none"
    if type(positions) is SinCos2dPositions:
        return f"sincos2d {positions.form} {float(positions.temperature)!r}"
    kind = _kind(positions, POSITIONS, "positions", problems)
    return kind if prefix_tokens or kind is None else "learned"  # without such tokens both are the same


def _is_ours(block: nn.Module) -> bool:
    ista = isinstance(_at(block, "feed_forward.feed_forward"), ISTA)
    return type(block) is (CrateBlock if ista else TransformerEncoderBlock)


def _block(block: nn.Module, problems: list[str]) -> Options:
    attention, feed_forward = (_at(block, f"{name}.fn", _at(block, name)) for name in ("attention", "feed_forward"))
    norms = {_norm(_at(half, "norm"), "norm", problems) for half in (attention, feed_forward)}
    if len(norms) > 1:
        problems.append(f"norm: the two of a block differ ({', '.join(map(str, norms))})")
    return {
        "norm": norms.pop(),
        "layer_scale": _at(attention, "layer_scale.init"),
        "drop_path": _at(attention, "drop_path.p", 0.0),
        **_attention(attention.attention, problems),
        **_feed_forward(feed_forward.feed_forward, problems),
    }


def _attention(attention: Any, problems: list[str]) -> Options:
    rotary = isinstance(attention, RotaryAttention)
    softmax = type(attention) in (SeparateAttention, RotaryAttention)
    kind = "softmax" if softmax else _kind(attention, ATTENTIONS, "attention", problems)
    if kind is None:
        return {}
    layer = next(iter(attention.children()))
    return {
        "attention": kind,
        "rotary": _rotary(attention) if rotary else None,
        "dim_head": attention.dim_head,
        "scale": attention.attend.scale,
        "qkv_bias": layer.bias is not None,
        "qk_norm": _norm(attention.query_norm, "qk_norm", problems),
        "attention_norm": _norm(attention.norm, "attention_norm", problems),
        "projection": attention.projection is not None,
        "projection_bias": attention.projection is None or attention.projection.bias is not None,
        "dropout": attention.attend.dropout,
        "projection_dropout": attention.projection_dropout.p if attention.projection is not None else 0.0,
    }


def _rotary(attention: RotaryAttention) -> str:
    key = "temperature" if attention.max_resolution is None else "max_resolution"
    return f"{key} {getattr(attention, key)}, reference_grid {attention.reference_grid}"


def _activation(module: nn.Module, problems: list[str]) -> str | None:
    for name, make in ACTIVATIONS.items():
        ours = make()
        if type(ours) is type(module) and ours.extra_repr() == module.extra_repr():
            return name
    problems.append(_foreign("activation", module))
    return None


def _feed_forward(part: Any, problems: list[str]) -> Options:
    kind = _kind(part, FEED_FORWARDS, "feed_forward", problems)
    if kind is None:
        return {}
    if isinstance(part, ISTA):
        sizes = {"hidden": len(part.dictionary), "step_size": part.step_size, "threshold": part.threshold}
        return {"feed_forward": kind, **sizes}
    return {
        "feed_forward": kind,
        "hidden": part.contract.in_features,
        "activation": _activation(part.activation, problems),
        "feed_forward_bias": part.contract.bias is not None,
        "feed_forward_norm": _norm(_at(part, "norm"), "feed_forward_norm", problems),
        "feed_forward_dropout": part.dropout.p,
        "output_dropout": part.output_dropout.p,
    }


def _head(vit: ViT, problems: list[str]) -> Options:
    options: Options = {
        "head_dropout": _at(vit.head, "dropout.p", 0.0),
        "representation_size": _at(vit.head, "representation.linear.out_features"),
    }
    if isinstance(vit.head, DistilledHead):
        return options
    pool: Any = vit.head.pool
    kind = _kind(pool, POOLS, "pool", problems)
    if kind is not None:
        name = kind + ("_all" if getattr(pool, "prefix", False) else "")
        options["pool"] = name if vit.prefix_tokens else name.removesuffix("_all")
    if kind == "attention":
        options["pool_hidden"] = pool.feed_forward.contract.in_features
        options["pool_activation"] = _activation(pool.feed_forward.activation, problems)
        options["pool_norm"] = _norm(pool.norm, "pool_norm", problems)
    return options


def canonical_state(vit: ViT) -> dict[str, Tensor]:
    """Returns the weights under the names that a ViT of ``build(describe(vit))`` has."""
    state = dict(vit.state_dict())
    if isinstance(positions := _at(vit, "patch_embedding.positions"), LearnedPositions):
        state["patch_embedding.positions.table"] = positions.rows().detach()  # for the images' size of now
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
