"""DINOv2 and DINOv3 (Meta), by the names of transformers, in memory and on disk, and of their own repositories."""

from __future__ import annotations

import re

import torch

from vit_lightning.errors import UserError
from vit_lightning.sizes import side
from vit_lightning.weights.family_torch import HF_ACTIVATIONS, HF_INERT, norm_eps
from vit_lightning.weights.fields import Field, choice, ratio, size
from vit_lightning.weights.options import ATTENTION, FEED_FORWARD, Options, Rotary, Shapes, norm_text
from vit_lightning.weights.tables import Config, Family, Layout, Names, Tensors, Theirs

_OWN, _MEMORY, _DISK = "repository", "memory", "disk"


def _norm_field(eps: float) -> Field:
    return Field("layer_norm_eps", eps, "norm", lambda value: norm_text("layernorm", float(value)), norm_eps)


def _sizes(width: int, heads: int, patch: int) -> tuple[Field, ...]:
    return (
        Field("hidden_size", width, "emb_size"),
        Field("num_hidden_layers", 12, "depth"),
        Field("num_attention_heads", heads, "num_heads"),
        choice("hidden_act", "gelu", "activation", HF_ACTIVATIONS),
        Field("image_size", 224, "image_size", size, side),
        Field("patch_size", patch, "patch_size", size, side),
        Field("num_channels", 3, "in_channels"),
        Field("layerscale_value", 1.0, "layer_scale"),
        Field("num_register_tokens", 0, "register_tokens"),
    )


