"""The options of a ViT, by its modules and its tensors; its weights under canonical names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.models.attention import RotaryAttention, SeparateAttention, TorchAttention
from vit_lightning.models.blocks import drop_path_rates
from vit_lightning.models.crate import ISTA, CrateBlock
from vit_lightning.models.feed_forward import ACTIVATIONS
from vit_lightning.models.heads import DistilledHead
from vit_lightning.models.layers import BatchNorm
from vit_lightning.models.patches import ConvProjection, LinearProjection
from vit_lightning.models.positions import LearnedPositions, SinCos2dPositions
from vit_lightning.models.vit import ViT
from vit_lightning.weights.options import (
    ATTENTIONS,
    BLOCKS,
    EMBEDDING,
    FEED_FORWARDS,
    PATCHES,
    POOLS,
    POSITIONS,
    TABLE,
    Kinds,
    Options,
    Part,
    Rotary,
    ShapeReader,
    as_part,
    norm_text,
    read_as,
)

ALIKE = (SeparateAttention, TorchAttention)
"""Attentions that are the function of MultiHeadAttention, with other tensors."""


def describe(vit: ViT) -> Options:
    """Returns the options of a ViT.

    Raises:
        UserError: names parts that are not ours, and blocks that differ from one another.
    """
    refuse(dict.fromkeys(_problems(vit)))
    shapes = {read_as(name): tuple(tensor.shape) for name, tensor in canonical_state(vit).items()}
    modules = _modules(vit)
    norms = {name: _norm(module) for name, module in modules.items()}
    blocks = [_read(modules, ShapeReader(shapes, norms, block=number)) for number in range(len(vit.encoder))]
    refuse(
        f"{name}: the blocks of the encoder differ from one another"
        for name in blocks[0]
        if any(block[name] != blocks[0][name] for block in blocks)
    )
    positions = _positions(modules.get(f"{EMBEDDING}.positions"), vit.prefix_tokens)
    pool = "cls" if isinstance(vit.head, DistilledHead) else _pool(vit.head.pool, vit.prefix_tokens)
    return {**blocks[0], "positions": positions, "pool": pool}


def _modules(vit: ViT) -> dict[str, nn.Module]:
    """Returns all modules by the names under which the table of options looks for them."""
    return {read_as(name): module for name, module in vit.named_modules()}


def _read(modules: Mapping[str, nn.Module], reader: ShapeReader) -> Options:
    """Returns the options that modules and tensors tell, those of a block for the reader's."""
    found: Options = {}
    for option in TABLE:
        value = _at(modules, option.module.replace("*", str(reader.block))) if option.module else None
        if value is None:
            value = option.default if option.tensors is None else option.tensors(reader)
        found[option.name] = _activation(value) if isinstance(value, nn.Module) else value
    block, attention = modules[f"encoder.{reader.block}"], modules[f"encoder.{reader.block}.attention.fn.attention"]
    found["block"] = "pre_norm" if isinstance(block, CrateBlock) else _kind(block, BLOCKS)
    if isinstance(attention, TorchAttention):
        found |= {"dim_head": attention.head_dim, "scale": attention.head_dim**-0.5, "dropout": attention.dropout}
    if isinstance(attention, RotaryAttention):
        grid = None if attention.reference_grid is None else list(attention.reference_grid)
        found["rotary"] = Rotary(attention.temperature, attention.max_resolution, grid, attention.centred)
    elif not isinstance(attention, ALIKE):
        found["attention"] = _kind(attention, ATTENTIONS)
    if not found["projection"]:
        found["projection_dropout"] = 0.0
    return found


def _at(modules: Mapping[str, nn.Module], path: str, default: Any = None) -> Any:
    """Returns the module of a name or an attribute of one, or the default where it is absent or None."""
    parent, _, name = path.rpartition(".")
    found = modules.get(path, getattr(modules.get(parent), name, None))
    return default if found is None else found


def _problems(vit: ViT) -> Iterator[str]:
    """Yields what no option can tell: parts that are not ours, and blocks with several norms or rates of their own."""
    modules, foreign = _modules(vit), [block for block in vit.encoder if not _is_ours(block)]
    ours = [f"encoder.{number}" for number, block in enumerate(vit.encoder) if _is_ours(block)]
    parts = [modules.get(f"{block}.feed_forward.fn.feed_forward") for block in ours]
    parts = [part or modules[f"{block}.feed_forward.feed_forward"] for part, block in zip(parts, ours, strict=True)]
    pool, attentions = modules.get("head.pool"), (*ALIKE, RotaryAttention, *ATTENTIONS.values())
    checked: list[tuple[str, Any, tuple[type, ...]]] = [
        *(("block", block, ()) for block in foreign),
        ("patch_projection", vit.patch_embedding.projection, (ConvProjection, LinearProjection)),
        ("positions", modules.get(f"{EMBEDDING}.positions"), (SinCos2dPositions, *POSITIONS.values())),
        *(("attention", modules[f"{block}.attention.fn.attention"], attentions) for block in ours),
        *(("feed_forward", part, tuple(FEED_FORWARDS.values())) for part in parts),
        ("pool", pool, tuple(POOLS.values())),
    ]
    yield from (_foreign(name, each) for name, each, kinds in checked if each is not None and type(each) not in kinds)
    for activation in (getattr(part, "activation", None) for part in (*parts, getattr(pool, "feed_forward", None))):
        if activation is not None and _activation(activation) is None:
            yield _foreign("activation", activation)
    for name, module in vit.named_modules():
        last = name.rpartition(".")[2]
        if last.endswith("norm") and _norm(module) is None:
            yield _foreign(last, module)
    of_halves = [re.compile(rf"{re.escape(block)}\.(attention|feed_forward)(\.fn)?\.(output_)?norm") for block in ours]
    norms = [[_norm(each) for name, each in modules.items() if half.fullmatch(name)] for half in of_halves]
    yield from (f"norm: those of a block differ ({', '.join(map(str, each))})" for each in norms if len(set(each)) > 1)
    end = modules.get("norm", modules.get("head.norm"))
    if end is not None and norms and _norm(end) != norms[0][0]:
        yield f"norm={norms[0][0]} of the blocks and {_norm(end)} at the end differ"
    rates = [_at(modules, f"{block}.attention.fn.drop_path.p", 0.0) for block in ours]
    if not foreign and rates != drop_path_rates(vit.drop_path, len(rates)):
        yield f"drop_path={rates} of the blocks does not grow linearly to {vit.drop_path}"


