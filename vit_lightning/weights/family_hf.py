"""transformers' ViT, DeiT, DINOv2 and DINOv3, in memory and on disk; the last two by the names of Meta too."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vit_lightning.errors import UserError
from vit_lightning.sizes import pair, side
from vit_lightning.weights.fields import Field, choice, ratio
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, Options, Rotary, Shapes, norm_text
from vit_lightning.weights.tables import Config, Family, Layout, Names, Tensors, Theirs

_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}


def _flat_hf(config: Mapping[str, Any]) -> Config:
    """Returns a config with the number of labels, which in a config.json follows from their names."""
    flat = dict(config)
    without = str((flat.get("architectures") or [""])[0]).endswith("Model")  # which have no classifier
    if "num_labels" not in flat and (flat.get("id2label") or without):
        flat["num_labels"] = 0 if without else len(flat["id2label"])
    return flat


def _hf_names(options: Options, layout: Layout, model: str = "vit") -> Names:
    if layout["names"] == "memory":  # in memory since transformers 5
        block = f"{model}.layers.*"
        qkv = tuple(f"{block}.attention.{part}_proj" for part in "qkv")
        projection, expand, contract = "attention.o_proj", "mlp.fc1", "mlp.fc2"
    else:  # on disk, and in memory before
        block = f"{model}.encoder.layer.*"
        qkv = tuple(f"{block}.attention.attention.{part}" for part in ("query", "key", "value"))
        projection, expand, contract = "attention.output.dense", "intermediate.dense", "output.dense"
    return {
        "patch_embedding.projection.conv": f"{model}.embeddings.patch_embeddings.projection",
        "patch_embedding.class_token.token": f"{model}.embeddings.cls_token",
        "patch_embedding.positions.table": f"{model}.embeddings.position_embeddings",
        f"{ATTENTION}.norm": f"{block}.layernorm_before",
        f"{ATTENTION}.attention.qkv": Theirs(qkv),
        f"{ATTENTION}.attention.projection": f"{block}.{projection}",
        f"{FEED_FORWARD}.norm": f"{block}.layernorm_after",
        f"{FEED_FORWARD}.feed_forward.expand": f"{block}.{expand}",
        f"{FEED_FORWARD}.feed_forward.contract": f"{block}.{contract}",
        "norm": f"{model}.layernorm",
        "head.linear": "classifier",
    }


_INERT = frozenset({"initializer_range", "encoder_stride", "pooler_output_size", "pooler_act", "model_type"})
_INERT |= {"architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "mask_ratio"}
_INERT |= {"_name_or_path", "_commit_hash", "auto_map", "finetuning_task", "problem_type", "return_dict", "use_cache"}
_INERT |= {"output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "gradient_checkpointing"}
_INERT |= {"chunk_size_feed_forward", "is_encoder_decoder", "attn_implementation", "_attn_implementation_autoset"}
_INERT |= {"hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "decoder_intermediate_size"}
_INERT |= {"decoder_hidden_size", "decoder_num_attention_heads", "decoder_num_hidden_layers", "norm_pix_loss"}
"""What transformers writes into any config.json, and what else says nothing about the function."""


def _sizes(width: int, heads: int, patch: int, eps: float) -> tuple[Field, ...]:
    return (
        Field("hidden_size", width, "emb_size"),
        Field("num_hidden_layers", 12, "depth"),
        Field("num_attention_heads", heads, "num_heads"),
        choice("hidden_act", "gelu", "activation", _ACTIVATIONS),
        Field("layer_norm_eps", eps, "norm", lambda eps: norm_text("layernorm", float(eps)), _norm_eps),
        Field("image_size", 224, "image_size", pair, side),
        Field("patch_size", patch, "patch_size", pair, side),
        Field("num_channels", 3, "in_channels"),
    )


def _norm_eps(norm: str) -> float:
    """Returns the epsilon of a norm such as layernorm_1e-06."""
    return float(norm.rpartition("_")[2])


_MORE = (Field("layerscale_value", 1.0, "layer_scale"), Field("num_register_tokens", 0, "register_tokens"))

HF = Family(
    name="hf",
    fields=(
        *_sizes(768, 12, 16, 1e-12),
        Field("qkv_bias", True, "qkv_bias"),
        Field("intermediate_size", 3072, "hidden"),
        Field("num_labels", 2, "num_classes"),
    ),
    names=_hf_names,
    inert=_INERT,
    flatten=_flat_hf,
    layouts={"names": ("memory", "disk")},
    find_layout=lambda shapes: {"names": _place_of(shapes)},
)


def _place_of(shapes: Shapes) -> str:
    return "disk" if any(".encoder.layer." in name for name in shapes) else "memory"


def _deit_names(options: Options, layout: Layout) -> Names:
    """Returns names of a DeiT; without a head of its own the distillation token is a token like a register."""
    token, names = "register_tokens", _hf_names(options, layout, "deit")
    if layout["teacher"]:
        token = "distillation_token"
        names |= {"head.linear": "cls_classifier", "head.distillation": "distillation_classifier"}
    return {**names, f"patch_embedding.{token}.token": "deit.embeddings.distillation_token"}


DEIT = replace(
    HF,
    name="deit",
    names=_deit_names,
    read_rest=lambda config, options, layout: {"register_tokens": int(not layout["teacher"])},
    layouts={**HF.layouts, "teacher": (False, True)},
    layout_options={"teacher": "distillation_token"},
    find_layout=lambda shapes: {"names": _place_of(shapes), "teacher": "distillation_classifier.weight" in shapes},
)


_RENAMED = {
    r"^(dinov2|dinov2_with_registers|model)\.": "",
    r"^(cls_token|register_tokens|storage_tokens|pos_embed|patch_embed)\b": r"embeddings.\1",
    r"^embeddings\.storage_tokens$": "embeddings.register_tokens",
    r"^embeddings\.pos_embed$": "embeddings.position_embeddings",
    r"^embeddings\.patch_embed(dings\.projection|\.proj)\.": "embeddings.patch_embeddings.",
    r"^(blocks|encoder\.layer)\.": "layer.",
    r"^layernorm\.": "norm.",
    r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.": r".attention.\1_proj.",
    r"\.(attention\.output\.dense|attn\.proj)\.": ".attention.o_proj.",
    r"\.ls(\d)\.gamma": r".layer_scale\1.lambda1",
    r"\.mlp\.w1\.": ".mlp.gate_proj.",
    r"\.mlp\.(w2|fc1)\.": ".mlp.up_proj.",
    r"\.mlp\.(w3|fc2|weights_out)\.": ".mlp.down_proj.",
}
"""Names of Meta's repositories and of transformers' files and older models, and those that its DINOv3 has in a file."""
_JOINED = {"attn.qkv": [f"attention.{part}_proj" for part in "qkv"]}
_JOINED |= {name: ["mlp.gate_proj", "mlp.up_proj"] for name in ("mlp.w12", "mlp.weights_in")}
"""Layers that are one in some of those files."""
_UNUSED = re.compile(r"(.*\.)?mask_token|rope_embed\.periods|.*\.bias_mask|local_cls_norm\..*")
_POSITIONS, _REGISTERS = "embeddings.position_embeddings", "embeddings.register_tokens"


def _renamed(tensors: Tensors) -> Tensors:
    """Returns tensors by one set of names, without those that are empty or not needed for features."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if _UNUSED.fullmatch(name) or 0 in tensor.shape:
            continue
        if (mask := tensors.get(f"{name}_mask")) is not None:  # Meta's keys of DINOv3 have no bias
            tensor = tensor * mask.nan_to_num()
        for pattern, new in _RENAMED.items():
            name = re.sub(pattern, new, name)
        joined = next((layer for layer in _JOINED if f".{layer}." in name and tensor.ndim), "")
        parts = zip(_JOINED[joined], tensor.chunk(len(_JOINED[joined])), strict=False) if joined else [("", tensor)]
        found |= {name.replace(joined, part): value for part, value in parts}
    return found