_INERT = HF_INERT | {"drop_path_rate", "use_mask_token", "apply_layernorm", "reshape_hidden_states", "out_features"}
_INERT |= {"out_indices", "stage_names", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"}


def _block(theirs: str, first: str, second: str) -> Names:
    """Returns the names that all layouts share: norms and LayerScale."""
    halves = ((ATTENTION, "1", first), (FEED_FORWARD, "2", second))
    return {
        name: value
        for ours, number, scale in halves
        for name, value in {
            f"{ours}.norm": f"{theirs}.norm{number}",
            f"{ours}.layer_scale.scale": f"{theirs}.{scale}",
        }.items()
    }


def _names_v2(options: Options, layout: Layout) -> Names:
    prefix, kind = layout["prefix"], layout["names"]
    mlp, swiglu = f"{FEED_FORWARD}.feed_forward", options["feed_forward"] != "mlp"
    tokens: tuple[str, ...]
    gated: tuple[str, ...]
    if kind == _OWN:
        tokens, block = ("cls_token", "register_tokens", "pos_embed", "patch_embed.proj"), "blocks.*"
        qkv, projection = Theirs(f"{block}.attn.qkv"), "attn.proj"
        gated, contract, last, scales = ("w12",), "w3" if swiglu else "fc2", "norm", ("ls1.gamma", "ls2.gamma")
    else:
        names = ("cls_token", "register_tokens", "position_embeddings", "patch_embeddings.projection")
        tokens, block = tuple(f"{prefix}embeddings.{name}" for name in names), f"{prefix}encoder.layer.*"
        memory = kind == _MEMORY
        parts = ("q_proj", "k_proj", "v_proj") if memory else ("attention.query", "attention.key", "attention.value")
        qkv = Theirs(tuple(f"{block}.attention.{part}" for part in parts))
        projection = "attention.o_proj" if memory else "attention.output.dense"
        gated = ("gate_proj", "up_proj") if memory else ("weights_in",)
        contract = ("down_proj" if memory else "weights_out") if swiglu else "fc2"
        last, scales = f"{prefix}layernorm", ("layer_scale1.lambda1", "layer_scale2.lambda1")
    return {
        "patch_embedding.class_token.token": tokens[0],
        "patch_embedding.register_tokens.token": tokens[1],
        "patch_embedding.positions.table": tokens[2],
        "patch_embedding.projection.conv": tokens[3],
        **_block(block, *scales),
        f"{ATTENTION}.attention.qkv": qkv,
        f"{ATTENTION}.attention.projection": f"{block}.{projection}",
        f"{mlp}.gate_expand": Theirs(tuple(f"{block}.mlp.{name}" for name in gated)),
        f"{mlp}.expand": f"{block}.mlp.fc1",
        f"{mlp}.contract": f"{block}.mlp.{contract}",
        "norm": last,
        "head.linear": "classifier",
    }


def _layout_v2(shapes: Shapes) -> Layout:
    prefixes = (name.removesuffix("embeddings.cls_token") for name in shapes if name.endswith("embeddings.cls_token"))
    prefix = next(prefixes, None)
    memory = any(".attention.q_proj." in name for name in shapes)
    gated = any(re.search(r"\.mlp\.(w12|gate_proj|weights_in)\.", name) for name in shapes)
    return {
        "prefix": prefix or "",
        "names": _OWN if prefix is None else _MEMORY if memory else _DISK,
        "feed_forward": "swiglu_packed" if gated else "mlp",
    }


def _token_names(layout: Layout) -> list[str]:
    own = layout["names"] == _OWN
    names = ("mask_token", "register_tokens", "pos_embed" if own else "position_embeddings")
    return [name if own else f"{layout['prefix']}embeddings.{name}" for name in names]


def _unpack_v2(tensors: Tensors, layout: Layout) -> Tensors:
    """Gives registers rows of zeros in the table of positions, which theirs lacks."""
    mask, registers, positions = _token_names(layout)
    found = {name: tensor for name, tensor in tensors.items() if name != mask}
    table, extra = found.get(positions), found.get(registers)
    if table is not None and extra is not None and table.ndim == 3 == extra.ndim:
        found[positions] = torch.cat([table[:, :1], torch.zeros_like(extra), table[:, 1:]], dim=1)
    return found


def _pack_v2(tensors: Tensors, layout: Layout) -> Tensors:
    mask, registers, positions = _token_names(layout)
    table, packed = tensors[positions], dict(tensors)
    if registers in tensors:
        count = tensors[registers].shape[1]
        packed[registers] = tensors[registers] + table[:, 1 : 1 + count]
        packed[positions] = torch.cat([table[:, :1], table[:, 1 + count :]], dim=1)
    return {**packed, mask: table.new_zeros(1, table.shape[2])}


def _read_v2(config: Config, options: Options, layout: Layout) -> Options:
    hidden = int(config["hidden_size"] * config["mlp_ratio"])
    gated = {"hidden": (int(hidden * 2 / 3) + 7) // 8 * 8, "feed_forward": "swiglu_packed", "activation": "silu"}
    pool = "cls_and_mean" if config["num_labels"] else "cls"
    return {"hidden": hidden, "pool": pool, **(gated if config["use_swiglu_ffn"] else {})}


def _write_v2(options: Options, layout: Layout) -> Config:
    gated = options["feed_forward"] == "swiglu_packed"
    hidden = options["hidden"] * 3 // 2 if gated else options["hidden"]
    return {"mlp_ratio": ratio(hidden, options["emb_size"]), "use_swiglu_ffn": gated}


DINOV2 = Family(
    name="dinov2",
    fields=(
        *_sizes(768, 12, 14),
        Field("num_labels", 0, "num_classes"),
        Field("mlp_ratio", 4.0),
        Field("use_swiglu_ffn", False),
        Field("qkv_bias", True, "qkv_bias"),
        Field("hidden_dropout_prob", 0.0, ("emb_dropout", "projection_dropout", "output_dropout")),
        Field("attention_probs_dropout_prob", 0.0, "dropout"),
        _norm_field(1e-6),
    ),
    names=_names_v2,
    read_rest=_read_v2,
    write_rest=_write_v2,
    inert=_INERT,
    headless=True,
    layouts={
        "names": (_MEMORY, _DISK, _OWN),
        "prefix": ("", "dinov2.", "dinov2_with_registers."),
        "feed_forward": ("mlp", "swiglu_packed"),
    },
    layout_options={"feed_forward": "feed_forward"},
    find_layout=_layout_v2,
    unpack=_unpack_v2,
    pack=_pack_v2,
)


def _names_v3(options: Options, layout: Layout) -> Names:
    """Returns names; its halves of a head are the pairs that ours rotates, of queries, keys and so values too."""
    own, sizes = layout["names"] == _OWN, {"h": options["num_heads"], "two": 2}
    mlp, heads = f"{FEED_FORWARD}.feed_forward", "(h pair two)"
    qkv: tuple[str, ...]
    if own:
        tokens, block = ("cls_token", "storage_tokens", "patch_embed.proj"), "blocks.*"
        qkv, projection = (f"{block}.attn.qkv",), f"{block}.attn.proj"
        parts, scales = ("w1", "w2" if options["feed_forward"] == "swiglu" else "fc1"), ("ls1.gamma", "ls2.gamma")
        contract = "w3" if options["feed_forward"] == "swiglu" else "fc2"
        heads, sizes = "(qkv h pair two)", {**sizes, "qkv": 3}
    else:
        tokens = ("embeddings.cls_token", "embeddings.register_tokens", "embeddings.patch_embeddings")
        block = f"{'model.' if layout['names'] == _MEMORY else ''}layer.*"
        qkv = tuple(f"{block}.attention.{part}_proj" for part in "qkv")
        projection, scales = f"{block}.attention.o_proj", ("layer_scale1.lambda1", "layer_scale2.lambda1")
        parts, contract = ("gate_proj", "up_proj"), "down_proj"
    theirs = heads.replace("pair two", "two pair")
    return {
        "patch_embedding.class_token.token": tokens[0],
        "patch_embedding.register_tokens.token": tokens[1],
        "patch_embedding.projection.conv": tokens[2],
        **_block(block, *scales),
        f"{ATTENTION}.attention.qkv.weight": Theirs(
            tuple(f"{name}.weight" for name in qkv), f"{heads} i -> {theirs} i", sizes
        ),
        f"{ATTENTION}.attention.qkv.bias": Theirs(tuple(f"{name}.bias" for name in qkv), f"{heads} -> {theirs}", sizes),
        f"{ATTENTION}.attention.projection.weight": Theirs(
            f"{projection}.weight", "o (h pair two) -> o (h two pair)", {"h": options["num_heads"], "two": 2}
        ),
        f"{ATTENTION}.attention.projection.bias": f"{projection}.bias",
        f"{mlp}.gate": f"{block}.mlp.{parts[0]}",
        f"{mlp}.expand": f"{block}.mlp.{parts[1]}",
        f"{mlp}.contract": f"{block}.mlp.{contract}",
        "norm": "norm",
    }


def _layout_v3(shapes: Shapes) -> Layout:
    own, memory = "storage_tokens" in shapes, any(name.startswith("model.layer.") for name in shapes)
    gated = any(re.search(r"\.mlp\.(w1|gate_proj)\.", name) for name in shapes)
    return {"names": _OWN if own else _MEMORY if memory else _DISK, "feed_forward": "swiglu" if gated else "mlp"}


def _empty_registers(options: Options, layout: Layout) -> dict[str, tuple[int, ...]]:
    absent = layout["names"] != _OWN and not options["register_tokens"]
    return {"embeddings.register_tokens": (1, 0, options["emb_size"])} if absent else {}


_QUERY_BIAS = re.compile(r"(.*layer\.\d+\.attention\.)q_proj\.bias")


def _unpack_v3(tensors: Tensors, layout: Layout) -> Tensors:
    """Gives keys a bias of zeros, which theirs lacks, or has beside a mask."""
    unused = re.compile(r"(.*\.)?mask_token|rope_embed\.periods|.*\.bias_mask|local_cls_norm\..*")
    found = {name: tensor for name, tensor in tensors.items() if not unused.fullmatch(name)}
    for name, tensor in tensors.items():
        if match := _QUERY_BIAS.fullmatch(name):
            found[f"{match[1]}k_proj.bias"] = torch.zeros_like(tensor)
        elif name.endswith(".bias_mask") and (bias := name.removesuffix("_mask")) in found:
            found[bias] = found[bias] * tensor.nan_to_num()
    return found


def _pack_v3(tensors: Tensors, layout: Layout) -> Tensors:
    packed = dict(tensors)
    for name, tensor in tensors.items():
        own = layout["names"] == _OWN and name.endswith(".qkv.bias")
        if (own and tensor.chunk(3)[1].any()) or (name.endswith(".k_proj.bias") and packed.pop(name).any()):
            raise UserError(f"{name}: keys have no bias in dinov3, and here they learned one")
        if own:
            packed[f"{name}_mask"] = tensor.new_tensor([1.0, 0.0, 1.0]).repeat_interleave(len(tensor) // 3)
    first = next(iter(tensors.values()))
    width = tensors["norm.weight"].shape[0]
    mask = first.new_zeros(1, width) if layout["names"] == _OWN else first.new_zeros(1, 1, width)
    return {**packed, "mask_token" if layout["names"] == _OWN else "embeddings.mask_token": mask}


DINOV3 = Family(
    name="dinov3",
    fields=(
        *_sizes(384, 6, 16),
        Field("intermediate_size", 1536, "hidden"),
        Field("rope_theta", 100.0),
        choice("use_gated_mlp", False, "feed_forward", {False: "mlp", True: "swiglu"}),  # type: ignore[dict-item]
        Field("attention_dropout", 0.0, "dropout"),
        Field("proj_bias", True, "projection_bias"),
        Field("mlp_bias", True, "feed_forward_bias"),
        _norm_field(1e-5),
    ),
    names=_names_v3,
    fixed={"num_classes": 0, "positions": "none", "rotary": Rotary(temperature=100.0, centred=True)},
    read_rest=lambda config, options, layout: {"rotary": Rotary(float(config["rope_theta"]), centred=True)},
    write_rest=lambda options, layout: {"rope_theta": (options["rotary"] or Rotary()).temperature},
    without={"query_bias": True, "key_bias": False, "value_bias": True},
    inert=_INERT,
    headless=True,
    layouts={"names": (_MEMORY, _DISK, _OWN), "feed_forward": ("mlp", "swiglu")},
    layout_options={"feed_forward": "feed_forward"},
    find_layout=_layout_v3,
    extra=_empty_registers,
    unpack=_unpack_v3,
    pack=_pack_v3,
)
