"""The network and the LightningModule of a config: read with the facts of the data among their arguments, and made."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from vit_lightning.config.adapters import ADAPTERS, given_alone
from vit_lightning.config.files import Config, flatten, word
from vit_lightning.config.foreign import lacks_optimizer
from vit_lightning.config.names import near
from vit_lightning.config.own_files import empty_caches, files_of, where
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import Part, Place, Reader
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError, one_line
from vit_lightning.limits import refuse
from vit_lightning.sizes import pair
from vit_lightning.training.classifier import ConfiguredOptimizer, ViTClassifier
from vit_lightning.training.fine_tuning import LoraConfig, add_lora
from vit_lightning.training.losses import Teacher
from vit_lightning.weights.hubs import LIBRARIES
from vit_lightning.weights.sources import open_teacher

FACTS = ("image_size", "in_channels", "num_classes")
"""Arguments of a network that follow from the data."""
TIMM_NAMES = {"img_size": "image_size", "in_chans": "in_channels"}


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    height, width = data.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, "in_channels": data.in_channels, "num_classes": len(data.label_names)}


def part_of_network(reader: Reader, given: Any, facts: Mapping[str, Any] | None) -> Any:
    """Returns the network of a config, with the facts that it has arguments for; None if it cannot be made.

    Args:
        reader: the reader.
        given: ``model`` of a flat config, with its class.
        facts: facts of the data; None where they are not known.
    """
    if (found := reader.find(nn.Module, given, "model")) is None:
        return None
    name, target, arguments = found
    if inspect.isclass(target) and not issubclass(target, nn.Module):
        reader.problems.append(f"model.class_path={name} must be a network, a torch.nn.Module")
        return None
    signature = signature_of(target)
    known = {*signature.options, *names_of_timm(target, arguments)}
    names = {fact: fact for fact in FACTS} | (TIMM_NAMES if name.startswith("timm.") else {})
    if facts is not None:
        for option, fact in names.items():
            if option in known and option in arguments and not agrees(option, arguments[option], facts[fact]):
                reader.problems.append(unlike_data(f"model.{option}", arguments[option], facts[fact]))
            if option in known:
                arguments[option] = facts[fact]
    if name.startswith("timm."):  # whose classes have classes as defaults, which they alone know to read
        signature = signature._replace(options=given_alone(signature.options))
    provided = FACTS if facts is None else ()
    part = reader.made_of(found, signature, "model", provided=provided)
    found_problems = problems_of_library(part) if part is not None else []
    reader.problems += found_problems
    return None if found_problems else part


def problems_of_library(part: Part) -> list[str]:
    """Returns what is wrong with the name of a network of timm or torchvision, and weights that it would fetch."""
    library = part.name.partition(".")[0]
    if library not in LIBRARIES:
        return []
    given, name = part.arguments, timm_name(part.target, part.arguments)
    if given.get("checkpoint_path"):
        return [f"model.checkpoint_path={given['checkpoint_path']}: give it as init_from"]
    problems = [
        f"model.{option}={word(getattr(given[option], 'name', given[option]))}: give init_from={library}:{name} instead"
        for option in ("pretrained", "weights")
        if given.get(option)
    ]
    backbone = "weights_backbone"  # which torchvision fetches unless told not to
    if backbone in signature_of(part.target).options and given.get(backbone, "the default") is not None:
        problems.append(f"model.{backbone} would be fetched: give model.{backbone}=null")
    if library == "timm" and not inspect.isclass(part.target):
        from timm import is_model, list_models

        if not is_model(name) and ":" not in name:  # hf-hub:owner/name
            likely = list_models(f"{name.partition('.')[0]}*")[:3] or near(name.partition(".")[0], list_models())
            hint = f" (did you mean {', '.join(likely)}?)" * bool(likely)
            problems.append(f"model.model_name={name}: timm has no such model{hint}")
    return problems


def timm_name(target: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the name of the network that a function of timm makes."""
    return str(arguments.get("model_name") or target.__name__)


def agrees(name: str, given: Any, fact: Any) -> bool:
    """Whether a given value is that of the data; one of a wrong type is refused by its type."""
    reader = Reader()
    value = reader.value(int | tuple[int, int] if name in ("image_size", "img_size") else int, given, name)
    return bool(reader.problems) or pair(value) == pair(tuple(fact) if isinstance(fact, list) else fact)


def names_of_timm(target: Any, arguments: Mapping[str, Any]) -> set[str]:
    """Returns the arguments of the network that a function of timm makes, as far as it names the class."""
    if inspect.isclass(target) or not target.__module__.startswith("timm."):
        return set()
    from timm import is_model, model_entrypoint

    name = timm_name(target, arguments)
    made = get_type_hints(model_entrypoint(name)).get("return") if is_model(name) else None
    return {"num_classes", "in_chans", *(signature_of(made).options if inspect.isclass(made) else ())}


