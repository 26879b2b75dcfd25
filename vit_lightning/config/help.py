"""The text of ``lightning COMMAND --help`` for commands that take a config."""

from __future__ import annotations

import re
import textwrap

import vit_lightning
from vit_lightning.config.parser import make_help


def help_text(command: str, positional: str) -> str:
    """Returns all options of a command with types, defaults and explanations."""
    for name in vit_lightning.__all__:  # jsonargparse lists the known subclasses among the imported classes
        getattr(vit_lightning, name)
    return _own_classes_only(make_help(command, positional).format_help())


def _own_classes_only(text: str) -> str:
    """Removes classes of other packages from lists of known subclasses: torch has thousands."""
    text = re.sub(r"^  --\S+\.help \[CLASS_PATH_OR_NAME\]\n(?: {8,}.*\n)*", "", text, flags=re.MULTILINE)

    def own(found: re.Match[str]) -> str:
        names = [name for name in re.split(r"[,\s]+", found[1]) if name.startswith("vit_lightning.")]
        lines = textwrap.wrap(f"known subclasses: {', '.join(names)})", 90, subsequent_indent=" " * 24)
        return ",\n" + " " * 24 + "\n".join(lines) if names else ")"

    return re.sub(r",\s+known\s+subclasses:\s+([^)]*)\)", own, text)
