"""timm's VisionTransformer with its distilled form, the older code that many copies of it come from, torchvision's ViT,
and one whose encoder is ``nn.TransformerEncoder``."""

from vit_lightning.sizes import pair, side
from vit_lightning.weights.fields import Field, choice, height, norm_choice, ratio, word_for
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, Options
from vit_lightning.weights.tables import Config, Family, Layout, Names

_NORM = "layernorm_1e-06"
_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "GELU"), "gelu"),
    **dict.fromkeys(("gelu_tanh", "GELUTanh"), "gelu_tanh"),
    **dict.fromkeys(("quick_gelu", "quickgelu", "QuickGELU"), "quick_gelu"),
    **dict.fromkeys(("relu", "ReLU"), "relu"),
    **dict.fromkeys(("SiLU", "silu", "swish"), "silu"),
}
_FEED_FORWARDS = {"Mlp": "mlp", "SwiGLU": "swiglu", "SwiGLUPacked": "swiglu_packed"}
_POOLS = {"token": "cls", "avg": "mean", "max": "max", "avgmax": "mean_max", "map": "attention"}
_SCALES = (("ls1.gamma", "ls2.gamma"), ("gamma_1", "gamma_2"))  # timm's, and those of DeiT III's own code
_DROPOUTS = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")
_NORM_AFTER_POOL = ("avg", "avgmax", "max")  # where fc_norm is not given
_SIZES = (
    Field("img_size", 224, "image_size", pair, side),
    Field("patch_size", 16, "patch_size", pair, side),
    Field("num_classes", 1000, "num_classes"),
    Field("embed_dim", 768, "emb_size"),
    Field("depth", 12, "depth"),
    Field("num_heads", 12, "num_heads"),
    Field("mlp_ratio", 4.0),
)
_LAYERS = (
    Field("qkv_bias", True, "qkv_bias"),
    norm_choice("norm_layer", "norm", unset=_NORM),
    choice("act_layer", None, "activation", _ACTIVATIONS, unset="gelu"),
)


def _read(config: Config, options: Options, layout: Layout) -> Options:
    kind, pool, distilled = options["norm"], options["pool"], options["distillation_token"]
    hidden = int(config["embed_dim"] * config["mlp_ratio"])
    after_pool = config["global_pool"] in _NORM_AFTER_POOL if config["fc_norm"] is None else config["fc_norm"]
    registers = 0 if distilled else config["reg_tokens"]  # the distilled class ignores this argument and the next
    prefix = config["class_token"] or registers
    positions = "learned_patches" if config["no_embed_class"] and prefix and not distilled else "learned"
    norms = ("embedding_norm", "qk_norm", "attention_norm", "feed_forward_norm")
    more = {"pool_hidden": hidden, "pool_activation": options["activation"], "pool_norm": kind}
    return {
        **{name: kind if options[name] else None for name in norms},
        **(more if pool == "attention" else {}),
        "register_tokens": registers,
        "positions": "none" if config["pos_embed"] in ("", "none") else positions,
        "pool": f"{pool}_all" if pool != "cls" and config["pool_include_prefix"] and prefix else pool,
        "patch_bias": not config["pre_norm"],
        "final_norm": ("after_pool" if after_pool else "before_pool") if config["final_norm"] else "none",
        "hidden": hidden // 2 if options["feed_forward"] == "swiglu_packed" else hidden,
    }


def _write(options: Options, layout: Layout) -> Config:
    packed, after_pool = options["feed_forward"] == "swiglu_packed", options["final_norm"] == "after_pool"
    global_pool = word_for(options["pool"].removesuffix("_all"), _POOLS, "token")
    unusual = options["final_norm"] != "none" and after_pool != (global_pool in _NORM_AFTER_POOL)
    return {
        "global_pool": global_pool,
        "mlp_ratio": ratio(options["hidden"] * (2 if packed else 1), options["emb_size"]),
        "pos_embed": "none" if options["positions"] == "none" else "learn",
        "no_embed_class": options["positions"] == "learned_patches",
        "final_norm": options["final_norm"] != "none",
        "fc_norm": after_pool if unusual else None,
        "pool_include_prefix": options["pool"].endswith("_all"),
    }


