"""ViTs written with einops: lucidrains' vit-pytorch (ViT and SimpleViT, now and before), CRATE, whose code follows it,
and the ViT of the einops tutorial, with both of its attentions, as written and corrected."""

from vit_lightning.sizes import pair, side
from vit_lightning.weights.fields import Field, choice, height, word
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, PATCHES, Options, Shapes
from vit_lightning.weights.tables import Config, Family, Layout, Names, Theirs

_NORM = "layernorm_1e-05"
_FIXED: Options = {"patch_norm": _NORM, "patch_token_norm": _NORM, "norm": _NORM, "qkv_bias": False}
_SIZES = (
    Field("image_size", ..., "image_size", pair, side),
    Field("patch_size", ..., "patch_size", pair, side),
    Field("num_classes", ..., "num_classes"),
    Field("dim", ..., "emb_size"),
    Field("depth", ..., "depth"),
    Field("heads", ..., "num_heads"),
)
_HIDDEN = Field("mlp_dim", ..., "hidden")
_MORE_SIZES = (Field("channels", 3, "in_channels"), Field("dim_head", 64, "dim_head"))


_POOLS = {"cls": "cls", "mean": "mean"}
_POOL = Field("pool", "cls", "pool", lambda pool: word("pool", pool, _POOLS), lambda pool: pool.removesuffix("_all"))


def _read_projection(config: Config) -> Options:
    """Returns no projection for one head as wide as the tokens, where the references leave it out."""
    absent = config["heads"] == 1 and config["dim_head"] == config["dim"]
    return {"projection": False} if absent else {}


def _matrix_names(options: Options, theirs: str) -> Names:
    """Returns names of a matrix over the pixels of a patch, with the channels innermost."""
    kernel = Theirs(f"{theirs}.weight", "e c p1 p2 -> e (p1 p2 c)", _patch_sizes(options))
    return {f"{PATCHES}.conv.weight": kernel, f"{PATCHES}.conv.bias": f"{theirs}.bias"}


def _patch_sizes(options: Options) -> dict[str, int]:
    return dict(zip(("p1", "p2"), options["patch_size"], strict=True))


def _patch_names(options: Options) -> Names:
    """Returns names of norms and matrix over the pixels of a patch; theirs have the channels innermost."""
    if not options["patch_norm"]:
        return _matrix_names(options, "to_patch_embedding.1")
    sizes, ours = _patch_sizes(options), PATCHES
    theirs, pixels = "to_patch_embedding", "(c p1 p2) -> (p1 p2 c)"
    return {
        f"{ours}.patch_norm.weight": Theirs(f"{theirs}.1.weight", pixels, sizes),
        f"{ours}.patch_norm.bias": Theirs(f"{theirs}.1.bias", pixels, sizes),
        f"{ours}.linear.weight": Theirs(f"{theirs}.2.weight", "e (c p1 p2) -> e (p1 p2 c)", sizes),
        f"{ours}.linear.bias": f"{theirs}.2.bias",
        f"{ours}.norm": f"{theirs}.3",
    }


def _block_names(projection: str, contract: int, *, outside: bool = False) -> Names:
    """Returns names of a block whose norms stand in its branches or, as before, outside."""
    attention, feed_forward = "transformer.layers.*.0", "transformer.layers.*.1"
    inside = ".fn" if outside else ""
    return {
        f"{ATTENTION}.norm": f"{attention}.norm",
        f"{ATTENTION}.attention.qkv": f"{attention}{inside}.to_qkv",
        f"{ATTENTION}.attention.projection": f"{attention}{inside}.{projection}",
        f"{FEED_FORWARD}.norm": f"{feed_forward}.norm" if outside else f"{feed_forward}.net.0",
        f"{FEED_FORWARD}.feed_forward.expand": f"{feed_forward}{inside}.net.{1 - outside}",
        f"{FEED_FORWARD}.feed_forward.contract": f"{feed_forward}{inside}.net.{contract - outside}",
        "norm": "transformer.norm",
    }


def _head_names(options: Options, theirs: str) -> Names:
    if options["final_norm"] == "before_pool":
        return {"head.linear": theirs}
    return {"head.norm": f"{theirs}.0", "head.linear": f"{theirs}.1"}


