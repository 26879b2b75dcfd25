"""Google's ViTs in JAX: ``vision_transformer`` and ``big_vision``, their .npz files with slashes in the names."""

import re

from vit_lightning.sizes import pair
from vit_lightning.weights.fields import Field, choice, word
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, Options, Shapes
from vit_lightning.weights.tables import Config, Family, Layout, Names, Tensors, Theirs

_NORM = "layernorm_1e-06"


def _dense(ours: str, theirs: str, pattern: str = "o i -> i o") -> Names:
    return {f"{ours}.weight": Theirs(f"{theirs}/kernel", pattern), f"{ours}.bias": f"{theirs}/bias"}


def _norm(ours: str, theirs: str) -> Names:
    return {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}


def _heads(ours: str, theirs: str, parts: tuple[str, ...], count: int) -> Names:
    """Returns names of queries, keys or values, which flax has with an axis for the heads."""
    kernels = tuple(f"{theirs}/{part}/kernel" for part in parts)
    biases = tuple(f"{theirs}/{part}/bias" for part in parts)
    return {
        f"{ours}.weight": Theirs(kernels, "(h d) i -> i h d", {"h": count}),
        f"{ours}.bias": Theirs(biases, "(h d) -> h d", {"h": count}),
    }


def _join_heads(ours: str, theirs: str, count: int) -> Names:
    return {
        f"{ours}.weight": Theirs(f"{theirs}/out/kernel", "o (h d) -> h d o", {"h": count}),
        f"{ours}.bias": f"{theirs}/out/bias",
    }


_RENAMED = {
    r"^(params|opt/target)/": "",
    r"\bLayerNorm_2/": "LayerNorm_1/",
    r"\bMultiHeadDotProductAttention_1/": "MultiHeadDotProductAttention_0/",
    r"\bMlpBlock_3/": "MlpBlock_0/",
}
"""Names of before flax's Linen, which numbered the four parts of a block through, and names with what precedes all."""
_STACKED = "Transformer/encoderblock/"


