"""From a command line to a call of a command's function: its arguments are the options, its docstring their help.

Words are positional arguments, flags keyword arguments; a function of one dataclass takes its fields. A function whose
first argument is the experiment gets the one of ``--config`` and all flags that it does not take itself.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from vit_lightning.config.files import split_words
from vit_lightning.config.signatures import REQUIRED, Option, called_with
from vit_lightning.config.typed import Reader
from vit_lightning.errors import UserError, near, refuse, unknown
from vit_lightning.storage.parsing import parse_yaml

Flags = Sequence[tuple[str, str]]


class Call(NamedTuple):
    """A function with its arguments."""

    function: Callable[..., Any]
    words: list[Any]
    options: dict[str, Any]
    experiment: Any = None
    """The experiment of the command line, if the function takes one."""

    def run(self) -> Any:
        """Calls the function."""
        first = [] if self.experiment is None else [self.experiment]
        return self.function(*first, *self.words, **self.options)


class Taken(NamedTuple):
    """Arguments that a function takes."""

    words: list[str]
    """Names of its positional arguments."""
    several: tuple[str, Any] | None
    """Name and type of ``*words``."""
    options: dict[str, Option]
    experiment: inspect.Parameter | None


def read_call(command: str, function: Callable[..., Any], arguments: Sequence[str]) -> Call:
    """Returns the call of a command's function with the arguments of a command line.

    Raises:
        UserError: all unknown, missing, repeated and wrong arguments.
    """
    if (group := called_with(function)) is not function:
        return Call(function, [read_call(command, group, arguments).run()], {})
    taken = _taken_by(function)
    flags, words = split_words(arguments, command)
    own = [flag for flag in flags if _is_of(taken.options, *flag)]
    rest = [flag for flag in flags if flag not in own]
    reader = Reader()
    if taken.experiment is None or (taken.experiment.default is not REQUIRED and not rest):
        files = [value for key, value in rest if key == "config"]  # YAML files, such as a plan
        in_plan = [flag for flag in rest if "plan" in taken.options and "." in flag[0]]
        reader.problems += [
            f"{key}={value}: write it into the plan, which says what is compared" for key, value in in_plan
        ]
        own += [flag for flag in rest if flag[0] != "config" and flag not in in_plan]
        placed, options, others = _bound(command, taken, own, [*files, *words], reader)
        reader.problems += [f"{word}: unexpected argument (options are given as --key=value)" for word in others]
        refuse(reader.problems)
        return Call(function, placed, options)
    placed, options, others = _bound(command, taken, own, words, reader)
    from vit_lightning.commands.resume import read_experiment
    from vit_lightning.config.build import is_general_option

    misspelt = [
        (key, value) for key, value in rest if not is_general_option(command, key) and near(key, taken.options, 0.8)
    ]
    reader.problems += [unknown(key, value, "", taken.options) for key, value in misspelt]
    rest = [flag for flag in rest if flag not in misspelt]
    try:
        given = [*(f"--{key}={value}" for key, value in rest), *others]
        experiment = read_experiment(command, given if own or misspelt or len(others) < len(words) else arguments)
    except UserError as error:
        if not reader.problems:
            raise
        raise UserError([*reader.problems, *error.problems]) from error
    refuse(reader.problems)
    return Call(function, placed, options, experiment)


def _taken_by(function: Callable[..., Any]) -> Taken:
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    kinds = [hints.get(one.name, Any) for one in parameters[:1]]
    first = [getattr(kind, "__name__", "") for kind in (*kinds, *(part for kind in kinds for part in get_args(kind)))]
    experiment = parameters.pop(0) if "Experiment" in first else None
    several = next(((one.name, hints.get(one.name, Any)) for one in parameters if one.kind == one.VAR_POSITIONAL), None)
    named = [one for one in parameters if one.kind != one.VAR_POSITIONAL]
    options = {one.name: Option(one.name, hints.get(one.name, Any), one.default) for one in named}
    words = [one.name for one in named if one.kind == one.POSITIONAL_OR_KEYWORD]
    return Taken(words, several, options, experiment)


def _bound(
    command: str, taken: Taken, flags: Flags, words: Sequence[str], reader: Reader
) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Returns the positional arguments, the keyword arguments, and the words that are neither."""
    given, rest = _by_name(taken.options, flags, reader.problems), list(words)
    for name in taken.words:
        if name not in given and rest:
            given[name] = rest.pop(0)
    several: list[Any] = []
    if taken.several is not None:
        several, rest = reader.value(GenericAlias(list, taken.several[1]), rest, taken.several[0]), []
    values = reader.arguments(taken.options, given, "", provided=taken.options)
    missing = [name for name, one in taken.options.items() if one.default is REQUIRED and name not in given]
    shown = [name.upper() if name in taken.words else f"--{name.replace('_', '-')}" for name in missing]
    reader.problems += [f"{name} is missing (lightning {command} --help)" for name in shown]
    return [*(values.pop(name) for name in taken.words if name in values), *several], values, rest


def _is_of(options: Mapping[str, Option], key: str, value: str) -> bool:
    """Whether a flag belongs to options of a function; a ``config`` among them is a mapping, and else a file."""
    name, _, inside = key.replace("-", "_").partition(".")
    if name not in options:
        return False
    kind = options[name].kind
    if inside:
        return any(get_origin(one) is dict for one in (kind, *get_args(kind)))
    return name != "config" or value[:1] == "{"


def _by_name(options: Mapping[str, Option], flags: Flags, problems: list[str]) -> dict[str, Any]:
    """Returns the values of flags by the names of arguments; ``--config.key=value`` is an item of a mapping."""
    given: dict[str, Any] = {}
    for key, text in flags:
        name = key.replace("-", "_")
        group, _, inside = name.partition(".")
        is_yaml = inside or text[:1] in ("[", "{")
        value = parse_yaml(text, f"{key}={text}") if is_yaml else text
        into, name = (given.setdefault(group, {}), inside) if inside and group in options else (given, name)
        if not isinstance(into, dict) or name in into:
            problems.append(f"{key} is given twice{'' if inside else f' ({given[name]} and {text})'}")
        else:
            into[name] = value
    return given
