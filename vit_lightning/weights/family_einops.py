"""The ViT of the einops tutorial, with both of its attentions, as written and corrected."""

from __future__ import annotations

from vit_lightning.weights.fields import Field, choice, height, size
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, Options, Shapes
from vit_lightning.weights.tables import Config, Family, Layout, Names, Theirs

_ATTENTIONS = {"literal": "divided_after_softmax", "correct": "softmax"}
_VARIANTS = {f"{layers}_{form}": ours for layers in ("fused", "separate") for form, ours in _ATTENTIONS.items()}


def _read(config: Config, options: Options, layout: Layout) -> Options:
    scale = 1.0 if options["attention"] == "divided_after_softmax" else options["scale"]
    return {"hidden": config["forward_expansion"] * config["emb_size"], "scale": scale}


def _write(options: Options, layout: Layout) -> Config:
    form = "literal" if options["attention"] == "divided_after_softmax" else "correct"
    return {
        "forward_expansion": options["hidden"] // options["emb_size"],
        "attention_variant": f"{layout['attention']}_{form}",
    }


def _names(options: Options, layout: Layout) -> Names:
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
    sizes = dict(zip(("p1", "p2"), options["patch_size"], strict=True))
    patches: Names = {"conv": "0.projection.0"}
    if layout["patches"] == "linear":
        kernel = Theirs("0.projection.1.weight", "e c p1 p2 -> e (p1 p2 c)", sizes)
        patches = {"conv.weight": kernel, "conv.bias": "0.projection.1.bias"}
    return {
        **{f"patch_embedding.projection.{ours}": theirs for ours, theirs in patches.items()},
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


def _find_layout(shapes: Shapes) -> Layout:
    return {
        "attention": "separate" if any(name.endswith(".queries.weight") for name in shapes) else "fused",
        "patches": "linear" if "0.projection.1.weight" in shapes else "conv",
    }


EINOPS_TUTORIAL = Family(
    name="einops_tutorial",
    fields=(
        Field("in_channels", 3, "in_channels"),
        Field("patch_size", 16, "patch_size", size, height),
        Field("emb_size", 768, "emb_size"),
        Field("img_size", 224, "image_size", size, height),
        Field("depth", 12, "depth"),
        Field("num_classes", 1000, "num_classes"),
        Field("num_heads", 8, "num_heads"),
        Field("forward_expansion", 4),
        Field("drop_p", 0.0, ("projection_dropout", "output_dropout")),
        Field("forward_drop_p", 0.0, "feed_forward_dropout"),
        Field("dropout", 0.0, "dropout"),
        choice("attention_variant", "fused_literal", "attention", _VARIANTS),
    ),
    names=_names,
    fixed={"norm": "layernorm_1e-05", "final_norm": "after_pool", "pool": "mean_all"},
    read_rest=_read,
    write_rest=_write,
    layouts={"attention": ("fused", "separate"), "patches": ("conv", "linear")},
    find_layout=_find_layout,
)
