"""The options of a ViT as plain data, which our models and other people's share: one table, read from tensors and
modules, and written as a ViT and as a config.

Implementations of the same function have the same options: one layer or three for queries, keys and values, a
convolution or a matrix over patches.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError, refuse
from vit_lightning.models import attention, blocks, heads
from vit_lightning.models.attention import RotaryAttention, SeparateAttention
from vit_lightning.models.crate import ISTA, MSSA, CrateBlock
from vit_lightning.models.feed_forward import ACTIVATIONS, FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.layers import BatchNorm, LayerNorm, RMSNorm
from vit_lightning.models.patches import ConvProjection, ConvTokenizer, LinearProjection
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions, SinCos2dPositions
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import side

Options = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

EMBEDDING, PATCHES = "patch_embedding", "patch_embedding.projection"
ATTENTION = "encoder.*.attention.fn"
"""Our first branch of a block, with children norm, attention and layer_scale; ``*`` is the number of the block."""
FEED_FORWARD = "encoder.*.feed_forward.fn"
"""Our second branch of a block, with children norm, feed_forward and layer_scale."""
_ELSEWHERE = {
    r"\.parallel\.fn\.parts\.(attention|feed_forward)": r".\1.fn.\1",
    r"\.parallel\.fn\.": ".attention.fn.",
    r"^(encoder\.\d+)\.(attention|feed_forward)_norm": r"\1.\2.fn.norm",
    r"\.channels\.(?=weight|bias)": ".",
}
"""Names in blocks whose norms stand elsewhere, and of BatchNorm, and where the table of options looks for them."""
_HEADS, _MLP, _ISTA = f"{ATTENTION}.attention", f"{FEED_FORWARD}.feed_forward", "encoder.*.feed_forward.feed_forward"
"""The parts of a block; ISTA stands in no residual."""


def read_as(name: str) -> str:
    """Returns the name under which the table of options looks for a tensor or a module, which is that of pre-norm."""
    for pattern, replacement in _ELSEWHERE.items():
        name = re.sub(pattern, replacement, name)
    return name


@dataclass(frozen=True)
class ShapeReader:
    """The tensors of a ViT, whatever the numbers in them, which tell most of its options.

    Args:
        shapes: shapes of the tensors, by our names as ``canonical_state`` has them.
        norms: kind and epsilon of norms, which no tensor tells, by their names.
        family: implementation that the weights are taken for.
        block: number of the block of which options are read.
    """

    shapes: Shapes
    norms: Mapping[str, str | None]
    family: str = "vit_lightning"
    block: int = 0

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, with numbers in it."""
        return 0 not in self.shapes.get(self._named(name), (0,))

    def size(self, name: str, axis: int = 0) -> int:
        """Returns the length of an axis of a tensor.

        Raises:
            UserError: there is no such tensor, or axis.
        """
        shape = self.shapes.get(name := self._named(name), ())
        if len(shape) <= axis:
            raise UserError(f"the weights look like those of {self.family}, but lack {name} (in our names)")
        return shape[axis]

    def norm(self, name: str) -> str | None:
        """Returns kind and epsilon of a norm; None where there is none with weights."""
        return self.norms.get(self._named(name)) if self.has(f"{name}.weight") else None

    def options(self) -> Options:
        """Returns the options that tensors tell."""
        return {option.name: option.tensors(self) for option in TABLE if option.tensors is not None}

    def _named(self, name: str) -> str:
        return name.replace("*", str(self.block))


Read = Callable[[ShapeReader], Any]


def _has(*names: str) -> Read:
    return lambda reader: any(map(reader.has, names))


def _norm_of(name: str) -> Read:
    return lambda reader: reader.norm(name)


def _size(name: str, axis: int = 0, *, absent: Any = None) -> Read:
    return lambda reader: reader.size(name, axis) if reader.has(name) else absent


def _final_norm(reader: ShapeReader) -> str:
    return "before_pool" if reader.has("norm.weight") else "after_pool" if reader.has("head.norm.weight") else "none"


def _gate(reader: ShapeReader) -> str | None:
    gate, qkv = f"{_HEADS}.gate.weight", f"{_HEADS}.qkv.weight"
    return None if not reader.has(gate) else "elements" if 3 * reader.size(gate) == reader.size(qkv) else "heads"


def _projection_bias(reader: ShapeReader) -> bool:
    return reader.has(f"{_HEADS}.projection.bias") or not reader.has(f"{_HEADS}.projection.weight")


