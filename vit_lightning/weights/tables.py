"""Other people's names and arrangements of weights, as tables that are read in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vit_lightning.errors import UserError
from vit_lightning.weights.options import Options, norm_text

Config = dict[str, Any]
Layout = dict[str, Any]
Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class Rename(NamedTuple):
    """One tensor of ours, and theirs: one, or several that ours has one after the other in its first axis.

    ``pattern`` turns (each part of) ours into theirs in einops' language, ``sizes`` are lengths of its axes.
    """

    ours: str
    theirs: str | tuple[str, ...]
    pattern: str = ""
    sizes: Mapping[str, int] = {}


def layer(ours: str, theirs: str, *, bias: bool = True, pattern: str = "") -> list[Rename]:
    """Weight and bias of a layer with torch's names on both sides."""
    weight = Rename(f"{ours}.weight", f"{theirs}.weight", pattern)
    return [weight, Rename(f"{ours}.bias", f"{theirs}.bias")] if bias else [weight]


def norm(ours: str, theirs: str, text: str | None) -> list[Rename]:
    """Weight and bias of a norm such as layernorm_1e-06; none of either when it is not there."""
    return [] if text is None else layer(ours, theirs, bias=text.startswith("layernorm"))


def attention_names(block: int) -> tuple[str, str, str]:
    """Our names of a block's first half: its norm, its attention, and its LayerScale's parameter."""
    half = f"encoder.{block}.attention.fn"
    return f"{half}.norm", f"{half}.attention", f"{half}.layer_scale.scale"


def feed_forward_names(block: int, options: Options) -> tuple[str, str, str]:
    """Our names of a block's second half: its norm, its feed-forward part, and its LayerScale's parameter."""
    half = f"encoder.{block}.feed_forward" + ("" if options["feed_forward"] == "ista" else ".fn")
    return f"{half}.norm", f"{half}.feed_forward", f"{half}.layer_scale.scale"


def final_norm_name(options: Options) -> str:
    """Our name of the last norm."""
    return "head.norm" if options["final_norm"] == "after_pool" else "norm"


def to_theirs(ours: Mapping[str, Tensor], renames: Iterable[Rename]) -> Tensors:
    """Our tensors under their names."""
    tensors: Tensors = {}
    for rename in renames:
        theirs = (rename.theirs,) if isinstance(rename.theirs, str) else rename.theirs
        for name, part in zip(theirs, ours[rename.ours].chunk(len(theirs)), strict=True):
            turned = rearrange(part, rename.pattern, **rename.sizes) if rename.pattern else part
            tensors[name] = turned.clone(memory_format=torch.contiguous_format)
    return tensors


def to_ours(theirs: Mapping[str, Tensor], renames: Iterable[Rename]) -> Tensors:
    """Their tensors under our names."""
    tensors: Tensors = {}
    for rename in renames:
        names = (rename.theirs,) if isinstance(rename.theirs, str) else rename.theirs
        pattern = " -> ".join(reversed(rename.pattern.split(" -> ")))
        parts = [rearrange(theirs[name], pattern, **rename.sizes) if pattern else theirs[name] for name in names]
        tensors[rename.ours] = torch.cat(parts)
    return tensors


def _same(tensors: Tensors, layout: Layout) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Family:
    """How a family of references writes its config and its weights.

    Args:
        defaults: its arguments with their defaults; ``...`` for those that have to be given.
        without: arguments that we have only at these values.
        flatten: turns the reference's nested form of a config into its flat one.
        inert: arguments that change neither the function nor the weights.
        layouts: what may differ between its files, each with its values.
        find_layout: layout of given tensors.
        layout_for: layout in which a model of these options goes out.
        read: options from a complete config.
        write: config from options; where it cannot say one, it says something else and the caller finds that out.
        rename: the table of names.
        headless: whether the family has models without a classifier, which give the pooled features.
        unpack: tensors of a file as the table has them.
        pack: the other way round.
        extra: tensors that hold nothing, such as a class token that is not there.
    """

    defaults: Config
    read: Callable[[Config, Layout], Options]
    write: Callable[[Options, Layout], Config]
    rename: Callable[[Options, Layout], list[Rename]]
    without: Config = field(default_factory=dict)
    headless: bool = False
    inert: frozenset[str] = frozenset()
    flatten: Callable[[Mapping[str, Any]], Config] = dict
    layouts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    find_layout: Callable[[Shapes, Config], Layout] = lambda shapes, config: {}
    layout_for: Callable[[Options], Layout] = lambda options: {}
    unpack: Callable[[Tensors, Layout], Tensors] = _same
    pack: Callable[[Tensors, Layout], Tensors] = _same
    extra: Callable[[Options, Layout], dict[str, tuple[int, ...]]] = lambda options, layout: {}


