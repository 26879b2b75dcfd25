"""``lightning configs``: the configs that come with the package, with what was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vit_lightning.config.files import Config, parse_yaml
from vit_lightning.config.shipped import near_configs, shipped_config, shipped_configs
from vit_lightning.errors import UserError

NOTES = """
test: accuracy on test images, n runs with different seeds; how it was measured is in the config's first lines.
Train one:           lightning fit --config digits
Start from one:      lightning configs digits > mine.yaml
Those of ablations:  lightning ablate pooling"""

_MEASURED = re.compile(r"^# Measured: (?P<accuracy>\d+\.\d+ %) test \((?P<n>n = \d+)", re.MULTILINE)

_DATA = {
    "Digits": "with the package",
    "CIFAR10": "download",
    "CIFAR100": "download",
    "HuggingFaceSet": "download, or Parquet",
    "ImageFolder": "--data.root DIR",
}


def main(arguments: Sequence[str]) -> None:
    """Runs ``lightning configs``: lists the configs of the package, or prints the one that is named."""
    if {"-h", "--help"} & {*arguments}:
        print("usage: lightning configs [NAME]\n\nlists the configs of the package; with NAME prints one")
    elif len(arguments) > 1:
        raise UserError(f"{arguments[1]}: unexpected argument (give one NAME, or none for a list)")
    elif not arguments:
        print_list()
    elif (path := shipped_config(arguments[0])) is None:
        raise UserError(f"{arguments[0]}: there is no such config{near_configs(Path(arguments[0]), here=False)}")
    else:
        print(path.read_text(encoding="utf-8"), end="")


def print_list() -> None:
    """Prints name, result, images and first line of each config."""
    rows = [("config", "test", "images", "")]
    for name, path in shipped_configs().items():
        text = path.read_text(encoding="utf-8")
        rows.append((name, result(text), images_of(parse_yaml(text, name) or {}), text.partition("\n")[0].lstrip("# ")))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
    for row in rows:
        print("".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print(NOTES)


def result(text: str) -> str:
    """Returns the accuracy on test images that the first lines of a config tell, with the number of runs."""
    found = _MEASURED.search(text)
    return f"{found['accuracy']}, {found['n']}" if found else "not measured"


def images_of(config: Config) -> str:
    """Returns where the images of a config come from; those of a plan are its config's."""
    if plan_of := shipped_config(str(config.get("config"))):
        config = parse_yaml(plan_of.read_text(encoding="utf-8"), str(plan_of))
    name = str((config.get("data") or {}).get("class_path", "")).rpartition(".")[2]
    return _DATA.get(name, name)  # a clone may hold configs of one's own
