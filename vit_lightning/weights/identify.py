"""The family, layout and sizes of weights of unknown origin, from names and shapes and from what lies beside them.

Each family's own table of names, read backwards, turns its tensors into shapes under our names; the options of a ViT
are read from those, whatever the family, and the family's table of arguments writes them as its config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import EinopsError, rearrange

from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.models.crate import SIZES as CRATE_SIZES
from vit_lightning.models.presets import PRESETS
from vit_lightning.sizes import pair
from vit_lightning.weights.convert import FAMILIES, from_reference
from vit_lightning.weights.describe import EMBEDDING, Told, model_config
from vit_lightning.weights.fields import Field
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.options import OPTIONS, SIZES, Options
from vit_lightning.weights.tables import Config, Family, Layout, Shapes, Theirs

OURS = "vit_lightning"
"""Family of weights under our own names; its config is ``class_path`` and ``init_args`` of ViT."""

_HEADS = {(width, depth): heads for width, depth, heads in PRESETS.values()} | {
    (1152, 27): 16,  # So400m (Alabdulmohsin et al. 2023, table 1)
    (1408, 40): 16,  # g (Zhai et al. 2022, "Scaling vision transformers", table 2)
    (1664, 48): 16,  # G (the same)
    (1792, 56): 16,  # e (Chen et al. 2022, PaLI, table 11)
    (1536, 40): 16,  # SigLIP 2's g-opt; that of DINOv2, which has SwiGLU, has heads of 64
    (768, 8): 8,  # timm's first vit_small_patch16_224
}
_HEADS_OF_FAMILY = {
    "crate": {(width, depth): heads for width, depth, heads in CRATE_SIZES.values()},
    "einops_tutorial": {(768, 12): 8},  # the tutorial's own default
}
"""Number of heads of published models by width and depth, first those of the family."""
_LARGEST_IMAGE = 1 << 14
"""Side of an image, in a description beside weights, for which positions are computed."""


class Identified(NamedTuple):
    """Origin of weights: what ``from_reference`` needs to know.

    Args:
        family: one of ``FAMILIES``, or vit_lightning for weights under our own names.
        config: arguments of the reference's constructor; class_path and init_args of ViT for our own names.
        layout: form of the file where those of a family differ.
        notes: sentences on what was looked up or assumed.
    """

    family: str
    config: Config
    layout: Layout
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
        return Identified(OURS, _with_arguments(described, given), {}, ())
    stated = _stated(file.config or {})
    wanted = given.pop("family", stated.pop("family", None))
    if wanted is not None and wanted not in list(FAMILIES):
        raise UserError(f"config.family={wanted} must be one of {', '.join(FAMILIES)}")
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    tables = [(_coverage(shapes, table), table) for table in FAMILIES.values() if wanted in (None, table.name)]
    if (
        wanted is None
        and "patch_embedding.projection" in " ".join(shapes)
        and "encoder.0.attention" in " ".join(shapes)
    ):
        return _identify_ours(shapes, given, model)
    likely = sorted((found for found in tables if found[0] >= 0.5), key=lambda found: -found[0])
    failures: list[UserError] = []
    for _, table in likely:
        try:
            return _as_family(file, table, stated, given, model)
        except UserError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    names = ", ".join(list(shapes)[:3])
    raise UserError(f"{file.place} holds weights of none of the families {', '.join(FAMILIES)} (first names: {names})")


def _as_family(
    file: WeightsFile, table: Family, stated: Config, given: Config, model: Mapping[str, Any] | None
) -> Identified:
    """Returns the weights as those of a family; raises UserError if they are not."""
    layout = table.find_layout({name: tuple(tensor.shape) for name, tensor in file.tensors.items()})
    on_meta = {name: tensor.to("meta") for name, tensor in file.tensors.items()}
    unpacked = {name: tuple(tensor.shape) for name, tensor in table.unpack(on_meta, layout).items()}
    words = {**table.defaults, **table.without}
    known = {name: value for name, value in stated.items() if name in words or name == "id2label"} | given
    base, known_options = _base_options(table, layout), _known_options(table, known)
    shapes, heads = _under_our_names(unpacked, table, base, layout)
    clues = _Clues(shapes, {**base, **known_options}, frozenset(known_options), table, heads, model)
    options = clues.options()
    written = table.write(options, layout)
    if options["positions"] == "none" and table.read({**written, **known}, layout)["positions"] != "none":
        options["positions"] = "sincos2d big_vision 10000.0"  # which the family has where it has no table
        written = table.write(options, layout)
    config = {name: value for name, value in {**written, **known}.items() if value != words.get(name, ...)}
    with torch.device("meta"):
        from_reference(on_meta, family=table.name, config=config)  # names all tensors that do not fit
    assumed = () if stated else (_assumed(table.name, options),)
    return Identified(table.name, config, layout, (*clues.notes, *assumed))


def _identify_ours(shapes: Shapes, given: Config, of_config: Mapping[str, Any] | None) -> Identified:
    sizes = {name: given[name] for name in SIZES if name in given}
    refuse(problem for name, value in sizes.items() for problem in Field(name, ...).problems(value))
    sizes |= {name: pair(sizes[name]) for name in ("image_size", "patch_size") if name in sizes}
    if "patch_embedding.positions.table" not in shapes and "positions" not in given:
        raise UserError("the weights do not tell the positions: give config={'positions': ...}, sincos2d or none")
    clues = _Clues(shapes, {**OPTIONS, **sizes}, frozenset(sizes), None, None, of_config)
    options = clues.options()
    model = model_config({**options, "positions": "none"} if "positions" in given else options)
    if "patch_embedding.projection.linear.weight" in shapes:
        model["init_args"]["patch_projection"]["class_path"] = "vit_lightning.LinearProjection"
    more = {name: value for name, value in given.items() if name not in sizes}
    told = {name: value for name, value in options.items() if name not in more}
    return Identified(OURS, _with_arguments(model, more), {}, (*clues.notes, _assumed(OURS, told)))


def _with_arguments(model: Mapping[str, Any], given: Config) -> Config:
    """Returns the model of a config with other arguments."""
    return {**model, "init_args": {**(model.get("init_args") or {}), **given}}


def _assumed(family: str, options: Options) -> str:
    """Returns a sentence on what no tensor tells."""
    names = ("norm", "activation", "pool", *(("attention",) if family in (OURS, "einops_tutorial") else ()))
    text = ", ".join(f"{name} {options[name]}" for name in names if name in options)
    if options.get("embedding_norm") and family == "timm":
        text += " (CLIP's have norm layernorm_1e-05, and OpenAI's an activation, QuickGELU, that we lack)"
    return f"tensors do not tell all; assumed, as {family} has them: {text}"


def _base_options(table: Family, layout: Layout) -> Options:
    """Returns the options of a family's constructor without arguments; those that have to be given as in ViT-B/16."""
    defaults = {name: value for name, value in table.defaults.items() if value is not ...}
    of_layout = {ours: layout[key] for key, ours in table.layout_options.items()}
    return {**OPTIONS, **table.fixed, **table.set_by(defaults), **of_layout}