def _foreign(name: str, module: object) -> str:
    return f"{name}: {type(module).__name__} is no block of ours, so no other family has it"


def _is_ours(block: nn.Module) -> bool:
    ista = isinstance(getattr(getattr(block, "feed_forward", None), "feed_forward", None), ISTA)
    return type(block) is CrateBlock if ista else type(block) in BLOCKS.values()


def _kind(module: object, kinds: Kinds) -> str:
    """Returns the name of a module's class."""
    return next(kind for kind, made in kinds.items() if type(module) is made)


def _norm(module: nn.Module) -> str | None:
    """Returns kind and epsilon of a norm with weights; None of another module."""
    if isinstance(module, BatchNorm):
        batch: Any = module.channels
        return norm_text("batchnorm", batch.eps)
    eps = getattr(module, "eps", None)
    kind = "layernorm" if isinstance(module, nn.LayerNorm) else "rmsnorm" if isinstance(module, nn.RMSNorm) else ""
    return norm_text(kind, eps) if kind and eps is not None and module.weight is not None else None


def _activation(module: nn.Module) -> str | None:
    ours = {name: make() for name, make in ACTIVATIONS.items()}
    same = (name for name, made in ours.items() if type(made) is type(module))
    return next((name for name in same if ours[name].extra_repr() == module.extra_repr()), None)


def _positions(positions: nn.Module | None, prefix_tokens: int) -> str:
    if positions is None:
        return "none"
    if isinstance(positions, SinCos2dPositions):
        return f"sincos2d {positions.form} {float(positions.temperature)!r}"
    return _kind(positions, POSITIONS) if prefix_tokens else "learned"  # without such tokens both are the same


def _pool(pool: Any, prefix_tokens: int) -> str:
    name = _kind(pool, POOLS) + "_all" * bool(getattr(pool, "prefix", False))
    return name if prefix_tokens else name.removesuffix("_all")


def model_config(model: nn.Module) -> dict[str, Any]:
    """Returns ``class_path`` and ``init_args`` of a ViT in plain data, as a config has them under ``model``.

    The network that a config builds from it has the same names of weights and, given the same weights, computes the
    same. Dropouts are left out.

    Raises:
        UserError: it is another network, or has blocks that are not ours.
    """
    if not isinstance(model, ViT):
        raise UserError(f"{type(model).__name__} is no ViT of ours")
    arguments: dict[str, Any] = {**as_part(describe(model)).arguments}
    modules = _modules(model)
    paths = {"attention": "encoder.0.attention.fn.attention", "patch_projection": PATCHES}
    for name, path in paths.items():
        kind, given = type(modules[path]), arguments[name].arguments
        if kind in (*ALIKE, LinearProjection):  # the same function of other tensors
            taken = inspect.signature(kind).parameters
            arguments[name] = Part(kind, {key: value for key, value in given.items() if key in taken})
    return Part(ViT, arguments).config()


def canonical_state(vit: ViT) -> dict[str, Tensor]:
    """Returns the weights under the names that a ViT of ``build(describe(vit))`` has."""
    state = dict(vit.state_dict())
    if isinstance(positions := getattr(vit.patch_embedding, "positions", None), LearnedPositions):
        state["patch_embedding.positions.table"] = positions.rows().detach()  # for the images' size of now
    if isinstance(vit.patch_embedding.projection, LinearProjection) and f"{PATCHES}.patch_norm.weight" not in state:
        height, width = vit.patch_size
        matrix = state.pop(f"{PATCHES}.linear.weight")
        state[f"{PATCHES}.conv.weight"] = rearrange(matrix, "e (c p1 p2) -> e c p1 p2", p1=height, p2=width)
        if f"{PATCHES}.linear.bias" in state:
            state[f"{PATCHES}.conv.bias"] = state.pop(f"{PATCHES}.linear.bias")
    for name, module in vit.named_modules():
        if isinstance(module, SeparateAttention):
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{name}.{part}.{kind}", None) for part in ("queries", "keys", "values")]
                if parts[0] is not None:
                    state[f"{name}.qkv.{kind}"] = torch.cat([part for part in parts if part is not None])
        elif isinstance(module, TorchAttention):
            for kind in ("weight", "bias"):
                state[f"{name}.qkv.{kind}"] = state.pop(f"{name}.in_proj_{kind}")
                state[f"{name}.projection.{kind}"] = state.pop(f"{name}.out_proj.{kind}")
    return state
