"""The ViT of the einops tutorial (the user's document 001), with both of its attentions, as written and corrected."""

from __future__ import annotations

from vit_lightning.weights.options import Options
from vit_lightning.weights.tables import (
    Config,
    Family,
    Layout,
    Rename,
    Shapes,
    attention_names,
    feed_forward_names,
    heads,
    layer,
    norm,
    size,
    word,
)

_VARIANTS = {f"{layers}_{form}": (layers, form) for layers in ("fused", "separate") for form in ("literal", "correct")}


def _read_einops_tutorial(config: Config, layout: Layout) -> Options:
    word("attention_variant", config["attention_variant"], {name: name for name in _VARIANTS})
    literal = config["attention_variant"].endswith("literal")
    options = heads(config["emb_size"], config["num_heads"])
    return {
        **options,
        "scale": 1.0 if literal else options["scale"],
        "attention": "divided_after_softmax" if literal else "softmax",
        "image_size": size(config["img_size"]),
        "patch_size": size(config["patch_size"]),
        "in_channels": config["in_channels"],
        "num_classes": config["num_classes"],
        "depth": config["depth"],
        "hidden": config["forward_expansion"] * config["emb_size"],
        "norm": "layernorm_1e-05",
        "final_norm": "after_pool",
        "pool": "mean_all",
        "dropout": config["dropout"],
        "projection_dropout": config["drop_p"],
        "feed_forward_dropout": config["forward_drop_p"],
        "output_dropout": config["drop_p"],
    }


def _write_einops_tutorial(options: Options, layout: Layout) -> Config:
    form = "literal" if options["attention"] == "divided_after_softmax" else "correct"
    return {
        "in_channels": options["in_channels"],
        "patch_size": options["patch_size"][0],
        "emb_size": options["emb_size"],
        "img_size": options["image_size"][0],
        "depth": options["depth"],
        "num_classes": options["num_classes"],
        "num_heads": options["num_heads"],
        "forward_expansion": options["hidden"] // options["emb_size"],
        "drop_p": options["projection_dropout"],
        "forward_drop_p": options["feed_forward_dropout"],
        "dropout": options["dropout"],
        "attention_variant": f"{layout['attention']}_{form}",
    }


def _rename_einops_tutorial(options: Options, layout: Layout) -> list[Rename]:
    names = [
        *layer("patch_embedding.projection.conv", "0.projection.0"),
        Rename("patch_embedding.class_token.token", "0.cls_token"),
        Rename("patch_embedding.positions.table", "0.positions", "1 n e -> n e"),
        *norm("head.norm", "2.1", options["norm"]),
        *layer("head.linear", "2.2"),
    ]
    sizes = {"qkv": 3, "h": options["num_heads"]}
    for block in range(options["depth"]):
        theirs = f"1.{block}"
        first, attention, _ = attention_names(block)
        second, feed_forward, _ = feed_forward_names(block, options)
        ours = {"weight": f"{attention}.qkv.weight", "bias": f"{attention}.qkv.bias"}
        if layout["attention"] == "separate":
            parts = [f"{theirs}.0.fn.1.{part}" for part in ("queries", "keys", "values")]
            names += [Rename(name, tuple(f"{part}.{kind}" for part in parts)) for kind, name in ours.items()]
        else:  # the tutorial has the three innermost
            fused = f"{theirs}.0.fn.1.qkv"
            names.append(Rename(ours["weight"], f"{fused}.weight", "(qkv h d) i -> (h d qkv) i", sizes))
            names.append(Rename(ours["bias"], f"{fused}.bias", "(qkv h d) -> (h d qkv)", sizes))
        names += [
            *norm(first, f"{theirs}.0.fn.0", options["norm"]),
            *layer(f"{attention}.projection", f"{theirs}.0.fn.1.projection"),
            *norm(second, f"{theirs}.1.fn.0", options["norm"]),
            *layer(f"{feed_forward}.expand", f"{theirs}.1.fn.1.0"),
            *layer(f"{feed_forward}.contract", f"{theirs}.1.fn.1.3"),
        ]
    return names


def _find_einops_layout(shapes: Shapes, config: Config) -> Layout:
    return {"attention": "separate" if any(name.endswith(".queries.weight") for name in shapes) else "fused"}


EINOPS_TUTORIAL = Family(
    defaults={
        "in_channels": 3,
        "patch_size": 16,
        "emb_size": 768,
        "img_size": 224,
        "depth": 12,
        "num_classes": 1000,
        "num_heads": 8,
        "forward_expansion": 4,
        "drop_p": 0.0,
        "forward_drop_p": 0.0,
        "dropout": 0.0,
        "attention_variant": "fused_literal",
    },
    read=_read_einops_tutorial,
    write=_write_einops_tutorial,
    rename=_rename_einops_tutorial,
    layouts={"attention": ("fused", "separate")},
    find_layout=_find_einops_layout,
    layout_for=lambda options: {"attention": "fused"},
)
