"""torchvision's ViT, Hugging Face's, and the one on ``nn.TransformerEncoder`` of the user's document 003."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_lightning.weights.options import Options, norm_text
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
    norm_of_config,
    norm_to_config,
    ratio,
    side,
    size,
    word,
    word_for,
)

_CONV = "patch_embedding.projection.conv"
_CLASS_TOKEN = "patch_embedding.class_token.token"
_POSITIONS = "patch_embedding.positions.table"


def _one_dropout(rate: float) -> Options:
    """The rates of a family that drops the same share after embedding, attention's output and feed-forward part."""
    names = ("emb_dropout", "projection_dropout", "feed_forward_dropout", "output_dropout")
    return dict.fromkeys(names, rate)


def _read_torchvision(config: Config, layout: Layout) -> Options:
    return {
        **heads(config["hidden_dim"], config["num_heads"]),
        "image_size": size(config["image_size"]),
        "patch_size": size(config["patch_size"]),
        "num_classes": config["num_classes"],
        "depth": config["num_layers"],
        "hidden": config["mlp_dim"],
        "norm": norm_of_config("norm_layer", config["norm_layer"], "layernorm_1e-06"),
        "representation_size": config["representation_size"],
        **_one_dropout(config["dropout"]),
        "dropout": config["attention_dropout"],
    }


def _write_torchvision(options: Options, layout: Layout) -> Config:
    return {
        "image_size": options["image_size"][0],
        "patch_size": options["patch_size"][0],
        "num_layers": options["depth"],
        "num_heads": options["num_heads"],
        "hidden_dim": options["emb_size"],
        "mlp_dim": options["hidden"],
        "dropout": options["emb_dropout"],
        "attention_dropout": options["dropout"],
        "num_classes": options["num_classes"],
        "representation_size": options["representation_size"],
        "norm_layer": None if options["norm"] == "layernorm_1e-06" else norm_to_config(options["norm"]),
    }


def _rename_torchvision(options: Options, layout: Layout) -> list[Rename]:
    names = [
        *layer(_CONV, "conv_proj"),
        Rename(_CLASS_TOKEN, "class_token"),
        Rename(_POSITIONS, "encoder.pos_embedding"),
        *norm("norm", "encoder.ln", options["norm"]),
        *layer("head.linear", "heads.head"),
    ]
    if options["representation_size"]:
        names += layer("head.representation.linear", "heads.pre_logits")
    for block in range(options["depth"]):
        theirs = f"encoder.layers.encoder_layer_{block}"
        first, attention, _ = attention_names(block)
        second, feed_forward, _ = feed_forward_names(block, options)
        names += [
            *norm(first, f"{theirs}.ln_1", options["norm"]),
            *_multi_head_attention(attention, f"{theirs}.self_attention"),
            *norm(second, f"{theirs}.ln_2", options["norm"]),
            *layer(f"{feed_forward}.expand", f"{theirs}.mlp.{layout['mlp'][0]}"),
            *layer(f"{feed_forward}.contract", f"{theirs}.mlp.{layout['mlp'][1]}"),
        ]
    return names


def _multi_head_attention(ours: str, theirs: str) -> list[Rename]:
    """The names in torch's ``nn.MultiheadAttention``."""
    return [
        Rename(f"{ours}.qkv.weight", f"{theirs}.in_proj_weight"),
        Rename(f"{ours}.qkv.bias", f"{theirs}.in_proj_bias"),
        *layer(f"{ours}.projection", f"{theirs}.out_proj"),
    ]


_MLP_NAMES = (["0", "3"], ["linear_1", "linear_2"])  # now, and before torchvision 0.14


def _find_torchvision_layout(shapes: Shapes, config: Config) -> Layout:
    return {"mlp": _MLP_NAMES[any(".mlp.linear_1." in name for name in shapes)]}


TORCHVISION = Family(
    defaults={
        "image_size": ...,
        "patch_size": ...,
        "num_layers": ...,
        "num_heads": ...,
        "hidden_dim": ...,
        "mlp_dim": ...,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "num_classes": 1000,
        "representation_size": None,
        "norm_layer": None,
    },
    without={"conv_stem_configs": None},
    read=_read_torchvision,
    write=_write_torchvision,
    rename=_rename_torchvision,
    layouts={"mlp": _MLP_NAMES},
    find_layout=_find_torchvision_layout,
    layout_for=lambda options: {"mlp": _MLP_NAMES[0]},
)

_HF_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _flat_hf(config: Mapping[str, Any]) -> Config:
    """A config.json has the names of the labels, from which their number follows."""
    flat = dict(config)
    if "num_labels" not in flat and flat.get("id2label"):
        flat["num_labels"] = len(flat["id2label"])
    return flat


def _read_hf(config: Config, layout: Layout) -> Options:
    drop = config["hidden_dropout_prob"]
    return {
        **heads(config["hidden_size"], config["num_attention_heads"]),
        "image_size": size(config["image_size"]),
        "patch_size": size(config["patch_size"]),
        "in_channels": config["num_channels"],
        "num_classes": config["num_labels"],
        "depth": config["num_hidden_layers"],
        "hidden": config["intermediate_size"],
        "activation": word("hidden_act", config["hidden_act"], _HF_ACTIVATIONS),
        "norm": norm_text("layernorm", float(config["layer_norm_eps"])),
        "qkv_bias": config["qkv_bias"],
        "emb_dropout": drop,
        "projection_dropout": drop,
        "output_dropout": drop,
        "dropout": config["attention_probs_dropout_prob"],
    }


