"""Plain values read as the types of signatures: one pass finds the classes and all problems.

A class with arguments becomes a ``Part``. Classes stand flat, with their arguments beside ``class_path``
(``files.flatten``).
"""

import collections.abc
import inspect
import math
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, is_typeddict

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from vit_lightning.config.names import HOMES, can_be_class, find_class, full_name, hint_of_class, public_name
from vit_lightning.config.own_files import where
from vit_lightning.config.signatures import REQUIRED, Numbers, Option, Part, Signature, factory, itself, signature_of
from vit_lightning.errors import UserError, gathered, meant, near, one_line, shown, unknown
from vit_lightning.storage.parsing import parse_yaml

T = TypeVar("T")

WRONG: Any = object()
"""Result of reading a value that cannot be used."""


class OtherType(Exception):
    """A value is none of a type at all, so that another type of a union may be meant."""


@contextmanager
def _or_other_type() -> Iterator[None]:
    """Turns what conversions raise into OtherType."""
    try:
        yield
    except (ValueError, TypeError, KeyError, StopIteration, OverflowError) as fault:
        raise OtherType from fault


OTHER_LIGHTNING = (
    "pytorch_lightning is another package than lightning: write `import lightning.pytorch as pl`, and class paths so"
)

LISTS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
PLAIN: dict[Any, str] = {int: "an int", float: "a finite float", bool: "true or false", str: "a string", Path: "a path"}
PLAIN |= {timedelta: "a time such as 1:30:00", type(None): "null", Number: "a number"}
"""Plain types, and the words for them."""


_OF_VALUES = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
FAULTS = (*_OF_VALUES, OSError, RuntimeError, ImportError, MisconfigurationException)
"""Errors of classes of others about their arguments."""


@contextmanager
def of_option(key: str) -> Iterator[None]:
    """Turns what a part of the config finds wrong when it is made into a UserError that begins with its option.

    Args:
        key: the option; empty where the problems name it themselves.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}.{text}" if key else text for text in error.problems) from error
    except Exception as fault:
        if (place := where(fault)) is None and not isinstance(fault, FAULTS):
            raise
        raise UserError(f"{key}: " * bool(key) + (place or one_line(fault))) from fault


class Place(NamedTuple):
    """Stand-in for a class where a type asks for one.

    Args:
        base: class from which it derives; None for any.
        call: makes what stands there, see ``Part``.
        leading: number of first arguments that are given to a factory; None for any.
    """

    base: type | None = None
    call: Callable[..., Any] = operator.call
    leading: int | None = 0


def place_of(kind: Any) -> Place | None:
    """Returns the place of a class that a type asks for; None for any other type."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is type:
        return Place(parts[0] if parts and inspect.isclass(parts[0]) and parts[0] is not Any else None, itself)
    if origin is collections.abc.Callable:
        taken, returned = parts or (..., Any)
        bases = [each for each in members(returned) if inspect.isclass(each) and each not in (*PLAIN, object, Any)]
        return Place(bases[0] if bases else None, partial, None if taken is ... else len(taken))
    return Place(kind) if inspect.isclass(kind) and kind not in (object, Any) and origin is kind else None