def _layer_scale(reader: ShapeReader) -> float | None:
    return 1e-5 if reader.has(f"{ATTENTION}.layer_scale.scale") else None


def _hidden(reader: ShapeReader) -> int:
    dictionary = f"{_ISTA}.dictionary"
    return reader.size(dictionary) if reader.has(dictionary) else reader.size(f"{_MLP}.contract.weight", 1)


def _feed_forward(reader: ShapeReader) -> str:
    if reader.has(f"{_ISTA}.dictionary"):
        return "ista"
    packed = f"{_MLP}.gate_expand.weight"
    is_packed = reader.has(packed) and reader.size(packed) == 2 * _hidden(reader)
    return "swiglu" if reader.has(f"{_MLP}.gate.weight") else "swiglu_packed" if is_packed else "mlp"


class Option(NamedTuple):
    """A row of the table.

    Args:
        name: its name.
        default: its value in ViT-B/16.
        argument: the argument of ViT that it is, or that of a part, such as attention.qkv_bias; none where it is one
            of several that make an argument.
        tensors: its value by the tensors; none where no tensor tells it.
        module: path of an attribute that tells it better, if it is there, where there is a network.
    """

    name: str
    default: Any
    argument: str = ""
    tensors: Read | None = None
    module: str = ""


def _direct(name: str, default: Any, tensors: Read | None = None, module: str = "") -> Option:
    """Returns an option that is an argument of ViT as it is."""
    return Option(name, default, name, tensors, module)


SIZES = ("image_size", "patch_size", "in_channels", "num_classes", "emb_size", "depth", "num_heads")
TABLE = (
    Option("image_size", (224, 224), module="image_size"),
    Option("patch_size", (16, 16), module="patch_size"),
    _direct("in_channels", 3, module="in_channels"),
    _direct("num_classes", 1000, _size("head.linear.weight", absent=0), "num_classes"),
    _direct("emb_size", 768, module="emb_size"),
    _direct("depth", 12, module="depth"),
    _direct("num_heads", 12, module="num_heads"),
    Option("patch_bias", True, "patch_projection.bias", _has(f"{PATCHES}.conv.bias", f"{PATCHES}.linear.bias")),
    Option("tokenizer", 0, tensors=_size(f"{PATCHES}.layers.0.conv.weight", absent=0)),  # channels of its first layer
    Option("patch_norm", None, "patch_projection.patch_norm", _norm_of(f"{PATCHES}.patch_norm")),  # of its pixels
    Option("patch_token_norm", None, "patch_projection.norm", _norm_of(f"{PATCHES}.norm")),
    _direct("class_token", True, _has(f"{EMBEDDING}.class_token.token")),
    _direct("distillation_token", False, _has(f"{EMBEDDING}.distillation_token.token")),
    _direct("register_tokens", 0, _size(f"{EMBEDDING}.register_tokens.token", 1, absent=0)),
    Option("positions", "learned"),
    Option("rotary", None),
    _direct("embedding_norm", None, _norm_of(f"{EMBEDDING}.norm")),
    Option("block", "pre_norm"),
    _direct("norm", "layernorm_1e-06", _norm_of(f"{ATTENTION}.norm")),
    _direct("final_norm", "before_pool", _final_norm),
    Option("attention", "softmax"),
    Option("dim_head", 64, module=f"{_HEADS}.dim_head"),
    Option("scale", 0.125, module=f"{_HEADS}.attend.scale"),
    Option("qkv_bias", True, "attention.qkv_bias", _has(f"{_HEADS}.qkv.bias")),
    Option("qk_norm", None, "attention.qk_norm", _norm_of(f"{_HEADS}.query_norm")),
    Option("attention_norm", None, "attention.norm", _norm_of(f"{_HEADS}.norm")),
    Option("gate", None, "attention.gate", _gate),
    Option("projection", True, "attention.projection", _has(f"{_HEADS}.projection.weight")),
    Option("projection_bias", True, "attention.projection_bias", _projection_bias),
    Option("feed_forward", "mlp", tensors=_feed_forward),
    Option("hidden", 3072, tensors=_hidden),
    Option("activation", "gelu", "feed_forward.activation", module=f"{_MLP}.activation"),
    Option("feed_forward_bias", True, "feed_forward.bias", _has(f"{_MLP}.contract.bias", f"{_ISTA}.dictionary")),
    Option("feed_forward_norm", None, "feed_forward.norm", _norm_of(f"{_MLP}.norm")),
    Option("step_size", None, "feed_forward.step_size", module=f"{_ISTA}.step_size"),
    Option("threshold", None, "feed_forward.threshold", module=f"{_ISTA}.threshold"),
    _direct("layer_scale", None, _layer_scale, f"{ATTENTION}.layer_scale.init"),
    Option("pool", "cls"),
    Option("pool_hidden", None, tensors=_size("head.pool.feed_forward.expand.weight")),
    Option("pool_activation", None, "pool.activation", module="head.pool.feed_forward.activation"),
    Option("pool_norm", None, "pool.norm", _norm_of("head.pool.norm")),
    _direct("representation_size", None, _size("head.representation.linear.weight")),
)
"""All options but those of training alone; a norm is its kind and epsilon, such as layernorm_1e-06."""
OPTIONS: Options = {option.name: option.default for option in TABLE}
TRAINING_ALONE = ("drop_path_schedule", "activation_checkpointing", "initialisation", "float32_residual")
"""Arguments of ViT that change neither the function of its weights, but for rounding, nor their shapes."""


