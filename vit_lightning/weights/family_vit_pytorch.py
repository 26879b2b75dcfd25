"""lucidrains' vit-pytorch (ViT now and as in document 002, SimpleViT), and CRATE, which is written after it."""

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
    layer,
    norm,
    side,
    size,
    word,
)

_EPS = "layernorm_1e-05"
_SIZES = {"image_size": ..., "patch_size": ..., "num_classes": ..., "dim": ..., "depth": ..., "heads": ...}
_POOLS = {"cls": "cls", "mean": "mean"}
_PROJECTION = "patch_embedding.projection"
_SIMPLE_POSITIONS = "sincos2d simple_vit 10000.0"


def _read_common(config: Config) -> Options:
    dim_head = config["dim_head"]
    return {
        "image_size": size(config["image_size"]),
        "patch_size": size(config["patch_size"]),
        "in_channels": config["channels"],
        "num_classes": config["num_classes"],
        "emb_size": config["dim"],
        "depth": config["depth"],
        "num_heads": config["heads"],
        "patch_norm": _EPS,
        "patch_token_norm": _EPS,
        "norm": _EPS,
        "dim_head": dim_head,
        "scale": dim_head**-0.5,
        "qkv_bias": False,
        "hidden": config.get("mlp_dim", config["dim"]),
    }


def _write_common(options: Options) -> Config:
    return {
        "image_size": side(options["image_size"]),
        "patch_size": side(options["patch_size"]),
        "num_classes": options["num_classes"],
        "dim": options["emb_size"],
        "depth": options["depth"],
        "heads": options["num_heads"],
        "channels": options["in_channels"],
        "dim_head": options["dim_head"],
    }


def _has_projection(config: Config) -> bool:
    """The references leave the projection out where one head is as wide as the tokens."""
    return not (config["heads"] == 1 and config["dim_head"] == config["dim"])


def _dropouts(config: Config) -> Options:
    drop = config["dropout"]
    projection = {"projection": _has_projection(config), "projection_dropout": drop if _has_projection(config) else 0.0}
    return {**projection, "dropout": drop, "emb_dropout": config["emb_dropout"]}


def _rename_patches(options: Options) -> list[Rename]:
    """Norms and matrix over the pixels of a patch; theirs go through a patch with the channels innermost."""
    height, width = options["patch_size"]
    sizes = {"p1": height, "p2": width}
    pixels = "(c p1 p2) -> (p1 p2 c)"
    return [
        Rename(f"{_PROJECTION}.patch_norm.weight", "to_patch_embedding.1.weight", pixels, sizes),
        Rename(f"{_PROJECTION}.patch_norm.bias", "to_patch_embedding.1.bias", pixels, sizes),
        Rename(f"{_PROJECTION}.linear.weight", "to_patch_embedding.2.weight", "e (c p1 p2) -> e (p1 p2 c)", sizes),
        Rename(f"{_PROJECTION}.linear.bias", "to_patch_embedding.2.bias"),
        *norm(f"{_PROJECTION}.norm", "to_patch_embedding.3", _EPS),
    ]


def _read_vit(config: Config, layout: Layout) -> Options:
    pool = word("pool", config["pool"], _POOLS)
    older = layout["version"] == "older"
    return {
        **_read_common(config),
        **_dropouts(config),
        "class_token": older or pool == "cls",
        "pool": "mean_all" if older and pool == "mean" else pool,
        "feed_forward_dropout": config["dropout"],
        "output_dropout": config["dropout"],
    }


def _write_vit(options: Options, layout: Layout) -> Config:
    return {
        **_write_common(options),
        "mlp_dim": options["hidden"],
        "pool": options["pool"].removesuffix("_all"),
        "dropout": options["dropout"],
        "emb_dropout": options["emb_dropout"],
    }


def _rename_vit(options: Options, layout: Layout) -> list[Rename]:
    older = layout["version"] == "older"
    names = [
        *_rename_patches(options),
        Rename("patch_embedding.positions.table", "pos_embedding", "" if older else "1 n e -> n e"),
        *norm("norm", "transformer.norm", _EPS),
        *layer("head.linear", "mlp_head"),
    ]
    if options["class_token"]:
        names.append(Rename("patch_embedding.class_token.token", "cls_token", "" if older else "1 n e -> n e"))
    for block in range(options["depth"]):
        names += _rename_block(block, options, {"projection": "to_out.0", "contract": "4"}, out_bias=True)
    return names


