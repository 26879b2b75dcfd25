"""``lightning configs``: the configs that come with the package."""

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from vit_lightning.config.files import near_configs, shipped_config, shipped_configs
from vit_lightning.errors import UserError

CONFIG_NOTES = """
test: accuracy on test images, n runs with different seeds; how it was measured is in the config's first lines.
Train one:           lightning fit --config digits
Start from one:      lightning configs digits > mine.yaml
Those of ablations:  lightning ablate pooling"""

PURPOSES = {
    "a first run": "digits*",
    "images of your own": "imagefolder finetune linear_probe lora",
    "CIFAR from scratch, as published": "cifar*_vit_lite cifar*_cvt cifar*_cct cifar*_spt_vit",
    "CIFAR on a GPU": "cifar*_tiny cifar*_vit_small *resnet18",
    "CIFAR on a CPU": "cifar10_cpu* cifar10_small distill* highres cifar*",
    "ImageNet": "imagenet/*",
    "the ViTs of other code, on digits": "families/*",
    "ablations": "ablations/*",
}
"""What configs are for, by patterns of their names; the first that fits counts."""
_MEASURED = re.compile(r"^# Measured: (?P<accuracy>\d+\.\d+ %) test \((?P<n>n = \d+)", re.MULTILINE)


def configs(name: str | None = None) -> None:
    """Lists the configs of the package by what they are for, or prints one.

    Args:
        name: the config to print.
    """
    if name is not None:
        if (path := shipped_config(name)) is None:
            raise UserError(f"{name}: there is no such config{near_configs(Path(name), here=False)}")
        print(text := path.read_text(encoding="utf-8"), end="")
        for part in path.parent.glob("*.py"):
            if re.search(rf"\b{part.stem}\.", text):
                print(f"lightning configs: a copy of {name} needs {part} beside it", file=sys.stderr)
        return
    groups: dict[str, list[tuple[str, str, str]]] = {purpose: [] for purpose in PURPOSES}
    for name, path in shipped_configs().items():
        text = path.read_text(encoding="utf-8")
        purpose = next(key for key, names in PURPOSES.items() if any(fnmatchcase(name, one) for one in names.split()))
        groups[purpose].append((name, result(text), text.partition("\n")[0].lstrip("# ")))
    widths = [max(len(row[column]) for rows in groups.values() for row in rows) + 2 for column in range(2)]
    for purpose, rows in groups.items():
        print(f"{purpose}:")
        for name, test, about in rows:
            print(f"  {name:<{widths[0]}}{test:<{widths[1]}}{about}")
    print(CONFIG_NOTES)


def result(text: str) -> str:
    """Returns the accuracy on test images that the first lines of a config tell, with the number of runs."""
    found = _MEASURED.search(text)
    return f"{found['accuracy']}, {found['n']}" if found else "not measured"
