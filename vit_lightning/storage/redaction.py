"""Text that leaves this machine: without keys, home folder, names of user and machine."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PGPASS|PASS|PAT|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_NAMED = re.compile(r"(?i)((?:api[-_]?key|secret|passw(?:or)?d|(?:auth|access)[-_]token)['\"]?[=:] ?)\S+")
"""Values of options that are named like a key."""
_IN_ADDRESS = re.compile(r"\w://[^/\s:@]*:([^/\s@]{6,})@")
"""Password in an address, such as that of DATABASE_URL."""
_PLACE = re.compile(r"[^\s'\"=,;()\[\]{}]*[/@][^\s'\"=,;()\[\]{}]*")
"""Paths and addresses, in which a name is that of a user or a machine; elsewhere it may be any word."""


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


class Redaction:
    """Function of a text that gives it without keys, with ``~`` for the home folder, USER and HOST for their names.

    Keys are those in the environment, values of options named so, and what has the form of a key of W&B, Hugging Face
    or GitHub; 40 hexadecimal digits are none where they are named a commit, revision or sha.
    """

    def __init__(self) -> None:
        home, user, host = str(Path.home()), _user(), platform.node()
        known = "|".join(re.escape(text) for text in sorted(secrets_of_environment().values(), key=len, reverse=True))
        forms = (
            r"(?<!revision=)(?<!commit=)(?<!sha=)\b[0-9a-f]{40}\b",
            r"\b(?:wandb_v\d_|hf_|gh[pousr]_|github_pat_)\w{16,}",
        )
        self._keys = re.compile("|".join(filter(None, (known, *forms))))
        self._home = re.compile(re.escape(home) + r"(?![\w.-])") if home.strip("/") else None
        names = {"HOST": {host, host.partition(".")[0]} - {"", "localhost"}, "USER": {user} - {"", "root"}}
        self._names = [
            (re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"), instead)
            for instead, all_names in names.items()
            for name in sorted(all_names, key=len, reverse=True)
        ]

    def __call__(self, text: str) -> str:
        text = self._keys.sub("***", without_credentials(text))
        text = _NAMED.sub(r"\1***", text)
        if self._home is not None:
            text = self._home.sub("~", text)
        return _PLACE.sub(self._without_names, text)

    def _without_names(self, place: re.Match[str]) -> str:
        text = place[0]
        for name, instead in self._names:
            text = name.sub(instead, text)
        return text

    def of(self, value: Any, name: str = "") -> Any:
        """Returns plain data in which all texts are redacted, seen as values of options of their names."""
        if isinstance(value, Mapping):
            return {key: self.of(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item, name) for item in value]
        return self(f"{name}={value}").removeprefix(f"{name}=") if isinstance(value, str) else value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return ""