def _rename_block(block: int, options: Options, theirs: dict[str, str], *, out_bias: bool) -> list[Rename]:
    first, attention, _ = attention_names(block)
    second, feed_forward, _ = feed_forward_names(block, options)
    place = f"transformer.layers.{block}"
    names = [
        *norm(first, f"{place}.0.norm", _EPS),
        *layer(f"{attention}.qkv", f"{place}.0.to_qkv", bias=False),
        *norm(second, f"{place}.1.net.0", _EPS),
        *layer(f"{feed_forward}.expand", f"{place}.1.net.1"),
        *layer(f"{feed_forward}.contract", f"{place}.1.net.{theirs['contract']}"),
    ]
    if options["projection"]:
        names += layer(f"{attention}.projection", f"{place}.0.{theirs['projection']}", bias=out_bias)
    return names


def _find_vit_layout(shapes: Shapes, config: Config) -> Layout:
    return {"version": "older" if len(shapes.get("pos_embedding", ())) == 3 else "current"}


def _nothing(options: Options, layout: Layout) -> dict[str, tuple[int, ...]]:
    absent = layout["version"] == "current" and not options["class_token"]
    return {"cls_token": (0, options["emb_size"])} if absent else {}


VIT_PYTORCH = Family(
    defaults={
        **_SIZES,
        "mlp_dim": ...,
        "pool": "cls",
        "channels": 3,
        "dim_head": 64,
        "dropout": 0.0,
        "emb_dropout": 0.0,
    },
    read=_read_vit,
    write=_write_vit,
    rename=_rename_vit,
    layouts={"version": ("current", "older")},
    find_layout=_find_vit_layout,
    layout_for=lambda options: {"version": "current"},
    extra=_nothing,
)


def _read_simple_vit(config: Config, layout: Layout) -> Options:
    return {
        **_read_common(config),
        "class_token": False,
        "positions": _SIMPLE_POSITIONS,
        "pool": "mean",
        "projection_bias": False,
    }


def _write_simple_vit(options: Options, layout: Layout) -> Config:
    return {**_write_common(options), "mlp_dim": options["hidden"]}


def _rename_simple_vit(options: Options, layout: Layout) -> list[Rename]:
    names = [
        *_rename_patches(options),
        *norm("norm", "transformer.norm", _EPS),
        *layer("head.linear", "linear_head"),
    ]
    for block in range(options["depth"]):
        names += _rename_block(block, options, {"projection": "to_out", "contract": "3"}, out_bias=False)
    return names


SIMPLE_VIT = Family(
    defaults={**_SIZES, "mlp_dim": ..., "channels": 3, "dim_head": 64},
    read=_read_simple_vit,
    write=_write_simple_vit,
    rename=_rename_simple_vit,
)


def _read_crate(config: Config, layout: Layout) -> Options:
    pool = word("pool", config["pool"], _POOLS)
    return {
        **_read_common(config),
        **_dropouts(config),
        "attention": "mssa",
        "feed_forward": "ista",
        "hidden": config["dim"],
        "step_size": config["ista"],
        "threshold": 0.1,
        "pool": "mean_all" if pool == "mean" else pool,
        "final_norm": "after_pool",
    }


def _write_crate(options: Options, layout: Layout) -> Config:
    return {
        **_write_common(options),
        "pool": options["pool"].removesuffix("_all"),
        "dropout": options["dropout"],
        "emb_dropout": options["emb_dropout"],
        "ista": 0.1 if options["step_size"] is None else options["step_size"],
    }


def _rename_crate(options: Options, layout: Layout) -> list[Rename]:
    names = [
        *_rename_patches(options),
        Rename("patch_embedding.positions.table", "pos_embedding"),
        Rename("patch_embedding.class_token.token", "cls_token"),
        *norm("head.norm", "mlp_head.0", _EPS),
        *layer("head.linear", "mlp_head.1"),
    ]
    for block in range(options["depth"]):
        first, attention, _ = attention_names(block)
        second, feed_forward, _ = feed_forward_names(block, options)
        place = f"transformer.layers.{block}"
        names += [
            *norm(first, f"{place}.0.norm", _EPS),
            *layer(f"{attention}.subspaces", f"{place}.0.fn.qkv", bias=False),
            *norm(second, f"{place}.1.norm", _EPS),
            Rename(f"{feed_forward}.dictionary", f"{place}.1.fn.weight"),
        ]
        if options["projection"]:
            names += layer(f"{attention}.projection", f"{place}.0.fn.to_out.0")
    return names


CRATE = Family(
    defaults={**_SIZES, "pool": "cls", "channels": 3, "dim_head": 64, "dropout": 0.0, "emb_dropout": 0.0, "ista": 0.1},
    inert=frozenset({"mlp_dim"}),  # the reference takes it and does not use it
    read=_read_crate,
    write=_write_crate,
    rename=_rename_crate,
)