def complete_config(config: Mapping[str, Any], family: Family, name: str) -> Config:
    """The config with the defaults of the reference.

    Raises:
        UserError: names unknown, missing and unsupported arguments.
    """
    factory = ("constructor", "create_model")  # which of the reference's factories gives these arguments
    given = {key: value for key, value in config.items() if key not in factory and key not in family.inert}
    known = {**family.defaults, **family.without}
    problems = [
        f"config.{key}={value}: {name} has no such option that we know (it has {', '.join(known)})"
        for key, value in given.items()
        if key not in known
    ]
    problems += [
        f"config.{key} is missing" for key, value in family.defaults.items() if value is ... and key not in given
    ]
    problems += [
        f"config.{key}={given[key]}: we do not have this option of {name}, only {key}={value}"
        for key, value in family.without.items()
        if key in given and given[key] != value
    ]
    problems += [
        f"config.{key}={value} must be {_kind(family.defaults[key])}"
        for key, value in given.items()
        if key in family.defaults and not _fits(value, family.defaults[key])
    ]
    if problems:
        raise UserError(problems)
    return {**known, **given}


_KINDS = {bool: "true or false", int: "a whole number that is not negative", float: "a number", str: "text"}


def _kind(default: Any) -> str:
    return _KINDS[type(default)]


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of its default; what has no plain default is left to the family."""
    if type(default) is bool:
        return isinstance(value, int)  # where True is a size of its own choice, a number is one as well
    if type(default) is int:
        sizes = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
        return all(type(size) is int and size >= 0 for size in sizes)
    if type(default) is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return not isinstance(default, str) or value is None or isinstance(value, str)


def heads(emb_size: int, num_heads: int) -> Options:
    """Sizes of heads that share the tokens' width, and the usual scale."""
    if num_heads < 1 or emb_size < 1 or emb_size % num_heads:
        raise UserError(f"num_heads={num_heads} must be at least 1 and divide the width {emb_size}")
    dim_head = emb_size // num_heads
    return {"emb_size": emb_size, "num_heads": num_heads, "dim_head": dim_head, "scale": dim_head**-0.5}


def size(value: Any) -> tuple[int, int]:
    """Height and width of a size in a config: a number, or two in a tuple or list."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def side(value: tuple[int, int]) -> int | list[int]:
    """The same as a config says it."""
    return value[0] if value[0] == value[1] else list(value)


def norm_of_config(key: str, value: Any, default: str) -> str:
    """A norm such as layernorm_1e-06 of a config's word such as layernorm_1e-5, layernorm or rmsnorm."""
    if value is None:
        return default
    kind, _, eps = str(value).lower().rpartition("_")
    kind, eps = (kind, eps) if kind else (eps, "1e-6")
    try:
        if kind not in ("layernorm", "rmsnorm"):
            raise ValueError
        return norm_text(kind, float(eps))
    except ValueError:
        raise UserError(f"config.{key}={value} must be layernorm_EPS or rmsnorm_EPS, such as layernorm_1e-6") from None


def norm_to_config(text: str | None) -> str | None:
    """The other way round: layernorm_1e-06 as layernorm_1e-6."""
    return None if text is None else text.replace("e-0", "e-")


def ratio(hidden: int, emb_size: int) -> float:
    """A share of emb_size from which truncation makes exactly ``hidden``."""
    share = hidden / emb_size
    return share if int(emb_size * share) == hidden else (hidden + 0.5) / emb_size


def word(key: str, value: Any, words: Mapping[str, str]) -> str:
    """What we call a word of a config."""
    if value not in words:
        raise UserError(f"config.{key}={value}: we have {', '.join(words)}")
    return words[value]


def word_for(ours: str, words: Mapping[str, str], default: Any) -> Any:
    """The first of their words for ours."""
    return next((theirs for theirs, name in words.items() if name == ours), default)
