"""Limits of the values of options."""

from vit_lightning.errors import UserError

Limit = tuple[str, object, bool, str]
"""An option, its value, whether the value is allowed, and what it must be."""


def problems_of(*limits: Limit, prefix: str = "") -> list[str]:
    """Returns a problem for each value that is not allowed."""
    return [f"{prefix}{key}={value} must be {rule}" for key, value, allowed, rule in limits if not allowed]


def refuse(prefix: str, *limits: Limit) -> None:
    """Raises a UserError with the problems of all values that are not allowed."""
    if problems := problems_of(*limits, prefix=f"{prefix}."):
        raise UserError(problems)
