"""The options of a class or a function: its arguments, with their types and defaults, as its signature has them."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

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
    for call, scope in _calls(target):
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (ValueError, TypeError):  # of a class in C
            break
        parameters = parameters[1:] if inspect.isclass(target) and call is not target else parameters
        hints, made = _hints(scope), _made_defaults(target)
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


def _calls(target: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yields what is called, one behind the other where it passes arguments on, and whose type hints it has."""
    if not inspect.isclass(target):
        yield target, target
        return
    for base in target.__mro__:
        made = vars(base).get("__init__")
        if base is object or f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module":
            break
        if made is not None:
            yield made, made
    if target.__init__ is object.__init__:  # a named tuple, or a class without arguments
        yield target, target


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
