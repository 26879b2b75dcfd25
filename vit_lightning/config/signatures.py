"""Classes and functions of a config: their options, which are the arguments of their signatures, and ``Part``, one with
its arguments: checked once, written to ``config.yaml`` and made as often as needed."""

import ast
import functools
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_type_hints

import torch
from torch import Tensor

from vit_lightning.errors import UserError, refuse

REQUIRED: Any = inspect.Parameter.empty
"""Default of an argument that has none."""

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Option(NamedTuple):
    """One argument."""

    name: str
    kind: Any = Any
    """Its type; Any where it has none."""
    default: Any = REQUIRED
    passed_on: bool = False
    """Whether it is one of **kwargs, which a base class or the class that a function makes takes."""

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is REQUIRED and not self.passed_on


class Signature(NamedTuple):
    """The arguments of a class or a function."""

    options: dict[str, Option]
    others: bool
    """Whether it hands others on, whose names only its call tells."""

    @property
    def required(self) -> list[str]:
        """Names of the arguments that must be given."""
        return [name for name, option in self.options.items() if option.required]


def signature_of(target: Any, leading: int = 0) -> Signature:
    """Returns the arguments of a class or a function.

    Args:
        target: the class or function. Where it has ``**kwargs``, those of its base classes, or of the class that a
            function returns, belong to it.
        leading: number of first arguments that somebody else gives.
    """
    return _read(target, leading)


def called_with(function: Callable[..., Any]) -> Any:
    """Returns what takes the options of a command: its function, or the dataclass that is its only argument."""
    parameters = inspect.signature(function).parameters
    kind = get_type_hints(function).get(next(iter(parameters), "")) if len(parameters) == 1 else None
    return kind if is_dataclass(kind) and getattr(kind, "__name__", "") != "Experiment" else function


@functools.cache  # a config asks for each some five times
def _read(target: Any, leading: int) -> Signature:
    found: dict[str, Option] = {}
    passed_on = False
    for call in _calls(target):
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (ValueError, TypeError):  # of a class in C
            break
        parameters = parameters[1:] if inspect.isclass(target) and call is not target else parameters
        hints, made = _hints(call), _made_defaults(target)
        named = [parameter for parameter in parameters if parameter.kind in _NAMED][0 if passed_on else leading :]
        for parameter in named:
            kind = hints.get(parameter.name, Any)
            default = made.get(parameter.name, parameter.default)
            found.setdefault(parameter.name, Option(parameter.name, kind, default, passed_on))
        kwargs = [one.name for one in parameters if one.kind is one.VAR_KEYWORD]
        used = _use(call, kwargs[0]) if kwargs else ""
        if not used:
            return Signature(found, False)
        passed_on = True
        if used == "others":
            break
    else:  # no base takes them
        return Signature(found, False)
    receiver: Any = None if inspect.isclass(target) else _hints(target).get("return")
    for name, option in signature_of(receiver).options.items() if inspect.isclass(receiver) else ():
        found.setdefault(name, option._replace(passed_on=True))
    return Signature(found, passed_on)


def _use(call: Callable[..., Any], kwargs: str) -> Literal["", "bases", "others"]:
    """Returns who gets the ``**kwargs`` of a function: nobody, the bases of its class, or others that it calls."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    except (OSError, TypeError, SyntaxError):  # made by code
        return "bases"
    uses = {node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == kwargs}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of_bases = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "__init__"]
    to_bases = {item.value for one in of_bases for item in one.keywords if item.arg is None}
    return "bases" if uses & to_bases else "others" if uses else ""


def _made_defaults(target: Any) -> dict[str, Any]:
    """Returns the defaults that a dataclass makes anew for each object."""
    own = fields(target) if is_dataclass(target) else ()
    return {item.name: item.default_factory() for item in own if item.default_factory is not MISSING}


def _calls(target: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yields what is called, one behind the other where it passes arguments on."""
    if not inspect.isclass(target):
        yield target
        return
    for base in target.__mro__:
        made = vars(base).get("__init__")
        if base is object or f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module":
            break
        if made is not None:
            yield made
    if target.__init__ is object.__init__:  # a named tuple, or a class without arguments
        yield target


def _hints(target: Any) -> dict[str, Any]:
    """Returns the types of arguments; those that cannot be evaluated, such as of imports for type checks, are Any."""
    try:
        return get_type_hints(target, include_extras=True)
    except Exception:  # whatever the text of an annotation raises
        function = inspect.unwrap(target)
        scope = getattr(function, "__globals__", vars(sys.modules[function.__module__]))
        return {name: _evaluated(hint, scope) for name, hint in inspect.get_annotations(function).items()}


