"""``lightning models`` and ``lightning configs``: the presets and the configs that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

from vit_lightning.config.files import Config
from vit_lightning.config.shipped import near_configs, shipped_config, shipped_configs
from vit_lightning.errors import UserError
from vit_lightning.limits import at_least, refuse
from vit_lightning.storage.parsing import parse_yaml

MODEL_NOTES = """
A multiply-add counts as two FLOPs; matrix products, convolutions and attention products are counted, for one image.
In a config:      model: {preset: B/16}, with any patch size, and other arguments of ViT beside it
CRATE:            --config crate_tiny --model.preset=CRATE-S/16
Layer by layer:   lightning summary --config CONFIG.yaml, lightning summary --ckpt RUN_FOLDER
Other networks:   model: {class_path: timm.create_model, init_args: {model_name: NAME}}; torchvision.models.NAME"""

CONFIG_NOTES = """
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


def models(*, image_size: int = 224, num_classes: int = 1000) -> None:
    """Prints a table of the presets.

    Args:
        image_size: height and width of the images in pixels; presets whose patches do not divide it are left out.
        num_classes: number of classes; 0 for the features alone.
    """
    from vit_lightning.config.networks import USUAL, published  # here, since it loads torch

    problems = [*at_least(1, image_size=image_size), *at_least(0, num_classes=num_classes)]
    if not problems and all(image_size % patch for patches, _ in USUAL.values() for patch in patches):
        problems.append(f"image_size={image_size} is no multiple of 14, 16 or 32 pixels, the patches' sizes")
    refuse(problems)
    print(f"{'preset':<12}{'width':>6}{'depth':>7}{'heads':>7}{'parameters':>14}{'GMACs':>9}{'GFLOPs':>9}   source")
    for one in published(image_size, num_classes):
        sizes = f"{one.name:<12}{one.emb_size:>6}{one.depth:>7}{one.num_heads:>7}{one.parameters:>14,}"
        print(f"{sizes}{one.flops / 2e9:>9.2f}{one.flops / 1e9:>9.2f}   {one.source}")
    print(MODEL_NOTES)


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
    rows = [("config", "test", "images", "")]
    for name, path in shipped_configs().items():
        text = path.read_text(encoding="utf-8")
        rows.append((name, result(text), images_of(parse_yaml(text, name) or {}), text.partition("\n")[0].lstrip("# ")))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
    for row in rows:
        print("".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print(CONFIG_NOTES)


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