def members(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_group(kind: Any) -> bool:
    """Whether the options of a type stand in a config without a class: a dataclass that derives from no other class."""
    return inspect.isclass(kind) and all(is_dataclass(base) for base in kind.__mro__[:-1])


class Found(NamedTuple):
    """A class or function that a config names, with plain arguments; a group of options has no name."""

    name: str
    target: Any
    arguments: dict[str, Any]


Adapter = Callable[["Reader", Found, str], Part | None]
"""Returns the part of a class of others at a place of ours: reader, class, key."""


@dataclass
class Reader:
    """Plain values as the types of signatures.

    Args:
        adapters: what makes a part of a class of others, by the class of ours in whose place it stands.
        problems: gets all problems.
    """

    adapters: Mapping[Any, Adapter] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    complete: bool = True
    """Whether all files could be read; if not, an argument that is missing may stand in one of them."""

    @contextmanager
    def trying(self, key: str = "") -> Iterator[None]:
        """Adds what a part of the config finds wrong when it is made, see ``of_option``, to the problems."""
        with gathered(self.problems), of_option(key):
            yield

    def make(self, part: Part | None, key: str) -> Any:
        """Returns what is made of a part; None, with its problems, if it cannot be made."""
        if part is not None and self.complete:
            with self.trying(key):
                return part.make()
        return None

    def refused(self, problem: str) -> T | None:
        """Adds a problem; returns None, for what cannot be had."""
        self.problems.append(problem)
        return None

    def arguments(
        self,
        options: Mapping[str, Option],
        given: Mapping[str, Any],
        path: str,
        *,
        of: str = "",
        provided: Collection[str] = (),
        others: bool = False,
    ) -> dict[str, Any]:
        """Returns the arguments of a class or function with their defaults, in the order of its options.

        A wrong value is left out, so that all else can still be checked, and a misspelt option is read as the one that
        it is near to, so that no problem follows from it.

        Args:
            options: its options.
            given: plain values.
            path: dotted key that they have in a config.
            of: name of the class, for problems.
            provided: arguments that are given later where the config does not.
            others: whether others are taken as well.
        """
        prefix = f"{path}." if path else ""
        odd = {str(name): value for name, value in given.items() if name not in options}
        more = {name: odd.pop(name) for name in [*odd] if others and not get_close_matches(name, options, cutoff=0.9)}
        given = {**self._as_meant(options, odd, path, of), **given}
        values = {}
        for name, option in options.items():
            if name in given:
                values[name] = self.value(option.kind, given[name], f"{prefix}{name}", option.default)
            elif option.passed_on or name in provided:
                continue
            elif not option.required:
                values[name] = default_of(option)
            elif self.complete:
                self.problems.append(f"{prefix}{name} is missing{of and f' (an argument of {of})'}")
        values |= {name: self.value(Any, value, f"{prefix}{name}") for name, value in more.items()}
        return {name: value for name, value in values.items() if value is not WRONG}

    def _as_meant(
        self, options: Mapping[str, Option], given: Mapping[str, Any], path: str, of: str
    ) -> Mapping[str, Any]:
        """Refuses what are no options; returns them by the names of those that they are near to."""
        likely = {name: near(name, options, 0.5 if self.complete and len(given) == 1 else 0.7)[:1] for name in given}
        far = [name for name, found in likely.items() if not found and ":" not in name]
        if not of or (self.complete and len(given) == 1):
            far = []  # they are told one by one
        elif far and self.complete:
            hint = "options of another class need its name: class_path: my.Class"
            self.problems.append(f"{path}: {of} has no {', '.join(far)} ({hint})")
        prefix = f"{path}." if path else ""
        known = [name for name in given if name not in far]
        self.problems += [unknown(name, given[name], prefix, options, likely[name]) for name in known]
        meant = [(found, given[name]) for name in known for found in likely[name]]
        return {name: value for name, value in meant if self.takes(options[name], value)}

    def takes(self, option: Option, given: Any) -> bool:
        """Whether a plain value is one of an option."""
        reader = replace(self, problems=[])
        reader.value(option.kind, given, option.name, option.default)
        return not reader.problems

    def value(self, kind: Any, given: Any, path: str, default: Any = REQUIRED) -> Any:
        """Returns a plain value as one of a type; ``WRONG`` if it is none.

        A text is read as what the type needs, so that a flag means what the same value means in a file.

        Args:
            kind: the type.
            given: the plain value.
            path: dotted key that it has in a config.
            default: default of the option, whose class need not be named.
        """
        try:
            return self._read(kind, given, path, default)
        except OtherType:
            if isinstance(given, Mapping) and given and all(str(key).isdecimal() for key in given):
                self.problems.append(f"{path}.{next(iter(given))}: items of a list are not given alone: --{path}=[...]")
            else:
                hint = meant(str(given), map(str, choices_of(kind)))
                self.problems.append(f"{path}={shown(given)} must be {words(kind)}{hint}")
            return WRONG

    def _read(self, kind: Any, given: Any, path: str, default: Any) -> Any:
        """Returns a value as one of a type; raises OtherType if it is none, where ``value`` adds a problem."""
        kind = int | float if kind is Number else kind  # as torchvision's transforms have it
        origin, parts = get_origin(kind) or kind, get_args(kind)
        if origin is Annotated:
            return self._read(parts[0], given, path, default)
        if origin in (Union, types.UnionType):
            return self._one_of(kind, given, path, default)
        if kind in PLAIN or origin is Literal or (inspect.isclass(kind) and issubclass(kind, Enum)):
            return plain_value(kind, given)
        if origin in MAPPINGS or is_typeddict(kind):
            return self._mapping(kind, given, path)
        if origin in (*LISTS, tuple):
            return self._list(kind, given, path)
        names_class = isinstance(given, Mapping) or (isinstance(given, str) and can_be_class(given))
        if kind is Tensor and not names_class:
            return _tensor(given)
        if (place := place_of(kind)) is not None:
            if not names_class:
                raise OtherType
            return self.part(place, given, path, default) or WRONG
        if isinstance(given, Mapping) and "class_path" in given:
            return self.part(Place(), given, path) or WRONG
        if isinstance(given, Mapping):
            return self._mapping(dict, given, path)
        return self._list(list, given, path) if isinstance(given, list | tuple) else given and scalar(given)

    def _mapping(self, kind: Any, given: Any, path: str) -> Any:
        """Returns a mapping with values of its type."""
        if not isinstance(given, Mapping):
            raise OtherType
        of_key, of_item = parts if len(parts := get_args(kind)) == 2 else (Any, Any)
        if of_key is int:  # which JSON, too, has as texts
            given = {self.value(int, key, f"{path}.{key}"): item for key, item in given.items()}
        return {key: self.value(of_item, item, f"{path}.{key}") for key, item in given.items()}

    def _list(self, kind: Any, given: Any, path: str) -> Any:
        """Returns a list, or what a type has in its place, of items of its type without those that are wrong."""
        origin, parts = get_origin(kind) or kind, get_args(kind)
        fixed = origin is tuple and parts and parts[1:] != (...,)
        if not isinstance(given, list | tuple) or (fixed and len(given) != len(parts)):
            raise OtherType
        kinds = parts if fixed else (*parts, Any)[:1] * len(given)
        items = [self.value(kinds[n], item, f"{path}.{n}") for n, item in enumerate(given)]
        if fixed and any(item is WRONG for item in items):
            return WRONG
        return {tuple: tuple, set: set, frozenset: frozenset}.get(origin, list)(x for x in items if x is not WRONG)

    def _one_of(self, kind: Any, given: Any, path: str, default: Any) -> Any:
        """Returns a value of the first type of a union that takes it, or else as the one that is meant has it."""
        tried: list[tuple[Any, Reader]] = []
        kinds = [
            one for one in members(kind) if one is not int or float not in members(kind) or type(scalar(given)) is int
        ]
        # a text may be a number or null, unless it is empty, an int also a float, a list also a tensor; typing keeps no
        # order of the types of Optional[Union[...]]
        for one in sorted(kinds, key=lambda one: (one is Tensor, (one is str) == (given != ""), one is float)):
            reader = replace(self, problems=[])
            with suppress(OtherType):
                value = reader._read(one, given, path, default)
                if not reader.problems:
                    return value
                tried.append((value, reader))
        if not tried:
            raise OtherType
        value, reader = tried[0]
        self.problems += reader.problems
        return value

    def part(self, place: Place, given: Any, path: str, default: Any = REQUIRED) -> Any:
        """Returns the class that a config names at a place, with its arguments; None if it cannot be made.

        Args:
            place: the place.
            given: class path, or its arguments with or without ``class_path``.
            path: dotted key that it has in a config.
            default: the class that need not be named.
        """
        if (found := self.find(place.base, given, path, default)) is None:
            return None
        name, target, _ = found
        base, is_class = place.base, inspect.isclass(target)
        if base in self.adapters and base is not None and not (name and is_class and issubclass(target, base)):
            return self.adapters[base](self, found, path)
        if is_class and base is not None and (not issubclass(target, base) or inspect.isabstract(target)):
            return self.refused(f"{path}.class_path={name} must be a {base.__name__}")
        call = operator.call if place.call is partial and is_class and base is None else place.call
        signature = signature_of(target)
        provided = signature.options if call is itself or place.leading is None else ()
        if call is partial and place.leading:
            try:
                signature, call = factory(target, default, place.leading)
            except UserError as error:
                return self.refused(f"{path}.class_path={name} {error}")
        return self.made_of(found, signature, path, call, provided)

    def made_of(
        self,
        found: Found,
        signature: Signature,
        path: str,
        call: Callable[..., Any] = operator.call,
        provided: Collection[str] = (),
    ) -> Part | None:
        """Returns a class with its arguments; None if it lacks some."""
        options, others = signature.options, signature.others
        values = self.arguments(options, found.arguments, path, of=found.name, provided=provided, others=others)
        lacking = {*signature.required} - {*values, *provided}
        return None if lacking else Part(found.target, values, found.name, call)

    def find(self, base: type | None, given: Any, path: str, default: Any = REQUIRED) -> Found | None:
        """Returns the class or function that a config names; None, with a problem, if there is none.

        Args:
            base: class from which it derives; a group of options is found without a name.
            given: class path, or its arguments with or without ``class_path``.
            path: dotted key that it has in a config.
            default: the class that need not be named.
        """
        home = next((HOMES[kind.__name__] for kind in getattr(base, "__mro__", ()) if kind.__name__ in HOMES), "")
        if isinstance(given, str) and can_be_class(given):
            given = {"class_path": given}
        if not isinstance(given, Mapping) or not isinstance(named := given.get("class_path", ""), str):
            return self.refused(f"{path}={shown(given)} must be a class")
        arguments = {key: value for key, value in given.items() if key != "class_path"}
        if named:
            target = self._class_named(named, base, home, f"{path}.class_path={named}")
            return None if target is None else Found(full_name(named, home), target, arguments)
        if inspect.isfunction(default) or (inspect.isclass(default) and default is not REQUIRED):
            return Found(public_name(default), default, arguments)
        if is_group(base):
            return Found("", base, arguments)
        joined = [str(key) for key in arguments if ":" in str(key)]
        missing = f"{path}: a class_path is missing"
        return self.refused(unknown(joined[0], "", f"{path}.", ()) if joined else missing)

    def _class_named(self, named: str, base: type | None, home: str, key: str) -> Any:
        """Returns the class or function of a class path; None, with a problem of its key, if there is none."""
        name = full_name(named, home)
        try:
            target = find_class(name)
        except UserError as error:  # of a file of the user's; the same one of all its parts
            return self.refused(str(error))
        modules = [name, *(kind.__module__ for kind in getattr(target, "__mro__", ()))]
        if any(module.startswith("pytorch_lightning.") for module in modules):
            return self.refused(f"{key}: {OTHER_LIGHTNING}")
        is_there = callable(target) and isinstance(target, Hashable)
        return target if is_there else self.refused(f"{key} is not there{hint_of_class(named, base, home)}")


def default_of(option: Option) -> Any:
    """Returns the default of an option as a reader returns values: a class as a part with its own defaults."""
    default = option.default
    if inspect.isclass(default) or inspect.isfunction(default):
        for place in filter(None, (place_of(kind) for kind in members(option.kind) if kind not in PLAIN)):
            options = signature_of(default, place.leading or 0).options.values()
            taken = [one for one in options if one.default is not REQUIRED and not one.passed_on]
            arguments = {} if place.call is itself else {one.name: default_of(one) for one in taken}
            return Part(default, arguments, public_name(default), place.call)
    return default


def scalar(given: Any) -> Any:
    """Returns a text as the number, truth value or null that it is in YAML; any other value as it is."""
    try:
        value = parse_yaml(given, "") if isinstance(given, str) else given
    except UserError:
        return given
    return value if isinstance(value, int | float | None) or not isinstance(given, str) else given


@_or_other_type()
def plain_value(kind: Any, given: Any) -> Any:
    """Returns a value of a plain type."""
    if kind is bool and isinstance(given, str):  # in a flag, yes is no truth value
        return {"true": True, "false": False}[given.lower()]
    value = given if kind is str else scalar(given)
    if get_origin(kind) is Literal:
        return next(
            choice for choice in get_args(kind) for one in (given, value) if type(choice) is type(one) and choice == one
        )
    if kind is float and (isinstance(given, str) or type(given) is int or type(given) is float):
        if not math.isfinite(value := float(given)):
            raise ValueError
        return value
    if kind is Path and isinstance(given, str | Path):
        return Path(given)
    if kind is timedelta:
        return _time(given)
    if issubclass(kind, Enum):
        return kind[given] if given in kind.__members__ else kind(given)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)  # 1e3, and as agents of sweeps write it
    if type(value) is not kind:
        raise TypeError
    return value


