"""The network of a config: facts of the data among its arguments, and what does not fit, found on the meta device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from vit_lightning.config.names import near
from vit_lightning.config.own_files import empty_caches, where
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import WRONG, Part, Reader
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError, one_line
from vit_lightning.sizes import pair

FACTS = ("image_size", "in_channels", "num_classes")
"""Arguments of a network that follow from the data."""
TIMM_NAMES = {"img_size": "image_size", "in_chans": "in_channels"}


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    height, width = data.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, "in_channels": data.in_channels, "num_classes": data.num_classes}


def read_network(reader: Reader, given: Any, facts: Mapping[str, Any] | None) -> Any:
    """Returns the network of a config, with the facts that it has arguments for; ``WRONG`` if it cannot be made.

    Args:
        reader: the reader.
        given: ``model`` of a flat config, with its class.
        facts: facts of the data; None where they are not known.
    """
    if (found := reader.find(nn.Module, given, "model")) is None:
        return WRONG
    name, target, arguments = found
    if inspect.isclass(target) and not issubclass(target, nn.Module):
        reader.problems.append(f"model.class_path={name} must be a network, a torch.nn.Module")
        return WRONG
    signature = signature_of(target)
    known = {*signature.options, *names_of_timm(target, arguments)}
    names = {fact: fact for fact in FACTS} | (TIMM_NAMES if name.startswith("timm.") else {})
    if facts is not None:
        for option, fact in names.items():
            if option in known and option in arguments and not _agrees(option, arguments[option], facts[fact]):
                text = f"does not fit the data, which has {facts[fact]} (leave it out)"
                reader.problems.append(f"model.{option}={arguments[option]} {text}")
            if option in known:
                arguments[option] = facts[fact]
    if name.startswith("timm."):  # whose classes have classes as defaults, which they alone know to read
        own = {key: item if item.required else item._replace(passed_on=True) for key, item in signature.options.items()}
        signature = signature._replace(options=own)
    provided = FACTS if facts is None else ()
    return reader.made_of(signature, target, name, arguments, "model", provided=provided)


def _agrees(name: str, given: Any, fact: Any) -> bool:
    """Whether a given value is that of the data; one of a wrong type is told by its type."""
    reader = Reader()
    value = reader.value(int | tuple[int, int] if name in ("image_size", "img_size") else int, given, name)
    return bool(reader.problems) or pair(value) == pair(tuple(fact) if isinstance(fact, list) else fact)


def timm_name(target: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the name of the network that a function of timm makes."""
    return str(arguments.get("model_name") or target.__name__)


def names_of_timm(target: Any, arguments: Mapping[str, Any]) -> set[str]:
    """Returns the arguments of the network that a function of timm makes, as far as it tells the class."""
    if inspect.isclass(target) or not target.__module__.startswith("timm."):
        return set()
    from timm import is_model, model_entrypoint

    name = timm_name(target, arguments)
    made = get_type_hints(model_entrypoint(name)).get("return") if is_model(name) else None
    return {"num_classes", "in_chans", *(signature_of(made).options if inspect.isclass(made) else ())}


def without_unknown(part: Part, make: Callable[[Part], nn.Module], problems: list[str]) -> Part:
    """Returns a network of a function without the arguments that it hands on to a class that refuses them."""
    while True:
        try:
            empty_network(partial(make, part))
            return part
        except UserError as error:
            found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[2] not in part.arguments:
                return part
            known = {*signature_of(part.target).options, *names_of_timm(part.target, part.arguments)}
            likely = near(found[2], known)
            hint = f"did you mean model.{likely[0]}?" if likely else f"choose {', '.join(sorted(known))}"
            value = part.arguments[found[2]]
            problems.append(f"model.{found[2]}={value}: {found[1]} takes no such argument ({hint})")
            part = replace(part, arguments={key: part.arguments[key] for key in part.arguments if key != found[2]})


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
        except UserError as error:
            raise UserError(f"{key}.{text}" for text in error.problems) from error
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
