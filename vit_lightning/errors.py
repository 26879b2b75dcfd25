"""Problems that the user can correct, as opposed to faults of this package, and what else sentences to the user need:
values beyond the limits of an option, by functions that return problems, what a wrong name may mean, and numbers with
their noun or unit.
"""

import difflib
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

Limit = tuple[str, object, bool, str]
"""An option, its value, whether the value is allowed, and what it must be."""
USUAL_NAMES = {
    "epochs": "max_epochs",
    "steps": "max_steps",
    "gpus": "devices",
    "grad_clip": "gradient_clip_val",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "seed": "seed_everything",
    "bs": "batch_size",
    "workers": "num_workers",
    "heads": "num_heads",
    **dict.fromkeys(("layers", "num_layers"), "depth"),
    **dict.fromkeys(("dim", "embed_dim", "hidden_size"), "emb_size"),
}
"""Names of options in other programs, and ours."""


class UserError(ValueError):
    """Problems that the user has to correct; a command prints them without a traceback and exits with 2.

    Each problem is one line that names key, value and choices.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[Self], tuple[list[str]]]:
        return type(self), (self.problems,)  # to be pickled in a data-loading worker


class CannotResume(UserError):
    """Run to resume without a checkpoint that can be read. Exit code 3."""

    exit_code = 3


class Diverged(UserError):
    """Training in which loss, gradients or weights are no longer finite. Exit code 4."""

    exit_code = 4


@contextmanager
def gathered(problems: list[str]) -> Iterator[None]:
    """Adds the problems of a UserError inside to a list, so that all else is still checked."""
    try:
        yield
    except UserError as error:
        problems += error.problems


@contextmanager
def named(place: str, *, others: bool = False) -> Iterator[None]:
    """Puts the place, such as ``data.``, before each problem of a UserError inside.

    Args:
        place: the place.
        others: whether code that is not ours runs inside: others of its errors are problems, with file and line.
    """
    try:
        yield
    except UserError as error:
        raise (error if others else UserError([f"{place}{text}" for text in error.problems])) from error.__cause__
    except Exception as fault:
        if not others:
            raise
        raise UserError(f"{place}{with_place(fault)}") from fault


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turns what contents that nobody expected raise where they are used into a UserError; not the disk's own errors.

    Args:
        place: the file or folder that may be anybody's.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as fault:
        text = "is damaged: its contents do not fit together, or not with the values given"
        raise UserError(f"{place} {text} ({one_line(fault)})") from fault


def first_line(fault: BaseException) -> str:
    """Returns the first line of an error of another package, at most 200 characters, or its type if it has no text."""
    return (str(fault).splitlines() or [type(fault).__name__])[0][:200]


def one_line(fault: BaseException) -> str:
    """Returns type of an error and at most 500 characters of its text, in one line."""
    if isinstance(fault, SyntaxError):
        return f"{type(fault).__name__}: {fault.msg}"
    text = str(fault).strip()
    if text.startswith("Caught ") and "Original Traceback" in text:  # of a data-loading worker
        return text.splitlines()[-1]
    return f"{type(fault).__name__}: {' '.join(text.split())[:500]}".removesuffix(": ")


def with_place(fault: BaseException) -> str:
    """Returns type and text of an error of the user's code, with the file and line of that code which raised it."""
    others = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    others += (str(Path(__file__).parent), "<")
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(fault.__traceback__)]
    if isinstance(fault, SyntaxError):
        places.append((fault.filename or "<", fault.lineno))
    own = [f" ({Path(file).name}, line {line})" for file, line in places if not file.startswith(others)]
    return one_line(fault) + "".join(own[-1:])


def refuse(*problems: Iterable[str], prefix: str = "") -> None:
    """Raises all problems as one error, if there are any."""
    if found := [f"{prefix}{problem}" for group in problems for problem in group]:
        raise UserError(found)


def problems_of(*limits: Limit) -> list[str]:
    """Returns a problem for each value that is not allowed."""
    return [f"{key}={value} must be {rule}" for key, value, allowed, rule in limits if not allowed]


def at_least(least: float, **values: float | None) -> list[str]:
    """Returns a problem for each value below the least that is allowed; None stands for no value."""
    low = {name: value for name, value in values.items() if value is not None and not value >= least}  # nan too
    return [f"{name}={value} must be at least {least}" for name, value in low.items()]


def probabilities(**values: float | None) -> list[str]:
    """Returns a problem for each value outside [0, 1); None stands for no value."""
    odd = {name: value for name, value in values.items() if value is not None and not 0.0 <= value < 1.0}
    return [f"{name}={value} must be at least 0 and below 1" for name, value in odd.items()]


def choice(name: str, value: object, choices: Collection[str]) -> list[str]:
    """Returns a problem for text that is none of the choices; any other value is a part of the user's own."""
    known = not isinstance(value, str) or value in choices
    return [] if known else [f"{name}={value} must be one of {', '.join(choices)}{meant(str(value), choices)}"]


def is_plain_name(name: str) -> bool:
    """Whether a text can name a file in a folder."""
    return Path(name).name == name and name not in ("", "..")


def chosen(value: str | T, choices: Mapping[str, T]) -> T:
    """Returns what a name stands for; for an unknown name, which ``choice`` reports, the first."""
    return choices.get(value, next(iter(choices.values()))) if isinstance(value, str) else value


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns the known names that a wrong one may have meant, the most likely first."""
    lower = {item.lower(): item for item in known}
    usual = USUAL_NAMES.get(name)
    word = usual if usual in lower else name.lower()
    swapped = [item for item in lower if sorted(item) == sorted(word)]
    found = swapped or difflib.get_close_matches(word, lower, n=3, cutoff=cutoff)
    return [lower[item] for item in found]


def meant(name: str, known: Iterable[str]) -> str:
    """Returns a hint in brackets on the known name that a wrong one may have meant; empty where there is none."""
    return "".join(f" (did you mean {item}?)" for item in near(name, known)[:1])


def shown(value: Any) -> str:
    """Returns a value as a problem names it."""
    return "null" if value is None else str(value)


def unknown(name: str, value: Any, prefix: str, known: Collection[str], likely: Sequence[str] | None = None) -> str:
    """Returns the problem of an option that is not there, and whose likely name may be known."""
    if ":" in name:
        return f"{prefix}{name}: written {{key: value}} in a config, with a space, and --key=value as a flag"
    given = "" if isinstance(value, dict | list) else f"={shown(value)}"
    likely = near(name, known, 0.5) if likely is None else likely
    hint = f"did you mean {prefix}{likely[0]}?" if likely else f"choose {', '.join(known)}"
    return f"{prefix}{name}{given}: there is no such option{f' ({hint})' if known else ''}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_time(seconds: float) -> str:
    """Writes a time with its unit: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