class Rotary(NamedTuple):
    """Arguments of RotaryAttention."""

    temperature: float = 10_000.0
    max_resolution: float | None = None
    reference_grid: list[int] | None = None
    centred: bool = False
    register_temperature: float | None = None


Kinds = dict[str, type[nn.Module]]

NORMS: Kinds = {"layernorm": LayerNorm, "rmsnorm": RMSNorm, "batchnorm": BatchNorm}
BLOCKS: Kinds = {
    "pre_norm": blocks.TransformerEncoderBlock,
    "post_norm": blocks.PostNormBlock,
    "res_post_norm": blocks.ResPostNormBlock,
    "sandwich_norm": blocks.SandwichNormBlock,
    "compact": blocks.CompactBlock,
    "parallel": blocks.ParallelBlock,
}
"""CrateBlock is that of ISTA."""
POSITIONS: Kinds = {"learned": LearnedPositions, "learned_patches": LearnedPatchPositions}
ATTENTIONS: Kinds = {
    "softmax": attention.MultiHeadAttention,
    "divided_after_softmax": attention.DividedAfterSoftmaxAttention,
    "mssa": MSSA,
}
FEED_FORWARDS: Kinds = {"mlp": FeedForwardBlock, "swiglu": SwiGLU, "swiglu_packed": PackedSwiGLU, "ista": ISTA}
POOLS: Kinds = {
    "cls": heads.ClassTokenPool,
    "cls_and_mean": heads.ClassTokenAndMeanPool,
    "mean": heads.MeanPool,
    "mean_all": heads.MeanAllPool,
    "max": heads.MaxPool,
    "mean_max": heads.MeanMaxPool,
    "sequence": heads.SequencePool,
    "attention": heads.AttentionPool,
}
"""max_all, mean_max_all, sequence_all and attention_all are those that pool the tokens before the patches too."""


class Part(NamedTuple):
    """A class of ours with arguments, which may be such parts themselves; an argument of None is left out."""

    kind: type[nn.Module]
    arguments: Mapping[str, Any]

    def factory(self) -> Callable[..., nn.Module]:
        """Returns what makes the part from the arguments that ViT gives it."""
        given = {name: value for name, value in self.arguments.items() if value is not None}
        made = {name: value.factory() if isinstance(value, Part) else value for name, value in given.items()}
        return partial(self.kind, **made)

    def config(self) -> dict[str, Any]:
        """Returns the part as a config names it, in plain data."""
        given = {name: value for name, value in self.arguments.items() if value is not None}
        arguments = {name: value.config() if isinstance(value, Part) else value for name, value in given.items()}
        return {"class_path": f"vit_lightning.{self.kind.__name__}"} | ({"init_args": arguments} if arguments else {})


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
    given: dict[str, dict[str, Any]] = defaultdict(dict)
    for option in filter(lambda option: option.argument, TABLE):
        part, _, name = option.argument.rpartition(".")
        value = options[option.name]
        given[part][name] = _norm(value) if name.endswith("norm") and name != "final_norm" else value
    width, dim_head = options["emb_size"], options["dim_head"]
    given["attention"] |= (options["rotary"] or Rotary())._asdict()
    given["attention"]["dim_head"] = None if dim_head * options["num_heads"] == width else dim_head
    given["attention"]["scale"] = None if options["scale"] == dim_head**-0.5 else options["scale"]
    given["feed_forward"]["expansion"] = options["hidden"] / width
    given["pool"]["expansion"] = (options["pool_hidden"] or 0) / width
    given["patch_projection"]["hidden"] = options["tokenizer"]
    rotary, patches = options["rotary"] is not None, LinearProjection if options["patch_norm"] else ConvProjection
    block = CrateBlock if options["feed_forward"] == "ista" else BLOCKS[options["block"]]
    arguments = {
        **given[""],
        **{name: side(options[name]) for name in ("image_size", "patch_size")},
        "positions": _positions(options["positions"]),
        "patch_projection": _part(ConvTokenizer if options["tokenizer"] else patches, given["patch_projection"]),
        "attention": _part(RotaryAttention if rotary else ATTENTIONS[options["attention"]], given["attention"]),
        "feed_forward": _part(FEED_FORWARDS[options["feed_forward"]], given["feed_forward"]),
        "block": Part(block, {}) if block is not blocks.TransformerEncoderBlock else None,
        "pool": _pool(options["pool"], given["pool"]),
    }
    return _part(ViT, arguments)


