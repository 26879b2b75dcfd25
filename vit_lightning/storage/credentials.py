"""Keys and passwords, which are in no file of a run and go nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PGPASS|PASS|PAT|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_OPTION = re.compile(r"(^|_)(api_?key|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
"""Names of options whose texts are keys."""
_IN_ADDRESS = re.compile(r"\w://[^/\s:@]*:([^/\s@]{6,})@")
"""Password in an address, such as that of DATABASE_URL."""


def secrets_of_environment() -> dict[str, str]:
    """Returns the keys and passwords in environment variables, also those in an address, but no paths of them."""
    named = {
        name: text
        for name, text in os.environ.items()
        if _SECRET_NAME.search(name) and len(text) >= 8 and not text.startswith(("/", "~", "."))
    }
    in_addresses = {name: found[1] for name, text in os.environ.items() if (found := _IN_ADDRESS.search(text))}
    return {**in_addresses, **named}


def without_credentials(url: str) -> str:
    """Returns a URL without user name and password."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1", url)


def masked(value: Any, name: str = "") -> Any:
    """Returns plain data with ``***`` for texts of options named like a key, and for secrets of the environment."""
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets_of_environment().values():
        value = value.replace(secret, "***")
    return "***" if _OPTION.search(name) else without_credentials(value)
