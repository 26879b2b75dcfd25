"""``lightning models``: the presets with their parameters, multiply-adds and sources."""

from __future__ import annotations

from dataclasses import dataclass

from vit_lightning.commands.console import say
from vit_lightning.config.presets import USUAL, published
from vit_lightning.limits import at_least, refuse

NOTES = """
A multiply-add counts as two FLOPs; matrix products, convolutions and attention products are counted, for one image.
In a config:      model: {preset: B/16}, with any patch size, and other arguments of ViT beside it
CRATE:            --config crate_tiny --model.preset=CRATE-S/16
Layer by layer:   lightning summary --config CONFIG.yaml, lightning summary --ckpt RUN_FOLDER
Other networks:   model: {class_path: timm.create_model, init_args: {model_name: NAME}}; torchvision.models.NAME"""


@dataclass(frozen=True)
class ModelsOptions:
    """Options of ``lightning models``.

    Args:
        image_size: height and width of the images in pixels; presets whose patches do not divide it are left out.
        num_classes: number of classes; 0 for the features alone.
    """

    image_size: int = 224
    num_classes: int = 1000

    def __post_init__(self) -> None:
        problems = [*at_least(1, image_size=self.image_size), *at_least(0, num_classes=self.num_classes)]
        if not problems and all(self.image_size % patch for patches, _ in USUAL.values() for patch in patches):
            problems.append(f"image_size={self.image_size} is no multiple of 14, 16 or 32 pixels, the patches' sizes")
        refuse(problems)


def models(options: ModelsOptions) -> None:
    """Prints a table of the presets."""
    say(f"{'preset':<12}{'width':>6}{'depth':>7}{'heads':>7}{'parameters':>14}{'GMACs':>9}{'GFLOPs':>9}   source")
    for one in published(options.image_size, options.num_classes):
        sizes = f"{one.name:<12}{one.emb_size:>6}{one.depth:>7}{one.num_heads:>7}{one.parameters:>14,}"
        say(f"{sizes}{one.flops / 2e9:>9.2f}{one.flops / 1e9:>9.2f}   {one.source}")
    say(NOTES)
