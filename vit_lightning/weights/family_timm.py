"""timm's VisionTransformer, with its distilled form, and the older one of the user's documents 000 and 004."""

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
    final_norm_name,
    heads,
    layer,
    norm,
    norm_of_config,
    norm_to_config,
    ratio,
    side,
    size,
    word,
    word_for,
)

_NORM = "layernorm_1e-06"
_ACTIVATIONS = {
    "gelu": "gelu",
    "GELU": "gelu",
    "gelu_tanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "relu": "relu",
    "ReLU": "relu",
    "SiLU": "silu",
    "silu": "silu",
    "swish": "silu",
}
_FEED_FORWARDS = {"Mlp": "mlp", "SwiGLU": "swiglu", "SwiGLUPacked": "swiglu_packed"}
_POOLS = {"token": "cls", "avg": "mean", "max": "max", "avgmax": "mean_max", "map": "attention"}

_DEFAULTS: Config = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "global_pool": "token",
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "init_values": None,
    "class_token": True,
    "pos_embed": "learn",
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "drop_rate": 0.0,
    "pos_drop_rate": 0.0,
    "patch_drop_rate": 0.0,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "drop_path_rate": 0.0,
    "embed_norm_layer": None,
    "norm_layer": None,
    "act_layer": None,
    "mlp_layer": "Mlp",
}
_WITHOUT: Config = {
    "dynamic_img_size": False,
    "dynamic_img_pad": False,
    "embed_layer": "PatchEmbed",
    "block_fn": "Block",
    "attn_layer": "Attention",
}


_PLAIN = {
    "in_chans": "in_channels",
    "num_classes": "num_classes",
    "embed_dim": "emb_size",
    "depth": "depth",
    "num_heads": "num_heads",
    "qkv_bias": "qkv_bias",
    "proj_bias": "projection_bias",
    "class_token": "class_token",
    "reg_tokens": "register_tokens",
    "drop_rate": "head_dropout",
    "pos_drop_rate": "emb_dropout",
    "patch_drop_rate": "patch_dropout",
    "proj_drop_rate": "projection_dropout",
    "attn_drop_rate": "dropout",
    "drop_path_rate": "drop_path",
}
"""Arguments that are one of our options each."""


def _read(config: Config, layout: Layout) -> Options:
    kind = norm_of_config("norm_layer", config["norm_layer"], _NORM)
    hidden = int(config["embed_dim"] * config["mlp_ratio"])
    activation = word("act_layer", config["act_layer"] or "gelu", _ACTIVATIONS)
    feed_forward = word("mlp_layer", config["mlp_layer"] or "Mlp", _FEED_FORWARDS)
    natural = config["global_pool"] in ("avg", "avgmax", "max")
    after_pool = natural if config["fc_norm"] is None else config["fc_norm"]
    options: Options = {
        **{ours: config[theirs] for theirs, ours in _PLAIN.items()},
        **heads(config["embed_dim"], config["num_heads"]),
        **_read_tokens(config, layout),
        "image_size": size(config["img_size"]),
        "patch_size": size(config["patch_size"]),
        "patch_bias": not config["pre_norm"],
        "patch_token_norm": norm_of_config("embed_norm_layer", config["embed_norm_layer"], "") or None,
        "embedding_norm": kind if config["pre_norm"] else None,
        "norm": kind,
        "final_norm": ("after_pool" if after_pool else "before_pool") if config["final_norm"] else "none",
        "qk_norm": kind if config["qk_norm"] else None,
        "attention_norm": kind if config["scale_attn_norm"] else None,
        "feed_forward": feed_forward,
        "hidden": hidden // 2 if feed_forward == "swiglu_packed" else hidden,
        "activation": activation,
        "feed_forward_bias": config["proj_bias"],
        "feed_forward_norm": kind if config["scale_mlp_norm"] else None,
        "layer_scale": config["init_values"] or None,
        "feed_forward_dropout": config["proj_drop_rate"],
        "output_dropout": config["proj_drop_rate"],
    }
    if options["pool"].startswith("attention"):
        options |= {"pool_hidden": hidden, "pool_activation": activation, "pool_norm": kind}
    return options


def _read_tokens(config: Config, layout: Layout) -> Options:
    """Tokens before the patches, positions, and the pool, which depend on one another."""
    distilled = layout["distilled"]
    registers = 0 if distilled else config["reg_tokens"]  # the distilled class has none, whatever it is told
    prefix = config["class_token"] or registers
    pool = word("global_pool", config["global_pool"], _POOLS)
    positions = "learned_patches" if config["no_embed_class"] and prefix and not distilled else "learned"
    return {
        "distillation_token": distilled,
        "register_tokens": registers,
        "positions": "none" if config["pos_embed"] in ("", "none") else positions,
        "pool": f"{pool}_all" if pool != "cls" and config["pool_include_prefix"] and prefix else pool,
    }


