"""A family of reference models as tables: arguments of its constructor, and names and shapes of its tensors."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from vit_lightning.errors import UserError, gathered, meant, refuse
from vit_lightning.weights.fields import Field
from vit_lightning.weights.options import OPTIONS, PATCHES, Options, Shapes

Config = dict[str, Any]
Layout = dict[str, Any]
FACTORY = ("constructor", "create_model")
"""Keys that say which of the reference's factories takes the arguments."""
Tensors = dict[str, Tensor]


class Theirs(NamedTuple):
    """The reference's tensors that hold one tensor of ours.

    Args:
        names: its name, or several names whose tensors ours has concatenated along its first axis.
        pattern: einops pattern from (each part of) ours to theirs; the same arrangement when not given.
        sizes: lengths of axes in the pattern.
    """

    names: str | tuple[str, ...]
    pattern: str = ""
    sizes: Mapping[str, int] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names


Names = dict[str, str | Theirs]
"""Their name for each tensor or module of ours, with ``*`` for the number of the block on both sides.

A tensor belongs to the longest name of ours that it begins with, and what follows that name follows theirs too.
"""


def find_names(ours: Iterable[str], names: Names) -> dict[str, Theirs]:
    """Returns the reference's tensors for each tensor of ours."""
    found = {}
    for name in ours:
        block = re.match(r"encoder\.(\d+)\.", name)
        number = block[1] if block else ""
        pattern = f"encoder.*.{name[block.end() :]}" if block else name
        keys = [key for key in names if f"{pattern}.".startswith(f"{key}.")]
        assert keys, f"the table of names lacks {pattern}"
        key = max(keys, key=len)
        value = names[key]
        theirs = value if isinstance(value, Theirs) else Theirs(value)
        parts = tuple(part.replace("*", number) + pattern[len(key) :] for part in theirs.parts)
        found[name] = theirs._replace(names=parts)
    return found


def to_theirs(ours: Mapping[str, Tensor], names: Mapping[str, Theirs]) -> Tensors:
    """Returns copies of our tensors under their names."""
    tensors: Tensors = {}
    for name, theirs in names.items():
        for their_name, part in zip(theirs.parts, ours[name].chunk(len(theirs.parts)), strict=True):
            arranged = rearrange(part, theirs.pattern, **theirs.sizes) if theirs.pattern else part
            tensors[their_name] = arranged.clone(memory_format=torch.contiguous_format)
    return tensors


def to_ours(theirs: Mapping[str, Tensor], names: Mapping[str, Theirs]) -> Tensors:
    """Returns copies of their tensors under our names."""
    tensors: Tensors = {}
    for name, (_, pattern, sizes) in names.items():
        back = " -> ".join(reversed(pattern.split(" -> ")))
        parts = [theirs[part] for part in names[name].parts]
        arranged = torch.cat([rearrange(part, back, **sizes) if back else part for part in parts])
        tensors[name] = arranged.clone(memory_format=torch.contiguous_format) if back else arranged
    return tensors