def _write_hf(options: Options, layout: Layout) -> Config:
    return {
        "hidden_size": options["emb_size"],
        "num_hidden_layers": options["depth"],
        "num_attention_heads": options["num_heads"],
        "intermediate_size": options["hidden"],
        "hidden_act": word_for(options["activation"], _HF_ACTIVATIONS, "gelu"),
        "hidden_dropout_prob": options["emb_dropout"],
        "attention_probs_dropout_prob": options["dropout"],
        "layer_norm_eps": float(options["norm"].rpartition("_")[2]),
        "image_size": side(options["image_size"]),
        "patch_size": side(options["patch_size"]),
        "num_channels": options["in_channels"],
        "qkv_bias": options["qkv_bias"],
        "num_labels": options["num_classes"],
    }


_HF_NAMES = {
    "memory": {
        "block": "vit.layers",
        "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "projection": "attention.o_proj",
        "expand": "mlp.fc1",
        "contract": "mlp.fc2",
    },
    "disk": {
        "block": "vit.encoder.layer",
        "qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
        "projection": "attention.output.dense",
        "expand": "intermediate.dense",
        "contract": "output.dense",
    },
}
"""In memory since transformers 5; on disk, and in memory before."""


def _rename_hf(options: Options, layout: Layout) -> list[Rename]:
    table = _HF_NAMES[layout["names"]]
    embeddings = "vit.embeddings"
    names = [
        Rename(_CLASS_TOKEN, f"{embeddings}.cls_token"),
        Rename(_POSITIONS, f"{embeddings}.position_embeddings"),
        *layer(_CONV, f"{embeddings}.patch_embeddings.projection"),
        *norm("norm", "vit.layernorm", options["norm"]),
        *(layer("head.linear", "classifier") if options["num_classes"] else []),
    ]
    for block in range(options["depth"]):
        theirs = f"{table['block']}.{block}"
        first, attention, _ = attention_names(block)
        second, feed_forward, _ = feed_forward_names(block, options)
        for kind in ("weight", "bias") if options["qkv_bias"] else ("weight",):
            parts = tuple(f"{theirs}.{part}.{kind}" for part in table["qkv"])
            names.append(Rename(f"{attention}.qkv.{kind}", parts))
        names += [
            *norm(first, f"{theirs}.layernorm_before", options["norm"]),
            *layer(f"{attention}.projection", f"{theirs}.{table['projection']}"),
            *norm(second, f"{theirs}.layernorm_after", options["norm"]),
            *layer(f"{feed_forward}.expand", f"{theirs}.{table['expand']}"),
            *layer(f"{feed_forward}.contract", f"{theirs}.{table['contract']}"),
        ]
    return names


def _find_hf_layout(shapes: Shapes, config: Config) -> Layout:
    return {"names": "disk" if any(name.startswith("vit.encoder.") for name in shapes) else "memory"}


HF = Family(
    defaults={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
        "num_labels": 2,
    },
    inert=frozenset({"initializer_range", "encoder_stride", "pooler_output_size", "pooler_act", "model_type"})
    | {"architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id"},
    flatten=_flat_hf,
    read=_read_hf,
    write=_write_hf,
    rename=_rename_hf,
    headless=True,
    layouts={"names": ("memory", "disk")},
    find_layout=_find_hf_layout,
    layout_for=lambda options: {"names": "memory"},
)


def _read_torch_encoder(config: Config, layout: Layout) -> Options:
    return {
        **heads(config["embed_dim"], config["num_heads"]),
        "image_size": size(config["img_size"]),
        "patch_size": size(config["patch_size"]),
        "num_classes": config["num_classes"],
        "depth": config["depth"],
        "hidden": int(config["embed_dim"] * config["mlp_ratio"]),
        "norm": "layernorm_1e-05",
        # the document sets one dropout to 0.1, and the others are 0.1 because torch's layer is so by default
        **_one_dropout(0.1),
        "dropout": 0.1,
    }


def _write_torch_encoder(options: Options, layout: Layout) -> Config:
    return {
        "img_size": options["image_size"][0],
        "patch_size": options["patch_size"][0],
        "num_classes": options["num_classes"],
        "embed_dim": options["emb_size"],
        "depth": options["depth"],
        "num_heads": options["num_heads"],
        "mlp_ratio": ratio(options["hidden"], options["emb_size"]),
    }


def _rename_torch_encoder(options: Options, layout: Layout) -> list[Rename]:
    names = [
        *layer(_CONV, "patch_embed.proj"),
        Rename(_CLASS_TOKEN, "cls_token"),
        Rename(_POSITIONS, "pos_embed"),
        *norm("norm", "norm", options["norm"]),
        *layer("head.linear", "head"),
    ]
    for block in range(options["depth"]):
        theirs = f"blocks.layers.{block}"
        first, attention, _ = attention_names(block)
        second, feed_forward, _ = feed_forward_names(block, options)
        names += [
            *norm(first, f"{theirs}.norm1", options["norm"]),
            *_multi_head_attention(attention, f"{theirs}.self_attn"),
            *norm(second, f"{theirs}.norm2", options["norm"]),
            *layer(f"{feed_forward}.expand", f"{theirs}.linear1"),
            *layer(f"{feed_forward}.contract", f"{theirs}.linear2"),
        ]
    return names


TORCH_ENCODER = Family(
    defaults={
        "img_size": 224,
        "patch_size": 16,
        "num_classes": 1000,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 4.0,
    },
    read=_read_torch_encoder,
    write=_write_torch_encoder,
    rename=_rename_torch_encoder,
)
