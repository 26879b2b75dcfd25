"""Keys and passwords: those of the environment are in no file of a run, and none that can be told goes to W&B."""

import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PGPASS|PASS|PAT|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_NAMED = re.compile(
    r"((?:(?:api|secret|access|private)[_-]?key|token|secret|passw(?:or)?d|credentials?|authorization)[\"']?"
    r"(?:\0|[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?))(?!(?:true|false|none|null)\b|--)(?:(?<=\0)[^\0]+|[^\s\"'\0]+)",
    re.IGNORECASE,
)
"""Texts of options named like a key, which are whole after a null."""
_FORM = re.compile(
    r"\b(?:wandb_v\d_|github_pat_)\w{16,}|\b(?:hf_|gh[pousr]_)[A-Za-z0-9]{16,}"
    r"|(?<!commit[=: \0])(?<!revision[=: \0])(?<!sha[=: \0])(?<![@/\w])[0-9a-f]{40}\b"
)
"""Keys of W&B, GitHub and Hugging Face; 40 hexadecimal digits may be a commit too."""
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
    return re.sub(r"(\w://)[^/\s@\0]+@", r"\1", url)


def masked(value: Any, name: str = "") -> Any:
    """Returns plain data with ``***`` for keys: by the name or the form of a text, or those of the environment.

    A text may hold several with nulls between them, such as the words of a command.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if not isinstance(value, str):
        return value
    for secret in sorted(secrets_of_environment().values(), key=len, reverse=True):  # one may begin another
        value = value.replace(secret, "***")
    text = _NAMED.sub(r"\1***", f"{name}\0{without_credentials(value)}")
    return _FORM.sub("***", text).partition("\0")[2]
