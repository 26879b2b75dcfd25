"""Sizes of published models, by name."""

from typing import NamedTuple

from vit_lightning.errors import UserError
from vit_lightning.models.crate import SIZES


class Preset(NamedTuple):
    """Sizes that a name such as Ti/16 stands for."""

    emb_size: int
    depth: int
    num_heads: int
    patch_size: int


PRESETS = {
    "Ti": (192, 12, 3),  # Touvron et al. 2021 (DeiT), table 1
    "S": (384, 12, 6),  # the same
    "B": (768, 12, 12),  # Dosovitskiy et al. 2021 (ViT), table 1
    "L": (1024, 24, 16),  # the same
    "H": (1280, 32, 16),  # the same
    **{f"CRATE-{name}": sizes for name, sizes in SIZES.items()},
}
"""emb_size, depth and num_heads; the number behind the slash of a preset's name is the patch size."""


def find_preset(name: str) -> Preset:
    """Returns the sizes of a name such as Ti/16."""
    size, _, patch = name.partition("/")
    if size not in PRESETS or not patch.isdecimal() or int(patch) < 1:
        raise UserError(f"preset={name} is none of {', '.join(PRESETS)} with a patch size behind it, such as Ti/16")
    return Preset(*PRESETS[size], patch_size=int(patch))
