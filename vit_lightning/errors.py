"""What goes wrong because of what the user asked for, as opposed to a fault of ours."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """One or more things the user has to change. The command prints them without a traceback and exits with 2.

    Each problem is one line and names key, value and choices.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[str]]]:
        return type(self), (self.problems,)  # must survive the way out of a data-loading worker


class CannotResume(UserError):
    """A run that was to go on has nothing to go on from. Exit code 3."""

    exit_code = 3


class Diverged(UserError):
    """Loss, gradients or weights are no longer finite. Exit code 4."""

    exit_code = 4


def first_line(fault: BaseException) -> str:
    """Returns the first line of a foreign error, at most 200 letters, or its type if it has no text."""
    return (str(fault).splitlines() or [type(fault).__name__])[0][:200]
