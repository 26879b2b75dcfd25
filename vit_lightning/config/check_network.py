"""Arguments that a network accepts, and whether it fits the data: checked on the meta device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from vit_lightning.config.own_files import empty_caches, where
from vit_lightning.config.trust import find_class
from vit_lightning.errors import UserError, one_line


def leave_out_defaults_of_others(model: Namespace, given: Mapping[str, Any]) -> None:
    """Removes defaults that a function such as torchvision.models.resnet18 sets itself when it passes arguments on."""
    function = find_class(model.class_path)
    is_function = inspect.isfunction(function)
    if is_function or str(model.class_path).startswith("timm."):  # whose classes have classes as defaults
        named = set(vars(model.get("init_args") or Namespace()))
        for name in named - set(inspect.signature(function).parameters if is_function else ()) - set(given):
            del model.init_args[name]


def empty_network(make: Callable[[], nn.Module], key: str = "model") -> nn.Module:
    """Returns a network on the meta device; one that cannot be built there is built and then moved.

    Raises:
        UserError: its arguments do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            try:
                with torch.device("meta"):
                    return make()
            except (NotImplementedError, RuntimeError, UserError) as fault:  # it looks at its own numbers
                if not isinstance(fault, NotImplementedError) and not _needs_numbers(fault):
                    raise
                return make().to("meta")
        except UserError:
            raise
        except Exception as fault:
            place = where(fault)
            if place is None and not isinstance(fault, ValueError | TypeError | AssertionError | NotImplementedError):
                raise
            raise UserError(f"{key}: {place or one_line(fault)}") from fault
        finally:
            empty_caches()


def _needs_numbers(fault: Exception) -> bool:
    """Whether an error comes from looking at numbers, which tensors on the meta device do not have."""
    return re.search(r"\bmeta\b", str(fault)) is not None


def network_problems(network: nn.Module, shape: tuple[int, ...], classes: int) -> list[str]:
    """Returns why a network on the meta device cannot give logits (b, classes) for images (b, c, H, W) of a shape."""
    text = "x".join(map(str, shape))
    if not list(network.parameters()):
        return [f"model: {type(network).__name__} has no parameters to train"]
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            given = network.train()(torch.empty(2, *shape))
    except Exception as fault:  # whatever the layers of others raise
        if _needs_numbers(fault):  # only training shows whether it works
            return []
        if place := where(fault):
            return [f"model: {place}"]
        reason = " ".join(str(fault).split())[:300]
        first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
        if first is not None and first.in_channels != shape[0]:
            reason = f"it takes images of {first.in_channels} channels"
        return [f"model: {type(network).__name__} does not take the images of the data, {text}: {reason}"]
    finally:
        empty_caches()
    heads = given if type(given) is tuple else (given,)
    if not all(isinstance(logits, Tensor) for logits in heads):
        what = f"{type(given).__name__} where logits are expected (with aux_logits: false?)"
        return [f"model: {type(network).__name__} gives {what}"]
    wrong = [tuple(logits.shape) for logits in heads if tuple(logits.shape) != (2, classes)]
    if wrong:
        return [f"model: {type(network).__name__} gives {wrong[0]} for 2 images of {classes} classes (num_classes?)"]
    return []