def _unpack(tensors: Tensors, layout: Layout) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, new in _RENAMED.items():
            name = re.sub(pattern, new, name)
        if name.startswith(_STACKED) and tensor.ndim:  # an axis for the blocks
            rest = name.removeprefix(_STACKED)
            found |= {f"Transformer/encoderblock_{block}/{rest}": part for block, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _channels(shapes: Shapes) -> Layout:
    """Returns the channels of the images, which these configs leave to the input."""
    kernels = (shape for name, shape in shapes.items() if name.endswith("embedding/kernel") and len(shape) == 4)
    return {"in_channels": next(kernels, (0, 0, 3))[2]}


def _names(options: Options, positions: str) -> Names:
    block, count = "Transformer/encoderblock_*", options["num_heads"]
    attention, mlp = f"{block}/MultiHeadDotProductAttention_0", f"{block}/MlpBlock_0"
    return {
        **_dense("patch_embedding.projection.conv", "embedding", "e c p1 p2 -> p1 p2 c e"),
        "patch_embedding.class_token.token": "cls",
        "patch_embedding.positions.table": positions,
        **_norm(f"{ATTENTION}.norm", f"{block}/LayerNorm_0"),
        **_heads(f"{ATTENTION}.attention.qkv", attention, ("query", "key", "value"), count),
        **_join_heads(f"{ATTENTION}.attention.projection", attention, count),
        **_norm(f"{FEED_FORWARD}.norm", f"{block}/LayerNorm_1"),
        **_dense(f"{FEED_FORWARD}.feed_forward.expand", f"{mlp}/Dense_0"),
        **_dense(f"{FEED_FORWARD}.feed_forward.contract", f"{mlp}/Dense_1"),
        **_norm("norm", "Transformer/encoder_norm"),
        **_dense("head.representation.linear", "pre_logits"),
        **_dense("head.linear", "head"),
    }


_FIXED: Options = {"norm": _NORM, "activation": "gelu_tanh"}


GOOGLE = Family(
    name="google",
    fields=(
        Field("num_classes", ..., "num_classes"),
        Field("patches", ..., "patch_size", pair, list),
        Field("hidden_size", ..., "emb_size"),
        Field("num_layers", ..., "depth"),
        Field("mlp_dim", ..., "hidden"),
        Field("num_heads", ..., "num_heads"),
        Field("image_size", ..., "image_size", pair, list),
        choice("classifier", "token", "pool", {"token": "cls", "gap": "mean"}),
        Field("representation_size", None, "representation_size"),
    ),
    names=lambda options, layout: _names(options, "Transformer/posembed_input/pos_embedding"),
    fixed=_FIXED,
    read_rest=lambda config, options, layout: {"class_token": options["pool"] == "cls"},
    without={"resnet": None, "add_position_embedding": True},
    inert=frozenset({"head_bias_init", "model_name", "dropout_rate", "attention_dropout_rate"}),
    layout_options={"in_channels": "in_channels"},
    find_layout=_channels,
    unpack=_unpack,
)

_POSITIONS = {"learn": "learned_patches", "sincos2d": "sincos2d big_vision 10000.0"}


def _read_big_vision(config: Config, options: Options, layout: Layout) -> Options:
    width, pool, hidden = config["width"], options["pool"], config["mlp_dim"] or 4 * config["width"]
    learned = options["positions"] == "learned_patches" and pool != "cls"
    map_head = {"pool_hidden": hidden, "pool_activation": "gelu_tanh", "pool_norm": _NORM}
    return {
        **(map_head if pool == "attention" else {}),
        "hidden": hidden,
        "class_token": pool == "cls",
        "positions": "learned" if learned else options["positions"],
        "representation_size": width if config["rep_size"] is True else config["rep_size"] or None,
    }


def _big_vision_names(options: Options, layout: Layout) -> Names:
    ours, theirs, count = "head.pool", "MAPHead_0", options["num_heads"]
    attention = f"{theirs}/MultiHeadDotProductAttention_0"
    return {
        **_names(options, "pos_embedding"),
        f"{ours}.probe": f"{theirs}/probe",
        **_heads(f"{ours}.query", attention, ("query",), count),
        **_heads(f"{ours}.kv", attention, ("key", "value"), count),
        **_join_heads(f"{ours}.projection", attention, count),
        **_norm(f"{ours}.norm", f"{theirs}/LayerNorm_0"),
        **_dense(f"{ours}.feed_forward.expand", f"{theirs}/MlpBlock_0/Dense_0"),
        **_dense(f"{ours}.feed_forward.contract", f"{theirs}/MlpBlock_0/Dense_1"),
    }


BIG_VISION = Family(
    name="big_vision",
    fields=(
        Field("num_classes", None, "num_classes", lambda value: value or 0),
        Field("patch_size", 16, "patch_size", pair, list),
        Field("width", 768, "emb_size"),
        Field("depth", 12, "depth"),
        Field("mlp_dim", None, "hidden"),
        Field("num_heads", 12, "num_heads"),
        Field(
            "posemb",
            "learn",
            "positions",
            lambda value: word("posemb", value, _POSITIONS),
            lambda ours: "sincos2d" if ours.startswith("sincos2d") else "learn",
        ),
        Field("rep_size", False, "representation_size", write=lambda width: width or False),
        choice("pool_type", "gap", "pool", {"gap": "mean", "tok": "cls", "map": "attention"}),
        Field("image_size", ..., "image_size", pair, list),
    ),
    names=_big_vision_names,
    fixed=_FIXED,
    read_rest=_read_big_vision,
    inert=frozenset({"dropout", "head_zeroinit", "scan", "remat_policy", "dtype_mm"}),
    layout_options={"in_channels": "in_channels"},
    find_layout=_channels,
    unpack=_unpack,
)