def _feed_forward(gated: str) -> Callable[[Shapes], Layout]:
    names = re.compile(r".*\.mlp\.(w1|w12|gate_proj|weights_in)\.weight")
    return lambda shapes: {"feed_forward": gated if any(map(names.fullmatch, shapes)) else "mlp"}


def _dino_names(options: Options, layout: Layout) -> Names:
    block, mlp = "layer.*", f"{FEED_FORWARD}.feed_forward"
    return {
        "patch_embedding.class_token.token": "embeddings.cls_token",
        "patch_embedding.register_tokens.token": _REGISTERS,
        "patch_embedding.projection.conv": "embeddings.patch_embeddings",
        f"{ATTENTION}.norm": f"{block}.norm1",
        f"{ATTENTION}.attention.qkv": Theirs(tuple(f"{block}.attention.{part}_proj" for part in "qkv")),
        f"{ATTENTION}.attention.projection": f"{block}.attention.o_proj",
        f"{ATTENTION}.layer_scale.scale": f"{block}.layer_scale1.lambda1",
        f"{FEED_FORWARD}.norm": f"{block}.norm2",
        f"{mlp}.expand": f"{block}.mlp.up_proj",
        f"{mlp}.contract": f"{block}.mlp.down_proj",
        f"{FEED_FORWARD}.layer_scale.scale": f"{block}.layer_scale2.lambda1",
        "norm": "norm",
    }


def _names_v2(options: Options, layout: Layout) -> Names:
    names, mlp = _dino_names(options, layout), f"{FEED_FORWARD}.feed_forward"
    if layout["feed_forward"] == "swiglu_packed":
        del names[f"{mlp}.expand"]
        names[f"{mlp}.gate_expand"] = Theirs(("layer.*.mlp.gate_proj", "layer.*.mlp.up_proj"))
    return {**names, "patch_embedding.positions.table": _POSITIONS, "head.linear": "classifier"}