_NORMS = {"patch_norm": _NORM, "patch_token_norm": _NORM, "final_norm": "before_pool"}
"""Norms of the current code; before, patches had none, and the last one stood in the head."""


def _norms(shapes: Shapes) -> Layout:
    patches = {} if "to_patch_embedding.2.weight" in shapes else {"patch_norm": None, "patch_token_norm": None}
    head = {} if "transformer.norm.weight" in shapes else {"final_norm": "after_pool"}
    return {**_NORMS, **patches, **head}


_LAYOUTS = {name: (value,) for name, value in _NORMS.items()}


def _read_vit(config: Config, options: Options, layout: Layout) -> Options:
    older, mean = layout["version"] == "older", options["pool"] == "mean"
    return {
        **_read_projection(config),
        "class_token": older or not mean,
        "pool": "mean_all" if older and mean else options["pool"],
    }


def _vit_names(options: Options, layout: Layout) -> Names:
    pattern = "" if layout["version"] == "older" else "1 n e -> n e"
    return {
        **_patch_names(options),
        "patch_embedding.class_token.token": Theirs("cls_token", pattern),
        "patch_embedding.positions.table": Theirs("pos_embedding", pattern),
        **_block_names("to_out.0", 4, outside=layout["blocks"] == "norm outside"),
        **_head_names(options, "mlp_head"),
    }


def _vit_layout(shapes: Shapes) -> Layout:
    outside = any(name.endswith(".0.fn.to_qkv.weight") for name in shapes)
    return {
        **_norms(shapes),
        "version": "older" if len(shapes.get("pos_embedding", ())) == 3 else "current",
        "blocks": "norm outside" if outside else "norm inside",
    }


def _empty_class_token(options: Options, layout: Layout) -> dict[str, tuple[int, ...]]:
    absent = layout["version"] == "current" and not options["class_token"]
    return {"cls_token": (0, options["emb_size"])} if absent else {}


VIT_PYTORCH = Family(
    name="vit_pytorch",
    fields=(*_SIZES, _HIDDEN, _POOL, *_MORE_SIZES),
    names=_vit_names,
    fixed=_FIXED,
    read_rest=_read_vit,
    inert=frozenset({"dropout", "emb_dropout"}),
    layouts={**_LAYOUTS, "version": ("current", "older"), "blocks": ("norm inside", "norm outside")},
    layout_options={name: name for name in _NORMS},
    find_layout=_vit_layout,
    extra=_empty_class_token,
)

SIMPLE_VIT = Family(
    name="simple_vit",
    fields=(*_SIZES, _HIDDEN, *_MORE_SIZES),
    names=lambda options, layout: {
        **_patch_names(options),
        **_block_names("to_out", 3),
        **_head_names(options, "linear_head"),
    },
    layouts=_LAYOUTS,
    layout_options={name: name for name in _NORMS},
    find_layout=_norms,
    fixed={
        **_FIXED,
        "class_token": False,
        "positions": "sincos2d simple_vit 10000.0",
        "pool": "mean",
        "projection_bias": False,
    },
)


def _read_crate(config: Config, options: Options, layout: Layout) -> Options:
    pool = options["pool"]
    return {**_read_projection(config), "pool": "mean_all" if pool == "mean" else pool, "hidden": config["dim"]}


def _crate_names(options: Options, layout: Layout) -> Names:
    attention, feed_forward = "transformer.layers.*.0", "transformer.layers.*.1"
    return {
        **_patch_names(options),
        "patch_embedding.class_token.token": "cls_token",
        "patch_embedding.positions.table": "pos_embedding",
        f"{ATTENTION}.norm": f"{attention}.norm",
        f"{ATTENTION}.attention.subspaces": f"{attention}.fn.qkv",
        f"{ATTENTION}.attention.projection": f"{attention}.fn.to_out.0",
        "encoder.*.feed_forward.norm": f"{feed_forward}.norm",  # ISTA has no residual
        "encoder.*.feed_forward.feed_forward.dictionary": f"{feed_forward}.fn.weight",
        "head.norm": "mlp_head.0",
        "head.linear": "mlp_head.1",
    }