def _write(options: Options, layout: Layout) -> Config:
    packed = options["feed_forward"] == "swiglu_packed"
    after_pool = options["final_norm"] == "after_pool"
    global_pool = word_for(options["pool"].removesuffix("_all"), _POOLS, "token")
    natural = global_pool in ("avg", "avgmax", "max")
    return {
        **{theirs: options[ours] for theirs, ours in _PLAIN.items()},
        "img_size": side(options["image_size"]),
        "patch_size": side(options["patch_size"]),
        "global_pool": global_pool,
        "mlp_ratio": ratio(options["hidden"] * (2 if packed else 1), options["emb_size"]),
        "qk_norm": options["qk_norm"] is not None,
        "scale_attn_norm": options["attention_norm"] is not None,
        "scale_mlp_norm": options["feed_forward_norm"] is not None,
        "init_values": options["layer_scale"],
        "pos_embed": "none" if options["positions"] == "none" else "learn",
        "no_embed_class": options["positions"] == "learned_patches",
        "pre_norm": options["embedding_norm"] is not None,
        "final_norm": options["final_norm"] != "none",
        "fc_norm": after_pool if options["final_norm"] != "none" and after_pool != natural else None,
        "pool_include_prefix": options["pool"].endswith("_all"),
        "embed_norm_layer": norm_to_config(options["patch_token_norm"]),
        "norm_layer": None if options["norm"] == _NORM else norm_to_config(options["norm"]),
        "act_layer": None if options["activation"] == "gelu" else word_for(options["activation"], _ACTIVATIONS, None),
        "mlp_layer": word_for(options["feed_forward"], _FEED_FORWARDS, "Mlp"),
    }


def _rename(options: Options, layout: Layout) -> list[Rename]:
    kind = options["norm"]
    names = [
        *layer("patch_embedding.projection.conv", "patch_embed.proj", bias=options["patch_bias"]),
        *norm("patch_embedding.projection.norm", "patch_embed.norm", options["patch_token_norm"]),
        *norm("patch_embedding.norm", "norm_pre", options["embedding_norm"]),
    ]
    tokens = {"class_token": "cls_token", "distillation_token": "dist_token", "register_tokens": "reg_token"}
    names += [Rename(f"patch_embedding.{ours}.token", theirs) for ours, theirs in tokens.items() if options[ours]]
    if options["positions"].startswith("learned"):
        names.append(Rename("patch_embedding.positions.table", "pos_embed"))
    for block in range(options["depth"]):
        names += _rename_block(block, f"{layout.get('blocks', 'blocks')}.{block}", options)
    if options["final_norm"] != "none":
        names += norm(final_norm_name(options), "fc_norm" if options["final_norm"] == "after_pool" else "norm", kind)
    if options["pool"].startswith("attention"):
        names += _rename_pool(options)
    if options["representation_size"]:
        names += layer("head.representation.linear", "pre_logits.fc")
    if options["num_classes"]:
        names += layer("head.linear", "head")
        names += layer("head.distillation", "head_dist") if options["distillation_token"] else []
    return names


def _rename_block(block: int, theirs: str, options: Options) -> list[Rename]:
    first, attention, first_scale = attention_names(block)
    second, feed_forward, second_scale = feed_forward_names(block, options)
    bias, kind = options["feed_forward_bias"], options["norm"]
    expand = {
        "swiglu": {"gate": "fc1_g", "expand": "fc1_x"},
        "swiglu_packed": {"gate_expand": "fc1"},
    }.get(options["feed_forward"], {"expand": "fc1"})
    names = [
        *norm(first, f"{theirs}.norm1", kind),
        *layer(f"{attention}.qkv", f"{theirs}.attn.qkv", bias=options["qkv_bias"]),
        *norm(f"{attention}.query_norm", f"{theirs}.attn.q_norm", options["qk_norm"]),
        *norm(f"{attention}.key_norm", f"{theirs}.attn.k_norm", options["qk_norm"]),
        *norm(f"{attention}.norm", f"{theirs}.attn.norm", options["attention_norm"]),
        *layer(f"{attention}.projection", f"{theirs}.attn.proj", bias=options["projection_bias"]),
        *norm(second, f"{theirs}.norm2", kind),
        *(
            rename
            for ours, name in expand.items()
            for rename in layer(f"{feed_forward}.{ours}", f"{theirs}.mlp.{name}", bias=bias)
        ),
        *norm(f"{feed_forward}.norm", f"{theirs}.mlp.norm", options["feed_forward_norm"]),
        *layer(f"{feed_forward}.contract", f"{theirs}.mlp.fc2", bias=bias),
    ]
    if options["layer_scale"] is not None:
        names += [Rename(first_scale, f"{theirs}.ls1.gamma"), Rename(second_scale, f"{theirs}.ls2.gamma")]
    return names