def _evaluated(hint: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, scope)  # an annotation of code that is imported already
    except Exception:  # whatever it raises
        return Any


def itself(target: Any, /, **_: Any) -> Any:
    """Returns a class where a config gives it itself."""
    return target


@dataclass(frozen=True)
class Part:
    """A class or function with its arguments.

    Args:
        target: the class or function.
        arguments: values of its arguments; those with classes are parts too.
        name: class path in a config; empty for a group of options, which has none.
        call: makes what stands in its place, called with both: ``operator.call`` an object, ``partial`` a factory that
            takes further arguments, ``itself`` the class.
    """

    target: Any
    arguments: Mapping[str, Any]
    name: str = ""
    call: Callable[..., Any] = operator.call

    @property
    def kind(self) -> type:
        """The class; of what a function makes nothing is known."""
        return self.target if isinstance(self.target, type) else object

    def with_arguments(self, more: Mapping[str, Any]) -> Self:
        """Returns it with further arguments, or others in place of its own."""
        return replace(self, arguments={**self.arguments, **more})

    def make(self, **more: Any) -> Any:
        """Returns what stands in its place, new, with further arguments in place of those of the config."""
        given = {name: made(value) for name, value in self.arguments.items() if name not in more} | more
        return self.call(self.target, **given)

    def plain(self) -> Any:
        """Returns it as plain data, as ``config.yaml`` has it."""
        arguments = {name: plain(value) for name, value in self.arguments.items() if can_be_written(value)}
        if not self.name:
            return arguments
        return {"class_path": self.name, **({"init_args": arguments} if arguments else {})}


@dataclass(frozen=True)
class Numbers(Part):
    """Numbers, or nested lists of them, that a class of others takes as a tensor."""

    def make(self, **more: Any) -> Tensor:
        return torch.tensor(self.arguments["numbers"], dtype=torch.get_default_dtype())

    def plain(self) -> Any:
        return self.arguments["numbers"]


def _call_by_name(names: Mapping[str, Any], target: Any, /, *values: Any, **given: Any) -> Any:
    """Calls a class with those of some values that it takes, by their names; one that is asked for must be taken."""
    passed, taken = dict(zip(names, values, strict=True)), signature_of(target).options
    asked = [name for name, value in passed.items() if isinstance(value, float) and value != names[name]]
    refuse(f"{name}: {target.__name__} takes no {name} (leave it out)" for name in asked if name not in taken)
    return target(**{name: value for name, value in passed.items() if name in taken}, **given)


def factory(target: Any, like: Any, leading: int) -> tuple[Signature, Callable[..., Any]]:
    """Returns the options of a class whose first arguments, those of another, are given later, and what makes it.

    It gets those that it has by name, or else all in their order.

    Args:
        target: the class.
        like: the other one.
        leading: number of these arguments.

    Raises:
        UserError: it can get them in neither way.
    """
    passed = list(signature_of(like).options.values())[:leading] if callable(like) else []
    names, own = {one.name: one.default for one in passed}, signature_of(target)
    if own.required and {*own.required} <= {*names} and list(own.options)[:leading] != list(names):
        options = {name: option for name, option in own.options.items() if name not in names}
        return own._replace(options=options), partial(partial, _call_by_name, names)
    try:
        taken = inspect.signature(target).bind_partial(*range(leading)).arguments
        pairs = [(own.options.get(name), one) for name, one in zip(taken, passed, strict=False)]
        fits = not any(mine and mine.name != one.name and one.required and not mine.required for mine, one in pairs)
    except ValueError:  # of a class in C
        fits = True
    except TypeError:  # it takes fewer
        fits = False
    if not fits:
        asked, has = ", ".join(names) or f"{leading} arguments", ", ".join(own.options)
        raise UserError(
            f"gets {asked} as its first arguments and takes ({has}): name them so, or take them in this order"
        )
    return signature_of(target, leading), partial


def made(value: Any) -> Any:
    """Returns a value with objects in place of its parts."""
    if isinstance(value, Part):
        return value.make()
    if type(value) in (list, tuple, set):
        return type(value)(made(item) for item in value)
    return {key: made(item) for key, item in value.items()} if type(value) is dict else value


def plain(value: Any) -> Any:
    """Returns a value as plain data."""
    if isinstance(value, Part):
        return value.plain()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value.name if isinstance(value, Enum) else str(value) if isinstance(value, Path | timedelta) else value


def can_be_written(value: Any) -> bool:
    """Whether a value can be written to a config; a default of others, such as an object, may not."""
    if isinstance(value, Mapping):
        return all(map(can_be_written, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(can_be_written, value))
    return value is None or isinstance(value, Part | Enum | Path | timedelta | str | int | float | bool)
