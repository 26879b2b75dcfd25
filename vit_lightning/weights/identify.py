"""The family, layout and sizes of weights of unknown origin, from names and shapes and from what lies beside them.

Each family's own table of names, read backwards, turns its tensors into shapes under our names; the options of a ViT
are read from those, whatever the family, and the family's table of arguments writes them as its config.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vit_lightning.errors import UserError, counted, refuse
from vit_lightning.models.crate import SIZES as CRATE_SIZES
from vit_lightning.models.presets import PRESETS
from vit_lightning.sizes import pair
from vit_lightning.weights.convert import FAMILIES, find_family, from_reference, has_our_names, readings_of
from vit_lightning.weights.fields import Field
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.options import EMBEDDING, OPTIONS, PATCHES, SIZES, Options, ShapeReader, as_part
from vit_lightning.weights.tables import Config, Family, Reading, Tensors

OURS = "vit_lightning"
"""Family of weights under our own names; its config is ``class_path`` and ``init_args`` of ViT."""

_HEADS = {(width, depth): heads for width, depth, heads in PRESETS.values()} | {
    (1152, 27): 16,  # So400m (Alabdulmohsin et al. 2023, table 1)
    (1408, 40): 16,  # g (Zhai et al. 2022, "Scaling vision transformers", table 2)
    (1664, 48): 16,  # G (the same)
    (1536, 40): 16,  # SigLIP 2's g-opt; that of DINOv2, which has SwiGLU, has heads of 64
    (768, 8): 8,  # timm's first vit_small_patch16_224
}
_HEADS_OF_FAMILY = {
    "crate": {(width, depth): heads for width, depth, heads in CRATE_SIZES.values()},
    "einops_tutorial": {(768, 12): 8},  # the tutorial's own default
    "dinov3": {(1280, 32): 20, (4096, 40): 32},  # H+ and 7B (Siméoni et al. 2025)
}
"""Number of heads of published models by width and depth, first those of the family."""
_OUR_FIELDS = tuple(Field(name, ..., name, pair if name in ("image_size", "patch_size") else int) for name in SIZES)
_OUR_TABLE = Family(OURS, _OUR_FIELDS, names=lambda options, layout: {})
"""Weights under our own names, of which these sizes may be given."""


class Identified(NamedTuple):
    """Origin of weights: what ``from_reference`` needs to know.

    Args:
        family: one of ``FAMILIES``, or vit_lightning for weights under our own names.
        config: arguments of the reference's constructor; class_path and init_args of ViT for our own names.
        notes: sentences on what was looked up or assumed.
    """

    family: str
    config: Config
    notes: tuple[str, ...]


def identify(
    file: WeightsFile, config: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None
) -> Identified:
    """Returns the family of weights and the arguments of its constructor.

    Args:
        file: the weights and what lies beside them.
        config: arguments in the family's own words, those of ViT for our own names, which go before those that were
            found; ``family`` names the family.
        model: ``num_heads`` and ``dim_head`` of the ViT of a config, which hold where the weights do not tell them;
            None without a config.

    Raises:
        UserError: no family has such tensors, or they do not tell a size, which then has to be given.
    """
    described = (file.config or {}).get("model")
    given = dict(config or {})
    if isinstance(described, Mapping) and "class_path" in described:
        return Identified(OURS, with_arguments(described, given), ())
    stated = _stated(file)
    wanted = given.pop("family", stated.pop("family", None))
    families = FAMILIES.values() if wanted is None else (find_family(wanted, "config.family"),)
    on_meta = {name: tensor.to("meta") for name, tensor in file.tensors.items()}
    if wanted is None and has_our_names(on_meta):
        return _identify_ours(on_meta, given, model)
    if any(re.search(r"\.(lora_[AB]|base_layer)\.", name) for name in on_meta):
        way_out = "PEFT's merge_and_unload() joins them"
        raise UserError(f"{file.place} holds weights of LoRA beside those of a model, which is not read ({way_out})")
    failures: list[UserError] = []
    for reading in readings_of(on_meta, families):
        try:
            return _as_family(reading, on_meta, stated, given, model)
        except UserError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    first = ", ".join(list(on_meta)[:3])
    raise UserError(f"{file.place} holds weights of none of the families (first names: {first})")


class _Clues:
    """The tensors of a file as those of a family, and all else that is known about them.

    Args:
        reading: the tensors.
        given: arguments of the family that are known.
        model: ``num_heads`` and ``dim_head`` of the user's config; None without one.
    """

    def __init__(self, reading: Reading, given: Config, model: Mapping[str, Any] | None) -> None:
        self.table, self.shapes, self.kernel_heads, self.model = reading.table, reading.shapes, reading.heads, model
        known = reading.table.options_of(given)
        self.base, self.known = {**reading.base, **known}, known
        modules = {name.rpartition(".")[0] for name in self.shapes}
        biased = {name for name in modules if self.shapes.get(f"{name}.bias", (0,))[0]}
        norms = {name: str(self.base["norm"]) if name in biased else "rmsnorm_1e-06" for name in modules}
        self.reader = ShapeReader(self.shapes, norms, self.table.name)
        self.notes: list[str] = []
        """Sentences on what was assumed."""

    def options(self) -> Options:
        """Returns the options of the ViT.

        Raises:
            UserError: tensors are missing, or do not tell what then has to be given.
        """
        base = self.base
        options = {**base, **self._sizes(), **self.reader.options()}
        options |= {name: base[name] for name in ("patch_norm", "patch_token_norm") if base[name]}
        options["norm"] = options["norm"] or base["norm"]
        if options["feed_forward"].startswith("swiglu"):
            options["activation"] = "silu"
        options |= self._heads(options)
        if options["pool_hidden"]:
            options |= {"pool": "attention", "pool_activation": base["activation"]}
        elif "pool" not in self.table.fixed:
            norm_says = options["final_norm"] == "after_pool" != base["final_norm"]
            options["pool"] = "mean" if norm_says or not options["class_token"] else "cls"
        options |= self.known
        return {**options, **self._positions(options)}

    def _word(self, option: str) -> str:
        """Returns the family's own word for an option."""
        return next((each.theirs for each in self.table.fields if option in each.options), option)

    def _sizes(self) -> Options:
        """Returns width, depth, channels and patch size."""
        kernel = f"{PATCHES}.{'conv' if f'{PATCHES}.conv.weight' in self.shapes else 'linear'}.weight"
        width, pixels = self.reader.size(kernel), self.reader.size(kernel, 1)
        patch = self.shapes[kernel][2:]
        depth = len({found[1] for name in self.shapes if (found := re.match(r"encoder\.(\d+)\.", name))})
        sizes = {"in_channels": pixels, "patch_size": patch} if len(patch) == 2 else self._patch(pixels)
        return {"emb_size": width, "depth": depth, **sizes}

    def _patch(self, pixels: int) -> Options:
        """Returns channels and patch size from the number of values of a patch."""
        if "patch_size" in self.known:
            height, width = pair(self.base["patch_size"])
            return {"in_channels": pixels // (height * width)}
        for channels in [self.base["in_channels"]] if "in_channels" in self.known else (3, 1):
            side = math.isqrt(pixels // channels)
            if side * side * channels == pixels:
                return {"in_channels": channels, "patch_size": (side, side)}
        ask = f"give config={{'{self._word('patch_size')}': [height, width]}}"
        raise UserError(f"patches have {pixels} values, which are no squares: {ask}")

    def _heads(self, options: Options) -> Options:
        """Returns number and width of the heads."""
        attention, reader = "encoder.0.attention.fn.attention", self.reader
        one = reader.has(f"{attention}.subspaces.weight")  # layer for queries, keys and values
        inner = reader.size(f"{attention}.subspaces.weight") if one else reader.size(f"{attention}.qkv.weight") // 3
        found = (
            int(self.base["num_heads"]) if "num_heads" in self.known else None,
            inner // reader.size(f"{attention}.query_norm.weight") if options["qk_norm"] else None,
            self.kernel_heads,
            inner // int(self.base["dim_head"]) if "dim_head" in self.known else None,
            None if options["projection"] else 1,
            _heads_of_config(self.model or {}, inner),
        )
        heads = next((each for each in found if each is not None), None)
        if heads is None:
            heads = self._usual_heads(options, inner)
        if heads < 1 or inner % heads:
            raise UserError(f"{heads} heads do not divide the {inner} channels of the queries")
        return {"num_heads": heads, "dim_head": inner // heads, "scale": (inner // heads) ** -0.5}

    def _usual_heads(self, options: Options, inner: int) -> int:
        """Returns the usual number of heads, and notes how another is given."""
        ask = "--model.num_heads=..." if self.model is not None else f"config={{'{self._word('num_heads')}': ...}}"
        width, depth = size = options["emb_size"], options["depth"]
        is_dino = size == (1536, 40) and options["feed_forward"] != "mlp"
        if inner == width and not is_dino and size in (published := _HEADS | _HEADS_OF_FAMILY.get(self.table.name, {})):
            heads = published[size]
            why = f"those of the published model with {depth} blocks of width {width}"
        elif inner % 64 == 0 and not (self.table.name == "vit_pytorch" and inner == width == 64):  # two or more there
            heads = inner // 64
            why = f"64 channels for each were assumed (width {width}, {counted(depth, 'block')})"
        else:
            raise UserError(f"the weights do not tell the number of heads: give {ask}")
        self.notes.append(f"{counted(heads, 'head')}: {why}; the weights do not tell, and {ask} gives others")
        return heads

    def _positions(self, options: Options) -> Options:
        """Returns kind of the positions, and the size of the images."""
        height, width = pair(options["patch_size"])
        table, word = self.shapes.get(f"{EMBEDDING}.positions.table"), self._word("image_size")
        image = pair(options["image_size"]) if "image_size" in self.known else None
        if table is None:
            kind = "none" if str(options["positions"]).startswith("learned") else options["positions"]
            if image is None:
                image = (224, 224) if 224 % height == 0 == 224 % width else (14 * height, 14 * width)
                told = "there is no table of positions that would tell"
                self.notes.append(f"{word}={image[0]}x{image[1]} was assumed: {told}")
            return {"positions": kind, "image_size": image}
        prefix = options["class_token"] + options["distillation_token"] + options["register_tokens"]
        for before, kind in (prefix, "learned"), (0, "learned_patches"):
            side = math.isqrt(max(0, table[-2] - before))
            rows, columns = (side, side) if image is None else (image[0] // height, image[1] // width)
            if rows * columns and before + rows * columns == table[-2]:
                if image is None and before < prefix:
                    ask = f"config={{'{word}': [height, width]}} gives a rectangle's, and the class token one"
                    told = f"{word}={rows * height}x{columns * width} was assumed, whose patches alone have positions"
                    self.notes.append(f"{told}: {ask}")
                return {"positions": kind, "image_size": image or (rows * height, columns * width)}
        ask = f"give config={{'{word}': [height, width]}}, of as many patches"
        raise UserError(f"the {table[-2]} positions are no square of patches: {ask}")


def _as_family(
    reading: Reading, tensors: Tensors, stated: Config, given: Config, model: Mapping[str, Any] | None
) -> Identified:
    """Returns the weights as those of a family; raises UserError if they are not."""
    table, layout = reading.table, reading.layout
    words = {**table.defaults, **table.without}
    known = {
        name: value for name, value in stated.items() if name in words or name in ("id2label", "architectures")
    } | given
    more = {name: value for name, value in stated.items() if value is not None and name not in known}
    refuse([*table.unknown(table.flatten(given)), *table.unknown(more)])
    clues = _Clues(reading, known, model)
    options = clues.options()
    written = table.write(options, layout)
    if options["positions"] == "none" and table.read({**written, **known}, layout)["positions"] != "none":
        options["positions"] = "sincos2d big_vision 10000.0"  # which the family has where it has no table
        written = table.write(options, layout)
    config = {name: value for name, value in {**written, **known}.items() if value != words.get(name, ...)}
    with torch.device("meta"):
        from_reference(tensors, family=table.name, config=config)  # names all tensors that do not fit
    assumed = () if stated else (_assumed(table.name, options, clues.known),)
    return Identified(table.name, config, (*clues.notes, *assumed))


def _identify_ours(tensors: Tensors, given: Config, model: Mapping[str, Any] | None) -> Identified:
    sizes = {name: value for name, value in given.items() if name in SIZES}
    more = {name: value for name, value in given.items() if name not in SIZES}
    reading = Reading(_OUR_TABLE, {}, OPTIONS, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if f"{EMBEDDING}.positions.table" not in reading.shapes and "positions" not in given:
        raise UserError("the weights do not tell the positions: give config={'positions': ...}, sincos2d or none")
    clues = _Clues(reading, sizes, model)
    options = clues.options()
    found = as_part({**options, "positions": "none"} if "positions" in given else options).config()
    if f"{PATCHES}.linear.weight" in reading.shapes:
        found["init_args"]["patch_projection"]["class_path"] = "vit_lightning.LinearProjection"
    return Identified(OURS, with_arguments(found, more), (*clues.notes, _assumed(OURS, options, given)))


def with_arguments(model: Mapping[str, Any], given: Config) -> Config:
    """Returns the model of a config with other arguments."""
    return {**model, "init_args": {**(model.get("init_args") or {}), **given}}


def _assumed(family: str, options: Options, given: Options) -> str:
    """Returns a sentence on what no tensor tells."""
    names = ["norm", "activation", "pool", "image_size"]
    names += {OURS: ["block", "attention"], "einops_tutorial": ["attention"]}.get(family, [])
    text = ", ".join(f"{name} {options[name]}" for name in names if name in options.keys() - given.keys())
    if options.get("embedding_norm") and family == "timm":
        text += " (CLIP's have norm_layer=layernorm_1e-05, and OpenAI's act_layer=quick_gelu)"
    return f"tensors do not tell all; assumed, as {family} has them: {text}"


def _heads_of_config(model: Mapping[str, Any], inner: int) -> int | None:
    """Returns the number of heads that a config gives; None without one, or where it is no whole number above 0."""
    heads, width = (str(model.get(name) or "") for name in ("num_heads", "dim_head"))
    if heads.isdecimal():
        return int(heads) or None
    return inner // int(width) if width.isdecimal() and int(width) else None


def _stated(file: WeightsFile) -> Config:
    """Returns what a description beside weights says, in the words of its family."""
    config = file.config or {}
    if config.get("family") in FAMILIES and isinstance(config.get("config"), Mapping):
        return {"family": config["family"], **config["config"]}
    if not isinstance(config.get("architecture"), str):
        return dict(config) if isinstance(config.get("model_type"), str) else {}
    given: Any = config.get("model_args") or {}  # of timm
    arguments = {name: value for name, value in dict(given).items() if value is not None}
    found: Config = {"img_size": list(file.view["image_size"])} if file.view and "image_size" in file.view else {}
    found |= {"global_pool": config["global_pool"]} if isinstance(config.get("global_pool"), str) else {}
    return {"family": "timm", **found, **_facts_of_timm(config["architecture"], {**found, **arguments}), **arguments}


def _facts_of_timm(architecture: str, arguments: Config) -> Config:
    """Returns what a model of timm of this name has and tensors do not tell; nothing where timm is missing."""
    try:
        import timm

        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            network: Any = timm.create_model(architecture, pretrained=False, **arguments)
        block = network.blocks[0]
        kind = "rmsnorm" if "rms" in type(block.norm1).__name__.lower() else "layernorm"
        tanh = getattr(block.mlp.act, "approximate", "") == "tanh"
        return {
            "num_heads": block.attn.num_heads,
            "block_fn": type(block).__name__,
            "attn_layer": type(block.attn).__name__,
            "global_pool": network.global_pool,
            "norm_layer": f"{kind}_{block.norm1.eps!r}",
            "act_layer": "gelu_tanh" if tanh else type(block.mlp.act).__name__,
            "pool_include_prefix": getattr(network, "pool_include_prefix", False),
        }
    except Exception:  # whatever a model of another kind lacks: the tensors tell that it is no ViT
        return {}