def _names(options: Options, layout: Layout) -> Names:
    block, scales = f"{layout.get('blocks', 'blocks')}.*", layout.get("scales", _SCALES[0])
    return {
        "patch_embedding.projection.conv": "patch_embed.proj",
        "patch_embedding.projection.norm": "patch_embed.norm",
        "patch_embedding.class_token.token": "cls_token",
        "patch_embedding.distillation_token.token": "dist_token",
        "patch_embedding.register_tokens.token": "reg_token",
        "patch_embedding.positions.table": "pos_embed",
        "patch_embedding.norm": "norm_pre",
        f"{ATTENTION}.norm": f"{block}.norm1",
        f"{ATTENTION}.attention.qkv": f"{block}.attn.qkv",
        f"{ATTENTION}.attention.query_norm": f"{block}.attn.q_norm",
        f"{ATTENTION}.attention.key_norm": f"{block}.attn.k_norm",
        f"{ATTENTION}.attention.norm": f"{block}.attn.norm",
        f"{ATTENTION}.attention.projection": f"{block}.attn.proj",
        f"{ATTENTION}.layer_scale.scale": f"{block}.{scales[0]}",
        f"{FEED_FORWARD}.norm": f"{block}.norm2",
        f"{FEED_FORWARD}.feed_forward.gate": f"{block}.mlp.fc1_g",
        f"{FEED_FORWARD}.feed_forward.gate_expand": f"{block}.mlp.fc1",
        f"{FEED_FORWARD}.feed_forward.expand": f"{block}.mlp.fc1" + "_x" * (options["feed_forward"] == "swiglu"),
        f"{FEED_FORWARD}.feed_forward.norm": f"{block}.mlp.norm",
        f"{FEED_FORWARD}.feed_forward.contract": f"{block}.mlp.fc2",
        f"{FEED_FORWARD}.layer_scale.scale": f"{block}.{scales[1]}",
        "norm": "norm",
        "head.pool": "attn_pool",
        "head.pool.probe": "attn_pool.latent",
        "head.pool.query": "attn_pool.q",
        "head.pool.projection": "attn_pool.proj",
        "head.pool.feed_forward.expand": "attn_pool.mlp.fc1",
        "head.pool.feed_forward.contract": "attn_pool.mlp.fc2",
        "head.norm": "fc_norm",
        "head.representation.linear": "pre_logits.fc",
        "head.linear": "head",
        "head.distillation": "head_dist",
    }


TIMM = Family(
    name="timm",
    fields=(
        *_SIZES,
        *_LAYERS,
        Field("in_chans", 3, "in_channels"),
        choice("global_pool", "token", "pool", _POOLS),
        Field("qk_norm", False, "qk_norm", write=bool),
        Field("scale_attn_norm", False, "attention_norm", write=bool),
        Field("scale_mlp_norm", False, "feed_forward_norm", write=bool),
        Field("proj_bias", True, ("projection_bias", "feed_forward_bias")),
        Field("init_values", None, "layer_scale", lambda value: float(value) if value else None),
        Field("class_token", True, "class_token"),
        Field("pos_embed", "learn"),
        Field("no_embed_class", False),
        Field("reg_tokens", 0, "register_tokens"),
        Field("pre_norm", False, "embedding_norm", write=bool),
        Field("final_norm", True),
        Field("fc_norm", None),
        Field("pool_include_prefix", False),
        norm_choice("embed_norm_layer", "patch_token_norm", unset=None),
        choice("mlp_layer", "Mlp", "feed_forward", _FEED_FORWARDS, unset="Mlp"),
    ),
    names=_names,
    read_rest=_read,
    write_rest=_write,
    without={"embed_layer": "PatchEmbed", "block_fn": "Block", "attn_layer": "Attention"},
    inert=frozenset({"weight_init", "fix_init", "drop_path_rate", "dynamic_img_size", "dynamic_img_pad", *_DROPOUTS}),
    layouts={"distilled": (False, True), "scales": _SCALES},
    layout_options={"distilled": "distillation_token"},
    find_layout=lambda shapes: {"distilled": "dist_token" in shapes, "scales": _SCALES["blocks.0.gamma_1" in shapes]},
)


def _read_legacy(config: Config, options: Options, layout: Layout) -> Options:
    # the older code leaves the representation out when there is a distillation token
    representation = None if config["distilled"] else config["representation_size"] or None
    return {"hidden": int(config["embed_dim"] * config["mlp_ratio"]), "representation_size": representation}