@_or_other_type()
def _tensor(given: Any) -> Numbers:
    """Returns numbers, or nested lists of them, as a tensor."""
    numbers = _floats(given)
    torch.tensor(numbers)  # refuses lists of several lengths
    return Numbers(torch.tensor, {"numbers": numbers})


def _floats(given: Any) -> Any:
    """Returns numbers, or nested lists of them, as floats."""
    return [_floats(item) for item in given] if isinstance(given, list | tuple) else plain_value(float, given)


def _time(given: Any) -> timedelta:
    if not isinstance(given, str):
        return given if isinstance(given, timedelta) else timedelta(**given)
    days, _, rest = given.rpartition(" day")
    hours, minutes, seconds = rest.removeprefix("s").removeprefix(", ").split(":")
    return timedelta(int(days or 0), hours=int(hours), minutes=int(minutes), seconds=float(seconds))


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Returns the values that a type, or a union of types, lists."""
    return tuple(choice for part in members(kind) if get_origin(part) is Literal for choice in get_args(part))


def words(kind: Any) -> str:
    """Returns the values of a type in words."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        choices = choices_of(kind)
        kinds = [Literal[choices]] * bool(choices) + [part for part in parts if get_origin(part) is not Literal]
        return " or ".join(dict.fromkeys(map(words, kinds)))
    if origin is Literal or (inspect.isclass(kind) and issubclass(kind, Enum)):
        return f"one of {', '.join(map(str, parts or kind.__members__))}"
    if origin is tuple and parts and parts[1:] != (...,):
        return f"a list of {len(parts)} values"
    if origin in (*LISTS, tuple):
        return "a list"
    if kind is Tensor:
        return "a list of finite numbers"
    return "a mapping" if origin in MAPPINGS or is_typeddict(kind) else PLAIN.get(kind, "a class")
