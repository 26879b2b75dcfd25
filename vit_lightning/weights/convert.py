"""Reference checkpoints in and out: other people's weights in our ViT, and ours in theirs, exactly."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError, refuse
from vit_lightning.models.vit import ViT
from vit_lightning.weights.family_einops import CRATE, EINOPS_TUTORIAL, SIMPLE_VIT, VIT_PYTORCH
from vit_lightning.weights.family_hf import DEIT, DINOV2, DINOV3, HF
from vit_lightning.weights.family_jax import BIG_VISION, GOOGLE
from vit_lightning.weights.family_timm import TIMM, TIMM_LEGACY, TORCH_ENCODER, TORCHVISION
from vit_lightning.weights.options import PATCHES, Options, build, canonical_state, describe
from vit_lightning.weights.tables import Config, Family, Layout, Reading, Tensors, find_names, to_ours, to_theirs

_TABLES = [TIMM, TORCHVISION, HF, DEIT, VIT_PYTORCH, SIMPLE_VIT, CRATE, BIG_VISION, GOOGLE, TORCH_ENCODER]
_TABLES += [EINOPS_TUTORIAL, TIMM_LEGACY, DINOV2, DINOV3]
FAMILIES = {family.name: family for family in _TABLES}
WRITTEN = [family.name for family in _TABLES if family.unpack is Family.unpack]
"""Families whose tables read both ways."""
BATCHES = (1, 2, 5)
"""Numbers of images in a batch; graphs are traced with another, ``TRACED``."""
TRACED = 3
TOLERANCE = 1e-4
"""Largest difference of two logits in float32 that counts as the same."""


def from_reference(
    state_dict: Mapping[str, Tensor | np.ndarray[Any, Any]], *, family: str, config: Mapping[str, Any]
) -> ViT:
    """Returns a ViT that computes the same function as the reference, without dropouts, which act in training alone.

    Args:
        state_dict: the reference's weights, under its names.
        family: one of ``FAMILIES``.
        config: the reference's own arguments as plain data; those that are not given have its defaults.

    Returns:
        A ViT in training mode, of the weights' dtype; if they have several, of float64 if it is among them, else of
        float32.

    Raises:
        UserError: names options that we do not have, and missing, unexpected and misshapen tensors.
    """
    table = find_family(family)
    given = {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in state_dict.items()}
    tensors = {name: tensor.detach() for name, tensor in given.items()}
    layout = table.find_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    options, vit = _build(table, config, layout)
    state = canonical_state(vit)
    names = find_names(state, table.names(options, layout))
    expected = {name: tuple(tensor.shape) for name, tensor in to_theirs(state, names).items()}
    given = table.unpack(tensors, layout)
    _check_tensors(given, {**expected, **table.extra(options, layout)}, family)
    state = to_ours(given, names)
    dtypes = {tensor.dtype for tensor in state.values()}
    several = torch.float64 if torch.float64 in dtypes else torch.float32
    dtype = dtypes.pop() if len(dtypes) == 1 else several
    vit.to(dtype).load_state_dict({name: state[name].to(dtype, copy=True) for name in vit.state_dict()}, assign=True)
    return vit


def to_reference(vit: ViT, *, family: str, layout: Layout | None = None) -> tuple[Tensors, Config]:
    """Returns the weights of a ViT under a reference's names, and the arguments of the reference's constructor.

    Args:
        vit: any ViT that the family can express.
        family: one of ``WRITTEN``.
        layout: form of the file where those of a family differ (``FAMILIES[family].layouts``); by default the current
            one.

    Raises:
        UserError: names the options of the model that the family does not have.
    """
    table = find_family(family)
    if table.unpack is not Family.unpack:
        raise UserError(f"family={family} is read alone: must be one of {', '.join(WRITTEN)}")
    options = describe(vit)
    layout = {**table.layout_for(options), **(layout or {})}
    written = table.write(options, layout)
    with torch.device("meta"):
        expressed = describe(_build(table, written, layout)[1])
    refuse(
        f"{name}={value}: {family} cannot express it (there it is {expressed[name]})"
        for name, value in options.items()
        if value != expressed[name]
    )
    state = canonical_state(vit)
    tensors = to_theirs(state, find_names(state, table.names(options, layout)))
    weight = next(iter(tensors.values()))
    tensors |= {name: weight.new_empty(shape) for name, shape in table.extra(options, layout).items()}
    return tensors, {name: value for name, value in written.items() if value != table.defaults[name]}


def find_family(family: str, key: str = "family") -> Family:
    """Returns a family by its name, or refuses one that is unknown."""
    if family not in FAMILIES:
        raise UserError(f"{key}={family} must be one of {', '.join(FAMILIES)}")
    return FAMILIES[family]


def has_our_names(names: Iterable[str]) -> bool:
    """Whether these are names of the weights of a ViT of ours."""
    text = " ".join(names)
    return PATCHES in text and "encoder.0.attention" in text


def readings_of(tensors: Tensors, families: Iterable[Family] = FAMILIES.values()) -> list[Reading]:
    """Returns tensors as those of each family that has them, first of the one that has most."""
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    found = filter(None, (family.recognise(on_meta) for family in families))
    return sorted(found, key=lambda reading: -reading.coverage)


def _build(table: Family, config: Mapping[str, Any], layout: Layout) -> tuple[Options, ViT]:
    """Returns the options of a config and a ViT of them."""
    options = table.read(config, layout)
    return options, build(options)


def _check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], family: str) -> None:
    problems = [f"{name} is missing in the weights of {family}" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected in the weights of {family}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, but the config gives {expected[name]}"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != tuple(expected[name])
    ]
    problems += [
        f"{name} holds {tensor.dtype}, and no floating-point numbers"
        for name, tensor in tensors.items()
        if not tensor.is_floating_point()
    ]
    refuse(problems)


def random_images(count: int, shape: tuple[int, ...]) -> Tensor:
    """Returns images (count, c, H, W) as a model gets them, always the same; draws no global random numbers."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def largest_difference(network: nn.Module, other: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> float:
    """Returns the largest difference of the logits of a network and of its other form, for batches of 1, 2 and 5.

    Raises:
        UserError: it is above ``TOLERANCE``.
    """
    worst = 0.0
    for count in BATCHES:
        images = random_images(count, shape)
        ours, theirs = network(images), other(images)
        if theirs.shape != ours.shape:
            raise UserError(f"the logits have shape {tuple(theirs.shape)} and not {tuple(ours.shape)}: nothing is kept")
        difference = float((theirs - ours).abs().max())
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    if worst > TOLERANCE:
        raise UserError(f"the logits differ by up to {worst:.3g} from the source's: nothing is kept")
    return worst
