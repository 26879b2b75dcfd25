"""Arguments of other people's constructors and the options of ours that they set, as tables read in both directions."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_lightning.errors import UserError
from vit_lightning.weights.options import norm_text


def _same(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """One argument of a reference's constructor.

    Args:
        theirs: its name.
        default: its default; ``...`` for an argument that has to be given.
        ours: the option that it sets, or several that get the same value and are written from the first; none for an
            argument that ``Family.read_rest`` and ``Family.write_rest`` translate.
        read: value of the option from the value of the argument.
        write: value of the argument from the value of the option.
    """

    theirs: str
    default: Any
    ours: str | tuple[str, ...] = ()
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same

    @property
    def options(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def problems(self, value: Any) -> list[str]:
        """Returns a problem if a value is not of the default's type; a default of None accepts all values.

        Arguments that have to be given are whole numbers, or sizes of two of them.
        """
        kind, fits = int if self.default is ... else type(self.default), True
        if kind is bool:
            fits = isinstance(value, int)  # some arguments take True for a size of their own choice, or a number
        elif kind is int:
            sizes = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
            fits = all(type(size) is int and size >= 0 for size in sizes)
        elif kind is float:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        elif kind is str:
            fits = value is None or isinstance(value, str)
        return [] if fits else [f"config.{self.theirs}={value} must be {_KINDS[kind]}"]


_KINDS = {bool: "true or false", int: "a whole number that is not negative", float: "a number", str: "text"}


def choice(theirs: str, default: Any, ours: str, words: Mapping[str, str], *, unset: str = "") -> Field:
    """Returns an argument with our option for each of its values; ``unset`` is the one that None stands for."""

    def write(value: str) -> Any:
        return default if value == words.get(unset) else word_for(value, words, default)

    return Field(theirs, default, ours, lambda value: word(theirs, value or unset or value, words), write)


def norm_choice(theirs: str, ours: str, unset: str | None) -> Field:
    """Returns an argument such as layernorm_1e-5, layernorm or rmsnorm; ``unset`` is the norm that None stands for."""

    def read(value: Any) -> str | None:
        if value is None:
            return unset
        kind, _, eps = str(value).lower().rpartition("_")
        kind, eps = (kind, eps) if kind else (eps, "1e-6")
        try:
            if kind not in ("layernorm", "rmsnorm"):
                raise ValueError
            return norm_text(kind, float(eps))
        except ValueError:
            problem = f"config.{theirs}={value} must be layernorm_EPS or rmsnorm_EPS, such as layernorm_1e-6"
            raise UserError(problem) from None

    return Field(theirs, None, ours, read, lambda text: None if text == unset else text.replace("e-0", "e-"))


def word(key: str, value: Any, words: Mapping[str, str]) -> str:
    """Returns our word for a word of a config."""
    if value not in words:
        raise UserError(f"config.{key}={value}: we have {', '.join(words)}")
    return words[value]


def word_for(ours: str, words: Mapping[str, str], default: Any) -> Any:
    """Returns the first of their words for ours."""
    return next((theirs for theirs, name in words.items() if name == ours), default)


def height(value: tuple[int, int]) -> int:
    """Returns a size for a config that has squares alone."""
    return value[0]


def ratio(hidden: int, emb_size: int) -> float:
    """Returns a multiple of emb_size that int() truncates to exactly ``hidden``."""
    exact = hidden / emb_size
    return exact if int(emb_size * exact) == hidden else (hidden + 0.5) / emb_size
