"""Errors that the user can correct, as opposed to faults of this package."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """Problems that the user has to correct; a command prints them without a traceback and exits with 2.

    Each problem is one line that names key, value and choices.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[str]]]:
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
        raise UserError(f"{place} is damaged: its contents do not fit together ({one_line(fault)})") from fault


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