def _write_legacy(options: Options, layout: Layout) -> Config:
    usual = options["scale"] == options["dim_head"] ** -0.5
    return {"mlp_ratio": ratio(options["hidden"], options["emb_size"]), "qk_scale": None if usual else options["scale"]}


TIMM_LEGACY = Family(
    name="timm_legacy",
    fields=(
        *_SIZES,
        *_LAYERS,
        Field("in_c", 3, "in_channels"),
        Field("qk_scale", None, "scale"),
        Field("representation_size", None, "representation_size"),
        Field("distilled", False, "distillation_token"),
    ),
    names=_names,
    read_rest=_read_legacy,
    write_rest=_write_legacy,
    without={"embed_layer": "PatchEmbed"},
    inert=frozenset({"drop_ratio", "attn_drop_ratio", "drop_path_ratio"}),
    layouts={"blocks": ("blocks", "block")},
    find_layout=lambda shapes: {"blocks": "block" if any(name.startswith("block.") for name in shapes) else "blocks"},
)


def _multi_head_attention(theirs: str) -> Names:
    """Returns the names in torch's ``nn.MultiheadAttention``."""
    return {
        f"{ATTENTION}.attention.qkv.weight": f"{theirs}.in_proj_weight",
        f"{ATTENTION}.attention.qkv.bias": f"{theirs}.in_proj_bias",
        f"{ATTENTION}.attention.projection": f"{theirs}.out_proj",
    }


def _torchvision_names(options: Options, layout: Layout) -> Names:
    block = "encoder.layers.encoder_layer_*"
    return {
        "patch_embedding.projection.conv": "conv_proj",
        "patch_embedding.class_token.token": "class_token",
        "patch_embedding.positions.table": "encoder.pos_embedding",
        f"{ATTENTION}.norm": f"{block}.ln_1",
        **_multi_head_attention(f"{block}.self_attention"),
        f"{FEED_FORWARD}.norm": f"{block}.ln_2",
        f"{FEED_FORWARD}.feed_forward.expand": f"{block}.mlp.{layout['mlp'][0]}",
        f"{FEED_FORWARD}.feed_forward.contract": f"{block}.mlp.{layout['mlp'][1]}",
        "norm": "encoder.ln",
        "head.representation.linear": "heads.pre_logits",
        "head.linear": "heads.head",
    }


_MLP_NAMES = (["0", "3"], ["linear_1", "linear_2"])  # now, and before torchvision 0.14

TORCHVISION = Family(
    name="torchvision",
    fields=(
        Field("image_size", ..., "image_size", pair, height),
        Field("patch_size", ..., "patch_size", pair, height),
        Field("num_layers", ..., "depth"),
        Field("num_heads", ..., "num_heads"),
        Field("hidden_dim", ..., "emb_size"),
        Field("mlp_dim", ..., "hidden"),
        Field("num_classes", 1000, "num_classes"),
        Field("representation_size", None, "representation_size"),
        norm_choice("norm_layer", "norm", unset="layernorm_1e-06"),
    ),
    names=_torchvision_names,
    without={"conv_stem_configs": None},
    inert=frozenset({"dropout", "attention_dropout"}),
    layouts={"mlp": _MLP_NAMES},
    find_layout=lambda shapes: {"mlp": _MLP_NAMES[any(".mlp.linear_1." in name for name in shapes)]},
)


def _torch_encoder_names(options: Options, layout: Layout) -> Names:
    block = "blocks.layers"
    return {
        **_names(options, {"blocks": block}),
        **_multi_head_attention(f"{block}.*.self_attn"),
        f"{FEED_FORWARD}.feed_forward.expand": f"{block}.*.linear1",
        f"{FEED_FORWARD}.feed_forward.contract": f"{block}.*.linear2",
    }


TORCH_ENCODER = Family(
    name="torch_encoder",
    fields=_SIZES,
    names=_torch_encoder_names,
    fixed={"norm": "layernorm_1e-05"},
    read_rest=lambda config, options, layout: {"hidden": int(config["embed_dim"] * config["mlp_ratio"])},
    write_rest=lambda options, layout: {"mlp_ratio": ratio(options["hidden"], options["emb_size"])},
)