@contextlib.contextmanager
def of_option(key: str) -> Iterator[None]:
    """Turns what a part of the config finds wrong when it is made into a UserError that begins with its option.

    Args:
        key: the option; empty where the problems name it themselves.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}.{text}" if key else text for text in error.problems) from error
    except Exception as fault:
        if (place := where(fault)) is None and not isinstance(fault, FAULTS):
            raise
        raise UserError(f"{key}: {place or one_line(fault)}") from fault


@contextlib.contextmanager
def problems_into(reader: Reader, key: str) -> Iterator[None]:
    """Adds what a part of the config finds wrong when it is made, see ``of_option``, to the other problems."""
    try:
        with of_option(key):
            yield
    except UserError as error:
        reader.problems += error.problems


def empty_network(make: Callable[[], nn.Module], key: str = "model") -> nn.Module:
    """Returns a network on the meta device; one that cannot be built there is built and then moved.

    Args:
        make: makes it.
        key: option that errors name.

    Raises:
        UserError: its arguments do not fit, or a layer of it is lazy.
    """
    try:
        with of_option(key), torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    made = make()
            except (NotImplementedError, RuntimeError, UserError) as fault:  # it looks at its own numbers
                if not isinstance(fault, NotImplementedError) and not needs_numbers(fault):
                    raise
                made = make().to("meta")
            way_out = "give the layer its sizes, or pass images through it in __init__"
            lazy = [name for name, weight in made.named_parameters() if is_lazy(weight)]
            refuse([f"{name} has no size before a first batch ({way_out})" for name in lazy[:1]])
            return made
    finally:
        empty_caches()


def needs_numbers(fault: Exception) -> bool:
    """Whether an error comes from looking at numbers, which tensors on the meta device do not have."""
    return re.search(r"\bmeta\b", str(fault)) is not None


def network_from(part: Part, lora: LoraConfig) -> nn.Module:
    network: nn.Module = part.make()
    add_lora(network, lora)
    return network


def make_teacher(place: str, data: ImageData, *, trust: bool = False) -> Teacher:
    """Returns the teacher of a distillation for the student's data, and warns of what was assumed about it."""
    shape, key = (data.in_channels, *data.image_size), "distillation.teacher"
    facts: Any = {"ours": data.place, "make_network": network_in_file, "trust": trust}
    source, columns = open_teacher(place, shape, data.class_names, **facts, key=key)
    for note in source.notes:
        warnings.warn(f"{key}={place}: {note}", stacklevel=2)
    normalised = source.view["mean"], source.view["std"]
    return Teacher(source.network, normalised=normalised, images=(data.mean, data.std), columns=columns)


def network_in_file(config: Mapping[str, Any], folder: Path | None = None) -> nn.Module:
    """Returns the network of a config in plain data, such as one that a file of weights carries.

    Args:
        config: the config, of which ``model`` and ``lora`` are read.
        folder: folder with files of the user's own, where the file of weights is trusted.

    Raises:
        UserError: its class is not there, or does not take its arguments.
    """
    with files_of(folder):
        reader = Reader(ADAPTERS)
        part = part_of_network(reader, flatten(config["model"]), None)
        lora = reader.part(Place(LoraConfig), config.get("lora") or {}, "lora")
        refuse(reader.problems)
        return network_from(part, lora.make())


_OF_VALUES = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
FAULTS = (*_OF_VALUES, OSError, RuntimeError, ImportError, MisconfigurationException)
"""Errors of classes of others about their arguments."""

FILLED_IN = ("network", *FACTS)
"""Arguments that any LightningModule may have: the configured model, and facts of the data."""
CONFIGURED = tuple(name for name in inspect.signature(ViTClassifier).parameters if name not in FILLED_IN)
"""Arguments of ViTClassifier that options of the same name configure."""


def filled_in(kind: type[LightningModule]) -> list[str]:
    """Returns the arguments of a class that are filled in, and so are no options under ``module``."""
    names = (*FILLED_IN, *CONFIGURED) if issubclass(kind, ViTClassifier) else FILLED_IN
    return [name for name in names if name in signature_of(kind).options]


def part_of_module(reader: Reader, config: Config) -> Part | None:
    """Returns the module of a merged config; None if it cannot be made."""
    if config.get("module") is None:
        return Part(ViTClassifier, {})
    if (found := reader.find(LightningModule, config["module"], "module")) is None:
        return None
    name, kind, arguments = found
    if not (inspect.isclass(kind) and issubclass(kind, LightningModule)):
        text = "must be a LightningModule, such as a subclass of ViTClassifier"
        reader.problems.append(f"module.class_path={name} {text}")
        return None
    signature, filled = signature_of(kind), filled_in(kind)
    for fact in [fact for fact in FACTS if fact in filled]:  # compared with the data when there is any
        arguments.pop(fact, None)
    if "network" in arguments and "network" in filled:
        del arguments["network"]
        reader.problems.append("module.network: it is the network of model (give one of the two)")
    if "network" in filled and config.get("model") is None:
        hint = "give model, such as {preset: Ti/4}"
        reader.problems.append(f"model is missing: module.class_path={name} takes a network ({hint})")
    options = {key: option for key, option in signature.options.items() if key not in filled}
    return reader.made_of(found, signature._replace(options=options), "module")


def unlike_data(option: str, given: Any, fact: Any) -> str:
    """Returns the problem of an argument that is a fact of the data, and is given otherwise."""
    return f"{option}={given} does not fit the data, which has {fact} (leave it out)"


def takes(part: Part, key: str) -> bool:
    """Whether the module takes what a group of options configures."""
    if key == "optimizer" and lacks_optimizer(part.target):
        return True
    return ("network" if key == "model" else key) in filled_in(part.target)


def module_from(part: Part, available: Mapping[str, Any]) -> LightningModule:
    """Returns the module of a config.

    Args:
        part: the module.
        available: values of all arguments that are filled in.
    """
    given, kind = {name: available[name] for name in filled_in(part.target)}, part.target
    if not lacks_optimizer(kind):
        made: LightningModule = part.make(**given)
        return made
    more: dict[str, Any] = {"__module__": kind.__module__}
    if getattr(available["optimizer"], "make", None) is not None and not hasattr(kind, "no_decay"):
        more["no_decay"] = lambda self: set()  # as Lightning's command line, which gives its class all weights alike
    module: Any = replace(part, target=type(kind.__name__, (ConfiguredOptimizer, kind), more)).make(**given)
    module.optimizer_config = available["optimizer"]
    return module  # type: ignore[no-any-return]
