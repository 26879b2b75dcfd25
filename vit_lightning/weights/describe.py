"""The options of a ViT, as its tensors tell them and as its modules do; its weights under canonical names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    FEED_FORWARDS,
    OPTIONS,
    POOLS,
    POSITIONS,
    SIZES,
    Kinds,
    Options,
    Part,
    Rotary,
    as_part,
    norm_text,
)
from vit_lightning.weights.tables import Shapes

EMBEDDING = "patch_embedding"


@dataclass(frozen=True)
class Told:
    """The options of a ViT that its tensors tell, whatever the numbers in them.

    Args:
        shapes: shapes of the tensors, by our names as ``canonical_state`` has them.
        kind: kind and epsilon of a norm by its name, which no tensor tells.
        family: implementation that the weights are taken for.
    """

    shapes: Shapes
    kind: Callable[[str], str | None]
    family: str = "vit_lightning"

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, with numbers in it."""
        return name in self.shapes and 0 not in self.shapes[name]

    def size(self, name: str, axis: int = 0) -> int:
        """Returns the length of an axis of a tensor.

        Raises:
            UserError: there is no such tensor, or axis.
        """
        if name not in self.shapes or len(self.shapes[name]) <= axis:
            raise UserError(f"the weights look like those of {self.family}, but lack {name} (in our names)")
        return self.shapes[name][axis]

    def norm(self, name: str) -> str | None:
        return self.kind(name) if self.has(f"{name}.weight") else None

    def options(self, number: int = 0) -> Options:
        """Returns the options of embedding, head and one block, but sizes, heads, positions and the kind of pool."""
        half, second = f"encoder.{number}.attention.fn", f"encoder.{number}.feed_forward"
        attention, part = f"{half}.attention", f"{second}.fn.feed_forward"
        patches, registers = f"{EMBEDDING}.projection", f"{EMBEDDING}.register_tokens.token"
        representation, linear = "head.representation.linear.weight", "head.linear.weight"
        projection = self.has(f"{attention}.projection.weight")
        last = "before_pool" if self.has("norm.weight") else "after_pool" if self.has("head.norm.weight") else "none"
        options: Options = {
            "patch_bias": self.has(f"{patches}.conv.bias") or self.has(f"{patches}.linear.bias"),
            "patch_norm": self.norm(f"{patches}.patch_norm"),
            "patch_token_norm": self.norm(f"{patches}.norm"),
            "class_token": self.has(f"{EMBEDDING}.class_token.token"),
            "distillation_token": self.has(f"{EMBEDDING}.distillation_token.token"),
            "register_tokens": self.size(registers, 1) if self.has(registers) else 0,
            "embedding_norm": self.norm(f"{EMBEDDING}.norm"),
            "norm": self.norm(f"{half}.norm"),
            "layer_scale": 1e-5 if self.has(f"{half}.layer_scale.scale") else None,
            "qk_norm": self.norm(f"{attention}.query_norm"),
            "attention_norm": self.norm(f"{attention}.norm"),
            "qkv_bias": self.has(f"{attention}.qkv.bias"),
            "projection": projection,
            "projection_bias": not projection or self.has(f"{attention}.projection.bias"),
            "final_norm": last,
            "pool_hidden": self.size("head.pool.feed_forward.expand.weight") if self.has("head.pool.probe") else None,
            "representation_size": self.size(representation) if self.has(representation) else None,
            "num_classes": self.size(linear) if self.has(linear) else 0,
        }
        if self.has(dictionary := f"{second}.feed_forward.dictionary"):
            return {**options, "feed_forward": "ista", "hidden": self.size(dictionary)}
        hidden = self.size(f"{part}.contract.weight", 1)
        packed = self.has(f"{part}.gate_expand.weight") and self.size(f"{part}.gate_expand.weight") == 2 * hidden
        kind = "swiglu" if self.has(f"{part}.gate.weight") else "swiglu_packed" if packed else "mlp"
        options |= {"activation": "silu"} if kind != "mlp" else {}
        options |= {"feed_forward": kind, "hidden": hidden, "feed_forward_norm": self.norm(f"{part}.norm")}
        return {**options, "feed_forward_bias": self.has(f"{part}.contract.bias")}


