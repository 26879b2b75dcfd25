"""Google's ViTs in JAX: ``vision_transformer`` and ``big_vision``, their .npz files with slashes in the names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from vit_lightning.errors import UserError
from vit_lightning.weights.options import Options
from vit_lightning.weights.tables import (
    Config,
    Family,
    Layout,
    Rename,
    Shapes,
    Tensors,
    attention_names,
    feed_forward_names,
    heads,
    size,
    word,
    word_for,
)

_NORM = "layernorm_1e-06"
_PREFIXES = ("", "params/", "opt/target/")


def _dense(ours: str, theirs: str, pattern: str = "o i -> i o") -> list[Rename]:
    return [Rename(f"{ours}.weight", f"{theirs}/kernel", pattern), Rename(f"{ours}.bias", f"{theirs}/bias")]


def _norm(ours: str, theirs: str) -> list[Rename]:
    return [Rename(f"{ours}.weight", f"{theirs}/scale"), Rename(f"{ours}.bias", f"{theirs}/bias")]


def _heads(ours: str, theirs: str, parts: tuple[str, ...], count: int) -> list[Rename]:
    """Queries, keys or values, which flax has with an axis for the heads."""
    kernels = tuple(f"{theirs}/{part}/kernel" for part in parts)
    biases = tuple(f"{theirs}/{part}/bias" for part in parts)
    return [
        Rename(f"{ours}.weight", kernels, "(h d) i -> i h d", {"h": count}),
        Rename(f"{ours}.bias", biases, "(h d) -> h d", {"h": count}),
    ]


def _join_heads(ours: str, theirs: str, count: int) -> list[Rename]:
    return [
        Rename(f"{ours}.weight", f"{theirs}/out/kernel", "o (h d) -> h d o", {"h": count}),
        Rename(f"{ours}.bias", f"{theirs}/out/bias"),
    ]


def _rename_block(block: int, options: Options, numbers: tuple[int, int, int, int]) -> list[Rename]:
    """A block; its four parts are numbered one after the other, or each kind by itself."""
    place, count = f"Transformer/encoderblock_{block}", options["num_heads"]
    first, attention, _ = attention_names(block)
    second, feed_forward, _ = feed_forward_names(block, options)
    self_attention = f"{place}/MultiHeadDotProductAttention_{numbers[1]}"
    return [
        *_norm(first, f"{place}/LayerNorm_{numbers[0]}"),
        *_heads(f"{attention}.qkv", self_attention, ("query", "key", "value"), count),
        *_join_heads(f"{attention}.projection", self_attention, count),
        *_norm(second, f"{place}/LayerNorm_{numbers[2]}"),
        *_dense(f"{feed_forward}.expand", f"{place}/MlpBlock_{numbers[3]}/Dense_0"),
        *_dense(f"{feed_forward}.contract", f"{place}/MlpBlock_{numbers[3]}/Dense_1"),
    ]


def _rename_common(options: Options, positions: str, numbers: tuple[int, int, int, int]) -> list[Rename]:
    names = [*_dense("patch_embedding.projection.conv", "embedding", "e c p1 p2 -> p1 p2 c e")]
    if options["class_token"]:
        names.append(Rename("patch_embedding.class_token.token", "cls"))
    if options["positions"].startswith("learned"):
        names.append(Rename("patch_embedding.positions.table", positions))
    for block in range(options["depth"]):
        names += _rename_block(block, options, numbers)
    names += _norm("norm", "Transformer/encoder_norm")
    if options["representation_size"]:
        names += _dense("head.representation.linear", "pre_logits")
    if options["num_classes"]:
        names += _dense("head.linear", "head")
    return names


def _read_common(config: Config, emb_size: int, dropout: float) -> Options:
    return {
        **heads(emb_size, config["num_heads"]),
        "image_size": size(config["image_size"]),
        "num_classes": config["num_classes"] or 0,
        "norm": _NORM,
        "activation": "gelu_tanh",
        "emb_dropout": dropout,
        "projection_dropout": dropout,
        "feed_forward_dropout": dropout,
        "output_dropout": dropout,
    }


_GOOGLE_POOLS = {"token": "cls", "gap": "mean"}
_NUMBERINGS = {"pre_linen": (0, 1, 2, 3), "linen": (0, 0, 1, 0)}


def _flat(config: Mapping[str, Any]) -> Config:
    """A config of the repository has ``patches.size`` and a ``transformer`` of its own; both ways are taken."""
    flat = {**config, **(config.get("transformer") or {})}
    flat.pop("transformer", None)
    if isinstance(flat.get("patches"), Mapping):
        flat["patches"] = flat["patches"]["size"]
    return flat


def _read_google(config: Config, layout: Layout) -> Options:
    pool = word("classifier", config["classifier"], _GOOGLE_POOLS)
    return {
        **_read_common(config, config["hidden_size"], config["dropout_rate"]),
        "patch_size": size(config["patches"]),
        "in_channels": layout["in_channels"],
        "depth": config["num_layers"],
        "hidden": config["mlp_dim"],
        "class_token": pool == "cls",
        "pool": pool,
        "representation_size": config["representation_size"],
        "dropout": config["attention_dropout_rate"],
    }


def _write_google(options: Options, layout: Layout) -> Config:
    return {
        "num_classes": options["num_classes"],
        "patches": list(options["patch_size"]),
        "hidden_size": options["emb_size"],
        "num_layers": options["depth"],
        "mlp_dim": options["hidden"],
        "num_heads": options["num_heads"],
        "classifier": word_for(options["pool"], _GOOGLE_POOLS, "token"),
        "representation_size": options["representation_size"],
        "image_size": list(options["image_size"]),
        "dropout_rate": options["emb_dropout"],
        "attention_dropout_rate": options["dropout"],
    }


def _rename_google(options: Options, layout: Layout) -> list[Rename]:
    numbers = _NUMBERINGS[layout["numbering"]]
    return _rename_common(options, "Transformer/posembed_input/pos_embedding", numbers)


def _prefix(shapes: Shapes) -> str:
    return next((prefix for prefix in _PREFIXES[1:] if any(name.startswith(prefix) for name in shapes)), "")


def _channels(shapes: Shapes, prefix: str) -> int:
    """Channels of the images, which these configs leave to the input."""
    kernel = shapes.get(f"{prefix}embedding/kernel", ())
    return kernel[2] if len(kernel) == 4 else 3


def _find_google_layout(shapes: Shapes, config: Config) -> Layout:
    linen = any(name.endswith("/MlpBlock_0/Dense_0/kernel") for name in shapes)
    prefix = _prefix(shapes)
    return {
        "prefix": prefix,
        "numbering": "linen" if linen else "pre_linen",
        "in_channels": _channels(shapes, prefix),
    }


def _unprefix(tensors: Tensors, layout: Layout) -> Tensors:
    return {name.removeprefix(layout["prefix"]): tensor for name, tensor in tensors.items()}


def _prefixed(tensors: Tensors, layout: Layout) -> Tensors:
    return {layout["prefix"] + name: tensor for name, tensor in tensors.items()}


GOOGLE = Family(
    defaults={
        "num_classes": ...,
        "patches": ...,
        "hidden_size": ...,
        "num_layers": ...,
        "mlp_dim": ...,
        "num_heads": ...,
        "image_size": ...,
        "classifier": "token",
        "representation_size": None,
        "dropout_rate": 0.1,
        "attention_dropout_rate": 0.1,
    },
    without={"resnet": None, "add_position_embedding": True},
    inert=frozenset({"head_bias_init", "model_name"}),
    flatten=_flat,
    read=_read_google,
    write=_write_google,
    rename=_rename_google,
    headless=True,
    layouts={"prefix": _PREFIXES, "numbering": tuple(_NUMBERINGS), "in_channels": ()},
    find_layout=_find_google_layout,
    layout_for=lambda options: {"prefix": "", "numbering": "pre_linen", "in_channels": options["in_channels"]},
    unpack=_unprefix,
    pack=_prefixed,
)

_BIG_VISION_POOLS = {"gap": "mean", "tok": "cls", "map": "attention"}
_BIG_VISION_POSITIONS = {"learn": "learned_patches", "sincos2d": "sincos2d big_vision 10000.0"}
_STACKED = "Transformer/encoderblock/"


def _read_big_vision(config: Config, layout: Layout) -> Options:
    pool, width = word("pool_type", config["pool_type"], _BIG_VISION_POOLS), config["width"]
    positions = word("posemb", config["posemb"], _BIG_VISION_POSITIONS)
    hidden = config["mlp_dim"] or 4 * width
    representation = width if config["rep_size"] is True else config["rep_size"] or None
    map_head = pool == "attention"
    return {
        **_read_common(config, width, config["dropout"]),
        "patch_size": size(config["patch_size"]),
        "in_channels": layout["in_channels"],
        "depth": config["depth"],
        "hidden": hidden,
        "class_token": pool == "cls",
        "positions": "learned" if positions == "learned_patches" and pool != "cls" else positions,
        "pool": pool,
        "pool_hidden": hidden if map_head else None,
        "pool_activation": "gelu_tanh" if map_head else None,
        "pool_norm": _NORM if map_head else None,
        "representation_size": representation,
    }


def _write_big_vision(options: Options, layout: Layout) -> Config:
    fixed = options["positions"].startswith("sincos2d")
    return {
        "num_classes": options["num_classes"],
        "patch_size": list(options["patch_size"]),
        "width": options["emb_size"],
        "depth": options["depth"],
        "mlp_dim": options["hidden"],
        "num_heads": options["num_heads"],
        "posemb": "sincos2d" if fixed else "learn",
        "rep_size": options["representation_size"] or False,
        "dropout": options["emb_dropout"],
        "pool_type": word_for(options["pool"], _BIG_VISION_POOLS, "gap"),
        "image_size": list(options["image_size"]),
    }


def _rename_big_vision(options: Options, layout: Layout) -> list[Rename]:
    names = _rename_common(options, "pos_embedding", _NUMBERINGS["linen"])
    if options["pool"] == "attention":
        ours, theirs, count = "head.pool", "MAPHead_0", options["num_heads"]
        attention = f"{theirs}/MultiHeadDotProductAttention_0"
        names += [
            Rename(f"{ours}.probe", f"{theirs}/probe"),
            *_heads(f"{ours}.query", attention, ("query",), count),
            *_heads(f"{ours}.kv", attention, ("key", "value"), count),
            *_join_heads(f"{ours}.projection", attention, count),
            *_norm(f"{ours}.norm", f"{theirs}/LayerNorm_0"),
            *_dense(f"{ours}.feed_forward.expand", f"{theirs}/MlpBlock_0/Dense_0"),
            *_dense(f"{ours}.feed_forward.contract", f"{theirs}/MlpBlock_0/Dense_1"),
        ]
    return names


def _find_big_vision_layout(shapes: Shapes, config: Config) -> Layout:
    prefix = _prefix(shapes)
    stacked = any(name.startswith(prefix + _STACKED) for name in shapes)
    return {"prefix": prefix, "stacked": stacked, "in_channels": _channels(shapes, prefix)}


def _unpack_big_vision(tensors: Tensors, layout: Layout) -> Tensors:
    tensors = _unprefix(tensors, layout)
    if not layout["stacked"]:
        return tensors
    single: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(_STACKED):
            single[name] = tensor
            continue
        if not tensor.ndim:
            raise UserError(f"{name} has no axis for the blocks, though the blocks are stacked")
        for block, part in enumerate(tensor):
            single[f"Transformer/encoderblock_{block}/{name.removeprefix(_STACKED)}"] = part
    return single


def _pack_big_vision(tensors: Tensors, layout: Layout) -> Tensors:
    if not layout["stacked"]:
        return _prefixed(tensors, layout)
    packed: Tensors = {}
    blocks: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name):
            blocks.setdefault(_STACKED + found[2], {})[int(found[1])] = tensor
        else:
            packed[name] = tensor
    stacked = {name: torch.stack([parts[block] for block in sorted(parts)]) for name, parts in blocks.items()}
    return _prefixed({**packed, **stacked}, layout)


BIG_VISION = Family(
    defaults={
        "num_classes": None,
        "patch_size": [16, 16],
        "width": 768,
        "depth": 12,
        "mlp_dim": None,
        "num_heads": 12,
        "posemb": "learn",
        "rep_size": False,
        "dropout": 0.0,
        "pool_type": "gap",
        "image_size": ...,
    },
    inert=frozenset({"head_zeroinit", "scan", "remat_policy", "dtype_mm"}),
    read=_read_big_vision,
    write=_write_big_vision,
    rename=_rename_big_vision,
    headless=True,
    layouts={"prefix": _PREFIXES, "stacked": (False, True), "in_channels": ()},
    find_layout=_find_big_vision_layout,
    layout_for=lambda options: {"prefix": "", "stacked": False, "in_channels": options["in_channels"]},
    unpack=_unpack_big_vision,
    pack=_pack_big_vision,
)