CRATE = Family(
    name="crate",
    fields=(
        *_SIZES,
        _POOL,
        *_MORE_SIZES,
        Field("ista", 0.1, "step_size", write=lambda step_size: 0.1 if step_size is None else step_size),
    ),
    names=_crate_names,
    fixed={**_FIXED, "attention": "mssa", "feed_forward": "ista", "threshold": 0.1, "final_norm": "after_pool"},
    read_rest=_read_crate,
    inert=frozenset({"dropout", "emb_dropout", "mlp_dim"}),  # the last is taken and not used
)

_ATTENTIONS = {"literal": "divided_after_softmax", "correct": "softmax"}
_VARIANTS = {f"{layers}_{form}": ours for layers in ("fused", "separate") for form, ours in _ATTENTIONS.items()}


def _tutorial_read(config: Config, options: Options, layout: Layout) -> Options:
    scale = 1.0 if options["attention"] == "divided_after_softmax" else options["scale"]
    return {"hidden": config["forward_expansion"] * config["emb_size"], "scale": scale}


def _tutorial_write(options: Options, layout: Layout) -> Config:
    form = "literal" if options["attention"] == "divided_after_softmax" else "correct"
    return {
        "forward_expansion": options["hidden"] // options["emb_size"],
        "attention_variant": f"{layout['attention']}_{form}",
    }


def _tutorial_names(options: Options, layout: Layout) -> Names:
    attention, feed_forward = "1.*.0.fn", "1.*.1.fn"
    qkv: Names
    if layout["attention"] == "separate":
        qkv = {"qkv": Theirs(tuple(f"{attention}.1.{part}" for part in ("queries", "keys", "values")))}
    else:  # the tutorial has the three innermost
        three = {"qkv": 3, "h": options["num_heads"]}
        qkv = {
            "qkv.weight": Theirs(f"{attention}.1.qkv.weight", "(qkv h d) i -> (h d qkv) i", three),
            "qkv.bias": Theirs(f"{attention}.1.qkv.bias", "(qkv h d) -> (h d qkv)", three),
        }
    linear = layout["patches"] == "linear"
    return {
        **(_matrix_names(options, "0.projection.1") if linear else {f"{PATCHES}.conv": "0.projection.0"}),
        "patch_embedding.class_token.token": "0.cls_token",
        "patch_embedding.positions.table": Theirs("0.positions", "1 n e -> n e"),
        f"{ATTENTION}.norm": f"{attention}.0",
        **{f"{ATTENTION}.attention.{ours}": theirs for ours, theirs in qkv.items()},
        f"{ATTENTION}.attention.projection": f"{attention}.1.projection",
        f"{FEED_FORWARD}.norm": f"{feed_forward}.0",
        f"{FEED_FORWARD}.feed_forward.expand": f"{feed_forward}.1.0",
        f"{FEED_FORWARD}.feed_forward.contract": f"{feed_forward}.1.3",
        "head.norm": "2.1",
        "head.linear": "2.2",
    }


def _tutorial_find_layout(shapes: Shapes) -> Layout:
    return {
        "attention": "separate" if any(name.endswith(".queries.weight") for name in shapes) else "fused",
        "patches": "linear" if "0.projection.1.weight" in shapes else "conv",
    }


EINOPS_TUTORIAL = Family(
    name="einops_tutorial",
    fields=(
        Field("in_channels", 3, "in_channels"),
        Field("patch_size", 16, "patch_size", pair, height),
        Field("emb_size", 768, "emb_size"),
        Field("img_size", 224, "image_size", pair, height),
        Field("depth", 12, "depth"),
        Field("num_classes", 1000, "num_classes"),
        Field("num_heads", 8, "num_heads"),
        Field("forward_expansion", 4),
        choice("attention_variant", "fused_literal", "attention", _VARIANTS),
    ),
    names=_tutorial_names,
    fixed={"norm": "layernorm_1e-05", "final_norm": "after_pool", "pool": "mean_all"},
    read_rest=_tutorial_read,
    write_rest=_tutorial_write,
    inert=frozenset({"drop_p", "forward_drop_p", "dropout"}),
    layouts={"attention": ("fused", "separate"), "patches": ("conv", "linear")},
    find_layout=_tutorial_find_layout,
)