def describe(vit: ViT) -> Options:
    """Returns the options of a ViT.

    Raises:
        UserError: names parts that are not ours, and blocks that differ from one another.
    """
    refuse(dict.fromkeys(_problems(vit)))
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_state(vit).items()}
    told = Told(shapes, lambda name: _norm(vit.get_submodule(name)))
    blocks = [{**told.options(number), **_block(block)} for number, block in enumerate(vit.encoder)]
    refuse(
        f"{name}: the blocks of the encoder differ from one another"
        for name in blocks[0]
        if any(block.get(name) != blocks[0][name] for block in blocks)
    )
    embedding = vit.patch_embedding
    return {
        **OPTIONS,
        **blocks[0],
        **{name: getattr(vit, name) for name in (*SIZES, "drop_path")},
        "positions": _positions(_at(embedding, "positions"), vit.prefix_tokens),
        "emb_dropout": _at(embedding, "dropout.p"),
        "patch_dropout": _at(embedding, "patch_dropout.p", 0.0),
        "head_dropout": _at(vit.head, "dropout.p", 0.0),
        **({} if isinstance(vit.head, DistilledHead) else _pool(vit.head.pool, vit.prefix_tokens)),
    }


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


def _block(block: nn.Module) -> Options:
    """Returns the options of a block that no tensor tells."""
    half, part = _half(block, "attention"), _half(block, "feed_forward").feed_forward
    attention = half.attention
    options: Options = {
        "layer_scale": _at(half, "layer_scale.init"),
        "attention": "softmax",
        "rotary": None,
        "dim_head": attention.dim_head,
        "scale": attention.attend.scale,
        "dropout": attention.attend.dropout,
        "projection_dropout": attention.projection_dropout.p if attention.projection is not None else 0.0,
    }
    if isinstance(attention, RotaryAttention):
        grid = None if attention.reference_grid is None else list(attention.reference_grid)
        options["rotary"] = Rotary(attention.temperature, attention.max_resolution, grid)
    elif not isinstance(attention, SeparateAttention):
        options["attention"] = _kind(attention, ATTENTIONS)
    if isinstance(part, ISTA):
        return {**options, "step_size": part.step_size, "threshold": part.threshold}
    options |= {"feed_forward_dropout": part.dropout.p, "output_dropout": part.output_dropout.p}
    return {**options, "activation": _activation(part.activation)}


def _pool(pool: Any, prefix_tokens: int) -> Options:
    kind = _kind(pool, POOLS)
    name = kind + ("_all" if getattr(pool, "prefix", False) else "")
    options: Options = {"pool": name if prefix_tokens else name.removesuffix("_all")}
    if kind == "attention":
        options |= {"pool_activation": _activation(pool.feed_forward.activation), "pool_norm": _norm(pool.norm)}
    return options


def model_config(model: nn.Module | Options) -> dict[str, Any]:
    """Returns ``class_path`` and ``init_args`` of a ViT in plain data, as a config has them under ``model``.

    The network that a config builds from it has the same names of weights and, given the same weights, computes the
    same. Dropouts are left out.

    Args:
        model: a ViT of our blocks, or its options.

    Raises:
        UserError: it is another network, or has blocks that are not ours.
    """
    if not isinstance(model, nn.Module):
        return as_part(model).config()
    if not isinstance(model, ViT):
        raise UserError(f"{type(model).__name__} is no ViT of ours")
    arguments: dict[str, Any] = {**as_part(describe(model)).arguments}
    paths = {"attention": "encoder.0.attention.fn.attention", "patch_projection": f"{EMBEDDING}.projection"}
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
