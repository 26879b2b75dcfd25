"""Classes and functions of others: their arguments, errors in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vit_lightning.errors import UserError, with_place


def argument_names(own: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments of a class or function."""
    return list(inspect.signature(own).parameters)


def make(own: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a class or function.

    Raises:
        UserError: it raises an error, whose file and line are named.
    """
    try:
        return own(**arguments)
    except UserError:
        raise
    except Exception as fault:
        raise UserError(with_place(fault)) from fault