def _same(tensors: Tensors, layout: Layout) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Family:
    """A family of reference models; the first three are enough for one that is built as ours is.

    Args:
        name: its name in ``from_reference(family=...)``.
        fields: arguments of its constructor.
        names: its names of our tensors, for given options and layout.
        fixed: options that all its models share where those differ from ViT-B/16.
        read_rest: options that follow from several arguments or the layout: from a complete config, the options of the
            fields and the layout.
        write_rest: arguments that follow from several options or the layout.
        without: arguments that we have only at these values.
        inert: arguments that change neither the function nor the weights.
        flatten: turns the reference's nested form of a config into its flat one.
        layouts: what may differ between its files, each with the values that are written, the current one first.
        layout_options: keys of the layout that set an option of ours.
        find_layout: layout of given tensors.
        unpack: turns the tensors of a file into those in ``names``; such a family is read alone.
        extra: shapes of tensors that hold nothing, such as a class token that is absent.
    """

    name: str
    fields: tuple[Field, ...]
    names: Callable[[Options, Layout], Names]
    fixed: Options = field(default_factory=dict)
    read_rest: Callable[[Config, Options, Layout], Options] = lambda config, options, layout: {}
    write_rest: Callable[[Options, Layout], Config] = lambda options, layout: {}
    without: Config = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    flatten: Callable[[Mapping[str, Any]], Config] = dict
    layouts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    layout_options: dict[str, str] = field(default_factory=dict)
    find_layout: Callable[[Shapes], Layout] = lambda shapes: {}
    unpack: Callable[[Tensors, Layout], Tensors] = _same
    extra: Callable[[Options, Layout], dict[str, tuple[int, ...]]] = lambda options, layout: {}

    @property
    def defaults(self) -> Config:
        return {field.theirs: field.default for field in self.fields}

    def recognise(self, tensors: Tensors) -> "Reading | None":
        """Returns tensors as those of this family, by its names read backwards; None if it lacks half, or patches."""
        layout = self.find_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        defaults = {name: value for name, value in self.defaults.items() if value is not ...}
        of_layout = {ours: layout[key] for key, ours in self.layout_options.items()}
        base: Options = {**OPTIONS, **self.fixed, **self.set_by(defaults), **of_layout}
        try:
            unpacked = self.unpack(tensors, layout)
        except UserError:
            return None
        shapes: dict[str, tuple[int, ...]] = {}
        heads, matched = None, set[str]()
        for ours, value in self.names(base, layout).items():
            theirs = value if isinstance(value, Theirs) else Theirs(value)
            source, _, target = theirs.pattern.partition(" -> ")
            axes = target.split()
            for part in theirs.parts:
                pattern = re.compile(re.escape(part).replace(r"\*", r"(?P<block>\d{1,4})") + r"(?P<rest>(\.\D.*)?)$")
                for name, match in ((name, match) for name in unpacked if (match := pattern.match(name))):
                    tensor = unpacked[name]
                    matched.add(name)
                    if "h" in axes and tensor.ndim == len(axes):
                        heads = tensor.shape[axes.index("h")]
                    with contextlib.suppress(EinopsError):  # it needs the sizes of a patch: they stay one axis
                        tensor = rearrange(tensor, f"{target} -> {source}") if source else tensor
                    shape = (tensor.shape[0] * len(theirs.parts), *tensor.shape[1:]) if tensor.ndim else ()
                    shapes[ours.replace("*", match.groupdict().get("block") or "") + match["rest"]] = shape
        coverage = len(matched) / max(1, len(unpacked))
        if coverage < 0.5 or not any(name.startswith(PATCHES) for name in shapes):
            return None
        return Reading(self, layout, base, shapes, heads, coverage, matched)

    def layout_for(self, options: Options) -> Layout:
        """Returns the layout in which a model of these options is exported."""
        given = {key: options[ours] for key, ours in self.layout_options.items()}
        return given | {key: values[0] for key, values in self.layouts.items() if given.get(key) not in values}

    def read(self, config: Mapping[str, Any], layout: Layout) -> Options:
        """Returns the options of a config.

        Raises:
            UserError: names arguments that are unknown, missing, unsupported or of the wrong type.
        """
        given = self._complete(self.flatten(config))
        options = {**OPTIONS, **self.fixed, "dim_head": None, "scale": None, **self.set_by(given)}
        options |= {ours: layout[key] for key, ours in self.layout_options.items()}
        if options["dim_head"] is None:  # heads share the width of the tokens
            emb_size, num_heads = options["emb_size"], options["num_heads"]
            if num_heads < 1 or emb_size < 1 or emb_size % num_heads:
                raise UserError(f"num_heads={num_heads} must be at least 1 and divide the width {emb_size}")
            options["dim_head"] = emb_size // num_heads
        options["scale"] = options["scale"] or options["dim_head"] ** -0.5
        options |= self.read_rest(given, options, layout)
        assert set(options) == set(OPTIONS), f"{self.name}: no such options: {set(options) - set(OPTIONS)}"
        return options

    def set_by(self, arguments: Config) -> Options:
        """Returns the options that arguments set, each by itself.

        Raises:
            UserError: names arguments whose values are none of the family's.
        """
        options: Options = {}
        problems: list[str] = []
        for argument in self.fields:
            if argument.theirs in arguments:
                with gathered(problems):
                    options |= {name: argument.read(arguments[argument.theirs]) for name in argument.options}
        refuse(problems)
        return options

    def options_of(self, config: Mapping[str, Any]) -> Options:
        """Returns the options that some arguments of a config set, without those that follow from several.

        Raises:
            UserError: names arguments whose values are of a wrong type, or none of the family's.
        """
        flat = self.flatten(config)
        refuse(self.wrong_types(flat))
        return self.set_by(flat)

    def wrong_types(self, arguments: Config) -> list[str]:
        """Returns a problem for each value that is not of its argument's type."""
        given = [argument for argument in self.fields if argument.theirs in arguments]
        return [problem for argument in given for problem in argument.problems(arguments[argument.theirs])]

    def unknown(self, arguments: Config) -> list[str]:
        """Returns a problem for each argument that the reference does not have."""
        known = {**self.defaults, **self.without}
        words = {option: f" (there it is {field.theirs})" for field in self.fields for option in field.options}
        all_names = f" (it has {', '.join(known)})"
        return [
            f"config.{key}={value}: {self.name} has no such option that we know"
            f"{words.get(key) or meant(key, known) or all_names}"
            for key, value in arguments.items()
            if key not in (*known, *FACTORY, *self.inert)
        ]

    def write(self, options: Options, layout: Layout) -> Config:
        """Returns a complete config; options that it cannot express come out different when it is read again."""
        config = {field.theirs: field.write(options[field.options[0]]) for field in self.fields if field.ours}
        return config | self.write_rest(options, layout)

    def _complete(self, config: Mapping[str, Any]) -> Config:
        """Returns the config with the defaults of the reference."""
        given = {key: value for key, value in config.items() if key not in FACTORY and key not in self.inert}
        known = {**self.defaults, **self.without}
        problems = self.unknown(given)
        problems += [f"config.{key} is missing" for key, value in known.items() if value is ... and key not in given]
        problems += [
            f"config.{key}={given[key]}: we do not have this option of {self.name}, only {key}={value}"
            for key, value in self.without.items()
            if key in given and given[key] != value
        ]
        refuse(problems, self.wrong_types(given))
        return {**known, **given}


class Reading(NamedTuple):
    """The tensors of a file as those of a family.

    Args:
        table: the family.
        layout: form of the file.
        base: options of the family's constructor without arguments; those that have to be given as in ViT-B/16.
        shapes: shapes under our names.
        heads: number of heads, where a kernel has an axis for them.
        coverage: fraction of the tensors whose names the family has.
        matched: their names.
    """

    table: Family
    layout: Layout
    base: Options
    shapes: Shapes
    heads: int | None = None
    coverage: float = 1.0
    matched: Collection[str] = ()