def _known_options(table: Family, known: Config) -> Options:
    """Returns the options that the given arguments set."""
    try:
        flat = table.flatten(known)
        refuse(table.wrong_types(flat))
        return table.set_by(flat)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as fault:
        raise UserError(f"config of {table.name}: {fault}") from fault


def _coverage(shapes: Shapes, table: Family) -> float:
    """Returns the fraction of tensors whose names the family has."""
    layout = table.find_layout(shapes)
    on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        unpacked = {name: tuple(tensor.shape) for name, tensor in table.unpack(on_meta, layout).items()}
    except UserError:
        return 0.0
    patterns = [pattern for pattern, _, _ in _backwards(table, _base_options(table, layout), layout)]
    return sum(any(pattern.match(name) for pattern in patterns) for name in unpacked) / max(1, len(unpacked))


def _backwards(table: Family, options: Options, layout: Layout) -> list[tuple[re.Pattern[str], str, Theirs]]:
    """Returns a pattern of the family's names, with our name, for each entry of its table."""
    found = []
    for ours, value in table.names(options, layout).items():
        theirs = value if isinstance(value, Theirs) else Theirs(value)
        for part in theirs.parts:
            number = re.escape(part).replace(r"\*", r"(?P<block>\d{1,4})")
            found.append((re.compile(rf"{number}(?P<rest>(\..+)?)$"), ours, theirs))
    return found


