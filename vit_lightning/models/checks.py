"""Checks of the arguments of a ViT: all problems at once, named by the option."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vit_lightning.errors import UserError
from vit_lightning.limits import at_least, choice, probabilities, refuse
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


@contextlib.contextmanager
def all_at_once(given: Mapping[str, Any]) -> Iterator[None]:
    """Raises the problems of a network's arguments and, where something is wrong within, what its parts report too.

    Args:
        given: the arguments of a ViT by name, with the sizes of its preset, and the network as ``self``.

    Raises:
        UserError: names every problem; what only the finished network shows comes last.
    """
    problems = _problems(given)
    try:
        refuse(problems)
        yield
    except UserError:
        width, heads, norm, layer_scale = (given[name] for name in ("emb_size", "num_heads", "norm", "layer_scale"))
        refuse(
            problems,
            _refused("attention", given["attention"], width, heads),
            _refused("feed_forward", given["feed_forward"], width),
            _refused("positions", given["make_positions"], (1, 1), width, 1),
            _refused("block", given["block"], width, nn.Identity(), nn.Identity(), norm, layer_scale, 0.0),
        )
        refuse(
            _refused("pool", given["make_pool"], width, heads, given["prefix_tokens"])
        )  # which may depend on all others
        raise
    network, preset = given["self"], str(given["preset"])
    counts_twice = given["activation_checkpointing"] and any(isinstance(part, BatchNorm) for part in network.modules())
    rotary = any(isinstance(module, RotaryAttention) for module in network.modules()) and given["patch_dropout"] > 0.0
    reads_token = any(isinstance(module, ClassTokenAndMeanPool) for module in network.modules())
    crate = preset.startswith("CRATE") and not isinstance(network.encoder[0], CrateBlock)
    refuse(
        ["activation_checkpointing=true: BatchNorm would count each batch twice in its running means"] * counts_twice,
        ["patch_dropout: RotaryAttention takes all patches, each at its position"] * rotary,
        ["pool=ClassTokenAndMeanPool needs class_token=true"] * (reads_token and not given["class_token"]),
        [f"preset={preset} needs block=CrateBlock, attention=MSSA and feed_forward=ISTA beside it"] * crate,
    )


def _problems(given: Mapping[str, Any]) -> list[str]:
    """Returns the problems of arguments by themselves."""

    def named(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    pool, final_norm, attention = given["pool"], given["final_norm"], given["attention"]
    is_of_torch = getattr(attention, "func", attention) is nn.MultiheadAttention
    needs = {
        "pool=cls needs class_token=true (or choose pool=mean)": pool != "cls" or given["class_token"],
        f"depth={given['depth']} must be at most {DEPTH}": given["depth"] <= DEPTH,
        "attention=MultiheadAttention takes three inputs (choose TorchAttention, the same of tokens)": not is_of_torch,
    }
    if given["distillation_token"]:
        needs |= {
            "distillation_token=true needs pool=cls": pool == "cls",
            "distillation_token=true needs representation_size=null": given["representation_size"] is None,
            "distillation_token=true needs final_norm other than after_pool": final_norm != "after_pool",
        }
    return [
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
        *(need for need, is_met in needs.items() if not is_met),
    ]


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


def _refused(name: str, make: Callable[..., object], *sizes: object) -> list[str]:
    """Returns what a part reports against its arguments; sizes below 1 have been reported by themselves."""
    if any(isinstance(size, int) and size < 1 for size in sizes):
        return []
    try:
        with torch.device("meta"):  # which takes no memory
            make(*sizes)
    except UserError as error:
        of_the_network = ("num_heads", "emb_size", "pool")
        return [text if text.startswith(of_the_network) else f"{name}.{text}" for text in error.problems]
    return []