def _part(kind: type[nn.Module], given: Mapping[str, Any]) -> Part:
    """Returns a class with what it takes of given arguments; that none is lost is up to the table."""
    return Part(kind, {name: given[name] for name in inspect.signature(kind).parameters if name in given})


def _pool(name: str, given: Mapping[str, Any]) -> Any:
    if name in ("cls", "mean"):
        return name
    kind = POOLS.get(name) or POOLS[name.removesuffix("_all")]
    prefix = None if name in POOLS and name != "attention" else name.endswith("_all")
    return _part(kind, {**given, "prefix": prefix})


def _positions(name: str) -> Any:
    if name.startswith("sincos2d"):
        _, form, temperature = name.split(" ")
        return _part(SinCos2dPositions, {"form": form, "temperature": float(temperature)})
    return name if name in ("learned", "none") else Part(POSITIONS[name], {})


_PARTS: dict[str, Sequence[type[nn.Module]]] = {
    r"encoder\.\d+": (CrateBlock, *BLOCKS.values()),
    PATCHES: (ConvProjection, LinearProjection, ConvTokenizer),
    f"{EMBEDDING}.positions": (SinCos2dPositions, *POSITIONS.values()),
    r"encoder\.\d+\.attention\.fn\.attention": (SeparateAttention, RotaryAttention, *ATTENTIONS.values()),
    r"encoder\.\d+\.feed_forward\.fn\.feed_forward": tuple(FEED_FORWARDS.values()),
    r"encoder\.\d+\.feed_forward\.feed_forward": (ISTA,),
    r"head\.pool": tuple(POOLS.values()),
}
"""Classes of the parts that options tell, by their names."""
_ALL_NORMS = r"encoder\.\d+\.(attention|feed_forward)(\.fn)?\.(output_)?norm|(head\.)?norm"
"""Names of those norms that are one option."""


def describe(vit: ViT) -> Options:
    """Returns the options of a ViT.

    Raises:
        UserError: names parts that are not ours, and blocks that differ from one another.
    """
    modules = _modules(vit)
    refuse(_problems(vit, modules))
    shapes = {read_as(name): tuple(tensor.shape) for name, tensor in canonical_state(vit).items()}
    norms = {name: _norm_text(module) for name, module in modules.items()}
    found = [_read(modules, ShapeReader(shapes, norms, block=number)) for number in range(len(vit.encoder))]
    refuse(
        f"{name}: the blocks of the encoder differ from one another"
        for name in found[0]
        if any(block[name] != found[0][name] for block in found)
    )
    positions = _positions_text(modules.get(f"{EMBEDDING}.positions"), vit.prefix_tokens)
    pool = "cls" if isinstance(vit.head, heads.DistilledHead) else _pool_text(vit.head.pool, vit.prefix_tokens)
    return {**found[0], "positions": positions, "pool": pool}


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
    block, layer = modules[f"encoder.{reader.block}"], modules[f"encoder.{reader.block}.attention.fn.attention"]
    found["block"] = _kind(block, BLOCKS, "pre_norm")
    found["attention"] = _kind(layer, ATTENTIONS, "softmax")
    if isinstance(layer, RotaryAttention):
        rotary = Rotary(*(getattr(layer, name) for name in Rotary._fields))
        found["rotary"] = rotary._replace(reference_grid=rotary.reference_grid and list(rotary.reference_grid))
    return found


