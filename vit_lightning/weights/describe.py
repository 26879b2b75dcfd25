"""The options of a ViT, by its modules and its tensors; its weights under canonical names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
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
)


def describe(vit: ViT) -> Options:
    """Returns the options of a ViT.

    Raises:
        UserError: names parts that are not ours, and blocks that differ from one another.
    """
    refuse(dict.fromkeys(_problems(vit)))
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_state(vit).items()}
    norms = {name: _norm(module) for name, module in vit.named_modules()}
    blocks = [_read(vit, ShapeReader(shapes, norms, block=number)) for number in range(len(vit.encoder))]
    refuse(
        f"{name}: the blocks of the encoder differ from one another"
        for name in blocks[0]
        if any(block[name] != blocks[0][name] for block in blocks)
    )
    positions = _positions(_at(vit, f"{EMBEDDING}.positions"), vit.prefix_tokens)
    pool = "cls" if isinstance(vit.head, DistilledHead) else _pool(vit.head.pool, vit.prefix_tokens)
    return {**blocks[0], "positions": positions, "pool": pool}


def _read(vit: ViT, reader: ShapeReader) -> Options:
    """Returns the options that modules and tensors tell, those of a block for the reader's."""
    found: Options = {}
    for option in TABLE:
        value = _at(vit, option.module.replace("*", str(reader.block))) if option.module else None
        if value is None:
            value = option.default if option.tensors is None else option.tensors(reader)
        found[option.name] = _activation(value) if isinstance(value, nn.Module) else value
    attention = _half(vit.encoder[reader.block], "attention").attention
    if isinstance(attention, RotaryAttention):
        grid = None if attention.reference_grid is None else list(attention.reference_grid)
        found["rotary"] = Rotary(attention.temperature, attention.max_resolution, grid)
    elif not isinstance(attention, SeparateAttention):
        found["attention"] = _kind(attention, ATTENTIONS)
    if not found["projection"]:
        found["projection_dropout"] = 0.0
    return found


def _at(module: Any, path: str, default: Any = None) -> Any:
    """Returns the attribute at a dotted path, or the default where a part of the path is absent or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return default
    return module


def _half(block: nn.Module, name: str) -> Any:
    """Returns norm and part of a block, which are inside of a residual where there is one."""
    return _at(block, f"{name}.fn", _at(block, name))


def _problems(vit: ViT) -> Iterator[str]:
    """Yields what no option can tell: parts that are not ours, and blocks with several norms or rates of their own."""
    foreign = [block for block in vit.encoder if not _is_ours(block)]
    halves = [(_half(block, "attention"), _half(block, "feed_forward")) for block in vit.encoder if _is_ours(block)]
    parts, pool = [second.feed_forward for _, second in halves], _at(vit, "head.pool")
    attentions = (SeparateAttention, RotaryAttention, *ATTENTIONS.values())
    checked: list[tuple[str, Any, tuple[type, ...]]] = [
        *(("block", block, ()) for block in foreign),
        ("patch_projection", vit.patch_embedding.projection, (ConvProjection, LinearProjection)),
        ("positions", _at(vit, "patch_embedding.positions"), (SinCos2dPositions, *POSITIONS.values())),
        *(("attention", first.attention, attentions) for first, _ in halves),
        *(("feed_forward", part, tuple(FEED_FORWARDS.values())) for part in parts),
        ("pool", pool, tuple(POOLS.values())),
    ]
    yield from (_foreign(name, each) for name, each, ours in checked if each is not None and type(each) not in ours)
    for activation in (_at(part, "activation") for part in (*parts, _at(pool, "feed_forward"))):
        if activation is not None and _activation(activation) is None:
            yield _foreign("activation", activation)
    for name, module in vit.named_modules():
        last = name.rpartition(".")[2]
        if last.endswith("norm") and _norm(module) is None:
            yield _foreign(last, module)
    norms = [[_norm(half.norm) for half in both] for both in halves]
    yield from (f"norm: the two of a block differ ({a}, {b})" for a, b in norms if a != b)
    end = _at(vit, "norm", _at(vit, "head.norm"))
    if end is not None and norms and _norm(end) != norms[0][0]:
        yield f"norm={norms[0][0]} of the blocks and {_norm(end)} at the end differ"
    rates = [_at(first, "drop_path.p", 0.0) for first, _ in halves]
    if not foreign and rates != drop_path_rates(vit.drop_path, len(rates)):
        yield f"drop_path={rates} of the blocks does not grow linearly to {vit.drop_path}"


def _foreign(name: str, module: object) -> str:
    return f"{name}: {type(module).__name__} is no block of ours, so no other family has it"


def _is_ours(block: nn.Module) -> bool:
    ista = isinstance(_at(block, "feed_forward.feed_forward"), ISTA)
    return type(block) is (CrateBlock if ista else TransformerEncoderBlock)


def _kind(module: object, kinds: Kinds) -> str:
    """Returns the name of a module's class."""
    return next(kind for kind, made in kinds.items() if type(module) is made)


def _norm(module: nn.Module) -> str | None:
    """Returns kind and epsilon of a norm with weights; None of another module."""
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
    paths = {"attention": "encoder.0.attention.fn.attention", "patch_projection": PATCHES}
    for name, path in paths.items():
        kind = type(model.get_submodule(path))
        if kind in (SeparateAttention, LinearProjection):  # the same function of other tensors
            arguments[name] = Part(kind, arguments[name].arguments)
    return Part(ViT, arguments).config()


def canonical_state(vit: ViT) -> dict[str, Tensor]:
    """Returns the weights under the names that a ViT of ``build(describe(vit))`` has."""
    state = dict(vit.state_dict())
    if isinstance(positions := _at(vit, "patch_embedding.positions"), LearnedPositions):
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
    return state