def _under_our_names(
    shapes: Shapes, table: Family, options: Options, layout: Layout
) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Returns shapes under our names, and the number of heads where a kernel has an axis for them."""
    found: dict[str, tuple[int, ...]] = {}
    heads = None
    for pattern, ours, theirs in _backwards(table, options, layout):
        for name, shape in shapes.items():
            match = pattern.match(name)
            if match is None:
                continue
            source, _, target = theirs.pattern.partition(" -> ")
            axes = target.split()
            if "h" in axes and len(shape) == len(axes):
                heads = shape[axes.index("h")]
            if theirs.pattern:
                try:
                    back = f"{target} -> {source}"
                    shape = tuple(rearrange(torch.empty(shape, device="meta"), back).shape)
                except EinopsError:  # it needs the sizes of a patch: the axes are those of one matrix
                    pass
            shape = (shape[0] * len(theirs.parts), *shape[1:]) if shape else shape
            found[ours.replace("*", match.groupdict().get("block") or "") + match["rest"]] = shape
    return found, heads


@dataclass(frozen=True)
class _Clues:
    """Shapes of the tensors of a ViT, and all else that is known about it.

    Args:
        shapes: shapes under our names.
        base: options that hold where the tensors do not tell, the given ones among them.
        known: names of options that were given.
        table: the family; None for weights under our own names.
        kernel_heads: number of heads, if a kernel has an axis for them.
        model: heads in the user's config; None without one.
        notes: sentences on what was assumed.
    """

    shapes: Shapes
    base: Options
    known: frozenset[str]
    table: Family | None
    kernel_heads: int | None
    model: Mapping[str, Any] | None
    notes: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        return OURS if self.table is None else self.table.name

    @property
    def words(self) -> dict[str, str]:
        """The family's own words for options."""
        return {name: each.theirs for each in (self.table.fields if self.table else ()) for name in each.options}

    @property
    def told(self) -> Told:
        return Told(self.shapes, self._kind, self.family)

    def _kind(self, norm: str) -> str:
        return str(self.base["norm"]) if self.told.has(f"{norm}.bias") else "rmsnorm_1e-06"

    def options(self) -> Options:
        """Returns the options of the ViT.

        Raises:
            UserError: tensors are missing, or do not tell what then has to be given.
        """
        told, base = self.told, self.base
        options = {**base, **self._sizes(), **told.embedding(), **told.block(), **told.head()}
        options |= {name: base[name] for name in ("patch_norm", "patch_token_norm") if base[name]}
        options["norm"] = options["norm"] or base["norm"]
        options |= self._heads(options)
        if options["pool_hidden"]:
            options |= {"pool": "attention", "pool_norm": base["norm"], "pool_activation": base["activation"]}
        elif self.table is None or "pool" not in self.table.fixed:
            norm_says = options["final_norm"] == "after_pool" != base["final_norm"]
            options["pool"] = "mean" if norm_says or not options["class_token"] else "cls"
        options |= {name: base[name] for name in self.known}
        return {**options, **self._positions(options)}

    def _sizes(self) -> Options:
        """Returns width, depth, channels and patch size."""
        kind = "conv" if f"{EMBEDDING}.projection.conv.weight" in self.shapes else "linear"
        kernel = f"{EMBEDDING}.projection.{kind}.weight"
        width, pixels = self.told.size(kernel), self.told.size(kernel, 1)
        patch = self.shapes[kernel][2:]
        numbers = {int(found[1]) for name in self.shapes if (found := re.match(r"encoder\.(\d{1,4})\.", name))}
        depth = len(numbers)
        wanted = self.base["depth"] if "depth" in self.known else max(numbers, default=-1) + 1
        if wanted != depth:
            raise UserError(f"the weights are those of {depth} blocks, and not of {wanted}")
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
        word = self.words.get("patch_size", "patch_size")
        raise UserError(
            f"patches have {pixels} values, which are no squares: give config={{'{word}': [height, width]}}"
        )

    def _heads(self, options: Options) -> Options:
        """Returns number and width of the heads."""
        attention = "encoder.0.attention.fn.attention"
        told, width, depth = self.told, options["emb_size"], options["depth"]
        one = told.has(f"{attention}.subspaces.weight")  # layer for queries, keys and values
        inner = told.size(f"{attention}.subspaces.weight") if one else told.size(f"{attention}.qkv.weight") // 3
        published = {**_HEADS, **_HEADS_OF_FAMILY.get(self.family, {})}.get((width, depth))
        if inner != width or ((width, depth) == (1536, 40) and options["feed_forward"] != "mlp"):
            published = None
        heads = self.kernel_heads
        if options["qk_norm"]:
            heads = inner // told.size(f"{attention}.query_norm.weight")
        if "num_heads" in self.known:
            heads = int(self.base["num_heads"])
        elif heads is None and "dim_head" in self.known and "dim_head" in self.words:
            heads = inner // int(self.base["dim_head"])
        elif heads is None and not options["projection"]:
            heads = 1
        elif heads is None and not (heads := _heads_of_config(self.model or {}, inner)):
            if not published and inner % 64:
                word = self.words.get("num_heads", "num_heads")
                ask = f"config={{'{word}': ...}}" if self.model is None else "--model.num_heads=..."
                raise UserError(f"the weights do not tell the number of heads: give {ask}")
            heads = published or inner // 64
            why = f"those of the published model with {depth} blocks of width {width}"
            assumed = f"64 channels for each were assumed (width {width}, {depth} blocks)"
            self.notes.append(f"{heads} heads: {why if published else assumed}")
        if heads < 1 or inner % heads:
            raise UserError(f"{heads} heads do not divide the {inner} channels of the queries")
        return {"num_heads": heads, "dim_head": inner // heads, "scale": (inner // heads) ** -0.5}

    def _positions(self, options: Options) -> Options:
        """Returns kind of the positions, and the size of the images."""
        height, width = pair(options["patch_size"])
        table, word = self.shapes.get(f"{EMBEDDING}.positions.table"), self.words.get("image_size", "image_size")
        image = pair(options["image_size"]) if "image_size" in self.known else None
        if table is None:
            kind = "none" if str(options["positions"]).startswith("learned") else options["positions"]
            if image is None:
                image = (224, 224) if 224 % height == 0 == 224 % width else (14 * height, 14 * width)
                told = "there is no table of positions that would tell"
                self.notes.append(f"{word}={image[0]}x{image[1]} was assumed: {told}")
            if max(image) > _LARGEST_IMAGE:
                raise UserError(f"{word}={options['image_size']} must be at most {_LARGEST_IMAGE}")
            return {"positions": kind, "image_size": image}
        prefix = options["class_token"] + options["distillation_token"] + options["register_tokens"]
        for before, kind in (prefix, "learned"), (0, "learned_patches"):
            patches = max(0, table[-2] - before)
            side = math.isqrt(patches)
            if image is None and side and side * side == patches:
                return {"positions": kind, "image_size": (side * height, side * width)}
            if image is not None and patches == (image[0] // height) * (image[1] // width):
                return {"positions": kind}
        if image is None:
            ask = f"give config={{'{word}': [height, width]}}"
            raise UserError(f"the {table[-2]} positions are no square of patches: {ask}")
        patches = (image[0] // height) * (image[1] // width)
        raise UserError(f"{word}={image[0]}x{image[1]} has {patches} patches, the table of positions {table[-2]} rows")


def _heads_of_config(model: Mapping[str, Any], inner: int) -> int:
    """Returns the number of heads that a config gives; 0 without one, or where it is no whole number above 0."""
    heads, width = (str(model.get(name) or "") for name in ("num_heads", "dim_head"))
    if heads.isdecimal():
        return int(heads)
    return inner // int(width) if width.isdecimal() and int(width) else 0


def _stated(config: Mapping[str, Any]) -> Config:
    """Returns what a description beside weights says, in the words of its family."""
    if config.get("family") in FAMILIES and isinstance(config.get("config"), Mapping):
        return {"family": config["family"], **config["config"]}
    if isinstance(config.get("architecture"), str):
        return _stated_by_timm(config)
    if isinstance(config.get("model_type"), str):
        return dict(config)
    return {}


def _stated_by_timm(config: Mapping[str, Any]) -> Config:
    """Returns arguments of timm's ViT: those of the architecture, where timm is installed, and those in the file."""
    arguments = config.get("model_args")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    facts = config.get("pretrained_cfg")
    size = facts.get("input_size") if isinstance(facts, Mapping) else None
    found: Config = {"img_size": list(size[1:])} if isinstance(size, list | tuple) and len(size) == 3 else {}
    found |= {"global_pool": config["global_pool"]} if isinstance(config.get("global_pool"), str) else {}
    known = set(FAMILIES["timm"].defaults)
    arguments = {name: value for name, value in arguments.items() if name in known}
    return {"family": "timm", **found, **_facts_of_timm(config["architecture"], {**found, **arguments}), **arguments}


def _facts_of_timm(architecture: str, arguments: Config) -> Config:
    """Returns what a model of timm of this name has and tensors do not tell; nothing where timm is missing."""
    try:
        import timm
    except ImportError:
        return {}
    if not timm.is_model(architecture):
        return {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            network: Any = timm.create_model(architecture, pretrained=False, **arguments)
        block = network.blocks[0]
        kind = "rmsnorm" if "rms" in type(block.norm1).__name__.lower() else "layernorm"
        return {
            "num_heads": block.attn.num_heads,
            "block_fn": type(block).__name__,
            "attn_layer": type(block.attn).__name__,
            "global_pool": network.global_pool,
            "norm_layer": f"{kind}_{block.norm1.eps!r}",
            "act_layer": {"tanh": "gelu_tanh"}.get(
                getattr(block.mlp.act, "approximate", ""), type(block.mlp.act).__name__
            ),
            "pool_include_prefix": getattr(network, "pool_include_prefix", False),
        }
    except Exception:  # whatever a model of another kind lacks: the tensors tell that it is no ViT
        return {}
