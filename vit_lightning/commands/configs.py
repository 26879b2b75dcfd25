"""``lightning configs``: the configs that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

from vit_lightning.config.shipped import near_configs, shipped_config, shipped_configs
from vit_lightning.errors import UserError

CONFIG_NOTES = """
test: accuracy on test images, n runs with different seeds; how it was measured is in the config's first lines.
Train one:           lightning fit --config digits
Start from one:      lightning configs digits > mine.yaml
Those of ablations:  lightning ablate pooling"""

_MEASURED = re.compile(r"^# Measured: (?P<accuracy>\d+\.\d+ %) test \((?P<n>n = \d+)", re.MULTILINE)


def configs(name: str | None = None) -> None:
    """Lists the configs of the package, or prints one.

    Args:
        name: the config to print.
    """
    if name is not None:
        if (path := shipped_config(name)) is None:
            raise UserError(f"{name}: there is no such config{near_configs(Path(name), here=False)}")
        print(path.read_text(encoding="utf-8"), end="")
        return
    rows = [("config", "test", "")]
    for name, path in shipped_configs().items():
        text = path.read_text(encoding="utf-8")
        rows.append((name, result(text), text.partition("\n")[0].lstrip("# ")))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(2)]
    for name, test, about in rows:
        print(f"{name:<{widths[0]}}{test:<{widths[1]}}{about}".rstrip())
    print(CONFIG_NOTES)


def result(text: str) -> str:
    """Returns the accuracy on test images that the first lines of a config tell, with the number of runs."""
    found = _MEASURED.search(text)
    return f"{found['accuracy']}, {found['n']}" if found else "not measured"
