"""Checks of the arguments of a ViT: all problems at once, named by the option."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vit_lightning.errors import UserError, at_least, choice, probabilities
from vit_lightning.models.attention import RotaryAttention
from vit_lightning.models.crate import CrateBlock
from vit_lightning.models.heads import POOLS, ClassTokenAndMeanPool
from vit_lightning.models.initialisation import INITIALISATIONS
from vit_lightning.models.layers import BatchNorm
from vit_lightning.models.patches import PROJECTIONS
from vit_lightning.models.positions import POSITIONS
from vit_lightning.sizes import Size

DEPTH, PATCHES = 500, 1 << 20
"""Blocks and patches at most: those of DeepNet's encoder and of LongViT, the deepest and the longest that are known."""


def arguments(given: Mapping[str, Any]) -> list[str]:
    """Returns the problems of a network's arguments, and what the parts that they choose report against theirs.

    Args:
        given: the arguments of a ViT by name, with the sizes of its preset.
    """

    def named(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    pool, token, depth, width = (given[key] for key in ("pool", "class_token", "depth", "emb_size"))
    attention, final_norm = given["attention"], given["final_norm"]
    rules = [
        (pool != "cls" or token, "pool=cls needs class_token=true (or choose pool=mean)"),
        (depth <= DEPTH, f"depth={depth} must be at most {DEPTH}"),
    ]
    if given["distillation_token"]:
        rules += [
            (pool == "cls", "distillation_token=true needs pool=cls"),
            (given["representation_size"] is None, "distillation_token=true needs representation_size=null"),
            (final_norm != "after_pool", "distillation_token=true needs final_norm other than after_pool"),
        ]
    layer_scale, none = given["layer_scale"], nn.Identity()
    found = [
        *at_least(1, **named("in_channels", "emb_size", "depth", "num_heads", "representation_size")),
        *at_least(0, **named("num_classes", "register_tokens")),
        *patches(given["image_size"], given["patch_size"]),
        *probabilities(**named("emb_dropout", "patch_dropout", "drop_path", "head_dropout")),
        *choice("pool", pool, POOLS),
        *choice("patch_projection", given["patch_projection"], PROJECTIONS),
        *choice("positions", given["positions"], POSITIONS),
        *choice("final_norm", final_norm, ("before_pool", "after_pool", "none")),
        *choice("initialisation", given["initialisation"], INITIALISATIONS),
        *choice("drop_path_schedule", given["drop_path_schedule"], ("linear", "constant")),
        *(sentence for holds, sentence in rules if not holds),
        *_reported("attention", attention, width, given["num_heads"]),
        *_reported("feed_forward", given["feed_forward"], width),
        *_reported("positions", given["make_positions"], (1, 1), width, 1),
        *_reported("block", given["block"], width, none, none, nn.Identity, layer_scale, 0.0),
    ]
    # a pool depends on all others
    return found or _reported("pool", given["make_pool"], width, given["num_heads"], given["prefix_tokens"])


def patches(image_size: Size, patch_size: Size) -> list[str]:
    """Returns a problem for patches that do not tile the image."""
    image, patch = (str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}" for size in (image_size, patch_size))
    if min(*image_size, *patch_size) < 1:
        return [f"image_size={image} and patch_size={patch} must be at least 1"]
    if patch_size[0] > image_size[0] or patch_size[1] > image_size[1]:
        return [f"patch_size={patch} is larger than image_size={image}"]
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1]:
        choices = [n for n in range(1, min(image_size) + 1) if image_size[0] % n == 0 and image_size[1] % n == 0]
        squares = ", ".join(map(str, choices))
        return [f"patch_size={patch} does not divide image_size={image} (squares that do: {squares})"]
    if (count := math.prod(image_size) // math.prod(patch_size)) > PATCHES:
        return [f"image_size={image} has {count:,} patches with patch_size={patch}: at most {PATCHES:,}"]
    return []


def parts(network: Any, given: Mapping[str, Any]) -> list[str]:
    """Returns what the parts of a network, once they are made, and its arguments say against each other."""
    kinds, preset = {kind for part in network.modules() for kind in type(part).__mro__}, str(given["preset"])
    twice = "activation_checkpointing=true: BatchNorm would count each batch twice in its running means"
    dropped = "patch_dropout: RotaryAttention takes all patches, each at its position"
    token = "pool=ClassTokenAndMeanPool needs class_token=true"
    crate = f"preset={preset} needs block=CrateBlock, attention=MSSA and feed_forward=ISTA beside it"
    rules = [
        (not (given["activation_checkpointing"] and BatchNorm in kinds), twice),
        (not (given["patch_dropout"] and RotaryAttention in kinds), dropped),
        (given["class_token"] or ClassTokenAndMeanPool not in kinds, token),
        (CrateBlock in kinds or not preset.startswith("CRATE"), crate),
    ]
    return [sentence for holds, sentence in rules if not holds]


def _reported(name: str, make: Any, *sizes: object) -> list[str]:
    """Returns what a part of ours reports against its arguments; sizes below 1 have been reported by themselves."""
    ours = str(getattr(make, "func", make).__module__).startswith("vit_lightning.")
    try:
        if ours and not any(isinstance(size, int) and size < 1 for size in sizes):
            with torch.device("meta"):  # which takes no memory and no random numbers
                make(*sizes)
    except UserError as error:
        of_the_network = ("num_heads", "emb_size", "pool")
        return [text if text.startswith(of_the_network) else f"{name}.{text}" for text in error.problems]
    return []