def _unpack_v2(tensors: Tensors, layout: Layout) -> Tensors:
    """Gives registers rows of zeros in the table of positions, which theirs lacks."""
    found = _renamed(tensors)
    table, extra = found.get(_POSITIONS), found.get(_REGISTERS)
    if table is None or not any(name.endswith(".layer_scale1.lambda1") for name in found):
        raise UserError(f"{_POSITIONS} or layer_scale1 is missing in the weights of dinov2")
    if extra is not None and table.ndim == 3 == extra.ndim:
        found[_POSITIONS] = torch.cat([table[:, :1], torch.zeros_like(extra), table[:, 1:]], dim=1)
    return found


def _read_v2(config: Config, options: Options, layout: Layout) -> Options:
    hidden = int(config["hidden_size"] * config["mlp_ratio"])
    gated = {"hidden": (int(hidden * 2 / 3) + 7) // 8 * 8, "feed_forward": "swiglu_packed", "activation": "silu"}
    pool = "cls_and_mean" if config["num_labels"] else "cls"
    return {"hidden": hidden, "pool": pool, **(gated if config["use_swiglu_ffn"] else {})}


def _write_v2(options: Options, layout: Layout) -> Config:
    gated = options["feed_forward"] == "swiglu_packed"
    hidden = options["hidden"] * 3 // 2 if gated else options["hidden"]
    return {"mlp_ratio": ratio(hidden, options["emb_size"]), "use_swiglu_ffn": gated}


_INERT_DINO = _INERT | {"drop_path_rate", "use_mask_token", "apply_layernorm", "reshape_hidden_states", "out_features"}
_INERT_DINO |= {"out_indices", "stage_names", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"}

DINOV2 = Family(
    name="dinov2",
    fields=(
        *_sizes(768, 12, 14, 1e-6),
        Field("qkv_bias", True, "qkv_bias"),
        *_MORE,
        Field("num_labels", 0, "num_classes"),
        Field("mlp_ratio", 4.0),
        Field("use_swiglu_ffn", False),
    ),
    names=_names_v2,
    read_rest=_read_v2,
    write_rest=_write_v2,
    inert=_INERT_DINO,
    layout_options={"feed_forward": "feed_forward"},
    find_layout=_feed_forward("swiglu_packed"),
    unpack=_unpack_v2,
)


def _names_v3(options: Options, layout: Layout) -> Names:
    """Returns names; its halves of a head are the pairs that ours rotates, of queries, keys and so values too."""
    sizes, attention = {"h": options["num_heads"], "two": 2}, "layer.*.attention"
    weights, biases = (tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias"))
    inner = "o (h pair two) -> o (h two pair)"
    return {
        **_dino_names(options, layout),
        f"{ATTENTION}.attention.qkv.weight": Theirs(weights, "(h pair two) i -> (h two pair) i", sizes),
        f"{ATTENTION}.attention.qkv.bias": Theirs(biases, "(h pair two) -> (h two pair)", sizes),
        f"{ATTENTION}.attention.projection.weight": Theirs(f"{attention}.o_proj.weight", inner, sizes),
        f"{FEED_FORWARD}.feed_forward.gate": "layer.*.mlp.gate_proj",
    }


def _unpack_v3(tensors: Tensors, layout: Layout) -> Tensors:
    """Gives keys a bias of zeros, which theirs lacks."""
    found = _renamed(tensors)
    if _POSITIONS in found:
        raise UserError(f"{_POSITIONS} is unexpected in the weights of dinov3")
    biases = [name for name in found if name.endswith(".q_proj.bias")]
    return {**{name.replace(".q_", ".k_"): torch.zeros_like(found[name]) for name in biases}, **found}


DINOV3 = Family(
    name="dinov3",
    fields=(
        *_sizes(384, 6, 16, 1e-5),
        *_MORE,
        Field("intermediate_size", 1536, "hidden"),
        Field("rope_theta", 100.0),
        choice("use_gated_mlp", False, "feed_forward", {False: "mlp", True: "swiglu"}),  # type: ignore[dict-item]
        Field("proj_bias", True, "projection_bias"),
        Field("mlp_bias", True, "feed_forward_bias"),
    ),
    names=_names_v3,
    fixed={"num_classes": 0, "positions": "none", "rotary": Rotary(temperature=100.0, centred=True)},
    read_rest=lambda config, options, layout: {"rotary": Rotary(float(config["rope_theta"]), centred=True)},
    write_rest=lambda options, layout: {"rope_theta": (options["rotary"] or Rotary()).temperature},
    without={"query_bias": True, "key_bias": False, "value_bias": True},
    inert=_INERT_DINO,
    layout_options={"feed_forward": "feed_forward"},
    find_layout=_feed_forward("swiglu"),
    unpack=_unpack_v3,
)
