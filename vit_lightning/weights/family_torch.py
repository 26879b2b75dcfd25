"""torchvision's ViT, Hugging Face's ViT and DeiT, and one whose encoder is ``nn.TransformerEncoder``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vit_lightning.sizes import side
from vit_lightning.weights.fields import Field, choice, height, norm_choice, ratio, size
from vit_lightning.weights.options import ATTENTION, DROPOUTS, FEED_FORWARD, Options, Shapes, norm_text
from vit_lightning.weights.tables import Config, Family, Layout, Names, Theirs


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
        Field("image_size", ..., "image_size", size, height),
        Field("patch_size", ..., "patch_size", size, height),
        Field("num_layers", ..., "depth"),
        Field("num_heads", ..., "num_heads"),
        Field("hidden_dim", ..., "emb_size"),
        Field("mlp_dim", ..., "hidden"),
        Field("dropout", 0.0, DROPOUTS),
        Field("attention_dropout", 0.0, "dropout"),
        Field("num_classes", 1000, "num_classes"),
        Field("representation_size", None, "representation_size"),
        norm_choice("norm_layer", "norm", unset="layernorm_1e-06"),
    ),
    names=_torchvision_names,
    without={"conv_stem_configs": None},
    layouts={"mlp": _MLP_NAMES},
    find_layout=lambda shapes: {"mlp": _MLP_NAMES[any(".mlp.linear_1." in name for name in shapes)]},
)

HF_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}


def _flat_hf(config: Mapping[str, Any]) -> Config:
    """Returns a config with the number of labels, which in a config.json follows from their names."""
    flat = dict(config)
    if "num_labels" not in flat and flat.get("id2label"):
        flat["num_labels"] = len(flat["id2label"])
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


HF_INERT = frozenset({"initializer_range", "encoder_stride", "pooler_output_size", "pooler_act", "model_type"})
HF_INERT |= {"architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id"}
HF_INERT |= {"_name_or_path", "_commit_hash", "auto_map", "finetuning_task", "problem_type", "return_dict", "use_cache"}
HF_INERT |= {"output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "gradient_checkpointing"}
HF_INERT |= {"chunk_size_feed_forward", "is_encoder_decoder", "attn_implementation", "_attn_implementation_autoset"}
"""What transformers writes into any config.json, and what else says nothing about the function."""


def norm_eps(norm: str) -> float:
    """Returns the epsilon of a norm such as layernorm_1e-06."""
    return float(norm.rpartition("_")[2])


HF = Family(
    name="hf",
    fields=(
        Field("hidden_size", 768, "emb_size"),
        Field("num_hidden_layers", 12, "depth"),
        Field("num_attention_heads", 12, "num_heads"),
        Field("intermediate_size", 3072, "hidden"),
        choice("hidden_act", "gelu", "activation", HF_ACTIVATIONS),
        Field("hidden_dropout_prob", 0.0, ("emb_dropout", "projection_dropout", "output_dropout")),
        Field("attention_probs_dropout_prob", 0.0, "dropout"),
        Field("layer_norm_eps", 1e-12, "norm", lambda eps: norm_text("layernorm", float(eps)), norm_eps),
        Field("image_size", 224, "image_size", size, side),
        Field("patch_size", 16, "patch_size", size, side),
        Field("num_channels", 3, "in_channels"),
        Field("qkv_bias", True, "qkv_bias"),
        Field("num_labels", 2, "num_classes"),
    ),
    names=_hf_names,
    inert=HF_INERT,
    flatten=_flat_hf,
    headless=True,
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
    find_layout=lambda shapes: {
        "names": _place_of(shapes),
        "teacher": "distillation_classifier.weight" in shapes,
    },
)


def _torch_encoder_names(options: Options, layout: Layout) -> Names:
    block = "blocks.layers.*"
    return {
        "patch_embedding.projection.conv": "patch_embed.proj",
        "patch_embedding.class_token.token": "cls_token",
        "patch_embedding.positions.table": "pos_embed",
        f"{ATTENTION}.norm": f"{block}.norm1",
        **_multi_head_attention(f"{block}.self_attn"),
        f"{FEED_FORWARD}.norm": f"{block}.norm2",
        f"{FEED_FORWARD}.feed_forward.expand": f"{block}.linear1",
        f"{FEED_FORWARD}.feed_forward.contract": f"{block}.linear2",
        "norm": "norm",
        "head.linear": "head",
    }


TORCH_ENCODER = Family(
    name="torch_encoder",
    fields=(
        Field("img_size", 224, "image_size", size, height),
        Field("patch_size", 16, "patch_size", size, height),
        Field("num_classes", 1000, "num_classes"),
        Field("embed_dim", 768, "emb_size"),
        Field("depth", 12, "depth"),
        Field("num_heads", 12, "num_heads"),
        Field("mlp_ratio", 4.0),
    ),
    names=_torch_encoder_names,
    # it sets one dropout to 0.1, and the others are 0.1 because that is the default of torch's layer
    fixed={"norm": "layernorm_1e-05", "dropout": 0.1, **dict.fromkeys(DROPOUTS, 0.1)},
    read_rest=lambda config, options, layout: {"hidden": int(config["embed_dim"] * config["mlp_ratio"])},
    write_rest=lambda options, layout: {"mlp_ratio": ratio(options["hidden"], options["emb_size"])},
)