def _rename_pool(options: Options) -> list[Rename]:
    layers = {
        "query": "q",
        "kv": "kv",
        "projection": "proj",
        "feed_forward.expand": "mlp.fc1",
        "feed_forward.contract": "mlp.fc2",
    }
    return [
        Rename("head.pool.probe", "attn_pool.latent"),
        *norm("head.pool.norm", "attn_pool.norm", options["pool_norm"]),
        *(rename for ours, theirs in layers.items() for rename in layer(f"head.pool.{ours}", f"attn_pool.{theirs}")),
    ]


def _find_layout(shapes: Shapes, config: Config) -> Layout:
    return {"distilled": "dist_token" in shapes}


TIMM = Family(
    defaults=_DEFAULTS,
    without=_WITHOUT,
    inert=frozenset({"weight_init", "fix_init"}),
    read=_read,
    write=_write,
    rename=_rename,
    headless=True,
    layouts={"distilled": (False, True)},
    find_layout=_find_layout,
    layout_for=lambda options: {"distilled": options["distillation_token"]},
)


def _read_legacy(config: Config, layout: Layout) -> Options:
    drop = config["drop_ratio"]
    shape = heads(config["embed_dim"], config["num_heads"])
    return {
        "image_size": size(config["img_size"]),
        "patch_size": size(config["patch_size"]),
        "in_channels": config["in_c"],
        "num_classes": config["num_classes"],
        "depth": config["depth"],
        **shape,
        "distillation_token": config["distilled"],
        "norm": norm_of_config("norm_layer", config["norm_layer"], _NORM),
        "scale": config["qk_scale"] or shape["scale"],
        "qkv_bias": config["qkv_bias"],
        "hidden": int(config["embed_dim"] * config["mlp_ratio"]),
        "activation": word("act_layer", config["act_layer"] or "gelu", _ACTIVATIONS),
        # the document leaves the representation out when there is a distillation token
        "representation_size": None if config["distilled"] else config["representation_size"] or None,
        "emb_dropout": drop,
        "dropout": config["attn_drop_ratio"],
        "projection_dropout": drop,
        "feed_forward_dropout": drop,
        "output_dropout": drop,
        "drop_path": config["drop_path_ratio"],
    }


def _write_legacy(options: Options, layout: Layout) -> Config:
    usual = options["dim_head"] ** -0.5
    return {
        "img_size": side(options["image_size"]),
        "patch_size": side(options["patch_size"]),
        "in_c": options["in_channels"],
        "num_classes": options["num_classes"],
        "embed_dim": options["emb_size"],
        "depth": options["depth"],
        "num_heads": options["num_heads"],
        "mlp_ratio": ratio(options["hidden"], options["emb_size"]),
        "qkv_bias": options["qkv_bias"],
        "qk_scale": None if options["scale"] == usual else options["scale"],
        "representation_size": options["representation_size"],
        "distilled": options["distillation_token"],
        "drop_ratio": options["emb_dropout"],
        "attn_drop_ratio": options["dropout"],
        "drop_path_ratio": options["drop_path"],
        "norm_layer": None if options["norm"] == _NORM else norm_to_config(options["norm"]),
        "act_layer": None if options["activation"] == "gelu" else word_for(options["activation"], _ACTIVATIONS, None),
    }


def _find_legacy_layout(shapes: Shapes, config: Config) -> Layout:
    return {"blocks": "block" if any(name.startswith("block.") for name in shapes) else "blocks"}


TIMM_LEGACY = Family(
    defaults={
        "img_size": 224,
        "patch_size": 16,
        "in_c": 3,
        "num_classes": 1000,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "qk_scale": None,
        "representation_size": None,
        "distilled": False,
        "drop_ratio": 0.0,
        "attn_drop_ratio": 0.0,
        "drop_path_ratio": 0.0,
        "norm_layer": None,
        "act_layer": None,
    },
    without={"embed_layer": "PatchEmbed"},
    read=_read_legacy,
    write=_write_legacy,
    rename=_rename,
    headless=True,
    layouts={"blocks": ("blocks", "block")},
    find_layout=_find_legacy_layout,
    layout_for=lambda options: {"blocks": "blocks"},
)
