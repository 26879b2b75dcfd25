"""Reference checkpoints in and out: other people's weights in our ViT, and ours in theirs, exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_lightning.errors import UserError
from vit_lightning.models.vit import ViT
from vit_lightning.weights.describe import canonical_state, describe
from vit_lightning.weights.family_einops import EINOPS_TUTORIAL
from vit_lightning.weights.family_jax import BIG_VISION, GOOGLE
from vit_lightning.weights.family_timm import TIMM, TIMM_LEGACY
from vit_lightning.weights.family_torch import HF, TORCH_ENCODER, TORCHVISION
from vit_lightning.weights.family_vit_pytorch import CRATE, SIMPLE_VIT, VIT_PYTORCH
from vit_lightning.weights.options import Options, build, complete
from vit_lightning.weights.tables import Config, Family, Layout, Tensors, complete_config, to_ours, to_theirs

FAMILIES = {
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "hf": HF,
    "vit_pytorch": VIT_PYTORCH,
    "simple_vit": SIMPLE_VIT,
    "crate": CRATE,
    "big_vision": BIG_VISION,
    "google": GOOGLE,
    "torch_encoder": TORCH_ENCODER,
    "einops_tutorial": EINOPS_TUTORIAL,
    "timm_legacy": TIMM_LEGACY,
}


def from_reference(
    state_dict: Mapping[str, Tensor | np.ndarray[Any, Any]], *, family: str, config: Mapping[str, Any]
) -> ViT:
    """A ViT that computes what the reference computes.

    Args:
        state_dict: the reference's weights, under its names.
        family: one of ``FAMILIES``.
        config: the reference's own arguments as plain data; those that are not given have its defaults.

    Returns:
        A ViT in training mode, as every new module. It remembers family, config and layout in ``reference``.

    Raises:
        UserError: names options that we do not have, and missing, unexpected and misshapen tensors.
    """
    table = _family(family)
    tensors = {name: _tensor(name, value) for name, value in state_dict.items()}
    layout = table.find_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dict(config))
    options = _read(table, family, config, layout)
    vit = build(options)
    renames = table.rename(options, layout)
    single = table.unpack(tensors, layout)
    extra = table.extra(options, layout)
    expected = {name: tuple(tensor.shape) for name, tensor in to_theirs(canonical_state(vit), renames).items()}
    _check(single, {**expected, **extra}, family)
    state = to_ours(single, renames)
    dtypes = {tensor.dtype for tensor in state.values()}
    if len(dtypes) == 1:
        vit.to(dtypes.pop())
    vit.load_state_dict({name: state[name].clone() for name in vit.state_dict()}, assign=True)
    vit.reference = {"family": family, "config": copy.deepcopy(dict(config)), "layout": layout}
    return vit


def to_reference(vit: ViT, *, family: str, layout: Layout | None = None) -> tuple[Tensors, Config]:
    """The weights of a ViT under a reference's names, with the arguments that its constructor takes.

    Args:
        vit: any ViT that the family can express.
        family: one of ``FAMILIES``.
        layout: where the files of a family differ, which of its forms (``FAMILIES[family].layouts``). When not given,
            a model goes back in the layout that it came in, and any other in the family's current one.

    Raises:
        UserError: names the options of the model that the family does not have.
    """
    table = _family(family)
    options = describe(vit)
    came = vit.reference if vit.reference is not None and vit.reference["family"] == family else None
    chosen = {**table.layout_for(options), **(came["layout"] if came is not None else {}), **(layout or {})}
    _check_layout(chosen, table, family)
    written = table.write(options, chosen)
    said = _said_again(table, family, written, chosen)
    problems = [
        f"{name}={value}: {family} cannot express it (there it is {said[name]})"
        for name, value in options.items()
        if value != said[name]
    ]
    if problems:
        raise UserError(problems)
    tensors = to_theirs(canonical_state(vit), table.rename(options, chosen))
    weight = next(iter(tensors.values()))
    tensors |= {name: weight.new_empty(shape) for name, shape in table.extra(options, chosen).items()}
    # the words in which it came are kept while they say the same
    same_layout = came is not None and all(chosen.get(key) == value for key, value in came["layout"].items())
    if came is not None and same_layout and _said_again(table, family, came["config"], chosen) == options:
        return table.pack(tensors, chosen), copy.deepcopy(came["config"])
    config = {name: value for name, value in written.items() if value != table.defaults[name]}
    return table.pack(tensors, chosen), config


def _family(family: str) -> Family:
    if family not in FAMILIES:
        raise UserError(f"family={family} must be one of {', '.join(FAMILIES)}")
    return FAMILIES[family]


def _tensor(name: str, value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(value, Tensor):
        return _floating(name, value.detach())
    try:
        tensor = torch.from_numpy(np.array(value))  # a copy, also of what may not be written to
    except (TypeError, ValueError) as fault:
        raise UserError(f"{name}: {fault}") from fault
    return _floating(name, tensor)


def _floating(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise UserError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, and weights are floating numbers")
    return tensor


def _read(table: Family, family: str, config: Mapping[str, Any], layout: Layout) -> Options:
    given = complete_config(table.flatten(config), table, family)
    try:
        options = complete(table.read(given, layout))
    except (TypeError, ValueError, ArithmeticError, IndexError, AttributeError) as fault:
        if isinstance(fault, UserError):
            raise
        said = ", ".join(f"{key}={value}" for key, value in config.items())
        raise UserError(f"config of {family}: {fault} (one of {said} is of a kind that it cannot be)") from fault
    if not options["num_classes"] and not table.headless:
        raise UserError(f"num_classes=0: {family} has no model that gives the pooled features")
    return options


def _said_again(table: Family, family: str, config: Config, layout: Layout) -> Options:
    """The options that a config says, without the ways of writing that make no difference."""
    with torch.device("meta"):
        return describe(build(_read(table, family, config, layout)))


def _check_layout(layout: Layout, table: Family, family: str) -> None:
    problems = [
        f"layout.{key}={value}: {family} has {', '.join(map(str, table.layouts[key])) or 'no choice'}"
        if key in table.layouts
        else f"layout.{key}={value}: {family} has no such key ({', '.join(table.layouts) or 'it has one layout'})"
        for key, value in layout.items()
        if key not in table.layouts or (table.layouts[key] and value not in table.layouts[key])
    ]
    if problems:
        raise UserError(problems)


def _check(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], family: str) -> None:
    problems = [f"{name} is missing in the weights of {family}" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected in the weights of {family}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensor.shape)} and not {expected[name]}, as the config says"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != tuple(expected[name])
    ]
    if problems:
        raise UserError(problems)