def _at(modules: Mapping[str, nn.Module], path: str, default: Any = None) -> Any:
    """Returns the module of a name or an attribute of one, or the default where it is absent or None."""
    parent, _, name = path.rpartition(".")
    found = modules.get(path, getattr(modules.get(parent), name, None))
    return default if found is None else found


def _problems(vit: ViT, modules: Mapping[str, nn.Module]) -> list[str]:
    """Returns what no option can tell: parts that are not ours, and blocks with several norms."""
    problems: list[str] = []
    for name, module in modules.items():
        last, kinds = name.rpartition(".")[2], [kinds for part, kinds in _PARTS.items() if re.fullmatch(part, name)]
        is_ours = type(module) in kinds[0] if kinds else True
        is_ours &= not last.endswith("norm") or _norm_text(module) is not None
        is_ours &= last != "activation" or _activation(module) is not None
        if not is_ours:
            option = "block" if last.isdecimal() else "patch_projection" if name == PATCHES else last
            problems.append(f"{option}: {type(module).__name__} is no block of ours, so no other family has it")
    norms = {str(_norm_text(module)) for name, module in modules.items() if re.fullmatch(_ALL_NORMS, name)}
    if len(norms) > 1:
        problems.append(f"norm: those of the network differ ({', '.join(sorted(norms))})")
    return [*dict.fromkeys(problems)]


def _kind(module: object, kinds: Kinds, default: str) -> str:
    """Returns the name of a module's class."""
    return next((kind for kind, made in kinds.items() if type(module) is made), default)


def _norm_text(module: nn.Module) -> str | None:
    """Returns kind and epsilon of a norm with weights; None of another module."""
    if isinstance(module, BatchNorm):
        batch: Any = module.channels
        return norm_text("batchnorm", batch.eps)
    eps = getattr(module, "eps", None)
    kind = "layernorm" if isinstance(module, nn.LayerNorm) else "rmsnorm" if isinstance(module, nn.RMSNorm) else ""
    return norm_text(kind, eps) if kind and eps is not None and module.weight is not None else None


def _activation(module: nn.Module) -> str | None:
    return next((name for name, make in ACTIVATIONS.items() if repr(make()) == repr(module)), None)


def _positions_text(positions: nn.Module | None, prefix_tokens: int) -> str:
    if positions is None:
        return "none"
    if isinstance(positions, SinCos2dPositions):
        return f"sincos2d {positions.form} {float(positions.temperature)!r}"
    return _kind(positions, POSITIONS, "") if prefix_tokens else "learned"  # without such tokens both are the same


def _pool_text(pool: Any, prefix_tokens: int) -> str:
    name = _kind(pool, POOLS, "") + "_all" * bool(getattr(pool, "prefix", False))
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
    for name, path in {"attention": "encoder.0.attention.fn.attention", "patch_projection": PATCHES}.items():
        if (kind := type(modules[path])) in (SeparateAttention, LinearProjection):  # the same of other tensors
            arguments[name] = _part(kind, arguments[name].arguments)
    return Part(ViT, arguments).config()


def canonical_state(vit: ViT) -> dict[str, Tensor]:
    """Returns the weights under the names that a ViT of ``build(describe(vit))`` has."""
    state = dict(vit.state_dict())
    if isinstance(vit.patch_embedding.projection, LinearProjection) and f"{PATCHES}.patch_norm.weight" not in state:
        height, width = vit.patch_size
        matrix = state.pop(f"{PATCHES}.linear.weight")
        state[f"{PATCHES}.conv.weight"] = rearrange(matrix, "e (c p1 p2) -> e c p1 p2", p1=height, p2=width)
        if f"{PATCHES}.linear.bias" in state:
            state[f"{PATCHES}.conv.bias"] = state.pop(f"{PATCHES}.linear.bias")
    for name in (name for name, module in vit.named_modules() if isinstance(module, SeparateAttention)):
        for kind in ("weight", "bias") if f"{name}.keys.bias" in state else ("weight",):
            parts = [state.pop(f"{name}.{part}.{kind}") for part in ("queries", "keys", "values")]
            state[f"{name}.qkv.{kind}"] = torch.cat(parts)
    return state
